"""One thread that drives the engine, and the way between it and asyncio.

    worker = EngineWorker(engine)         # starts the thread
    async for event in worker.stream(requests): ...

Continuous batching needs one owner of the engine: a step serves all requests at once, and takes its time.
So the engine lives in a thread, requests enter through its inbox, and their events go to an asyncio queue of
whoever waits for them.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

from torch import Tensor

from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import EngineFull, Event, Request

Mailbox = Callable[[Event | Exception], object]


class EngineStopped(RuntimeError):
    """The engine takes no more requests, or has failed."""


class EngineWorker:
    """Drives `engine` until `stop`. `max_open` bounds the unfinished requests; more raise EngineFull at once.

    Setting `accepting` to False takes no new requests; those in flight go on.
    """

    def __init__(self, engine: Engine, *, max_open: int = 256) -> None:
        self.engine, self.max_open, self.accepting = engine, max_open, True
        self.stopped = EngineStopped("the server is stopping")
        self.waiting: dict[str, Mailbox] = {}
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def check_room(self, more: int = 1) -> None:
        """Raises EngineFull when so many further requests are not taken now."""
        if len(self.waiting) + more > self.max_open:
            raise EngineFull(self.max_open)

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[Event, None]:
        """Events of the requests until the last sample of each is complete.

        Leaving the loop early (a client that went away) cancels them in the engine. Raises EngineStopped,
        EngineFull, or what `Engine.submit` raises, before the first event.
        """
        # A stopping server still ends what it has begun.
        if not self.accepting:
            raise self.stopped
        self.check_room(len(requests))

        # The mailbox is known before the engine hears of a request: no event is lost.
        events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        mailbox: Mailbox = lambda item: loop.call_soon_threadsafe(events.put_nowait, item)
        left = {request.id: request.params.n for request in requests}
        self.waiting |= dict.fromkeys(left, mailbox)
        try:
            for request in requests:
                self._inbox.put(partial(self._submit, request))
            while left:
                item = await events.get()
                if isinstance(item, Exception):
                    raise item
                if item.completion is not None:
                    left[item.request_id] -= 1
                    if not left[item.request_id]:
                        del left[item.request_id], self.waiting[item.request_id]
                yield item
        finally:
            for unfinished in left:
                self.waiting.pop(unfinished, None)
                self._inbox.put(partial(self.engine.cancel, unfinished))

    async def load(self, weights: Mapping[str, Tensor]) -> int:
        """New weights between two steps, for unfinished answers as well; their version. Raises ValueError for
        those of another model, EngineStopped."""
        if not self.accepting:
            raise self.stopped
        loop = asyncio.get_running_loop()
        done: asyncio.Future[int] = loop.create_future()

        def load() -> None:
            version = self.engine.scheduler.version + 1
            tell: Callable[[], object] = partial(done.set_result, version)
            try:
                self.engine.load_weights(weights, version)
            except Exception as error:
                tell = partial(done.set_exception, error)
                if not isinstance(error, ValueError):  # perhaps half of them are there: the engine has failed
                    raise
            finally:
                # Whoever asked may have gone.
                loop.call_soon_threadsafe(lambda: done.done() or tell())

        # The engine's thread does it, between two steps.
        self._inbox.put(load)
        return await done

    def cut(self, why: str) -> None:
        """End all requests now: whoever waits gets EngineStopped."""
        self.accepting, self.stopped = False, EngineStopped(why)
        for name in list(self.waiting):
            self._tell(name, self.stopped)

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread; unfinished requests get EngineStopped."""
        self.accepting = False
        # None wakes a thread that waits, and ends it.
        self._inbox.put(None)
        self._thread.join(timeout)
        self.cut("the server has stopped")

    def _tell(self, name: str, item: Event | Exception) -> None:
        # Nobody waits where the request was cancelled, or the loop is closed.
        with suppress(KeyError, RuntimeError):
            self.waiting[name](item)

    def _submit(self, request: Request) -> None:
        try:
            self.engine.submit(request)
        except Exception as error:
            self._tell(request.id, error)

    def _run(self) -> None:
        try:
            while True:
                # The inbox is waited for only where the engine has nothing to do.
                while not (self.engine.has_work and self._inbox.empty()):
                    action = self._inbox.get()
                    if action is None:
                        return
                    action()
                for event in self.engine.step():
                    self._tell(event.request_id, event)
        except Exception as error:  # whoever waits must learn of it
            self.cut(f"the engine has failed: {type(error).__name__}: {error}")
