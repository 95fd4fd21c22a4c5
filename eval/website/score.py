"""How alike two pages look, and how alike they behave.

    score(seen, wanted)                 Score: mean of five terms in [0, 1], and the terms
    floors(wanted, other, text_only)    what a page that nobody read would get

The terms, after Design2Code (arXiv 2403.03163, section 3.2): the area of matched texts among all, how much
of their words agrees, where they stand, their colour (CIEDE2000); and the share of pixels that differ by less
than CLOSE. Texts are matched one to one by what they say (Hungarian method), at least by half of it. Three
choices keep the floors low: what has no partner counts 0 in every term, not only in the area; a page that is
shorter or longer differs in the pixels it lacks; a page with no text and no other colour than its ground, or
none at all, scores 0. A CLIP term can be passed in.

Interaction, after IWR-Bench (arXiv 2509.24709): 0.7 of the share of actions that did what they did on the
wanted page, 0.3 of how alike both look after them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np
from PIL import Image

from earlyfusion.eval.website.browser import Block, View
from earlyfusion.kernels.errors import UserError

CLOSE = 16
"""Steps of a channel of 256 by which equal pixels may differ."""
LEAST = 0.5
"""Similarity of two texts, from 0 to 1, that are matched."""
Clip = Callable[[Image.Image, Image.Image], float]


@dataclass(frozen=True)
class Score:
    """Terms by name, each in [0, 1]: pixels, area, text, position, colour, and clip where one was given.
    Without pixels stands ground, the share of the texts that have as good as the same colour behind them."""

    terms: dict[str, float]

    @property
    def mean(self) -> float:
        """The score."""
        return sum(self.terms.values()) / len(self.terms)


NAMES = ("pixels", "area", "text", "position", "colour")
NOTHING = Score(dict.fromkeys(NAMES, 0.0))
"""The score of a page that cannot be rendered."""
UNSEEN = Score(dict.fromkeys(("ground", *NAMES[1:]), 0.0))
"""The same without pixels."""


def similarity(one: str, two: str) -> float:
    """Ratcliff and Obershelp's ratio of two texts."""
    if one == two:
        return 1.0
    matcher = SequenceMatcher(None, one, two, autojunk=False)
    # An upper bound that costs little: most pairs of a page have nothing in common.
    return matcher.ratio() if matcher.quick_ratio() >= LEAST else 0.0


def matches(seen: Sequence[Block], wanted: Sequence[Block]) -> list[tuple[Block, Block, float]]:
    """Texts that belong together, with their similarity. Of equal texts those at equal places."""
    if not seen or not wanted:
        return []
    # Here, for it takes a second, and environments are imported where no page is scored.
    from scipy.optimize import linear_sum_assignment

    alike = np.array([[similarity(a.text, b.text) for b in wanted] for a in seen])
    # Less than any difference in words, so that it decides among equals alone.
    where = lambda blocks: np.array([[b.box[0] + b.box[2] / 2, b.box[1] + b.box[3] / 2] for b in blocks])
    apart = np.abs(where(seen)[:, None] - where(wanted)[None]).sum(-1)
    rows, columns = linear_sum_assignment(apart / (1e3 * max(1.0, apart.max())) - alike)
    pairs = [(seen[i], wanted[j], float(alike[i, j])) for i, j in zip(rows, columns)]
    return [pair for pair in pairs if pair[2] >= LEAST]


def score(seen: View, wanted: View, clip: Clip | None = None) -> Score:
    """How alike `seen` looks to `wanted`; the pixels only where both have them. clip: (picture, picture) ->
    [0, 1], one more term."""
    if empty(seen):
        return NOTHING if seen.picture and wanted.picture else UNSEEN
    pairs = matches(seen.blocks, wanted.blocks)
    area = lambda block: block.box[2] * block.box[3]
    whole = sum(map(area, (*seen.blocks, *wanted.blocks)))
    size = np.maximum(seen.size, wanted.size).astype(float)
    characters = sum(len(block.text) for block in (*seen.blocks, *wanted.blocks))

    # Every term is of both pages: what has no partner counts 0.
    count = max(len(seen.blocks), len(wanted.blocks), 1)
    places = [1 - float(np.max(np.abs(centre(a) - centre(b)) / size)) for a, b, _ in pairs]
    terms = {
        "area": sum(area(a) + area(b) for a, b, _ in pairs) / whole if whole else 1.0,
        "text": sum(r * (len(a.text) + len(b.text)) for a, b, r in pairs) / characters if characters else 1.0,
        "position": sum(places) / count if characters else 1.0,
        "colour": sum(colours_alike([a for a, _, _ in pairs], [b for _, b, _ in pairs])) / count
        if characters
        else 1.0,
    }
    if seen.picture is not None and wanted.picture is not None:
        terms = {"pixels": close_pixels(seen.picture, wanted.picture)} | terms
        if clip is not None:
            terms["clip"] = clip(seen.picture, wanted.picture)
    else:
        near = [max(abs(x - y) for x, y in zip(a.ground, b.ground)) < CLOSE for a, b, _ in pairs]
        terms |= {"ground": sum(near) / count if characters else 1.0}
    return Score(terms)


def empty(view: View) -> bool:
    """Whether there is nothing on a page: no text, and one colour."""
    if view.blocks:
        return False
    return view.picture is None or len(view.picture.getcolors(2) or "two") == 1


def centre(block: Block) -> np.ndarray:
    """Middle of a text in pixels."""
    left, top, width, height = block.box
    return np.array([left + width / 2, top + height / 2])


def colours_alike(seen: Sequence[Block], wanted: Sequence[Block]) -> list[float]:
    """1 - CIEDE2000 / 100 of the colours of texts, pair by pair."""
    if not seen:
        return []
    try:
        from skimage.color import deltaE_ciede2000, rgb2lab
    except ImportError:
        raise UserError("scores of pages need scikit-image: pip install 'earlyfusion[website]'") from None
    lab = lambda blocks: rgb2lab(np.array([[block.colour for block in blocks]], dtype=np.uint8))
    apart = deltaE_ciede2000(lab(seen), lab(wanted))[0]
    return [max(0.0, 1 - float(one) / 100) for one in apart]


def close_pixels(one: Image.Image, two: Image.Image) -> float:
    """Share of the pixels of the larger extent that differ by less than CLOSE in every channel."""
    width, height = min(one.width, two.width), min(one.height, two.height)
    cut = lambda picture: np.asarray(picture.convert("RGB").crop((0, 0, width, height)), dtype=np.int16)
    close = (np.abs(cut(one) - cut(two)).max(-1) < CLOSE).sum()
    return float(close) / (max(one.width, two.width) * max(one.height, two.height))


def difference(one: Image.Image, two: Image.Image) -> Image.Image:
    """A picture of where two pages differ, black where they agree; of the larger extent, grey where one of
    them has no pixel."""
    width, height = max(one.width, two.width), max(one.height, two.height)
    made = Image.new("RGB", (width, height), (128, 128, 128))
    common = min(one.width, two.width), min(one.height, two.height)
    cut = lambda picture: np.asarray(picture.convert("RGB").crop((0, 0, *common)), dtype=np.int16)
    made.paste(Image.fromarray(np.abs(cut(one) - cut(two)).astype(np.uint8)), (0, 0))
    return made


def changed(before: View, after: View) -> set[str]:
    """Texts that came or went."""
    return {b.text for b in before.blocks} ^ {b.text for b in after.blocks}


def interaction(seen: Sequence[View], wanted: Sequence[View]) -> float:
    """Both pages at first and after every action. Raises ValueError for none."""
    if len(seen) != len(wanted) or len(wanted) < 2:
        raise ValueError(f"{len(seen)} and {len(wanted)} views; expected as many of both, and at least two")
    functions, looks = [], []
    for number in range(1, len(wanted)):
        expected = changed(wanted[number - 1], wanted[number])
        got = changed(seen[number - 1], seen[number])
        # An action that changes no text is judged by its looks alone.
        if expected:
            functions.append(len(expected & got) / len(expected | got))
        looks.append(score(seen[number], wanted[number]).mean)
    visual = sum(looks) / len(looks)
    return 0.7 * sum(functions) / len(functions) + 0.3 * visual if functions else visual
