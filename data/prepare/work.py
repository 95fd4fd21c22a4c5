"""What a worker of `earlyfusion prepare` does: read items, check them as training will, count tokens and
patches."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample, one_sample
from earlyfusion.data.formats.build import build, describe
from earlyfusion.data.formats.group import CODE, PICTURES, TEXTS, VIDEOS, Group, ending
from earlyfusion.data.formats.regions import picture_size
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.prepare.inputs import InputOptions, open_input
from earlyfusion.data.sample import Image, Sample, Text
from earlyfusion.data.sources.shards import ShardsOptions
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.vocabulary import embedded_tokenizer
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import grid_of, navit_size, num_patches, num_tokens


@dataclass(frozen=True)
class Job:
    """Everything a worker needs; small and picklable."""

    source: str
    input: InputOptions
    format: str = "auto"
    check: str = "full"
    dedup: str = "sample"
    tokenizer: str | None = None
    vision: str = "moonvit_v2"
    max_pixels: int = DecodeConfig().max_pixels


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
    """what a reader should know of an item that is taken: the form chosen where there are two, fields nobody
    reads"""

    @property
    def size(self) -> int:
        """Bytes of all members."""
        return sum(map(len, self.members.values()))


def open_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer in `path`; without one, the embedded one of 4,096 entries."""
    return Tokenizer.load(path) if path else embedded_tokenizer(4096)


QUESTIONS = ("question", "prompt", "instruction", "query", "answer", "response")
"""Fields that ask or answer; a caption or text beside them is taken without them."""


def note_of(group: Group, form: str, entry: dict[str, Any] | None) -> str:
    """What of an item is not taken although it looks as if it were meant to be; "" where nothing is."""
    source = group.first(CODE)
    if source is not None and form == "caption":
        return (
            f"a picture with a caption and .{ending(source)}: the caption is taken (--format code takes the"
            " source)"
        )
    if source is not None and form == "text" and group.first(TEXTS):
        return (
            f"a text with .{ending(source)} and no picture: the text alone is taken (draw the source as a"
            " .png beside it)"
        )
    unread = (
        [name for name in QUESTIONS if name in (entry or {})] if form in ("caption", "text", "video") else []
    )
    if unread:
        return f"{form} without the field {unread[0]!r}: ask it with --question-field and --answer-field"
    return ""


def key_of(number: int, origin: str) -> str:
    """Key of an item: its number, so that keys are unique and in order, and a readable rest of its name."""
    stem = re.sub(r"\.[A-Za-z0-9]{1,5}(?=$|:)", "", origin.rpartition("/")[2])
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", stem).strip("_")[:48]
    return f"{number:09d}_{name}" if name else f"{number:09d}"


class Worker:
    """Reads ranges of items. The same job gives the same outcomes in every process."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.input = open_input(job.source, job.input)
        self.options = ShardsOptions.model_validate(
            {"format": job.format if job.format != "auto" else self.input.form}
        )
        self.tokenizer = open_tokenizer(job.tokenizer)
        self.vision = VisionConfig.preset(job.vision)
        self.decode = DecodeConfig(max_pixels=job.max_pixels)

    def outcomes(self, start: int, stop: int) -> list[Outcome]:
        """Items [start, stop)."""
        return [self._outcome(number) for number in range(start, stop)]

    def _outcome(self, number: int) -> Outcome:
        made = Outcome(number, self.input.origin(number))
        try:
            with one_sample(lambda: made.origin):
                made.members = self.input.members(number)
                self._check(made)
        except BadSample as error:
            return Outcome(number, made.origin, reason=error.reason, message=str(error))
        made.digest = content_hash(made.members, media_only=self.job.dedup == "media")
        return made

    def _check(self, made: Outcome) -> None:
        sizes = {name: len(data) for name, data in made.members.items()}
        group = Group(key_of(made.number, made.origin), made.origin, sizes, made.members.__getitem__)
        made.format, entry = describe(group, self.options)
        made.note = note_of(group, made.format, entry)
        segments = build(group, self.options)
        made.media = len(group.all((*PICTURES, *VIDEOS)))
        if self.job.check == "full":
            document = encode(
                Sample(segments, "item", made.origin), self.tokenizer, self.vision, decode=self.decode
            )
            made.tokens, made.patches = len(document), document.num_patches
        else:
            for segment in segments:
                self._estimate(made, group, segment)

    def _estimate(self, made: Outcome, group: Group, segment: Any) -> None:
        """Without decoding: pictures by their headers, videos not at all."""
        if isinstance(segment, Text):
            made.tokens += len(self.tokenizer.encode(segment.text))
        elif isinstance(segment, Image) and isinstance(segment.image, bytes):
            grid = grid_of(navit_size(*picture_size(group, segment.image), self.vision), self.vision)
            made.patches += num_patches(grid)
            made.tokens += num_tokens(grid, self.vision.merge_kernel_size)


def content_hash(members: dict[str, bytes], *, media_only: bool = False) -> str:
    """32 hexadecimal digits of SHA-256 over the members (their extensions and bytes), whatever they are
    called."""
    digest = hashlib.sha256()
    chosen = {name: data for name, data in members.items() if ending(name) in (*PICTURES, *VIDEOS)}
    for name, data in sorted((chosen if media_only and chosen else members).items()):
        digest.update(f"{name} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()[:32]


_WORKER: Worker | None = None


def start_worker(job: Job) -> None:
    """Initialiser of a worker process."""
    global _WORKER
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _WORKER = Worker(job)


def _end_with_parent() -> None:
    """A pool does not notice that its owner was killed: without this its workers would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def work(start: int, stop: int) -> list[Outcome]:
    """Task of a worker process."""
    assert _WORKER is not None
    return _WORKER.outcomes(start, stop)
