"""Where the members of a tar file lie, without unpacking it, and the index file that keeps it.

`tarfile` reads the headers, through a file that gives it nothing else: no member is created, followed or
opened, so a hostile archive can only give wrong bytes. Left out and counted: links, devices, sparse files,
absolute names and names with `..`.

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
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.kernels.files import replacing

INDEX_VERSION = 1
INDEX_SUFFIX = ".index.jsonl"

_LONGEST_ROW = 16 << 20
"""Longest line of an index in bytes: a sample of a quarter of a million members."""
_SHORTEST_ROW, _BLOCK = 8, 1 << 20
"""Least bytes of a row; bytes that are looked through at a time."""
_HEADERS = 1 << 20
"""Most bytes of headers before one member: long names, pax records."""
_DIGITS = re.compile(rb"\d{4096}")
"""No number and no name has so many digits; tarfile takes a time that grows with the square of them."""
_META = re.compile(r"__[^/]*__($|/)")
"""Members that webdataset, too, keeps out of samples."""

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
    refused: Counter[str] = field(default_factory=Counter)
    """Members left out, by kind: outside, link, device, sparse, duplicate, no_extension, other."""


def split_name(name: str) -> tuple[str, str] | None:
    """(key, extension in lower case): cut at the first dot of the file name, as webdataset does; None without
    one."""
    folder, _, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    if not stem or not extension:
        return None
    return (f"{folder}/{stem}" if folder else stem), extension.lower()


def leads_outside(name: str) -> bool:
    """Whether unpacking a member of this name could write outside the folder: absolute, with a drive, or with
    `..`."""
    if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name) or "\0" in name:
        return True
    return ".." in re.split(r"[/\\]", name)


class _Headers:
    """An archive as tarfile sees it: every read is of headers, and of few bytes, whatever a header claims."""

    def __init__(self, pread: Pread, size: int) -> None:
        self._pread, self._size = pread, size
        self._at, self.allowed = 0, _HEADERS

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int) -> None:
        self._at = offset

    def read(self, count: int) -> bytes:
        self.allowed -= max(count, 0)
        if count < 0 or self._at < 0 or self.allowed < 0:
            raise tarfile.ReadError("a header that no archive has")

        data = self._pread(self._at, min(count, self._size - self._at)) if self._at < self._size else b""
        self._at += len(data)
        if _DIGITS.search(data):
            raise tarfile.ReadError("a number that no archive has")
        return data


def scan_tar(pread: Pread, size: int) -> TarScan:
    """Walk the headers of an uncompressed archive of `size` bytes. Never raises for a damaged one (see
    TarScan.cut)."""
    found, headers, end = TarScan(), _Headers(pread, size), 0
    try:
        options: Any = {"fileobj": headers, "encoding": "utf-8", "errors": "surrogateescape"}
        archive = tarfile.TarFile(**options)
        while (info := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # or it keeps all of them
            headers.allowed = _HEADERS
            if info.size < 0 or archive.offset <= end:
                raise tarfile.ReadError("a size below zero leads back")
            end = archive.offset
            _enter(found, info, size)
            if found.cut:
                return found
    except Exception:  # damage makes tarfile raise anything: its own errors, ValueError, RecursionError, ...
        found.cut = True
        return found

    tail = pread(archive.offset, tarfile.BLOCKSIZE)
    found.cut = tail != bytes(tarfile.BLOCKSIZE)
    return found


def _enter(found: TarScan, info: tarfile.TarInfo, size: int) -> None:
    """Add one member to the sample of its name, or say why not."""
    name = info.name.removeprefix("./")
    parts = split_name(name)
    has_data = info.isreg() or info.type not in tarfile.SUPPORTED_TYPES
    if has_data and not info.issparse() and info.offset_data + info.size > size:
        found.cut = True
        if parts:
            found.samples.pop(parts[0], None)  # its last member is torn: the sample is lost with it
    elif info.isdir() or _META.match(name):
        return
    elif leads_outside(name):
        found.refused["outside"] += 1
    elif info.islnk() or info.issym():
        found.refused["link"] += 1
    elif info.isdev():
        found.refused["device"] += 1
    elif info.issparse():
        found.refused["sparse"] += 1
    elif not info.isreg():
        found.refused["other"] += 1
    elif parts is None:
        found.refused["no_extension"] += 1
    elif parts[1] in found.samples.get(parts[0], ()):
        found.refused["duplicate"] += 1
    else:
        found.samples.setdefault(parts[0], {})[parts[1]] = (info.offset_data, info.size)


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
    with replacing(path) as temporary, temporary.open("w", encoding="ascii") as file:
        file.writelines(f"{line}\n" for line in lines)


_MOST = 1 << 48
"""No file has so many bytes: a number beyond is damage."""
Count = Annotated[int, Field(strict=True, ge=0, lt=_MOST)]
"""A number of bytes or samples."""


class IndexHeader(BaseModel):
    """The first line of an index; what a preparation adds is kept."""

    model_config = ConfigDict(extra="allow")

    earlyfusion_index: Literal[1]
    samples: Count
    bytes: Count
    cut: StrictBool
    refused: dict[str, Count]


def _header(line: bytes) -> dict[str, Any]:
    """The header in the first line of an index; raises ValueError when it is none."""
    try:
        return IndexHeader.model_validate(json.loads(line)).model_dump()
    except RecursionError:
        raise ValueError("nested too deep") from None


def stated_samples(index: Path) -> int | None:
    """The number of samples that the first line of an index file states; None when it is no whole header."""
    try:
        with index.open("rb") as file:
            samples: int = _header(file.readline(_LONGEST_ROW))["samples"]
            return samples
    except (OSError, ValueError):
        return None


class ShardIndex:
    """One index file, opened in about a millisecond per 10,000 samples; a sample's line is parsed when it is
    asked for.

    Raises DataError when the file is no index of this version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        damaged = f"{path}: not a whole index of version {INDEX_VERSION}; delete it, it is built anew"
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise DataError(damaged)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

        try:
            line = self._map[: min(self._map.find(b"\n") + 1, _LONGEST_ROW)]
            self.header = _header(line)
        except ValueError:
            raise DataError(damaged) from None

        # Counted before places are held for all of them: a header may claim any number of samples.
        lines, samples = 0, self.header["samples"]
        if samples * _SHORTEST_ROW <= len(self._map):
            lines = sum(self._map[at : at + _BLOCK].count(b"\n") for at in range(0, len(self._map), _BLOCK))
        if lines != samples + 1:
            raise DataError(damaged)
        self._ends = np.flatnonzero(np.frombuffer(self._map, dtype=np.uint8) == ord("\n"))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def cut(self) -> bool:
        """The archive ends early."""
        return bool(self.header["cut"])

    def row(self, position: int) -> list[Any]:
        """[key, [[extension, offset, size], ...], content hash if it has one] of the sample at `position`.

        Raises BadSample (bad_index).
        """
        first, last = int(self._ends[position]) + 1, int(self._ends[position + 1])
        try:
            row = json.loads(self._map[first : min(last, first + _LONGEST_ROW)])
        except (ValueError, RecursionError):
            row = None
        if not _is_row(row):
            raise BadSample(
                f"{self._path.name}, line {position + 2}: no row of an index; delete the file, it is built"
                " anew",
                "bad_index",
            )
        return list(row)

    def sample(self, position: int) -> tuple[str, Members]:
        """(key, members) of the sample at `position`; raises BadSample (bad_index)."""
        row = self.row(position)
        return row[0], {name: (offset, size) for name, offset, size in row[1]}


def _is_row(row: Any) -> bool:
    """Whether a line of an index says where the members of a sample lie."""
    match row:
        case [str(), list() as members] | [str(), list() as members, _]:
            return all(_is_member(member) for member in members)
    return False


def _is_member(member: Any) -> bool:
    match member:
        case [str(), int() as offset, int() as size]:
            return 0 <= offset < _MOST and 0 <= size < _MOST
    return False
