"""Mazes: cells with walls, a start and a goal; the answer is a way as moves. Held out: walls, whatever the
start.

A maze and its seven mirrored and turned forms are one combination, so no test maze is a turned training maze.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import product
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from earlyfusion.data.synth.palette import COLOURS
from earlyfusion.data.tasks.problem import Drawn, Problem, Task, task
from earlyfusion.data.tasks.scoring import rewards

Cell = tuple[int, int]
"""(row, column) from 0."""
Door = tuple[Cell, Cell]
"""Two neighbours without a wall between them, the smaller first."""
MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
LETTERS = {name[0].upper(): name for name in MOVES}
_WORDS = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE)
_RUN = re.compile(r"(?<![A-Za-z])[UDLR](?:[ ,;>-]{0,3}[UDLR])*(?![A-Za-z])")
LONGEST = 4
"""A way of more than this many moves for every cell earns nothing."""


def step(cell: Cell, move: str) -> Cell:
    """The cell one move further."""
    return cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]


def door(a: Cell, b: Cell) -> Door:
    """The door between two neighbours."""
    return (a, b) if a < b else (b, a)


def neighbours(cell: Cell, rows: int, columns: int) -> list[Cell]:
    """Cells that share a side, inside the maze."""
    around = [step(cell, move) for move in MOVES]
    return [(r, c) for r, c in around if 0 <= r < rows and 0 <= c < columns]


def carve(rng: Random, rows: int, columns: int, extra: float) -> frozenset[Door]:
    """Doors of a maze in which every cell can be reached; `extra` is the share of the other walls that is
    opened."""
    # A walk without plan that goes back where it is stuck: it ends when every cell has been seen.
    start = (rng.randrange(rows), rng.randrange(columns))
    seen, path, doors = {start}, [start], set()
    while path:
        here = path[-1]
        free = [cell for cell in neighbours(here, rows, columns) if cell not in seen]
        if not free:
            path.pop()
            continue
        there = rng.choice(free)
        doors.add(door(here, there))
        seen.add(there)
        path.append(there)

    walls = set()
    for cell in product(range(rows), range(columns)):
        walls |= {door(cell, other) for other in neighbours(cell, rows, columns)}
    closed = sorted(walls - doors)
    return frozenset(doors | set(rng.sample(closed, round(extra * len(closed)))))


def distances(doors: frozenset[Door], goal: Cell) -> dict[Cell, int]:
    """Fewest moves from every cell to the goal, breadth first."""
    found, line = {goal: 0}, deque([goal])
    while line:
        here = line.popleft()
        for there in (step(here, move) for move in MOVES):
            if there not in found and door(here, there) in doors:
                found[there] = found[here] + 1
                line.append(there)
    return found


def walk(doors: frozenset[Door], start: Cell, goal: Cell, moves: Sequence[str]) -> tuple[Cell, bool]:
    """(where the moves end, whether no wall was hit); the walk ends at the goal and at the first wall."""
    here = start
    for move in moves:
        if here == goal:
            break
        if door(here, step(here, move)) not in doors:
            return here, False
        here = step(here, move)
    return here, True


def shortest(doors: frozenset[Door], start: Cell, goal: Cell) -> list[str]:
    """One shortest way as moves, the first in the order up, down, left, right where there are several."""
    left, here, moves = distances(doors, goal), start, []
    while here != goal:
        for move in MOVES:
            there = step(here, move)
            if door(here, there) in doors and left[there] == left[here] - 1:
                moves.append(move)
                here = there
                break
    return moves


def canonical(doors: frozenset[Door], rows: int, columns: int) -> str:
    """One name for a maze and its seven turned and mirrored forms."""
    names = []
    for turned, flip_rows, flip_columns in product((False, True), repeat=3):

        def moved(cell: Cell, form: tuple[bool, bool, bool] = (turned, flip_rows, flip_columns)) -> Cell:
            r, c = cell
            r, c = (rows - 1 - r if form[1] else r), (columns - 1 - c if form[2] else c)
            return (c, r) if form[0] else (r, c)

        size = f"{columns}x{rows}" if turned else f"{rows}x{columns}"
        listed = sorted(door(moved(a), moved(b)) for a, b in doors)
        names.append(size + "/" + ";".join(f"{a[0]},{a[1]}-{b[0]},{b[1]}" for a, b in listed))
    return min(names)


def draw_maze(
    doors: frozenset[Door], rows: int, columns: int, start: Cell, goal: Cell, side: int
) -> Image.Image:
    """The picture, RGB: black walls, a green start, a red goal; cells of `side` pixels."""
    picture = Image.new("RGB", (columns * side + 2, rows * side + 2), (255, 255, 255))
    pen = ImageDraw.Draw(picture)
    inset = max(2, side // 4)
    for (r, c), colour in ((start, "green"), (goal, "red")):
        x, y, far = c * side + 1 + inset, r * side + 1 + inset, side - 2 * inset - 2
        pen.rectangle((x, y, x + far + 1, y + far + 1), fill=COLOURS[colour])

    # A wall above and at the left of every cell without a door there, and around the whole.
    for r, c in product(range(rows + 1), range(columns + 1)):
        x, y = c * side, r * side
        if c < columns and door((r - 1, c), (r, c)) not in doors:
            pen.rectangle((x, y, x + side + 1, y + 1), fill=COLOURS["black"])
        if r < rows and door((r, c - 1), (r, c)) not in doors:
            pen.rectangle((x, y, x + 1, y + side + 1), fill=COLOURS["black"])
    return picture


def ends_with_a_move(text: str) -> bool:
    """Whether nothing follows the last move but punctuation."""
    last = (re.findall(r"\w+", text) or [""])[-1]
    return last.lower() in MOVES or (bool(last) and set(last) <= set(LETTERS))


def parse_moves(text: str) -> list[str]:
    """The moves of a text: the words up, down, left, right, or else its longest run of the capitals U, D, L,
    R."""
    text = rewards.tame(text)
    words = [word.lower() for word in _WORDS.findall(text)]
    if words:
        return words
    runs = [[LETTERS[letter] for letter in run if letter in LETTERS] for run in _RUN.findall(text)]
    return max(runs, key=len, default=[])


@task("maze")
class Maze(Task):
    """See the file's head. Reward of a way that hits no wall and reaches the goal: half, and half times
    shortest / its length. Else 0.3 times the share of the distance to the goal that is gone where it ends or
    hits a wall.

    Knobs: rows, columns, extra (share of walls opened), least (moves of the shortest way), side of a cell in
    pixels.
    """

    levels = (
        {"rows": 3, "columns": 3, "extra": 0.25, "least": 2, "side": 16},
        {"rows": 4, "columns": 4, "extra": 0.15, "least": 3, "side": 16},
        {"rows": 5, "columns": 5, "extra": 0.1, "least": 5, "side": 16},
        {"rows": 7, "columns": 7, "extra": 0.05, "least": 8, "side": 14},
    )

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See Task."""
        rows, columns = knobs["rows"], knobs["columns"]
        doors = carve(rng, rows, columns, knobs["extra"])
        key = f"maze/{canonical(doors, rows, columns)}"
        if self.heldout(key) != heldout:
            return None
        cells = list(product(range(rows), range(columns)))
        start, goal = rng.sample(cells, 2)
        way = shortest(doors, start, goal)
        if len(way) < knobs["least"]:
            return None

        lines = [f"maze of {rows} rows and {columns} columns"]
        for cell in cells:
            ways = [move for move in MOVES if door(cell, step(cell, move)) in doors]
            lines.append(f"row {cell[0] + 1}, column {cell[1] + 1}: open {', '.join(ways)}")
        for name, (r, c) in (("green start", start), ("red goal", goal)):
            lines.append(f"{name} at row {r + 1}, column {c + 1}")

        picture = draw_maze(doors, rows, columns, start, goal, knobs["side"])
        meta = {"doors": doors, "start": start, "goal": goal, "rows": rows, "columns": columns}
        question, category = "which moves lead from green to red?", f"{rows}x{columns}"
        return Drawn(question, picture, "\n".join(lines), way, " ".join(way), key, category, meta)

    def score(self, problem: Problem, answer: str) -> float:
        """See the class."""
        moves, meta = parse_moves(answer), problem.meta
        doors, start, goal = meta["doors"], meta["start"], meta["goal"]
        if not moves or not ends_with_a_move(answer) or len(moves) > LONGEST * meta["rows"] * meta["columns"]:
            return 0.0
        end, _ = walk(doors, start, goal, moves)
        if end == goal:
            return 0.5 + 0.5 * len(problem.answer) / len(moves)
        left = distances(doors, goal)
        return 0.3 * max(0.0, 1.0 - left[end] / left[start])
