"""Rendered words, for reading: one to three words or a number, in one colour, at a size that fits the picture."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from random import Random

from PIL import Image, ImageDraw

from earlyfusion.data.order import held_out
from earlyfusion.data.synth.palette import BACKGROUNDS, COLOURS, HELDOUT_FRACTION, font

_WORDS = """
able acid also area army away baby back ball band bank base bath bear beat been bell best bird blue boat body bone book
born both bowl cake call camp card care cart case cash cast cave city clay coal coat cold come cook cool corn cost crew
crop dark data dawn days deal deep deer desk diet dish dock door down draw drum dust duty each earn east easy edge even
face fact farm fast feet felt film fire fish five flag flat flow foam food foot form fort four free from fuel full game
gate gift girl give glad goal goat gold good grow hair half hall hand hard harm heat hill home hope horn hour huge idea
inch iron item join jump keep kept kind king knee knot lack lake lamp land last late lead leaf left less life lift line
lion list live load long look lost loud luck lung made main make many mark mass meal mean meat mild mile milk mind moon
more most move name near neck need nest next nine noon nose note odds once only open over pack page pair palm park part
past path pear pipe plan play plum poem pole pool port post pull pump pure quit race rain rare read rest rice rich ride
ring ripe rise road rock roof room root rope rose safe sail salt same sand save seat seed self ship shoe shop show side
silk size skin slow snow soap soft soil song soon soup spin star stay stem step stop suit sure swim tail talk tall task
team tell tent test text than time tiny toad tone tool town tree true tube turn twin unit vast vein very vine wait walk
wall warm wash wave weak week well went west wheel wide wild wind wing wire wise wolf wood word work yard year zero zone
""".split()


@lru_cache(maxsize=2)
def vocabulary(heldout: bool) -> tuple[str, ...]:
    """Words of one side; the two sides share none."""
    return tuple(word for word in _WORDS if held_out(f"word/{word}", HELDOUT_FRACTION) == heldout)


@dataclass(frozen=True)
class Sign:
    """A picture of `text`: size of the picture, font size in pixels, where the text begins."""

    text: str
    width: int
    height: int
    font_size: int
    left: int
    top: int
    colour: str
    background: str


def make_sign(rng: Random, *, min_side: int, max_side: int, heldout: bool = False) -> Sign:
    """A sign whose text lies wholly inside a picture of at least `min_side` and at most `max_side` on each side."""
    words = [rng.choice(vocabulary(heldout)) for _ in range(rng.choice((1, 1, 2, 3)))]
    if not heldout and rng.random() < 0.2:
        words = [str(rng.randrange(10, 10_000))]
    size = rng.randint(10, 10 + max_side // 8)
    while True:
        text = " ".join(words)
        left, top, right, bottom = (round(x) for x in font(size).getbbox(text))
        if right - left <= max_side - 6:
            break
        if size > 10:
            size = max(10, size - 2)
        else:
            words = words[1:] or ["go"]
    text_w, text_h = right - left, bottom - top
    width = rng.randint(max(min_side, text_w + 6), max_side)
    height = rng.randint(max(min_side, text_h + 6), max(min_side, min(max_side, 3 * text_h)))
    return Sign(
        text=text,
        width=width,
        height=height,
        font_size=size,
        left=rng.randint(2, width - text_w - 3) - left,
        top=rng.randint(2, height - text_h - 3) - top,
        colour=rng.choice([name for name in COLOURS if name not in ("yellow", "gray")]),
        background=rng.choice(tuple(BACKGROUNDS)),
    )


def draw_sign(sign: Sign) -> Image.Image:
    """The picture, RGB."""
    image = Image.new("RGB", (sign.width, sign.height), BACKGROUNDS[sign.background])
    draw = ImageDraw.Draw(image)
    draw.text((sign.left, sign.top), sign.text, fill=COLOURS[sign.colour], font=font(sign.font_size))
    return image


def sign_questions(sign: Sign, rng: Random, count: int) -> list[tuple[str, str]]:
    """What the sign says, its colour, its first letter: up to `count`, reading always first."""
    asked = [("what does the text say?", sign.text)]
    more = [
        ("what color is the text?", sign.colour),
        ("what is the first character?", sign.text[0]),
        ("how many words are there?", str(len(sign.text.split()))),
    ]
    rng.shuffle(more)
    return (asked + more)[:count]
