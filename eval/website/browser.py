"""Pages in headless Chromium, as pixels and as boxes of text. What is rendered is hostile until proven
otherwise.

    async with Renderer() as renderer:
        view = await renderer.render(html)              # .picture, .blocks
        view = await renderer.render(html, pixels=False)

Walls, each enough for what it is there for: the page is the only answer that any request gets, everything
else is refused before it leaves the browser; behind that, names do not resolve and a proxy that is not there
stands between the browser and all addresses, this machine's too; a policy of the page takes its scripts,
frames, forms and popups; its scripts are off as well. A page has a context of its own, WIDTH pixels, a
deadline, and limits of size; where no pixels are asked for, a context takes REUSED pages one after another,
for making one takes as long as ten pages. A browser that does not answer is killed and started again.

Fonts are those that matplotlib brings, through fontconfig: those that a machine has do not change a page.
"""

import asyncio
import base64
import importlib.util
import io
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from earlyfusion.data.errors import DataError
from earlyfusion.data.synth.pages import WIDTH
from earlyfusion.data.tasks.pages import HEIGHT
from earlyfusion.kernels.errors import UserError, one_line

MOST_HTML, MOST_TAGS = 2_000_000, 30_000
"""Characters and tags of a page that is rendered."""
MOST_HEIGHT = 4000
"""Pixels of a page that are looked at."""
MOST_BLOCKS = 300
"""Texts of a page that are looked at."""
CLOSING_S = 5
"""Seconds that a browser has to close what is asked of it."""
REUSED = 50
"""Pages of one context where only boxes are asked for."""
POLICY = (
    '<!doctype html><meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src'
    " 'unsafe-inline'; img-src data:; font-src data:; form-action 'none'; base-uri 'none'\">"
)
# The first one starts five times as fast: it is the browser without its windows.
NAMES = (
    "chromium-headless-shell",
    "chrome-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
)
FLAGS = (
    "--disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
    " --disable-sync --hide-scrollbars --force-device-scale-factor=1 --force-color-profile=srgb"
    " --dns-prefetch-disable --proxy-server=http://127.0.0.1:9 --proxy-bypass-list=<-loopback>"
    " --force-webrtc-ip-handling-policy=disable_non_proxied_udp --font-render-hinting=none"
).split()
UNRESOLVED = "--host-resolver-rules=MAP * ~NOTFOUND"


class PageError(DataError):
    """A page that cannot be rendered: too large, too slow, or none; the message is one line."""


STYLES = ["color", "visibility", "opacity"]
WHITE = "rgb(255, 255, 255)"


@dataclass(frozen=True)
class Block:
    """A text of a page as it is laid out. box: left, top, width, height in pixels; colour, ground: RGB of its
    letters and of what is behind them."""

    text: str
    box: tuple[float, float, float, float]
    colour: tuple[int, int, int]
    ground: tuple[int, int, int] = (255, 255, 255)


@dataclass(frozen=True)
class View:
    """A page as it is seen. picture: RGB, the whole page, None where no pixels were asked for; refused:
    addresses that it asked for in vain."""

    size: tuple[int, int]
    blocks: list[Block]
    picture: Image.Image | None = None
    refused: list[str] = field(default_factory=list)


def find_browser() -> str:
    """The browser: EARLYFUSION_CHROMIUM, a known name, or Playwright's own. Raises UserError that says how to
    install one."""
    if importlib.util.find_spec("playwright") is None:
        raise UserError("websites need Playwright: pip install 'earlyfusion[website]'")
    given = os.environ.get("EARLYFUSION_CHROMIUM", "")
    found = given or next(filter(None, map(shutil.which, NAMES)), "")
    if not found:
        # Where `playwright install` puts its own, without starting it.
        cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", Path.home() / ".cache/ms-playwright"))
        found = str(next(cache.glob("chromium*/chrome*/chrome*"), ""))
    if not found or not Path(found).is_file():
        told = f"no browser at {given}" if given else "no Chromium found"
        raise UserError(
            f"{told}: apt-get install chromium, or playwright install chromium, or name one in"
            " EARLYFUSION_CHROMIUM"
        )
    return found


def without_priority(browser: str, folder: Path) -> str:
    """A command in that folder that starts the browser without root's right to go before other processes,
    which Chromium would take (niceness -8); with it where root may not give it up."""
    if os.geteuid() or not shutil.which("setpriv"):
        return browser
    path = folder / "browser"
    drop = "setpriv --bounding-set -sys_nice"
    path.write_text(
        f"#!/bin/sh\n{drop} true 2>/dev/null && drop='{drop}' || drop=\n"
        f'exec $drop {shlex.quote(browser)} "$@"\n'
    )
    path.chmod(0o700)
    return str(path)


def fonts_file(folder: Path) -> Path:
    """A configuration of fontconfig that knows the fonts of matplotlib and no other."""
    # Found without importing it: only its files are of use.
    package = Path(str(importlib.util.find_spec("matplotlib").origin)).parent  # type: ignore[union-attr]
    fonts = package / "mpl-data" / "fonts" / "ttf"
    names = {"sans-serif": "DejaVu Sans", "serif": "DejaVu Serif", "monospace": "DejaVu Sans Mono"}
    aliases = "".join(
        f"<alias><family>{one}</family><prefer><family>{font}</family></prefer></alias>"
        for one, font in names.items()
    )
    path = folder / "fonts.conf"
    path.write_text(
        '<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig>'
        f"<dir>{fonts}</dir><cachedir>{folder / 'fonts'}</cachedir>{aliases}</fontconfig>"
    )
    return path


class Renderer:
    """A browser, `workers` pages of it at a time. For pages of one's own, scripts: run those of the page;
    reuse: a context takes REUSED pages, also where pixels are asked for."""

    def __init__(
        self,
        *,
        workers: int = 4,
        timeout_s: float = 5.0,
        scripts: bool = False,
        reuse: bool = False,
    ) -> None:
        self.path, self.timeout_s, self.scripts = find_browser(), timeout_s, scripts
        self.reuse = reuse
        self.room = asyncio.Semaphore(workers)
        self.starting = asyncio.Lock()
        self.standing: list[Tab] = []
        self.browser: Any = None
        self.work: Any = None
        self.play: Any = None

    async def __aenter__(self) -> "Renderer":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def start(self) -> Any:
        """The running browser; starts one where there is none."""
        async with self.starting:
            if self.browser is not None and self.browser.is_connected():
                return self.browser
            await self._stop()
            from playwright.async_api import async_playwright

            # Everything the browser writes lies in one folder that goes with it.
            self.work = tempfile.TemporaryDirectory(prefix="earlyfusion-pages-", ignore_cleanup_errors=True)
            folder = Path(self.work.name)
            outside = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "TMPDIR")}
            self.play = await async_playwright().start()
            words = [*FLAGS, UNRESOLVED, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
            self.browser = await self.play.chromium.launch(
                executable_path=without_priority(self.path, folder),
                args=words,
                env=outside | {"FONTCONFIG_FILE": str(fonts_file(folder)), "HOME": str(folder)},
            )
            return self.browser

    async def close(self) -> None:
        """Stop the browser."""
        async with self.starting:
            await self._stop()

    async def _stop(self) -> None:
        browser, play, work = self.browser, self.play, self.work
        self.standing.clear()
        self.browser = self.play = self.work = None
        for ending in (browser and browser.close, play and play.stop):
            if ending:
                # Gone already, or does not answer: what is left ends with its parent.
                with suppress(Exception):
                    await asyncio.wait_for(ending(), CLOSING_S)
        if work is not None:
            work.cleanup()

    async def render(self, html: str, *, pixels: bool = True) -> View:
        """The page as it looks. Raises PageError."""
        (view,) = await self.steps(html, pixels=pixels)
        return view

    async def steps(
        self, html: str, clicks: Sequence[Sequence[str]] = (), *, pixels: bool = True
    ) -> list[View]:
        """The page at first and after every group of clicks, each on the first element with that text; one
        that is not there is passed over. Raises PageError."""
        if len(html) > MOST_HTML or html.count("<") > MOST_TAGS:
            size = f"{len(html):,} characters, {html.count('<'):,} tags"
            raise PageError(f"page of {size}; at most {MOST_HTML:,} and {MOST_TAGS:,}")
        if not html.strip():
            raise PageError("an empty page")
        async with self.room:
            for attempt in range(2):
                browser = await self.start()
                try:
                    return await asyncio.wait_for(self._views(html, clicks, pixels), self.timeout_s)
                except TimeoutError:
                    # Whoever waits longer would wait for a page that has the browser's attention.
                    if self.browser is browser:
                        await self.close()
                    raise PageError(f"not rendered within {self.timeout_s:g} s") from None
                except Exception as error:
                    # The browser may have been killed for the sake of another page: this one gets its turn.
                    if attempt or self.browser is browser:
                        raise PageError(f"not rendered: {one_line(error, 160)}") from None
        raise AssertionError("the second attempt returns or raises")

    async def _views(self, html: str, clicks: Sequence[Sequence[str]], pixels: bool) -> list[View]:
        again = self.reuse or not (pixels or self.scripts or clicks)
        tab = self.standing.pop() if again and self.standing else await self.open()
        kept = False
        try:
            await tab.show(html, self.scripts)
            views = [await self._view(tab.seeing, pixels, tab.refused)]
            for group in clicks:
                for text in group:
                    place = tab.page.get_by_text(text, exact=True).first
                    if await place.count():
                        await place.click(timeout=1000 * self.timeout_s / 4)
                views.append(await self._view(tab.seeing, pixels, tab.refused))
            tab.shown += 1
            kept = again and tab.shown < REUSED and not tab.refused
            return views
        finally:
            if kept:
                self.standing.append(tab)
            else:
                await tab.close()

    async def open(self, motion: bool = False) -> "Tab":
        """A context of its own with one page that can reach nothing. motion: with its animations."""
        context = await (await self.start()).new_context(
            viewport={"width": WIDTH, "height": HEIGHT},
            java_script_enabled=self.scripts,
            accept_downloads=False,
            service_workers="block",
            reduced_motion="no-preference" if motion else "reduce",
        )
        refused: list[str] = []

        async def refuse(route: Any) -> None:
            refused.append(route.request.url[:200])
            await route.abort("aborted")

        await context.route("**/*", refuse)
        page = await context.new_page()
        seeing = await context.new_cdp_session(page)
        frame = (await seeing.send("Page.getFrameTree"))["frameTree"]["frame"]["id"]
        return Tab(context, page, seeing, frame, refused)

    async def _view(self, seeing: Any, pixels: bool, refused: list[str]) -> View:
        """What the browser's own tools say of the page: no script of it is asked."""
        asked = {"computedStyles": STYLES, "includeBlendedBackgroundColors": True}
        told = await seeing.send("DOMSnapshot.captureSnapshot", asked)
        content = told["documents"][0]["contentHeight"]
        # A page that is shorter than its window ends where its own elements end.
        height = content if content > HEIGHT else extent_of(told) or content
        size = WIDTH, int(min(MOST_HEIGHT, max(1, height)))
        picture = None
        if pixels:
            clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
            options = {"format": "png", "clip": clip, "captureBeyondViewport": True, "optimizeForSpeed": True}
            shot = await seeing.send("Page.captureScreenshot", options)
            picture = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
        return View(size, blocks_of(told), picture, refused)


@dataclass
class Tab:
    """A context and its one page."""

    context: Any
    page: Any
    seeing: Any
    frame: str
    refused: list[str]
    shown: int = 0

    async def close(self) -> None:
        """Close the context; a browser that does not answer is not waited for."""
        with suppress(Exception):
            await asyncio.wait_for(self.context.close(), CLOSING_S)

    async def show(self, html: str, scripts: bool) -> None:
        """Put a document in the page's place, under the policy."""
        if scripts:
            await self.page.set_content(html, wait_until="load")
            return
        # Before everything else, also before a doctype of the page: what comes after it joins the same head.
        whole = POLICY + re.sub(r"(?i)<!doctype[^>]*>", "", html, count=1)
        await self.seeing.send("Page.setDocumentContent", {"frameId": self.frame, "html": whole})
        if "data:" in html:
            await self.page.wait_for_load_state("load")


def extent_of(snapshot: Any) -> float:
    """Where the last box of a page ends, in pixels from the top; boxes that fill the window are not asked."""
    document, strings = snapshot["documents"][0], snapshot["strings"]
    layout, names = document["layout"], document["nodes"]["nodeName"]
    ends = [0.0]
    for node, box in zip(layout["nodeIndex"], layout["bounds"]):
        if strings[names[node]] not in ("#document", "HTML"):
            ends.append(box[1] + box[3])
    return max(ends)


def blocks_of(snapshot: Any) -> list[Block]:
    """The visible texts of a DOMSnapshot.captureSnapshot (Chrome DevTools Protocol), as laid out."""
    strings, found = snapshot["strings"], []
    for document in snapshot["documents"][:1]:
        layout, parents, grounds = document["layout"], document["nodes"]["parentIndex"], {}
        rows = (layout[name] for name in ("nodeIndex", "text", "bounds", "styles", "blendedBackgroundColors"))
        for node, text, box, style, below in zip(*rows):
            if len(style) < len(STYLES):
                continue
            colour, visible, opacity = (strings[one] for one in style)
            if text < 0:
                # Of elements, with what shines through; a text has that of its own.
                grounds[node] = strings[below] if below >= 0 else WHITE
            said = " ".join(strings[text].split()) if text >= 0 else ""
            if said and min(box[2:]) > 0 and visible == "visible" and float(opacity) > 0:
                ground = rgb(grounds.get(parents[node], WHITE))
                found.append(Block(said[:400], tuple(box), rgb(colour), ground))
    return found[:MOST_BLOCKS]


def rgb(colour: str) -> tuple[int, int, int]:
    """ "rgb(1, 2, 3)" or "rgba(...)" as numbers; black for another notation."""
    parts = colour.removeprefix("rgba").removeprefix("rgb").strip("()").split(",")
    try:
        red, green, blue = (int(float(part)) for part in parts[:3])
    except ValueError:
        return 0, 0, 0
    return red, green, blue
