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

import torch

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample, one_sample
from earlyfusion.data.formats.build import build, describe
from earlyfusion.data.formats.group import CODE, PICTURES, TEXTS, VIDEOS, Group, ending
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.prepare.inputs import open_input
from earlyfusion.data.prepare.rows import InputOptions
from earlyfusion.data.sample import Sample
from earlyfusion.data.sources.shards import ShardsOptions
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.vocabulary import embedded_tokenizer
from earlyfusion.vision.config import VisionConfig


@dataclass(frozen=True)
class Job:
    """Everything a worker needs; small and picklable."""

    source: str
    input: InputOptions
    format: str = "auto"
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
    def key(self) -> str:
        """Key of the item: its number, so that keys are unique and in order, and a readable rest of its
        name."""
        return key_of(self.number, self.origin)

    @property
    def size(self) -> int:
        """Bytes of all members."""
        return sum(map(len, self.members.values()))


def key_of(number: int, origin: str) -> str:
    """See `Outcome.key`."""
    # A dot in a key would be taken for the start of the extension.
    stem = re.sub(r"\.[A-Za-z0-9]{1,5}(?=$|:)", "", origin.rpartition("/")[2])
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", stem).strip("_")[:48]
    return f"{number:09d}_{name}".rstrip("_")


def open_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer in `path`; without one, the embedded one of 4,096 entries."""
    return Tokenizer.load(path) if path else embedded_tokenizer(4096)


QUESTIONS = ("question", "prompt", "instruction", "query", "answer", "response")
"""Fields that ask or answer; a caption or text beside them is taken without them."""


def note_of(group: Group, form: str, entry: dict[str, Any] | None) -> str:
    """What of an item is not taken although it looks as if it were meant to be; "" where nothing is."""
    # Two readings of one item: the reader should know which was taken.
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
    unread = next((name for name in QUESTIONS if name in (entry or {})), None)
    if unread is not None and form in ("caption", "text", "video"):
        return f"{form} without the field {unread!r}: ask it with --question-field and --answer-field"
    return ""


class Worker:
    """Reads ranges of items. The same job gives the same outcomes in every process."""

    def __init__(self, job: Job) -> None:
        self.input = open_input(job.source, job.input)
        # A folder that was prepared before keeps the format it was given.
        form = self.input.form
        if job.format != "auto":
            form = job.format
        self.options = ShardsOptions.model_validate({"format": form})
        self.tokenizer = open_tokenizer(job.tokenizer)
        self.vision = VisionConfig.preset(job.vision)
        self.decode = DecodeConfig(max_pixels=job.max_pixels)

    def outcome(self, number: int) -> Outcome:
        """Item `number`, read, decoded and encoded as training will."""
        made = Outcome(number, self.input.origin(number))
        # The same check as in training, so that what is stored can be trained on.
        try:
            with one_sample(made.origin):
                made.members = self.input.members(number)
                self._check(made)
        except BadSample as error:
            return Outcome(number, made.origin, reason=error.reason, message=str(error))

        # Over extensions and bytes, whatever the members are called.
        digest = hashlib.sha256()
        for name, data in sorted(made.members.items()):
            digest.update(f"{name} {len(data)}\n".encode())
            digest.update(data)
        made.digest = digest.hexdigest()[:32]
        return made

    def _check(self, made: Outcome) -> None:
        # As a sample of a shard, which it is about to become.
        sizes = {name: len(data) for name, data in made.members.items()}
        group = Group(made.key, made.origin, sizes, made.members.__getitem__)
        made.format, entry = describe(group, self.options)
        made.note = note_of(group, made.format, entry)
        sample = Sample(build(group, self.options), "item", made.origin)
        document = encode(sample, self.tokenizer, self.vision, decode=self.decode)
        made.media = len(group.all((*PICTURES, *VIDEOS)))
        made.tokens, made.patches = len(document), document.num_patches


_WORKER: Worker | None = None


def start_worker(job: Job) -> None:
    """Initialiser of a worker process."""
    global _WORKER
    # One process a core: more threads would only wait for each other.
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _WORKER = Worker(job)


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
