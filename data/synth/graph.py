"""What all generated pictures share: an exact graph is made first, and everything else is read off it.

    graph = Scene.make(Random(seed), min_side=40, max_side=96, heldout=False)
    graph.media()                the picture, or the clip with its times
    graph.words()                its text twin: everything a question may ask for, in words
    graph.caption(rng)           one sentence or table that tells what there is
    graph.questions(rng, 3)      up to three (question, answer), no text twice

Training samples (data/sources/embedded.py), verifiable problems and benchmarks (data/tasks) all ask these
graphs, so that a question has one wording. Combinations on the held-out side (colour with shape, words,
values of a chart, first rows of a board) are never drawn for training.

Here are scenes of coloured shapes on a plain ground, and short clips in which one of one or two shapes moves
straight ahead at constant speed; charts, boards and signs are in data/synth/panels.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import cos, pi, sin
from random import Random

from PIL import Image as PILImage
from PIL import ImageDraw, ImageFont

from earlyfusion.data.loading.order import held_out
from earlyfusion.data.sample import Image, Video

# Answers are text in every family: a benchmark compares words.
Question = tuple[str, str]
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

    def draw(self) -> PILImage.Image:
        """See Graph."""
        image = PILImage.new("RGB", self.extent, BACKGROUNDS[self.background])
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


DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}


@dataclass(frozen=True)
class Clip(Graph):
    """`scenes[frame]` holds the standing object, if any, then the moving one where it is."""

    scenes: tuple[Scene, ...]
    direction: str
    timestamps: tuple[float, ...]
    """Seconds from the start."""

    @property
    def moving(self) -> Thing:
        """The one that moves, where it begins."""
        return self.scenes[0].objects[-1]

    @property
    def standing(self) -> tuple[Thing, ...]:
        """The other one, if any."""
        return self.scenes[0].objects[:-1]

    @classmethod
    def make(
        cls,
        rng: Random,
        *,
        min_side: int,
        max_side: int,
        heldout: bool = False,
        frames: int = 6,
        fps: float = 2.0,
    ) -> Clip:
        """A clip of `frames` frames, 1 / fps seconds apart; the moving (colour, shape) pair is of one side
        only."""
        width, height = native_size(rng, min_side, max_side)
        colour, shape = rng.choice(pairs(heldout))

        # Which way, and how far in one frame: the whole way stays inside the picture.
        direction = rng.choice(tuple(DIRECTIONS))
        dx, dy = DIRECTIONS[direction]
        h = max(6, round(min(width, height) * rng.uniform(0.2, 0.3)))
        w = min(width - frames, round(1.5 * h)) if shape == "rectangle" else h
        room, side = (width - w, height - h) if dx else (height - h, width - w)
        # At least a pixel a frame, at most the whole room in all frames.
        step = max(1, rng.randint(room // (2 * frames), room // frames))
        start = rng.randint(0, room - step * (frames - 1))
        along = [start + step * i for i in range(frames)]
        if dx + dy < 0:
            along.reverse()
        # It moves along one axis and stays where it is on the other.
        across = rng.randint(0, side)

        boxes = []
        for a in along:
            x, y = (a, across) if dx else (across, a)
            boxes.append((x, y, x + w, y + h))
        # Now and then a second object, which does not move.
        standing = _standing(rng, boxes, width, height) if rng.random() < 0.5 else ()
        empty = Scene(width, height, rng.choice(tuple(BACKGROUNDS)), ())
        scenes = [replace(empty, objects=(*standing, Thing(colour, shape, "", box))) for box in boxes]
        return cls(tuple(scenes), direction, tuple(i / fps for i in range(frames)))

    def frames(self) -> list[PILImage.Image]:
        """One RGB picture for each frame, all of one size."""
        return [scene.draw() for scene in self.scenes]

    def draw(self) -> PILImage.Image:
        """See Graph."""
        return self.scenes[0].draw()

    def media(self) -> Video:
        """All frames with their times."""
        return Video(self.frames(), self.timestamps)

    def words(self) -> str:
        """See Graph."""
        first = self.scenes[0]
        lines = [f"clip {first.width} x {first.height}, {first.background} background"]
        for time, scene in zip(self.timestamps, self.scenes):
            # The moving one first, as it is asked about.
            things = [f"{thing.name} {pixels(thing.box)}" for thing in reversed(scene.objects)]
            lines.append(f"{time:.1f} s: {'; '.join(things)}")
        return "\n".join(lines)

    def caption(self, rng: Random) -> str:
        """What moves where, and what does not."""
        told = [f"{article(self.moving.name)} moves {self.direction}."]
        return " ".join(told + [f"{article(thing.name)} stands still." for thing in self.standing])

    def questions(self, rng: Random, count: int) -> list[Question]:
        """About what moves, where to, how far and for how long."""
        (x0, y0, *_), (x1, y1, *_) = self.moving.box, self.scenes[-1].objects[-1].box
        asked = [
            ("which way does it move?", self.direction),
            ("what moves?", f"the {self.moving.name}"),
            ("how many objects are there?", str(len(self.scenes[0].objects))),
            ("how far does it move, in pixels?", str(abs(x1 - x0) + abs(y1 - y0))),
            ("when does the last frame come?", f"{self.timestamps[-1]:.1f} s"),
        ]
        rng.shuffle(asked)
        return asked[:count]


def _standing(rng: Random, boxes: list[Box], width: int, height: int) -> tuple[Thing, ...]:
    """A second object outside the path of the first, where there is room."""
    left, top, right, bottom = (pick(edge) for pick, edge in zip((min, min, max, max), zip(*boxes)))
    side = max(6, min(width, height) // 5)
    for _ in range(8):
        x, y = rng.randint(0, width - side), rng.randint(0, height - side)
        if x + side <= left or x >= right or y + side <= top or y >= bottom:
            # Of training pairs always, and no wide shape: it fits where there is room.
            colour, shape = rng.choice([pair for pair in pairs(False) if pair[1] != "rectangle"])
            return (Thing(colour, shape, "", (x, y, x + side, y + side)),)
    return ()
