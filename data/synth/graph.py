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
from functools import cache
from itertools import product
from math import cos, pi, sin
from random import Random
from typing import TypeAlias

from PIL import Image as PILImage
from PIL import ImageDraw, ImageFont

from earlyfusion.data.loading.order import held_out
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


Colour = tuple[int, int, int]
Pair = tuple[str, str]
"""(colour, shape)"""
Box = tuple[int, int, int, int]
"""(left, top, right, bottom) in pixels; right and bottom are the first column and row outside."""

# Far enough apart that no JPEG makes one of another.
COLOURS: dict[str, Colour] = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (30, 60, 220),
    "yellow": (240, 220, 40),
    "black": (10, 10, 10),
    "gray": (128, 128, 128),
    "teal": (0, 150, 150),
    "brown": (120, 70, 20),
    "purple": (130, 40, 170),
    "orange": (250, 140, 20),
}
# Pale: every colour above stands out on each.
BACKGROUNDS: dict[str, Colour] = {
    "white": (255, 255, 255),
    "light gray": (215, 215, 215),
    "pale blue": (205, 225, 250),
}
SHAPES = ("circle", "square", "triangle", "rectangle", "star", "diamond")
HELDOUT_FRACTION = 0.12
"""Share of combinations kept for evaluation, in every family of generated pictures."""


def on_side(combination: str, heldout: bool) -> bool:
    """Whether a combination belongs to that side; by the hash of its name, so that it never changes sides."""
    return held_out(combination, HELDOUT_FRACTION) == heldout


def pair_key(pair: Pair) -> str:
    """The name by which a pair is held out."""
    return f"pair/{pair[0]}/{pair[1]}"


@cache
def pairs(heldout: bool) -> tuple[Pair, ...]:
    """(colour, shape) pairs of one side; the two sides share none."""
    return tuple(pair for pair in product(COLOURS, SHAPES) if on_side(pair_key(pair), heldout))


def paint(draw: ImageDraw.ImageDraw, shape: str, box: Box, colour: Colour) -> None:
    """Fill `shape` so that its pixels touch all four sides of `box` and none lies outside."""
    # Pillow's last pixel belongs to the shape, a box's right and bottom do not.
    inner = (*box[:2], box[2] - 1, box[3] - 1)
    if shape == "circle":
        draw.ellipse(inner, fill=colour)
    elif shape in ("square", "rectangle"):
        draw.rectangle(inner, fill=colour)
    else:
        draw.polygon([(round(x), round(y)) for x, y in corners(shape, inner)], fill=colour)


def _star() -> list[tuple[float, float]]:
    """Ten corners stretched to the unit square."""
    # Outer and inner corners in turn.
    radii = [1.0, 0.42] * 5
    xs = [radius * sin(i * pi / 5) for i, radius in enumerate(radii)]
    ys = [-radius * cos(i * pi / 5) for i, radius in enumerate(radii)]
    across, down = max(xs) - min(xs), max(ys) - min(ys)
    return [((x - min(xs)) / across, (y - min(ys)) / down) for x, y in zip(xs, ys)]


_SQUARE = [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0)]
_OUTLINES: dict[str, list[tuple[float, float]]] = {
    "circle": [(0.5 + 0.5 * cos(i * pi / 12), 0.5 + 0.5 * sin(i * pi / 12)) for i in range(24)],
    "square": _SQUARE,
    "rectangle": _SQUARE,
    "triangle": [(0.5, 0.0), (1.0, 1.0), (0.0, 1.0)],
    "diamond": [(0.5, 0.0), (1.0, 0.5), (0.5, 1.0), (0.0, 0.5)],
    "star": _star(),
}


def corners(shape: str, box: Box) -> list[tuple[float, float]]:
    """The outline of `shape` in `box` as a polygon in pixels; a circle as 24 corners."""
    left, top, right, bottom = box
    return [(left + x * (right - left), top + y * (bottom - top)) for x, y in _OUTLINES[shape]]


@cache
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's built-in font at `size` pixels."""
    return ImageFont.load_default(size)


def native_size(rng: Random, min_side: int, max_side: int) -> tuple[int, int]:
    """(width, height): a longest side in the range and an aspect ratio from 1:3 to 3:1, as far as min_side
    allows."""
    # Native sizes of every aspect, as real pictures have: nothing is cropped to a square.
    long_side = rng.randint(min_side, max_side)
    short_side = max(min_side, round(long_side / 3.0 ** rng.random()))
    return (long_side, short_side) if rng.random() < 0.5 else (short_side, long_side)
