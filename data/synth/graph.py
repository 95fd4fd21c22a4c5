"""What all generated pictures share: an exact graph is made first, and everything else is read off it.

    graph = Scene.make(Random(seed), min_side=40, max_side=96, heldout=False)
    graph.media()                the picture, or the clip with its times
    graph.words()                its text twin: everything a question may ask for, in words
    graph.caption(rng)           one sentence or table that tells what there is
    graph.questions(rng, 3)      up to three (question, answer), no text twice

Training samples (data/sources/synth.py), verifiable problems and benchmarks (data/tasks) all ask these
graphs, so that a question has one wording. Combinations on the held-out side (colour with shape, words,
values of a chart, first rows of a board) are never drawn for training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import TypeAlias

from PIL import Image as PILImage

from earlyfusion.data.sample import Image, Video

# Answers are text in every family: a benchmark compares words.
Question: TypeAlias = tuple[str, str]
"""(question, answer)"""


class Graph(ABC):
    """Everything there is to know about one generated picture.

    Every kind has a classmethod make(rng, *, min_side, max_side, heldout=False, ...): a random graph whose
    picture has sides within the limits (pixels), of one side of the split.
    """

    @property
    def thought(self) -> str:
        """What there is, in fewer words than the twin; "" where the twin is short."""
        return ""

    @abstractmethod
    def draw(self) -> PILImage.Image:
        """The picture, RGB; of a clip, its first frame."""

    def media(self) -> Image | Video:
        """The picture as a segment of a document."""
        return Image(self.draw())

    @abstractmethod
    def words(self) -> str:
        """The text twin: what a reader must know to answer every question without the picture."""

    @abstractmethod
    def caption(self, rng: Random) -> str:
        """What there is, as a document tells it."""

    @abstractmethod
    def questions(self, rng: Random, count: int) -> list[Question]:
        """Up to `count` questions with their answers, no text twice."""


def article(phrase: str) -> str:
    """ "a red circle", "an orange star"."""
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def yes_no(truth: bool) -> str:
    """ "yes" or "no"."""
    return "yes" if truth else "no"


def pixels(box: Sequence[int]) -> str:
    """ "[12, 30, 40, 58]"."""
    return str(list(box))


def shares(box: Sequence[float]) -> str:
    """ "[0.12, 0.30, 0.40, 0.58]"."""
    return "[" + ", ".join(f"{x:.2f}" for x in box) + "]"
