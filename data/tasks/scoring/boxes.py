"""Boxes and points in answers: reading the public forms, intersection over union, matching.

Forms that `parse_boxes` reads (x from the left, y from the top; right and bottom are outside):
    [12, 30, 40, 58]      four numbers in brackets or parentheses, also "x1=12 y1=30 x2=40 y2=58" and JSON
                          "bbox_2d"
    (12,30),(40,58)       two corners, as Qwen-VL writes them
    {"label": ..., "box": [...], "box01": [...]}   data/formats/grounding.py, as Kimi K3: box01 (shares of the
                                                   sides) is read if there
    <loc0123>...          four PaliGemma location tokens, order y0 x0 y1 x1, in 1/1024 of the sides

Units are never guessed from the size of the numbers: `units` is "pixels" or "relative" (0..1).
"""

from __future__ import annotations

import math
import re

from earlyfusion.data.tasks.scoring.text import tame

Box = tuple[float, float, float, float]
IOU_THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)

# N in the forms below.
_NUMBER = r"([-+]?\d*\.?\d+(?:[eE][-+]?\d+)?)"
_FORMS = (
    r"[\[\(]\s*N\s*[,\s]\s*N\s*[,\s]\s*N\s*[,\s]\s*N\s*[\]\)]",
    r"[\(\[]\s*N\s*,\s*N\s*[\)\]]\s*,?\s*[\(\[]\s*N\s*,\s*N\s*[\)\]]",
    r"x_?(?:1|0|min)\W+N\W+y_?(?:1|0|min)\W+N\W+x_?(?:2|1|max)\W+N\W+y_?(?:2|1|max)\W+N",
    r"<loc(\d{4})><loc(\d{4})><loc(\d{4})><loc(\d{4})>",
)
# One expression for all: what one form has taken no other reads again.
_BOX = re.compile("|".join(_FORMS).replace("N", _NUMBER), re.IGNORECASE)
_SHARES = re.compile(r'"box01"\s*:\s*\[\s*N\s*,\s*N\s*,\s*N\s*,\s*N\s*\]'.replace("N", _NUMBER))


def parse_boxes(text: str, width: float, height: float, units: str = "pixels") -> list[Box]:
    """All boxes of a text in pixels of a width x height picture, in reading order, corners put in order.

    Boxes that are no numbers (nan, infinity) are left out; boxes outside the picture stay as they are.
    """
    text = tame(text)
    # A region says its place twice, in pixels of the picture as the model saw it and in shares: those count.
    shares = list(_SHARES.finditer(text))
    found = []
    for match in shares or _BOX.finditer(text):
        a, b, c, d = map(float, filter(None, match.groups()))
        x, y = (width, height) if shares or units == "relative" else (1.0, 1.0)
        # PaliGemma's tokens name y before x.
        if match[0].startswith("<"):
            a, b, c, d, x, y = b, a, d, c, width / 1024, height / 1024
        box = min(a, c) * x, min(b, d) * y, max(a, c) * x, max(b, d) * y
        if all(map(math.isfinite, box)):
            found.append(box)
    return found


def centre(box: Box) -> tuple[float, float]:
    """The middle of a box."""
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def area(box: Box) -> float:
    """Width times height, 0 for a box turned inside out."""
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def iou(a: Box, b: Box) -> float:
    """Intersection over union; 0 when both are empty."""
    # Apart, the common box is turned inside out and has no area.
    shared = area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))
    union = area(a) + area(b) - shared
    return shared / union if union > 0 else 0.0


def grounding_scores(said: Box | None, gold: Box) -> dict[str, float]:
    """iou, acc@0.1 ... acc@0.9 and centre_in_box of one answer; all 0 for None (no box was said)."""
    # What was not said lies where no picture is.
    said = said or (-1.0, -1.0, -1.0, -1.0)
    x, y = centre(said)
    overlap = iou(said, gold)
    scores = {"iou": overlap, "centre_in_box": float(gold[0] <= x < gold[2] and gold[1] <= y < gold[3])}
    return {**scores, **{f"acc@{least}": float(overlap >= least) for least in IOU_THRESHOLDS}}
