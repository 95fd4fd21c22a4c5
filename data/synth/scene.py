"""Scenes: coloured shapes on a plain ground.

caption     every object, with sizes, counts or places
questions   colour, shape, size, number, existence, relation and box of objects that are named without doubt
words       "picture 64 x 48, white background" and one line an object: "small red circle [12, 30, 24, 42]"
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

from earlyfusion.data.synth.graph import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    Box,
    Graph,
    Pair,
    Question,
    article,
    native_size,
    paint,
    pairs,
    pixels,
    shares,
    yes_no,
)

# Gaps between the sizes: small and medium cannot be confused.
SIZES = {"small": (0.17, 0.22), "medium": (0.27, 0.33), "large": (0.40, 0.50)}
"""Height of an object relative to the short side of the picture."""
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
KINDS = ("colour", "shape", "exists", "count", "relation", "size", "box")
"""Kinds of questions that training asks."""
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Thing:
    """One object of a scene."""

    colour: str
    shape: str
    size: str
    box: Box

    @property
    def pair(self) -> Pair:
        """Colour and shape: what is held out."""
        return self.colour, self.shape

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


@dataclass(frozen=True)
class Scene(Graph):
    """Objects do not overlap; they are listed left to right."""

    width: int
    height: int
    background: str
    objects: tuple[Thing, ...]

    @classmethod
    def make(
        cls, rng: Random, *, min_side: int, max_side: int, heldout: bool = False, max_objects: int = 4
    ) -> Scene:
        """A scene of training combinations only; with `heldout`, the first object is a held-out (colour,
        shape) pair."""
        width, height = native_size(rng, min_side, max_side)
        objects: list[Thing] = []
        for i in range(rng.randint(1, max_objects)):
            # One held-out pair among training ones: the others must not give it away.
            colour, shape = rng.choice(pairs(heldout and i == 0))
            for _ in range(12):  # tries to find room; an object that finds none is left out
                size = rng.choice(tuple(SIZES))
                box = _place(rng, shape, size, width, height)
                if all(_apart(box, other.box) for other in objects):
                    objects.append(Thing(colour, shape, size, box))
                    break
        # From left to right, as captions and twins tell them.
        objects.sort(key=lambda thing: thing.centre)
        return cls(width, height, rng.choice(tuple(BACKGROUNDS)), tuple(objects))

    @property
    def extent(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        return self.width, self.height

    @property
    def thought(self) -> str:
        """The names from left to right."""
        return ", ".join(thing.name for thing in sorted(self.objects, key=lambda thing: thing.box))

    def draw(self) -> Image.Image:
        """See Graph."""
        image = Image.new("RGB", self.extent, BACKGROUNDS[self.background])
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
            parts = []
            for name, number in Counter(thing.name for thing in self.objects).items():
                parts.append(article(name) if number == 1 else f"{_NUMBERS[number]} {name}s")
        elif style == 1:
            parts = [article(f"{thing.size} {thing.name}") for thing in self.objects]
        else:
            parts = [f"{article(thing.name)} at {self.corner(thing)}" for thing in self.objects]
        body = " and ".join([", ".join(parts[:-1]), parts[-1]]) if parts[1:] else parts[0]
        return f"{body} on {article(self.background)} background."

    def corner(self, thing: Thing) -> str:
        """Which ninth of the picture the centre of the object lies in."""
        x, y = thing.centre
        column = ("left", "centre", "right")[min(2, int(3 * x / self.width))]
        row = ("top", "middle", "bottom")[min(2, int(3 * y / self.height))]
        return f"the {row} {column}".replace("middle centre", "centre")

    def relative_box(self, thing: Thing) -> tuple[float, ...]:
        """The box of an object as shares of width and height, each in [0, 1]."""
        return tuple(value / side for value, side in zip(thing.box, self.extent * 2))

    def unique(self) -> list[Thing]:
        """Objects that "the red circle" names without doubt."""
        names = [thing.name for thing in self.objects]
        return [thing for thing in self.objects if names.count(thing.name) == 1]

    def having(self, **properties: str) -> list[Thing]:
        """Objects with all of the properties: `having(colour="red", shape="circle")`."""
        return [thing for thing in self.objects if properties.items() <= vars(thing).items()]

    def count(self, **properties: str) -> tuple[str, int]:
        """("how many red circles are there?", number)."""
        return f"how many {named(**properties)}s are there?", len(self.having(**properties))

    def ask(self, thing: Thing, kind: str) -> Question | None:
        """The colour, shape or size of a thing, named by what else it is; None where that leaves doubt."""
        known = {"colour": thing.colour, "shape": thing.shape}
        known.pop(kind, None)
        if len(self.having(**known)) > 1:
            return None
        return f"what {kind.replace('colour', 'color')} is the {named(**known)}?", getattr(thing, kind)

    def questions(self, rng: Random, count: int) -> list[Question]:
        """Kinds are drawn evenly, yes and no are balanced."""
        found: dict[str, str] = {}
        for _ in range(4 * count):
            # Asked again where a kind does not fit, but not for ever.
            if len(found) == count:
                break
            asked = self._question(rng.choice(KINDS), rng)
            if asked is not None:
                found.setdefault(*asked)
        return list(found.items())

    def _question(self, kind: str, rng: Random) -> Question | None:
        """One question of a kind, or None where the scene does not allow it."""
        if kind in ("colour", "shape"):
            return self.ask(rng.choice(self.objects), kind)
        if kind == "exists":
            present = {thing.pair for thing in self.objects}
            # Half of what is asked for is there; what is not is a pair training knows.
            pair = rng.choice(sorted(present) if rng.random() < 0.5 else pairs(False))
            return f"is there {article(' '.join(pair))}?", yes_no(pair in present)
        if kind == "count":
            part, every = rng.choice(((None, ()), ("shape", SHAPES), ("colour", tuple(COLOURS))))
            asked = {}
            if part:
                # Mostly a shape or colour that is there, now and then any.
                shown = [getattr(thing, part) for thing in self.objects]
                asked[part] = rng.choice([*shown, rng.choice(every)])
            question, number = self.count(**asked)
            return question, str(number)

        alone = self.unique()
        if len(alone) < (2 if kind == "relation" else 1):
            return None
        if kind == "relation":
            a, b = rng.sample(alone, 2)
            truths = relations(a, b)
            # Boxes apart both ways are called left or right.
            return ask_relation(rng, a, b, truths[0]) if truths else None
        thing = rng.choice(alone)
        if kind == "size":
            return self.ask(thing, kind)
        if rng.random() < 0.5:
            return f"where is the {thing.name}, in pixels?", pixels(thing.box)
        return f"where is the {thing.name}?", shares(self.relative_box(thing))


def named(colour: str = "", shape: str = "object") -> str:
    """ "red circle", "red object" or "circle": what is known of an object."""
    return f"{colour} {shape}".strip()


def relations(a: Thing, b: Thing) -> list[str]:
    """How a lies wholly beside b: "left of" or "right of", then "above" or "below"; none where the boxes
    share columns and rows."""
    found = []
    for axis, before, behind in ((0, "left of", "right of"), (1, "above", "below")):
        if a.box[axis + 2] <= b.box[axis]:
            found.append(before)
        elif a.box[axis] >= b.box[axis + 2]:
            found.append(behind)
    return found


def ask_relation(rng: Random, a: Thing, b: Thing, truth: str) -> Question:
    """Whether a stands to b as `truth`, or as its opposite, says."""
    asked = truth if rng.random() < 0.5 else OPPOSITE[truth]
    return f"is the {a.name} {asked} the {b.name}?", yes_no(asked == truth)


def _place(rng: Random, shape: str, size: str, width: int, height: int) -> Box:
    h = max(5, round(min(width, height) * rng.uniform(*SIZES[size])))
    # A rectangle is clearly wider than a square.
    w = min(width - 2, round(1.7 * h)) if shape == "rectangle" else h
    left, top = rng.randint(1, width - w - 1), rng.randint(1, height - h - 1)
    return left, top, left + w, top + h


def _apart(a: Box, b: Box) -> bool:
    """Whether at least two pixels lie between the boxes on some axis."""
    return a[2] + 2 <= b[0] or b[2] + 2 <= a[0] or a[3] + 2 <= b[1] or b[3] + 2 <= a[1]
