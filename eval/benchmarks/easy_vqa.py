"""easy-VQA through the evaluator: the official test split (9,673 questions), a third party's pictures and
questions.

Forms: "generate" (default), the answer must be gold and end, as greedy decoding says it; "choice", the
likeliest of the 13 answers. Every question is asked again with a grey picture (blind_score). The training
loop asks the same task; with a limit the scores are over that many questions spread evenly over the split.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from earlyfusion.data.sample import Segment, Text, answer_text, question_text
from earlyfusion.data.sources.embedded import Picture, load_split, picture_of
from earlyfusion.data.tasks.scoring import best_choice, first_line, normalise
from earlyfusion.eval.benchmarks.base import benchmark, evenly
from earlyfusion.eval.benchmarks.visual import PictureTask, whole
from earlyfusion.eval.protocol import Question, Request, ScoreRequest
from earlyfusion.kernels.files import Record

SHAPES = ("circle", "rectangle", "triangle")
COLOURS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
ANSWERS = ("yes", "no", *SHAPES, *COLOURS)
CATEGORIES = dict.fromkeys(("yes", "no"), "yes/no") | dict.fromkeys(SHAPES, "shape")


def questions_of(split: str) -> list[tuple[Picture, str, str]]:
    """(picture, question, answer) of all questions of "test" or "train" in the split's order."""
    return [(entry, *asked) for entry in load_split(split) for asked in entry.questions]


def majority_answers() -> dict[str, str]:
    """Question text -> its most frequent answer in the training split (ties: the alphabetically first)."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for _, question, answer in questions_of("train"):
        counts[question][answer] += 1
    return {question: min(c, key=lambda answer: (-c[answer], answer)) for question, c in counts.items()}


@benchmark("easy_vqa", "questions about one coloured shape, real pictures")
class EasyVqaTask(PictureTask):
    """See the module."""

    name = "easy_vqa"
    version = "2"  # 1 read the first word alone, also of answers that the limit cut off
    forms = ("generate", "choice")
    scored_forms = ("choice",)
    new_tokens = 8

    def data_hash(self) -> str:
        """Over the questions and the bytes of all pictures of the test split."""
        # The package may be rebuilt with other pictures under the same questions.
        digest = hashlib.sha256(b"easy-vqa test")
        for entry in load_split("test"):
            digest.update(f"{entry.index}\0{entry.questions}".encode())
            digest.update(entry.path.read_bytes())
        return digest.hexdigest()

    def questions(self, limit: int | None = None) -> Iterable[Question]:
        """All questions, or `limit` of them at even distances. Categories: yes/no, shape, colour."""
        # The blind picture is as grey as the pictures are on average.
        self.grey_level = round(fmean(np.asarray(picture_of(e).open()).mean() for e in load_split("test")))
        majority = majority_answers()
        seen: Counter[tuple[int, str]] = Counter()
        for entry, text, answer in evenly(questions_of("test"), limit):
            seen[entry.index, text] += 1  # a few pictures are asked the same thing twice
            key = f"test/{entry.index}/{text}/{seen[entry.index, text]}"
            prompt: list[Segment] = [picture_of(entry), Text(question_text(text))]
            meta = {"picture": entry.index, "majority": majority.get(text) == answer}
            yield Question(key, prompt, answer, CATEGORIES.get(answer, "colour"), ANSWERS, meta)

    def requests(self, question: Question, repeat: int) -> Sequence[Request]:
        """With the picture, then blind; 13 options each in the form "choice"."""
        if self.form == "generate":
            return super().requests(question, repeat)
        options = [answer_text(answer) for answer in ANSWERS]
        return [ScoreRequest(prompt, option) for prompt in self.prompts(question) for option in options]

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """As PictureTask; in the form "choice" every view has 13 likelihoods."""
        if self.form == "choice":
            outputs = list(zip(*[iter(outputs)] * len(ANSWERS)))
        return super().score(question, repeat, outputs)

    def judged(self, question: Question, output: Any) -> Record:
        """One of the 13, None for anything else. cluster: the picture, because its questions stand or fall
        together."""
        if self.form == "choice":
            answer = ANSWERS[best_choice([option.sum for option in output])]
        else:
            # The whole line has to be an answer: "red or blue" is none.
            answer = normalise(first_line(whole(output)))
        record = {
            "extracted": answer if answer in ANSWERS else None,
            "score": float(answer == question.target),
            "target": question.target,
            "cluster": str(question.meta["picture"]),
            "majority": float(question.meta["majority"]),
        }
        # Guessing has a chance only among options that are shown.
        return record | {"chance": 1 / len(ANSWERS)} if self.form == "choice" else record

    def aggregate(self, records: Sequence[Record]) -> Record:
        """majority: always the most frequent training answer to the same question text."""
        return super().aggregate(records) | {"majority": fmean(record["majority"] for record in records)}
