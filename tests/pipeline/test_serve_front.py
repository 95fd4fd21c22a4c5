"""What stands before the routes, in small: connections that ask nothing, slow bodies, budgets, processes that
are killed."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import pytest
from hostile_requests import png
from serve_model import write_model

from earlyfusion.data.chat.template import Message
from earlyfusion.data.sample import Image, Text

uvicorn = pytest.importorskip("uvicorn")

from earlyfusion.pipeline.serve import front as serve_front  # noqa: E402
from earlyfusion.pipeline.serve.front import Front, Incoming, guarded  # noqa: E402
from earlyfusion.pipeline.serve.prepare import Preparer, Setup  # noqa: E402
from earlyfusion.pipeline.serve.protocol import Limits, Refused  # noqa: E402

ASK = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def reading(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await hello(scope, receive, send)


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


@contextlib.contextmanager
def listening(most, **times):
    """The port of a server of `reading` with the guarded protocol."""
    config = uvicorn.Config(
        reading, port=0, log_level="critical", lifespan="off", http=guarded(most, **times)
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def open_link(port, sent=b""):
    link = socket.create_connection(("127.0.0.1", port), timeout=30)
    link.sendall(sent)
    return link


def test_a_head_that_does_not_come_is_not_waited_for():
    with listening(100, head_s=0.2) as port:
        links = [open_link(port, sent) for sent in (b"", b"GET /hea", ASK + b"GET /")]
        for link in links:
            text = b""
            while piece := link.recv(4096):
                text += piece
            assert text.endswith(
                b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
                b"connection: close\r\ncontent-length: 0\r\n\r\n"
            )
            link.close()


def test_the_oldest_silent_callers_give_way_to_new_ones(monkeypatch):
    monkeypatch.setattr("earlyfusion.pipeline.serve.front.SPARE", 0)
    with listening(20) as port:
        silent = [open_link(port, b"POST /v1") for _ in range(30)]
        with open_link(port, ASK) as link:
            assert link.recv(4096).startswith(b"HTTP/1.1 200")
        told = [link.recv(4096) for link in silent[:10]]
        assert all(text.startswith(b"HTTP/1.1 503") and b'"code": "busy"' in text for text in told)
        for link in silent:
            link.close()


def test_chunks_of_one_byte_are_cut_and_larger_ones_are_not():
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with listening(20) as port:
        with open_link(port, head) as link, contextlib.suppress(OSError):
            link.sendall(b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n")
            assert not link.recv(4096)
        with open_link(port, head) as link:
            link.sendall((b"40\r\n" + b"x" * 64 + b"\r\n") * 20_000 + b"0\r\n\r\n")
            assert link.recv(4096).startswith(b"HTTP/1.1 200")


def front(app=hello, **changes):
    return Front(app, **{"limits": Limits(), "key": None, "hosts": frozenset(), "most": 4, **changes})


def scope_of(path):
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "path": path, "headers": headers}


def call(layer, *messages, path="/v1/completions"):
    """(status, body) of a POST whose body comes as `messages`; then the caller waits."""

    async def go():
        sent, left = [], list(messages)

        async def receive():
            if left:
                return left.pop(0)
            await asyncio.sleep(30)

        async def send(message):
            sent.append(message)

        await layer(scope_of(path), receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])

    return asyncio.run(go())


def piece(body, more=False):
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_that_comes_too_slowly_is_cut(monkeypatch):
    monkeypatch.setattr(serve_front, "BODY_S", 0.05)
    status, body = call(front(), piece(b"{", True))
    assert status == 408 and "too slowly" in json.loads(body)["error"]["message"]


def test_bodies_that_together_hold_too_much_are_put_off_and_small_ones_pass():
    layer = front(limits=Limits(held=1_000_000))
    first, second, small = (Incoming(layer) for _ in range(3))
    first.holds(900_000)
    with pytest.raises(Refused, match="too many large requests") as caught:
        second.holds(300_000)
    assert caught.value.status == 503
    small.holds(60_000)
    first.holds(0)
    second.holds(300_000)
    second.holds(0)
    assert call(layer, piece(b'{"a": "' + b"x" * 200_000, True), piece(b'"}'))[0] == 200
    assert layer.held == 0 and layer.running == 0


def test_values_are_counted_before_they_are_parsed():
    with pytest.raises(Refused, match="JSON values"):
        serve_front.check_values(b"[" * 300_000)
    serve_front.check_values(b'{"a": "' + b"x" * 300_000 + b'"}')


def test_a_caller_who_leaves_ends_the_work():
    ended = []

    async def slow(scope, receive, send):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append(scope["path"])
            raise

    async def go():
        messages = [piece(b"{}"), {"type": "http.disconnect"}]

        async def receive():
            return messages.pop(0)

        await front(slow)(scope_of("/x"), receive, None)

    asyncio.run(go())
    assert ended == ["/x"]


def test_requests_over_the_limit_are_told_to_come_back_but_health_is_answered():
    layer = front(most=1)
    layer.running = 1
    status, body = call(layer, piece(b"{}"))
    assert status == 503 and json.loads(body)["error"]["code"] == "busy"
    assert call(layer, piece(b"{}"), path="/health")[0] == 200


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    from earlyfusion.data.tokenizer import Tokenizer
    from earlyfusion.model.hub.folder import load_model

    folder = write_model(tmp_path_factory.mktemp("front") / "model")
    return Tokenizer.load(folder), load_model(folder).config.vision


def picture(data):
    return [Message("user", (Image(data), Text("what?")))]


def test_what_takes_too_long_or_too_much_memory_is_killed_and_the_next_request_is_served(parts):
    async def go(seconds, memory_mb, job):
        preparer = Preparer(Setup(*parts, "qa", memory_mb=memory_mb), processes=1, seconds=seconds)
        try:
            with pytest.raises(Refused) as caught:
                await preparer.prompt(job, len(job))
            preparer.readers[0].seconds = 60.0
            fine = await preparer.prompt(picture(png(40, 30)), 5)
            whole = Setup(*parts, "qa").encoded(picture(png(40, 30)))
            assert fine.ids.equal(whole.ids) and fine.patches.equal(whole.patches)
            assert fine.grids == tuple(whole.grids)
            assert list(fine.media_positions) == whole.media_positions.tolist()
            return str(caught.value)
        finally:
            preparer.close()

    assert "takes more than 0.2 s to read" in asyncio.run(go(0.2, 2000, "7" * 1_000_000))
    assert "MiB" in asyncio.run(go(60.0, 48, picture(png(4_900, 5_000))))


def test_a_caller_who_leaves_frees_the_process(parts):
    async def go():
        preparer = Preparer(Setup(*parts, "qa", memory_mb=2000), processes=1, seconds=60.0)
        try:
            await preparer.prompt(picture(png(40, 30)), 5)
            first = preparer.readers[0].process.pid
            long = asyncio.ensure_future(preparer.prompt("7" * 1_000_000, 1_000_000))
            await asyncio.sleep(0.05)
            long.cancel()
            await preparer.prompt(picture(png(40, 30)), 5)
            return first, preparer.readers[0].process.pid
        finally:
            preparer.close()

    first, then = asyncio.run(go())
    assert first != then
