"""Rewards of free text against a gold answer. Every function takes any text and returns a number in [0, 1].

    counting      max(0, 1 - |n - gold| / max(gold, 1)); exactly one whole number must be said, as digits or
                  as a word
    value         the same for numbers with a fraction (chart values: relative error)
    number        1 for the number itself, 0 for any other
    words         1 for the words themselves without case, article and closing punctuation (text.py)
    reading       1 - Levenshtein distance / longer length, blanks squeezed
    boxes         F1 with soft matches: 2 * sum of IoU over the best matching / (boxes said + boxes in gold)
    points        the same with exp(-d^2 / 2 sigma^2), sigma relative to the object
    polygon       IoU of two masks, a pixel being inside when its centre is (even-odd rule)

What was asked ends the answer. Behind a number, a place or a list of places only closing punctuation may
stand, behind a number also words of the question ("3 red circles."): "row 1, column 2wsslonment for" says the
right place and is no answer. A scorer that read the beginning alone would pay a policy for not ending its
answers.

Degenerate cases. Nothing said, or nothing that can be read: 0. No object in gold: 1 for saying so ("none",
"[]"), 0 for anything else, silence included. Saying several different numbers, or more boxes than MAX_ITEMS,
is no answer: 0. Numbers that are no numbers (nan, inf) or beyond ten times the picture match nothing. Forms:
Kimi K2.5 report, section 4.4.2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from earlyfusion.data.formats.grounding import parse_regions
from earlyfusion.data.tasks.scoring.answers import normal_number
from earlyfusion.data.tasks.scoring.boxes import Box, best_assignment, centre, matched_f1, parse_boxes, tame
from earlyfusion.data.tasks.scoring.text import levenshtein, normalise, parse_count

Point = tuple[float, float]
MAX_CHARS = 4096
"""Longest final answer that is read; a longer one earns nothing."""
MAX_ITEMS = 64
"""Most boxes, points or corners that are scored."""
_REACH = 10.0
_NONE = {"none", "nothing", "[]", "no objects", "there are none", "there is none", "no object", "no"}
_ANNOUNCED = re.compile(r"(?:final answer|answer)(?: is)?\s?[:=]|\banswer is\b", re.IGNORECASE)
_BOXED = "\\boxed{"
_WORD = re.compile(r"-?\d[\d,]*(?:\.\d+)?|[a-z]+", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_CLOSING = " \n\t.,;:!?\"'`*$)]}>"
"""What may follow the last word of an answer."""
_LABEL = re.compile(r',? ?"\w+" ?: ?"[^"]*"')
"""A field of words in the JSON form of places, wherever it stands."""
_PAIR = re.compile(r"[\[(] ?([-+]?[\d.]{1,12}) ?[, ] ?([-+]?[\d.]{1,12}) ?[\])]")


def final_answer(text: str) -> str:
    """What a response gives as its answer: the part after its thinking and after "answer:", the inside of the
    last \\boxed{}, or all of it. "" for thinking that never ends and for an answer of more than MAX_CHARS
    characters."""
    if not isinstance(text, str):
        return ""
    _, closed, tail = text.rpartition("</think>")
    if not closed and "<think>" in text:
        return ""
    text = tail if closed else text
    if (start := text.rfind(_BOXED)) >= 0:
        inside = text[start + len(_BOXED) :]
        text = _balanced(inside)
        if re.search(
            r"\w", inside[len(text) + 1 :]
        ):  # what follows the box is no part of an answer that has ended
            return ""
    else:
        end = 0
        for match in _ANNOUNCED.finditer(text):
            end = match.end()
        text = text[end:]
    text = text.strip()
    return text if len(text) <= MAX_CHARS else ""


def _balanced(text: str) -> str:
    """Up to the brace that closes one opened before; "" when none does."""
    depth = 1
    for place, character in enumerate(text[: MAX_CHARS + 1]):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:place]
    return ""


def ends(said: str, question: str = "", spelled: bool = False) -> bool:
    """Whether an answer ends with its last number: what follows is punctuation, or words of the question.
    spelled: a number may also be a word."""
    asked = set(re.findall(r"\w+", question.lower()))
    for word in reversed(re.findall(r"\w+", said.lower())):
        if word[-1].isdigit() or (spelled and parse_count(word) is not None):
            return True
        if word not in asked:
            return False
    return False


def ends_with_places(said: str) -> bool:
    """Whether a list of numbers, or of numbers in brackets, ends the answer."""
    bare = _LABEL.sub("", said)
    kept = bare.rstrip(_CLOSING)
    return kept[-1:].isdigit() and (
        any(c in bare[len(kept) :] for c in ")]>") or not any(c in bare for c in ")]>")
    )


def sole_count(said: str) -> int | None:
    """The one whole number that is said, however often; None for none, several, or a fraction."""
    found = {parse_count(word.replace(",", "")) for word in _WORD.findall(tame(said)) if not word.isalpha()}
    found |= {
        value
        for word in _WORD.findall(tame(said))
        if word.isalpha() and (value := parse_count(word)) is not None
    }
    return next(iter(found)) if len(found) == 1 else None


def counting(said: str, gold: int, question: str = "") -> float:
    """See the file's head."""
    number = sole_count(said) if ends(said, question, spelled=True) else None
    return 0.0 if number is None else max(0.0, 1.0 - abs(number - gold) / max(abs(gold), 1))


def sole_number(said: str) -> Decimal | None:
    """The one number that is said, after the last "="; None for none or several different ones."""
    found = {normal_number(text) for text in _NUMBER.findall(tame(said).rpartition("=")[2])}
    values = {Decimal(text) for text in found if text is not None}
    return next(iter(values)) if len(values) == 1 and None not in found else None


def number(said: str, gold: int | float | str, question: str = "") -> float:
    """See the file's head; gold as a number or as its text."""
    value = sole_number(said)
    return float(value is not None and value == Decimal(str(gold)) and ends(said, question))


def value(said: str, gold: float, question: str = "") -> float:
    """See the file's head."""
    found = sole_number(said) if ends(said, question) else None
    return 0.0 if found is None else max(0.0, 1.0 - abs(float(found) - gold) / max(abs(gold), 1.0))


def words(said: str, gold: str) -> float:
    """See the file's head."""
    return float(normalise(said) == normalise(gold))


def reading(said: str, gold: str) -> float:
    """See the file's head; 1 - lev/max(len), case counts. Both empty: 1, which a reward never sees (no answer
    is 0)."""
    said, gold = " ".join(said.split()), " ".join(gold.split())
    longer = max(len(said), len(gold))
    return 1.0 - levenshtein(said, gold) / longer if longer else 1.0


def says_none(said: str) -> bool:
    """Whether an answer says that there is nothing."""
    return normalise(said) in _NONE


def _within_reach(numbers: Sequence[float], width: float, height: float) -> bool:
    limit = _REACH * max(width, height)
    return all(math.isfinite(x) and abs(x) <= limit for x in numbers)


def boxes(said: str, gold: Sequence[Box], width: float, height: float, units: str = "auto") -> float:
    """See the file's head; gold in pixels, `units` as in data/tasks/scoring/boxes.parse_boxes."""
    found = parse_boxes(tame(said), width, height, units)
    if not gold:
        return float(not found and says_none(said))
    if not found or len(found) > MAX_ITEMS or not ends_with_places(said):
        return 0.0
    nowhere: Box = (0.0, 0.0, 0.0, 0.0)  # matches nothing, and is still one box said
    return matched_f1([box if _within_reach(box, width, height) else nowhere for box in found], gold)


def parse_points(said: str, width: float, height: float, units: str = "pixels") -> list[Point]:
    """All points in pixels: the regions of data/formats/grounding.py, else pairs "[x, y]" and the centres of
    boxes.

    units: "pixels", or "relative" for pairs that are shares of the sides.
    """
    text = tame(said)
    size = max(1, round(width)), max(1, round(height))
    regions = [region.to_region(size, size) for region in parse_regions(text)]
    if regions:
        return [region.point if region.point is not None else centre(region.box) for region in regions]  # type: ignore[arg-type]
    x, y = (width, height) if units == "relative" else (1.0, 1.0)
    points = [(pair[0] * x, pair[1] * y) for pair in _pairs(text)]
    # two points in a row would be read as the corners of one box, so pairs are taken out first
    return points + [centre(box) for box in parse_boxes(_PAIR.sub(";", text), width, height, units)]


def _pairs(text: str) -> list[Point]:
    found = []
    for left, right in _PAIR.findall(text):
        try:
            found.append((float(left), float(right)))
        except ValueError:  # "1.2.3"
            continue
    return found


def points(
    said: str,
    gold: Sequence[Point],
    sigmas: Sequence[float],
    width: float,
    height: float,
    units: str = "pixels",
) -> float:
    """See the file's head: 2 * sum of weights over the best matching / (points said + points in gold).

    sigmas: one for every gold point, in pixels.
    """
    found = parse_points(said, width, height, units)
    if not gold:
        return float(not found and says_none(said))
    if not found or len(found) > MAX_ITEMS or not ends_with_places(said):
        return 0.0
    table = [
        [_weight(point, target, sigma, width, height) for point in found]
        for target, sigma in zip(gold, sigmas)
    ]
    if len(table) > len(found):
        table = [list(column) for column in zip(*table)]
    return 2 * best_assignment(table) / (len(found) + len(gold))


def _weight(point: Point, target: Point, sigma: float, width: float, height: float) -> float:
    if not _within_reach(point, width, height):
        return 0.0
    squared = (point[0] - target[0]) ** 2 + (point[1] - target[1]) ** 2
    return math.exp(-squared / (2 * sigma * sigma))


def mask(polygon: Sequence[Point], width: int, height: int) -> NDArray[np.bool_]:
    """bool [height, width]: pixels whose centre lies in the polygon (even-odd rule). Fewer than 3 corners:
    nothing."""
    inside = np.zeros((height, width), bool)
    if len(polygon) < 3:
        return inside
    x, y = np.arange(width)[None, :] + 0.5, np.arange(height)[:, None] + 0.5
    for (x0, y0), (x1, y1) in zip(polygon, [*polygon[1:], polygon[0]]):
        if y0 == y1:
            continue
        crosses = (y0 <= y) != (y1 <= y)
        inside ^= crosses & (x < x0 + (y - y0) * ((x1 - x0) / (y1 - y0)))
    return inside


def mask_iou(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> float:
    """Intersection over union of two masks; 0 when both are empty."""
    union = int((a | b).sum())
    return int((a & b).sum()) / union if union else 0.0


def polygon(said: str, gold: Sequence[Point], width: int, height: int) -> float:
    """See the file's head. Said: corners "[x, y]" in order, or one flat list of numbers."""
    text = tame(said)
    corners = _pairs(text)
    if not corners:
        numbers = [float(part) for part in re.findall(r"-?\d+(?:\.\d+)?", text)]
        corners = list(zip(numbers[::2], numbers[1::2])) if len(numbers) % 2 == 0 else []
    if not ends_with_places(said):
        return 0.0
    if not 3 <= len(corners) <= MAX_ITEMS or not all(
        _within_reach(point, width, height) for point in corners
    ):
        return 0.0
    return mask_iou(mask(corners, width, height), mask(gold, width, height))
