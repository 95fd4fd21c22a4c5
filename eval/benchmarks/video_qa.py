"""Questions about rendered clips: which way, what, how many, how far, how long.

    direction, object, objects, time   exact words (time as "2.5 s" or any number within 0.05 s)
    distance                            pixels between the first and the last frame, within 10 % (at least 1
                                        pixel)

Most need more than one frame. The blind view has grey frames with the same timestamps (the time question can
be answered from those: it says whether timestamps are read); "words" tells every frame's boxes.
"""

from __future__ import annotations

import re
from typing import Any

from earlyfusion.data.tasks.scoring.text import exact_match, first_line, parse_count
from earlyfusion.eval.benchmarks.questions import Item
from earlyfusion.eval.benchmarks.visual_base import PictureTask, answer_line
from earlyfusion.eval.protocol import TaskOptions
from earlyfusion.eval.registry import benchmark

DISTANCE_TOLERANCE = 0.1
TIME_TOLERANCE = 0.05  # seconds


def judge_clip(item: Item, text: str) -> tuple[Any, float, dict[str, float]]:
    """By category; distances also give their absolute error in pixels."""
    said, gold = first_line(text), item.answer
    if item.category == "objects":
        count = parse_count(said)
        return count, float(count == int(gold)), {}
    if item.category == "distance":
        value = _number(said)
        error = abs(value - float(gold)) if value is not None else float(gold)
        return (
            value,
            float(value is not None and error <= max(1.0, DISTANCE_TOLERANCE * float(gold))),
            {"pixel_error": error},
        )
    if item.category == "time":
        value = _number(said)
        target = float(gold.split()[0])
        return value, float(value is not None and abs(value - target) <= TIME_TOLERANCE + 1e-9), {}
    return answer_line(text), float(exact_match(said, gold)), {}


def _number(text: str) -> float | None:
    """The first number of a text."""
    found = re.search(r"-?\d+(?:\.\d+)?", text)
    return float(found[0]) if found else None


@benchmark("video_qa", "questions about rendered clips")
def video_qa(options: TaskOptions) -> PictureTask:
    """Factory of the task `video_qa`."""
    return PictureTask("video_qa", options, judge_clip, media="video", max_new_tokens=24)
