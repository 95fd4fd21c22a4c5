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
    key      every route but /health, /page/{id} and the page at /, which asks for the key itself
    number   over `most` requests at a time: 503, but /health and / are answered
    body     cut while it arrives: larger than `limits.body`, slower than RATE, more than all bodies together
             may hold, more JSON values than a request needs
    leaving  a caller who hangs up ends the work, whatever it is

Errors have OpenAI's form {"error": {"message", "type", "param", "code"}}, in one line.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from earlyfusion.data.errors import DataError
from earlyfusion.data.video import give_back
from earlyfusion.model.engine.requests import EngineFull, RequestError
from earlyfusion.pipeline.serve.prepare import for_client
from earlyfusion.pipeline.serve.protocol import Limits, Refused
from earlyfusion.pipeline.serve.worker import EngineStopped

HEAD_S, WRITE_S = 10.0, 60.0
YOUNG_S, SPARE = 0.5, 512
"""A connection younger than this stays, as long as no more than SPARE are open beyond the limit: its head may
be on the way."""
ACCEPTED = 128
"""Connections accepted in one turn of the event loop (fewer than SPARE)."""
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

BUSY = (
    b'{"error": {"message": "too many connections; try again later", "type": "server_error", "param": null,'
    b' "code": "busy"}}'
)


class Guarded(H11Protocol):
    """One connection; `guarded` makes the class that a server's connections share."""

    most: ClassVar[int]
    head_s: ClassVar[float]
    waiting: ClassVar[dict[Guarded, float]]
    """Connections that are not being answered -> when they began to wait for a head; the oldest first"""

    head: asyncio.TimerHandle | None = None
    write: asyncio.TimerHandle | None = None
    wire = body = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)

        # The oldest silent callers give way.
        over, now = len(self.connections) - self.most, self.loop.time()
        for other in list(self.waiting)[: max(over, 0)]:
            if now - self.waiting[other] < YOUNG_S and over <= SPARE:
                break
            other.turn_away(b"503 Service Unavailable", BUSY)
            over -= 1
        self.watch()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE):
            piece = data[start : start + SLICE]
            cycle, held = self.cycle, self.held()
            super().data_received(piece)
            if self.transport.is_closing():
                break

            # What came over the wire against what of it was body, counted anew for each request.
            if self.cycle is not cycle:
                self.wire = self.body = held = 0
            self.wire += len(piece)
            self.body += max(self.held() - held, 0)
            if self.wire > OVERHEAD + 2 * self.body and self.cycle is not None and self.cycle.more_body:
                self.transport.abort()
                break
        self.watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.watch()
        self.resume_writing()

    def pause_writing(self) -> None:
        super().pause_writing()
        # One that takes nothing would hold its answer in memory for ever.
        self.write = self.write or self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.write is not None:
            self.write.cancel()
        self.write = None

    def turn_away(self, status: bytes, body: bytes = b"") -> None:
        """Answer without having read a head, and close; whoever does not take it is dropped."""
        if self.transport.is_closing():
            return
        # By hand: there is no request that a response object could answer.
        head = b"content-type: application/json\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: "
        self.transport.write(b"HTTP/1.1 " + status + b"\r\n" + head + b"%d\r\n\r\n" % len(body) + body)
        self.transport.close()
        self.watch()
        self.loop.call_later(1.0, self.transport.abort)

    def held(self) -> int:
        """Bytes of the body that nobody has taken yet."""
        return 0 if self.cycle is None else len(self.cycle.body)

    def watch(self) -> None:
        """A connection that is being answered is left alone; any other has a time to ask."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self.transport.is_closing():
            self.waiting.pop(self, None)
            if self.head is not None:
                self.head.cancel()
            self.head = None
        elif self.head is None:
            self.waiting[self] = self.loop.time()
            self.head = self.loop.call_later(self.head_s, self.turn_away, b"408 Request Timeout")


def guarded(most: int, head_s: float = HEAD_S) -> type[Guarded]:
    """The protocol class of one server that keeps about `most` connections."""
    return type("GuardedOfOne", (Guarded,), {"most": most, "head_s": head_s, "waiting": {}})


@dataclass
class Incoming:
    """What the front hands to a route, as request.state.incoming: the body, until it is taken."""

    front: Front
    body: bytes | bytearray = b""
    size: int = 0
    most: int = 0
    """The largest size that it had."""
    started: bool = False
    """Whether an answer has begun."""

    def holds(self, size: int) -> None:
        """The request now holds `size` bytes, in its body or in prepared pictures.

        Raises Refused (503) when all together hold too many.
        """
        more = max(size - SMALL, 0) - max(self.size - SMALL, 0)
        # What gets smaller always may, or nothing could be given back.
        if more > 0 and self.front.held + more > self.front.limits.held:
            raise Refused("too many large requests at once; try again later", status=503, code="busy")
        self.front.held += more
        self.size, self.most = size, max(size, self.most)

    def taken(self) -> bytes | bytearray:
        """The body, which nobody keeps any longer."""
        body, self.body = self.body, b""
        return body


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def explained(error: Exception) -> Refused | None:
    """An error as it is told to the caller; None for one that is a mistake of the server."""
    match error:
        case Refused():
            return error
        case HTTPException():
            return Refused(str(error.detail), status=error.status_code)
        case EngineFull():
            return Refused(str(error), status=429, code="queue_full")
        case EngineStopped():
            return Refused(str(error), status=503, code="stopping")
        case RequestError() | DataError() | RecursionError() | OverflowError():
            return Refused(for_client(error))
    return None


def error_response(error: Refused) -> JSONResponse:
    """The error in OpenAI's form: one line, encodable whatever the caller sent."""

    def short(text: str, most: int) -> str:
        text = " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
        return text if len(text) <= most else text[:most] + "…"

    # As OpenAI calls them, which its clients turn into exceptions.
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    body = {"message": short(str(error), 500), "type": kind, "param": None, "code": error.code}
    if error.param is not None:
        body["param"] = short(error.param, 80)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    if error.status == 408:
        headers["Connection"] = "close"
    return JSONResponse({"error": body}, error.status, headers)


@dataclass(eq=False)
class Front:
    """The layer around `app`. `hosts`: names that are served, None for all; loopback names belong to every
    such set. held: bytes of all requests beyond SMALL each."""

    app: ASGIApp
    limits: Limits
    key: str | None
    hosts: frozenset[str] | None
    most: int
    held: int = 0
    running: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        incoming = Incoming(self)
        # "app" makes the router tell of unknown paths by an exception.
        scope.update(app=self, state={"incoming": incoming})

        async def tell(message: Message) -> None:
            incoming.started = True
            await send(message)

        # Whatever happens, what the request held is given back at the end.
        self.running += 1
        try:
            headers = dict(scope["headers"])
            self.admit(scope, headers)
            if scope["method"] != "POST" or await self.read(headers, receive, incoming):
                await self.answer(scope, receive, tell)
        except Exception as error:
            told = explained(error)
            if not incoming.started:
                failed = Refused(f"the server failed: {type(error).__name__}", status=500)
                await error_response(told or failed)(scope, receive, send)
            if told is None:
                raise
        finally:
            self.running -= 1
            incoming.taken()
            incoming.holds(0)
            if incoming.most > LARGE:
                asyncio.get_running_loop().run_in_executor(None, give_back)

    def admit(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raises Refused for a caller who is not served."""
        # The name alone, without its port; an IPv6 address stands in brackets.
        name = headers.get(b"host", b"").decode("latin-1").strip().lower()
        host = name.partition("]")[0].removeprefix("[") if name[:1] == "[" else name.partition(":")[0]
        if self.hosts is not None and host and host not in self.hosts and not is_loopback(host):
            text = f"host {host!r} is not served here (--allow-host)"
            raise Refused(text, status=403, code="host_not_allowed")
        # Whoever watches the server has no key, and asks when it is busy; the page itself holds no secret.
        # A frame sends no key; the name of a written page cannot be guessed.
        if scope["path"] in ("/health", "/") or scope["path"].startswith("/page/"):
            return

        # The time of a comparison tells nothing of the key.
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
        if self.key is not None and not hmac.compare_digest(given, self.key.encode()):
            raise Refused("wrong or missing API key", status=401, code="invalid_api_key")
        if self.running > self.most:
            text = f"{self.most} requests are being answered; try again later"
            raise Refused(text, status=503, code="busy")

        # What any web page may send without being asked for leave is never of this kind.
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":
            raise Refused("expected JSON: send the header Content-Type: application/json")

    async def read(self, headers: dict[bytes, bytes], receive: Receive, incoming: Incoming) -> bool:
        """The body into `incoming`; False when the caller left."""
        body, more, start = bytearray(), True, asyncio.get_running_loop().time()
        # What is said to come is refused before any of it does.
        length = headers.get(b"content-length", b"0")
        size = int(length[:20]) if length.isdigit() else 0
        while True:
            if max(size, len(body)) > self.limits.body:
                text = f"the request is larger than {self.limits.body} bytes; send fewer or smaller pictures"
                raise Refused(text, status=413, code="request_too_large")
            if not more:
                break
            try:
                # Time grows with what has come: a slow line passes, a dripping one does not.
                async with asyncio.timeout_at(start + BODY_S + len(body) / RATE):
                    message = await receive()
            except TimeoutError:
                raise Refused("the request's body came too slowly", status=408, code="timeout") from None
            if message["type"] == "http.disconnect":
                return False
            body += message.get("body", b"")
            more = message.get("more_body", False)
            incoming.holds(len(body))

        check_values(body)
        incoming.body = body
        return True

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app's answer, until it is complete or the caller has gone."""

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        async def hear() -> Message:
            # The app need not listen: it is cancelled where the caller leaves.
            return await asyncio.Future()

        # Whichever is first: the answer, or the caller's leaving.
        tasks = [asyncio.ensure_future(one) for one in (self.app(scope, hear, send), listen())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            work, _ = await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(work, Exception):
            raise work


def check_values(body: bytes | bytearray) -> None:
    """Raises Refused for a JSON body of too many values, before it is parsed."""
    # Counting bytes is cheap; parsing makes an object of each value.
    if len(body) > SMALL and sum(body.count(mark) for mark in b",:[{") > VALUES:
        raise Refused(f"the body has more than {VALUES} JSON values; send fewer or shorter prompts")
