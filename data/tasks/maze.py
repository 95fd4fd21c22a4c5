"""Mazes: cells with walls, a start and a goal; the answer is a way as moves. Held out: walls, whatever the
start.

A maze and its seven mirrored and turned forms are one combination, so no test maze is a turned training maze.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import product
from random import Random

from PIL import Image, ImageDraw

from earlyfusion.data.synth.graph import COLOURS
from earlyfusion.data.tasks.problem import Problem, Task, task
from earlyfusion.data.tasks.scoring.text import tame

Cell = tuple[int, int]
"""(row, column) from 0."""
Doors = Collection[tuple[Cell, Cell]]
"""Neighbours without a wall between them, the smaller of a pair first."""
MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
# U, D, L, R: the short form of an answer.
LETTERS = {name[0].upper(): name for name in MOVES}
# A run of capitals that stands alone: the L of "Left" is none.
_RUN = re.compile(r"(?<![A-Za-z])[UDLR](?:[ ,;>-]{0,3}[UDLR])*(?![A-Za-z])")
LONGEST = 4
"""A way of more than this many moves for every cell earns nothing."""


def door(a: Cell, b: Cell) -> tuple[Cell, Cell]:
    """The door between two neighbours."""
    return min(a, b), max(a, b)


def ways(doors: Doors, cell: Cell) -> dict[str, Cell]:
    """Moves that no wall stops, with the cell that each leads to."""
    every = {move: (cell[0] + down, cell[1] + right) for move, (down, right) in MOVES.items()}
    return {move: there for move, there in every.items() if door(cell, there) in doors}


def carve(rng: Random, rows: int, columns: int, extra: float) -> frozenset[tuple[Cell, Cell]]:
    """Doors of a maze in which every cell can be reached; `extra` is the share of the other walls that is
    opened."""
    # Every wall between two cells is a door that may be opened.
    every = {((r, c), (r, c + 1)) for r, c in product(range(rows), range(columns - 1))}
    every |= {((r, c), (r + 1, c)) for r, c in product(range(rows - 1), range(columns))}

    # A walk without plan that goes back where it is stuck: it ends when every cell has been seen.
    path = [(rng.randrange(rows), rng.randrange(columns))]
    seen, doors = set(path), set()
    while path:
        free = [cell for cell in ways(every, path[-1]).values() if cell not in seen]
        if not free:
            path.pop()
            continue
        there = rng.choice(free)
        doors.add(door(path[-1], there))
        seen.add(there)
        path.append(there)
    # Walls opened afterwards make rings, so that a way is not the only one.
    # Sorted: a set has another order in every process, and the draw depends on it.
    closed = sorted(every - doors)
    return frozenset(doors.union(rng.sample(closed, round(extra * len(closed)))))


def distances(doors: Doors, goal: Cell) -> dict[Cell, int]:
    """Fewest moves from every cell to the goal, breadth first."""
    found, line = {goal: 0}, [goal]
    # The list grows while it is gone through.
    for here in line:
        for there in ways(doors, here).values():
            if there not in found:
                found[there] = found[here] + 1
                line.append(there)
    return found


def shortest(doors: Doors, start: Cell, goal: Cell) -> list[str]:
    """One shortest way as moves, the first in the order up, down, left, right where there are several."""
    left, here, moves = distances(doors, goal), start, []
    while here != goal:
        # Every step goes down by one on the table of distances; the first of equals is taken.
        move, here = min(ways(doors, here).items(), key=lambda way: left[way[1]])
        moves.append(move)
    return moves


def canonical(doors: Doors, rows: int, columns: int) -> str:
    """One name for a maze and its seven turned and mirrored forms."""
    names = []
    # Two mirrors in turn, one along the diagonal: after eight steps every form has come.
    for number in range(8):
        if number % 2:
            doors = [door((rows - 1 - a[0], a[1]), (rows - 1 - b[0], b[1])) for a, b in doors]
        else:
            doors = [door(a[::-1], b[::-1]) for a, b in doors]
            rows, columns = columns, rows
        listed = [f"{a[0]},{a[1]}-{b[0]},{b[1]}" for a, b in sorted(doors)]
        names.append(f"{rows}x{columns}/{';'.join(listed)}")
    return min(names)


def draw_maze(doors: Doors, rows: int, columns: int, ends: dict[str, Cell], side: int) -> Image.Image:
    """The picture, RGB: black walls, coloured cells; cells of `side` pixels."""
    picture = Image.new("RGB", (columns * side + 2, rows * side + 2), (255, 255, 255))
    pen = ImageDraw.Draw(picture)
    # The squares leave the walls of their cells free.
    inset = max(2, side // 4)
    for colour, (r, c) in ends.items():
        x, y, far = c * side + 1 + inset, r * side + 1 + inset, side - 2 * inset - 1
        pen.rectangle((x, y, x + far, y + far), fill=COLOURS[colour])

    # A wall above and at the left of every cell without a door there, and around the whole.
    for r, c in product(range(rows + 1), range(columns + 1)):
        x, y = c * side, r * side
        if c < columns and ((r - 1, c), (r, c)) not in doors:
            pen.rectangle((x, y, x + side + 1, y + 1), fill=COLOURS["black"])
        if r < rows and ((r, c - 1), (r, c)) not in doors:
            pen.rectangle((x, y, x + 1, y + side + 1), fill=COLOURS["black"])
    return picture


def parse_moves(text: str) -> list[str]:
    """The moves of a text: the words up, down, left, right, or else its longest run of the capitals U, D, L,
    R. None where something follows the last move."""
    text = tame(text)
    # A policy that goes on after its way has not ended its answer.
    last = (re.findall(r"\w+", text) or [""])[-1]
    if last.lower() not in MOVES and not set(last) <= set(LETTERS):
        return []
    words = re.findall(r"\b(?:up|down|left|right)\b", text.lower())
    runs = [re.sub(r"[^UDLR]", "", run) for run in _RUN.findall(text)]
    return words or [LETTERS[letter] for letter in max(runs, key=len, default="")]


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

    def draw(self, rng, heldout, knobs):
        """See Task."""
        rows, columns = knobs["rows"], knobs["columns"]
        doors = carve(rng, rows, columns, knobs["extra"])
        key = f"maze/{canonical(doors, rows, columns)}"
        # Asked here already: what comes next is the dear part.
        if self.heldout(key) != heldout:
            return None
        cells = list(product(range(rows), range(columns)))
        # Not part of the combination: another start is the same maze.
        start, goal = rng.sample(cells, 2)
        way = shortest(doors, start, goal)
        if len(way) < knobs["least"]:
            return None

        lines = [f"maze of {rows} rows and {columns} columns"]
        for r, c in cells:
            lines.append(f"row {r + 1}, column {c + 1}: open {', '.join(ways(doors, (r, c)))}")
        for name, (r, c) in (("green start", start), ("red goal", goal)):
            lines.append(f"{name} at row {r + 1}, column {c + 1}")

        picture = draw_maze(doors, rows, columns, {"green": start, "red": goal}, knobs["side"])
        meta = {"doors": doors, "start": start, "goal": goal}
        question, category = "which moves lead from green to red?", f"{rows}x{columns}"
        return Problem(question, picture, "\n".join(lines), way, " ".join(way), key, category, meta)

    def score(self, problem, answer):
        """See the class."""
        moves, meta = parse_moves(answer), problem.meta
        here, left = meta["start"], distances(meta["doors"], meta["goal"])
        # A walk at random long enough reaches every goal.
        if not 0 < len(moves) <= LONGEST * len(left):
            return 0.0
        far = left[here]
        for move in moves:
            # The walk ends at the first wall, and at the goal whatever follows.
            there = ways(meta["doors"], here).get(move)
            if here == meta["goal"] or there is None:
                break
            here = there
        if here == meta["goal"]:
            return 0.5 + 0.5 * len(problem.answer) / len(moves)
        return 0.3 * max(0.0, 1.0 - left[here] / far)
