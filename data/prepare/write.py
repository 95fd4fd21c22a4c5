"""Shards from outcomes in order: size limits, duplicates, index, and going on where a killed run stopped.

shard-000000.tar  shard-000000.index.jsonl     finished when both are there (each written whole, then renamed)
.shard-000000.skipped.jsonl                    items left out on the way to the next shard
index.json  skipped.jsonl                      written last
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from earlyfusion.data.errors import BadSample, DataError, told
from earlyfusion.data.prepare.work import Outcome
from earlyfusion.data.shards.fetch import MANIFEST, TABLES
from earlyfusion.data.shards.read import (
    INDEX_SUFFIX,
    LocalFile,
    ShardIndex,
    TarScan,
    index_lines,
    scan_tar,
    write_index,
)
from earlyfusion.kernels.files import write_atomic, write_json

_SUMS = ("tokens", "patches", "media", "content_bytes")
SKIPPED = "skipped.jsonl"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def scan_file(path: Path) -> TarScan:
    """The walk over a local archive."""
    file = LocalFile(path)
    return scan_tar(file, file.size)


def _nothing() -> dict[str, Any]:
    """Facts about no sample: sums, and tables that count by name."""
    return {**dict.fromkeys(_SUMS, 0), **{name: {} for name in TABLES}}


def _join(total: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Enter facts, of one item or of a whole shard."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            value = Counter(total[name]) + Counter(value)
            total[name] = dict(value)
        else:
            total[name] += value


class ShardSet:
    """Writes the shards of one folder.

    Args:
        out: the folder, made if need be.
        max_bytes, max_samples: limits of one shard; a single sample over `max_bytes` has a shard of its own.
        dedup: leave out samples whose content was there before.
    """

    def __init__(self, out: Path, max_bytes: int, max_samples: int, dedup: bool) -> None:
        self.out, self.max_bytes, self.max_samples, self.dedup = out, max_bytes, max_samples, dedup
        # What the finished shards hold, then what is added to them.
        self.total = _nothing()
        self.entries: list[dict[str, Any]] = []
        self.seen: set[str] = set()
        self.next_item, self.finished = 0, False
        self._recover()
        self._begin()

    def _path(self, number: int, end: str) -> Path:
        return self.out / f"shard-{number:06d}{end}"

    def _skips_path(self, number: int) -> Path:
        return self.out / f".shard-{number:06d}.{SKIPPED}"

    def _recover(self) -> None:
        """Keep the finished shards from the first on; delete what came after."""
        while not self.finished:
            number = len(self.entries)
            try:
                rows = ShardIndex(self._path(number, INDEX_SUFFIX))
                digests = [rows.row(i)[2] for i in range(len(rows))]
                stop, last = rows.header["stop"], rows.header["last"]
                if rows.header["bytes"] != self._path(number, ".tar").stat().st_size:
                    break
                self._enter(rows.header)
            except (OSError, DataError, KeyError, IndexError, TypeError):
                break  # not there, or a damaged index: the shard is made again
            self.seen.update(digests)
            self.next_item, self.finished = stop, last

        kept = {f"shard-{number:06d}" for number in range(len(self.entries))}
        for path in self.out.iterdir():
            name = path.name.lstrip(".")
            if path.name.endswith(".tmp") or (name.startswith("shard-") and name[:12] not in kept):
                path.unlink()

    def _enter(self, header: dict[str, Any]) -> None:
        facts = {name: header[name] for name in (*_SUMS, *TABLES)}
        _join(self.total, facts)
        place = {"name": header["shard"], "samples": header["samples"], "bytes": header["bytes"]}
        self.entries.append({**place, "sha256": header["sha256"], **facts})

    def _begin(self) -> None:
        self._facts, self._digests, self._used = _nothing(), dict[str, str](), 0
        self._skips: list[str] = []
        self._file: Any = None
        self._tar: Any = None

    def add(self, outcome: Outcome) -> bool:
        """Enter the next item; returns whether it was stored."""
        # The first of equal items stays, whatever number of workers read them.
        if self.dedup and not outcome.reason and outcome.digest in self.seen:
            outcome.reason, outcome.message = "duplicate", "the same content as an item before"
        if outcome.reason:
            _join(self._facts, {"skipped": {outcome.reason: 1}})
            entry = {"item": outcome.number, "from": outcome.origin}
            entry |= {"reason": outcome.reason, "message": outcome.message}
            self._skips.append(json.dumps(entry) + "\n")
            return False

        # Headers and data in blocks of 512 bytes: would this sample be one too many?
        blocks = sum(1 - (-len(data) // 512) for data in outcome.members.values())
        full = len(self._digests) >= self.max_samples or self._used + 512 * blocks > self.max_bytes
        if self._digests and full:
            self.next_item = outcome.number
            self._close(last=False)
        if self._tar is None:
            # Times, owners and groups are fixed: the same items give the same bytes.
            from webdataset import TarWriter  # slow to import

            self._file = self._path(len(self.entries), ".tar.tmp").open("wb")
            self._tar = TarWriter(self._file, encoder=False, mtime=0, user="", group="")
        self._tar.write({"__key__": outcome.key, **outcome.members})
        self.seen.add(outcome.digest)
        self._digests[outcome.key] = outcome.digest
        self._used += 512 * blocks
        counts = {"tokens": outcome.tokens, "patches": outcome.patches, "media": outcome.media}
        _join(self._facts, {**counts, "content_bytes": outcome.size, "formats": {outcome.format: 1}})
        return True

    def _close(self, *, last: bool) -> None:
        """Finish the shard: its bytes on the disk first, what was left out, then its name, then its index."""
        if self._file is None:
            return
        number = len(self.entries)
        temporary, tar = self._path(number, ".tar.tmp"), self._path(number, ".tar")
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

        facts = {"sha256": sha256_of(temporary), "stop": self.next_item, "last": last}
        facts |= self._facts
        scan, size = scan_file(temporary), temporary.stat().st_size
        write_atomic(self._skips_path(number), "".join(self._skips))
        os.replace(temporary, tar)
        index = self._path(number, INDEX_SUFFIX)
        write_index(index, index_lines(scan, tar.name, size, digests=self._digests, **facts))
        self._enter(ShardIndex(index).header)
        self._begin()

    def abandon(self) -> None:
        """Leave no half shard behind, when the disk takes no more; what is finished stays."""
        # The writer has no way to be left without a last write.
        stream = getattr(getattr(self._tar, "tarstream", None), "fileobj", None)
        if stream is not None:
            stream.closed = True  # or it writes its last blocks when it is collected
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        for path in (*self.out.glob(".*.tmp"), self._path(len(self.entries), ".tar.tmp")):
            path.unlink(missing_ok=True)

    def finish(self, items: int, about: dict[str, Any]) -> dict[str, Any]:
        """Close the last shard, write skipped.jsonl and index.json; returns what index.json holds.

        Raises DataError when no item could be used; skipped.jsonl is there all the same.
        """
        self.next_item = items
        left_out, reasons = "".join(self._skips), Counter(self._facts["skipped"])
        self._close(last=True)
        numbers = range(len(self.entries))
        try:
            left_out = "".join(self._skips_path(n).read_text("ascii") for n in numbers) or left_out
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.out}: a file of this preparation is gone or damaged ({error}); --overwrite it"
            ) from None
        write_atomic(self.out / SKIPPED, left_out)
        # Every item was left out: the first says why, as a rule for all of them.
        if not self.entries:
            first = {"from": "nothing", "message": "no item"}
            if left_out:
                first = json.loads(left_out.splitlines()[0])
            raise DataError(
                f"none of {items} items can be used ({told(reasons)}); see {self.out / SKIPPED}; the first, "
                f"{first['from']}: {first['message']}"
            )

        manifest = {
            "earlyfusion_shards": 1,
            "items": items,
            "samples": sum(entry["samples"] for entry in self.entries),
            "bytes": sum(entry["bytes"] for entry in self.entries),
            **about,
            **self.total,
            "shards": self.entries,
        }
        # Last of all: a folder with it is whole.
        write_json(self.out / MANIFEST, manifest, sort_keys=True, ensure_ascii=True)
        for number in numbers:
            self._skips_path(number).unlink(missing_ok=True)
        return manifest


def fault_of(path: Path, entry: dict[str, Any]) -> str:
    """What is wrong with a shard that index.json lists as `entry`: its size, checksum or index; "" for
    nothing."""
    if not path.is_file():
        return "missing"
    # Cheap checks first; the checksum reads everything.
    if path.stat().st_size != entry["bytes"]:
        return f"{path.stat().st_size} bytes, expected {entry['bytes']}"
    if sha256_of(path) != entry.get("sha256"):
        return "other content: the checksum differs"
    try:
        # The index leads to the bytes, so a good shard with a wrong one is damaged all the same.
        rows = ShardIndex(path.with_suffix(INDEX_SUFFIX))
        same = dict(rows.sample(i) for i in range(len(rows))) == scan_file(path).samples
    except (OSError, BadSample, DataError) as error:
        return f"index: {error}"
    return "" if same else "the index is of another shard"
