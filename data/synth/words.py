"""Rendered words, for reading: one to three words or a number, in one colour, at a size that fits the
picture.

caption     the text
questions   the text, always first; its colour, first character and number of words
words       the text in quotes, its colour and ground
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

from PIL import Image, ImageDraw

from earlyfusion.data.synth.graph import BACKGROUNDS, COLOURS, Graph, Question, article, font, on_side

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
