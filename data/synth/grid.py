"""Boards of coloured cells: rows and columns, exactly as many pixels each."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

from earlyfusion.data.loading.order import held_out
from earlyfusion.data.synth.palette import COLOURS, HELDOUT_FRACTION


@dataclass(frozen=True)
class Board:
    """`cells[row][column]` is a colour name; every cell is `cell` pixels wide and high."""

    cells: tuple[tuple[str, ...], ...]
    cell: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.cells)

    @property
    def columns(self) -> int:
        """Number of columns."""
        return len(self.cells[0])


def make_board(rng: Random, *, min_side: int, max_side: int, heldout: bool = False) -> Board:
    """2 to 4 rows and columns of 2 to 4 colours; first rows of training and held-out boards never
    coincide."""
    while True:
        rows, columns = rng.randint(2, 4), rng.randint(2, 4)
        chosen = rng.sample(tuple(COLOURS), rng.randint(2, 4))
        cells = tuple(tuple(rng.choice(chosen) for _ in range(columns)) for _ in range(rows))
        if held_out(f"board/{' '.join(cells[0])}", HELDOUT_FRACTION) == heldout:
            least, most = -(-min_side // min(rows, columns)), max_side // max(rows, columns)
            return Board(cells, rng.randint(min(least, most), most))


def draw_board(board: Board) -> Image.Image:
    """The picture, RGB; a white line parts the cells."""
    size = (board.columns * board.cell, board.rows * board.cell)
    image = Image.new("RGB", size, (255, 255, 255))
    draw = ImageDraw.Draw(image)
    for r, row in enumerate(board.cells):
        for c, colour in enumerate(row):
            left, top = c * board.cell, r * board.cell
            draw.rectangle((left, top, left + board.cell - 2, top + board.cell - 2), fill=COLOURS[colour])
    return image


def board_rows(board: Board) -> str:
    """One line for each row."""
    return "\n".join(" ".join(row) for row in board.cells)


def board_questions(board: Board, rng: Random, count: int) -> list[tuple[str, str]]:
    """Up to `count` questions about cells, rows, sizes and numbers of cells."""
    asked = {"how many rows are there?": str(board.rows), "how many columns are there?": str(board.columns)}
    for _ in range(3):
        r, c = rng.randrange(board.rows), rng.randrange(board.columns)
        asked[f"what color is row {r + 1}, column {c + 1}?"] = board.cells[r][c]
    colour = rng.choice(sorted({name for row in board.cells for name in row}))
    asked[f"how many cells are {colour}?"] = str(sum(row.count(colour) for row in board.cells))
    r = rng.randrange(board.rows)
    asked[f"what is row {r + 1}?"] = " ".join(board.cells[r])
    listed = list(asked.items())
    rng.shuffle(listed)
    return listed[:count]
