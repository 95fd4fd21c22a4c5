"""easy-VQA (PyPI package `easy-vqa`, MIT): 4,000 / 1,000 pictures of 64x64 with 38,575 / 9,673 questions.

The package's own split is kept: training never opens the test folder. One sample is one picture with several
of its questions, drawn anew each epoch.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import Field

from earlyfusion.data.picture import open_picture
from earlyfusion.data.sample import Image, Sample, Segment, Text, answer_text, question_text
from earlyfusion.data.sources.base import Options, Source, source


class EasyVqaOptions(Options):
    questions_per_image: int = Field(6, ge=0)
    """Questions drawn for one image each epoch, in random order; 0 takes all (19 or 20 for most images)."""
    question_loss: float = Field(0.0, ge=0)
    """Loss weight of the question text; answers have 1."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of a split with all its questions and answers."""

    index: int
    path: Path
    questions: tuple[tuple[str, str], ...]


@cache
def load_split(split: str) -> tuple[Picture, ...]:
    """All pictures of "train" or "test" in order of their number."""
    # Found without importing it: only its files are of use.
    package = Path(str(importlib.util.find_spec("easy_vqa").origin)).parent  # type: ignore[union-attr]
    root = package / "data" / split
    # The file lists questions, a document needs them by picture.
    asked: dict[int, list[tuple[str, str]]] = {}
    for question, answer, picture in json.loads((root / "questions.json").read_text(encoding="utf-8")):
        asked.setdefault(picture, []).append((question, answer))
    return tuple(Picture(i, root / "images" / f"{i}.png", tuple(asked[i])) for i in sorted(asked))


@cache
def picture_of(entry: Picture) -> Image:
    """The picture as a segment; decoded once and not every epoch, for it takes 12 kB."""
    return Image(open_picture(entry.path).convert("RGB"))


@source(
    "easy_vqa",
    EasyVqaOptions,
    pictures=True,
    licence="MIT",
    note="pictures and questions of the PyPI package easy-vqa",
)
class EasyVqa(Source):
    """One picture, then `questions_per_image` of its questions with answers, in an order of the epoch's
    own."""

    def open(self) -> None:
        self.train = load_split("train")

    def __len__(self) -> int:
        return len(self.train)

    def _sample(self, entry: Picture, questions: Sequence[tuple[str, str]], key: str) -> Sample:
        segments: list[Segment] = [picture_of(entry)]
        for question, answer in questions:
            segments.append(Text(question_text(question), self.options.question_loss))
            segments.append(Text(answer_text(answer)))
        return Sample(segments, self.name, key)

    def get(self, index: int, epoch: int) -> Sample:
        entry, most = self.train[index], self.options.questions_per_image
        questions = list(entry.questions)
        # By name, not by a running generator: a resume draws the same.
        random.Random(f"{self.seed}/easy_vqa/{epoch}/{index}").shuffle(questions)
        return self._sample(entry, questions[: most or None], f"train/{entry.index}")

    def heldout_len(self) -> int:
        return len(load_split("test"))

    def heldout(self, index: int) -> Sample:
        """A picture of the official test split with one of its questions, so that no answer gives another
        away."""
        entry = load_split("test")[index]
        chosen = random.Random(f"easy_vqa/test/{index}").choice(entry.questions)
        return self._sample(entry, [chosen], f"test/{entry.index}")

    def contents(self) -> Iterator[object]:
        yield len(self.train)
        yield sum(len(entry.questions) for entry in self.train)

    def texts(self, index: int) -> list[str]:
        # All questions, not those of one epoch: the tokenizer shall know every word.
        asked = self._sample(self.train[index], self.train[index].questions, "")
        return [segment.text for segment in asked.segments if isinstance(segment, Text)]
