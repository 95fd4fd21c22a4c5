"""Text drawn as a picture: one cell for every character, so that what stands there can be told exactly.

The same words as pixels are a bridge between the modalities (the text-rendered data of Kimi k1.5, section
2.1), and a test of transfer that needs no other skill than reading.
"""

from __future__ import annotations

import textwrap
from functools import lru_cache

from PIL import Image, ImageDraw

from earlyfusion.data.synth.graph import font

SIZE, COLUMNS, MARGIN = 10, 44, 2
INK, PAPER = (10, 10, 10), (255, 255, 255)


@lru_cache(maxsize=512)
def cell(size: int, characters: str) -> tuple[int, int, int]:
    """(width, height, offset of the font's top) in pixels of one cell, wide enough for any of `characters`
    (sorted, so that texts of one alphabet share a cell)."""
    # Of all printable characters, so that lines of one size have one height.
    tall = [font(size).getbbox(chr(code)) for code in range(33, 127)]
    top, bottom = min(box[1] for box in tall), max(box[3] for box in tall)
    widths = [box[2] - box[0] for box in map(font(size).getbbox, characters)]
    return int(max(widths, default=0)) + 2, int(bottom - top) + 2, int(-top)


def render_text(text: str, *, size: int = SIZE, columns: int = COLUMNS) -> Image.Image:
    """The text in black on white, RGB, as small as it fits with a margin of 2 pixels.

    size: of the font in pixels. columns: characters in a line at most; longer ones are broken at blanks, and
    inside a word only when it is too long. An empty text is an empty line.
    """
    lines: list[str] = []
    for line in text.expandtabs(2).split("\n"):
        # Hyphens stay in their line: a minus sign must not part from its number.
        lines += textwrap.wrap(line, columns, break_on_hyphens=False) or [""]
    width, height, offset = cell(size, "".join(sorted(set(text) - set(" \n\t"))))
    # An empty text is a picture of one cell.
    longest = max(1, *map(len, lines))

    picture = Image.new("RGB", (longest * width + 2 * MARGIN, len(lines) * height + 2 * MARGIN), PAPER)
    pen = ImageDraw.Draw(picture)
    for row, line in enumerate(lines):
        for column, character in enumerate(line):
            if character != " ":
                # One column is kept free at the left; some letters reach over their own left edge.
                x = MARGIN + column * width + 1 - font(size).getbbox(character)[0]
                y = MARGIN + row * height + offset
                pen.text((x, y), character, fill=INK, font=font(size))
    return picture
