"""Visual tasks on generated pictures: the exams of data/tasks, with a picture, blind, and told in words.

counting    score: exact number              beside it: mae (an unread answer counts as 0 said), within_one
scene       score: exact words               colours, shapes, sizes, existence, relation, comparison, sorting
ocr         score: containment (OCRBench)    beside it: exact, cer, wer, anls
grounding   score: IoU >= 0.5                beside it: iou, acc@0.1 ... acc@0.9, centre_in_box
chart       score: relaxed (ChartQA)         beside it: exact
board       score: exact words
video_qa    score: exact words, or within a tolerance (data/tasks/pictures.py)
twins       the questions of all of these, told in words alone, so that a model without eyes can take it

Every question has three views:

    score          with the picture
    blind_score    a grey picture of the same size in its place: what can be guessed from the words of the
                   question
    words_score    the text twin in its place: what the model can do once the picture is read for it

A record keeps all three; `seeing` = score - blind_score is what the picture adds. An answer that the token
limit cut off is no answer: its beginning may be right by luck of where the cut fell.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

from earlyfusion.data.sample import Segment, Text, question_text
from earlyfusion.data.tasks.problem import MAX_OBJECTS, MAX_SIDE, MIN_SIDE, Problem
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.eval.benchmarks.base import BaseTask, benchmark, summarize
from earlyfusion.eval.blind import GREY, grey
from earlyfusion.eval.protocol import Generation, Prompt, Question, Request, TaskOptions
from earlyfusion.kernels.files import Record

DEFAULT_QUESTIONS = 600


class PictureTask(BaseTask):
    """Questions about pictures, each asked with its picture and again in other views.

    An answer ends with its line.
    """

    views: tuple[str, ...] = ("blind",)
    needs = frozenset({"image"})
    zero_shot = True
    grey_level = GREY
    stop: tuple[str, ...] = ("\n",)

    def prompts(self, question: Question) -> list[Prompt]:
        """With the picture, then one for each view."""
        prompts: list[Prompt] = [question.prompt]
        for view in self.views:
            if view == "words":
                prompts.append(in_words(question.meta["problem"]))
            else:
                prompts.append([grey(segment, self.grey_level) for segment in media_of(question.prompt)])
        return prompts

    def requests(self, question: Question, repeat: int) -> Sequence[Request]:
        """One generation for each prompt."""
        return [self.generation(prompt, question.id, repeat, self.stop) for prompt in self.prompts(question)]

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """The record of the picture, with the score of each view beside it."""
        record = self.judged(question, outputs[0])
        for view, output in zip(self.views, outputs[1:]):
            record[f"{view}_score"] = self.judged(question, output)["score"]
        return record

    def judged(self, question: Question, output: Any) -> Record:
        """extracted, score, target and perhaps metrics of one answer."""
        raise NotImplementedError

    def aggregate(self, records: Sequence[Record]) -> Record:
        """What `summarize` gives for score, views and all metrics; what seeing adds (in all and by category).

        majority: always the most frequent gold answer of the category, known in advance: the best a constant
        can do.
        """
        # Metrics become columns of the record, so that all means are taken one way.
        flat = [record.get("metrics", {}) | record for record in records]
        keys = ["score", *(f"{view}_score" for view in self.views)]
        targets: dict[str, Counter[str]] = defaultdict(Counter)
        for record in records:
            keys += [name for name in record.get("metrics", {}) if name not in keys]
            targets[record["category"]][json.dumps(record["target"])] += 1

        result = summarize(flat, keys)
        if "blind" in self.views:
            for means in (result, *result.get("by_category", {}).values()):
                means["seeing"] = means["score"] - means["blind_score"]
        # A constant answer may be chosen for each category: the best that words alone allow.
        hits = [counts.most_common(1)[0][1] for counts in targets.values()]
        return {**result, "majority": sum(hits) / len(records)}


def media_of(prompt: Prompt) -> Sequence[Segment]:
    """The segments of a prompt."""
    return [Text(prompt)] if isinstance(prompt, str) else prompt


def in_words(problem: Problem) -> str:
    """The twin in the picture's place, then the question as in training."""
    return problem.description + question_text(problem.question)


def whole(output: Generation) -> str:
    """The text of an answer that ended by itself, "" of one that the limit cut off."""
    return "" if output.finish == "length" else output.text


class VisualTask(PictureTask):
    """The exam of one task of data/tasks.

    Prompts stand as in training: picture, line end, "Q: ...", line end, "A:".
    """

    version = "2"  # 1 judged answers that the limit cut off by their beginning
    views = ("blind", "words")

    def __init__(self, name: str, options: TaskOptions) -> None:
        self.name, self.task = name, make_task(name)
        self.needs = frozenset({"video" if self.task.video else "image"})
        self.new_tokens = self.task.answer_tokens
        super().__init__(options)

    def data_hash(self) -> str:
        """Of the generator's name, version, limits and seed."""
        # Nothing is stored: the generator and its seed are the data.
        facts = ["data/synth", self.name, self.version, self.options.seed, MIN_SIDE, MAX_SIDE, MAX_OBJECTS]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def questions(self, limit: int | None = None) -> Iterable[Question]:
        """The first `limit` questions of an exam without an end; categories stand in turn."""
        for problem in self.task.exam(limit or DEFAULT_QUESTIONS, self.options.seed):
            prompt, meta = [problem.media(), Text(question_text(problem.question))], {"problem": problem}
            yield Question(problem.key, prompt, problem.answer, problem.category, meta=meta)

    def judged(self, question: Question, output: Any) -> Record:
        """metrics: the task's own, with `cut`: the limit ended the answer."""
        extracted, score, metrics = self.task.judge(question.meta["problem"], whole(output))
        # How many answers the limit ended is told beside the score, for it lowers it.
        metrics = {**metrics, "cut": float(output.finish == "length")}
        return {"extracted": extracted, "score": score, "metrics": metrics, "target": question.target}


TEXTS = {
    "counting": "how many objects: exact, mean absolute error",
    "scene": "colours, shapes, relations, comparison, sorting of objects",
    "ocr": "read a word: containment, character error rate, ANLS",
    "grounding": "box of a named object: accuracy at IoU, centre in box",
    "chart": "a value in a chart: relaxed accuracy",
    "board": "cells, rows and counts on boards of coloured squares",
    "video_qa": "questions about rendered clips",
}
for _name, _text in TEXTS.items():
    benchmark(_name, _text)(partial(VisualTask, _name))


@benchmark("twins", "the visual tasks told in words alone")
class TwinsTask(PictureTask):
    """The questions of the visual tasks, told in words alone. Categories: "counting/objects", "chart/value",
    ...

    The same question has the same answer with the picture and with its twin; the difference of the two scores
    is what reading the picture costs, and a model trained on pictures that gets better on twins has carried
    something over.
    """

    name = "twins"
    needs = frozenset()
    views = ()

    def setup(self) -> None:
        self.parts = {name: VisualTask(name, self.options) for name in TEXTS}

    def data_hash(self) -> str:
        """Over the data of all parts."""
        hashes = "\n".join(part.data_hash() for part in self.parts.values())
        return hashlib.sha256(hashes.encode()).hexdigest()

    def questions(self, limit: int | None = None) -> Iterable[Question]:
        """Questions of the parts in turn, so that every limit holds all kinds."""
        share = None if limit is None else -(-limit // len(self.parts))
        merged = []
        for turn in zip_longest(*(part.questions(share) for part in self.parts.values())):
            for name, question in zip(self.parts, turn):
                if question is not None:
                    twin = {"id": f"twins/{question.id}", "category": f"{name}/{question.category}"}
                    twin |= {"prompt": in_words(question.meta["problem"])}
                    merged.append(replace(question, **twin, meta={**question.meta, "part": name}))
        return merged[:limit]

    def requests(self, question: Question, repeat: int) -> Sequence[Request]:
        """One request: the twin and the question, with the limit of its kind."""
        return [self.parts[question.meta["part"]].generation(question.prompt, question.id, repeat, self.stop)]

    def judged(self, question: Question, output: Any) -> Record:
        """As the visual task scores it."""
        return self.parts[question.meta["part"]].judged(question, output)

    def aggregate(self, records: Sequence[Record]) -> Record:
        """Score in all and by category, beside the constant answer; the kinds' own metrics by category
        only."""
        result = super().aggregate(records)
        # A mean of errors in objects and in characters would be of neither.
        for name in {name for record in records for name in record["metrics"]}:
            del result[name]
        return result
