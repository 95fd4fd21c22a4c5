"""Boards of coloured cells: rows and columns, exactly as many pixels each.

caption     one line for each row
questions   cells, rows, sizes and numbers of cells
words       "board of 2 rows and 3 columns" and "a red square at row 1, column 2", one line a cell
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from random import Random

from PIL import Image, ImageDraw

from earlyfusion.data.synth.graph import COLOURS, Graph, Question, article, on_side


@dataclass(frozen=True)
class Board(Graph):
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

    @classmethod
    def make(cls, rng: Random, *, min_side: int, max_side: int, heldout: bool = False) -> Board:
        """2 to 4 rows and columns of 2 to 4 colours; first rows of training and held-out boards never
        coincide."""
        while True:
            rows, columns = rng.randint(2, 4), rng.randint(2, 4)
            # Few colours, so that counting one of them is a question.
            chosen = rng.sample(tuple(COLOURS), rng.randint(2, 4))
            flat = tuple(rng.choice(chosen) for _ in range(rows * columns))
            cells = tuple(flat[r * columns : (r + 1) * columns] for r in range(rows))
            if on_side(f"board/{' '.join(cells[0])}", heldout):
                # One cell for all: rows and columns are exactly as many pixels each.
                least, most = -(-min_side // min(rows, columns)), max_side // max(rows, columns)
                return cls(cells, rng.randint(min(least, most), most))

    def draw(self) -> Image.Image:
        """A white line parts the cells."""
        image = Image.new("RGB", (self.columns * self.cell, self.rows * self.cell), (255, 255, 255))
        draw = ImageDraw.Draw(image)
        for r, row in enumerate(self.cells):
            for c, colour in enumerate(row):
                left, top = c * self.cell, r * self.cell
                # One pixel short: what is left between cells is the line.
                draw.rectangle((left, top, left + self.cell - 2, top + self.cell - 2), fill=COLOURS[colour])
        return image

    def words(self) -> str:
        """See Graph."""
        return board_words([f"{colour} square" for colour in chain(*self.cells)], self.columns)

    def caption(self, rng: Random) -> str:
        """One line for each row."""
        return "\n".join(" ".join(row) for row in self.cells)

    def questions(self, rng: Random, count: int) -> list[Question]:
        """About cells, rows, sizes and numbers of cells."""
        asked = {"how many rows are there?": str(self.rows), "how many columns are there?": str(self.columns)}
        # Cells asked for twice are one question in the dict.
        for _ in range(3):
            r, c = rng.randrange(self.rows), rng.randrange(self.columns)
            asked[f"what color is row {r + 1}, column {c + 1}?"] = self.cells[r][c]
        flat = list(chain(*self.cells))
        colour = rng.choice(sorted(set(flat)))
        asked[f"how many cells are {colour}?"] = str(flat.count(colour))
        r = rng.randrange(self.rows)
        asked[f"what is row {r + 1}?"] = " ".join(self.cells[r])

        listed = list(asked.items())
        rng.shuffle(listed)
        return listed[:count]


def board_words(names: list[str], columns: int) -> str:
    """A board in words: its size, then "a red square at row 1, column 2" for every cell's name in reading
    order."""
    lines = [f"board of {len(names) // columns} rows and {columns} columns"]
    for index, name in enumerate(names):
        lines.append(f"{article(name)} at row {index // columns + 1}, column {index % columns + 1}")
    return "\n".join(lines)
