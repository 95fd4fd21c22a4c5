"""Sources that need no download: easy-VQA, the text that every Python carries, and generated pictures.

easy-VQA (PyPI package `easy-vqa`, MIT): 4,000 / 1,000 pictures of 64x64 with 38,575 / 9,673 questions. The
package's own split is kept: training never opens the test folder. One sample is one picture with several of
its questions, drawn anew each epoch.

Text: Python's own reference manual in English, and the sources of its standard library.

Generated pictures: a sample is made from (seed, kind, index), so there is no end to them. It is a picture
with either a caption or some questions (never both: a caption would answer the questions). Held-out samples
are made from combinations training never draws.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from earlyfusion.data.library import chunks_of_lines, library
from earlyfusion.data.loading.order import digest64, held_out
from earlyfusion.data.picture import open_picture
from earlyfusion.data.sample import Image, Sample, Segment, Text, answer_text, question_text
from earlyfusion.data.sources.base import Generated, GeneratedOptions, Listed, Options, Source, source
from earlyfusion.data.synth.graph import Clip, Graph, Scene
from earlyfusion.data.synth.panels import Board, Chart, Sign

# ---- easy-VQA


class EasyVqaOptions(Options):
    questions_per_image: int = Field(6, ge=0)
    """Questions drawn for one image each epoch, in random order; 0 takes all (2 to 21, 9.6 on average)."""
    question_loss: float = Field(0.0, ge=0)
    """Loss weight of the question text; answers have 1."""
    question_weights: dict[str, PositiveFloat] = {}
    """Regular expressions, looked for in "question answer": how many times as likely such a question is
    drawn, and earlier; of several that fit the product."""

    @field_validator("question_weights")
    @classmethod
    def _compiles(cls, weights: dict[str, float]) -> dict[str, float]:
        for pattern in weights:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return weights


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
    for question, answer, picture in json.loads((root / "questions.json").read_bytes()):
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
        rng = Random(f"{self.seed}/easy_vqa/{epoch}/{index}")
        rng.shuffle(questions)
        if weights := self.options.question_weights:
            # Weighted, without putting back: the largest of u^(1/w) first (Efraimidis and Spirakis, 2006).
            weight = {
                asked: math.prod(w for pattern, w in weights.items() if re.search(pattern, " ".join(asked)))
                for asked in questions
            }
            questions.sort(key=lambda asked: -(rng.random() ** (1 / weight[asked])))
        return self._sample(entry, questions[: most or None], f"train/{entry.index}")

    def heldout_len(self) -> int:
        return len(load_split("test"))

    def heldout(self, index: int) -> Sample:
        """A picture of the official test split with one of its questions, so that no answer gives another
        away."""
        entry = load_split("test")[index]
        chosen = Random(f"easy_vqa/test/{index}").choice(entry.questions)
        return self._sample(entry, [chosen], f"test/{entry.index}")

    def contents(self) -> Iterator[object]:
        yield len(self.train)
        yield sum(len(entry.questions) for entry in self.train)

    def texts(self, index: int) -> list[str]:
        # All questions, not those of one epoch: the tokenizer shall know every word.
        asked = self._sample(self.train[index], self.train[index].questions, "")
        return [segment.text for segment in asked.segments if isinstance(segment, Text)]


# ---- text of the installed Python


@source("pydoc", pictures=False, licence="PSF-2.0", note="topics of the installed Python's reference manual")
class Pydoc(Listed):
    """The topics of `pydoc_data` (79 chapters of the language reference, 465 kB), about `val_fraction` of the
    bytes held out."""

    def open(self) -> None:
        # Here, for some distributions leave the manual out.
        from pydoc_data.topics import topics

        self._topics = topics
        held = _heldout_topics(self._topics, self.val_fraction)
        self.held = [name for name in sorted(self._topics) if name in held]
        self.train = [name for name in sorted(self._topics) if name not in held]

    def read(self, item: str) -> Sample:
        return Sample([Text(self._topics[item])], self.name, item)

    def contents(self) -> Iterator[object]:
        for name in self.train:
            yield f"{name} {len(self._topics[name])}"


_SHARED_PARAGRAPH_CHARS = 80


def _families(topics: dict[str, str]) -> list[list[str]]:
    """Topics that share a paragraph: the manual gives whole sections again under other names ("if" inside
    "compound")."""
    family = {name: [name] for name in topics}
    owner: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            # Set anew at other widths, the same paragraph has other line ends.
            words = " ".join(paragraph.split())
            if len(words) < _SHARED_PARAGRAPH_CHARS:
                continue
            other = owner.setdefault(words, name)
            if family[other] is not family[name]:
                # All members share one list, so that joining two families is seen by each.
                joined = family[other] + family[name]
                family.update(dict.fromkeys(joined, joined))
    return [sorted(members) for name, members in sorted(family.items()) if name == min(members)]


def _heldout_topics(topics: dict[str, str], fraction: float) -> set[str]:
    """Whole families in hash order, as many as fit in `fraction` of the characters."""
    # Of characters, not of topics: some are a hundred times as long as others.
    room = fraction * sum(map(len, topics.values()))
    held: set[str] = set()
    for members in sorted(_families(topics), key=lambda members: digest64("pydoc", members[0])):
        size = sum(len(topics[name]) for name in members)
        # A family that does not fit is passed over; smaller ones after it may.
        if size <= room:
            held.update(members)
            room -= size
    return held


class StdlibCodeOptions(Options):
    total_bytes: PositiveInt = 4_000_000
    """Files are taken in a fixed random order until they hold this many bytes."""
    chunk_bytes: PositiveInt = 8_192
    """A file becomes documents of about this size, cut at line ends."""


@source(
    "stdlib_code",
    StdlibCodeOptions,
    pictures=False,
    licence="PSF-2.0",
    note="sources of the installed Python's standard library",
)
class StdlibCode(Listed):
    """Python sources of the running standard library, as chunks of about `chunk_bytes`; files are held out by
    name."""

    def open(self) -> None:
        self.train: list[tuple[str, str]] = []
        self.held: list[tuple[str, str]] = []
        for name, text in library(self.options.total_bytes):
            side = self.held if held_out(f"stdlib/{name}", self.val_fraction) else self.train
            for number, chunk in enumerate(chunks_of_lines(text, self.options.chunk_bytes)):
                side.append((f"{name}#{number}", chunk))

    def read(self, item: tuple[str, str]) -> Sample:
        key, text = item
        return Sample([Text(text)], self.name, key)

    def contents(self) -> Iterator[object]:
        for key, text in self.train:
            yield f"{key} {len(text)}"


# ---- generated pictures


# About a third: enough to name what is there, most of it asks.
CAPTION_SHARE = 0.35
NOTE = "rendered by the project"


class PictureOptions(GeneratedOptions):
    min_side: int = Field(40, ge=32)
    """Shortest picture side in pixels."""
    max_side: PositiveInt = 96
    """Longest picture side in pixels."""

    @model_validator(mode="after")
    def _check(self) -> PictureOptions:
        if self.min_side > self.max_side:
            raise ValueError(f"min_side {self.min_side} is more than max_side {self.max_side}")
        return self


class SynthOptions(PictureOptions):
    questions: int = Field(3, ge=0)
    """Most questions asked about one picture."""
    question_loss: float = Field(0.0, ge=0)
    """Loss weight of the question text; answers have 1."""


class SynthScenesOptions(SynthOptions):
    text_twin: float = Field(0.15, ge=0, le=1)
    """Share of the samples in which a written list of the objects takes the picture's place."""
    max_objects: int = Field(4, ge=1, le=9)
    """Most objects of one scene."""


class SynthClipsOptions(SynthOptions):
    frames: int = Field(6, ge=5, le=16)
    """Frames of one clip."""
    fps: float = Field(2.0, gt=0)
    """Frames in a second; sets the timestamps."""


class Synth(Generated):
    """What all kinds share: the choice between caption and questions, the layout of the text."""

    graph_type: ClassVar[Any]
    own: ClassVar[tuple[str, ...]] = ()
    """Options that `graph_type.make` takes beside the sides."""

    def _start(self, number: int, heldout: bool) -> tuple[Graph, Random]:
        """The graph of a sample, and the random numbers after it."""
        rng = Random(f"{'heldout' if heldout else self.seed}/{self.config.kind}/{number}")
        # By name, so that a family takes only what it has.
        given = {name: getattr(self.options, name) for name in ("min_side", "max_side", *self.own)}
        return self.graph_type.make(rng, heldout=heldout, **given), rng

    def _written(self, graph: Graph, rng: Random) -> list[Text]:
        # Both are drawn always, so that the share does not move what follows.
        caption, questions = graph.caption(rng), graph.questions(rng, self.options.questions)
        if not questions or rng.random() < CAPTION_SHARE:
            return [Text("\n" + caption)]
        texts = []
        for question, answer in questions:
            texts += [Text(question_text(question), self.options.question_loss), Text(answer_text(answer))]
        return texts

    def _media(self, graph: Graph, rng: Random) -> Segment:
        return graph.media()

    def made(self, number: int, key: str, heldout: bool) -> Sample:
        graph, rng = self._start(number, heldout)
        # Before the texts: the order of draws is part of the fingerprint.
        media = self._media(graph, rng)
        return Sample([media, *self._written(graph, rng)], self.name, key)

    def texts(self, index: int) -> list[str]:
        return [text.text for text in self._written(*self._start(index, False))]


@source("synth_scenes", SynthScenesOptions, pictures=True, note=NOTE)
class SynthScenes(Synth):
    """Shapes in places: captions, colours, counts, relations, sizes, boxes; some samples are text twins."""

    graph_type = Scene
    own = ("max_objects",)

    def _media(self, graph: Graph, rng: Random) -> Segment:
        return Text(graph.words()) if rng.random() < self.options.text_twin else graph.media()

    def texts(self, index: int) -> list[str]:
        graph, rng = self._start(index, False)
        return [graph.words(), *(text.text for text in self._written(graph, rng))]


@source("synth_charts", SynthOptions, pictures=True, note=NOTE)
class SynthCharts(Synth):
    """Bar and line charts: tables, single values, extremes, sums."""

    graph_type = Chart


@source("synth_words", SynthOptions, pictures=True, note=NOTE)
class SynthWords(Synth):
    """Rendered words: reading, colour of the text, first character."""

    graph_type = Sign


@source("synth_grid", SynthOptions, pictures=True, note=NOTE)
class SynthGrid(Synth):
    """Boards of coloured cells: rows, columns, single cells."""

    graph_type = Board


@source("synth_clips", SynthClipsOptions, pictures=True, note=NOTE)
class SynthClips(Synth):
    """Moving shapes: what moves, which way, how far."""

    graph_type = Clip
    own = ("frames", "fps")
