"""Questions about pictures whose answer is the output of a short Python program: crop, count, measure,
binarise, look up a colour or a value, compare.

Two subjects: a scene of coloured shapes (data/synth/scene.py), and a small array of grey values. A task is
the question, a plan in words, and the program; the answer is read off what the program really gives
(data/programs.py).
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from random import Random
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from earlyfusion.data.synth.palette import COLOURS, on_side
from earlyfusion.data.synth.scene import Scene

FILE = "image.png"
"""Name of the picture in the directory of the tool."""
CELL = 8
"""Pixels of one cell of an array drawn as a picture."""
SIDES = range(3, 9)
BRIGHT = 160
"""Least value of a bright cell."""
SCENE_KINDS = ("crop", "count", "measure", "binarise", "colour", "compare")
GRID_KINDS = ("crop", "count", "measure", "binarise", "value", "compare")

_IMPORTS = "import numpy as np\nfrom PIL import Image\n"
_LOAD = f'{_IMPORTS}a = np.array(Image.open("{FILE}").convert("RGB")).astype(int)\n'
_GREY = f'{_IMPORTS}a = np.array(Image.open("{FILE}").convert("L"))'
_EXTENT = "(int(x.max() - x.min() + 1), int(y.max() - y.min() + 1))"
# A flood fill written out: numpy has none.
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

    def draw(self) -> Image.Image:
        """The picture, RGB."""
        cells = np.kron(self.array.astype(np.uint8), np.ones((CELL, CELL), np.uint8))
        return Image.fromarray(cells).convert("RGB")

    def words(self) -> str:
        """Its numbers, one line a row."""
        rows, columns = self.array.shape
        lines = "\n".join(" ".join(map(str, row)) for row in self.values)
        return f"An array of {rows} rows and {columns} columns:\n{lines}"


Subject: TypeAlias = Scene | Grid


@cache
def grid_sizes(heldout: bool) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of one side; training and held-out arrays never have the same."""
    return tuple(size for size in product(SIDES, SIDES) if on_side(f"tool/{size[0]}x{size[1]}", heldout))


def make_grid(rng: Random, heldout: bool) -> Grid:
    """Dark ground with bright cells, about a third of them."""
    rows, columns = rng.choice(grid_sizes(heldout))
    while True:
        values = []
        for _ in range(rows * columns):
            # Dark or bright, nothing between: a threshold has a clear answer.
            values.append(rng.choice((rng.randrange(70), rng.randrange(70), rng.randrange(BRIGHT, 256))))
        if max(values) >= BRIGHT:
            return Grid(tuple(tuple(values[r * columns : (r + 1) * columns]) for r in range(rows)))


def make_task(subject: Subject, rng: Random, *, stored: bool) -> Task:
    """A question about the subject. With `stored`, an array is read from the file; else its numbers are typed
    in."""
    if isinstance(subject, Scene):
        task = None
        # Another kind where this scene has nothing of it.
        while task is None:
            task = scene_task(subject, rng.choice(SCENE_KINDS), rng)
        return task

    task = grid_task(subject, rng.choice(GRID_KINDS), rng)
    where, head = "", f"import numpy as np\na = np.array({[list(row) for row in subject.values]})"
    if stored:
        where, head = f"Each cell of the picture is {CELL} x {CELL} pixels. ", _GREY
        head += f"[{CELL // 2}::{CELL}, {CELL // 2}::{CELL}]"  # the middle of every cell
    return replace(task, question=where + task.question, code=f"{head}\n{task.code}")


def _size(value: tuple[int, int]) -> str:
    return f"{value[0]} x {value[1]}"


def _colour_name(value: tuple[int, int, int]) -> str:
    return next(name for name, rgb in COLOURS.items() if rgb == value)


def scene_task(scene: Scene, kind: str, rng: Random) -> Task | None:
    """A question about coloured shapes; None where the scene has nothing to ask about."""
    if kind == "count":
        plan = "The corner pixel is background. I mark what differs from it and count the connected parts."
        code = f"{_LOAD}m = (a != a[0, 0]).any(2)\n{_EIGHT}"
        return Task(kind, "How many objects are there?", plan, code)
    if kind == "binarise":
        level = rng.randrange(40, 201, 10)
        asked = f"Make it grey and binarise it: 1 where the value is below {level}. How many pixels are 1?"
        code = f"{_GREY}\nb = (a < {level}).astype(int)\nint(b.sum())"
        return Task(kind, asked, f"I convert to grey, compare with {level} and sum.", code, facts=(level,))
    if kind == "crop":
        # Up to two pixels short, so that the answer is not the area of the object.
        left, top, right, bottom = rng.choice(scene.objects).box
        right, bottom = right - rng.randrange(3), bottom - rng.randrange(3)
        asked = f"Crop the box [{left}, {top}, {right}, {bottom}]. How many of its pixels are not background?"
        plan = "The corner pixel is background. I crop the box and count the pixels that differ from it."
        code = f"c = a[{top}:{bottom}, {left}:{right}]\nprint(c.shape[:2])\nint((c != a[0, 0]).any(2).sum())"
        return Task(kind, asked, plan, _LOAD + code, facts=((left, top, right, bottom),))
    if kind == "colour":
        thing = rng.choice(scene.objects)
        x, y = map(int, thing.centre)
        code = f'from PIL import Image\nImage.open("{FILE}").convert("RGB").getpixel(({x}, {y}))'
        asked = f"What color is the pixel at x = {x}, y = {y}?"
        return Task(kind, asked, "I look the pixel up and name its color.", code, _colour_name, (thing,))

    # What is named by its colour must be alone in it.
    colours = [thing.colour for thing in scene.objects]
    named = [thing for thing in scene.objects if colours.count(thing.colour) == 1]
    if kind == "measure" and named:
        thing = rng.choice(named)
        rgb = list(COLOURS[thing.colour])
        code = f"y, x = np.where((a == {rgb}).all(2))\n{_EXTENT}"
        plan = f"{thing.colour} is {rgb}. I find its pixels and measure their extent."
        asked = f"How wide and high is the {thing.colour} object, in pixels?"
        return Task(kind, asked, plan, _LOAD + code, _size, (thing,))
    if kind == "compare" and len(named) > 1:
        p, q = (thing.colour for thing in rng.sample(named, 2))
        first, second = list(COLOURS[p]), list(COLOURS[q])
        code = f"p, q = [int((a == c).all(2).sum()) for c in ({first}, {second})]\nprint(p, q)\n"
        code += f'"{p}" if p > q else "{q}" if q > p else "equal"'
        plan = f"{p} is {first}, {q} is {second}. I count the pixels of both."
        return Task(kind, f"Which covers more pixels, {p} or {q}?", plan, _LOAD + code, facts=(p, q))
    return None


def grid_task(grid: Grid, kind: str, rng: Random) -> Task:
    """A question about an array; its program goes on from `a`."""
    rows, columns = grid.array.shape
    if kind == "crop":
        (top, bottom), (left, right) = _window(rows, rng), _window(columns, rng)
        asked = f"Crop rows {top} to {bottom - 1} and columns {left} to {right - 1}, counted from 0."
        code = f"c = a[{top}:{bottom}, {left}:{right}]\nprint(c)\nint(c.sum())"
        asked, plan = f"{asked} What is the sum?", "I slice the array and sum the slice."
        return Task(kind, asked, plan, code, facts=(top, bottom, left, right))
    if kind == "value":
        row, column = rng.randrange(rows), rng.randrange(columns)
        asked = f"What is the value at row {row}, column {column}, counted from 0?"
        return Task(kind, asked, "I look the value up.", f"int(a[{row}, {column}])", facts=(row, column))
    if kind == "compare":
        # With an odd number of columns the middle one counts for neither.
        half = columns // 2
        asked = f"Which sum is larger, that of the {half} left columns or that of the {half} right columns?"
        if half == 1:
            asked = asked.replace("1 ", "").replace("columns", "column")
        code = f"p, q = int(a[:, :{half}].sum()), int(a[:, -{half}:].sum())\nprint(p, q)\n"
        code += '"left" if p > q else "right" if q > p else "equal"'
        return Task(kind, asked, "I slice both sides and sum them.", code, facts=(half,))

    level = rng.randrange(10, 250, 10) if kind == "binarise" else rng.randrange(80, 160, 10)
    if kind == "binarise":
        asked = f"Binarise: 1 where the value is above {level}. How many are 1?"
        code = f"b = (a > {level}).astype(int)\nprint(b)\nint(b.sum())"
        return Task(kind, asked, f"I compare with {level} and sum.", code, facts=(level,))
    if kind == "count":
        asked = f"How many connected groups of values above {level} are there, "
        asked += "up, down, left and right being connected?"
        plan = "I mark the values and count the connected groups."
        return Task(kind, asked, plan, f"m = a > {level}\n{_FOUR}", facts=(level,))
    asked = f"How many columns and rows does the smallest box around all values above {level} have?"
    plan = "I find the values and measure their extent."
    return Task(kind, asked, plan, f"y, x = np.where(a > {level})\n{_EXTENT}", _size, (level,))


def _window(size: int, rng: Random) -> tuple[int, int]:
    start = rng.randrange(size - 1)
    # Two at least: a slice of one cell is the look-up.
    return start, rng.randint(start + 2, size)
