"""Connections of the endpoint: uvicorn's h11 protocol with limits on what a caller may keep open without
asking anything.

uvicorn bounds the length of a head and the idle time after an answer; a caller who sends half a head, or
nothing, or reads nothing, it waits for without end, and 1,000 of them are all the files that a process may
open. Here

* a head must be there within HEAD_S seconds of the connection or of the last answer,
* about `most` connections are open: for a new one the oldest that is not being answered goes, with a 503,
* what is written must be taken within WRITE_S seconds,
* a body in chunks of next to nothing is cut: each costs the parser as much as a large one.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S, WRITE_S = 10.0, 60.0
YOUNG_S, SPARE = 0.5, 512
"""A connection younger than this stays, as long as no more than SPARE are open beyond the limit: its head may
be on the way."""
ACCEPTED, QUEUED = 128, 2048
"""Connections accepted in one turn of the event loop (fewer than SPARE), and those that the kernel keeps
until then."""
SLICE = 4096
"""Bytes that are parsed between two looks at what they held."""
OVERHEAD = 16384
"""Bytes of a request that may be head and chunk marks; beyond them at least half must be body."""

_BUSY = (
    b'{"error": {"message": "too many connections; try again later", "type": "server_error", "param": null,'
    b' "code": "busy"}}'
)


class Guarded(H11Protocol):
    """One connection; `guarded` makes the class that a server's connections share."""

    most: ClassVar[int]
    head_s: ClassVar[float]
    write_s: ClassVar[float]
    waiting: ClassVar[dict[Guarded, None]]
    """Connections that are not being answered, the oldest first"""

    _head: asyncio.TimerHandle | None = None
    _write: asyncio.TimerHandle | None = None
    _wire = _body = 0
    since = 0.0
    """When it began to wait for a head."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        over, now = len(self.connections) - self.most, self.loop.time()
        for other in list(self.waiting)[: max(over, 0)]:
            if now - other.since < YOUNG_S and over <= SPARE:
                break
            other.turn_away(b"503 Service Unavailable", _BUSY)
            over -= 1
        self._watch()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE):
            piece = data[start : start + SLICE]
            cycle, held = self.cycle, len(self.cycle.body) if self.cycle is not None else 0
            super().data_received(piece)
            if self.transport.is_closing():
                break
            if self.cycle is not cycle:
                self._wire, self._body, held = 0, 0, 0
            self._wire += len(piece)
            self._body += max(len(self.cycle.body) - held, 0) if self.cycle is not None else 0
            if self._wire > OVERHEAD + 2 * self._body and self.cycle is not None and self.cycle.more_body:
                self.transport.abort()
                break
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.waiting.pop(self, None)
        for timer in (self._head, self._write):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write = self._write or self.loop.call_later(self.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write is not None:
            self._write.cancel()
            self._write = None

    def turn_away(self, status: bytes, body: bytes = b"") -> None:
        """Answer without having read a head, and close; whoever does not take it is dropped."""
        self.waiting.pop(self, None)
        if self.transport.is_closing():
            return
        head = b"content-type: application/json\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: "
        self.transport.write(b"HTTP/1.1 " + status + b"\r\n" + head + b"%d\r\n\r\n" % len(body) + body)
        self.transport.close()
        self.loop.call_later(1.0, self.transport.abort)

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        """A connection that is being answered is left alone; any other has a time to ask."""
        if self._answering() or self.transport.is_closing():
            self.waiting.pop(self, None)
            if self._head is not None:
                self._head.cancel()
                self._head = None
        elif self._head is None:
            self.waiting[self], self.since = None, self.loop.time()
            self._head = self.loop.call_later(self.head_s, self.turn_away, b"408 Request Timeout")


def guarded(most: int, *, head_s: float = HEAD_S, write_s: float = WRITE_S) -> type[Guarded]:
    """The protocol class of one server that keeps about `most` connections."""
    return type(
        "GuardedOfOne", (Guarded,), {"most": most, "head_s": head_s, "write_s": write_s, "waiting": {}}
    )
