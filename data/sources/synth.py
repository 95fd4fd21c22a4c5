"""Sources of generated pictures: a sample is made from (seed, kind, index), so there is no end to them.

A sample is a picture with either a caption or some questions (never both: a caption would answer the
questions). Epoch e makes the numbers e * count .. (e + 1) * count - 1; held-out samples are made from
combinations training never draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, ClassVar

from pydantic import Field, PositiveInt, model_validator

from earlyfusion.data.sample import Sample, Segment, Text, answer_text, question_text
from earlyfusion.data.sources.base import Options, Source, SourceConfig, source
from earlyfusion.data.synth.charts import Chart
from earlyfusion.data.synth.clips import Clip
from earlyfusion.data.synth.graph import Graph
from earlyfusion.data.synth.grid import Board
from earlyfusion.data.synth.scene import Scene
from earlyfusion.data.synth.words import Sign

CAPTION_SHARE = 0.35
_VERSION = 1
"""Part of the fingerprint: raise it when a generator draws something else than before."""


class SynthOptions(Options):
    count: PositiveInt = 100_000
    """Samples of one epoch; the next epoch makes new ones."""
    heldout_count: PositiveInt = 512
    """Samples held out."""
    min_side: int = Field(40, ge=32)
    """Shortest picture side in pixels."""
    max_side: PositiveInt = 96
    """Longest picture side in pixels."""
    questions: int = Field(3, ge=0)
    """Most questions asked about one picture."""
    question_loss: float = Field(0.0, ge=0)
    """Loss weight of the question text; answers have 1."""

    @model_validator(mode="after")
    def _check(self) -> SynthOptions:
        if self.min_side > self.max_side:
            raise ValueError(f"min_side {self.min_side} is more than max_side {self.max_side}")
        return self


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


class Synth(Source):
    """What all kinds share: numbering, the choice between caption and questions, the layout of the text."""

    graph_type: ClassVar[type[Graph]]
    own: ClassVar[tuple[str, ...]] = ()
    """Options that `graph_type.make` takes beside the sides."""

    def __init__(self, config: SourceConfig, *, seed: int, val_fraction: float) -> None:
        super().__init__(config, seed=seed, val_fraction=val_fraction)
        self.options: Any = config.typed

    def __len__(self) -> int:
        return int(self.options.count)

    def heldout_len(self) -> int:
        return int(self.options.heldout_count)

    def contents(self) -> Iterator[object]:
        yield _VERSION
        yield len(self)

    def _rng(self, number: int, heldout: bool) -> Random:
        side = "heldout" if heldout else self.seed
        return Random(f"{side}/{self.config.kind}/{number}")

    def _make(self, rng: Random, heldout: bool) -> Graph:
        given = {name: getattr(self.options, name) for name in ("min_side", "max_side", *self.own)}
        return self.graph_type.make(rng, heldout=heldout, **given)

    def graph(self, number: int, heldout: bool = False) -> Graph:
        """The graph of sample `number` (epoch * count + index)."""
        return self._make(self._rng(number, heldout), heldout)

    def _written(self, graph: Graph, rng: Random) -> list[Text]:
        caption, questions = graph.caption(rng), graph.questions(rng, self.options.questions)
        if not questions or rng.random() < CAPTION_SHARE:
            return [Text("\n" + caption)]
        texts = []
        for question, answer in questions:
            texts += [Text(question_text(question), self.options.question_loss), Text(answer_text(answer))]
        return texts

    def _media(self, graph: Graph, rng: Random) -> Segment:
        return graph.media()

    def _sample(self, number: int, key: str, heldout: bool) -> Sample:
        rng = self._rng(number, heldout)
        graph = self._make(rng, heldout)
        media = self._media(graph, rng)
        return Sample([media, *self._written(graph, rng)], self.name, key)

    def get(self, index: int, epoch: int) -> Sample:
        number = epoch * len(self) + index
        return self._sample(number, str(number), heldout=False)

    def heldout(self, index: int) -> Sample:
        return self._sample(index, f"heldout/{index}", heldout=True)

    def texts(self, index: int) -> list[str]:
        rng = self._rng(index, False)
        return [text.text for text in self._written(self._make(rng, False), rng)]


@source("synth_scenes", SynthScenesOptions, pictures=True, note="rendered by the project")
class SynthScenes(Synth):
    """Shapes in places: captions, colours, counts, relations, sizes, boxes; some samples are text twins."""

    graph_type = Scene
    own = ("max_objects",)

    def _media(self, graph: Graph, rng: Random) -> Segment:
        return Text(graph.words()) if rng.random() < self.options.text_twin else graph.media()

    def texts(self, index: int) -> list[str]:
        return [self.graph(index).words(), *super().texts(index)]


@source("synth_charts", SynthOptions, pictures=True, note="rendered by the project")
class SynthCharts(Synth):
    """Bar and line charts: tables, single values, extremes, sums."""

    graph_type = Chart


@source("synth_words", SynthOptions, pictures=True, note="rendered by the project")
class SynthWords(Synth):
    """Rendered words: reading, colour of the text, first character."""

    graph_type = Sign


@source("synth_grid", SynthOptions, pictures=True, note="rendered by the project")
class SynthGrid(Synth):
    """Boards of coloured cells: rows, columns, single cells."""

    graph_type = Board


@source("synth_clips", SynthClipsOptions, pictures=True, note="rendered by the project")
class SynthClips(Synth):
    """Moving shapes: what moves, which way, how far."""

    graph_type = Clip
    own = ("frames", "fps")
