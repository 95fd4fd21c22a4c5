"""Shards from outcomes in order: size limits, duplicates, index, and going on where a killed run stopped.

shard-000000.tar  shard-000000.index.jsonl     finished when both are there (each written whole, then renamed)
.shard-000000.skipped.jsonl                    items left out on the way to the next shard
index.json  skipped.jsonl                      written last
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.prepare.work import Outcome, key_of
from earlyfusion.data.shards.fetch import MANIFEST
from earlyfusion.data.shards.index import INDEX_SUFFIX, ShardIndex, index_lines, scan_tar, write_index

_FACTS = (
    "tokens",
    "patches",
    "media",
    "content_bytes",
    "formats",
    "skipped",
    "token_histogram",
    "patch_histogram",
)


def write_json(path: Path, value: object) -> None:
    """Write JSON whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="ascii")
    temporary.replace(path)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bin_of(count: int) -> str:
    """Histogram bin: the smallest power of two that is not less than `count`, as a string; "0" for none."""
    return str(1 << (count - 1).bit_length()) if count > 0 else "0"


class Tally:
    """Counts over samples."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self.formats: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.token_histogram: Counter[str] = Counter()
        self.patch_histogram: Counter[str] = Counter()

    def add(self, outcome: Outcome) -> None:
        """Enter one sample."""
        sums = {"tokens": outcome.tokens, "patches": outcome.patches, "media": outcome.media}
        self.sums.update({**sums, "content_bytes": outcome.size})
        self.formats[outcome.format] += 1
        self.token_histogram[bin_of(outcome.tokens)] += 1
        self.patch_histogram[bin_of(outcome.patches)] += 1

    def join(self, facts: dict[str, Any]) -> None:
        """Enter the facts of a shard."""
        self.sums.update({name: facts[name] for name in _FACTS[:4]})
        for name in _FACTS[4:]:
            getattr(self, name).update(facts[name])

    def facts(self) -> dict[str, Any]:
        """As JSON types; histograms ascending."""
        made: dict[str, Any] = {name: self.sums[name] for name in _FACTS[:4]}
        for name in _FACTS[4:]:
            counts = getattr(self, name)
            numeric = name.endswith("histogram")
            made[name] = dict(sorted(counts.items(), key=lambda item: int(item[0]) if numeric else item[0]))
        return made


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
        return self.out / f"{'.' if end.startswith('.skipped') else ''}shard-{number:06d}{end}"

    def _recover(self) -> None:
        """Keep the finished shards from the first on; delete what came after."""
        while not self.finished:
            tar, index = self._path(len(self.entries), ".tar"), self._path(len(self.entries), INDEX_SUFFIX)
            if not (tar.is_file() and index.is_file()):
                break
            try:
                rows = ShardIndex(index)
                digests = [bytes.fromhex(rows.row(i)[2]) for i in range(len(rows))]
                if rows.header["bytes"] != tar.stat().st_size or not {"start", "stop", "last"} <= set(
                    rows.header
                ):
                    break
                self._enter(rows.header)
            except (DataError, KeyError, IndexError, TypeError, ValueError):
                break  # a damaged index: the shard is made again
            self.seen.update(digests)
            self.next_item, self.finished = rows.header["stop"], rows.header["last"]
        kept = {f"shard-{n:06d}" for n in range(len(self.entries))}
        for path in self.out.iterdir():
            name = path.name.lstrip(".")
            if path.name.endswith(".tmp") or (name.startswith("shard-") and name[:12] not in kept):
                path.unlink()

    def _enter(self, header: dict[str, Any]) -> None:
        self.entries.append(
            {
                "name": header["shard"],
                **{name: header[name] for name in ("samples", "bytes", "sha256", *_FACTS)},
            }
        )
        self.total.join(header)

    def _begin(self) -> None:
        self._tally, self._digests, self._used = Tally(), dict[str, str](), 0
        self._skips: list[str] = []
        self._first = self.next_item
        self._file: io.BufferedWriter | None = None
        self._tar: Any = None

    def add(self, outcome: Outcome) -> bool:
        """Enter the next item; returns whether it was stored."""
        digest = bytes.fromhex(outcome.digest)
        if not outcome.reason and self.dedup and digest in self.seen:
            outcome.reason, outcome.message = "duplicate", "the same content as an item before"
        if outcome.reason:
            self._tally.skipped[outcome.reason] += 1
            entry = {
                "item": outcome.number,
                "from": outcome.origin,
                "reason": outcome.reason,
                "message": outcome.message,
            }
            self._skips.append(json.dumps(entry))
            return False
        room = 512 * (len(outcome.members) + sum(-(-len(data) // 512) for data in outcome.members.values()))
        if self._digests and (len(self._digests) >= self.max_samples or self._used + room > self.max_bytes):
            self.next_item = outcome.number
            self._close(last=False)
        self.seen.add(digest)
        key = key_of(outcome.number, outcome.origin)
        self._writer().write({"__key__": key, **outcome.members})
        self._digests[key] = outcome.digest
        self._used += room
        self._tally.add(outcome)
        return True

    def _writer(self) -> Any:
        if self._tar is None:
            from webdataset import TarWriter

            self._file = self._path(len(self.entries), ".tar.tmp").open("wb")
            self._tar = TarWriter(self._file, encoder=False, mtime=0, user="", group="")
        return self._tar

    def _close(self, *, last: bool) -> None:
        number = len(self.entries)
        temporary, tar = self._path(number, ".tar.tmp"), self._path(number, ".tar")
        if self._file is None:
            return
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        size = temporary.stat().st_size
        with temporary.open("rb") as file:
            scan = scan_tar(lambda offset, length: os.pread(file.fileno(), length, offset), size)
        facts = {"sha256": sha256_of(temporary), "start": self._first, "stop": self.next_item, "last": last}
        lines = index_lines(scan, tar.name, size, digests=self._digests, **facts, **self._tally.facts())
        self._path(number, ".skipped.jsonl").write_text(
            "".join(f"{line}\n" for line in self._skips), encoding="ascii"
        )
        temporary.replace(tar)
        write_index(self._path(number, INDEX_SUFFIX), lines)
        self._enter(ShardIndex(self._path(number, INDEX_SUFFIX)).header)
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
        for path in self.out.glob(".*.tmp"):
            path.unlink(missing_ok=True)
        self._path(len(self.entries), ".tar.tmp").unlink(missing_ok=True)

    def _told(self) -> str:
        """The lines of all items left out, shard by shard."""
        try:
            return "".join(
                self._path(n, ".skipped.jsonl").read_text("ascii") for n in range(len(self.entries))
            )
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.out}: a file of this preparation is gone or damaged ({error}); --overwrite it"
            ) from None

    def finish(self, items: int, about: dict[str, Any]) -> dict[str, Any]:
        """Close the last shard, write skipped.jsonl and index.json; returns what index.json holds.

        Raises DataError when no item could be used; skipped.jsonl is there all the same.
        """
        self.next_item = items
        rest = list(self._skips)
        reasons = Counter(self._tally.skipped)
        self._close(last=True)
        text = self._told() if self.entries else "".join(f"{line}\n" for line in rest)
        temporary = self.out / ".skipped.jsonl.tmp"
        temporary.write_text(text, encoding="ascii")
        temporary.replace(self.out / "skipped.jsonl")
        if not self.entries:
            told = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            first = json.loads(text.splitlines()[0]) if text else {"from": "nothing", "message": "no item"}
            raise DataError(
                f"none of {items} items can be used ({told}); see {self.out / 'skipped.jsonl'}; the first, "
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
        write_json(self.out / MANIFEST, manifest)
        for number in range(len(self.entries)):
            self._path(number, ".skipped.jsonl").unlink(missing_ok=True)
        return manifest


def verify(folder: Path, manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(shard, what is wrong or "") for every shard of a prepared folder: size, checksum, index."""
    for entry in manifest["shards"]:
        path = folder / entry["name"]
        if not path.is_file():
            yield entry["name"], "missing"
        elif path.stat().st_size != entry["bytes"]:
            yield entry["name"], f"{path.stat().st_size} bytes, expected {entry['bytes']}"
        elif sha256_of(path) != entry.get("sha256"):
            yield entry["name"], "other content: the checksum differs"
        else:
            yield entry["name"], _index_fault(path)


def _index_fault(path: Path) -> str:
    index = path.with_name(path.name.removesuffix(".tar") + INDEX_SUFFIX)
    try:
        rows = ShardIndex(index)
    except (OSError, DataError) as error:
        return f"index: {error}"
    with path.open("rb") as file:
        scan = scan_tar(lambda offset, length: os.pread(file.fileno(), length, offset), path.stat().st_size)
    try:
        same = dict(rows.sample(i) for i in range(len(rows))) == scan.samples
    except BadSample as error:
        return str(error)
    return "" if same else "the index is of another shard"
