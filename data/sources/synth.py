"""Sources of generated pictures: a sample is made from (seed, kind, index), so there is no end to them.

A sample is a picture with either a caption or some questions (never both: a caption would answer the
questions). Epoch e makes the numbers e * count .. (e + 1) * count - 1; held-out samples are made from
combinations training never draws.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from random import Random
from typing import Any

from PIL import Image as PILImage
from pydantic import Field, PositiveInt, model_validator

from earlyfusion.data.sample import Image, Sample, Segment, Text, Video, answer_text, question_text
from earlyfusion.data.sources.base import Options, Source, SourceConfig, source
from earlyfusion.data.synth import charts, clips, describe, grid, scene, words

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

    def __init__(self, config: SourceConfig, *, seed: int, val_fraction: float) -> None:
        super().__init__(config, seed=seed, val_fraction=val_fraction)
        self.options: Any = config.typed
        self._sides = {"min_side": self.options.min_side, "max_side": self.options.max_side}

    @abstractmethod
    def make(self, rng: Random, heldout: bool) -> Any:
        """The graph: everything that is known about one picture."""

    @abstractmethod
    def draw(self, made: Any) -> PILImage.Image | list[PILImage.Image]:
        """The picture (or the frames) of a graph."""

    @abstractmethod
    def wording(self, made: Any, rng: Random) -> tuple[str, list[tuple[str, str]]]:
        """(caption, questions with answers) of a graph."""

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

    def graph(self, number: int, heldout: bool = False) -> Any:
        """The graph of sample `number` (epoch * count + index)."""
        return self.make(self._rng(number, heldout), heldout)

    def _written(self, made: Any, rng: Random) -> list[Text]:
        caption, questions = self.wording(made, rng)
        if not questions or rng.random() < CAPTION_SHARE:
            return [Text("\n" + caption)]
        asked = [
            (Text(question_text(q), self.options.question_loss), Text(answer_text(a))) for q, a in questions
        ]
        return [text for pair in asked for text in pair]

    def _media(self, made: Any, rng: Random) -> Segment:
        picture = self.draw(made)
        return Video(picture, made.timestamps) if isinstance(picture, list) else Image(picture)

    def _sample(self, number: int, key: str, heldout: bool) -> Sample:
        rng = self._rng(number, heldout)
        made = self.make(rng, heldout)
        media = self._media(made, rng)
        return Sample([media, *self._written(made, rng)], self.name, key)

    def get(self, index: int, epoch: int) -> Sample:
        number = epoch * len(self) + index
        return self._sample(number, str(number), heldout=False)

    def heldout(self, index: int) -> Sample:
        return self._sample(index, f"heldout/{index}", heldout=True)

    def texts(self, index: int) -> list[str]:
        rng = self._rng(index, False)
        return [text.text for text in self._written(self.make(rng, False), rng)]


@source("synth_scenes", SynthScenesOptions, pictures=True, note="rendered by the project")
class SynthScenes(Synth):
    """Shapes in places: captions, colours, counts, relations, sizes, boxes; some samples are text twins."""

    def make(self, rng: Random, heldout: bool) -> scene.Scene:
        return scene.make_scene(rng, **self._sides, max_objects=self.options.max_objects, heldout=heldout)

    def draw(self, made: scene.Scene) -> PILImage.Image:
        return scene.draw_scene(made)

    def wording(self, made: scene.Scene, rng: Random) -> tuple[str, list[tuple[str, str]]]:
        return describe.caption(made, rng), describe.questions(made, rng, self.options.questions)

    def _media(self, made: scene.Scene, rng: Random) -> Segment:
        if rng.random() < self.options.text_twin:
            return Text(describe.twin(made))
        return super()._media(made, rng)

    def texts(self, index: int) -> list[str]:
        rng = self._rng(index, False)
        made = self.make(rng, False)
        return [describe.twin(made), *(text.text for text in self._written(made, rng))]


@source("synth_charts", SynthOptions, pictures=True, note="rendered by the project")
class SynthCharts(Synth):
    """Bar and line charts: tables, single values, extremes, sums."""

    def make(self, rng: Random, heldout: bool) -> charts.Chart:
        return charts.make_chart(rng, **self._sides, heldout=heldout)

    def draw(self, made: charts.Chart) -> PILImage.Image:
        return charts.draw_chart(made)

    def wording(self, made: charts.Chart, rng: Random) -> tuple[str, list[tuple[str, str]]]:
        return charts.chart_table(made), charts.chart_questions(made, rng, self.options.questions)


@source("synth_words", SynthOptions, pictures=True, note="rendered by the project")
class SynthWords(Synth):
    """Rendered words: reading, colour of the text, first character."""

    def make(self, rng: Random, heldout: bool) -> words.Sign:
        return words.make_sign(rng, **self._sides, heldout=heldout)

    def draw(self, made: words.Sign) -> PILImage.Image:
        return words.draw_sign(made)

    def wording(self, made: words.Sign, rng: Random) -> tuple[str, list[tuple[str, str]]]:
        return f"text: {made.text}", words.sign_questions(made, rng, self.options.questions)


@source("synth_grid", SynthOptions, pictures=True, note="rendered by the project")
class SynthGrid(Synth):
    """Boards of coloured cells: rows, columns, single cells."""

    def make(self, rng: Random, heldout: bool) -> grid.Board:
        return grid.make_board(rng, **self._sides, heldout=heldout)

    def draw(self, made: grid.Board) -> PILImage.Image:
        return grid.draw_board(made)

    def wording(self, made: grid.Board, rng: Random) -> tuple[str, list[tuple[str, str]]]:
        return grid.board_rows(made), grid.board_questions(made, rng, self.options.questions)


@source("synth_clips", SynthClipsOptions, pictures=True, note="rendered by the project")
class SynthClips(Synth):
    """Moving shapes: what moves, which way, how far."""

    def make(self, rng: Random, heldout: bool) -> clips.Clip:
        frames, fps = self.options.frames, self.options.fps
        return clips.make_clip(rng, **self._sides, frames=frames, fps=fps, heldout=heldout)

    def draw(self, made: clips.Clip) -> list[PILImage.Image]:
        return clips.draw_clip(made)

    def wording(self, made: clips.Clip, rng: Random) -> tuple[str, list[tuple[str, str]]]:
        return clips.clip_caption(made), clips.clip_questions(made, rng, self.options.questions)
