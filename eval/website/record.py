"""Pages rendered to train on, and clips of pages as mp4.

    asyncio.run(write_pages("runs/pages", 5000, seed=0))
    write_mp4(asyncio.run(filmed(html)), Path("clip.mp4"))

A page that stands still is one picture of its whole height: the frames of its clip are cut out of it, equal
to those of a scrolled window pixel by pixel. One that moves is filmed while it is scrolled.
"""

import asyncio
import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from earlyfusion.data.synth.graph import on_side
from earlyfusion.data.synth.pages import damaged, draw, to_dsl, to_html
from earlyfusion.data.tasks.pages import HOLD_S, MOVE_S, ROWS, frames, places_of, row_of
from earlyfusion.eval.website.browser import PageError, Renderer
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record, write_atomic, write_jsonl

CLIP_FPS = 8
"""Frames of a second of a recorded clip."""
DRAFTS = 3
"""Of so many pages one comes with a draft."""
SIDES = (*("train",) * 5, *("part",) * 3, "template", "combination")
"""Sides of the split, in turn: a fifth of the pages is held out."""


async def write_pages(
    folder: Path,
    count: int,
    seed: int = 0,
    own: Sequence[str] = (),
    told: Callable[[int], None] = lambda done: None,
    heldout: bool = False,
) -> Path:
    """Render `count` generated pages and the documents of `own`, a share of those held out or all; returns
    the file of rows, written last. Raises PageError."""
    rows: list[Record] = [{}] * (count + len(own))
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    done = 0

    async def one(number: int, renderer: Renderer) -> None:
        nonlocal done
        if number < count:
            side = SIDES[number % len(SIDES)]
            drawn = draw(Random(f"pages/{seed}/{number}"), side)
            html, hidden = to_html(drawn), drawn.hidden()
        else:
            drawn, html, hidden = None, own[number - count], []
            side = "template" if heldout or on_side(html, heldout=True) else "train"
        # All that is hidden is opened, and seen in one more picture.
        views = {"file": await renderer.render(html)}
        if hidden:
            views["opened"] = (await renderer.steps(html, [hidden]))[-1]
        # Without marks, such as the triangle of what can be opened.
        seen = [one for one in views["file"].blocks if any(map(str.isalnum, one.text))]
        texts = [(one.text, *map(round, one.box)) for one in seen]
        row = row_of(drawn or html, side, texts=texts)
        if drawn is not None and side != "part" and number % DRAFTS == 0:
            draft = damaged(drawn, Random(f"draft/{seed}/{number}"))
            views["drafted"] = await renderer.render(to_html(draft))
            row["draft"] = to_dsl(draft)
        for name, view in views.items():
            assert view.picture is not None
            row[name] = f"pictures/{number:06d}-{name}.png"
            view.picture.quantize(64).save(folder / row[name])
        rows[number] = row
        done += 1
        told(done)

    async with Renderer(reuse=True, timeout_s=60) as renderer:
        # Bounded, so that what waits does not run out of its time.
        for begin in range(0, len(rows), 64):
            await asyncio.gather(*(one(i, renderer) for i in range(begin, min(len(rows), begin + 64))))
    return write_jsonl(folder / ROWS, rows)


def write_mp4(pictures: Sequence[Image.Image], path: Path, fps: float = CLIP_FPS) -> Path:
    """Frames of one size as H.264. Raises UserError without PyAV, ValueError for no frame."""
    try:
        import av
    except ImportError:
        raise UserError("clips need PyAV: pip install 'earlyfusion[video]'") from None
    if not pictures:
        raise ValueError("a clip of no frames")
    # H.264 halves the colours: sides are even.
    width, height = (side - side % 2 for side in pictures[0].size)
    made = io.BytesIO()
    with av.open(made, "w", format="mp4") as output:
        stream: Any = output.add_stream("libx264", rate=round(fps))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"crf": "14", "preset": "veryfast"}
        for picture in pictures:
            pixels = np.asarray(picture.convert("RGB").crop((0, 0, width, height)))
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode())
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_atomic(path, made.getvalue())


async def filmed(html: str, clicks: Sequence[str] = (), scripts: bool = False) -> list[Image.Image]:
    """Frames of a page of one's own, CLIP_FPS a second: scrolled from top to bottom, opened by `clicks` where
    that changes what is seen. scripts: run those of the page. Raises PageError."""
    async with Renderer(scripts=scripts, timeout_s=60) as renderer:
        views = await renderer.steps(html, [clicks] if clicks else [])
        again = await renderer.render(html)
        first, opened = views[0].picture, views[-1].picture if clicks else None
        if first is None or again.picture is None:
            raise PageError("no picture of the page")
        # One picture is enough for what looks the same twice and has nothing that moves.
        if not _moves(html) and first.tobytes() == again.picture.tobytes():
            return frames(first, opened, CLIP_FPS)
        return await film(renderer, html, first.height)


def _moves(html: str) -> bool:
    """Whether a page may look different while it is watched or scrolled."""
    signs = ("@keyframes", "position:fixed", "position:sticky", "<animate", "<video")
    return any(sign in html for sign in signs)


async def film(renderer: Renderer, html: str, height: int) -> list[Image.Image]:
    """Pictures of the window, CLIP_FPS a second by the clock, while the page is scrolled. A page that keeps
    the browser busy gives fewer different ones."""
    tab = await renderer.open(motion=True)
    try:
        await tab.show(html, renderer.scripts)
        places, period = places_of(height), HOLD_S + MOVE_S
        made: list[Image.Image] = []
        clock = asyncio.get_running_loop().time
        begun, at = clock(), 0
        for number in range(round(len(places) * period * CLIP_FPS)):
            await asyncio.sleep(max(0.0, begun + number / CLIP_FPS - clock()))
            here = places[min(int(number / CLIP_FPS / period), len(places) - 1)]
            if here != at:
                await tab.page.mouse.wheel(0, here - at)
                at = here
            shot = await tab.seeing.send(
                "Page.captureScreenshot", {"format": "png", "optimizeForSpeed": True}
            )
            made.append(Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB"))
        return made
    finally:
        await tab.close()
