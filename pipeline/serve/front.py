"""What stands before the routes, as one plain ASGI layer: host, key, number of requests, the body, and
callers who leave.

    Host     on a loopback address only loopback names are served: a page that a browser got from elsewhere
             reaches this machine under its own name (DNS rebinding)
    key      every route but /health
    number   over `most` requests at a time: 503, but /health is answered
    body     cut while it arrives: larger than `limits.body`, slower than RATE, more than all bodies together
             may hold; then read as JSON once, and only if it has few enough values
    leaving  a caller who hangs up ends the work, whatever it is (Starlette's own middleware hides the
             hang-up)

Errors have OpenAI's form {"error": {"message", "type", "param", "code"}}, in one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from earlyfusion.data.video.readers import give_back
from earlyfusion.pipeline.serve.schema import Limits, Refused

BODY_S, RATE = 10.0, 65536
"""A body has BODY_S seconds, and one more for every RATE bytes of it that have come."""
SMALL = 65536
"""Bytes of a request that are not counted in the budget, so that small ones always pass."""
LARGE = 4 * 2**20
"""After a request of so many bytes the C library's free memory goes back to the system."""
VALUES = 1 << 18
"""Most values of a JSON body (counted as its commas, colons and brackets, before it is parsed)."""


class Budget:
    """Bytes that requests may hold together, in bodies and prepared pictures."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    def change(self, old: int, new: int) -> None:
        """Replace `old` bytes by `new`; raises Refused (503) when that is too many together."""
        old, new = max(old - SMALL, 0), max(new - SMALL, 0)
        if new > old and self.held + new - old > self.most:
            raise Refused("too many large requests at once; try again later", status=503, code="busy")
        self.held += new - old


@dataclass
class Asked:
    """What the front hands to a route, as scope["state"]["asked"]."""

    budget: Budget
    body: dict[str, Any] | None = None
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
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    message = _line(error.message, 500)
    body = {"error": {"message": message, "type": kind, "param": _line(error.param, 80), "code": error.code}}
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    if error.status == 408:
        headers["Connection"] = "close"
    return JSONResponse(body, status_code=error.status, headers=headers)


def _line(text: str | None, most: int) -> str | None:
    if text is None:
        return None
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
        asked = Asked(self.budget)
        self.running += 1
        try:
            self._admit(scope)
            if scope["method"] == "POST" and not await self._read(scope, receive, asked):
                return
            scope.setdefault("state", {})["asked"] = asked
            await self._answer(scope, receive, send)
        except Refused as error:
            await error_response(error)(scope, receive, send)
        finally:
            self.running -= 1
            asked.body = None
            if asked.most > LARGE:
                asyncio.get_running_loop().run_in_executor(None, give_back)
            asked.holds(0)

    def _admit(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
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
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if (
            scope["method"] == "POST" and kind != b"application/json"
        ):  # what any web page may send is not of this kind
            raise Refused("expected JSON: send the header Content-Type: application/json")

    async def _read(self, scope: Scope, receive: Receive, asked: Asked) -> bool:
        """The JSON body into `asked`; False when the caller left."""
        limit, loop = self.limits.body, asyncio.get_running_loop()
        length = dict(scope["headers"]).get(b"content-length", b"0")
        larger = f"the request is larger than {limit} bytes; send fewer or smaller pictures"
        if length.isdigit() and int(length[:20]) > limit:
            raise Refused(larger, status=413, code="request_too_large")
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
                raise Refused(larger, status=413, code="request_too_large")
            asked.holds(len(body))
        asked.body = parsed(body)
        return True

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app's answer, until it is complete or the caller has gone."""
        gone, complete = asyncio.Event(), False

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        async def heard() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def said(message: Message) -> None:
            nonlocal complete
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        listening = asyncio.ensure_future(listen())
        work = asyncio.ensure_future(self.app(scope, heard, said))
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


def parsed(body: bytes | bytearray, loads: Callable[[Any], Any] = json.loads) -> dict[str, Any]:
    """The object in a JSON body; raises Refused for anything else, before parsing where there are too many
    values."""
    if len(body) > SMALL and sum(body.count(mark) for mark in b",:[{") > VALUES:
        raise Refused(f"the body has more than {VALUES} JSON values; send fewer or shorter prompts")
    try:
        value = loads(body)
    except RecursionError:
        raise Refused("the body is nested too deep") from None
    except ValueError as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refused(f"expected a JSON object, not {type(value).__name__}")
    return value
