"""Some 250 ways to trouble the endpoint, made on the spot: what each sends, and what may come of it."""

from __future__ import annotations

import base64
import http.client
import io
import json
import random
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from PIL import Image as PILImage

LONGEST = 16 * 4 * 8192
"""Characters that the server of the test reads: 16 for each token of its memory."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATIENCE_S = 90.0
JSON = {"Content-Type": "application/json"}


@dataclass
class Attack:
    """`run(port)` gives "refused" (an error in one line), "answered", or "closed" (the server hung up or was
    left)."""

    name: str
    run: Callable[[int], str]
    allowed: frozenset[str] = field(default=frozenset({"refused"}))


def outcome(status: int, body: bytes) -> str:
    """What an answer says, after a look at the form of an error."""
    if status == 200:
        return "answered"
    error = json.loads(body)["error"]
    message = error["message"]
    assert set(error) == {"message", "type", "param", "code"} and 400 <= status < 600 and status != 500, body
    assert message and "\n" not in message and len(message) < 600, message
    assert not any(
        word in message for word in ("Traceback", "data.decode", "on_bad_sample", "earlyfusion")
    ), message
    return "refused"


def post(
    path: str, body: bytes | Callable[[], bytes], headers: dict[str, str] = JSON
) -> Callable[[int], str]:
    def run(port: int) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        try:
            try:
                connection.request("POST", path, body() if callable(body) else body, headers)
            except (BrokenPipeError, ConnectionResetError):
                return "refused"  # before the body had been sent
            answer = connection.getresponse()
            return outcome(answer.status, answer.read())
        finally:
            connection.close()

    return run


def ask(name: str, path: str, body: Any, *allowed: str) -> Attack:
    """body: bytes, what JSON holds, or a function that makes one of them when it is sent."""

    def made() -> bytes:
        value = body() if callable(body) else body
        return value if isinstance(value, bytes) else json.dumps(value).encode()

    return Attack(name, post(path, made), frozenset(allowed or {"refused"}))


def chat(parts: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, **more}


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def picture(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data)}}


def video(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url_of(data, "video/mp4")}}


# ---- texts and counts
# -----------------------------------------------------------------------------------------------


def texts() -> Iterator[Attack]:
    """Long texts, the longest of the kinds that an audit measured, at both routes."""
    kinds = {
        "words": "the quick brown fox ",
        "letter": "x",
        "space": " ",
        "emoji": "\U0001f600",
        "digit": "7",
        "line": "\n",
    }
    for name, piece in kinds.items():
        for size, path in (
            (LONGEST - 9, CHAT),
            (LONGEST + 1, CHAT),
            (LONGEST + 1, COMPLETIONS),
            (4_000_000, COMPLETIONS),
        ):

            def body(piece: str = piece, size: int = size, path: str = path) -> dict[str, Any]:
                text = (piece * (size // len(piece) + 1))[:size]
                return chat(text) if path == CHAT else {"prompt": text, "max_tokens": 2}

            # up to LONGEST they are read, in a process: half a million spaces are few tokens
            yield ask(f"{size} characters of {name} {path}", path, body, "refused", "answered")
    yield ask("a message of 30 MB", CHAT, lambda: chat("a b, " * 6_000_000))
    yield ask(
        "a prompt of 30 MB of one letter", COMPLETIONS, lambda: b'{"prompt": "' + b"x" * 30_000_000 + b'"}'
    )
    yield ask("5 million escapes", COMPLETIONS, lambda: b'{"prompt": "' + b"\\u0041" * 5_000_000 + b'"}')
    yield ask("30 MB of spaces", COMPLETIONS, lambda: b" " * 30_000_000 + b"{}")


def counts() -> Iterator[Attack]:
    for count in (100, 3_000_000):
        wrong = "[" + ",".join(["5"] * count) + "]"
        yield ask(
            f"{count} ids and an odd one", COMPLETIONS, lambda w=wrong: f'{{"prompt": [{w}, [-1]]}}'.encode()
        )
    yield ask("3,000,000 ids", COMPLETIONS, lambda: b'{"prompt": [' + b"5," * 3_000_000 + b"5]}")
    yield ask("60,000 ids and no place", COMPLETIONS, {"prompt": [5] * 60_000, "max_tokens": 4000, "n": 4})
    yield ask(
        "100,000 turns",
        CHAT,
        lambda: {"messages": [{"role": "user", "content": "x"}] * 100_000},
    )
    yield ask("2,000 turns", CHAT, {"messages": [{"role": "user", "content": "x"}] * 2000})
    yield ask("100,000 prompts", COMPLETIONS, lambda: {"prompt": ["x"] * 100_000})
    yield ask("64 prompts of 16 samples", COMPLETIONS, {"prompt": ["x"] * 64, "n": 16})
    yield ask(
        "200,000 keys",
        CHAT,
        lambda: {**chat("x"), **{f"k{i}": 1 for i in range(200_000)}},
    )
    yield ask("70 keys", CHAT, {**chat("x"), **{f"k{i}": 1 for i in range(70)}})
    yield ask(
        "100,000 stop strings",
        CHAT,
        lambda: chat("x", stop=[f"s{i}" for i in range(100_000)]),
    )
    yield ask("5 stop strings", CHAT, chat("x", stop=list("abcde")))
    yield ask("a stop string of 1 MB", CHAT, chat("x", stop="y" * 1_000_000))
    yield ask("an empty stop string", CHAT, chat("x", stop=[""]))
    yield ask("100,000 parts", CHAT, lambda: chat([{"type": "text", "text": "x"}] * 100_000))
    yield ask("1,100 parts", CHAT, chat([{"type": "text", "text": "x"}] * 1100))
    call = {"function": {"name": "f", "arguments": "{}"}}
    yield ask(
        "10,000 calls",
        CHAT,
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [call] * 10_000}]},
    )
    yield ask("65 pictures", CHAT, chat([picture(b"x")] * 65))
    yield ask("65 frames", CHAT, chat([{"type": "video", "video": ["data:image/png;base64,AAAA"] * 65}]))
    for number, value in enumerate((10**400, 10**9, -1, 1e999, "many", None, [1], {}, 0)):
        for name in ("max_tokens", "n", "temperature", "top_p", "seed"):
            text = json.dumps(chat("x", max_tokens=2) | {name: value})
            yield ask(f"{name} number {number}", CHAT, text.encode(), "refused", "answered")
    for fps in (1e-320, 1e308, 0, -1, "fast"):
        frames = [url_of(small_png())] * 9
        yield ask(f"9 frames at {fps} a second", CHAT, chat([{"type": "video", "video": frames, "fps": fps}]))


def nested() -> Iterator[Attack]:
    deep = {"[": "[" * 100_000 + "]" * 100_000, "{": '{"a":' * 100_000 + "1" + "}" * 100_000}
    for name, text in deep.items():
        yield ask(f"a body of {name} 100,000 deep", CHAT, text.encode())
        for key in ("metadata", "messages", "logit_bias", "tools", "response_format", "stop"):
            yield ask(f"{key} of {name} 100,000 deep", CHAT, f'{{"messages": [], "{key}": {text}}}'.encode())
        for depth in (400, 900, 3000, 100_000):
            inner = (
                '{"a":'
                + (name.replace("{", '{"a":') * depth + "1" + ("]" if name == "[" else "}") * depth)
                + "}"
            )
            call = {"function": {"name": "f", "arguments": inner}}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            body = {
                "messages": [{"role": "user", "content": "x"}, turn, {"role": "user", "content": "y"}],
                "max_tokens": 2,
            }
            yield ask(f"arguments of {name} {depth} deep", CHAT, body, "refused", "answered")


def odd_json(seed: int = 0, count: int = 40) -> Iterator[Attack]:
    """A good request with bytes cut, changed or put in; many are no JSON, some are still good."""
    rng = random.Random(seed)
    good = json.dumps(
        {"model": "model", "n": 1, "stop": ["a"], "temperature": 0.5, **chat("hello \U0001f600")}
    ).encode()
    for number in range(count):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.choice(
                [b"\xff", b'"', b"\\ud800", b"[", b"}", b"\0", b"-", b"1e999", b"NaN", b","]
            )
        yield ask(f"odd JSON {number}", CHAT, bytes(data), "refused", "answered")
    for number, text in enumerate(
        (
            '{"\\ud800": 1}',
            '{"a\\nb": 1}',
            '{"model": "\\udcff\\n"}',
            "[]",
            "1",
            '"x"',
            "null",
            "",
            "NaN",
            "{}",
            '{"messages": "x"}',
        )
    ):
        yield ask(f"odd object {number}", CHAT, text.encode())


# ---- media
# ----------------------------------------------------------------------------------------------------------


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, depth: int = 8, colour: int = 2, rows: int | None = None) -> bytes:
    """A PNG of zeros; with `rows`, only so many of them are there."""
    channels = {0: 1, 2: 3, 6: 4}[colour]
    line, made = bytes(1 + width * channels * depth // 8), zlib.compressobj(1)
    pixels = b"".join(made.compress(line) for _ in range(height if rows is None else rows)) + made.flush()
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def webp(width: int, height: int) -> bytes:
    """34 bytes that say a lossless WebP of this size."""
    bits = (width - 1) | (height - 1) << 14
    body = b"VP8L" + struct.pack("<I", 13) + b"\x2f" + struct.pack("<I", bits) + bytes(9)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def gif(width: int, height: int, frames: int) -> bytes:
    """Frames of one pixel on a large canvas."""
    frame = b"\x21\xf9\x04\x08\x0a\0\0\0\x2c" + struct.pack("<HHHH", 0, 0, 1, 1) + b"\0\x02\x02\x44\x01\0"
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + bytes(6) + frame * frames + b";"


def stored(image: PILImage.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def small_png() -> bytes:
    return stored(PILImage.radial_gradient("L").resize((40, 30)), "PNG")


def pictures(seed: int = 0) -> Iterator[Attack]:
    jpeg = stored(PILImage.new("RGB", (2000, 2000)), "JPEG", progressive=True)
    last = jpeg.rindex(b"\xff\xda")
    icon = b"\0\0\1\0\1\0" + struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, 99, 22)
    made: dict[str, Callable[[], bytes]] = {
        "PNG of 13,377 x 13,377": lambda: png(13_377, 13_377, rows=10),
        "WebP of 34 bytes, 178 million pixels": lambda: webp(16_383, 10_900),
        "WebP of 34 bytes, 24 million pixels": lambda: webp(6_000, 4_000),
        "icon that holds 13,000 x 13,000": lambda: icon + png(13_000, 13_000, rows=1),
        "JPEG of 200,000 scans": lambda: jpeg[:last] + jpeg[last:-2] * 20_000 + b"\xff\xd9",
        "16-bit PNG of 8,000 x 8,000": lambda: png(8_000, 8_000, 16, 0, rows=4),
        "broken PNG of 24 million pixels": lambda: png(6_000, 4_000, rows=4),
        "GIF of 60,000 x 60,000": lambda: gif(60_000, 60_000, 2),
        "nothing": lambda: b"",
        "SVG": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "EPS": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n%%EOF\n",
        "zip": lambda: b"PK\3\4" + bytes(60),
        "text": lambda: b"a picture",
    }
    for name, data in made.items():
        yield ask(f"picture: {name}", CHAT, lambda d=data: chat([picture(d())]))
        yield ask(
            f"frame: {name}",
            CHAT,
            lambda d=data: chat([{"type": "video", "video": [url_of(d())]}]),
        )
    whole, rng = stored(PILImage.effect_noise((99, 77), 60), "PNG"), random.Random(seed)
    for number in range(12):
        data = bytearray(whole)
        for _ in range(9):
            data[rng.randrange(len(data))] = rng.randrange(256)
        yield ask(f"damaged picture {number}", CHAT, chat([picture(bytes(data))]), "refused", "answered")
    large = png(5_000, 4_990)
    yield ask(
        "24 true pictures of 25 million pixels",
        CHAT,
        lambda: chat([picture(large)] * 24),
        "refused",
        "answered",
    )
    frames = {"type": "video", "video": [url_of(large)] * 24}
    yield ask("24 true frames of 25 million pixels", CHAT, lambda: chat([frames]))
    for url in (
        "http://127.0.0.1:1/a",
        "file:///etc/passwd",
        "ftp://x/y",
        "data:image/png,abc",
        "data:image/png;base64,@@",
        "",
        "\ud800",
        "//x/y",
        "data:;base64",
        "gopher://x",
    ):
        yield ask(f"url {url!r}", CHAT, chat([{"type": "image_url", "image_url": {"url": url}}]))


def videos(seed: int = 0) -> Iterator[Attack]:
    session = b"\nv=0\no=- 0 0 IN IP4 127.0.0.1\ns=-\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 15004 RTP/AVP 96\n"
    beginnings = (
        b"AAAAftypjp2 ",
        b"\0\0\0\x18ftypisom\0\0\2\0isom",
        b"AAAAmoov",
        b"\0\0\0\x08skip",
        b"AAAAfree",
        b"\x1a\x45\xdf\xa3\x9f\x42\x82\x84webm",
        b"FLV\1\1\0\0\0\x09\0\0\0\0\x09",
        b"OggS\0\2" + bytes(8),
        b"RIFF\xff\0\0\0AVI LIST",
        b"\0\0\1\xba\x44",
        bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c"),
        b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:1/a.ts\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"",
    )
    for number, beginning in enumerate(beginnings):
        yield ask(f"session description {number}", CHAT, chat([video(beginning + session)]))
    yield ask("GIF of 3,000 frames of 6,000 x 6,000", CHAT, chat([video(gif(6_000, 6_000, 3_000))]))
    yield ask(
        "GIF of 3,000 frames of 200 x 200", CHAT, chat([video(gif(200, 200, 3_000))]), "refused", "answered"
    )
    yield ask("GIF of 100,000 frames", CHAT, lambda: chat([video(gif(9, 9, 100_000))]))
    rng = random.Random(seed)
    for number, beginning in enumerate(beginnings[:11]):
        junk = beginning + rng.randbytes(3000)
        yield ask(f"junk behind a beginning {number}", CHAT, chat([video(junk)]))


# ---- connections
# ----------------------------------------------------------------------------------------------------


def raw(
    name: str, *pieces: bytes, pause_s: float = 0.0, allowed: tuple[str, ...] = ("refused", "closed")
) -> Attack:
    """Bytes as they are; what comes back is an error, an answer, or the end of the connection."""

    def run(port: int) -> str:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as link:
            try:
                for piece in pieces:
                    link.sendall(piece)
                    time.sleep(pause_s)
                status = link.recv(4096).partition(b" ")[2][:3]
            except (BrokenPipeError, ConnectionResetError):
                return "closed"
        return {b"": "closed", b"200": "answered"}.get(status, "refused")

    return Attack(name, run, frozenset(allowed))


def wire() -> Iterator[Attack]:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    tiny = b"1\r\nx\r\n" * 300_000
    yield raw("1.8 MB of one-byte chunks", head + b"Transfer-Encoding: chunked\r\n\r\n" + tiny)
    yield raw(
        "chunk marks of 10 kB",
        head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1;" + b"e" * 10_000 + b"\r\nx\r\n" + tiny,
    )
    yield raw("two lengths", head + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}   ")
    yield raw("length and chunks", head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    for length in (b"-1", b"1e3", b"99999999999999999999", b"0x10", b""):
        yield raw(f"a length of {length!r}", head + b"Content-Length: " + length + b"\r\n\r\n{}")
    yield raw("a head of 10 MB", b"GET /health HTTP/1.1\r\nX: " + b"a" * 10_000_000)
    yield raw(
        "50,000 header lines", b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 50_000 + b"\r\n"
    )
    yield raw("a path of 1 MB", b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for number, junk in enumerate(
        (
            b"\x16\x03\x01\x02\0\x01",
            b"\0" * 99,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET\r\n\r\n",
            b"a" * 999 + b"\r\n\r\n",
        )
    ):
        yield raw(f"no HTTP {number}", junk + b"\r\n\r\n")
    yield raw(
        "1,000 requests in one line",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000,
        allowed=("answered",),
    )
    for host in (
        b"evil.example",
        b"evil.example:8000",
        b"169.254.169.254",
        b"[2001:db8::1]",
        b"localhost.evil.example",
        b"127.0.0.1.evil.example",
    ):
        yield raw(
            f"host {host!r}", b"GET /v1/models HTTP/1.1\r\nHost: " + host + b"\r\n\r\n", allowed=("refused",)
        )
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        yield Attack(f"content type {kind!r}", post(COMPLETIONS, b'{"prompt": "x"}', {"Content-Type": kind}))
    for path in (
        "/v1/../../etc/passwd",
        "/docs",
        "/openapi.json",
        "/v1/models/other",
        "/%00",
        "/" + "a/" * 1000,
    ):
        yield raw(
            f"path {path[:20]!r}",
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(),
            allowed=("refused",),
        )
    for method in ("PUT", "DELETE", "OPTIONS", "TRACE", "BREW"):
        text = (
            f"{method} /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin:"
            " http://evil.example\r\nContent-Length: 0\r\n\r\n"
        )
        yield raw(f"method {method}", text.encode(), allowed=("refused",))


def leavers() -> Iterator[Attack]:
    """Callers who ask for much and go, by FIN or RST, at once or a little later."""
    long = {"max_tokens": 3000, "ignore_eos": True}
    bodies = {
        "whole text": (COMPLETIONS, {"prompt": "x", **long}),
        "whole chat": (CHAT, {**chat("x"), **long, "n": 4}),
        "stream": (COMPLETIONS, {"prompt": "x", "stream": True, **long}),
        "pictures": (CHAT, chat([picture(png(4_000, 4_000))] * 16)),
        "long text": (COMPLETIONS, {"prompt": "9" * (LONGEST - 9), **long}),
    }
    for name, (path, body) in bodies.items():
        for reset in (False, True):
            for seconds in (0.0, 0.3, 1.0):

                def run(
                    port: int,
                    path: str = path,
                    body: Any = body,
                    reset: bool = reset,
                    seconds: float = seconds,
                ) -> str:
                    text = json.dumps(body).encode()
                    head = (
                        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
                        f" application/json\r\nContent-Length: {len(text)}\r\n\r\n"
                    )
                    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as link:
                        link.sendall(head.encode() + text)
                        time.sleep(seconds)
                        if reset:
                            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return "closed"

                yield Attack(
                    f"leaves after {seconds} s: {name}, {'RST' if reset else 'FIN'}",
                    run,
                    frozenset({"closed"}),
                )


def crowd(name: str, count: int, piece: bytes, hold_s: float, *allowed: str) -> Attack:
    """`count` connections that send `piece` and no more; a stranger's request is answered meanwhile."""

    def run(port: int) -> str:
        links = []
        try:
            for _ in range(count):
                link = socket.socket()
                links.append(link)
                link.settimeout(PATIENCE_S)
                link.connect(("127.0.0.1", port))
                try:
                    link.sendall(piece)
                except OSError:
                    continue  # already turned away
            time.sleep(hold_s)
            return post(COMPLETIONS, b'{"prompt": "x", "max_tokens": 1}')(port)
        finally:
            for link in links:
                link.close()

    return Attack(name, run, frozenset(allowed or {"answered"}))


def crowds() -> Iterator[Attack]:
    yield crowd("1,100 half heads", 1100, b"POST /v1/comp", 1.0)
    yield crowd("900 silent callers", 900, b"", 0.5)


def half_bodies() -> Attack:
    """More requests under way than are taken: strangers are told to come back, until the bodies' time is
    over."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
        b" application/json\r\nContent-Length: 99\r\n\r\n{"
    )
    return crowd("400 half bodies", 400, head, 1.0, "refused", "answered")


def attacks() -> list[Attack]:
    """All of them; the last leaves no place for others."""
    makers = (texts, counts, nested, odd_json, pictures, videos, wire, leavers, crowds)
    return [*(attack for make in makers for attack in make()), half_bodies()]
