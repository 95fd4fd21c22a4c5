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
    plain_copy,
    read_manifest,
    short_names,
    stamp,
)
from earlyfusion.data.shards.index import (
    INDEX_SUFFIX,
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

    A shard whose end is missing has one sample more than are usable: reading it raises BadSample
    (truncated_tar), so that the cut is counted and logged like any other loss.
    """

    def __init__(self, path: str | None, *, listed: Sequence[str] = (), cache: str | None = None) -> None:
        patterns = listed or [str(path)]
        self.urls = [url for pattern in patterns for url in expand(pattern)]
        self.cache = Path(cache).expanduser() if cache else cache_root() / "shards"
        self.names = short_names(self.urls)
        self.manifest = None
        if not listed and is_folder(patterns[0]):
            self.manifest = read_manifest(patterns[0])
        self.index = lru_cache(maxsize=OPEN_SHARDS)(self._open_index)
        self._file = lru_cache(maxsize=OPEN_SHARDS)(self._open_file)
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
            index = self.index(number)
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
        index = self.index(shard)
        if position >= len(index):
            raise BadSample(
                f"{self.names[shard]}: index.json lists {self.usable[shard]} samples, the shard has"
                f" {len(index)}; prepare the folder again, or delete its index.json",
                "bad_index",
            )
        return index.sample(position)

    def _read(self, shard: int, where: str, offset: int, size: int) -> bytes:
        data = self._file(shard)(offset, size)
        if len(data) != size:
            raise BadSample(f"{where}: {size} bytes at {offset}, only {len(data)} are there", "truncated_tar")
        return data

    def _open_file(self, shard: int) -> LocalFile:
        return LocalFile(plain_copy(self.urls[shard], self.cache))

    def _open_index(self, shard: int) -> ShardIndex:
        """The index beside a local shard if it is of this shard's size, else that of the cache."""
        url = self.urls[shard]
        local = as_local(url)
        if local is not None and local.is_file():
            beside = local.with_name(index_name(local.name))
            try:
                index = ShardIndex(beside) if beside.is_file() else None
            except DataError as error:
                LOG.warning("%s", error)
                index = None
            if index is not None and index.header["bytes"] == local.stat().st_size:
                return index
        try:
            path = self.cache / f"{digest64('index', url, *stamp(url)):016x}{INDEX_SUFFIX}"
        except FileNotFoundError:
            raise DataError(f"{url}: no such file") from None
        with locked(path):
            if not path.is_file():
                file = self._file(shard)
                write_index(path, index_lines(scan_tar(file, file.size), self.names[shard], file.size))
        index = ShardIndex(path)
        if index.header["refused"]:
            LOG.warning("%s: members left out: %s", url, index.header["refused"])
        return index


class LocalFile:
    """Positioned reads from one file; safe to share among threads."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self.size = os.fstat(self._file.fileno()).st_size

    def __call__(self, offset: int, size: int) -> bytes:
        # A lying index must not make us reserve memory.
        return os.pread(self._file.fileno(), max(0, min(size, self.size - offset)), offset)
