"""Where the members of a tar file lie, without unpacking it: a header walk of our own and the index it gives.

The walk reads 512-byte headers with positioned reads and never creates, follows or opens anything a header
names, so a hostile archive can only give wrong bytes. Known: POSIX ustar, GNU long names, pax `path` and
`size` records. Left out and counted: links, devices, sparse files, absolute names and names with `..`.

Index file (JSON lines, so that one sample is read without parsing the others):

    {"earlyfusion_index": 1, "shard": "a.tar", "bytes": 10240, "samples": 2, "cut": false, "refused": {}, ...}
    ["key", [["jpg", 512, 8123], ["txt", 9728, 40]]]            key, then extension, offset, size of every
    member
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from earlyfusion.data.errors import BadSample, DataError

BLOCK = 512
INDEX_VERSION = 1
INDEX_SUFFIX = ".index.jsonl"
_MOST = 1 << 48
"""No file has so many bytes: a number beyond is damage."""
_LONGEST_ROW = 16 << 20
"""Longest line of an index in bytes: a sample of a quarter of a million members."""
_SHORTEST_ROW, _BLOCK = 8, 1 << 20
"""Least bytes of a row; bytes that are looked through at a time."""
_LARGEST_EXTENSION = 1 << 20
"""Longest accepted long-name or pax record in bytes; a name is at most 4,096."""
_PAX_RECORD = re.compile(rb"(\d{1,7}) ([^=]+)=")
_META = re.compile(r"__[^/]*__($|/)")  # members that webdataset, too, keeps out of samples

Members = dict[str, tuple[int, int]]
"""Extension -> (offset of the data, size), in bytes."""
Pread = Callable[[int, int], bytes]
"""pread(offset, size): at most `size` bytes from `offset`."""


@dataclass(slots=True)
class TarScan:
    """What a walk over one archive found."""

    samples: dict[str, Members] = field(default_factory=dict)
    """Key -> members, in the order of the first member of each key."""
    cut: bool = False
    """The archive ends early, or goes on as something that is no tar."""
    refused: dict[str, int] = field(default_factory=dict)
    """Members left out, by kind: outside, link, device, sparse, duplicate, no_extension, other."""

    def refuse(self, kind: str) -> None:
        """Count one member that is left out."""
        self.refused[kind] = self.refused.get(kind, 0) + 1


def split_name(name: str) -> tuple[str, str] | None:
    """(key, extension in lower case): cut at the first dot of the file name, as webdataset does; None without
    one."""
    folder, _, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not stem or not dot or not extension:
        return None
    return (f"{folder}/{stem}" if folder else stem), extension.lower()


def leads_outside(name: str) -> bool:
    """Whether unpacking a member of this name could write outside the folder: absolute, with a drive, or with
    `..`."""
    parts = re.split(r"[/\\]", name)
    return (
        name[:1] in ("/", "\\") or ".." in parts or re.match(r"[A-Za-z]:", name) is not None or "\0" in name
    )


def scan_tar(pread: Pread, size: int) -> TarScan:
    """Walk the headers of an uncompressed archive of `size` bytes. Never raises for a damaged one (see
    TarScan.cut)."""
    found = TarScan()
    end = 0
    for name, kind, offset, length, following in _members(pread, size):
        end = following
        if offset + length > size:
            found.cut = True
            parts = split_name(name.removeprefix("./"))
            if parts:
                found.samples.pop(parts[0], None)  # its last member is torn: the sample is lost with it
            return found
        _enter(found, name.removeprefix("./"), kind, offset, length)
    tail = pread(end, BLOCK)
    found.cut = len(tail) < BLOCK or tail.count(0) != BLOCK
    return found


def _enter(found: TarScan, name: str, kind: str, offset: int, length: int) -> None:
    if kind == "folder" or _META.match(name):
        return
    if leads_outside(name):
        return found.refuse("outside")
    if kind != "file":
        return found.refuse(kind)
    parts = split_name(name)
    if parts is None:
        return found.refuse("no_extension")
    members = found.samples.setdefault(parts[0], {})
    if parts[1] in members:
        return found.refuse("duplicate")
    members[parts[1]] = (offset, length)


_KINDS = {b"0": "file", b"\0": "file", b"7": "file", b"5": "folder", b"S": "sparse"}
_KINDS |= dict.fromkeys((b"1", b"2"), "link") | dict.fromkeys((b"3", b"4", b"6"), "device")


def _members(pread: Pread, size: int) -> Iterator[tuple[str, str, int, int, int]]:
    """(name, kind, data offset, data size, offset of the next header) until the end mark, damage or the
    end."""
    position, extra = 0, {}
    while position + BLOCK <= size:
        header = pread(position, BLOCK)
        length = _valid(header)
        if length is None:
            return
        kind, offset = header[156:157], position + BLOCK
        if kind in (b"L", b"K", b"x", b"g"):
            if length > _LARGEST_EXTENSION or offset + length > size:
                return
            if kind == b"L":
                extra["path"] = _text(pread(offset, length))
            elif kind == b"x":
                extra.update(_pax(pread(offset, length)))
            position = offset + _padded(length)
            continue
        prefix = _text(header[345:500]) if header[257:262] == b"ustar" and header[263:265] == b"00" else ""
        name = extra.get("path") or (f"{prefix}/" if prefix else "") + _text(header[:100])
        given = extra.get("size")
        length = int(given) if given and given.isascii() and given.isdigit() and len(given) < 19 else length
        what = _KINDS.get(kind, "other")
        if any(key.startswith("GNU.sparse") for key in extra):
            what = "sparse"
        if kind in (b"0", b"\0") and name.endswith("/"):
            what = "folder"
        if what in ("link", "device", "folder"):
            length = 0
        position, extra = offset + _padded(length), {}
        yield name, what, offset, length, position


def _valid(header: bytes) -> int | None:
    """Data size of a header, or None when it is the end mark, torn or no header at all."""
    if len(header) < BLOCK or header.count(0) == BLOCK:
        return None
    try:
        stored, length = _number(header[148:156]), _number(header[124:136])
    except ValueError:
        return None
    plain = sum(header[:148]) + sum(header[156:]) + 8 * ord(" ")
    signed = plain - 256 * sum(byte > 127 for part in (header[:148], header[156:]) for byte in part)
    return length if stored in (plain, signed) and length >= 0 else None


def _number(raw: bytes) -> int:
    if raw[:1] in (b"\x80", b"\xff"):  # base 256, for files over 8 GiB
        return int.from_bytes(raw[1:], "big") if raw[0] == 0x80 else -1
    return int(raw.split(b"\0")[0].strip() or b"0", 8)


def _padded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def _text(raw: bytes) -> str:
    return raw.split(b"\0")[0].decode("utf-8", "surrogateescape")


def _pax(raw: bytes) -> dict[str, str]:
    records: dict[str, str] = {}
    start = 0
    while match := _PAX_RECORD.match(raw, start):
        end = start + int(match[1])
        if not match.end() < end <= len(raw):
            break
        records[match[2].decode("utf-8", "replace")] = raw[match.end() : end - 1].decode("utf-8", "replace")
        start = end
    return records


def index_lines(
    scan: TarScan, shard: str, size: int, *, digests: Mapping[str, str] | None = None, **facts: Any
) -> Iterator[str]:
    """The lines of an index file; `facts` go into the header, `digests` (key -> content hash) behind the
    members."""
    header = {"earlyfusion_index": INDEX_VERSION, "shard": shard, "bytes": size, "samples": len(scan.samples)}
    yield json.dumps({**header, "cut": scan.cut, "refused": scan.refused, **facts})
    for key, members in scan.samples.items():
        row: list[Any] = [key, [[name, *where] for name, where in members.items()]]
        if digests is not None:
            row.append(digests[key])
        yield json.dumps(row)


def write_index(path: Path, lines: Iterator[str]) -> None:
    """Write an index file in one step: whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="ascii") as file:
        for line in lines:
            file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class ShardIndex:
    """One index file, opened in about a millisecond per 10,000 samples; a sample's line is parsed when it is
    asked for.

    Raises DataError when the file is no index of this version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self._map = (
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                if os.fstat(file.fileno()).st_size
                else b""
            )
        self.header = _header(self._map[: min(self._map.find(b"\n") + 1, _LONGEST_ROW)])
        samples = self.header.get("samples", -1)
        lines = 0
        if 0 <= samples and samples * _SHORTEST_ROW <= len(
            self._map
        ):  # before places are held for all of them
            lines = sum(self._map[at : at + _BLOCK].count(b"\n") for at in range(0, len(self._map), _BLOCK))
        if samples < 0 or lines != samples + 1:
            raise DataError(
                f"{path}: not a whole index of version {INDEX_VERSION}; delete it, it is built anew"
            )
        self._ends = np.flatnonzero(np.frombuffer(self._map, dtype=np.uint8) == ord("\n"))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def cut(self) -> bool:
        """The archive ends early."""
        return bool(self.header["cut"])

    def row(self, position: int) -> list[Any]:
        """[key, [[extension, offset, size], ...], content hash if it has one] of the sample at `position`."""
        first, last = int(self._ends[position]) + 1, int(self._ends[position + 1])
        try:
            row: list[Any] = json.loads(self._map[first:last]) if last - first <= _LONGEST_ROW else []
        except (ValueError, RecursionError):
            row = []
        if not _whole_row(row):
            raise BadSample(
                f"{self._path.name}, line {position + 2}: no row of an index; delete the file, it is built"
                " anew",
                "bad_index",
            )
        return row

    def sample(self, position: int) -> tuple[str, Members]:
        """(key, members) of the sample at `position`; raises BadSample (bad_index)."""
        row = self.row(position)
        return row[0], {name: (offset, size) for name, offset, size in row[1]}


def _count(value: object) -> bool:
    """Whether this may be a number of bytes or samples."""
    return type(value) is int and 0 <= value < _MOST


def _whole_header(header: object) -> bool:
    """Whether the first line of an index is of this version, every part of it of the right kind."""
    return (
        isinstance(header, dict)
        and header.get("earlyfusion_index") == INDEX_VERSION
        and all(_count(header.get(name)) for name in ("samples", "bytes"))
        and isinstance(header.get("cut"), bool)
        and isinstance(header.get("refused"), dict)
        and all(_count(number) for number in header["refused"].values())
    )


def _whole_row(row: object) -> bool:
    """Whether a line of an index says where the members of a sample lie."""
    return (
        isinstance(row, list)
        and len(row) in (2, 3)
        and isinstance(row[0], str)
        and isinstance(row[1], list)
        and all(isinstance(m, list) and len(m) == 3 and isinstance(m[0], str) for m in row[1])
        and all(_count(m[1]) and _count(m[2]) for m in row[1])
    )


def _header(line: bytes) -> dict[str, Any]:
    """The first line of an index; {} when it is none."""
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return header if _whole_header(header) else {}


def stated_samples(index: Path) -> int | None:
    """The number of samples that the first line of an index file states; None when it is no whole header."""
    try:
        with index.open("rb") as file:
            return _header(file.readline(_LONGEST_ROW)).get("samples")
    except OSError:
        return None
