"""easy-VQA through the evaluator: the official test split (9,673 questions), a third party's pictures and
questions.

Forms: "generate" (default), the answer must be gold and end, as greedy decoding says it; "choice", the
likeliest of the 13 answers. Every question is asked again with a grey picture (blind_score).
eval/benchmarks/easy_vqa_probe.py measures the same for our own models inside the training loop, by teacher
forcing; both give the same verdicts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

from earlyfusion.data.sample import Image, Segment, Text, answer_text, question_text
from earlyfusion.data.sources.easy_vqa import load_split, picture_of
from earlyfusion.data.tasks.scoring.text import first_line, normalise
from earlyfusion.eval.benchmarks.easy_vqa_probe import ANSWERS, majority_answers, questions_of
from earlyfusion.eval.benchmarks.questions import grey
from earlyfusion.eval.benchmarks.visual_base import aggregate, generate_request, views_of, whole
from earlyfusion.eval.protocol import EvalError, Model, Question, Record, Request, ScoreRequest, TaskOptions

FORMS = ("generate", "choice")


@cache
def mean_level() -> int:
    """Mean grey level of the split: the blind picture of eval/benchmarks/easy_vqa_probe.py for the whole
    split."""
    return round(
        float(np.mean([np.asarray(picture_of(entry).open()).mean() for entry in load_split("test")]))
    )


class EasyVqaTask:
    """See the module. options.extra "views": "blind" (default) or nothing."""

    name = "easy_vqa"
    version = "2"  # 1 read the first word alone, also of answers that the limit cut off
    private = False
    needs = frozenset({"image"})
    forms = FORMS

    def __init__(self, options: TaskOptions) -> None:
        self.form = options.form or FORMS[0]
        if self.form not in FORMS:
            raise EvalError(f"easy_vqa: unknown form {self.form!r}; known: {', '.join(FORMS)}")
        self.kind = "generate" if self.form == "generate" else "score"
        self.options = options
        self.views = views_of(self.name, options, ("blind",))
        self._pictures: dict[int, Image] = {}

    def data_hash(self) -> str:
        """Over the questions and the bytes of all pictures of the test split."""
        digest = hashlib.sha256(b"easy-vqa test")
        for entry in load_split("test"):
            digest.update(f"{entry.index}\0{entry.questions}".encode())
            digest.update(entry.path.read_bytes())
        return digest.hexdigest()

    def prepare(self, model: Model) -> None:
        """Nothing to prepare."""

    def questions(self, limit: int | None, shots: int | None, seed: int) -> Iterable[Question]:
        """All questions, or `limit` of them at even distances. Categories: yes/no, shape, colour."""
        if shots:
            raise EvalError(
                f"easy_vqa: shots={shots}; visual questions are asked without examples: leave --shots out"
            )
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
        said = self._answers(outputs)
        record: Record = {
            "extracted": said[0],
            "score": float(said[0] == question.target),
            "target": question.target,
            "cluster": str(question.meta["picture"]),
            "majority": float(question.meta["majority"]),
        }
        return record | {
            f"{view}_score": float(a == question.target) for view, a in zip(self.views, said[1:])
        }

    def _answers(self, outputs: Sequence[Any]) -> list[str | None]:
        if self.form == "generate":
            words = [normalise(first_line(whole(output))) for output in outputs]
            return [word if word in ANSWERS else None for word in words]
        rows = [outputs[i : i + len(ANSWERS)] for i in range(0, len(outputs), len(ANSWERS))]
        return [ANSWERS[max(range(len(ANSWERS)), key=lambda i: row[i].sum)] for row in rows]

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """majority: always the most frequent training answer to the same question text."""
        majority = sum(record["majority"] for record in records) / len(records)
        chance = 1 / len(ANSWERS) if self.form == "choice" else None
        return {**aggregate(records, views=self.views), "majority": majority, "chance": chance}


def easy_vqa(options: TaskOptions) -> EasyVqaTask:
    """Factory of the task `easy_vqa`."""
    return EasyVqaTask(options)
