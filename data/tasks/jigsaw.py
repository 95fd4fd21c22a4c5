"""Jigsaw: square tiles whose touching edges have the same colour, shuffled; gray edges are the frame.

The puzzle has one solution (boards with a second one are thrown away), so the tiles alone, seen or told,
give the answer: for every place in reading order, the number of the tile that belongs there. Held out: solved
boards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from earlyfusion.data.synth.palette import COLOURS, font
from earlyfusion.data.tasks.problem import Drawn, Problem, Task, task
from earlyfusion.data.tasks.scoring import rewards

FRAME = "gray"
INNER = ("red", "green", "blue", "yellow", "purple", "orange", "teal", "brown")
SIDES = ("top", "right", "bottom", "left")
Tile = tuple[str, str, str, str]
"""Colours of the top, right, bottom and left edge."""


def solved_board(rng: Random, rows: int, columns: int, colours: int) -> list[Tile]:
    """The tiles of a random board in reading order, inner edges of the first `colours` colours."""
    chosen = rng.sample(INNER, colours)
    down = [rng.choice(chosen) for _ in range((rows - 1) * columns)]
    across = [rng.choice(chosen) for _ in range(rows * (columns - 1))]

    tiles = []
    for r, c in product(range(rows), range(columns)):
        below, beside = r * columns + c, r * (columns - 1) + c
        tiles.append(
            (
                down[below - columns] if r else FRAME,
                across[beside] if c < columns - 1 else FRAME,
                down[below] if r < rows - 1 else FRAME,
                across[beside - 1] if c else FRAME,
            )
        )
    return tiles


def solutions(tiles: Sequence[Tile], rows: int, columns: int, most: int = 2) -> list[list[int]]:
    """Up to `most` ways to lay the tiles (indices in reading order) without turning them, by backtracking."""
    found: list[list[int]] = []
    placed: list[int] = []

    def extend() -> None:
        place = len(placed)
        if place == rows * columns:
            found.append(list(placed))
            return
        r, c = divmod(place, columns)
        for index, tile in enumerate(tiles):
            if len(found) >= most:
                return
            if index not in placed and _fits(tile, tiles, placed, r, c, rows, columns):
                placed.append(index)
                extend()
                placed.pop()

    extend()
    return found


def _fits(
    tile: Tile, tiles: Sequence[Tile], placed: Sequence[int], r: int, c: int, rows: int, columns: int
) -> bool:
    top = tiles[placed[(r - 1) * columns + c]][2] if r else FRAME
    left = tiles[placed[-1]][1] if c else FRAME
    edges = (tile[0] == top, tile[3] == left, (tile[1] == FRAME) == (c == columns - 1))
    return all(edges) and (tile[2] == FRAME) == (r == rows - 1)


def draw_tiles(tiles: Sequence[Tile], columns: int, side: int) -> Image.Image:
    """The tiles in reading order with their numbers, RGB: four triangles of `side` pixels each, white lines
    between."""
    rows = -(-len(tiles) // columns)
    picture = Image.new("RGB", (columns * (side + 2) + 2, rows * (side + 2) + 2), (255, 255, 255))
    pen = ImageDraw.Draw(picture)
    for index, tile in enumerate(tiles):
        r, c = divmod(index, columns)
        x, y = 2 + c * (side + 2), 2 + r * (side + 2)

        # Four triangles that meet in the middle, and the number on a white square.
        a, b, d, e = (x, y), (x + side - 1, y), (x + side - 1, y + side - 1), (x, y + side - 1)
        middle = (x + side // 2, y + side // 2)
        for start, stop, colour in zip((a, b, d, e), (b, d, e, a), tile):
            pen.polygon([start, stop, middle], fill=COLOURS[colour])
        size = max(8, side // 3)
        pen.rectangle(
            (middle[0] - size // 2, middle[1] - size // 2, middle[0] + size // 2, middle[1] + size // 2),
            fill=(255, 255, 255),
        )
        pen.text(middle, str(index + 1), fill=(10, 10, 10), font=font(size), anchor="mm")
    return picture


@task("jigsaw")
class Jigsaw(Task):
    """See the file's head. Reward: share of places with the right tile; 0 for anything that is no
    permutation.

    Knobs: rows, columns, colours (fewer are harder), side of a tile in pixels.
    """

    levels = (
        {"rows": 1, "columns": 3, "colours": 3, "side": 20},
        {"rows": 2, "columns": 2, "colours": 4, "side": 24},
        {"rows": 2, "columns": 3, "colours": 4, "side": 24},
        {"rows": 3, "columns": 3, "colours": 4, "side": 24},
    )

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See Task."""
        rows, columns = knobs["rows"], knobs["columns"]
        board = solved_board(rng, rows, columns, knobs["colours"])
        order = list(range(len(board)))
        rng.shuffle(order)
        tiles = [board[index] for index in order]
        if len(set(board)) < len(board) or len(solutions(tiles, rows, columns)) != 1:
            return None

        # The answer: for every place the number of its tile.
        answer = [order.index(place) + 1 for place in range(len(board))]
        lines = [f"{len(tiles)} tiles for {rows} rows and {columns} columns"]
        for number, tile in enumerate(tiles, 1):
            lines.append(
                f"tile {number}: " + ", ".join(f"{side} {colour}" for side, colour in zip(SIDES, tile))
            )

        key = f"jigsaw/{rows}x{columns}/" + "/".join("-".join(tile) for tile in board)
        question = (
            "lay the tiles so that touching edges match and gray is outside: which tile is at each place?"
        )
        target = " ".join(map(str, answer))
        meta = {"rows": rows, "columns": columns, "tiles": tiles}
        picture = draw_tiles(tiles, columns, knobs["side"])
        return Drawn(question, picture, "\n".join(lines), answer, target, key, f"{rows}x{columns}", meta)

    def score(self, problem: Problem, answer: str) -> float:
        """See the class."""
        numbers = [int(part) for part in re.findall(r"\d+", rewards.tame(answer))]
        if sorted(numbers) != sorted(problem.answer) or not rewards.ends(answer):
            return 0.0
        return sum(a == b for a, b in zip(numbers, problem.answer)) / len(numbers)
