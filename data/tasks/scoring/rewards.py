"""Rewards of free text against a gold answer. Every function takes any text and returns a number in [0, 1].

    counting      max(0, 1 - |n - gold| / max(gold, 1)); exactly one whole number must be said, as digits or
                  as a word
    value         the same for numbers with a fraction (chart values: relative error)
    number        1 for the number itself, 0 for any other
    words         1 for the words themselves without case, article and closing punctuation (text.py)
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
from collections.abc import Callable, Sequence
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from earlyfusion.data.tasks.scoring.answers import normal_number
from earlyfusion.data.tasks.scoring.boxes import Box, centre, iou, parse_boxes
from earlyfusion.data.tasks.scoring.text import normalise, parse_count, tame

Point = tuple[float, float]
MAX_CHARS = 4096
"""Longest final answer that is read; a longer one earns nothing."""
MAX_ITEMS = 64
"""Most boxes, points or corners that are scored."""
# In sides of the picture: beyond it numbers only harm the arithmetic.
_REACH = 10.0
# What may be said where there is nothing to find.
_NONE = {"none", "nothing", "[]", "no objects", "there are none", "there is none", "no object", "no"}
_ANNOUNCED = re.compile(r"(?:final answer|answer)(?: is)?\s?[:=]|\banswer is\b", re.IGNORECASE)
_BOXED = "\\boxed{"
# Numbers with their fraction as one word: the 3 of 3.5 is no count.
_WORD = re.compile(r"-?\d[\d,]*(?:\.\d+)?|[a-z]+", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_CLOSING = " \n\t.,;:!?\"'`*$)]}>"
"""What may follow the last word of an answer."""
_LABEL = re.compile(r',? ?"\w+" ?: ?"[^"]*"')
"""A field of words in the JSON form of places, wherever it stands."""
_N = r"([-+]?(?:\d+\.?\d*|\.\d+))"
_PAIR = re.compile(rf"[\[(] ?{_N} ?[, ] ?{_N} ?[\])]")
_SHARES = re.compile(rf'"point01" ?: ?\[ ?{_N} ?, ?{_N} ?\]')
"""A point as training writes it, in shares of the sides."""


def final_answer(text: str) -> str:
    """What a response gives as its answer: the part after its thinking and after "answer:", the inside of the
    last \\boxed{}, or all of it. "" for thinking that never ends and for an answer of more than MAX_CHARS
    characters."""
    if not isinstance(text, str):
        return ""
    _, closed, answer = text.rpartition("</think>")
    # Cut off while thinking: what stands there last is no answer.
    if not closed and "<think>" in text:
        return ""

    _, boxed, inside = answer.rpartition(_BOXED)
    if boxed:
        answer = _balanced(inside)
        if re.search(r"\w", inside[len(answer) + 1 :]):  # what goes on behind its box has not ended
            return ""
    else:
        answer = _ANNOUNCED.split(answer)[-1]
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
    # "3 red circles" ends with what was asked for.
    asked = set(re.findall(r"\w+", question.lower()))
    for word in reversed(re.findall(r"\w+", answer.lower())):
        if word[-1].isdigit() or (spelled and parse_count(word) is not None):
            return True
        if word not in asked:
            return False
    return False


def integers(answer: str) -> list[int]:
    """The whole numbers of an answer that ends with one; else none."""
    return [int(part) for part in re.findall(r"\d+", tame(answer))] if ends(answer) else []


# Numbers.


def sole_number(answer: str) -> Decimal | None:
    """The one number that is said, after the last "="; None for none or several different ones."""
    # "3 + 4 = 7" says 7, not three numbers.
    found = {normal_number(text) for text in _NUMBER.findall(tame(answer).rpartition("=")[2])}
    only = found.pop() if len(found) == 1 else None
    return None if only is None else Decimal(only)


def counting(answer: str, gold: int, question: str = "") -> float:
    """See the file's head."""
    found = set()
    for word in _WORD.findall(tame(answer)):
        count = parse_count(word.replace(",", ""))
        if count is not None or not word.isalpha():  # a fraction counts as a number that is none
            found.add(count)
    if len(found) != 1 or not ends(answer, question, spelled=True):
        return 0.0
    return _closeness(found.pop(), gold)


def value(answer: str, gold: float, question: str = "") -> float:
    """See the file's head."""
    return _closeness(sole_number(answer), gold) if ends(answer, question) else 0.0


def _closeness(said: Decimal | int | None, gold: float) -> float:
    return 0.0 if said is None else max(0.0, 1.0 - abs(float(said) - gold) / max(abs(gold), 1.0))


def number(answer: str, gold: int | float | str, question: str = "") -> float:
    """See the file's head; gold as a number or as its text."""
    return float(sole_number(answer) == Decimal(str(gold)) and ends(answer, question))


def words(answer: str, gold: str, question: str = "") -> float:
    """See the file's head."""
    return float(normalise(answer) == normalise(gold))


# Places.


def _near(place: Sequence[float], size: Point) -> bool:
    return max(map(abs, place)) <= _REACH * max(size)


def _readable(answer: str, count: int) -> bool:
    """Whether `count` places said are an answer at all: some, not too many, and nothing behind them."""
    # Labels are words of the form, not of the answer.
    bare = _LABEL.sub("", answer)
    kept = bare.rstrip(_CLOSING)
    # A list whose last bracket never came goes on.
    brackets = set(")]>")
    closed = brackets.isdisjoint(kept) or not brackets.isdisjoint(bare[len(kept) :])
    return 0 < count <= MAX_ITEMS and kept[-1:].isdigit() and closed


def _matched(
    answer: str, said: Sequence, gold: Sequence, size: Point, weight: Callable[[int, int], float]
) -> float:
    """F1 with soft matches over the best one-to-one matching; weight(i, j) of gold i and said j."""
    from scipy.optimize import linear_sum_assignment  # slow to import, and only these rewards need it

    if not gold:
        return float(not said and normalise(answer) in _NONE)
    if not _readable(answer, len(said)):
        return 0.0
    # What is out of reach matches nothing and is one place said all the same.
    table = np.zeros((len(gold), len(said)))
    for i, j in np.ndindex(table.shape):
        if _near(said[j], size):
            table[i, j] = weight(i, j)
    return 2 * float(table[linear_sum_assignment(table, maximize=True)].sum()) / sum(table.shape)


def boxes(answer: str, gold: Sequence[Box], size: Point, units: str = "pixels") -> float:
    """See the file's head; gold in pixels, `units` as in boxes.parse_boxes, size: (width, height)."""
    said = parse_boxes(answer, *size, units)
    return _matched(answer, said, gold, size, lambda i, j: iou(gold[i], said[j]))


def points(answer: str, gold: Sequence[Point], sigmas: Sequence[float], size: Point) -> float:
    """See the file's head. Said: points as training writes them, else pairs "[x, y]"; and the centres of
    boxes. sigmas: one for every gold point, in pixels."""
    text = tame(answer)
    said = [(float(x) * size[0], float(y) * size[1]) for x, y in _SHARES.findall(text)] or pairs(text)
    # Two points in a row would be read as the corners of one box, so pairs are taken out first.
    said += map(centre, parse_boxes(_PAIR.sub(";", text), *size))

    def weight(i: int, j: int) -> float:
        return math.exp(-(math.dist(gold[i], said[j]) ** 2) / (2 * sigmas[i] ** 2))

    return _matched(answer, said, gold, size, weight)


def pairs(text: str) -> list[Point]:
    """Every "[x, y]" or "(x y)" of a tame text."""
    return [(float(x), float(y)) for x, y in _PAIR.findall(text)]


def polygon(answer: str, gold: Sequence[Point], size: tuple[int, int]) -> float:
    """See the file's head. Said: corners "[x, y]" in order, or one flat list of numbers."""
    text = tame(answer)
    corners = pairs(text)
    # Corners without brackets: x and y in turn.
    numbers = [float(part) for part in re.findall(r"-?\d+(?:\.\d+)?", text)]
    if not corners and len(numbers) % 2 == 0:
        corners = list(zip(numbers[::2], numbers[1::2]))
    if len(corners) < 3 or not _readable(answer, len(corners)):
        return 0.0
    if not all(_near(point, size) for point in corners):
        return 0.0
    return mask_iou(mask(corners, *size), mask(gold, *size))


def mask(polygon: Sequence[Point], width: int, height: int) -> NDArray[np.bool_]:
    """bool [height, width]: pixels whose centre lies in the polygon (even-odd rule)."""
    inside = np.zeros((height, width), bool)
    x, y = np.arange(width)[None, :] + 0.5, np.arange(height)[:, None] + 0.5
    for (x0, y0), (x1, y1) in zip(polygon, [*polygon[1:], polygon[0]]):
        # A level edge is crossed by no ray to the right.
        if y0 != y1:
            inside ^= ((y0 <= y) != (y1 <= y)) & (x < x0 + (y - y0) * ((x1 - x0) / (y1 - y0)))
    return inside


def mask_iou(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> float:
    """Intersection over union of two masks; 0 when both are empty."""
    return int((a & b).sum()) / max(1, int((a | b).sum()))
