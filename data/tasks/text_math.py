"""Word problems from JSON lines, GSM8K and any file like it: text in, a number out.

    TextMath("../shared/data/gsm8k")     a folder with train.jsonl and test.jsonl (openai/grade-school-math)
    TextMath("problems.jsonl")           one file; problems are split by the hash of their text

A row has a question (or problem, prompt) and an answer (or solution, target) that is a number or ends with
"#### number".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from earlyfusion.data.row_files import read_rows
from earlyfusion.data.tasks.problem import Drawn, Problem, Task, TaskError, task
from earlyfusion.data.tasks.scoring.answers import gsm8k_number
from earlyfusion.data.tasks.scoring.rewards import MAX_CHARS, ends, tame

QUESTIONS, ANSWERS = ("question", "problem", "prompt"), ("answer", "solution", "target")
ASK = "what is the answer, as a number?"


@task("text_math")
class TextMath(Task):
    """See the file's head. Reward: 1 when the last number of the response (after "####" if it is there) is
    the gold one.

    The picture form is the text itself; the rendered form shows the problem as pixels. Knob: longest
    (characters of a problem). Raises TaskError for a missing file, an empty split and rows without a question
    or a number.
    """

    levels = ({"longest": 160}, {"longest": 300}, {"longest": 4096})

    def __init__(self, path: str | Path, *, fraction: float | None = None) -> None:
        if fraction is not None:
            self.fraction = fraction
        self.path = Path(path)

        # A folder has its own split, less what training has as well; a file is split by its texts.
        if self.path.is_dir():
            sides = {False: self._rows(self.path / "train.jsonl"), True: self._rows(self.path / "test.jsonl")}
            known = {text for text, _ in sides[False]}
            sides[True] = [row for row in sides[True] if row[0] not in known]
            self._test = {text for text, _ in sides[True]}
        else:
            rows = self._rows(self.path)
            self._test = {text for text, _ in rows if super(TextMath, self).heldout(f"text/{text}")}
            sides = {side: [row for row in rows if (row[0] in self._test) == side] for side in (False, True)}
        self._sides = sides

    def _rows(self, file: Path) -> list[tuple[str, str]]:
        if not file.is_file():
            raise TaskError(
                f"{self.name}: {file}: no such file; expected JSON lines with a question and an answer"
            )
        found = []
        for index, row in enumerate(read_rows(file), 1):
            text = next((str(row[name]).strip() for name in QUESTIONS if row.get(name)), "")
            gold = next((str(row[name]) for name in ANSWERS if row.get(name) is not None), "")
            value = gsm8k_number(gold)
            if not text or value is None:
                raise TaskError(
                    f"{self.name}: {file} row {index}: expected a question and an answer with a number"
                )
            found.append((text, value))
        return found

    def heldout(self, combination: str) -> bool:
        """By the file for a folder with two, by the hash of the text else."""
        return combination.removeprefix("text/") in self._test

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See Task."""
        rows = self._sides[heldout]
        if not rows:
            raise TaskError(
                f"{self.name}: {self.path}: no problem on the {'test' if heldout else 'train'} side"
            )
        text, value = rng.choice(rows)
        if len(text) > knobs["longest"]:
            return None
        return Drawn(ASK, None, text, value, f"#### {value}", f"text/{text}", "text")

    def reward(self, problem: Problem, response_text: str) -> float:
        """A worked answer may be long: only its end is read."""
        if not isinstance(response_text, str):
            return 0.0
        return super().reward(problem, response_text[-MAX_CHARS:])

    def score(self, problem: Problem, answer: str) -> float:
        """The number of the last line, which ends with it where it is marked by "####": a worked answer may
        say anything before, nothing after."""
        last = tame(answer.splitlines()[-1])
        marked = "####" in last
        return float(gsm8k_number(last) == problem.answer and (not marked or ends(last)))
