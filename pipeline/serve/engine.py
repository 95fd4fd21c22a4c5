"""One thread that drives the engine, and the way between it and asyncio.

    worker = EngineWorker(engine)         # starts the thread
    async for event in worker.stream(request): ...

Requests enter through an inbox; every event of a request goes to the asyncio queue of whoever waits for it.
Leaving the loop early (a client that went away) cancels the request in the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.request import EngineFull, Event, Request


class EngineStopped(RuntimeError):
    """The engine takes no more requests, or has failed."""


@dataclass
class _Waiting:
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event | BaseException] = field(default_factory=asyncio.Queue)
    left: int = 1

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
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._waiting: dict[str, _Waiting] = {}
        self._closing = self._draining = False
        self._failure: BaseException | None = None
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

    def check_room(self) -> None:
        """Raises EngineFull when no further request is taken now."""
        if len(self._waiting) >= self.max_open:
            raise EngineFull(self.max_open)

    async def stream(self, request: Request) -> AsyncIterator[Event]:
        """Events of the request until its last sample is complete.

        Raises EngineStopped, EngineFull, or what `Engine.submit` raises, before the first event.
        """
        if self._failure is not None:
            raise EngineStopped(f"the engine has failed: {self._failure}") from self._failure
        if not self.accepting:
            raise EngineStopped("the server is stopping")
        self.check_room()
        entry = _Waiting(asyncio.get_running_loop(), left=request.params.n)
        self._waiting[request.id] = entry
        try:
            self._send(lambda: self._submit(request, entry))
            while entry.left:
                item = await entry.events.get()
                if isinstance(item, BaseException):
                    raise item
                entry.left -= item.completion is not None
                yield item
        finally:
            self._waiting.pop(request.id, None)
            if entry.left:
                self._send(lambda: self.engine.cancel(request.id))

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

    def _submit(self, request: Request, entry: _Waiting) -> None:
        try:
            self.engine.submit(request)
        except Exception as error:
            entry.put(error)

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._inbox or self._closing or self.engine.has_work):
                        self._wake.wait()
                    if self._closing:
                        return
                    actions, self._inbox = list(self._inbox), deque()
                for action in actions:
                    action()
                for event in self.engine.step() if self.engine.has_work else ():
                    entry = self._waiting.get(event.request_id)
                    if entry is not None:
                        entry.put(event)
        except BaseException as error:  # whoever waits must learn of it
            self._failure = error
            self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        if not isinstance(error, EngineStopped):
            error = EngineStopped(f"the engine has failed: {type(error).__name__}: {error}")
        for entry in list(self._waiting.values()):
            entry.put(error)
