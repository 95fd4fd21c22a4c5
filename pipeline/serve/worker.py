"""One thread that drives the engine, and the way between it and asyncio.

    worker = EngineWorker(engine)         # starts the thread
    async for event in worker.stream(requests): ...

Requests enter through an inbox; their events go to an asyncio queue of whoever waits for them.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any

from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import EngineFull, Event, Request


class EngineStopped(RuntimeError):
    """The engine takes no more requests, or has failed."""


class _Mailbox:
    """Where the events of one HTTP request arrive, from the engine's thread."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[Event | BaseException] = asyncio.Queue()

    def put(self, item: Event | BaseException) -> None:
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody waits any more
            pass


class EngineWorker:
    """Drives `engine` until `stop`. `max_open` bounds the unfinished requests; more raise EngineFull at
    once."""

    def __init__(self, engine: Engine, *, max_open: int = 256) -> None:
        self.engine, self.max_open = engine, max_open
        self._inbox: deque[Callable[[], Any]] = deque()
        self._wake = threading.Condition()
        self._waiting: dict[str, _Mailbox] = {}
        self._closing = self._draining = False
        self._failure: EngineStopped | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def open_requests(self) -> int:
        """Requests not yet answered to the end."""
        return len(self._waiting)

    @property
    def accepting(self) -> bool:
        """Whether new requests are taken."""
        return not self._draining and self._failure is None

    def check_room(self, more: int = 1) -> None:
        """Raises EngineFull when so many further requests are not taken now."""
        if len(self._waiting) + more > self.max_open:
            raise EngineFull(self.max_open)

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[Event, None]:
        """Events of the requests until the last sample of each is complete.

        Leaving the loop early (a client that went away) cancels them in the engine. Raises EngineStopped,
        EngineFull, or what `Engine.submit` raises, before the first event.
        """
        if not self.accepting:
            raise self._failure or EngineStopped("the server is stopping")
        self.check_room(len(requests))

        # The mailbox is known before the engine hears of a request: no event is lost.
        mailbox = _Mailbox()
        self._waiting |= {request.id: mailbox for request in requests}
        left = {request.id: request.params.n for request in requests}
        try:
            for request in requests:
                self._send(partial(self._submit, request, mailbox))
            while left:
                item = await mailbox.events.get()
                if isinstance(item, BaseException):
                    raise item
                if item.completion is not None:
                    left[item.request_id] -= 1
                    if not left[item.request_id]:
                        del left[item.request_id], self._waiting[item.request_id]
                yield item
        finally:
            for unfinished in left:
                self._waiting.pop(unfinished, None)
                self._send(partial(self.engine.cancel, unfinished))

    def drain(self) -> None:
        """Take no new requests; those in flight go on."""
        self._draining = True

    def cut(self) -> None:
        """End all requests now: whoever waits gets EngineStopped. From the thread of the event loop."""
        self._draining = True
        self._fail_all(EngineStopped("the server stopped before this answer was complete"))

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread; unfinished requests get EngineStopped."""
        self._draining = True
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout)
        self._fail_all(EngineStopped("the server has stopped"))

    def _send(self, action: Callable[[], Any]) -> None:
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    def _submit(self, request: Request, mailbox: _Mailbox) -> None:
        try:
            self.engine.submit(request)
        except Exception as error:
            mailbox.put(error)

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._inbox or self._closing or self.engine.has_work):
                        self._wake.wait()
                    if self._closing:
                        return
                    actions, self._inbox = list(self._inbox), deque()

                # Outside the lock: submitting a long prompt must not hold up who asks.
                for action in actions:
                    action()
                for event in self.engine.step() if self.engine.has_work else ():
                    mailbox = self._waiting.get(event.request_id)
                    if mailbox is not None:
                        mailbox.put(event)
        except BaseException as error:  # whoever waits must learn of it
            self._failure = EngineStopped(f"the engine has failed: {type(error).__name__}: {error}")
            self._fail_all(self._failure)

    def _fail_all(self, error: EngineStopped) -> None:
        for mailbox in set(self._waiting.values()):
            mailbox.put(error)
