"""Scenes: coloured shapes on a plain ground.

caption     every object, with sizes, counts or places
questions   colour, shape, size, number, existence, relation and box of objects that are named without doubt
words       "picture 64 x 48, white background" and one line an object: "small red circle [12, 30, 24, 42]"
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from earlyfusion.data.synth.graph import Graph, Question, article, pixels, shares
from earlyfusion.data.synth.palette import BACKGROUNDS, COLOURS, SHAPES, Box, native_size, paint, pairs

SIZES = {"small": (0.17, 0.22), "medium": (0.27, 0.33), "large": (0.40, 0.50)}
"""Height of an object relative to the short side of the picture."""
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


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

    @property
    def area(self) -> int:
        """Of the box, in pixels."""
        return (self.box[2] - self.box[0]) * (self.box[3] - self.box[1])

    # The one wording of each question about an object; who asks sees to it that the name leaves no doubt.

    def ask_colour(self) -> Question:
        """Names the object by its shape."""
        return f"what color is the {self.shape}?", self.colour

    def ask_shape(self) -> Question:
        """Names the object by its colour."""
        return f"what shape is the {self.colour} object?", self.shape

    def ask_size(self) -> Question:
        """Names the object by colour and shape."""
        return f"what size is the {self.name}?", self.size


@dataclass(frozen=True)
class Scene(Graph):
    """Objects do not overlap; they are listed left to right."""

    width: int
    height: int
    background: str
    objects: tuple[Thing, ...]

    @classmethod
    def make(
        cls,
        rng: Random,
        *,
        min_side: int,
        max_side: int,
        heldout: bool = False,
        max_objects: int = 4,
        **own: Any,
    ) -> Scene:
        """A scene of training combinations only; with `heldout`, the first object is a held-out (colour,
        shape) pair."""
        width, height = native_size(rng, min_side, max_side)
        objects: list[Thing] = []
        for i in range(rng.randint(1, max_objects)):
            colour, shape = rng.choice(pairs(heldout and i == 0))
            for _ in range(12):  # tries to find room; an object that finds none is left out
                size = rng.choice(tuple(SIZES))
                box = _place(rng, shape, size, width, height)
                if all(_apart(box, other.box) for other in objects):
                    objects.append(Thing(colour, shape, size, box))
                    break
        objects.sort(key=lambda thing: thing.centre)
        return cls(width, height, rng.choice(tuple(BACKGROUNDS)), tuple(objects))

    def draw(self) -> Image.Image:
        """See Graph."""
        image = Image.new("RGB", (self.width, self.height), BACKGROUNDS[self.background])
        draw = ImageDraw.Draw(image)
        for thing in self.objects:
            paint(draw, thing.shape, thing.box, COLOURS[thing.colour])
        return image

    def words(self) -> str:
        """See Graph."""
        return self.listed([f"{thing.size} {thing.name} {pixels(thing.box)}" for thing in self.objects])

    def listed(self, lines: list[str]) -> str:
        """The picture's size and ground, then `lines`, one an object."""
        return "\n".join([f"picture {self.width} x {self.height}, {self.background} background", *lines])

    def caption(self, rng: Random) -> str:
        """One sentence that names every object, with sizes, counts or places."""
        style = rng.randrange(3)
        if style == 0:
            counts = Counter(thing.name for thing in self.objects)
            body = join([counted(number, name) for name, number in counts.items()])
        elif style == 1:
            body = join([article(f"{thing.size} {thing.name}") for thing in self.objects])
        else:
            body = join([f"{article(thing.name)} at {self.corner(thing)}" for thing in self.objects])
        return f"{body} on {article(self.background)} background."

    def corner(self, thing: Thing) -> str:
        """Which ninth of the picture the centre of the object lies in."""
        x, y = thing.centre
        column = ("left", "centre", "right")[min(2, int(3 * x / self.width))]
        row = ("top", "middle", "bottom")[min(2, int(3 * y / self.height))]
        return "the centre" if (row, column) == ("middle", "centre") else f"the {row} {column}"

    def relative_box(self, thing: Thing) -> tuple[float, float, float, float]:
        """The box of an object as shares of width and height, each in [0, 1]."""
        left, top, right, bottom = thing.box
        return left / self.width, top / self.height, right / self.width, bottom / self.height

    def unique(self) -> list[Thing]:
        """Objects that "the red circle" names without doubt."""
        names = [thing.name for thing in self.objects]
        return [thing for thing in self.objects if names.count(thing.name) == 1]

    def having(self, **properties: str) -> list[Thing]:
        """Objects with all of the properties: `having(colour="red", shape="circle")`."""
        wanted = properties.items()
        return [thing for thing in self.objects if all(getattr(thing, k) == v for k, v in wanted)]

    def count(self, **properties: str) -> tuple[str, int]:
        """("how many red circles are there?", number)."""
        colour, shape = properties.get("colour", ""), properties.get("shape")
        name = f"{colour} {shape}s" if shape else f"{colour} objects"
        return f"how many {name.strip()} are there?", len(self.having(**properties))

    def questions(self, rng: Random, count: int) -> list[Question]:
        """Kinds are drawn evenly, yes and no are balanced."""
        kinds = [_colour, _shape, _exists, _count, _relation, _size, _box]
        found: dict[str, str] = {}
        for _ in range(4 * count):
            if len(found) == count:
                break
            asked = rng.choice(kinds)(self, rng)
            if asked is not None:
                found.setdefault(*asked)
        return list(found.items())


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


def ask_relation(rng: Random, a: Thing, b: Thing, truth: str) -> Question:
    """Whether a stands to b as `truth`, or as its opposite, says."""
    asked = truth if rng.random() < 0.5 else OPPOSITE[truth]
    return f"is the {a.name} {asked} the {b.name}?", "yes" if asked == truth else "no"


def join(parts: list[str]) -> str:
    """ "x", "x and y", "x, y and z"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def counted(number: int, name: str) -> str:
    """ "a red circle" or "three red circles"."""
    return article(name) if number == 1 else f"{_NUMBERS[number]} {name}s"


def _place(rng: Random, shape: str, size: str, width: int, height: int) -> Box:
    low, high = SIZES[size]
    h = max(5, round(min(width, height) * rng.uniform(low, high)))
    w = min(width - 2, round(1.7 * h)) if shape == "rectangle" else h
    left, top = rng.randint(1, width - w - 1), rng.randint(1, height - h - 1)
    return left, top, left + w, top + h


def _apart(a: Box, b: Box) -> bool:
    """Whether at least two pixels lie between the boxes on some axis."""
    return a[2] + 2 <= b[0] or b[2] + 2 <= a[0] or a[3] + 2 <= b[1] or b[3] + 2 <= a[1]


# Kinds of questions as training draws them: a question, or None where the scene does not allow it.


def _colour(scene: Scene, rng: Random) -> Question | None:
    thing = rng.choice(scene.objects)
    return thing.ask_colour() if len(scene.having(shape=thing.shape)) == 1 else None


def _shape(scene: Scene, rng: Random) -> Question | None:
    thing = rng.choice(scene.objects)
    return thing.ask_shape() if len(scene.having(colour=thing.colour)) == 1 else None


def _exists(scene: Scene, rng: Random) -> Question | None:
    present = {(thing.colour, thing.shape) for thing in scene.objects}
    pair = rng.choice(sorted(present) if rng.random() < 0.5 else pairs(False))
    return f"is there {article(' '.join(pair))}?", "yes" if pair in present else "no"


def _count(scene: Scene, rng: Random) -> Question | None:
    style = rng.randrange(3)
    if style == 0:
        question, number = scene.count()
    elif style == 1:  # mostly a shape that is there, now and then any
        shapes = [thing.shape for thing in scene.objects]
        question, number = scene.count(shape=rng.choice([*shapes, rng.choice(SHAPES)]))
    else:
        colours = [thing.colour for thing in scene.objects]
        question, number = scene.count(colour=rng.choice([*colours, rng.choice(tuple(COLOURS))]))
    return question, str(number)


def _relation(scene: Scene, rng: Random) -> Question | None:
    named = scene.unique()
    if len(named) < 2:
        return None
    a, b = rng.sample(named, 2)
    truth = relation(a, b)
    return None if truth is None else ask_relation(rng, a, b, truth)


def _size(scene: Scene, rng: Random) -> Question | None:
    named = scene.unique()
    return rng.choice(named).ask_size() if named else None


def _box(scene: Scene, rng: Random) -> Question | None:
    named = scene.unique()
    if not named:
        return None
    thing = rng.choice(named)
    if rng.random() < 0.5:
        return f"where is the {thing.name}, in pixels?", pixels(thing.box)
    return f"where is the {thing.name}?", shares(scene.relative_box(thing))
