"""`earlyfusion bench website`: pages rendered and scored a second, with pixels and by boxes of texts alone.

Beside them Playwright as it is used by hand: a new context, set_content and a full-page screenshot a page,
without a score.
"""

import asyncio
import os
import time
from random import Random
from typing import Any

from pydantic import PositiveInt

from earlyfusion.data.options import Options, verb
from earlyfusion.data.synth.pages import WIDTH, damaged, draw, to_html
from earlyfusion.data.tasks.pages import HEIGHT
from earlyfusion.eval.website.browser import Renderer, find_browser
from earlyfusion.eval.website.score import score
from earlyfusion.pipeline.bench.frame import Result, alternate, compared, run_side, save_record
from earlyfusion.pipeline.figures import show

SIDES = ("pixels", "boxes", "playwright")


class WebsiteOptions(Options):
    pages: PositiveInt = 300
    """pages of a round, so many that the contexts' beginning is not what is measured"""
    workers: PositiveInt = 4
    """pages at a time"""
    rounds: PositiveInt = 2
    """rounds, each side once a round"""
    out: str = "runs/bench/website.json"
    """where the numbers are saved"""


async def by_hand(documents: list[str], workers: int) -> float:
    """Every document with Playwright's own calls; seconds, the start of the browser left out."""
    from playwright.async_api import async_playwright

    room = asyncio.Semaphore(workers)
    async with async_playwright() as play:
        words = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await play.chromium.launch(executable_path=find_browser(), args=words)

        async def one(html: str) -> None:
            async with room:
                size: Any = {"width": WIDTH, "height": HEIGHT}
                context = await browser.new_context(viewport=size, java_script_enabled=False)
                page = await context.new_page()
                await page.set_content(html)
                await page.screenshot(full_page=True)
                await context.close()

        begun = time.perf_counter()
        await asyncio.gather(*map(one, documents))
        return time.perf_counter() - begun


def measured(side: str, pages: int, workers: int) -> Result:
    """One side, without the start of its browser."""
    drawn = [draw(Random(number)) for number in range(pages)]
    documents = [to_html(damaged(page, Random(7))) for page in drawn]

    async def ours() -> float:
        async with Renderer(workers=workers, timeout_s=120) as renderer:
            pixels = side == "pixels"
            wanted = await asyncio.gather(*(renderer.render(to_html(p), pixels=pixels) for p in drawn))
            score(wanted[0], wanted[0])  # imports what the score needs
            begun = time.perf_counter()

            async def one(html: str, number: int) -> None:
                score(await renderer.render(html, pixels=pixels), wanted[number])

            await asyncio.gather(*(one(html, number) for number, html in enumerate(documents)))
            return time.perf_counter() - begun

    seconds = asyncio.run(by_hand(documents, workers) if side == "playwright" else ours())
    return {"pages_per_s": pages / seconds, "seconds": seconds}


@verb
def website(options: WebsiteOptions) -> None:
    """Entry of `earlyfusion bench website`."""
    given = options.model_dump(mode="json", include={"pages", "workers"})
    columns = compared(
        alternate(SIDES, options.rounds, lambda side: run_side(measured, {"side": side, **given}))
    )
    show("pages rendered and scored", columns)
    save_record(options.out, options.model_dump(mode="json"), comparison=columns)
