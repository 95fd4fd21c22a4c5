"""From items to shards: what a worker does with each, and one writer that puts them together in order.

A worker reads an item, checks it as training will, and counts its tokens and patches. The writer cuts shards,
leaves out duplicates, and goes on where a killed run stopped:

    shard-000000.tar  shard-000000.index.jsonl     finished when both are there (each written whole)
    .shard-000000.skipped.jsonl                    items left out on the way to the next shard
    index.json  skipped.jsonl                      written last
"""

import hashlib
import io
import json
import multiprocessing
import os
import re
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

import torch

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample, DataError, told
from earlyfusion.data.formats import MEDIA, Group, build, describe
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.prepare.read import InputOptions, open_input
from earlyfusion.data.sample import Sample, one_sample
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
from earlyfusion.data.sources.shards import ShardsOptions
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.vocabulary import embedded_tokenizer
from earlyfusion.kernels.files import Record, replacing, write_atomic, write_json
from earlyfusion.vision.config import VisionConfig

SUMS = ("tokens", "patches", "media", "content_bytes")
SKIPPED = "skipped.jsonl"
QUESTIONS = ("question", "prompt", "instruction", "query", "answer", "response")
"""Fields that ask or answer; a caption or text beside them is taken without them."""


# ---- one item


@dataclass(slots=True)
class Outcome:
    """One item: its members, or the reason why it is left out."""

    number: int
    origin: str
    members: dict[str, bytes] = field(default_factory=dict)
    digest: str = ""
    format: str = ""
    tokens: int = 0
    patches: int = 0
    media: int = 0
    reason: str = ""
    message: str = ""
    note: str = ""
    """what a reader should know of an item that is taken: fields that nobody reads"""

    @property
    def content_bytes(self) -> int:
        """Bytes of all members."""
        return sum(map(len, self.members.values()))


def key_of(number: int, origin: str) -> str:
    """Key of an item: its number, so that keys are unique and in order, and a readable rest of its name."""
    # A dot in a key would be taken for the start of the extension.
    stem = re.sub(r"\.[A-Za-z0-9]{1,5}(?=$|:)", "", origin.rpartition("/")[2])
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", stem).strip("_")[:48]
    return f"{number:09d}_{name}".rstrip("_")


def digest_of(members: Mapping[str, bytes]) -> str:
    """32 hexadecimal digits over extensions and bytes, whatever the members are called."""
    digest = hashlib.sha256()
    for name, data in sorted(members.items()):
        digest.update(f"{name} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()[:32]


def open_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer in `path`; without one, the embedded one of 4,096 entries."""
    return Tokenizer.load(path) if path else embedded_tokenizer(4096)


class Worker:
    """Reads ranges of items; made alike, it gives the same outcomes in every process."""

    def __init__(
        self,
        source: str,
        options: InputOptions,
        *,
        format: str,
        tokenizer: str | None,
        vision: str,
        max_pixels: int,
    ) -> None:
        self.input = open_input(source, options)
        # A folder that was prepared before keeps the format it was given.
        form = self.input.form if format == "auto" else format
        self.options = ShardsOptions.model_validate({"format": form})
        self.tokenizer = open_tokenizer(tokenizer)
        self.vision = VisionConfig.preset(vision)
        self.decode = DecodeConfig(max_pixels=max_pixels)

    def outcome(self, number: int) -> Outcome:
        """Item `number`, read, decoded and encoded as training will."""
        origin = self.input.origin(number)
        # The same check as in training, so that what is stored can be trained on.
        try:
            with one_sample(origin):
                members = self.input.members(number)
                # As a sample of a shard, which it is about to become.
                sizes = {name: len(data) for name, data in members.items()}
                group = Group(key_of(number, origin), origin, sizes, members.__getitem__)
                form, entry = describe(group, self.options)
                sample = Sample(build(group, self.options), "item", origin)
                document = encode(sample, self.tokenizer, self.vision, decode=self.decode)
        except BadSample as error:
            return Outcome(number, origin, reason=error.reason, message=str(error))

        # A question that nobody reads is told: it looks as if it were meant to be learned.
        unread = [name for name in QUESTIONS if name in entry and form in ("caption", "text", "video")]
        note = ""
        if unread:
            note = f"{form} without the field {unread[0]!r}: ask it with --question-field and --answer-field"

        return Outcome(
            number,
            origin,
            members,
            digest=digest_of(members),
            format=form,
            tokens=len(document),
            patches=document.num_patches,
            media=len(group.all(MEDIA)),
            note=note,
        )


_WORKER: Worker | None = None


def start_worker(make: Callable[[], Worker]) -> None:
    """Initialiser of a worker process."""
    global _WORKER
    # One process a core: more threads would only wait for each other.
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _WORKER = make()


def _end_with_parent() -> None:
    """A pool does not notice that its owner was killed: without this its workers would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def work(numbers: range) -> list[Outcome]:
    """Task of a worker process."""
    assert _WORKER is not None
    return [_WORKER.outcome(number) for number in numbers]


def work_on_node(make: Callable[[], Worker], numbers: range) -> list[Outcome]:
    """Task of a process that Ray started for this preparation alone."""
    if _WORKER is None:
        start_worker(make)
    return work(numbers)


# ---- shards


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def scan_file(path: Path) -> TarScan:
    """The walk over a local archive."""
    file = LocalFile(path)
    return scan_tar(file, file.size)


class ShardSet:
    """Writes the shards of one folder.

    Args:
        out: the folder.
        max_bytes, max_samples: limits of one shard, which is held in memory until it is full; a single sample
            over `max_bytes` has a shard of its own.
        dedup: leave out samples whose content was there before.
    """

    def __init__(self, out: Path, max_bytes: int, max_samples: int, dedup: bool) -> None:
        self.out, self.max_bytes, self.max_samples, self.dedup = out, max_bytes, max_samples, dedup
        # Of every finished shard what index.json will say.
        self.entries: list[Record] = []
        self.seen: set[str] = set()
        self.next_item, self.finished = 0, False
        self._stored: list[Outcome] = []
        self._left_out: list[Outcome] = []
        self._blocks = 0
        self._recover()

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
                digests = [rows.row(i).digest for i in range(len(rows))]
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

    def _enter(self, header: Record) -> None:
        entry = {name: header[name] for name in ("samples", "bytes", "sha256", *SUMS, *TABLES)}
        self.entries.append({"name": header["shard"], **entry})

    def add(self, outcome: Outcome) -> bool:
        """Enter the next item; returns whether it was stored."""
        # The first of equal items stays, whatever number of workers read them.
        if self.dedup and not outcome.reason and outcome.digest in self.seen:
            outcome.reason, outcome.message = "duplicate", "the same content as an item before"
        if outcome.reason:
            self._left_out.append(outcome)
            return False

        # Headers and data in blocks of 512 bytes: would this sample be one too many?
        blocks = sum(1 - (-len(data) // 512) for data in outcome.members.values())
        full = len(self._stored) >= self.max_samples or 512 * (self._blocks + blocks) > self.max_bytes
        if self._stored and full:
            self._close(outcome.number)
        self.seen.add(outcome.digest)
        self._stored.append(outcome)
        self._blocks += blocks
        return True

    def _skips(self) -> str:
        lines = []
        for left in self._left_out:
            entry = {"item": left.number, "from": left.origin, "reason": left.reason, "message": left.message}
            lines.append(json.dumps(entry) + "\n")
        return "".join(lines)

    def _close(self, stop: int, *, last: bool = False) -> None:
        """Finish the shard, which ends before item `stop`: what was left out first, then its bytes, then its
        index."""
        number, digests = len(self.entries), {}
        tar, index = self._path(number, ".tar"), self._path(number, INDEX_SUFFIX)
        with replacing(tar) as temporary:
            # Times and owners are those of nobody: the same items give the same bytes.
            with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as archive:
                for item in self._stored:
                    key = key_of(item.number, item.origin)
                    digests[key] = item.digest
                    for name, data in sorted(item.members.items()):
                        info = tarfile.TarInfo(f"{key}.{name}")
                        info.size, info.mode = len(data), 0o444
                        archive.addfile(info, io.BytesIO(data))

            facts = {"sha256": sha256_of(temporary), "stop": stop, "last": last}
            facts |= {name: sum(getattr(item, name) for item in self._stored) for name in SUMS}
            facts["formats"] = Counter(item.format for item in self._stored)
            facts["skipped"] = Counter(item.reason for item in self._left_out)
            scan, size = scan_file(temporary), temporary.stat().st_size
            write_atomic(self._skips_path(number), self._skips())
        write_index(index, index_lines(scan, tar.name, size, digests=digests, **facts))
        self._enter(ShardIndex(index).header)
        self.next_item, self._stored, self._left_out, self._blocks = stop, [], [], 0

    def finish(self, items: int, about: Record) -> Record:
        """Close the last shard, write skipped.jsonl and index.json; returns what index.json holds.

        Raises DataError when no item could be used; skipped.jsonl is there all the same.
        """
        if self._stored:
            self._close(items, last=True)
        numbers = range(len(self.entries))
        try:
            skips = "".join(self._skips_path(n).read_text("ascii") for n in numbers) + self._skips()
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.out}: a file of this preparation is gone or damaged ({error}); --overwrite it"
            ) from None
        write_atomic(self.out / SKIPPED, skips)
        # Every item was left out: the first says why, as a rule for all of them.
        if not self.entries:
            reasons = told(Counter(item.reason for item in self._left_out))
            first = [f"; the first, {item.origin}: {item.message}" for item in self._left_out[:1]]
            raise DataError(
                f"none of {items} items can be used ({reasons}); see {self.out / SKIPPED}{''.join(first)}"
            )

        manifest: Record = {"earlyfusion_shards": 1, "items": items, **about, "shards": self.entries}
        for name in ("samples", "bytes", *SUMS):
            manifest[name] = sum(entry[name] for entry in self.entries)
        for name in TABLES:
            manifest[name] = sum((Counter(entry[name]) for entry in self.entries), Counter())
        # Last of all: a folder with it is whole.
        write_json(self.out / MANIFEST, manifest, sort_keys=True, ensure_ascii=True)
        for number in numbers:
            self._skips_path(number).unlink(missing_ok=True)
        return manifest


def fault_of(path: Path, entry: Record) -> str:
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
    except (OSError, DataError) as error:
        return f"index: {error}"
    return "" if same else "the index is of another shard"
