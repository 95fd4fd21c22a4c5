"""Sources of generated pictures: a sample is made from (seed, kind, index), so there is no end to them.

A sample is a picture with either a caption or some questions (never both: a caption would answer the
questions). Held-out samples are made from combinations training never draws.
"""

from __future__ import annotations

from random import Random
from typing import Any, ClassVar

from pydantic import Field, PositiveInt, model_validator

from earlyfusion.data.sample import Sample, Segment, Text, answer_text, question_text
from earlyfusion.data.sources.base import Generated, GeneratedOptions, source
from earlyfusion.data.synth.graph import Clip, Graph, Scene
from earlyfusion.data.synth.panels import Board, Chart, Sign

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
