"""Some 250 ways to trouble the endpoint, made on the spot: what each sends, and what may come of it."""

import base64
import http.client
import io
import json
import random
import socket
import struct
import time
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any

from PIL import Image as PILImage

LONGEST = 16 * 4 * 8192
"""Characters that the server of the test reads: 16 for each token of its memory."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EITHER = ("refused", "answered")
PATIENCE_S = 90.0
LOCAL = b"Host: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + LOCAL + b"Content-Type: application/json\r\n"


@dataclass
class Attack:
    """`run(port)` gives "refused" (an error in one line), "answered", or "closed" (the server hung up or was
    left)."""

    name: str
    run: Any
    allowed: tuple = ("refused",)


def outcome(status, body):
    """What an answer says, after a look at the form of an error."""
    if status == 200:
        return "answered"
    error = json.loads(body)["error"]
    message = error["message"]
    assert set(error) == {"message", "type", "param", "code"} and 400 <= status < 600 and status != 500, body
    assert message and "\n" not in message and len(message) < 600, message
    inner = ("Traceback", "data.decode", "on_bad_sample", "earlyfusion")
    assert not any(word in message for word in inner), message
    return "refused"


def post(path, body, port, kind="application/json"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        try:
            connection.request("POST", path, encoded(body), {"Content-Type": kind})
        except (BrokenPipeError, ConnectionResetError):
            return "refused"  # before the body had been sent
        answer = connection.getresponse()
        return outcome(answer.status, answer.read())
    finally:
        connection.close()


def encoded(body):
    """body: bytes, what JSON holds, or a function that makes one of them when it is sent."""
    value = body() if callable(body) else body
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def ask(name, path, body, allowed=("refused",)):
    return Attack(name, partial(post, path, body), allowed)


def chat(parts, **more):
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, **more}


def url_of(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def picture(data):
    return {"type": "image_url", "image_url": {"url": url_of(data)}}


def frames(*urls, **more):
    return chat([{"type": "video", "video": list(urls), **more}])


def video(data):
    return chat([{"type": "video_url", "video_url": {"url": url_of(data, "video/mp4")}}])


# ---- texts and counts

KINDS = r"""
words: the quick brown fox
letters: x
spaces: \u0020
digits: 7
line ends: \n
smileys: \ud83d\ude00
"""
"""Long texts, of the kinds that an audit measured to be slow, as JSON writes them."""


def texts():
    # Up to LONGEST they are read, in a process: half a million spaces are few tokens.
    for line in KINDS.strip().splitlines():
        name, piece = line.split(": ")
        length = len(json.loads(f'"{piece}"'))
        for size in (LONGEST - 9, LONGEST + 1):
            yield repeated(f"{size} {name} in a chat", CHAT, ASKED % "@", piece, size // length, EITHER)
        for size in (LONGEST + length, 4_000_000):
            body = '{"prompt": "@", "max_tokens": 2}'
            yield repeated(f"{size} {name}", COMPLETIONS, body, piece, size // length)


ASKED = '{"messages": [{"role": "user", "content": "%s"}], "max_tokens": 2}'
REPEATED = r"""
a message of 30 MB | /chat/completions | {"messages": [{"role": "user", "content": "@"}]} | a b, | 7000000
30 MB of one letter | /completions | {"prompt": "@"} | x | 30000000
escapes | /completions | {"prompt": "@"} | \u0041 | 5000000
30 MB of white space | /completions | @{} | \t | 30000000
ids and an odd one | /completions | {"prompt": [[@], [-1]]} | 5, | 100 3000000
ids | /completions | {"prompt": [@]} | 5, | 3000000
ids and no place | /completions | {"prompt": [@], "max_tokens": 4000, "n": 4} | 5, | 60000
turns | /chat/completions | {"messages": [@]} | {"role": "user", "content": "x"}, | 2000 100000
prompts | /completions | {"prompt": [@]} | "x", | 100000
prompts of 16 samples | /completions | {"prompt": [@], "n": 16} | "x", | 64
stop strings | /completions | {"prompt": "x", "stop": [@]} | "s", | 5 100000
letters of a stop string | /completions | {"prompt": "x", "stop": "@"} | y | 0 1000000
parts | /chat/completions | {"messages": [{"role": "user", "content": [@]}]} \
    | {"type": "text", "text": "x"}, | 1100 100000
calls | /chat/completions | {"messages": [{"role": "assistant", "tool_calls": [@]}]} \
    | {"function": {"name": "f"}}, | 10000
""".replace("\\\n   ", "")
"""Name, path, body, what stands in the place of its @, how many times."""


def repeated(name, path, body, piece, count, allowed=("refused",)):
    piece = piece.replace("\\t", "\t")
    return ask(name, path, lambda: body.replace("@", (piece * count).rstrip(",")).encode(), allowed)


NUMBERS = '1000000000 -1 Infinity "many" null [1] {} 0'.split()


def counts():
    for line in REPEATED.strip("\n").splitlines():
        name, path, body, piece, numbers = line.split(" | ")
        for count in numbers.split():
            yield repeated(f"{count} {name}", "/v1" + path, body, piece, int(count))
    for count in (70, 200_000):
        yield ask(f"{count} keys", CHAT, lambda c=count: chat("x", **{f"k{i}": 1 for i in range(c)}))
    yield ask("65 pictures", CHAT, chat([picture(b"x")] * 65))
    yield ask("65 frames", CHAT, frames(*["data:image/png;base64,AAAA"] * 65))
    for number, value in enumerate(["1" + "0" * 400, *NUMBERS]):
        for name in ("max_tokens", "n", "temperature", "top_p", "seed"):
            body = f'{(ASKED % "x")[:-1]}, "{name}": {value}}}'
            yield ask(f"{name} number {number}", CHAT, body.encode(), EITHER)
    for fps in (1e-320, 1e308, 0, -1, "fast"):
        yield ask(f"9 frames at {fps} a second", CHAT, frames(*[url_of(small_png())] * 9, fps=fps))


def nested():
    for opening, closing in ("[]", ('{"a":', "}")):
        deep = lambda depth, a=opening, b=closing: a * depth + "1" * (a != "[") + b * depth
        text = deep(100_000)
        yield ask(f"a body of {opening} 100,000 deep", CHAT, text.encode())
        for key in "metadata messages logit_bias tools response_format stop".split():
            body = f'{{"messages": [], "{key}": {text}}}'
            yield ask(f"{key} of {opening} 100,000 deep", CHAT, body.encode())
        for depth in (400, 900, 3000, 100_000):
            call = {"function": {"name": "f", "arguments": f'{{"a":{deep(depth)}}}'}}
            body = chat("x")
            body["messages"] += [{"role": "assistant", "content": "", "tool_calls": [call]}]
            yield ask(f"arguments of {opening} {depth} deep", CHAT, body, EITHER)


PIECES = [b"\xff", b'"', b"\\ud800", b"[", b"}", b"\0", b"-", b"1e999", b"NaN", b","]
OBJECTS = r"""{"\ud800": 1}|{"a\nb": 1}|{"model": "\udcff\n"}|[]|1|"x"|null||NaN|{}|{"messages": "x"}"""


def damaged(rng, data, places, pieces):
    """Bytes with some cut, changed or put in."""
    made = bytearray(data)
    for _ in range(places):
        at = rng.randrange(len(made))
        made[at : at + rng.randrange(3)] = rng.choice(pieces)
    return bytes(made)


def odd_json():
    """A good request with bytes cut, changed or put in; many are no JSON, some are still good."""
    rng = random.Random(0)
    good = encoded({"model": "model", "n": 1, "stop": ["a"], "temperature": 0.5, **chat("hello \U0001f600")})
    for number in range(40):
        yield ask(f"odd JSON {number}", CHAT, damaged(rng, good, rng.randrange(1, 4), PIECES), EITHER)
    for number, text in enumerate(OBJECTS.split("|")):
        yield ask(f"odd object {number}", CHAT, text.encode())


# ---- media


def chunk(name, body):
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width, height, depth=8, colour=2, rows=None):
    """A PNG of zeros; with `rows`, only so many of them are there."""
    channels = {0: 1, 2: 3, 6: 4}[colour]
    line, made = bytes(1 + width * channels * depth // 8), zlib.compressobj(1)
    pixels = b"".join(made.compress(line) for _ in range(height if rows is None else rows)) + made.flush()
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def webp(width, height):
    """34 bytes that say a lossless WebP of this size."""
    bits = (width - 1) | (height - 1) << 14
    body = b"VP8L" + struct.pack("<I", 13) + b"\x2f" + struct.pack("<I", bits) + bytes(9)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def gif(width, height, count):
    """Frames of one pixel on a large canvas."""
    frame = b"\x21\xf9\x04\x08\x0a\0\0\0\x2c" + struct.pack("<HHHH", 0, 0, 1, 1) + b"\0\x02\x02\x44\x01\0"
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + bytes(6) + frame * count + b";"


def stored(image, kind, **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def small_png():
    return stored(PILImage.radial_gradient("L").resize((40, 30)), "PNG")


def jpeg_of_many_scans():
    jpeg = stored(PILImage.new("RGB", (2000, 2000)), "JPEG", progressive=True)
    last = jpeg.rindex(b"\xff\xda")
    return jpeg[:last] + jpeg[last:-2] * 20_000 + b"\xff\xd9"


ICON = b"\0\0\1\0\1\0" + struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, 99, 22)
URLS = "http://127.0.0.1:1/a file:///etc/passwd ftp://x/y data:image/png,abc data:image/png;base64,@@"
URLS += " \ud800 //x/y data:;base64 gopher://x"


def pictures():
    made = {
        "PNG of 13,377 x 13,377": lambda: png(13_377, 13_377, rows=10),
        "WebP of 34 bytes, 178 million pixels": lambda: webp(16_383, 10_900),
        "WebP of 34 bytes, 24 million pixels": lambda: webp(6_000, 4_000),
        "icon that holds 13,000 x 13,000": lambda: ICON + png(13_000, 13_000, rows=1),
        "JPEG of 200,000 scans": jpeg_of_many_scans,
        "16-bit PNG of 8,000 x 8,000": lambda: png(8_000, 8_000, 16, 0, rows=4),
        "broken PNG of 24 million pixels": lambda: png(6_000, 4_000, rows=4),
        "GIF of 60,000 x 60,000": lambda: gif(60_000, 60_000, 2),
        "nothing": bytes,
        "SVG": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "EPS": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n%%EOF\n",
        "zip": lambda: b"PK\3\4" + bytes(60),
        "text": lambda: b"a picture",
    }
    for name, data in made.items():
        yield ask(f"picture: {name}", CHAT, lambda d=data: chat([picture(d())]))
        yield ask(f"frame: {name}", CHAT, lambda d=data: frames(url_of(d())))
    whole, rng = stored(PILImage.effect_noise((99, 77), 60), "PNG"), random.Random(0)
    for number in range(12):
        data = damaged(rng, whole, 9, [rng.randbytes(1)])
        yield ask(f"damaged picture {number}", CHAT, chat([picture(data)]), EITHER)
    large = png(5_000, 4_990)
    yield ask("24 pictures of 25 million pixels", CHAT, lambda: chat([picture(large)] * 24), EITHER)
    yield ask("24 frames of 25 million pixels", CHAT, lambda: frames(*[url_of(large)] * 24))
    for url in ["", *URLS.split(" ")]:
        yield ask(f"url {url!r}", CHAT, chat([{"type": "image_url", "image_url": {"url": url}}]))


# How containers begin that a demuxer knows, and two that name other files.
BEGINNINGS = [
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
]
SESSION = b"\nv=0\no=- 0 0 IN IP4 127.0.0.1\ns=-\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 15004 RTP/AVP 96\n"


def videos():
    rng = random.Random(0)
    for number, beginning in enumerate(BEGINNINGS):
        yield ask(f"session description {number}", CHAT, video(beginning + SESSION))
        yield ask(f"junk behind a beginning {number}", CHAT, video(beginning + rng.randbytes(3000)))
    yield ask("GIF of 3,000 frames of 6,000 x 6,000", CHAT, video(gif(6_000, 6_000, 3_000)))
    yield ask("GIF of 3,000 frames of 200 x 200", CHAT, video(gif(200, 200, 3_000)), EITHER)
    yield ask("GIF of 100,000 frames", CHAT, lambda: video(gif(9, 9, 100_000)))


# ---- connections


def send(data, port):
    """Bytes as they are; what comes back is an error, an answer, or the end of the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as link:
        try:
            link.sendall(data)
            status = link.recv(4096).partition(b" ")[2][:3]
        except (BrokenPipeError, ConnectionResetError):
            return "closed"
    return {b"": "closed", b"200": "answered"}.get(status, "refused")


def raw(name, data, allowed=("refused", "closed")):
    return Attack(name, partial(send, data), allowed)


HOSTS = "evil.example evil.example:8000 169.254.169.254 [2001:db8::1] localhost.evil.example"
HOSTS += " 127.0.0.1.evil.example"
PATHS = ["/" + "a/" * 1000, *"/v1/../../etc/passwd /docs /openapi.json /v1/models/other /%00".split()]
JUNK = [b"\x16\x03\x01\x02\0\x01", b"\0" * 99, b"PRI * HTTP/2.0\r\n\r\nSM", b"GET", b"a" * 999]


def wire():
    tiny, chunked = b"1\r\nx\r\n" * 300_000, b"Transfer-Encoding: chunked\r\n\r\n"
    yield raw("1.8 MB of one-byte chunks", POST + chunked + tiny)
    yield raw("chunk marks of 10 kB", POST + chunked + b"1;" + b"e" * 10_000 + b"\r\nx\r\n" + tiny)
    yield raw("two lengths", POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}   ")
    yield raw("length and chunks", POST + b"Content-Length: 5\r\n" + chunked + b"0\r\n\r\n")
    for length in (b"-1", b"1e3", b"99999999999999999999", b"0x10", b""):
        yield raw(f"a length of {length!r}", POST + b"Content-Length: " + length + b"\r\n\r\n{}")
    get = b"GET /health HTTP/1.1\r\n"
    yield raw("a head of 10 MB", get + b"X: " + b"a" * 10_000_000)
    yield raw("50,000 header lines", get + LOCAL + b"X: a\r\n" * 50_000 + b"\r\n")
    yield raw("a path of 1 MB", b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n" + LOCAL + b"\r\n")
    yield raw("1,000 requests in one line", (get + LOCAL + b"\r\n") * 1000, ("answered",))
    for number, junk in enumerate(JUNK):
        yield raw(f"no HTTP {number}", junk + b"\r\n\r\n" * 2)
    for host in HOSTS.split():
        text = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n"
        yield raw(f"host {host}", text.encode(), ("refused",))
    for path in PATHS:
        text = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        yield raw(f"path {path[:20]!r}", text.encode(), ("refused",))
    for method in ("PUT", "DELETE", "OPTIONS", "TRACE", "BREW"):
        text = f"{method} /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n"
        yield raw(f"method {method}", text.encode() + b"Content-Length: 0\r\n\r\n", ("refused",))
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        yield Attack(f"content type {kind!r}", partial(post, COMPLETIONS, b'{"prompt": "x"}', kind=kind))


def leave(path, body, reset, seconds, port):
    """Ask for much and go, by FIN or RST."""
    text = encoded(body)
    head = POST.replace(COMPLETIONS.encode(), path.encode()) + b"Content-Length: %d\r\n\r\n" % len(text)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as link:
        link.sendall(head + text)
        time.sleep(seconds)
        if reset:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return "closed"


def leavers():
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
                way = partial(leave, path, body, reset, seconds)
                yield Attack(f"leaves after {seconds} s (reset: {reset}): {name}", way, ("closed",))


def crowd(count, piece, hold_s, port):
    """`count` connections that send `piece` and no more; a stranger's request is answered meanwhile."""
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
        return post(COMPLETIONS, b'{"prompt": "x", "max_tokens": 1}', port)
    finally:
        for link in links:
            link.close()


def crowds():
    yield Attack("1,100 half heads", partial(crowd, 1100, b"POST /v1/comp", 1.0), ("answered",))
    yield Attack("900 silent callers", partial(crowd, 900, b"", 0.5), ("answered",))
    # More requests under way than are taken: strangers are told to come back, until the bodies' time is over.
    yield Attack("400 half bodies", partial(crowd, 400, POST + b"Content-Length: 99\r\n\r\n{", 1.0), EITHER)


def attacks():
    """All of them; the last leaves no place for others."""
    found = []
    for make in (texts, counts, nested, odd_json, pictures, videos, wire, leavers, crowds):
        found += make()
    return found
