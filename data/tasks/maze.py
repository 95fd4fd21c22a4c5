"""Mazes: cells with walls, a start and a goal; the answer is a way as moves. Held out: walls, whatever the
start.

A maze and its seven mirrored and turned forms are one combination, so no test maze is a turned training maze.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
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
_LETTERS = {"U": "up", "D": "down", "L": "left", "R": "right"}
_WORDS = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE)
_RUN = re.compile(r"(?<![A-Za-z])[UDLR](?:[ ,;>-]{0,3}[UDLR])*(?![A-Za-z])")
LONGEST = 4
"""A way of more than this many moves for every cell earns nothing."""


def carve(rng: Random, rows: int, columns: int, extra: float) -> frozenset[Door]:
    """Doors of a maze in which every cell can be reached; `extra` is the share of the other walls that is
    opened."""
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
    walls = sorted(
        {
            door(a, b)
            for r in range(rows)
            for c in range(columns)
            for a in [(r, c)]
            for b in neighbours(a, rows, columns)
        }
        - doors
    )
    return frozenset(doors | set(rng.sample(walls, round(extra * len(walls)))))


def neighbours(cell: Cell, rows: int, columns: int) -> list[Cell]:
    """Cells that share a side, inside the maze."""
    around = [(cell[0] + dr, cell[1] + dc) for dr, dc in MOVES.values()]
    return [(r, c) for r, c in around if 0 <= r < rows and 0 <= c < columns]


def door(a: Cell, b: Cell) -> Door:
    """The door between two neighbours."""
    return (a, b) if a < b else (b, a)


def distances(doors: frozenset[Door], goal: Cell) -> dict[Cell, int]:
    """Fewest moves from every cell to the goal, breadth first."""
    links: dict[Cell, list[Cell]] = {}
    for a, b in doors:
        links.setdefault(a, []).append(b)
        links.setdefault(b, []).append(a)
    found, line = {goal: 0}, deque([goal])
    while line:
        here = line.popleft()
        for there in links.get(here, ()):
            if there not in found:
                found[there] = found[here] + 1
                line.append(there)
    return found


def walk(doors: frozenset[Door], start: Cell, goal: Cell, moves: Sequence[str]) -> tuple[Cell, bool]:
    """(where the moves end, whether no wall was hit); the walk ends at the goal and at the first wall."""
    here = start
    for move in moves:
        if here == goal:
            break
        there = (here[0] + MOVES[move][0], here[1] + MOVES[move][1])
        if door(here, there) not in doors:
            return here, False
        here = there
    return here, True


def shortest(doors: frozenset[Door], start: Cell, goal: Cell) -> list[str]:
    """One shortest way as moves, the first in the order up, down, left, right where there are several."""
    left, here, moves = distances(doors, goal), start, []
    while here != goal:
        for name, (dr, dc) in MOVES.items():
            there = (here[0] + dr, here[1] + dc)
            if door(here, there) in doors and left[there] == left[here] - 1:
                moves.append(name)
                here = there
                break
    return moves


def canonical(doors: frozenset[Door], rows: int, columns: int) -> str:
    """One name for a maze and its seven turned and mirrored forms."""
    names = []
    for turned in (False, True):
        for flip_r in (False, True):
            for flip_c in (False, True):

                def moved(cell: Cell, t: bool = turned, fr: bool = flip_r, fc: bool = flip_c) -> Cell:
                    r, c = (rows - 1 - cell[0] if fr else cell[0]), (columns - 1 - cell[1] if fc else cell[1])
                    return (c, r) if t else (r, c)

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
    for (r, c), colour in ((start, "green"), (goal, "red")):
        inset = max(2, side // 4)
        x, y = c * side + 1, r * side + 1
        pen.rectangle(
            (x + inset, y + inset, x + side - 1 - inset, y + side - 1 - inset), fill=COLOURS[colour]
        )
    for r in range(rows + 1):
        for c in range(columns):
            if r in (0, rows) or door((r - 1, c), (r, c)) not in doors:
                pen.rectangle((c * side, r * side, (c + 1) * side + 1, r * side + 1), fill=COLOURS["black"])
    for r in range(rows):
        for c in range(columns + 1):
            if c in (0, columns) or door((r, c - 1), (r, c)) not in doors:
                pen.rectangle((c * side, r * side, c * side + 1, (r + 1) * side + 1), fill=COLOURS["black"])
    return picture


def ends_with_a_move(text: str) -> bool:
    """Whether nothing follows the last move but punctuation."""
    last = (re.findall(r"\w+", text) or [""])[-1]
    return last.lower() in MOVES or (bool(last) and set(last) <= set(_LETTERS))


def parse_moves(text: str) -> list[str]:
    """The moves of a text: the words up, down, left, right, or else its longest run of the capitals U, D, L,
    R."""
    text = rewards.tame(text)
    words = [word.lower() for word in _WORDS.findall(text)]
    if words:
        return words
    runs = [[_LETTERS[letter] for letter in run if letter in _LETTERS] for run in _RUN.findall(text)]
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
        cells = [(r, c) for r in range(rows) for c in range(columns)]
        start, goal = rng.sample(cells, 2)
        way = shortest(doors, start, goal)
        if len(way) < knobs["least"]:
            return None
        lines = [f"maze of {rows} rows and {columns} columns"]
        for r, c in cells:
            ways = [name for name, (dr, dc) in MOVES.items() if door((r, c), (r + dr, c + dc)) in doors]
            lines.append(f"row {r + 1}, column {c + 1}: open {', '.join(ways)}")
        lines.append(f"green start at row {start[0] + 1}, column {start[1] + 1}")
        lines.append(f"red goal at row {goal[0] + 1}, column {goal[1] + 1}")
        picture = draw_maze(doors, rows, columns, start, goal, knobs["side"])
        meta = {"doors": doors, "start": start, "goal": goal, "rows": rows, "columns": columns}
        question = "which moves lead from green to red?"
        return Drawn(question, picture, "\n".join(lines), way, " ".join(way), key, f"{rows}x{columns}", meta)

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
