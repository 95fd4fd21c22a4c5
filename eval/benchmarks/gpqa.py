"""GPQA (Rein et al. 2023, arXiv 2311.12022): diamond 198, main 448, extended 546 questions with four options.

The data are gated so that they stay out of training sets. The user's own file is read (--data FILE.csv or
.jsonl, or a folder with gpqa_<subset>.csv); its text is never cached, logged or printed, and what a run
leaves holds ids, hashes, letters and scores alone: no questions, no options, no outputs.

Columns: Question, Correct Answer, Incorrect Answer 1, 2, 3; optional Record ID, High-level domain.

Forms
    cot       the prompt of simple-evals (zero-shot, last line "Answer: X"); the last such line counts
    lm_eval   the prompt of lm-evaluation-harness' gpqa_*_cot_zeroshot; the last "(X)" counts
    mcf       log-likelihood of " (A)" ... " (D)" after lm-evaluation-harness' gpqa_*_zeroshot prompt
    cf        log-likelihood of the option's text, per character

The order of the options is a function of the question's id and the repeat, so every model sees the same one.
Chance is one quarter. One run of the diamond set cannot see a change of two points: its standard error is 2.5
to 3.6 points.
"""

import hashlib
import random
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any

from earlyfusion.data.row_files import read_rows
from earlyfusion.data.tasks.scoring import LETTERS, option_letter
from earlyfusion.eval.benchmarks.base import (
    BaseTask,
    benchmark,
    choice_requests,
    data_files,
    lettered,
    need,
    rows_hash,
    score_choices,
    spread,
)
from earlyfusion.eval.protocol import Question, Request, TaskOptions
from earlyfusion.kernels.files import Record

COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
SIMPLE_EVALS = (
    "Answer the following multiple choice question. The last line of your response should be of the following"
    " format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before"
    " answering.\n\n"
)
LM_EVAL = "What is the correct answer to this question:"


class Gpqa(BaseTask):
    """One subset; see the file's head."""

    forms = ("cot", "lm_eval", "mcf", "cf")
    scored_forms = ("mcf", "cf")
    private = zero_shot = True
    new_tokens = 2048

    def __init__(self, subset: str, options: TaskOptions) -> None:
        self.subset, self.name = subset, f"gpqa_{subset}"
        super().__init__(options)

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """Questions with their id, domain and options (the right one first); kept in memory only."""
        names = (f"gpqa_{self.subset}.csv", f"gpqa_{self.subset}.jsonl", f"*{self.subset}*.*")
        # Never cached: the text of a gated set lives as long as this process.
        (file, *_) = data_files(self.data_path(), *names)
        rows = []
        for number, row in enumerate(read_rows(file), 1):
            texts = {}
            # As lm-evaluation-harness cleans GPQA, except that bracketed text (formulae) stays.
            for column in COLUMNS:
                text = str(need(row, column, f"{self.name} row {number}")).strip()
                texts[column] = text.replace(" [title]", ". ").replace("  ", " ")
            texts["id"] = str(row.get("Record ID") or "").strip()
            # A file without ids still pairs with itself: the id is a function of the question.
            if not texts["id"]:
                texts["id"] = hashlib.sha256(texts["Question"].encode()).hexdigest()[:16]
            texts["domain"] = str(row.get("High-level domain") or row.get("Subdomain") or "")
            rows.append(texts)
        return rows

    def data_hash(self) -> str:
        """sha256 over ids, questions and options."""
        return rows_hash(self.rows)

    def questions(self, limit: int | None = None) -> Iterable[Question]:
        """In file order."""
        for row in spread(self.rows, [row["domain"] for row in self.rows], limit):
            options = tuple(row[column] for column in COLUMNS[1:])
            yield Question(row["id"], row["Question"], options[0], row["domain"], options)

    def requests(self, question: Question, repeat: int) -> Sequence[Request]:
        """One generation, or one log-likelihood per option, in this repeat's order of the options."""
        # Every repeat shows another order: a model that likes one letter gains nothing on average.
        options = [question.choices[i] for i in permutation(question.id, repeat)]
        text = f"{question.prompt}"
        if self.form == "cf":
            return choice_requests(f"Question: {text}\nAnswer:", [f" {option}" for option in options])
        if self.form == "cot":
            prompt = SIMPLE_EVALS + f"{text}\n\n{lettered(options, '{}) {}')}".removesuffix("\n")
            return [self.generation(prompt, question.id, repeat)]

        # lm-evaluation-harness joins the question without a blank; a mended prompt would be another one.
        asked = f"{LM_EVAL}{text}\nChoices:\n{lettered(options, '({}) {}')}"
        if self.form == "mcf":
            return choice_requests(asked + "Answer:", [f" ({letter})" for letter in "ABCD"])
        return [self.generation(asked + "Let's think step by step: ", question.id, repeat, ("</s>",))]

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """Letters and scores; an answer that cannot be read is wrong (and counted in `unextracted`)."""
        order = permutation(question.id, repeat)
        gold = order.index(0)
        if self.kind == "score":
            options = [question.choices[i] for i in order]
            return score_choices(options, outputs, gold, letters=self.form == "mcf")

        # Each form ends its answer its own way; reading the other's would find letters of the reasoning.
        letter, target = option_letter(outputs[0].text, self.form == "cot"), LETTERS[gold]
        return {"extracted": letter, "target": target, "score": float(letter == target), "chance": 0.25}


def permutation(question: str, repeat: int) -> list[int]:
    """Which option stands at each letter (0 is the right one): a function of the question's id and the
    repeat."""
    seed = int.from_bytes(hashlib.sha256(f"gpqa/{question}/{repeat}".encode()).digest()[:8], "big")
    return random.Random(seed).sample(range(4), 4)


SUBSETS = {
    "diamond": "198 questions, own gated file; forms cot, mcf, cf, lm_eval",
    "main": "448 questions, own gated file",
    "extended": "546 questions, own gated file",
}
for _subset, _text in SUBSETS.items():
    benchmark(f"gpqa_{_subset}", _text)(partial(Gpqa, _subset))
