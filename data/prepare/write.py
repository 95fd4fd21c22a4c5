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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from earlyfusion.data.errors import BadSample, DataError, told
from earlyfusion.data.prepare.work import Outcome, key_of
from earlyfusion.data.shards.fetch import MANIFEST, TABLES
from earlyfusion.data.shards.index import (
    INDEX_SUFFIX,
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
    with path.open("rb") as file:
        return scan_tar(lambda offset, length: os.pread(file.fileno(), length, offset), path.stat().st_size)


def bin_of(count: int) -> str:
    """Histogram bin: the smallest power of two that is not less than `count`, as a string; "0" for none."""
    return str(1 << (count - 1).bit_length()) if count > 0 else "0"


class Tally:
    """Counts over samples: the sums of _SUMS, and the tables of TABLES by name."""

    def __init__(self) -> None:
        self.sums = Counter[str]()
        self.tables = {name: Counter[str]() for name in TABLES}

    def add(self, outcome: Outcome) -> None:
        """Enter one sample."""
        counts = (outcome.tokens, outcome.patches, outcome.media, outcome.size)
        self.sums.update(dict(zip(_SUMS, counts)))
        self.tables["formats"][outcome.format] += 1
        self.tables["token_histogram"][bin_of(outcome.tokens)] += 1
        self.tables["patch_histogram"][bin_of(outcome.patches)] += 1

    def join(self, facts: dict[str, Any]) -> None:
        """Enter the facts of a shard."""
        self.sums.update({name: facts[name] for name in _SUMS})
        for name, table in self.tables.items():
            table.update(facts[name])

    def facts(self) -> dict[str, Any]:
        """As JSON types; histograms ascending."""
        facts: dict[str, Any] = {name: self.sums[name] for name in _SUMS}
        for name, table in self.tables.items():
            by_number = name.endswith("histogram")
            facts[name] = {key: table[key] for key in sorted(table, key=int if by_number else str)}
        return facts


class ShardSet:
    """Writes the shards of one folder.

    Args:
        out: the folder, made if need be.
        max_bytes, max_samples: limits of one shard; a single sample over `max_bytes` has a shard of its own.
        dedup: leave out samples whose content hash was seen before.
    """

    def __init__(self, out: Path, *, max_bytes: int, max_samples: int, dedup: bool) -> None:
        self.out, self.max_bytes, self.max_samples, self.dedup = out, max_bytes, max_samples, dedup
        self.total = Tally()
        self.entries: list[dict[str, Any]] = []
        self.seen: set[bytes] = set()
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
            tar, index = self._path(len(self.entries), ".tar"), self._path(len(self.entries), INDEX_SUFFIX)
            try:
                rows = ShardIndex(index)
                digests = [bytes.fromhex(rows.row(i)[2]) for i in range(len(rows))]
                stop, last = rows.header["stop"], rows.header["last"]
                if rows.header["bytes"] != tar.stat().st_size:
                    break
                self._enter(rows.header)
            except (OSError, DataError, KeyError, IndexError, TypeError, ValueError):
                break  # not there, or a damaged index: the shard is made again
            self.seen.update(digests)
            self.next_item, self.finished = stop, last

        kept = {f"shard-{number:06d}" for number in range(len(self.entries))}
        for path in self.out.iterdir():
            name = path.name.lstrip(".")
            if path.name.endswith(".tmp") or (name.startswith("shard-") and name[:12] not in kept):
                path.unlink()

    def _enter(self, header: dict[str, Any]) -> None:
        facts = {name: header[name] for name in ("samples", "bytes", "sha256", *_SUMS, *TABLES)}
        self.total.join(facts)
        self.entries.append({"name": header["shard"], **facts})

    def _begin(self) -> None:
        self._tally, self._digests, self._used = Tally(), dict[str, str](), 0
        self._skips: list[str] = []
        self._first = self.next_item
        self._file: Any = None
        self._tar: Any = None

    def add(self, outcome: Outcome) -> bool:
        """Enter the next item; returns whether it was stored."""
        digest = bytes.fromhex(outcome.digest)
        if not outcome.reason and self.dedup and digest in self.seen:
            outcome.reason, outcome.message = "duplicate", "the same content as an item before"
        if outcome.reason:
            self._tally.tables["skipped"][outcome.reason] += 1
            entry = {"item": outcome.number, "from": outcome.origin}
            self._skips.append(
                json.dumps({**entry, "reason": outcome.reason, "message": outcome.message}) + "\n"
            )
            return False

        # Headers and data in blocks of 512 bytes: would this sample be one too many?
        blocks = sum(1 - (-len(data) // 512) for data in outcome.members.values())
        full = len(self._digests) >= self.max_samples or self._used + 512 * blocks > self.max_bytes
        if self._digests and full:
            self.next_item = outcome.number
            self._close(last=False)

        key = key_of(outcome.number, outcome.origin)
        self._writer().write({"__key__": key, **outcome.members})
        self.seen.add(digest)
        self._digests[key] = outcome.digest
        self._used += 512 * blocks
        self._tally.add(outcome)
        return True

    def _writer(self) -> Any:
        if self._tar is None:
            from webdataset import TarWriter

            self._file = self._path(len(self.entries), ".tar.tmp").open("wb")
            self._tar = TarWriter(self._file, encoder=False, mtime=0, user="", group="")
        return self._tar

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

        facts = {"sha256": sha256_of(temporary), "start": self._first, "stop": self.next_item, "last": last}
        facts |= self._tally.facts()
        scan, size = scan_file(temporary), temporary.stat().st_size
        write_atomic(self._skips_path(number), "".join(self._skips))
        os.replace(temporary, tar)
        index = self._path(number, INDEX_SUFFIX)
        write_index(index, index_lines(scan, tar.name, size, digests=self._digests, **facts))
        self._enter(ShardIndex(index).header)
        self._begin()

    def abandon(self) -> None:
        """Leave no half shard behind, when the disk takes no more; what is finished stays."""
        file, tar = self._file, self._tar
        self._file = self._tar = None
        if stream := getattr(getattr(tar, "tarstream", None), "fileobj", None):
            stream.closed = True  # or it writes its last blocks when it is collected
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()
        for path in (*self.out.glob(".*.tmp"), self._path(len(self.entries), ".tar.tmp")):
            path.unlink(missing_ok=True)

    def finish(self, items: int, about: dict[str, Any]) -> dict[str, Any]:
        """Close the last shard, write skipped.jsonl and index.json; returns what index.json holds.

        Raises DataError when no item could be used; skipped.jsonl is there all the same.
        """
        self.next_item = items
        left_out, reasons = "".join(self._skips), Counter(self._tally.tables["skipped"])
        self._close(last=True)
        numbers = range(len(self.entries))
        try:
            left_out = "".join(self._skips_path(n).read_text("ascii") for n in numbers) or left_out
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.out}: a file of this preparation is gone or damaged ({error}); --overwrite it"
            ) from None
        write_atomic(self.out / SKIPPED, left_out)
        if not self.entries:
            first = (
                json.loads(left_out.splitlines()[0])
                if left_out
                else {"from": "nothing", "message": "no item"}
            )
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
            **self.total.facts(),
            "shards": self.entries,
        }
        write_json(self.out / MANIFEST, manifest, sort_keys=True, ensure_ascii=True)
        for number in numbers:
            self._skips_path(number).unlink(missing_ok=True)
        return manifest


def verify(folder: Path, entries: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """(shard, what is wrong) for every damaged shard of a prepared folder: size, checksum, index."""
    for entry in entries:
        path = folder / entry["name"]
        fault = ""
        if not path.is_file():
            fault = "missing"
        elif path.stat().st_size != entry["bytes"]:
            fault = f"{path.stat().st_size} bytes, expected {entry['bytes']}"
        elif sha256_of(path) != entry.get("sha256"):
            fault = "other content: the checksum differs"
        else:
            fault = _index_fault(path)
        if fault:
            yield entry["name"], fault


def _index_fault(path: Path) -> str:
    try:
        rows = ShardIndex(path.with_name(path.name.removesuffix(".tar") + INDEX_SUFFIX))
        same = dict(rows.sample(i) for i in range(len(rows))) == scan_file(path).samples
    except BadSample as error:
        return str(error)
    except (OSError, DataError) as error:
        return f"index: {error}"
    return "" if same else "the index is of another shard"
