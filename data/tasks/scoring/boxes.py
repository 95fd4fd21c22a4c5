"""Boxes and points in answers: reading the public forms, intersection over union, matching, pointing.

Forms that `parse_boxes` reads (x from the left, y from the top; right and bottom are outside):
    [12, 30, 40, 58]      four numbers in brackets or parentheses, also "x1=12 y1=30 x2=40 y2=58" and JSON
                          "bbox_2d"
    (12,30),(40,58)       two corners, as Qwen-VL writes them
    {"label": ..., "box": [...], "box01": [...]}   data/formats/grounding.py, as Kimi K3: box01 (shares of the
                                                   sides) is read if there
    <loc0123>...          four PaliGemma location tokens, order y0 x0 y1 x1, in 1/1024 of the sides
Units are never guessed from the size of the numbers unless asked: `units` is "pixels", "relative" (0..1),
"thousand" (0..1000) or "auto": relative when every number is at most 1 and one has a decimal point, else
pixels.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

Box = tuple[float, float, float, float]
UNITS = ("auto", "pixels", "relative", "thousand")
IOU_THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)

_NUMBER = r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?"
_FOUR = re.compile(
    rf"[\[\(]\s*({_NUMBER})\s*[,\s]\s*({_NUMBER})\s*[,\s]\s*({_NUMBER})\s*[,\s]\s*({_NUMBER})\s*[\]\)]"
)
_CORNERS = re.compile(
    rf"[\(\[]\s*({_NUMBER})\s*,\s*({_NUMBER})\s*[\)\]]\s*,?\s*[\(\[]\s*({_NUMBER})\s*,\s*({_NUMBER})\s*[\)\]]"
)
_NAMED = re.compile(
    rf"x_?(?:1|0|min)\W+({_NUMBER})\W+y_?(?:1|0|min)\W+({_NUMBER})\W+"
    rf"x_?(?:2|1|max)\W+({_NUMBER})\W+y_?(?:2|1|max)\W+({_NUMBER})",
    re.IGNORECASE,
)
_LOCATION = re.compile(r"<loc(\d{4})><loc(\d{4})><loc(\d{4})><loc(\d{4})>")
_SHARES = re.compile(
    rf'"box01"\s*:\s*\[\s*({_NUMBER})\s*,\s*({_NUMBER})\s*,\s*({_NUMBER})\s*,\s*({_NUMBER})\s*\]'
)


_DIGITS, _DECIMALS = re.compile(r"\d{13,}"), re.compile(r"(\.\d{6})\d+")


def tame(text: str) -> str:
    """Runs of blanks become one blank, decimals after the sixth go, and runs of more than 12 digits become an
    x, so that no expression of ours backtracks for long over a hostile text."""
    return _DIGITS.sub("x", _DECIMALS.sub(r"\1", " ".join(text.split())))


def parse_boxes(text: str, width: float, height: float, units: str = "auto") -> list[Box]:
    """All boxes of a text in pixels of a width x height picture, in reading order, corners put in order.

    Boxes that are no numbers (nan, infinity) are left out; boxes outside the picture stay as they are. Raises
    ValueError for unknown units.
    """
    if units not in UNITS:
        raise ValueError(f"units {units!r}; known: {', '.join(UNITS)}")
    text = tame(text)
    shares = [_to_pixels(match.groups(), width, height, "relative") for match in _SHARES.finditer(text)]
    if shares:
        return [box for box in shares if all(map(math.isfinite, box))]

    # Each form in turn, on what an earlier one has not taken.
    found: list[tuple[int, Box]] = []
    taken: list[tuple[int, int]] = []
    for pattern in (_FOUR, _CORNERS, _NAMED):
        for match in pattern.finditer(text):
            if any(a < match.end() and match.start() < b for a, b in taken):
                continue
            taken.append(match.span())
            written = match.groups()
            found.append((match.start(), _to_pixels(written, width, height, units)))

    for match in _LOCATION.finditer(text):
        y0, x0, y1, x1 = (int(part) / 1024 for part in match.groups())
        found.append((match.start(), _ordered((x0 * width, y0 * height, x1 * width, y1 * height))))
    return [box for _, box in sorted(found, key=lambda entry: entry[0]) if all(map(math.isfinite, box))]


def _to_pixels(written: Sequence[str], width: float, height: float, units: str) -> Box:
    numbers = [float(part) for part in written]
    if units == "auto":
        fractions = all(0 <= value <= 1 for value in numbers) and any("." in part for part in written)
        units = "relative" if fractions else "pixels"
    x, y = 1.0, 1.0
    if units == "relative":
        x, y = width, height
    elif units == "thousand":
        x, y = width / 1000, height / 1000
    return _ordered((numbers[0] * x, numbers[1] * y, numbers[2] * x, numbers[3] * y))


def _ordered(box: Box) -> Box:
    return min(box[0], box[2]), min(box[1], box[3]), max(box[0], box[2]), max(box[1], box[3])


def area(box: Box) -> float:
    """Width times height, 0 for a box turned inside out."""
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def centre(box: Box) -> tuple[float, float]:
    """The middle of a box."""
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def iou(a: Box, b: Box) -> float:
    """Intersection over union; 0 when both are empty."""
    shared = area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))
    union = area(a) + area(b) - shared
    return shared / union if union > 0 else 0.0


def inside(point: tuple[float, float], box: Box) -> bool:
    """Whether a point lies in the box (left and top belong to it, right and bottom do not)."""
    return box[0] <= point[0] < box[2] and box[1] <= point[1] < box[3]


def grounding_scores(said: Box | None, gold: Box) -> dict[str, float]:
    """iou, acc@0.1 ... acc@0.9 and centre_in_box of one answer; all 0 for None (no box was said)."""
    overlap = iou(said, gold) if said is not None else 0.0
    scores = {"iou": overlap, **{f"acc@{t}": float(overlap >= t) for t in IOU_THRESHOLDS}}
    return {**scores, "centre_in_box": float(said is not None and inside(centre(said), gold))}


def matched_f1(said: Sequence[Box], gold: Sequence[Box]) -> float:
    """F1 with soft matches: 2 * sum of IoU over the best one-to-one matching / (boxes said + boxes in gold).

    1.0 when both are empty. Exact matching by dynamic programming over subsets up to 12 boxes on the smaller
    side, SciPy's assignment above that. The grounding reward of the Kimi K2.5 report (section 4.4.2),
    softened by IoU.
    """
    if not said and not gold:
        return 1.0
    if not said or not gold:
        return 0.0
    few, many = sorted((list(said), list(gold)), key=len)
    table = [[iou(a, b) for b in many] for a in few]
    return 2 * best_assignment(table) / (len(said) + len(gold))


def best_assignment(table: list[list[float]]) -> float:
    """Largest sum with one entry from every row and at most one from every column (rows <= columns)."""
    if len(table) > 12:
        from scipy.optimize import linear_sum_assignment

        rows, columns = linear_sum_assignment(table, maximize=True)
        return float(sum(table[r][c] for r, c in zip(rows, columns)))
    best = {0: 0.0}  # set of rows already placed -> sum, after some columns
    for column in range(len(table[0])):
        grown = dict(best)
        for (done, total), row in itertools.product(best.items(), range(len(table))):
            if not done >> row & 1:
                key, value = done | 1 << row, total + table[row][column]
                grown[key] = max(grown.get(key, -1.0), value)
        best = grown
    return max(best.values())
