"""Questions about pictures whose answer is the output of a short Python program: crop, count, measure,
binarise, look up a colour or a value, compare.

Two subjects: a scene of coloured shapes (data/synth/scene.py), and a small array of grey values. A task is
the question, a plan in words, and the program; the answer is read off what the program really gives
(data/programs.py).
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from earlyfusion.data.loading.order import held_out
from earlyfusion.data.synth.palette import COLOURS, HELDOUT_FRACTION
from earlyfusion.data.synth.scene import Scene, Thing

FILE = "image.png"
"""Name of the picture in the directory of the tool."""
CELL = 8
"""Pixels of one cell of an array drawn as a picture."""
SIDES = range(3, 9)
BRIGHT = 160
"""Least value of a bright cell."""

_LOAD = (
    "import numpy as np\nfrom PIL import Image\na ="
    f' np.array(Image.open("{FILE}").convert("RGB")).astype(int)\n'
)
_GREY = f'import numpy as np\nfrom PIL import Image\na = np.array(Image.open("{FILE}").convert("L"))'
_BLOBS = """n = 0
while m.any():
    n += 1
    todo = [tuple(np.argwhere(m)[0])]
    while todo:
        y, x = todo.pop()
        if 0 <= y < m.shape[0] and 0 <= x < m.shape[1] and m[y, x]:
            m[y, x] = False
            todo += STEPS
n"""
_EIGHT = _BLOBS.replace("STEPS", "[(y + i, x + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]")
_FOUR = _BLOBS.replace("STEPS", "[(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]")


@dataclass(frozen=True)
class Task:
    """One question. `answer` turns the value of the program's last expression into words."""

    kind: str
    question: str
    plan: str
    code: str
    answer: Callable[[Any], str] = str
    facts: tuple[Any, ...] = ()
    """What the question is about (box, threshold, colours, ...), for checking the answer another way."""

    def answer_from(self, output: str) -> str:
        """The answer in words, from the text of the tool turn."""
        return self.answer(ast.literal_eval(output.rsplit("\n", 1)[-1]))


@dataclass(frozen=True)
class Grid:
    """An array of grey values 0..255; drawn, every value is a cell of CELL x CELL pixels."""

    values: tuple[tuple[int, ...], ...]

    @property
    def array(self) -> np.ndarray:
        """int64 [rows, columns]."""
        return np.array(self.values)


Subject: TypeAlias = Scene | Grid


@cache
def grid_sizes(heldout: bool) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of one side; training and held-out arrays never have the same."""
    sizes = [(rows, columns) for rows in SIDES for columns in SIDES]
    return tuple(s for s in sizes if held_out(f"tool/{s[0]}x{s[1]}", HELDOUT_FRACTION) == heldout)


def make_grid(rng: Random, heldout: bool) -> Grid:
    """Dark ground with bright cells, about a third of them."""
    rows, columns = rng.choice(grid_sizes(heldout))
    while True:
        values = [_level(rng) for _ in range(rows * columns)]
        if max(values) >= BRIGHT:
            return Grid(tuple(tuple(values[r * columns : (r + 1) * columns]) for r in range(rows)))


def _level(rng: Random) -> int:
    return rng.choice((rng.randrange(70), rng.randrange(70), rng.randrange(BRIGHT, 256)))


def draw(subject: Subject) -> Image.Image:
    """The picture, RGB, as it is shown to the model and stored for the tool."""
    if isinstance(subject, Scene):
        return subject.draw()
    cells = np.kron(subject.array.astype(np.uint8), np.ones((CELL, CELL), np.uint8))
    return Image.fromarray(cells).convert("RGB")


def describe(subject: Subject) -> str:
    """The subject in words, in place of its picture."""
    if isinstance(subject, Scene):
        return f"The picture {FILE}:\n{subject.words()}"
    rows, columns = subject.array.shape
    lines = "\n".join(" ".join(map(str, row)) for row in subject.values)
    return f"An array of {rows} rows and {columns} columns:\n{lines}"


def make_task(subject: Subject, rng: Random, *, stored: bool) -> Task:
    """A question about the subject. With `stored`, an array is read from the file; else its numbers are typed
    in."""
    makers: tuple[Callable[..., Task | None], ...]
    if isinstance(subject, Scene):
        makers = (_crop, _count, _measure, _binarise, _colour, _compare)
        task: Task | None = None
        while task is None:
            task = rng.choice(makers)(subject, rng)
        return task
    makers = (_grid_crop, _grid_count, _grid_measure, _grid_binarise, _grid_value, _grid_compare)
    head = f"{_GREY}[{CELL // 2}::{CELL}, {CELL // 2}::{CELL}]" if stored else _typed(subject)
    made: Task = rng.choice(makers)(subject, rng)  # type: ignore[assignment]
    where = f"Each cell of the picture is {CELL} x {CELL} pixels. " if stored else ""
    return Task(made.kind, where + made.question, made.plan, f"{head}\n{made.code}", made.answer, made.facts)


def _typed(grid: Grid) -> str:
    rows = ", ".join("[" + ", ".join(map(str, row)) + "]" for row in grid.values)
    return f"import numpy as np\na = np.array([{rows}])"


# ---- scenes


def _rgb(colour: str) -> str:
    return str(list(COLOURS[colour]))


def _single(scene: Scene) -> list[Thing]:
    """Objects that are alone in their colour."""
    colours = [thing.colour for thing in scene.objects]
    return [thing for thing in scene.objects if colours.count(thing.colour) == 1]


def _crop(scene: Scene, rng: Random) -> Task:
    left, top, right, bottom = rng.choice(scene.objects).box
    box = (left, top, right - rng.randrange(3), bottom - rng.randrange(3))
    code = (
        f"c = a[{box[1]}:{box[3]}, {box[0]}:{box[2]}]\nprint(c.shape[:2])\nint((c != a[0, 0]).any(2).sum())"
    )
    asked = f"Crop the box [{', '.join(map(str, box))}]. How many of its pixels are not background?"
    plan = "The corner pixel is background. I crop the box and count the pixels that differ from it."
    return Task("crop", asked, plan, _LOAD + code, facts=(box,))


def _count(scene: Scene, rng: Random) -> Task:
    plan = "The corner pixel is background. I mark what differs from it and count the connected parts."
    return Task("count", "How many objects are there?", plan, f"{_LOAD}m = (a != a[0, 0]).any(2)\n{_EIGHT}")


def _measure(scene: Scene, rng: Random) -> Task | None:
    named = _single(scene)
    if not named:
        return None
    thing = rng.choice(named)
    code = (
        f"y, x = np.where((a == {_rgb(thing.colour)}).all(2))\n(int(x.max() - x.min() + 1), int(y.max() -"
        " y.min() + 1))"
    )
    plan = f"{thing.colour} is {_rgb(thing.colour)}. I find its pixels and measure their extent."
    asked = f"How wide and high is the {thing.colour} object, in pixels?"
    return Task("measure", asked, plan, _LOAD + code, lambda v: f"{v[0]} x {v[1]}", (thing,))


def _binarise(scene: Scene, rng: Random) -> Task:
    level = rng.randrange(40, 201, 10)
    code = f"b = (a < {level}).astype(int)\nint(b.sum())"
    asked = f"Make it grey and binarise it: 1 where the value is below {level}. How many pixels are 1?"
    return Task(
        "binarise",
        asked,
        f"I convert to grey, compare with {level} and sum.",
        f"{_GREY}\n{code}",
        facts=(level,),
    )


def _colour(scene: Scene, rng: Random) -> Task:
    thing = rng.choice(scene.objects)
    x, y = (int(value) for value in thing.centre)
    code = f'from PIL import Image\nImage.open("{FILE}").convert("RGB").getpixel(({x}, {y}))'
    names = {rgb: name for name, rgb in COLOURS.items()}
    asked = f"What color is the pixel at x = {x}, y = {y}?"
    return Task(
        "colour", asked, "I look the pixel up and name its color.", code, lambda v: names[v], (thing, x, y)
    )


def _compare(scene: Scene, rng: Random) -> Task | None:
    named = _single(scene)
    if len(named) < 2:
        return None
    p, q = (thing.colour for thing in rng.sample(named, 2))
    code = f"p, q = [int((a == c).all(2).sum()) for c in ({_rgb(p)}, {_rgb(q)})]\nprint(p, q)\n"
    code += f'"{p}" if p > q else "{q}" if q > p else "equal"'
    plan = f"{p} is {_rgb(p)}, {q} is {_rgb(q)}. I count the pixels of both."
    return Task("compare", f"Which covers more pixels, {p} or {q}?", plan, _LOAD + code, facts=(p, q))


# ---- arrays


def _window(size: int, rng: Random) -> tuple[int, int]:
    start = rng.randrange(size - 1)
    return start, rng.randint(start + 2, size)


def _grid_crop(grid: Grid, rng: Random) -> Task:
    (top, bottom), (left, right) = (_window(size, rng) for size in grid.array.shape)
    asked = (
        f"Crop rows {top} to {bottom - 1} and columns {left} to {right - 1}, counted from 0. What is the sum?"
    )
    code = f"c = a[{top}:{bottom}, {left}:{right}]\nprint(c)\nint(c.sum())"
    return Task("crop", asked, "I slice the array and sum the slice.", code, facts=(top, bottom, left, right))


def _grid_count(grid: Grid, rng: Random) -> Task:
    level = rng.randrange(80, 160, 10)
    asked = (
        f"How many connected groups of values above {level} are there, up, down, left and right being"
        " connected?"
    )
    return Task(
        "count",
        asked,
        "I mark the values and count the connected groups.",
        f"m = a > {level}\n{_FOUR}",
        facts=(level,),
    )


def _grid_measure(grid: Grid, rng: Random) -> Task:
    level = rng.randrange(80, 160, 10)
    code = f"y, x = np.where(a > {level})\n(int(x.max() - x.min() + 1), int(y.max() - y.min() + 1))"
    asked = f"How many columns and rows does the smallest box around all values above {level} have?"
    plan = "I find the values and measure their extent."
    return Task("measure", asked, plan, code, lambda v: f"{v[0]} x {v[1]}", (level,))


def _grid_binarise(grid: Grid, rng: Random) -> Task:
    level = rng.randrange(10, 250, 10)
    code = f"b = (a > {level}).astype(int)\nprint(b)\nint(b.sum())"
    asked = f"Binarise: 1 where the value is above {level}. How many are 1?"
    return Task("binarise", asked, f"I compare with {level} and sum.", code, facts=(level,))


def _grid_value(grid: Grid, rng: Random) -> Task:
    row, column = (rng.randrange(size) for size in grid.array.shape)
    asked = f"What is the value at row {row}, column {column}, counted from 0?"
    return Task("value", asked, "I look the value up.", f"int(a[{row}, {column}])", facts=(row, column))


def _grid_compare(grid: Grid, rng: Random) -> Task:
    half = grid.array.shape[1] // 2
    code = (
        f'p, q = int(a[:, :{half}].sum()), int(a[:, -{half}:].sum())\nprint(p, q)\n"left" if p > q else'
        ' "right" if q > p else "equal"'
    )
    asked = f"Which sum is larger, that of the {half} left columns or that of the {half} right columns?"
    if half == 1:
        asked = "Which sum is larger, that of the left column or that of the right column?"
    return Task("compare", asked, "I slice both sides and sum them.", code, facts=(half,))
