"""What is read rather than seen: text drawn cell by cell, bar and line charts, boards of cells, signs.

render_text  the same words as pixels: a bridge between the modalities (the text-rendered data of Kimi
             k1.5, section 2.1), and a test of transfer that needs no other skill than reading
Chart        exact values: one unit of value is a whole number of pixels
Board        rows and columns of coloured cells, exactly as many pixels each
Sign         one to three words or a number, in one colour, at a size that fits the picture
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from random import Random

from PIL import Image, ImageDraw

from earlyfusion.data.synth.graph import (
    BACKGROUNDS,
    COLOURS,
    Box,
    Graph,
    Question,
    article,
    font,
    native_size,
    on_side,
    yes_no,
)

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


# One digit: reading a value is not arithmetic.
TOP_VALUE = 9
_LABEL_HEIGHT, _LEFT = 12, 12


@dataclass(frozen=True)
class Chart(Graph):
    """Labels A, B, C, ... with whole values 0..9."""

    kind: str
    """bar or line"""
    values: tuple[int, ...]
    colour: str
    width: int
    height: int

    @property
    def labels(self) -> str:
        """One letter for each value."""
        return "ABCDEFGH"[: len(self.values)]

    @property
    def unit(self) -> int:
        """Pixels of one unit of value."""
        return (self.height - _LABEL_HEIGHT - 3) // TOP_VALUE

    @property
    def baseline(self) -> int:
        """Row of value 0."""
        return self.height - _LABEL_HEIGHT

    def bar(self, index: int) -> Box:
        """Box of bar `index`; as tall as value * unit pixels."""
        # Equal columns with a gap of 15 % at each side of a bar.
        step = (self.width - _LEFT) / len(self.values)
        left = round(_LEFT + index * step + step * 0.15)
        right = max(left + 2, round(_LEFT + (index + 1) * step - step * 0.15))
        return left, self.baseline - self.values[index] * self.unit, right, self.baseline

    @classmethod
    def make(cls, rng: Random, *, min_side: int, max_side: int, heldout: bool = False) -> Chart:
        """A chart of 3 to 5 values; (kind, values) of training and held-out charts never coincide."""
        # Below 40 pixels the letters under the bars would overlap.
        width, height = native_size(rng, max(min_side, 40), max(max_side, 40))
        while True:
            kind = rng.choice(("bar", "line"))
            values = tuple(rng.randint(0, TOP_VALUE) for _ in range(rng.randint(3, 5)))
            if on_side(f"chart/{kind}/{values}", heldout):
                return cls(kind, values, rng.choice(tuple(COLOURS)), width, height)

    def draw(self) -> Image.Image:
        """Axes, marks at 0, 5 and 9, a letter under each value."""
        image = Image.new("RGB", (self.width, self.height), PAPER)
        draw = ImageDraw.Draw(image)
        draw.line((_LEFT - 2, 1, _LEFT - 2, self.baseline), fill=INK)
        draw.line((_LEFT - 2, self.baseline, self.width - 1, self.baseline), fill=INK)
        # Marks enough to read a height by.
        for value in (0, 5, TOP_VALUE):
            y = self.baseline - value * self.unit
            draw.text((1, y), str(value), fill=INK, font=font(9), anchor="lm")

        colour, tops = COLOURS[self.colour], []
        for i, label in enumerate(self.labels):
            left, top, right, bottom = self.bar(i)
            middle = (left + right) // 2
            tops.append((middle, top))
            # A value of 0 has no bar; Pillow would draw one line.
            if self.kind == "bar" and bottom > top:
                draw.rectangle((left, top, right - 1, bottom - 1), fill=colour)
            draw.text((middle, self.height - 1), label, fill=INK, font=font(10), anchor="mb")

        if self.kind == "line":
            draw.line(tops, fill=colour, width=2)
            for x, y in tops:
                draw.rectangle((x - 1, y - 1, x + 1, y + 1), fill=colour)
        return image

    def words(self) -> str:
        """See Graph."""
        lines = [f"{label} has the value {value}" for label, value in zip(self.labels, self.values)]
        return "\n".join([f"{self.kind} chart with {len(self.values)} values", *lines])

    def caption(self, rng: Random) -> str:
        """The whole table."""
        cells = [f"{label} {value}" for label, value in zip(self.labels, self.values)]
        return f"{self.kind} chart: {', '.join(cells)}"

    def questions(self, rng: Random, count: int) -> list[Question]:
        """About single values, extremes, number and sum."""
        values, labels = self.values, self.labels
        asked = [(f"what is the value of {label}?", str(value)) for label, value in zip(labels, values)]
        asked.append(("how many values are shown?", str(len(values))))
        asked.append(("what is the sum of all values?", str(sum(values))))
        for name, extreme in (("largest", max(values)), ("smallest", min(values))):
            # Of two largest none can be named.
            if values.count(extreme) == 1:
                asked.append((f"which value is the {name}?", labels[values.index(extreme)]))
        a, b = rng.sample(range(len(values)), 2)
        asked.append((f"is {labels[a]} larger than {labels[b]}?", yes_no(values[a] > values[b])))
        rng.shuffle(asked)
        return asked[:count]


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


ASK_TEXT = "what does the text say?"
# Common words of four letters or so: short enough for small pictures.
_WORDS = """
able acid also area army away baby back ball band bank base bath bear beat been bell best bird blue boat
body bone book born both bowl cake call camp card care cart case cash cast cave city clay coal coat cold
come cook cool corn cost crew crop dark data dawn days deal deep deer desk diet dish dock door down draw
drum dust duty each earn east easy edge even face fact farm fast feet felt film fire fish five flag flat
flow foam food foot form fort four free from fuel full game gate gift girl give glad goal goat gold good
grow hair half hall hand hard harm heat hill home hope horn hour huge idea inch iron item join jump keep
kept kind king knee knot lack lake lamp land last late lead leaf left less life lift line lion list live
load long look lost loud luck lung made main make many mark mass meal mean meat mild mile milk mind moon
more most move name near neck need nest next nine noon nose note odds once only open over pack page pair
palm park part past path pear pipe plan play plum poem pole pool port post pull pump pure quit race rain
rare read rest rice rich ride ring ripe rise road rock roof room root rope rose safe sail salt same sand
save seat seed self ship shoe shop show side silk size skin slow snow soap soft soil song soon soup spin
star stay stem step stop suit sure swim tail talk tall task team tell tent test text than time tiny toad
tone tool town tree true tube turn twin unit vast vein very vine wait walk wall warm wash wave weak week
well went west wheel wide wild wind wing wire wise wolf wood word work yard year zero zone
""".split()


@cache
def vocabulary(heldout: bool) -> tuple[str, ...]:
    """Words of one side; the two sides share none."""
    return tuple(word for word in _WORDS if on_side(f"word/{word}", heldout))


@dataclass(frozen=True)
class Sign(Graph):
    """A picture of some lines of text: its size, the font size in pixels, where each line is drawn."""

    lines: tuple[str, ...]
    width: int
    height: int
    font_size: int
    corners: tuple[tuple[int, int], ...]
    """(x, y) given to the font for each line."""
    colour: str
    background: str

    @property
    def text(self) -> str:
        """What a reader says: the lines with spaces between."""
        return " ".join(self.lines)

    @classmethod
    def make(cls, rng: Random, *, min_side: int, max_side: int, heldout: bool = False) -> Sign:
        """A sign whose text lies wholly inside a picture of at least `min_side` and at most `max_side` on
        each side."""
        words = [rng.choice(vocabulary(heldout)) for _ in range(rng.choice((1, 1, 2, 3)))]
        # Numbers have no side of the split, so the held-out signs have none.
        if not heldout and rng.random() < 0.2:
            words = [str(rng.randrange(10, 10_000))]

        # The text grows smaller, and shorter where the font is small already, until it fits.
        lines = words if rng.random() < 0.5 else [" ".join(words)]
        size, most = rng.randint(10, 10 + max_side // 8), max_side - 6
        corners, text_w, text_h = _ink(lines, size)
        while max(text_w, text_h) > most and (size > 8 or len(words) > 1):
            # Below ten pixels letters run together: a word less is better.
            if size > 10 or len(words) == 1:
                size -= 1
            else:
                words = words[1:]
                lines = words if len(lines) > 1 else [" ".join(words)]
            corners, text_w, text_h = _ink(lines, size)

        # A tight frame as often as a wide one.
        width = rng.randint(max(min_side, text_w + 6), max_side)
        height = rng.randint(max(min_side, text_h + 6), max_side)
        if rng.random() < 0.5:
            width, height = max(min_side, text_w + 6), max(min_side, text_h + 6)
        left, top = rng.randint(2, width - text_w - 3), rng.randint(2, height - text_h - 3)
        return cls(
            lines=tuple(lines),
            width=width,
            height=height,
            font_size=size,
            corners=tuple((left + x, top + y) for x, y in corners),
            colour=rng.choice([name for name in COLOURS if name not in ("yellow", "gray")]),
            background=rng.choice(tuple(BACKGROUNDS)),
        )

    def draw(self) -> Image.Image:
        """See Graph."""
        image = Image.new("RGB", (self.width, self.height), BACKGROUNDS[self.background])
        draw = ImageDraw.Draw(image)
        for line, corner in zip(self.lines, self.corners):
            draw.text(corner, line, fill=COLOURS[self.colour], font=font(self.font_size))
        return image

    def words(self) -> str:
        """See Graph."""
        ground = f"{article(self.background)} background"
        return f'the text "{self.text}" in {self.colour} letters on {ground}'

    def caption(self, rng: Random) -> str:
        """What it says."""
        return f"text: {self.text}"

    def questions(self, rng: Random, count: int) -> list[Question]:
        """Reading always first."""
        more = [
            ("what color is the text?", self.colour),
            ("what is the first character?", self.text[0]),
            ("how many words are there?", str(len(self.text.split()))),
        ]
        rng.shuffle(more)
        return [(ASK_TEXT, self.text), *more][:count]


def _ink(lines: list[str], size: int) -> tuple[list[tuple[int, int]], int, int]:
    """(corner of each line, width, height) of the lines one below the other, the ink beginning at (0, 0)."""
    boxes = [tuple(map(round, font(size).getbbox(line))) for line in lines]
    # The ink of the first line begins at 0, whatever room the font leaves above it.
    top = boxes[0][1]
    corners = [(-box[0], i * (size + 2) - top) for i, box in enumerate(boxes)]
    height = max(y + box[3] for (_, y), box in zip(corners, boxes))
    return corners, max(box[2] - box[0] for box in boxes), height
