"""Visual tasks on generated pictures: the exams of data/tasks, with a picture, blind, and told in words.

counting    score: exact number              beside it: mae (an unread answer counts as 0 said), within_one
scene       score: exact words               colours, shapes, sizes, existence, relation, comparison, sorting
ocr         score: containment (OCRBench)    beside it: exact, cer, wer, anls
grounding   score: IoU >= 0.5                beside it: iou, acc@0.1 ... acc@0.9, centre_in_box
chart       score: relaxed (ChartQA)         beside it: exact
board       score: exact words
video_qa    score: exact words, or within a tolerance (data/tasks/video_qa.py)
twins       the questions of all of these, told in words alone, so that a model without eyes can take it

Every question has three views:

    score          with the picture
    blind_score    a grey picture of the same size in its place: what can be guessed from the words of the
                   question
    words_score    the text twin in its place: what the model can do once the picture is read for it

A record keeps all three; `seeing` = score - blind_score is what the picture adds. An answer that the token
limit cut off is no answer: its beginning may be right by luck of where the cut fell.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any

from PIL import Image as PILImage

from earlyfusion.data.sample import Image, Text, Video, question_text
from earlyfusion.data.tasks.places import named_box
from earlyfusion.data.tasks.problem import MAX_OBJECTS, MAX_SIDE, MIN_SIDE, Problem
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tasks.scoring.boxes import iou
from earlyfusion.eval.benchmarks.base import BaseTask, request_seed, sampling, summarize
from earlyfusion.eval.protocol import (
    EvalError,
    GenerateRequest,
    Generation,
    Prompt,
    Question,
    Record,
    TaskOptions,
)
from earlyfusion.eval.registry import benchmark
from earlyfusion.kernels.errors import did_you_mean

VIEWS = ("blind", "words")
DEFAULT_QUESTIONS = 600
GREY = 128


class VisualTask(BaseTask):
    """The exam of one task of data/tasks.

    options.extra: "views", comma-separated of blind and words (default both), and "n", questions in all
    (default 600). Prompts stand as in training: picture, line end, "Q: ...", line end, "A:"; an answer ends
    with its line.
    """

    version = "2"  # 1 judged answers that the limit cut off by their beginning

    def __init__(self, name: str, options: TaskOptions) -> None:
        super().__init__(options)
        self.name, self.task = name, make_task(name)
        self.needs = frozenset({"video" if self.task.video else "image"})
        self.max_new_tokens = options.max_new_tokens or self.task.answer_tokens
        self.views = views_of(name, options)
        self.count = _whole(name, options.extra.get("n", DEFAULT_QUESTIONS))

    def data_hash(self) -> str:
        """Of the generator's name, version, limits and seed."""
        facts = ["data/synth", self.name, self.version, self.options.seed, MIN_SIDE, MAX_SIDE, MAX_OBJECTS]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def questions(self, limit: int | None, shots: int | None, seed: int) -> Iterable[Question]:
        """The first `limit` of `n` questions; categories stand in turn. Raises EvalError for shots: there are
        none."""
        refuse_shots(self.name, shots)
        count = self.count if limit is None else min(limit, self.count)
        for problem in self.task.exam(count, self.options.seed):
            yield Question(
                id=problem.key,
                prompt=[problem.media(), Text(question_text(problem.question))],
                target=problem.answer,
                category=problem.meta["category"],
                meta={"item": problem},
            )

    def requests(self, question: Question, repeat: int) -> Sequence[GenerateRequest]:
        """The question with its picture, then one request for each view."""
        problem: Problem = question.meta["item"]
        prompts: list[Prompt] = [question.prompt]
        for view in self.views:
            if view == "blind":
                prompts.append([grey(problem.media()), Text(question_text(problem.question))])
            else:
                prompts.append(in_words(problem))
        return [self.generate_request(prompt, question.id, repeat) for prompt in prompts]

    def generate_request(self, prompt: Prompt, question: str, repeat: int) -> GenerateRequest:
        """How every prompt of this task is continued."""
        return generate_request(prompt, self.options, question, repeat, self.max_new_tokens)

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """The record of the picture, with the score of each view beside it."""
        record = self.judged(question, outputs[0])
        for view, output in zip(self.views, outputs[1:]):
            record[f"{view}_score"] = self.judged(question, output)["score"]
        return record

    def judged(self, question: Question, output: Any) -> Record:
        """extracted, score, metrics (with `cut`: the limit ended it) and target of one answer."""
        extracted, score, metrics = self.task.judge(question.meta["item"], whole(output))
        metrics = {**metrics, "cut": float(output.finish == "length")}
        return {"extracted": extracted, "score": score, "metrics": metrics, "target": question.target}

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """See `aggregate`."""
        return aggregate(records, views=self.views)


class GroundingTask(VisualTask):
    """Grounding; the constant answer to beat is the median box of all questions, as shares of the picture."""

    def judged(self, question: Question, output: Any) -> Record:
        (left, top, right, bottom), scene, _ = named_box(question.meta["item"])
        relative = [left / scene.width, top / scene.height, right / scene.width, bottom / scene.height]
        return {**super().judged(question, output), "target_box": relative}

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """As for all tasks, with the median box as the constant answer."""
        boxes = [record["target_box"] for record in records]
        left, top, right, bottom = (median(box[side] for box in boxes) for side in range(4))
        hits = [iou(tuple(box), (left, top, right, bottom)) >= 0.5 for box in boxes]
        return {**super().aggregate(records), "majority": fmean(hits)}


TEXTS = {
    "counting": "how many objects: exact, mean absolute error",
    "scene": "colours, shapes, relations, comparison, sorting of objects",
    "ocr": "read a word: containment, character error rate, ANLS",
    "grounding": "box of a named object: accuracy at IoU, centre in box",
    "chart": "a value in a chart: relaxed accuracy",
    "board": "cells, rows and counts on boards of coloured squares",
    "video_qa": "questions about rendered clips",
}
VISUAL: dict[str, Callable[[TaskOptions], VisualTask]] = {}
for _name, _text in TEXTS.items():
    _made = GroundingTask if _name == "grounding" else VisualTask
    VISUAL[_name] = benchmark(_name, _text)(partial(_made, _name))


@benchmark("twins", "the visual tasks told in words alone")
class TwinsTask(BaseTask):
    """The questions of the visual tasks, told in words alone. Categories: "counting/objects", "chart/value",
    ...

    The same question has the same answer with the picture and with its twin; the difference of the two scores
    is what reading the picture costs, and a model trained on pictures that gets better on twins has carried
    something over.
    """

    name = "twins"

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        self.parts = {name: make(options) for name, make in VISUAL.items()}

    def data_hash(self) -> str:
        """Over the data of all parts."""
        return hashlib.sha256(
            "\n".join(part.data_hash() for part in self.parts.values()).encode()
        ).hexdigest()

    def questions(self, limit: int | None, shots: int | None, seed: int) -> Iterable[Question]:
        """Questions of the parts in turn, so that every limit holds all kinds."""
        share = None if limit is None else -(-limit // len(self.parts))
        streams = {name: list(part.questions(share, shots, seed)) for name, part in self.parts.items()}
        merged = []
        for number in range(max(map(len, streams.values()))):
            for name, questions in streams.items():
                if number < len(questions):
                    merged.append(self._told(name, questions[number]))
        return merged[:limit]

    def _told(self, part: str, question: Question) -> Question:
        return Question(
            id=f"twins/{question.id}",
            prompt=in_words(question.meta["item"]),
            target=question.target,
            category=f"{part}/{question.category}",
            meta={**question.meta, "part": part},
        )

    def requests(self, question: Question, repeat: int) -> Sequence[GenerateRequest]:
        """One request: the twin and the question."""
        return [self.parts[question.meta["part"]].generate_request(question.prompt, question.id, repeat)]

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """As the visual task scores it."""
        return self.parts[question.meta["part"]].judged(question, outputs[0])

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """Score in all and by category, beside the constant answer; the kinds' own metrics by category
        only."""
        own = {name for record in records for name in record["metrics"]}
        return {name: value for name, value in aggregate(records, views=()).items() if name not in own}


# What benchmarks with pictures share.


def in_words(problem: Problem) -> str:
    """The twin in the picture's place, then the question as in training."""
    return problem.description + question_text(problem.question)


def grey(media: Image | Video, level: int = GREY) -> Image | Video:
    """The same sizes and times, all pixels grey (0 to 255)."""
    if isinstance(media, Image):
        return Image(_blank(media, level))
    return Video([_blank(Image(frame), level) for frame in media.frames], media.timestamps)


def _blank(image: Image, level: int) -> PILImage.Image:
    return PILImage.new("RGB", image.open().size, (level, level, level))


def refuse_shots(name: str, shots: int | None) -> None:
    """Raises EvalError for worked examples: a visual task has none."""
    if shots:
        raise EvalError(
            f"{name}: shots={shots}; visual questions are asked without examples: leave --shots out"
        )


def generate_request(
    prompt: Prompt,
    options: TaskOptions,
    question: str,
    repeat: int,
    max_new_tokens: int,
    stop: tuple[str, ...] = ("\n",),
) -> GenerateRequest:
    """A short answer that ends with its line; greedy for one sample (see eval.tasks.sampling)."""
    temperature, top_p = sampling(options)
    return GenerateRequest(
        prompt,
        max_new_tokens=max_new_tokens,
        stop=stop,
        temperature=temperature,
        top_p=top_p,
        seed=request_seed(options.seed, question, repeat),
    )


def views_of(name: str, options: TaskOptions, known: Sequence[str] = VIEWS) -> tuple[str, ...]:
    """The further views the user wants (option "views"), in order; all known ones when the option is not
    given."""
    given = options.extra.get("views", known)
    listed = (
        [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else list(given)
    )
    for view in listed:
        if view not in known:
            raise EvalError(f"{name}: unknown view {view!r}; {did_you_mean(view, known)}")
    return tuple(dict.fromkeys(listed))


def _whole(name: str, given: Any) -> int:
    try:
        count = int(given)
    except (TypeError, ValueError):
        count = 0
    if count < 1:
        raise EvalError(f"{name}: n={given!r}; expected how many questions to make, at least 1")
    return count


def whole(output: Generation) -> str:
    """The text of an answer that ended by itself, "" of one that the limit cut off."""
    return "" if output.finish == "length" else output.text


def aggregate(records: Sequence[Record], *, views: Sequence[str]) -> dict[str, Any]:
    """What `summarize` gives for score, views and all metrics; what seeing adds (in all and by category).

    majority: always the most frequent gold answer of the category, known in advance: the best a constant can
    do. chance is None: answers are free text. Raises ValueError for no records.
    """
    if not records:
        raise ValueError("no records to aggregate; ask at least one question")
    names = dict.fromkeys(name for record in records for name in record.get("metrics", {}))
    flat = [{**record.get("metrics", {}), **record} for record in records]
    result = summarize(flat, ("score", *(f"{view}_score" for view in views), *names))
    if "blind" in views:
        for means in (result, *result.get("by_category", {}).values()):
            means["seeing"] = means["score"] - means["blind_score"]
    return {**result, "chance": None, "majority": _majority(records)}


def _majority(records: Sequence[Record]) -> float:
    """Share of questions the most frequent answer of each category gets right."""
    targets: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        targets[str(record.get("category", ""))][json.dumps(record["target"])] += 1
    return sum(counts.most_common(1)[0][1] for counts in targets.values()) / len(records)
