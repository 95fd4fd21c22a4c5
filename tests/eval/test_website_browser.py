"""Pages in Chromium: what is hostile stays inside, what is rendered is what the page says."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from difflib import SequenceMatcher
from pathlib import Path
from random import Random
from statistics import fmean

import numpy as np
import pytest
from PIL import Image as PILImage

from earlyfusion.data.chat.template import Message
from earlyfusion.data.sample import Image, Text
from earlyfusion.data.synth.pages import WIDTH, damaged, draw, parse_dsl, to_dsl, to_html
from earlyfusion.data.tasks.pages import HEIGHT, HOLD_S, MOVE_S, Seen
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.eval.website.browser import PageError, Renderer, find_browser
from earlyfusion.eval.website.record import CLIP_FPS, film, filmed, write_pages
from earlyfusion.eval.website.score import interaction, score
from earlyfusion.kernels.errors import UserError
from earlyfusion.rl.environments import website
from earlyfusion.rl.environments.base import EnvironmentFault, Loop
from earlyfusion.rl.environments.website import Website

pytest.importorskip("skimage", reason="pip install 'earlyfusion[website]'")
try:
    find_browser()
except UserError as missing:
    pytest.skip(str(missing), allow_module_level=True)


def run(work):
    """work(renderer) with a browser of its own, which ends with it."""

    async def inside():
        # On a busy machine a page may wait long.
        async with Renderer(timeout_s=60) as renderer:
            return await work(renderer)

    return asyncio.run(inside())


def test_boxes_are_those_of_the_page_and_the_score_sees_damage():
    pages = [draw(Random(seed), ("template", "combination")[seed % 2]) for seed in range(6)]

    async def work(renderer):
        render = lambda page, **how: renderer.render(to_html(page), **how)
        views = await asyncio.gather(*map(render, pages))
        bare = await asyncio.gather(*(render(page, pixels=False) for page in pages))
        other = [score(a, b).mean for a, b in zip(views[1:] + views[:1], views)]
        damaged = []
        for page in pages:
            wrong = page.sections[1]._replace(tone="dark" if page.sections[1].tone != "dark" else "soft")
            toned = page.__class__(page.palette, page.font, page.density, (page.sections[0], wrong))
            short = page.__class__(page.palette, page.font, page.density, page.sections[:-1])
            damaged.append([await render(one) for one in (short, toned)])
        return views, bare, other, damaged

    views, bare, other, damaged = run(work)
    for page, view, boxes, (short, toned) in zip(pages, views, bare, damaged):
        hidden = {text for s in page.sections if s.kind in ("tabs", "accordion") for text in s.texts[1::2]}
        shown = {" ".join(text.split()) for text in page.texts()} - hidden
        assert shown <= {block.text for block in view.blocks} and view.picture.size == view.size
        assert view.size[0] == WIDTH and boxes.picture is None and boxes.blocks == view.blocks
        assert 1 == score(view, view).mean > score(short, view).mean > score(toned, view).mean
        # What stands behind a text is the colour that most of its box has; a marker fills its own.
        for block in view.blocks:
            left, top, width, height = block.box
            box = int(left), int(top), int(left + width), int(top + height)
            colours = view.picture.crop(box).getcolors(1 << 20)
            assert len(block.text) == 1 or max(colours)[1] == block.ground
    # A page that nobody looked at: the floor that a model has to leave behind.
    assert fmean(other) < 0.35


@pytest.mark.slow
def test_of_two_pages_the_better_one_is_that_of_ssim_and_text():
    """50 pairs of drafts, one to six mistakes each, some of another page: where the mean of SSIM and of the
    words' agreement (0.1 apart or more) is clear, the score says the same nine times in ten."""
    from skimage.metrics import structural_similarity

    pages = [draw(Random(seed), ("template", "combination")[seed % 2]) for seed in range(50)]
    drafts = []
    for seed, page in enumerate(pages):
        rng = Random(f"pair/{seed}")
        for _ in range(2):
            draft = page if rng.random() < 0.8 else rng.choice(pages)
            for _ in range(rng.randint(1, 6) if rng.random() < 0.9 else 0):
                draft = damaged(draft, rng)
            drafts.append(draft)

    async def work(renderer):
        return await asyncio.gather(*(renderer.render(to_html(page)) for page in [*pages, *drafts]))

    def other(seen, wanted):
        grey = []
        for view in (seen, wanted):
            # Padded to one height, white: SSIM wants equal sizes.
            canvas = PILImage.new("L", (WIDTH, max(seen.size[1], wanted.size[1])), 255)
            canvas.paste(view.picture.convert("L"))
            grey.append(np.asarray(canvas))
        said = [" ".join(block.text for block in view.blocks).split() for view in (seen, wanted)]
        return (structural_similarity(*grey) + SequenceMatcher(None, *said, autojunk=False).ratio()) / 2

    views = run(work)
    wanted, seen = views[:50], views[50:]
    clear = agreed = 0
    for number, page in enumerate(wanted):
        pair = seen[2 * number : 2 * number + 2]
        theirs = [other(one, page) for one in pair]
        ours = [score(one, page).mean for one in pair]
        if abs(theirs[0] - theirs[1]) >= 0.1:
            clear += 1
            agreed += (ours[0] > ours[1]) == (theirs[0] > theirs[1])
    print(f"{agreed} of {clear} clear pairs")
    assert clear >= 20 and agreed >= 0.9 * clear


def test_tabs_and_accordions_open_without_a_script_and_are_scored_by_what_they_do():
    page = next(p for p in (draw(Random(seed)) for seed in range(99)) if {"tabs", "accordion"} <= {*p.kinds})

    async def work(renderer):
        steps = [[text] for text in page.hidden()]
        return await renderer.steps(to_html(page), steps), await renderer.steps(
            to_html(page), [[]] * len(steps)
        )

    views, still = run(work)
    seen = {block.text for view in views for block in view.blocks}
    assert {" ".join(text.split()) for text in page.texts()} <= seen
    assert interaction(views, views) == pytest.approx(1)
    assert interaction(still, views) < 0.3


def test_a_clip_is_the_page_scrolled(tmp_path):
    page = next(p for p in (draw(Random(seed)) for seed in range(99)) if len(p.kinds) == 3 and not p.hidden())
    html = to_html(page)
    made = asyncio.run(filmed(html))
    whole = run(lambda renderer: renderer.render(html)).picture
    assert {frame.size for frame in made} == {(WIDTH, HEIGHT)}
    assert made[0].tobytes() == whole.crop((0, 0, WIDTH, HEIGHT)).tobytes()
    # The same page filmed in a window that really scrolls: what it shows at every stop is what was cut out.
    scrolled = run(lambda renderer: film(renderer, html, whole.height))
    stops = {frame.tobytes() for frame in made[:: round(CLIP_FPS * (HOLD_S + MOVE_S))]}
    assert len(stops) > 1 and stops <= {frame.tobytes() for frame in scrolled}
    moving = "<style>@keyframes a{from{margin:0}to{margin:90px}}p{animation:a 1s infinite}</style><p>x</p>"
    assert len({frame.tobytes() for frame in asyncio.run(filmed(moving))}) > 3


LISTEN = "127.0.0.1"


WAYS = """\
<img src={0}>
<img srcset='{0} 2x'>
<picture><source srcset={0}><img></picture>
<script src={0}></script>
<script>fetch('{0}')</script>
<link rel=stylesheet href={0}>
<link rel=preload as=image href={0}>
<link rel=prefetch href={0}>
<link rel=preconnect href={0}>
<link rel=dns-prefetch href={0}>
<link rel=icon href={0}>
<link rel=manifest href={0}>
<link rel=modulepreload href={0}>
<link rel=prerender href={0}>
<iframe src={0}></iframe>
<iframe srcdoc='<img src={0}>'></iframe>
<object data={0}></object>
<embed src={0}>
<video src={0} poster={0} autoplay></video>
<audio src={0} autoplay></audio>
<video><track default src={0}></video>
<input type=image src={0}>
<body background={0}>
<table background={0}><td>x</table>
<svg><image href={0} /></svg>
<svg><use href='{0}#a'/></svg>
<svg><script href={0}></script></svg>
<svg><feImage href={0} /></svg>
<meta http-equiv=refresh content='0;url={0}'>
<base href={0}><img src=y>
<form action={0}><input autofocus><script>document.forms[0].submit()</script></form>
<a ping={0} href={0}>x</a>
<a href={0} target=_blank>x</a>
<a download href={0}>x</a>
<style>@import '{0}';</style>
<style>@import url({0});</style>
<style>body{{background:url({0})}}</style>
<style>body{{background:image-set('{0}' 1x)}}</style>
<style>li{{list-style-image:url({0})}}</style><li>x
<style>p{{cursor:url({0}),auto}}</style><p>x
<style>@font-face{{font-family:a;src:url({0})}}p{{font-family:a}}</style><p>x
<style>p::before{{content:url({0})}}</style><p>x
<style>p{{border-image:url({0}) 9}}</style><p>x
<style>p{{mask-image:url({0})}}</style><p>x
<style>p{{filter:url({0}#f)}}</style><p>x
<style>p{{shape-outside:url({0});float:left}}</style><p>x
<style>p{{clip-path:url({0}#c)}}</style><p>x
<p style='background:url({0})'>x
<script>new WebSocket('ws://127.0.0.1:{1}/')</script>
<script>navigator.serviceWorker.register('{0}')</script>
<script>open('{0}')</script>
<script>new RTCPeerConnection({{iceServers:[{{urls:'stun:127.0.0.1:{1}'}}]}})</script>
<script>for(;;);</script>
<script>location='{0}'</script>
<img src=file:///etc/passwd>
<iframe src=file:///etc/passwd></iframe>
<link rel=stylesheet href=file:///etc/passwd>
<img src=x onerror="fetch('{0}')">
<svg onload="fetch('{0}')">
<details open ontoggle="fetch('{0}')">x</details>
<portal src={0}></portal>
<fencedframe src={0}></fencedframe>
<style>p{{width:calc(1px*1e30);height:1e30px}}</style><p>x
<div style='zoom:1e9'>x</div>
<marquee>x</marquee>
<img src=http://evil.invalid/a>
<img src=https://example.com/a>
<img src=//[::1]:{1}/a>
<isindex action={0}>"""
"""A line a way out; {0} is an address, {1} its port."""
AROUND = """\
<!doctype html><p>hello</p>{0}
{0}
<html><head>{0}</head><body>x
<table><tr><td>{0}
<svg><foreignObject width=99 height=99>{0}</foreignObject></svg>
<noscript>{0}</noscript><template shadowrootmode=open>{0}</template>
<p>x<!--><script>--></p><math><mtext>{0}
<meta http-equiv=Content-Security-Policy content="default-src * 'unsafe-inline'">{0}"""
"""What stands around it: heads, other parsers' modes, and a policy that allows everything."""


def hostile(port):
    """Pages that try to leave, by every way that HTML and CSS have."""
    u = f"http://{LISTEN}:{port}/x"
    for tag in WAYS.splitlines():
        for around in AROUND.splitlines():
            yield around.format(tag.format(u, port))


class Listener(threading.Thread):
    """Counts who connects to a port of this machine, by TCP and by UDP."""

    def __enter__(self):
        self.sockets = [
            socket.socket(socket.AF_INET, kind) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)
        ]
        self.sockets[0].bind((LISTEN, 0))
        self.port = self.sockets[0].getsockname()[1]
        self.sockets[1].bind((LISTEN, self.port))
        self.sockets[0].listen()
        self.found = []
        for one in self.sockets:
            one.settimeout(0.2)
        self.stop = False
        self.start()
        return self

    def run(self):
        while not self.stop:
            for one, take in zip(self.sockets, ("accept", "recvfrom")):
                try:
                    self.found.append(getattr(one, take)(*((9,) if take == "recvfrom" else ())))
                except TimeoutError:
                    continue

    def __exit__(self, *_):
        self.stop = True
        self.join()
        for one in self.sockets:
            one.close()


@pytest.mark.slow
def test_hostile_pages_stay_inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calm = to_html(draw(Random(1)))
    with Listener() as listener:
        # The listener hears: otherwise nothing below would mean anything.
        socket.create_connection((LISTEN, listener.port)).close()
        pages = [*hostile(listener.port)]
        pages += [
            "<div>" * 29_000,
            "<p>x" * 29_000,
            "<table><td>" * 9_000,
            "x" * 1_900_000,
            "<b>" * 40_000,
            "\x00" * 99,
        ]
        pages += [
            "<style>" + "a{color:red}" * 90_000 + "</style><p>x",
            "<svg>" + "<g>" * 9_000,
            "<p>x" * 250_000,
        ]

        async def work(renderer):
            before = await renderer.render(calm)
            ends = {"rendered": 0, "refused": 0}
            # Everything twice, and again without pixels, where contexts are used again.
            for number, page in enumerate([*pages, *pages]):
                try:
                    await renderer.render(page, pixels=number < len(pages))
                    ends["rendered"] += 1
                except PageError as error:
                    assert "\n" not in str(error)
                    ends["refused"] += 1
            after = await renderer.render(calm)
            return before, after, ends

        before, after, ends = run(work)
        threading.Event().wait(1)
        assert len(listener.found) == 1, listener.found[1:]
    assert sum(ends.values()) >= 1000 and ends["rendered"] > 500
    assert before.picture.tobytes() == after.picture.tobytes() and before.blocks == after.blocks
    assert [*tmp_path.iterdir()] == []


def test_a_page_that_takes_too_long_costs_itself_alone(monkeypatch):
    """Not those that are rendered at the same time, whose browser is killed with it."""

    async def work(renderer):
        await renderer.render("<p>x</p>")
        view, seen = renderer._view, []

        async def slow(*given):
            seen.append(given)
            # The first page never ends; the second is still at work when the browser is killed.
            await asyncio.sleep({1: 99, 2: 4}.get(len(seen), 0))
            return await view(*given)

        monkeypatch.setattr(renderer, "_view", slow)
        renderer.timeout_s = 2
        stuck = asyncio.create_task(renderer.render("<p>stuck</p>"))
        await asyncio.sleep(0.5)
        renderer.timeout_s = 60
        other = asyncio.create_task(renderer.render("<p>other</p>"))
        with pytest.raises(PageError, match="not rendered within"):
            await stuck
        return await other, len(seen)

    view, looks = run(work)
    assert [block.text for block in view.blocks] == ["other"]
    assert looks == 3, "the second page was not rendered again"


def processes(folder):
    """Numbers of the processes that have this folder in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # ended, or another user's
            if folder.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


only_linux = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")


@only_linux
def test_no_process_is_left_behind():
    words = (
        "import asyncio; from earlyfusion.eval.website.browser import Renderer\n"
        "async def main():\n"
        "    renderer = Renderer(timeout_s=60); await renderer.render('<p>x')\n"
        "    print(renderer.work.name, flush=True); input()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        folder = running.stdout.readline().strip()
        assert processes(folder), "nothing to look for"
        running.communicate("\n", timeout=120)
    for _ in range(50):
        found = processes(folder)
        if not found:
            return
        threading.Event().wait(0.2)
    pytest.fail(f"left: {found} of {os.getpid()}")


@only_linux
def test_the_browser_does_not_go_before_everything_else():
    async def work(renderer):
        await renderer.render("<p>x")
        return [os.getpriority(os.PRIO_PROCESS, one) for one in processes(renderer.work.name)]

    niceness = run(work)
    assert niceness and min(niceness) >= os.getpriority(os.PRIO_PROCESS, 0)


def problem_of(page, shown):
    return Problem("write this page", None, "", "", "", "", "", {"graph": Seen(to_html(page), shown, "")})


def test_the_environment_pays_what_the_last_page_is_worth_and_shows_it():
    page, other = draw(Random(1)), draw(Random(2))
    said = lambda text: Message("assistant", (Text(text),))

    async def work(renderer):
        wanted = await renderer.render(to_html(page))
        made = Website(revisions=2)
        assert made.reset(problem_of(page, Image(wanted.picture)))[-1].role == "user"
        steps = [await made.step(said(text)) for text in ("nothing", to_dsl(other), to_dsl(page))]
        boxes = Website(pixels=False)
        boxes.reset(problem_of(page, Image(wanted.picture)))
        return steps, await boxes.step(said(to_html(page)))

    (nothing, wrong, right), boxes = run(work)
    assert nothing.reward == 0 and "That is no page" in nothing.messages[0].text and not nothing.done
    assert 0 < wrong.reward < 0.5 and isinstance(wrong.messages[0].content[0], Image)
    assert right.done and nothing.reward + wrong.reward + right.reward == pytest.approx(1)
    assert boxes.done and boxes.reward == pytest.approx(1)
    # Left running, each loop's browser and its driver would stay as long as the process.
    assert not website._browsers
    loop = Loop()
    pending = loop.submit(website.rendered("<p>one</p>", False), 60)
    again = loop.submit(website.rendered("<p>one</p>", False), 60)
    loop.flush()
    assert again.result() is pending.result(), "one page was rendered twice"
    assert pending.result().blocks[0].text == "one" and len(website._browsers) == 1
    renderer = next(iter(website._browsers.values()))[0]
    # What failed is tried again: the machine may only have been busy.
    for _ in range(2):
        empty = loop.submit(website.rendered(" ", False), 60)
        loop.flush()
        with pytest.raises(PageError, match="an empty page"):
            empty.result()
        assert (" ", False) not in next(iter(website._browsers.values()))[1]
    loop.close()
    assert not website._browsers and renderer.browser is None
    with pytest.raises(EnvironmentFault, match="use the task pages"):
        Website().reset(Problem("?", None, "", "", "", "", ""))
    with pytest.raises(EnvironmentFault, match="expected 0 or more"):
        Website(revisions=-1)


def test_pages_are_written_for_both_sides(tmp_path):
    rows = asyncio.run(write_pages(tmp_path, 10, own=["<p>mine</p>"], heldout=True))
    told = [json.loads(line) for line in rows.open()]
    assert {row["side"] for row in told[:10]} == {"train", "part", "template", "combination"}
    assert told[10]["html"] == "<p>mine</p>" and told[10]["side"] == "template"
    assert all((tmp_path / row["file"]).is_file() for row in told)
    assert told[10]["texts"][0][0] == "mine"
    for row in told[:10]:
        assert {text for text, *_ in row["texts"]} <= {*parse_dsl(row["page"])[0].texts()}
