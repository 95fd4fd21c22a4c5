"""Pages in Chromium: a server in a thread, and a browser that fails a test for what goes wrong in the page.

The tests skip where playwright or a browser is missing (`pip install playwright`, `apt-get install
chromium`). Scope of a module, not of the session: while Playwright runs no test may start asyncio.
"""

import contextlib
import os
import threading
import time

import pytest

from earlyfusion.eval.website.browser import find_browser, without_priority
from earlyfusion.kernels.errors import UserError


@contextlib.contextmanager
def served(app):
    """The address of an application, served on loopback as long as the block lasts."""
    uvicorn = pytest.importorskip("uvicorn")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    api = pytest.importorskip("playwright.sync_api", reason="pages are tested with playwright: pip install")
    with api.sync_playwright() as made:
        try:
            found = find_browser()
        except UserError as missing:
            pytest.skip(str(missing))
        # Chromium's own sandbox does not start for root.
        words = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = without_priority(found, tmp_path_factory.mktemp("browser"))
        yield made.chromium.launch(executable_path=found, args=words)


@pytest.fixture
def open_page(browser):
    """open_page(address, width=, dark=) -> page; an error of its script or its policy fails the test."""
    wrong, contexts = [], []

    def make(address, width=1000, dark=False):
        size = {"width": width, "height": 740}
        contexts.append(browser.new_context(viewport=size, color_scheme="dark" if dark else "light"))
        contexts[-1].grant_permissions(["clipboard-read", "clipboard-write"])
        page = contexts[-1].new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        # A status of 4xx is told there too, and is no mistake of the page.
        known = "Failed to load resource"
        page.on("console", lambda said: known in said.text or wrong.append(said.text))
        page.goto(address)
        return page

    yield make
    for context in contexts:
        context.close()
    assert not wrong, wrong


NAMELESS = """[...document.querySelectorAll('button, input, select, textarea, summary, img, [role=log]')]
    .filter(one => !(one.labels?.length || one.ariaLabel || one.alt || one.textContent.trim()))
    .map(one => one.outerHTML)"""
"""Controls that a screen reader could not name."""


def check_looks(page, dark):
    """Nothing sticks out sideways, everything has a name, and the colours are those that were asked for."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(NAMELESS) == []
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(paper) < 90) == dark
