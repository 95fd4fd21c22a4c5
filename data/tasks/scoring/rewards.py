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
from typing import Any

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

    answer = tail if closed else text
    _, boxed, inside = answer.rpartition(_BOXED)
    if boxed:
        answer = _balanced(inside)
        if re.search(r"\w", inside[len(answer) + 1 :]):  # what goes on behind its box has not ended
            return ""
    else:
        announced = list(_ANNOUNCED.finditer(answer))
        answer = answer[announced[-1].end() :] if announced else answer
    answer = answer.strip()
    return answer if len(answer) <= MAX_CHARS else ""


def _balanced(text: str) -> str:
    """Up to the brace that closes one opened before; "" when none does."""
    depth = 1
    for position, character in enumerate(text[: MAX_CHARS + 1]):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:position]
    return ""


def ends(answer: str, question: str = "", spelled: bool = False) -> bool:
    """Whether an answer ends with its last number: what follows is punctuation, or words of the question.
    spelled: a number may also be a word."""
    asked = set(re.findall(r"\w+", question.lower()))
    for word in reversed(re.findall(r"\w+", answer.lower())):
        if word[-1].isdigit() or (spelled and parse_count(word) is not None):
            return True
        if word not in asked:
            return False
    return False


def ends_with_places(answer: str) -> bool:
    """Whether a list of numbers, or of numbers in brackets, ends the answer."""
    bare = _LABEL.sub("", answer)
    kept = bare.rstrip(_CLOSING)
    bracketed = any(c in bare for c in ")]>")
    closed = any(c in bare[len(kept) :] for c in ")]>")
    return kept[-1:].isdigit() and (closed or not bracketed)


def sole_count(answer: str) -> int | None:
    """The one whole number that is said, however often; None for none, several, or a fraction."""
    found = set()
    for word in _WORD.findall(tame(answer)):
        value = parse_count(word.replace(",", ""))
        if value is not None or not word.isalpha():  # a fraction counts as a number that is none
            found.add(value)
    return found.pop() if len(found) == 1 else None


def counting(answer: str, gold: int, question: str = "") -> float:
    """See the file's head."""
    count = sole_count(answer) if ends(answer, question, spelled=True) else None
    return 0.0 if count is None else max(0.0, 1.0 - abs(count - gold) / max(abs(gold), 1))


def sole_number(answer: str) -> Decimal | None:
    """The one number that is said, after the last "="; None for none or several different ones."""
    found = {normal_number(text) for text in _NUMBER.findall(tame(answer).rpartition("=")[2])}
    if None in found:
        return None
    values = {Decimal(text) for text in found if text is not None}
    return values.pop() if len(values) == 1 else None


def number(answer: str, gold: int | float | str, question: str = "") -> float:
    """See the file's head; gold as a number or as its text."""
    found = sole_number(answer)
    return float(found is not None and found == Decimal(str(gold)) and ends(answer, question))


def value(answer: str, gold: float, question: str = "") -> float:
    """See the file's head."""
    found = sole_number(answer) if ends(answer, question) else None
    return 0.0 if found is None else max(0.0, 1.0 - abs(float(found) - gold) / max(abs(gold), 1.0))


def words(answer: str, gold: str) -> float:
    """See the file's head."""
    return float(normalise(answer) == normalise(gold))


def reading(answer: str, gold: str) -> float:
    """See the file's head; 1 - lev/max(len), case counts. Both empty: 1, which a reward never sees (no answer
    is 0)."""
    answer, gold = " ".join(answer.split()), " ".join(gold.split())
    longer = max(len(answer), len(gold))
    return 1.0 - levenshtein(answer, gold) / longer if longer else 1.0


def says_none(answer: str) -> bool:
    """Whether an answer says that there is nothing."""
    return normalise(answer) in _NONE


def _within_reach(numbers: Sequence[float], width: float, height: float) -> bool:
    limit = _REACH * max(width, height)
    return all(math.isfinite(x) and abs(x) <= limit for x in numbers)


def _readable(answer: str, places: Sequence[Any]) -> bool:
    """Whether the places said are an answer at all: some, not too many, and nothing behind them."""
    return 0 < len(places) <= MAX_ITEMS and ends_with_places(answer)


def boxes(answer: str, gold: Sequence[Box], width: float, height: float, units: str = "auto") -> float:
    """See the file's head; gold in pixels, `units` as in boxes.parse_boxes."""
    found = parse_boxes(tame(answer), width, height, units)
    if not gold:
        return float(not found and says_none(answer))
    if not _readable(answer, found):
        return 0.0
    nowhere: Box = (0.0, 0.0, 0.0, 0.0)  # matches nothing, and is still one box said
    return matched_f1([box if _within_reach(box, width, height) else nowhere for box in found], gold)


def parse_points(answer: str, width: float, height: float) -> list[Point]:
    """All points in pixels: the regions of data/formats/grounding.py, else pairs "[x, y]" and the centres of
    boxes."""
    text = tame(answer)
    size = max(1, round(width)), max(1, round(height))
    regions = [region.to_region(size, size) for region in parse_regions(text)]
    if regions:
        return [r.point if r.point is not None else centre(r.box) for r in regions]  # type: ignore[arg-type]
    # two points in a row would be read as the corners of one box, so pairs are taken out first
    return _pairs(text) + [centre(box) for box in parse_boxes(_PAIR.sub(";", text), width, height, "pixels")]


def _pairs(text: str) -> list[Point]:
    found = []
    for left, right in _PAIR.findall(text):
        try:
            found.append((float(left), float(right)))
        except ValueError:  # "1.2.3"
            continue
    return found


def points(answer: str, gold: Sequence[Point], sigmas: Sequence[float], width: float, height: float) -> float:
    """See the file's head: 2 * sum of weights over the best matching / (points said + points in gold).

    sigmas: one for every gold point, in pixels.
    """
    found = parse_points(answer, width, height)
    if not gold:
        return float(not found and says_none(answer))
    if not _readable(answer, found):
        return 0.0
    table = []
    for target, sigma in zip(gold, sigmas):
        table.append([_weight(point, target, sigma, width, height) for point in found])
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


def polygon(answer: str, gold: Sequence[Point], width: int, height: int) -> float:
    """See the file's head. Said: corners "[x, y]" in order, or one flat list of numbers."""
    text = tame(answer)
    corners = _pairs(text)
    if not corners:
        numbers = [float(part) for part in re.findall(r"-?\d+(?:\.\d+)?", text)]
        corners = list(zip(numbers[::2], numbers[1::2])) if len(numbers) % 2 == 0 else []
    far = not all(_within_reach(point, width, height) for point in corners)
    if far or len(corners) < 3 or not _readable(answer, corners):
        return 0.0
    return mask_iou(mask(corners, width, height), mask(gold, width, height))
