"""Pages written from what is seen, paid by how they look in a real browser.

    environment = "website"
    environment_options = { revisions = 1 }
    tasks = [{ name = "pages", chat = true, difficulty = 2, options = { path = "runs/pages" } }]

The assistant's message is a page, in the compact language or in HTML. It is rendered beside the engine: while
pages of some conversations are drawn, others are decoded. With `revisions` the rendered page is shown back
that many times, and every further message is paid what it adds to the score, so the sum is the score of the
last page. pixels = false scores the boxes of the texts and what is behind them; no picture is drawn.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

from earlyfusion.data.chat.template import Message
from earlyfusion.data.errors import BadSample
from earlyfusion.data.sample import Image, Text
from earlyfusion.data.tasks.pages import REVISE, Seen, document_of
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.eval.website.browser import PageError, Renderer, View
from earlyfusion.eval.website.score import NOTHING, Score, score
from earlyfusion.rl.environments.base import Environment, EnvironmentFault, Step, environment

UNREAD = "That is no page: {why} Write it again."
KEPT = 256
"""Pages whose views are kept."""


@environment("website")
class Website(Environment):
    """See the module. revisions: times that a page is shown back; shown: as a picture, else only in words
    that it was rendered (the control of what seeing it is worth)."""

    def __init__(self, revisions: int = 0, pixels: bool = True, shown: bool = True) -> None:
        if revisions < 0:
            raise EnvironmentFault(f"website: revisions = {revisions}; expected 0 or more")
        self.left, self.pixels, self.shown = revisions, pixels, shown
        self.least_turns = revisions + 1
        self.paid = 0.0
        self.wanted = ""

    def reset(self, problem: Problem) -> list[Message]:
        """The picture or clip of the page, and the question."""
        seen = problem.meta.get("graph")
        if not isinstance(seen, Seen):
            raise EnvironmentFault(f"website: task {problem.task!r} asks for no page; use the task pages")
        self.wanted = seen.html
        return problem.chat()

    async def step(self, message: Message) -> Step:
        """Render, score, and show back or end."""
        view, why = None, ""
        try:
            view = await rendered(document_of(message.text)[0], self.pixels)
        except (BadSample, PageError) as error:
            why = f"{error}."
        found: Score = NOTHING
        if view is not None:
            found = score(view, await rendered(self.wanted, self.pixels))
        gain, self.paid = found.mean - self.paid, found.mean
        counts = {"rendered": int(view is not None)}
        if not self.left:
            return Step((), gain, True, counts)
        self.left -= 1
        said: list[Any] = [Text(UNREAD.format(why=why) if view is None else REVISE, 0.0)]
        if view is not None and view.picture is not None and self.shown:
            said.insert(0, Image(view.picture))
        return Step([Message("user", tuple(said))], gain, False, counts)


Views = OrderedDict[tuple[str, bool], asyncio.Future[View]]
"""Of pages by their text and whether with pixels: the last KEPT."""
_browsers: dict[Any, tuple[Renderer, Views, AsyncIterator[None]]] = {}


async def _closing(loop: Any, renderer: Renderer) -> AsyncIterator[None]:
    try:
        yield
    finally:
        del _browsers[loop]
        await renderer.close()


async def rendered(html: str, pixels: bool) -> View:
    """A page by the one browser of this loop, once for all who ask: answers to a page want the same one, and
    many are the same. Raises PageError."""
    loop = asyncio.get_running_loop()
    if loop not in _browsers:
        renderer = Renderer(timeout_s=20)
        # A loop closes its generators when it ends, so the browser ends with its loop.
        _browsers[loop] = renderer, OrderedDict(), (ending := _closing(loop, renderer))
        await anext(ending)
    (renderer, views, _), key = _browsers[loop], (html, pixels)
    if key not in views:
        # A future at once: of those that ask together, one renders.
        views[key] = asyncio.ensure_future(renderer.render(html, pixels=pixels))
        while len(views) > KEPT:
            views.popitem(last=False)
    views.move_to_end(key)
    try:
        return await asyncio.shield(views[key])
    except PageError:
        # On a machine that was busy, it may do the next time.
        views.pop(key, None)
        raise
