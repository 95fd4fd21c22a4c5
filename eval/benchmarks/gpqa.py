"""GPQA (Rein et al. 2023, arXiv 2311.12022): diamond 198, main 448, extended 546 questions with four options.

The data are gated so that they stay out of training sets. The user's own file is read (--data FILE.csv or
.jsonl, or a folder with gpqa_<subset>.csv); its text is never cached, logged or printed, and what a run
leaves holds ids, hashes, letters and scores alone: no questions, no options, no outputs.

Columns: Question, Correct Answer, Incorrect Answer 1, 2, 3; optional Record ID, High-level domain.

Forms
    cot       the prompt of simple-evals (zero-shot, last line "Answer: X"); the last such line counts (extra
              "extract" = "first" takes the first, as simple-evals does)
    lm_eval   the prompt of lm-evaluation-harness' gpqa_*_cot_zeroshot; the last "(X)" counts
    mcf       log-likelihood of " (A)" ... " (D)" after lm-evaluation-harness' gpqa_*_zeroshot prompt
    cf        log-likelihood of the option's text, per character

The order of the options is a function of the question's id and the repeat, so every model sees the same one.
Chance is one quarter. One run of the diamond set cannot see a change of two points: its standard error is 2.5
to 3.6 points.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from typing import Any

from earlyfusion.data.row_files import read_rows
from earlyfusion.data.tasks.scoring.answers import LETTERS, answer_line_letter, parenthesised_letter
from earlyfusion.eval.benchmarks.base import (
    BaseTask,
    choice_requests,
    data_files,
    lettered,
    need,
    request_seed,
    rows_hash,
    sampling,
    score_choices,
    spread,
)
from earlyfusion.eval.protocol import EvalError, GenerateRequest, Question, Record, Request, TaskOptions
from earlyfusion.eval.registry import benchmark

COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
NEW_TOKENS = 2048
SIMPLE_EVALS = (
    "Answer the following multiple choice question. The last line of your response should be of the following"
    " format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before"
    " answering.\n\n"
)
LM_EVAL = "What is the correct answer to this question:"


class Gpqa(BaseTask):
    """One subset; see the file's head."""

    version = "1"
    forms = ("cot", "lm_eval", "mcf", "cf")
    private = True

    def __init__(self, subset: str, options: TaskOptions) -> None:
        self.subset, self.name = subset, f"gpqa_{subset}"
        super().__init__(options)
        self.kind = "generate" if self.form in ("cot", "lm_eval") else "score"
        self.new_tokens = options.max_new_tokens or NEW_TOKENS
        self._rows: list[dict[str, str]] | None = None

    def rows(self) -> list[dict[str, str]]:
        """Questions with their id, domain and options (the right one first); kept in memory only."""
        if self._rows is None:
            path = self.data_path()
            files = data_files(
                path, f"gpqa_{self.subset}.csv", f"gpqa_{self.subset}.jsonl", f"*{self.subset}*.*"
            )
            self._rows = [self._row(row, number) for number, row in enumerate(read_rows(files[0]), 1)]
            # Records are found by their ids alone.
            if len({row["id"] for row in self._rows}) != len(self._rows):
                raise EvalError(f"{self.name}: two questions have the same Record ID or text; mend the file")
        return self._rows

    def _row(self, row: dict[str, Any], number: int) -> dict[str, str]:
        where = f"{self.name} row {number}"
        texts = [_tidy(need(row, column, where)) for column in COLUMNS]
        own = str(row.get("Record ID") or "").strip()
        return {
            "id": own or hashlib.sha256(texts[0].encode()).hexdigest()[:16],
            "domain": str(row.get("High-level domain") or row.get("Subdomain") or ""),
            **dict(zip(COLUMNS, texts)),
        }

    def data_hash(self) -> str:
        """sha256 over ids, questions and options."""
        return rows_hash(self.rows())

    def questions(self, limit: int | None, shots: int | None, seed: int) -> Iterable[Question]:
        """In file order. Raises EvalError for shots: all forms are zero-shot."""
        if shots:
            raise EvalError(f"{self.name}: --shots {shots}: all forms here are zero-shot; leave --shots out")
        rows = self.rows()
        for row in spread(rows, [row["domain"] for row in rows], limit):
            options = tuple(row[column] for column in COLUMNS[1:])
            yield Question(row["id"], row["Question"], options[0], row["domain"], options, {"seed": seed})

    def requests(self, question: Question, repeat: int) -> Sequence[Request]:
        """One generation, or one log-likelihood per option, in this repeat's order of the options."""
        # Every repeat shows another order: a model that likes one letter gains nothing on average.
        options = [question.choices[i] for i in permutation(question.id, repeat)]
        text = str(question.prompt)
        if self.form == "cf":
            return choice_requests(f"Question: {text}\nAnswer:", [f" {option}" for option in options])

        if self.form == "cot":
            prompt = f"{SIMPLE_EVALS}{text}\n\n{lettered(options, '{}) {}').rstrip(chr(10))}"
        else:
            prompt = f"{LM_EVAL}{text}\nChoices:\n{lettered(options, '({}) {}')}"
            prompt += "Let's think step by step: " if self.form == "lm_eval" else "Answer:"
        if self.form == "mcf":
            return choice_requests(prompt, [f" ({letter})" for letter in LETTERS[:4]])

        temperature, top_p = sampling(self.options)
        seed = request_seed(question.meta["seed"], question.id, repeat)
        stop = ("</s>",) if self.form == "lm_eval" else ()
        return [GenerateRequest(prompt, self.new_tokens, stop, temperature, top_p, seed)]

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """Letters and scores; an answer that cannot be read is wrong (and counted in `unextracted`)."""
        order = permutation(question.id, repeat)
        gold = order.index(0)
        if self.kind == "score":
            shown = Question(question.id, "", "", choices=tuple(question.choices[i] for i in order))
            return score_choices(shown, outputs, gold, letters=self.form == "mcf")

        text = outputs[0].text
        if self.form == "cot":
            letter = answer_line_letter(text, 4, which=str(self.options.extra.get("extract", "last")))
        else:
            letter = parenthesised_letter(text, 4)
        return {
            "extracted": letter,
            "target": LETTERS[gold],
            "score": float(letter == LETTERS[gold]),
            "chance": 0.25,
        }


def permutation(question: str, repeat: int) -> list[int]:
    """Which option stands at each letter (0 is the right one): a function of the question's id and the
    repeat."""
    seed = int.from_bytes(hashlib.sha256(f"gpqa/{question}/{repeat}".encode()).digest()[:8], "big")
    return random.Random(seed).sample(range(4), 4)


def _tidy(text: Any) -> str:
    """As lm-evaluation-harness cleans GPQA, except that bracketed text (formulae) stays."""
    return str(text).strip().replace(" [title]", ". ").replace("  ", " ")


@benchmark("gpqa_diamond", "198 questions, own gated file; forms cot, mcf, cf, lm_eval")
def diamond(options: TaskOptions) -> Gpqa:
    """The hardest part, which is the one that is reported."""
    return Gpqa("diamond", options)


@benchmark("gpqa_main", "448 questions, own gated file")
def main(options: TaskOptions) -> Gpqa:
    """Main."""
    return Gpqa("main", options)


@benchmark("gpqa_extended", "546 questions, own gated file")
def extended(options: TaskOptions) -> Gpqa:
    """All."""
    return Gpqa("extended", options)
