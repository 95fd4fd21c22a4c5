"""A tar can name anything; nothing outside the members we ask for is read, and nothing is ever written."""

import os
import subprocess
import sys
import tarfile
import time

import pytest

from earlyfusion.data.shards.read import Shards, scan_tar

from .shard_files import captions, picture, write_tar

READER = """
import os, sys
cache = os.path.realpath(os.environ["EF_CACHE"])
def watch(event, args):
    if event == "open":
        path, mode, flags = (list(args) + [None, 0])[:3]
        writes = (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        named = isinstance(path, (str, bytes))
        if writes and named and not os.path.realpath(os.fsdecode(path)).startswith(cache):
            print("WRITE", path); os._exit(9)
        if isinstance(path, (str, bytes)) and b"secret" in os.fsencode(path):
            print("READ", path); os._exit(9)
    if event in ("os.mkdir", "os.symlink", "os.link", "os.mknod", "os.rename", "os.remove", "os.chmod"):
        if not os.path.realpath(os.fsdecode(args[0])).startswith(cache):
            print(event, args); os._exit(9)
import webdataset
from earlyfusion.data.sources.base import SourceConfig, build_source
sys.dont_write_bytecode = True
sys.addaudithook(watch)
source = build_source(SourceConfig(name="s", kind="webdataset", path=sys.argv[1]), val_fraction=0.0)
from earlyfusion.data.errors import BadSample
for i in range(len(source)):
    try:
        print("OK", source.get(i, 0).key)
    except BadSample as error:
        print("BAD", error.reason)
"""


pytestmark = pytest.mark.usefixtures("own_cache")


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def hostile(folder):
    secret = folder / "secret.txt"
    secret.write_text("the secret")
    members = [
        *captions(1),
        ("../outside.jpg", picture(1)),
        ("../outside.txt", b"escaped"),
        (f"{folder}/absolute.txt", b"escaped"),
        ("a/../../b.txt", b"escaped"),
        ("..\\windows.txt", b"escaped"),
        ("C:\\x.txt", b"escaped"),
        ("\\\\host\\x.txt", b"escaped"),
        special("000001.txt", tarfile.SYMTYPE, str(secret)),
        ("000001.jpg", picture(1)),
        special("000002.txt", tarfile.LNKTYPE, str(secret)),
        ("000002.jpg", picture(2)),
        special("dev.txt", tarfile.CHRTYPE),
        special("fifo.txt", tarfile.FIFOTYPE),
        special("dir.txt", tarfile.DIRTYPE),
        *captions(1, 3),
    ]
    return write_tar(folder / "evil.tar", members)


def test_links_devices_and_paths_outside_are_left_out_and_counted(tmp_path):
    shards = Shards(str(hostile(tmp_path)))
    assert shards.index(0).header["refused"] == {"outside": 7, "link": 2, "device": 2}
    keys = [shards.key(0, i) for i in range(shards.usable[0])]
    assert keys == ["000000", "000001", "000002", "000003"]


def test_a_hostile_tar_never_touches_the_file_system(tmp_path):
    """The whole reading runs under an audit hook that ends the process at a write outside the cache."""
    inside = tmp_path / "inside" / "deep"
    inside.mkdir(parents=True)
    path = hostile(inside)
    before = sorted(p for p in tmp_path.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-B", "-c", READER, str(path)],
        capture_output=True,
        text=True,
        cwd=inside,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split("\n")[:4] == [
        "OK evil.tar/000000",
        "BAD missing_member",
        "BAD missing_member",
        "OK evil.tar/000003",
    ]
    after = sorted(p for p in tmp_path.rglob("*") if "cache" not in p.parts)
    assert after == before


def test_a_header_that_claims_more_than_there_is_reserves_no_memory(tmp_path):
    info = tarfile.TarInfo("000001.jpg")
    info.size = 1 << 60
    path = tmp_path / "a.tar"
    good = write_tar(path, captions(1), tarfile.USTAR_FORMAT).read_bytes().rstrip(b"\0")
    good += b"\0" * (-len(good) % 512)
    path.write_bytes(good + info.tobuf(tarfile.GNU_FORMAT) + b"\0" * 2048)
    shards = Shards(str(path))
    assert shards.usable == [1] and shards.cut == [True]


def header(name, kind, size=0):
    info = tarfile.TarInfo(name)
    info.type = kind
    raw = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    raw[124:136] = size.to_bytes(12, "big", signed=True) if size < 0 else b"%011o\0" % size
    raw[148:156] = b"%06o\0 " % (sum(raw[:148]) + sum(raw[156:]) + 8 * ord(" "))
    return bytes(raw)


HOSTILE_HEADERS = {
    "a size below zero": header("a.txt", b"0", -4096),
    "an extension below zero": header("x", b"x", -512),
    "extensions without end": header("x", b"x", 0) * 4000,
    "digits without end": header("x", b"x", 1 << 19) + b"1" * (1 << 19),
    "a large extension": header("x", b"L", 1 << 30),
    "a sparse map without end": header("x", b"x", 44)
    + b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"
    + bytes(468),
}


@pytest.mark.parametrize("kind", HOSTILE_HEADERS)
def test_headers_made_to_do_harm_end_the_walk_at_once(tmp_path, kind):
    good = write_tar(tmp_path / "a.tar", captions(1), tarfile.USTAR_FORMAT).read_bytes().rstrip(b"\0")
    good += bytes(-len(good) % 512)
    tail = header("b.txt", b"0", 9) + b"999999\n" + b"1\n" * (1 << 20)
    data, reads = good + HOSTILE_HEADERS[kind] + tail, []

    def pread(offset, size):
        reads.append(size)
        return data[offset : offset + size]

    start = time.perf_counter()
    found = scan_tar(pread, len(data))
    # Measured below 0.1 s; without limits some of them take minutes, or never end.
    assert found.cut and list(found.samples) == ["000000"] and time.perf_counter() - start < 2
    assert max(reads) <= 1 << 20 and sum(reads) < 4 << 20
