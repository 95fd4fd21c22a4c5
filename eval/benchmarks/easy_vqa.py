"""easy-VQA through the evaluator: the official test split (9,673 questions), a third party's pictures and
questions.

Forms: "generate" (default), the answer must be gold and end, as greedy decoding says it; "choice", the
likeliest of the 13 answers. Every question is asked again with a grey picture (blind_score). The training
loop asks the same task; with a limit the scores are over that many questions spread evenly over the split.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from earlyfusion.data.sample import Image, Segment, Text, answer_text, question_text
from earlyfusion.data.sources.easy_vqa import load_split, picture_of
from earlyfusion.data.tasks.scoring.answers import best_choice
from earlyfusion.data.tasks.scoring.text import first_line, normalise
from earlyfusion.eval.benchmarks.base import BaseTask
from earlyfusion.eval.benchmarks.visual import (
    aggregate,
    generate_request,
    grey,
    refuse_shots,
    views_of,
    whole,
)
from earlyfusion.eval.protocol import EvalError, Question, Record, Request, ScoreRequest, TaskOptions
from earlyfusion.eval.registry import benchmark

FORMS = ("generate", "choice")
SHAPES = ("circle", "rectangle", "triangle")
COLOURS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
ANSWERS = ("yes", "no", *SHAPES, *COLOURS)


@dataclass(frozen=True)
class Asked:
    """One question of the split; picture is the picture's number."""

    picture: int
    text: str
    answer: str

    @property
    def kind(self) -> str:
        """yes/no, shape or colour, by the answer."""
        if self.answer in ("yes", "no"):
            return "yes/no"
        return "shape" if self.answer in SHAPES else "colour"


def questions_of(split: str, limit: int | None = None) -> list[Asked]:
    """All questions of "test" or "train" in the split's order, or `limit` of them at even distances."""
    every = [Asked(entry.index, q, a) for entry in load_split(split) for q, a in entry.questions]
    if limit is None or limit >= len(every):
        return every
    if limit < 1:
        raise EvalError(f"easy_vqa: limit {limit}; ask at least one question, or leave it out for all")
    return [every[i * len(every) // limit] for i in range(limit)]


def majority_answers() -> dict[str, str]:
    """Question text -> its most frequent answer in the training split (ties: the alphabetically first)."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for entry in load_split("train"):
        for question, answer in entry.questions:
            counts[question][answer] += 1
    return {question: min(c, key=lambda answer: (-c[answer], answer)) for question, c in counts.items()}


@cache
def mean_level() -> int:
    """Mean grey level of the test split's pictures: what the blind picture shows."""
    levels = [np.asarray(picture_of(entry).open()).mean() for entry in load_split("test")]
    return round(float(np.mean(levels)))


@benchmark("easy_vqa", "questions about one coloured shape, real pictures")
class EasyVqaTask(BaseTask):
    """See the module. options.extra "views": "blind" (default) or nothing."""

    name = "easy_vqa"
    version = "2"  # 1 read the first word alone, also of answers that the limit cut off
    needs = frozenset({"image"})
    forms = FORMS

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        self.kind = "generate" if self.form == "generate" else "score"
        self.views = views_of(self.name, options, ("blind",))
        self._pictures: dict[int, Image] = {}

    def data_hash(self) -> str:
        """Over the questions and the bytes of all pictures of the test split."""
        digest = hashlib.sha256(b"easy-vqa test")
        for entry in load_split("test"):
            digest.update(f"{entry.index}\0{entry.questions}".encode())
            digest.update(entry.path.read_bytes())
        return digest.hexdigest()

    def questions(self, limit: int | None, shots: int | None, seed: int) -> Iterable[Question]:
        """All questions, or `limit` of them at even distances. Categories: yes/no, shape, colour."""
        refuse_shots(self.name, shots)
        pictures = {entry.index: entry for entry in load_split("test")}
        majority = majority_answers()
        seen: Counter[tuple[int, str]] = Counter()

        for asked in questions_of("test", limit):
            seen[asked.picture, asked.text] += 1  # a few pictures are asked the same thing twice
            image = self._pictures.setdefault(asked.picture, picture_of(pictures[asked.picture]))
            yield Question(
                id=f"test/{asked.picture}/{asked.text}/{seen[asked.picture, asked.text]}",
                prompt=[image, Text(question_text(asked.text))],
                target=asked.answer,
                category=asked.kind,
                choices=ANSWERS,
                meta={"picture": asked.picture, "majority": majority.get(asked.text) == asked.answer},
            )

    def requests(self, question: Question, repeat: int) -> Sequence[Request]:
        """With the picture, then blind; 13 options each in the form "choice"."""
        image, text = question.prompt[0], question.prompt[1]
        assert isinstance(image, Image) and isinstance(text, Text)
        prompts: list[list[Segment]] = [[image, text]]
        prompts += [[grey(image, mean_level()), text] for _ in self.views]
        if self.form == "choice":
            return [ScoreRequest(prompt, answer_text(answer)) for prompt in prompts for answer in ANSWERS]
        tokens = self.options.max_new_tokens or 8
        return [generate_request(prompt, self.options, question.id, repeat, tokens) for prompt in prompts]

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """cluster: the picture, because its questions stand or fall together."""
        answer, *blind = self._answers(outputs)
        record: Record = {
            "extracted": answer,
            "score": float(answer == question.target),
            "target": question.target,
            "cluster": str(question.meta["picture"]),
            "majority": float(question.meta["majority"]),
        }
        for view, other in zip(self.views, blind):
            record[f"{view}_score"] = float(other == question.target)
        return record

    def _answers(self, outputs: Sequence[Any]) -> list[str | None]:
        """One of the 13 for each view; None for anything else."""
        if self.form == "generate":
            words = [normalise(first_line(whole(output))) for output in outputs]
            return [word if word in ANSWERS else None for word in words]
        rows = [outputs[i : i + len(ANSWERS)] for i in range(0, len(outputs), len(ANSWERS))]
        return [ANSWERS[best_choice([output.sum for output in row])] for row in rows]

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """majority: always the most frequent training answer to the same question text."""
        majority = sum(record["majority"] for record in records) / len(records)
        chance = 1 / len(ANSWERS) if self.form == "choice" else None
        return {**aggregate(records, views=self.views), "majority": majority, "chance": chance}
