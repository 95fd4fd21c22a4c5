"""Questions about pictures whose answer is the output of a short Python program: crop, count, measure,
binarise, look up a colour or a value, compare.

Two subjects: a scene of coloured shapes (data/synth/graph.py), and a small array of grey values. A task is
the question, a plan in words, and the program; the answer is read off what the program really gives
(data/programs.py).
"""

import ast
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from random import Random

import numpy as np
from PIL import Image

from earlyfusion.data.synth.graph import COLOURS, Scene, on_side
from earlyfusion.kernels.files import Record

FILE = "image.png"
"""Name of the picture in the directory of the tool."""
SYSTEM = f"Answer with the tool python(code). The picture is the file {FILE}."
"""The system message of conversations about a stored picture."""
CELL = 8
"""Pixels of one cell of an array drawn as a picture."""
SIDES = range(3, 9)
BRIGHT = 160
"""Least value of a bright cell."""

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

# Question, plan and program of every kind; the facts of a task fill the braces.
SCENE_KINDS = {
    "crop": (
        "Crop the box {box}. How many of its pixels are not background?",
        "The corner pixel is background. I crop the box and count the pixels that differ from it.",
        _LOAD + "c = a[{box[1]}:{box[3]}, {box[0]}:{box[2]}]\nprint(c.shape[:2])\n"
        "int((c != a[0, 0]).any(2).sum())",
    ),
    "count": (
        "How many objects are there?",
        "The corner pixel is background. I mark what differs from it and count the connected parts.",
        f"{_LOAD}m = (a != a[0, 0]).any(2)\n{_EIGHT}",
    ),
    "measure": (
        "How wide and high is the {colour} object, in pixels?",
        "{colour} is {rgb}. I find its pixels and measure their extent.",
        _LOAD + "y, x = np.where((a == {rgb}).all(2))\n" + _EXTENT,
    ),
    "binarise": (
        "Make it grey and binarise it: 1 where the value is below {level}. How many pixels are 1?",
        "I convert to grey, compare with {level} and sum.",
        _GREY + "\nb = (a < {level}).astype(int)\nint(b.sum())",
    ),
    "colour": (
        "What color is the pixel at x = {x}, y = {y}?",
        "I look the pixel up and name its color.",
        f'from PIL import Image\nImage.open("{FILE}").convert("RGB")' + ".getpixel(({x}, {y}))",
    ),
    "compare": (
        "Which covers more pixels, {names[0]} or {names[1]}?",
        "{names[0]} is {rgb[0]}, {names[1]} is {rgb[1]}. I count the pixels of both.",
        _LOAD + "p, q = [int((a == c).all(2).sum()) for c in ({rgb[0]}, {rgb[1]})]\nprint(p, q)\n"
        '"{names[0]}" if p > q else "{names[1]}" if q > p else "equal"',
    ),
}
GRID_KINDS = {
    "crop": (
        "Crop rows {top} to {last[0]} and columns {left} to {last[1]}, counted from 0. What is the sum?",
        "I slice the array and sum the slice.",
        "c = a[{top}:{bottom}, {left}:{right}]\nprint(c)\nint(c.sum())",
    ),
    "count": (
        "How many connected groups of values above {level} are there, up, down, left and right being"
        " connected?",
        "I mark the values and count the connected groups.",
        "m = a > {level}\n" + _FOUR,
    ),
    "measure": (
        "How many columns and rows does the smallest box around all values above {level} have?",
        "I find the values and measure their extent.",
        "y, x = np.where(a > {level})\n" + _EXTENT,
    ),
    "binarise": (
        "Binarise: 1 where the value is above {level}. How many are 1?",
        "I compare with {level} and sum.",
        "b = (a > {level}).astype(int)\nprint(b)\nint(b.sum())",
    ),
    "value": (
        "What is the value at row {row}, column {column}, counted from 0?",
        "I look the value up.",
        "int(a[{row}, {column}])",
    ),
    "compare": (
        "Which sum is larger, that of the {sides[0]} or that of the {sides[1]}?",
        "I slice both sides and sum them.",
        "p, q = int(a[:, :{half}].sum()), int(a[:, -{half}:].sum())\nprint(p, q)\n"
        '"left" if p > q else "right" if q > p else "equal"',
    ),
}


@dataclass(frozen=True)
class Task:
    """One question with its program, and the text of the tool turn once the program has run.

    facts: what the question is about (box, threshold, colours, ...).
    """

    kind: str
    question: str
    plan: str
    code: str
    facts: Record
    output: str = ""

    @property
    def answer(self) -> str:
        """In words, from the value of the program's last expression."""
        value = ast.literal_eval(self.output.rsplit("\n", 1)[-1])
        if self.kind == "measure":
            return f"{value[0]} x {value[1]}"
        if self.kind == "colour":
            return next(name for name, rgb in COLOURS.items() if rgb == value)
        return str(value)


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


Subject = Scene | Grid


@cache
def grid_sizes(heldout: bool) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of one side; training and held-out arrays never have the same."""
    return tuple(size for size in product(SIDES, SIDES) if on_side(f"tool/{size[0]}x{size[1]}", heldout))


def make_grid(rng: Random, heldout: bool) -> Grid:
    """Dark ground with bright cells, about a third of them."""
    rows, columns = rng.choice(grid_sizes(heldout))
    values = [0]
    while max(values) < BRIGHT:
        values = []
        for _ in range(rows * columns):
            # Dark or bright, nothing between: a threshold has a clear answer.
            values.append(rng.choice((rng.randrange(70), rng.randrange(70), rng.randrange(BRIGHT, 256))))
    return Grid(tuple(tuple(values[r * columns : (r + 1) * columns]) for r in range(rows)))


def make_task(subject: Subject, rng: Random, *, stored: bool) -> Task:
    """A question about the subject. With `stored`, an array is read from the file; else its numbers are typed
    in."""
    facts = None
    if isinstance(subject, Scene):
        # Another kind where this scene has nothing of it.
        while facts is None:
            kind = rng.choice(tuple(SCENE_KINDS))
            facts = scene_facts(subject, kind, rng)
        return filled(SCENE_KINDS, kind, facts)

    kind = rng.choice(tuple(GRID_KINDS))
    task = filled(GRID_KINDS, kind, grid_facts(subject, kind, rng))
    where, head = "", f"import numpy as np\na = np.array({list(map(list, subject.values))})"
    if stored:
        where, head = f"Each cell of the picture is {CELL} x {CELL} pixels. ", _GREY
        head += f"[{CELL // 2}::{CELL}, {CELL // 2}::{CELL}]"  # the middle of every cell
    return replace(task, question=where + task.question, code=f"{head}\n{task.code}")


def filled(kinds: dict[str, tuple[str, str, str]], kind: str, facts: Record) -> Task:
    """The task of a kind with its facts in question, plan and program."""
    question, plan, code = (text.format(**facts) for text in kinds[kind])
    return Task(kind, question, plan, code, facts)


def scene_facts(scene: Scene, kind: str, rng: Random) -> Record | None:
    """What a question about coloured shapes is about; None where the scene has nothing to ask about."""
    if kind == "count":
        return {}
    if kind == "binarise":
        return {"level": rng.randrange(40, 201, 10)}
    if kind == "crop":
        # Up to two pixels short, so that the answer is not the area of the object.
        left, top, right, bottom = rng.choice(scene.objects).box
        return {"box": [left, top, right - rng.randrange(3), bottom - rng.randrange(3)]}
    if kind == "colour":
        x, y = map(int, rng.choice(scene.objects).centre)
        return {"x": x, "y": y}

    # What is named by its colour must be alone in it.
    colours = [thing.colour for thing in scene.objects]
    alone = [colour for colour in colours if colours.count(colour) == 1]
    if kind == "measure" and alone:
        colour = rng.choice(alone)
        return {"colour": colour, "rgb": list(COLOURS[colour])}
    if kind == "compare" and len(alone) > 1:
        names = rng.sample(alone, 2)
        return {"names": names, "rgb": [list(COLOURS[name]) for name in names]}
    return None


def grid_facts(grid: Grid, kind: str, rng: Random) -> Record:
    """What a question about an array is about; its program goes on from `a`."""
    rows, columns = grid.array.shape
    if kind == "crop":
        (top, bottom), (left, right) = _window(rows, rng), _window(columns, rng)
        last = bottom - 1, right - 1
        return {"top": top, "bottom": bottom, "left": left, "right": right, "last": last}
    if kind == "value":
        return {"row": rng.randrange(rows), "column": rng.randrange(columns)}
    if kind == "compare":
        # With an odd number of columns the middle one counts for neither.
        half = columns // 2
        sides = ["left column", "right column"]
        if half > 1:
            sides = [f"{half} {side}s" for side in sides]
        return {"half": half, "sides": sides}
    return {"level": rng.randrange(10, 250, 10) if kind == "binarise" else rng.randrange(80, 160, 10)}


def _window(size: int, rng: Random) -> tuple[int, int]:
    start = rng.randrange(size - 1)
    # Two at least: a slice of one cell is the look-up.
    return start, rng.randint(start + 2, size)
