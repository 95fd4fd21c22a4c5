"""Jigsaw: square tiles whose touching edges have the same colour, shuffled; gray edges are the frame.

The puzzle has one solution (boards with a second one are thrown away), so the tiles alone, seen or told,
give the answer: for every place in reading order, the number of the tile that belongs there. Held out: solved
boards.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from operator import eq
from random import Random

from PIL import Image, ImageDraw

from earlyfusion.data.synth.graph import COLOURS, font
from earlyfusion.data.tasks.problem import Problem, Task, task
from earlyfusion.data.tasks.scoring import rewards

FRAME = "gray"
# All but gray and black: gray is the frame, black is hard to tell from the numbers.
INNER = ("red", "green", "blue", "yellow", "purple", "orange", "teal", "brown")
ASK = "lay the tiles so that touching edges match and gray is outside: which tile is at each place?"
SIDES = ("top", "right", "bottom", "left")
Tile = tuple[str, str, str, str]
"""Colours of the top, right, bottom and left edge."""


def solved_board(rng: Random, rows: int, columns: int, colours: int) -> list[Tile]:
    """The tiles of a random board in reading order, inner edges of the first `colours` colours."""
    chosen = rng.sample(INNER, colours)
    # Edges are drawn once each, so that the two tiles that share one agree.
    down = {place: rng.choice(chosen) for place in product(range(1, rows), range(columns))}
    across = {place: rng.choice(chosen) for place in product(range(rows), range(1, columns))}

    tiles = []
    for r, c in product(range(rows), range(columns)):
        top, bottom = down.get((r, c), FRAME), down.get((r + 1, c), FRAME)
        left, right = across.get((r, c), FRAME), across.get((r, c + 1), FRAME)
        tiles.append((top, right, bottom, left))
    return tiles


def solutions(tiles: Sequence[Tile], columns: int, placed: tuple[int, ...] = ()) -> int:
    """In how many ways the tiles that are left can be laid without turning them, after those `placed` (in
    reading order); no more than two are told apart."""
    place = len(placed)
    if place == len(tiles):
        return 1
    r, c = divmod(place, columns)
    # Only two neighbours are laid already in reading order: the one above and the one before.
    above = tiles[placed[-columns]][2] if r else FRAME
    before = tiles[placed[-1]][1] if c else FRAME

    count = 0
    for index, (top, right, bottom, left) in enumerate(tiles):
        # The frame is where the board ends, and nowhere else; more than one solution is all that is asked.
        ends = (right == FRAME, bottom == FRAME) == (c == columns - 1, place + columns >= len(tiles))
        if count < 2 and index not in placed and (top, left) == (above, before) and ends:
            count += solutions(tiles, columns, (*placed, index))
    return count


def draw_tiles(tiles: Sequence[Tile], columns: int, side: int) -> Image.Image:
    """The tiles in reading order with their numbers, RGB: four triangles of `side` pixels each, white lines
    between."""
    rows, white = -(-len(tiles) // columns), (255, 255, 255)
    picture = Image.new("RGB", (columns * (side + 2) + 2, rows * (side + 2) + 2), white)
    pen = ImageDraw.Draw(picture)
    for index, tile in enumerate(tiles):
        r, c = divmod(index, columns)
        left, top = 2 + c * (side + 2), 2 + r * (side + 2)
        right, bottom = left + side - 1, top + side - 1
        x, y = left + side // 2, top + side // 2

        # Four triangles that meet in the middle, and the number on a white square.
        corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
        for start, stop, colour in zip(corners, corners[1:], tile):
            pen.polygon([start, stop, (x, y)], fill=COLOURS[colour])
        size = max(8, side // 3)
        half = size // 2
        pen.rectangle((x - half, y - half, x + half, y + half), fill=white)
        pen.text((x, y), str(index + 1), fill=(10, 10, 10), font=font(size), anchor="mm")
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

    def draw(self, rng, heldout, knobs):
        """See Task."""
        rows, columns = knobs["rows"], knobs["columns"]
        board = solved_board(rng, rows, columns, knobs["colours"])
        # Tiles are not turned, only mixed.
        order = list(range(len(board)))
        rng.shuffle(order)
        tiles = [board[index] for index in order]
        # Two equal tiles could be exchanged, and any second solution would be right as well.
        if len(set(board)) < len(board) or solutions(tiles, columns) != 1:
            return None

        # The answer: for every place the number of its tile.
        answer = [order.index(place) + 1 for place in range(len(board))]
        lines = [f"{len(tiles)} tiles for {rows} rows and {columns} columns"]
        for number, tile in enumerate(tiles, 1):
            edges = [f"{side} {colour}" for side, colour in zip(SIDES, tile)]
            lines.append(f"tile {number}: {', '.join(edges)}")

        size = f"{rows}x{columns}"
        key = "/".join(["jigsaw", size, *map("-".join, board)])
        picture, target = draw_tiles(tiles, columns, knobs["side"]), " ".join(map(str, answer))
        return Problem(ASK, picture, "\n".join(lines), answer, target, key, size)

    def score(self, problem, answer):
        """See the class."""
        numbers, gold = rewards.integers(answer), problem.answer
        # A list of one tile said nine times would be right somewhere.
        permutation = sorted(numbers) == sorted(gold)
        return permutation * sum(map(eq, numbers, gold)) / len(gold)
