"""Scenes: coloured shapes on a plain ground, with the exact graph of what is where, and the picture of it.

The graph is made first and holds everything; the picture, the caption, the questions and the text twin are
read off it.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from earlyfusion.data.synth.palette import BACKGROUNDS, COLOURS, Box, native_size, paint, pairs

SIZES = {"small": (0.17, 0.22), "medium": (0.27, 0.33), "large": (0.40, 0.50)}
"""Height of an object relative to the short side of the picture."""


@dataclass(frozen=True)
class Thing:
    """One object of a scene."""

    colour: str
    shape: str
    size: str
    box: Box

    @property
    def name(self) -> str:
        """ "red circle"."""
        return f"{self.colour} {self.shape}"

    @property
    def centre(self) -> tuple[float, float]:
        """(x, y) in pixels."""
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2


@dataclass(frozen=True)
class Scene:
    """Everything there is to know about one picture. Objects do not overlap; they are listed left to
    right."""

    width: int
    height: int
    background: str
    objects: tuple[Thing, ...]

    def relative_box(self, thing: Thing) -> tuple[float, float, float, float]:
        """The box of an object as shares of width and height, each in [0, 1]."""
        left, top, right, bottom = thing.box
        return left / self.width, top / self.height, right / self.width, bottom / self.height

    def unique(self) -> list[Thing]:
        """Objects that "the red circle" names without doubt."""
        names = [thing.name for thing in self.objects]
        return [thing for thing in self.objects if names.count(thing.name) == 1]

    def graph(self) -> dict[str, Any]:
        """The scene as JSON types, boxes absolute and relative, relations by index."""
        objects = [
            {
                "colour": thing.colour,
                "shape": thing.shape,
                "size": thing.size,
                "box": list(thing.box),
                "relative_box": [round(x, 4) for x in self.relative_box(thing)],
            }
            for thing in self.objects
        ]
        relations = [
            [i, relation(a, b), j]
            for i, a in enumerate(self.objects)
            for j, b in enumerate(self.objects)
            if i != j and relation(a, b) is not None
        ]
        size = {"width": self.width, "height": self.height, "background": self.background}
        return {**size, "objects": objects, "relations": relations}


def relation(a: Thing, b: Thing) -> str | None:
    """ "left of", "right of", "above" or "below" when a lies wholly on that side of b; None when the boxes
    share both."""
    if a.box[2] <= b.box[0]:
        return "left of"
    if a.box[0] >= b.box[2]:
        return "right of"
    if a.box[3] <= b.box[1]:
        return "above"
    if a.box[1] >= b.box[3]:
        return "below"
    return None


def make_scene(
    rng: Random, *, min_side: int, max_side: int, max_objects: int, heldout: bool = False
) -> Scene:
    """A scene of training combinations only; with `heldout`, the first object is a held-out (colour, shape)
    pair."""
    width, height = native_size(rng, min_side, max_side)
    objects: list[Thing] = []
    for i in range(rng.randint(1, max_objects)):
        colour, shape = rng.choice(pairs(heldout and i == 0))
        for _ in range(12):
            size = rng.choice(tuple(SIZES))
            box = _place(rng, shape, size, width, height)
            if all(_apart(box, other.box) for other in objects):
                objects.append(Thing(colour, shape, size, box))
                break
    objects.sort(key=lambda thing: thing.centre)
    return Scene(width, height, rng.choice(tuple(BACKGROUNDS)), tuple(objects))


def _place(rng: Random, shape: str, size: str, width: int, height: int) -> Box:
    low, high = SIZES[size]
    h = max(5, round(min(width, height) * rng.uniform(low, high)))
    w = min(width - 2, round(1.7 * h)) if shape == "rectangle" else h
    left, top = rng.randint(1, width - w - 1), rng.randint(1, height - h - 1)
    return left, top, left + w, top + h


def _apart(a: Box, b: Box) -> bool:
    """Whether at least two pixels lie between the boxes on some axis."""
    return a[2] + 2 <= b[0] or b[2] + 2 <= a[0] or a[3] + 2 <= b[1] or b[3] + 2 <= a[1]


def draw_scene(scene: Scene) -> Image.Image:
    """The picture, RGB, of the scene's own size."""
    image = Image.new("RGB", (scene.width, scene.height), BACKGROUNDS[scene.background])
    draw = ImageDraw.Draw(image)
    for thing in scene.objects:
        paint(draw, thing.shape, thing.box, COLOURS[thing.colour])
    return image
