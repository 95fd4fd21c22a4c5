"""Shards with random access by (shard, position): opened without reading them, read by position without
unpacking.

How many samples a shard holds and where they lie is taken from, in this order: index.json of the folder
(written by `earlyfusion prepare`: no shard is touched to open it), the index beside the shard, the index in
the cache, or one walk over the shard's headers (then kept in the cache). An index whose byte count is not
that of the shard is not used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.formats.group import Group
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.shards.fetch import (
    LOG,
    as_local,
    cache_root,
    expand,
    is_folder,
    locked,
    open_stream,
    plain_copy,
    ranged_reader,
    read_manifest,
    short_names,
    stamp,
)
from earlyfusion.data.shards.index import (
    INDEX_SUFFIX,
    Pread,
    ShardIndex,
    index_lines,
    scan_tar,
    stated_samples,
    write_index,
)

OPEN_SHARDS = 64
"""Open files and indexes kept at a time."""


def index_name(shard: str) -> str:
    """Name of the index beside a shard: a.tar -> a.index.jsonl."""
    return shard.split(".tar")[0].removesuffix(".tgz") + INDEX_SUFFIX


class Shards:
    """An ordered list of shards.

    Args:
        path: what `fetch.expand` takes; None when `listed` is given.
        listed: several of them.
        cache: folder for streamed shards and for indexes; None is $EF_CACHE/shards.
        remote: "cache" streams remote shards into the cache, "ranges" reads byte ranges of them.

    A shard whose end is missing has one sample more than are usable: reading it raises BadSample
    (truncated_tar), so that the cut is counted and logged like any other loss.
    """

    def __init__(
        self, path: str | None, *, listed: Sequence[str] = (), cache: str | None = None, remote: str = "cache"
    ) -> None:
        self.urls = [url for pattern in listed or [str(path)] for url in expand(pattern)]
        self.cache = Path(cache).expanduser() if cache else cache_root() / "shards"
        self.remote = remote
        self.names = short_names(self.urls)
        self.manifest = None
        if path is not None and not listed and is_folder(path):
            self.manifest = read_manifest(path)
        self._index = lru_cache(maxsize=OPEN_SHARDS)(self._open_index)
        self._pread = lru_cache(maxsize=OPEN_SHARDS)(self._open_pread)
        self.usable, self.cut = self._count()

    def _count(self) -> tuple[list[int], list[bool]]:
        """Usable samples of every shard, and whether its end is missing."""
        entries = self.manifest["shards"] if self.manifest else [None] * len(self.urls)
        usable, cut = [], []
        for number, (url, entry) in enumerate(zip(self.urls, entries)):
            if entry is not None and self._as_listed(url, entry):
                usable.append(int(entry["samples"]))
                cut.append(False)
                continue
            index = self._index(number)
            usable.append(len(index))
            cut.append(index.cut)
        return usable, cut

    @staticmethod
    def _as_listed(url: str, entry: dict[str, Any]) -> bool:
        """Whether a local shard and its own index are those that index.json speaks of; a remote one is
        believed here."""
        local = as_local(url)
        if local is None:
            return True
        try:
            if local.stat().st_size != entry["bytes"]:
                return False
        except FileNotFoundError:
            raise DataError(
                f"{url}: the index lists this shard but it is gone; restore it or prepare again"
            ) from None
        stated = stated_samples(local.with_name(index_name(local.name)))
        if stated not in (None, entry["samples"]):
            LOG.warning(
                "%s: index.json lists %d samples, its index %s; not believed", url, entry["samples"], stated
            )
        return stated == entry["samples"]

    @property
    def counts(self) -> list[int]:
        """Samples of every shard, with one for a missing end."""
        return [samples + cut for samples, cut in zip(self.usable, self.cut)]

    def index(self, shard: int) -> ShardIndex:
        """The index of one shard."""
        return self._index(shard)

    def key(self, shard: int, position: int) -> str:
        """Key of one sample; raises BadSample for the missing end."""
        return self._sample(shard, position)[0]

    def group(self, shard: int, position: int) -> Group:
        """One sample, nothing read yet; raises BadSample for the missing end."""
        key, members = self._sample(shard, position)
        where = f"{self.names[shard]} {key}"
        sizes = {name: size for name, (_, size) in members.items()}
        return Group(key, where, sizes, lambda name: self._read(shard, where, *members[name]))

    def _sample(self, shard: int, position: int) -> tuple[str, dict[str, tuple[int, int]]]:
        if position == self.usable[shard] and self.cut[shard]:
            raise BadSample(
                f"{self.names[shard]}: the archive ends early; its first {self.usable[shard]} samples are"
                " used, fetch it again for the rest",
                "truncated_tar",
            )
        index = self._index(shard)
        if position >= len(index):
            raise BadSample(
                f"{self.names[shard]}: index.json lists {self.usable[shard]} samples, the shard has"
                f" {len(index)}; prepare the folder again, or delete its index.json",
                "bad_index",
            )
        return index.sample(position)

    def _read(self, shard: int, where: str, offset: int, size: int) -> bytes:
        data = self._pread(shard)(offset, size)
        if len(data) != size:
            raise BadSample(f"{where}: {size} bytes at {offset}, only {len(data)} are there", "truncated_tar")
        return data

    def _open_pread(self, shard: int) -> Pread:
        url = self.urls[shard]
        if self.remote == "ranges" and as_local(url) is None and not url.startswith("pipe:"):
            return ranged_reader(url)
        return _LocalFile(plain_copy(url, self.cache))

    def _open_index(self, shard: int) -> ShardIndex:
        url = self.urls[shard]
        beside = self._beside(url)
        if beside is not None:
            return beside
        if self.remote == "ranges" and as_local(url) is None:
            raise DataError(
                f"{url}: remote = 'ranges' needs {index_name(self.names[shard])} beside it; use 'cache'"
            )
        try:
            path = self.cache / f"{digest64('index', url, *stamp(url)):016x}{INDEX_SUFFIX}"
            with locked(path):
                if not path.is_file():
                    file = _LocalFile(plain_copy(url, self.cache))
                    write_index(path, index_lines(scan_tar(file, file.size), self.names[shard], file.size))
        except FileNotFoundError:
            raise DataError(f"{url}: no such file") from None
        index = ShardIndex(path)
        if index.header["refused"]:
            LOG.warning("%s: members left out: %s", url, index.header["refused"])
        return index

    def _beside(self, url: str) -> ShardIndex | None:
        """The index beside a shard, if it is there and of this shard's size."""
        local = as_local(url)
        if local is not None:
            path = local.with_name(index_name(local.name))
            return _index_of(path, local.stat().st_size) if path.is_file() and local.is_file() else None
        if url.startswith("pipe:"):
            return None
        source = index_name(url.split("?")[0])
        path = self.cache / f"{digest64('index', url, *stamp(url)):016x}-beside{INDEX_SUFFIX}"
        with locked(path):
            if not path.is_file():
                try:
                    with open_stream(source) as stream:
                        lines = stream.read().decode("ascii").split("\n")[:-1]
                except (OSError, DataError, UnicodeDecodeError):
                    return None
                write_index(path, iter(lines))
        return _index_of(path, None)


def _index_of(path: Path, size: int | None) -> ShardIndex | None:
    try:
        index = ShardIndex(path)
    except DataError as error:
        LOG.warning("%s", error)
        return None
    return index if size is None or index.header["bytes"] == size else None


class _LocalFile:
    """Positioned reads from one file; safe to share among threads."""

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"{path}: cannot be opened ({error.strerror})") from None
        self.size = os.fstat(self._fd).st_size

    def __call__(self, offset: int, size: int) -> bytes:
        size = max(0, min(size, self.size - offset))  # a lying index must not make us reserve memory
        parts = []
        while size and (part := os.pread(self._fd, size, offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)
