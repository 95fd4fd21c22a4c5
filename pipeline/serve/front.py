"""What stands before the routes: connections with limits, then one plain ASGI layer.

Connections (`guarded`, over uvicorn's h11). uvicorn bounds the length of a head and the idle time after an
answer; a caller who sends half a head, or nothing, or reads nothing, it waits for without end, and 1,000 of
them are all the files that a process may open. Here

* a head must be there within HEAD_S seconds of the connection or of the last answer,
* about `most` connections are open: for a new one the oldest that is not being answered goes, with a 503,
* what is written must be taken within WRITE_S seconds,
* a body in chunks of next to nothing is cut: each costs the parser as much as a large one.

Requests (`Front`):

    Host     on a loopback address only loopback names are served: a page that a browser got from elsewhere
             reaches this machine under its own name (DNS rebinding)
    key      every route but /health
    number   over `most` requests at a time: 503, but /health is answered
    body     cut while it arrives: larger than `limits.body`, slower than RATE, more than all bodies together
             may hold, more JSON values than a request needs
    leaving  a caller who hangs up ends the work, whatever it is (Starlette's own middleware hides the
             hang-up)

Errors have OpenAI's form {"error": {"message", "type", "param", "code"}}, in one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from earlyfusion.data.video.readers import give_back
from earlyfusion.pipeline.serve.protocol import Limits, Refused

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
BODY_S, RATE = 10.0, 65536
"""A body has BODY_S seconds, and one more for every RATE bytes of it that have come."""
SMALL = 65536
"""Bytes of a request that are not counted in the budget, so that small ones always pass."""
LARGE = 4 * 2**20
"""After a request of so many bytes the C library's free memory goes back to the system."""
VALUES = 1 << 18
"""Most values of a JSON body (counted as its commas, colons and brackets, before it is parsed)."""

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

        # The oldest silent callers give way.
        over = len(self.connections) - self.most
        for other in list(self.waiting)[: max(over, 0)]:
            if self.loop.time() - other.since < YOUNG_S and over <= SPARE:
                break
            other.turn_away(b"503 Service Unavailable", _BUSY)
            over -= 1
        self._watch()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE):
            piece = data[start : start + SLICE]
            cycle, held = self.cycle, self._held()
            super().data_received(piece)
            if self.transport.is_closing():
                break

            # What came over the wire against what of it was body, counted anew for each request.
            if self.cycle is not cycle:
                self._wire = self._body = held = 0
            self._wire += len(piece)
            self._body += max(self._held() - held, 0)
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
        _cancel(self._head)
        _cancel(self._write)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write = self._write or self.loop.call_later(self.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._write)
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

    def _held(self) -> int:
        return 0 if self.cycle is None else len(self.cycle.body)

    def _watch(self) -> None:
        """A connection that is being answered is left alone; any other has a time to ask."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self.transport.is_closing():
            self.waiting.pop(self, None)
            _cancel(self._head)
            self._head = None
        elif self._head is None:
            self.waiting[self], self.since = None, self.loop.time()
            self._head = self.loop.call_later(self.head_s, self.turn_away, b"408 Request Timeout")


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def guarded(most: int, *, head_s: float = HEAD_S, write_s: float = WRITE_S) -> type[Guarded]:
    """The protocol class of one server that keeps about `most` connections."""
    return type(
        "GuardedOfOne", (Guarded,), {"most": most, "head_s": head_s, "write_s": write_s, "waiting": {}}
    )


class Budget:
    """Bytes that requests may hold together, in bodies and prepared pictures."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    def change(self, old: int, new: int) -> None:
        """Replace `old` bytes by `new`; raises Refused (503) when that is too many together."""
        more = max(new - SMALL, 0) - max(old - SMALL, 0)
        if more > 0 and self.held + more > self.most:
            raise Refused("too many large requests at once; try again later", status=503, code="busy")
        self.held += more


@dataclass
class Incoming:
    """What the front hands to a route, as scope["state"]["incoming"]: the body, until it is taken."""

    budget: Budget
    body: bytes | bytearray = b""
    size: int = 0
    most: int = 0
    """The largest size that it had."""

    def holds(self, size: int) -> None:
        """The request now holds `size` bytes; raises Refused (503) when all together hold too many."""
        self.budget.change(self.size, size)
        self.size, self.most = size, max(size, self.most)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def error_response(error: Refused) -> JSONResponse:
    """The error in OpenAI's form: one line, encodable whatever the caller sent."""
    body = {
        "message": _line(error.message, 500),
        "type": "invalid_request_error" if error.status < 500 else "server_error",
        "param": None if error.param is None else _line(error.param, 80),
        "code": error.code,
    }
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    if error.status == 408:
        headers["Connection"] = "close"
    return JSONResponse({"error": body}, status_code=error.status, headers=headers)


def _line(text: str, most: int) -> str:
    text = " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
    return text if len(text) <= most else text[:most] + "…"


class Front:
    """The layer around `app`. `hosts`: names that are served, None for all; loopback names belong to every
    such set."""

    def __init__(
        self, app: ASGIApp, *, limits: Limits, key: str | None, hosts: frozenset[str] | None, most: int
    ) -> None:
        self.app, self.limits, self.key, self.hosts, self.most = app, limits, key, hosts, most
        self.budget, self.running = Budget(limits.held), 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        # Whatever happens, what the request held is given back at the end.
        incoming = Incoming(self.budget)
        scope.setdefault("state", {})["incoming"] = incoming
        self.running += 1
        try:
            headers = dict(scope["headers"])
            self._admit(scope, headers)
            if scope["method"] == "POST" and not await self._read(headers, receive, incoming):
                return
            await self._answer(scope, receive, send)
        except Refused as error:
            await error_response(error)(scope, receive, send)
        finally:
            self.running -= 1
            incoming.body = b""
            incoming.holds(0)
            if incoming.most > LARGE:
                asyncio.get_running_loop().run_in_executor(None, give_back)

    def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raises Refused for a caller who is not served."""
        host = _host_of(headers.get(b"host", b""))
        if self.hosts is not None and host and host not in self.hosts and not is_loopback(host):
            raise Refused(
                f"host {host!r} is not served here (--allow-host)", status=403, code="host_not_allowed"
            )
        if scope["path"] == "/health":
            return

        if self.key is not None:
            given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
            if not hmac.compare_digest(given, self.key.encode()):
                raise Refused("wrong or missing API key", status=401, code="invalid_api_key")
        if self.running > self.most:
            raise Refused(
                f"{self.most} requests are being answered; try again later", status=503, code="busy"
            )

        # What any web page may send without being asked for leave is never of this kind.
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":
            raise Refused("expected JSON: send the header Content-Type: application/json")

    async def _read(self, headers: dict[bytes, bytes], receive: Receive, incoming: Incoming) -> bool:
        """The body into `incoming`; False when the caller left."""
        limit, loop = self.limits.body, asyncio.get_running_loop()
        too_large = Refused(
            f"the request is larger than {limit} bytes; send fewer or smaller pictures",
            status=413,
            code="request_too_large",
        )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > limit:
            raise too_large

        body, more, start = bytearray(), True, loop.time()
        while more:
            try:
                async with asyncio.timeout_at(start + BODY_S + len(body) / RATE):
                    message = await receive()
            except TimeoutError:
                raise Refused("the request's body came too slowly", status=408, code="timeout") from None
            if message["type"] == "http.disconnect":
                return False
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > limit:
                raise too_large
            incoming.holds(len(body))

        check_values(body)
        incoming.body = body
        return True

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app's answer, until it is complete or the caller has gone."""
        gone, complete = asyncio.Event(), False

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        async def hear() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def tell(message: Message) -> None:
            nonlocal complete
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        # Whichever is first: the answer, or the caller's leaving.
        listening = asyncio.ensure_future(listen())
        work = asyncio.ensure_future(self.app(scope, hear, tell))
        try:
            await asyncio.wait({listening, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not complete:
                work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
        finally:
            listening.cancel()
            work.cancel()
            await asyncio.gather(listening, work, return_exceptions=True)


def _host_of(value: bytes) -> str:
    """The name in a Host header, without its port."""
    text = value.decode("latin-1").strip().lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]


def check_values(body: bytes | bytearray) -> None:
    """Raises Refused for a JSON body of too many values, before it is parsed."""
    if len(body) > SMALL and sum(body.count(mark) for mark in b",:[{") > VALUES:
        raise Refused(f"the body has more than {VALUES} JSON values; send fewer or shorter prompts")
