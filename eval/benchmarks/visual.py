"""Visual tasks on generated pictures: counting, scenes, reading, grounding, charts, boards.

counting    score: exact number              beside it: mae (an unread answer counts as 0 said), within_one
scene       score: exact words               colours, shapes, sizes, existence, relation, comparison, sorting
ocr         score: containment (OCRBench)    beside it: exact, cer, wer, anls
grounding   score: IoU >= 0.5                beside it: iou, acc@0.1 ... acc@0.9, centre_in_box
chart       score: relaxed (ChartQA)         beside it: exact
board       score: exact words
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from earlyfusion.data.synth.scene import Scene
from earlyfusion.data.tasks.scoring.boxes import Box, grounding_scores, iou, parse_boxes
from earlyfusion.data.tasks.scoring.text import (
    anls,
    character_error_rate,
    contains,
    exact_match,
    first_line,
    parse_count,
    relaxed_match,
    word_error_rate,
)
from earlyfusion.eval.benchmarks.questions import Item
from earlyfusion.eval.benchmarks.visual_base import PictureTask, aggregate, answer_line
from earlyfusion.eval.protocol import Question, Record, TaskOptions
from earlyfusion.eval.registry import benchmark


def judge_count(item: Item, text: str) -> tuple[Any, float, dict[str, float]]:
    """Exact number in the first line; the error of an answer without a number is that of saying 0, at least
    1."""
    gold, said = int(item.answer), parse_count(first_line(text))
    error = abs(said - gold) if said is not None else max(gold, 1)
    return (
        said,
        float(said == gold),
        {"mae": float(error), "within_one": float(said is not None and error <= 1)},
    )


def judge_words(item: Item, text: str) -> tuple[Any, float, dict[str, float]]:
    """Equal to gold without case, article and closing punctuation."""
    return answer_line(text), float(exact_match(text, item.answer)), {}


def judge_reading(item: Item, text: str) -> tuple[Any, float, dict[str, float]]:
    """Containment; error rates and ANLS are over the first line."""
    said, gold = first_line(text), item.answer
    metrics = {
        "exact": float(exact_match(said, gold)),
        "cer": character_error_rate(said, gold),
        "wer": word_error_rate(said, gold),
        "anls": anls(said, [gold]),
    }
    return said or None, float(contains(text, gold)), metrics


def judge_chart(item: Item, text: str) -> tuple[Any, float, dict[str, float]]:
    """ChartQA's relaxed correctness of the first line."""
    said = first_line(text).rstrip(".")
    return (
        said or None,
        float(relaxed_match(said, item.answer)),
        {"exact": float(exact_match(said, item.answer))},
    )


def judge_box(item: Item, text: str) -> tuple[Any, float, dict[str, float]]:
    """The first box of the answer, in the units the question asks for, against the exact box of the graph."""
    gold, (width, height), units = box_of(item)
    boxes = parse_boxes(first_line(text), width, height, units)
    scores = grounding_scores(boxes[0] if boxes else None, gold)
    return list(boxes[0]) if boxes else None, scores["acc@0.5"], scores


def box_of(item: Item) -> tuple[Box, tuple[int, int], str]:
    """(exact box in pixels, (width, height), units asked for) of a grounding item."""
    scene = item.graph
    assert isinstance(scene, Scene)
    thing = next(
        thing for thing in scene.unique() if f"the {thing.name}" in item.question.split(",")[0].rstrip("?")
    )
    left, top, right, bottom = thing.box
    return (
        (left, top, right, bottom),
        (scene.width, scene.height),
        "pixels" if "in pixels" in item.question else "relative",
    )


class GroundingTask(PictureTask):
    """Grounding; the constant answer to beat is the median box of all questions, as shares of the picture."""

    def judged(self, question: Question, output: Any) -> Record:
        (left, top, right, bottom), (width, height), _ = box_of(question.meta["item"])
        relative = [left / width, top / height, right / width, bottom / height]
        return {**super().judged(question, output), "target_box": relative}

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """As for all tasks, with the median box as the constant answer."""
        boxes = [record["target_box"] for record in records]
        constant = tuple(median(box[side] for box in boxes) for side in range(4))
        hits = [iou(tuple(box), constant) >= 0.5 for box in boxes]  # type: ignore[arg-type]
        return {**aggregate(records, views=self.views), "majority": sum(hits) / len(hits)}


@benchmark("counting", "how many objects: exact, mean absolute error")
def counting(options: TaskOptions) -> PictureTask:
    """How many objects, of a shape, of a colour."""
    return PictureTask("counting", options, judge_count, max_new_tokens=8)


@benchmark("scene", "colours, shapes, relations, comparison, sorting of objects")
def scene(options: TaskOptions) -> PictureTask:
    """What is where: colours, shapes, sizes, existence, relations, comparison, sorting."""
    return PictureTask("scene", options, judge_words, max_new_tokens=48)


@benchmark("ocr", "read a word: containment, character error rate, ANLS")
def ocr(options: TaskOptions) -> PictureTask:
    """Rendered words."""
    return PictureTask("ocr", options, judge_reading, max_new_tokens=32)


@benchmark("grounding", "box of a named object: accuracy at IoU, centre in box")
def grounding(options: TaskOptions) -> PictureTask:
    """Boxes of named objects, in pixels and as shares."""
    return GroundingTask("grounding", options, judge_box, max_new_tokens=40)


@benchmark("chart", "a value in a chart: relaxed accuracy")
def chart(options: TaskOptions) -> PictureTask:
    """Values, extremes, sums and comparisons in bar and line charts."""
    return PictureTask("chart", options, judge_chart, max_new_tokens=8)


@benchmark("board", "cells, rows and counts on boards of coloured squares")
def board(options: TaskOptions) -> PictureTask:
    """Cells, rows and counts on boards of coloured squares."""
    return PictureTask("board", options, judge_words, max_new_tokens=24)


PICTURE_TASKS: dict[str, Callable[[TaskOptions], PictureTask]] = {
    "counting": counting,
    "scene": scene,
    "ocr": ocr,
    "grounding": grounding,
    "chart": chart,
    "board": board,
}
