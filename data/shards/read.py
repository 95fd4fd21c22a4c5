"""Shards: where the members of a tar file lie, and random access to samples by (shard, position).

`tarfile` reads the headers, through a file that gives it nothing else: no member is created, followed or
opened, so a hostile archive can only give wrong bytes. Left out and counted: links, devices, sparse files,
absolute names and names with `..`.

Index file (JSON lines, so that one sample is read without parsing the others):

    {"earlyfusion_index": 1, "shard": "a.tar", "bytes": 10240, "samples": 2, "cut": false, "refused": {}, ...}
    ["key", [["jpg", 512, 8123], ["txt", 9728, 40]]]            key, then extension, offset, size of every
    member

How many samples a shard holds and where they lie is taken from the index beside the shard, the index in the
cache, or one walk over the shard's headers (then kept in the cache); of a remote shard, its number of samples
from the index.json of the folder (written by `earlyfusion prepare`). An index whose byte count is not that of
the shard is not used.

Not read by the webdataset package, whose shards these are (its TarWriter writes them, its WebDataset opens
them): it reads in sequence only, so a resume would read again what was read. Samples of 40 kB in one process,
measured side by side: 53,000 a second of CPU time here, in any order, 14,300 there; number 3,900 of 4,000
first after 0.8 ms and 0.86 s.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, StrictBool, TypeAdapter

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.formats import Group
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.shards.fetch import (
    HTTP,
    Count,
    as_local,
    cache_root,
    expand,
    is_folder,
    locked,
    plain_copy,
    read_manifest,
    short_names,
    stamp,
)
from earlyfusion.data.shards.remote import LOG, TOGETHER, RemoteFile
from earlyfusion.kernels.files import Record, replacing

INDEX_VERSION = 1
INDEX_SUFFIX = ".index.jsonl"

_LONGEST_ROW = 16 << 20
"""Longest line of an index in bytes: a sample of a quarter of a million members."""
_SHORTEST_ROW = 8
"""Least bytes of a row."""
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
    # Only the file name is cut: folders may hold dots.
    folder, _, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    if not stem or not extension:
        return None
    return (f"{folder}/{stem}" if folder else stem), extension.lower()


def leads_outside(name: str) -> bool:
    """Whether unpacking a member of this name could write outside the folder: absolute, with a drive, or with
    `..`."""
    # Also what is absolute on another system: the shard may be unpacked there.
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
        # Counted over all headers of one member: a chain of small ones is as long as a large one.
        self.allowed -= max(count, 0)
        if count < 0 or self._at < 0 or self.allowed < 0:
            raise tarfile.ReadError("a header that no archive has")

        # Never more than the file has, whatever a header claims.
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
        # Names need not be UTF-8; they come back as the same bytes.
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

    # tarfile takes any block it cannot read for the end; a true end is zeros.
    tail = pread(archive.offset, tarfile.BLOCKSIZE)
    found.cut = tail != bytes(tarfile.BLOCKSIZE)
    return found


def _enter(found: TarScan, info: tarfile.TarInfo, size: int) -> None:
    """Add one member to the sample of its name, or say why not."""
    # tar . writes every name with it.
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
    # In ASCII: half a character in a name is written as its escape.
    with replacing(path) as temporary, temporary.open("w", encoding="ascii") as file:
        file.writelines(f"{line}\n" for line in lines)


class IndexHeader(BaseModel):
    """The first line of an index; what a preparation adds is kept."""

    model_config = ConfigDict(extra="allow")

    earlyfusion_index: Literal[1]
    samples: Count
    bytes: Count
    cut: StrictBool
    refused: dict[str, Count]


class IndexRow(NamedTuple):
    """Every other line: a sample."""

    # Not said to be strings: pydantic refuses half a character, which names of files may hold.
    key: Any
    members: list[tuple[Any, Count, Count]]
    """(extension, offset, size)"""
    digest: Any = None
    """Hash of the content, if a preparation made the index."""


_ROW = TypeAdapter(IndexRow)


def _parse(line: bytes) -> Any:
    """A line as JSON; raises ValueError."""
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("nested too deep") from None


def read_header(path: Path) -> Record:
    """The first line of an index file; raises DataError when it is none of this version."""
    # This line alone: a folder of ten thousand shards is opened without a look at their samples.
    with path.open("rb") as file:
        line = file.readline(_LONGEST_ROW)
    try:
        return IndexHeader.model_validate(_parse(line)).model_dump()
    except ValueError:
        raise DataError(_damaged(path)) from None


def _damaged(path: Path) -> str:
    return f"{path}: not a whole index of version {INDEX_VERSION}; delete it, it is built anew"


class ShardIndex:
    """One index file, opened in about a millisecond per 10,000 samples; a sample's line is parsed when it is
    asked for.

    Raises DataError when the file is no index of this version.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.header = path, read_header(path)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # Counted before places are held for all of them: a header may claim any number of samples.
        ends, samples = np.frombuffer(self._map, dtype=np.uint8) == ord("\n"), self.header["samples"]
        if samples * _SHORTEST_ROW > len(ends) or np.count_nonzero(ends) != samples + 1:
            raise DataError(_damaged(path))
        self._ends = np.flatnonzero(ends)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def row(self, position: int) -> IndexRow:
        """The sample at `position`; raises BadSample (bad_index)."""
        # Only this line is parsed; the others may be damaged.
        first, last = int(self._ends[position]) + 1, int(self._ends[position + 1])
        try:
            return _ROW.validate_python(_parse(self._map[first : min(last, first + _LONGEST_ROW)]))
        except ValueError:
            raise BadSample(
                f"{self._path.name}, line {position + 2}: no row of an index; delete the file, it is built"
                " anew",
                "bad_index",
            ) from None

    def sample(self, position: int) -> tuple[str, Members]:
        """(key, members) of the sample at `position`; raises BadSample (bad_index)."""
        row = self.row(position)
        return row.key, {name: (offset, size) for name, offset, size in row.members}


OPEN_SHARDS = 64
"""Open files and indexes kept at a time."""


def index_name(shard: str) -> str:
    """Name of the index beside a shard: a.tar -> a.index.jsonl."""
    # One name for a shard and its compressed form.
    return shard.split(".tar")[0].removesuffix(".tgz") + INDEX_SUFFIX


class Shards:
    """An ordered list of shards.

    Args:
        path: what `fetch.expand` takes; None when `listed` is given. listed: several of them. cache: folder
        for streamed shards and for indexes; None is $EF_CACHE/shards. ranges: read samples of plain shards in
        object stores by byte ranges, where the index that `prepare` wrote
            lies beside the shard; nothing but that index is copied.

    A shard whose end is missing has one sample more than are usable: reading it raises BadSample
    (truncated_tar), so that the cut is counted and logged like any other loss.
    """

    def __init__(
        self,
        path: str | None,
        *,
        listed: Sequence[str] = (),
        cache: str | None = None,
        ranges: bool = False,
    ) -> None:
        patterns = listed or [str(path)]
        self.urls = [url for pattern in patterns for url in expand(pattern)]
        self.cache = Path(cache).expanduser() if cache else cache_root() / "shards"
        self.names = short_names(self.urls)
        self.manifest = None
        if not listed and is_folder(patterns[0]):
            self.manifest = read_manifest(patterns[0])
        # Bounded: a data set may have more shards than a process may have files.
        self.index = lru_cache(maxsize=OPEN_SHARDS)(self._open_index)
        self._file = lru_cache(maxsize=OPEN_SHARDS)(self._open_file)
        self._paths: dict[int, Path] = {}
        self._ranges, self._beside = ranges, lru_cache(maxsize=None)(self._index_beside)
        self.headers = [self._header(shard) for shard in range(len(self.urls))]
        """What is known of every shard: samples, bytes, cut, refused, ..."""
        self.usable = [header["samples"] for header in self.headers]
        self.cut = [header["cut"] for header in self.headers]
        self.counts = [samples + cut for samples, cut in zip(self.usable, self.cut)]
        """Samples of every shard, with one for a missing end."""

    def _header(self, shard: int) -> Record:
        # Of a remote shard index.json is believed: its own index would take a download.
        if self.manifest is not None and as_local(self.urls[shard]) is None:
            return {"cut": False, **self.manifest["shards"][shard]}
        # No more than a line is read: the index itself is opened when a sample of the shard is asked for.
        self._paths[shard] = self._find_index(shard)
        return read_header(self._paths[shard])

    def key(self, shard: int, position: int) -> str:
        """Key of one sample; raises BadSample for the missing end."""
        return self._sample(shard, position)[0]

    def group(self, shard: int, position: int) -> Group:
        """One sample, nothing read yet; raises BadSample for the missing end."""
        key, members = self._sample(shard, position)
        where = f"{self.names[shard]} {key}"
        sizes = {name: size for name, (_, size) in members.items()}

        def fetch(name: str) -> bytes:
            file = self._file(shard)
            # A request takes longer than its bytes: one for the sample, not one for each member.
            if isinstance(file, RemoteFile):
                first = min(offset for offset, _ in members.values())
                size = max(offset + size for offset, size in members.values()) - first
                if size <= TOGETHER:
                    file(first, size)
            return self._read(file, where, *members[name])

        return Group(key, where, sizes, fetch)

    def _sample(self, shard: int, position: int) -> tuple[str, dict[str, tuple[int, int]]]:
        # The sample behind the last one stands for the missing end.
        if position == self.usable[shard] and self.cut[shard]:
            raise BadSample(
                f"{self.names[shard]}: the archive ends early; its first {self.usable[shard]} samples are"
                " used, fetch it again for the rest",
                "truncated_tar",
            )
        index = self.index(shard)
        if position >= len(index):
            raise BadSample(
                f"{self.names[shard]}: its first line lists {self.usable[shard]} samples, the shard has"
                f" {len(index)}; delete its index, it is built anew",
                "bad_index",
            )
        return index.sample(position)

    def _read(self, file: Pread, where: str, offset: int, size: int) -> bytes:
        # A file may shrink after it was opened.
        data = file(offset, size)
        if len(data) != size:
            raise BadSample(f"{where}: {size} bytes at {offset}, only {len(data)} are there", "truncated_tar")
        return data

    def _open_file(self, shard: int) -> LocalFile | RemoteFile:
        url = self.urls[shard]
        if as_local(url) is None and self._beside(shard):
            return RemoteFile(url, int(str(stamp(url)[0])))
        return LocalFile(plain_copy(url, self.cache))

    def _open_index(self, shard: int) -> ShardIndex:
        # The place found at opening: a shard that has changed since is told sample by sample.
        path = self._paths.get(shard) or self._find_index(shard)
        try:
            return ShardIndex(path)
        except DataError as error:
            LOG.warning("%s", error)
            return ShardIndex(self._cached_index(shard))

    def _find_index(self, shard: int) -> Path:
        """The index beside a shard, if its first line is of this shard's size; else that of the cache."""
        return self._beside(shard) or self._cached_index(shard)

    def _index_beside(self, shard: int) -> Path | None:
        """The index beside a shard, if its first line is of this shard's size; that of a remote one only
        where ranges are read."""
        url = self.urls[shard]
        folder, slash, name = url.rpartition("/")
        beside, local = f"{folder}{slash}{index_name(name)}", as_local(url)
        far = self._ranges and url.endswith(".tar") and not url.startswith(("pipe:", *HTTP))
        if local is None and not far:
            return None
        try:
            size = stamp(url)[0]
            stamp(beside)
        except FileNotFoundError:
            return None
        path = plain_copy(beside, self.cache)
        # Its own first line must say so: a shard may have been written anew.
        try:
            return path if read_header(path)["bytes"] == size else None
        except DataError as error:
            LOG.warning("%s", error)
        return None

    def _cached_index(self, shard: int) -> Path:
        """The index in the cache, made by a walk over the shard's headers where there is none."""
        url = self.urls[shard]
        try:
            path = self.cache / f"{digest64('index', url, *stamp(url)):016x}{INDEX_SUFFIX}"
        except FileNotFoundError:
            raise DataError(f"{url}: no such file") from None
        with locked(path):
            if not path.is_file():
                file = self._file(shard)
                found = scan_tar(file, file.size)
                # Told by whoever walks: left-out members are losses like any other.
                if found.refused:
                    LOG.warning("%s: members left out: %s", url, dict(found.refused))
                write_index(path, index_lines(found, self.names[shard], file.size))
        return path


class LocalFile:
    """Positioned reads from one file; safe to share among threads."""

    def __init__(self, path: Path) -> None:
        # Positioned reads share no place in the file, so threads need no lock.
        self._file = path.open("rb")
        self.size = os.fstat(self._file.fileno()).st_size

    def __call__(self, offset: int, size: int) -> bytes:
        # A lying index must not make us reserve memory.
        return os.pread(self._file.fileno(), max(0, min(size, self.size - offset)), offset)
