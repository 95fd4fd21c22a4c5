"""Word problems from JSON lines, GSM8K and any file like it: text in, a number out.

    TextMath("../shared/data/gsm8k")     a folder with train.jsonl and test.jsonl (openai/grade-school-math)
    TextMath("problems.jsonl")           one file; problems are split by the hash of their text

A row has a question (or problem, prompt) and an answer (or solution, target) that is a number or ends with
"#### number".
"""

from __future__ import annotations

from pathlib import Path

from earlyfusion.data.row_files import read_rows
from earlyfusion.data.tasks.problem import Problem, Task, TaskError, task
from earlyfusion.data.tasks.scoring import MAX_CHARS, ends, gsm8k_number, tame

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

    # Longer problems have more steps; there is no better measure at hand.
    levels = ({"longest": 160}, {"longest": 300}, {"longest": 4096})

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            train, test = self._rows(self.path / "train.jsonl"), self._rows(self.path / "test.jsonl")
            # A test problem that training has as well tests nothing.
            test = {text: value for text, value in test.items() if text not in train}
        else:
            rows = self._rows(self.path)
            test = {text: rows[text] for text in rows if super(TextMath, self).heldout(f"text/{text}")}
            train = {text: rows[text] for text in rows if text not in test}
        self._sides = {False: train, True: test}

    def _rows(self, file: Path) -> dict[str, str]:
        """Question -> normalised number."""
        if not file.is_file():
            raise TaskError(
                f"{self.name}: {file}: no such file; expected JSON lines with a question and an answer"
            )
        found = {}
        for index, row in enumerate(read_rows(file), 1):
            # Data sets call the two fields by different names.
            text = next((str(row[name]).strip() for name in QUESTIONS if row.get(name)), "")
            value = next((gsm8k_number(str(row[name])) for name in ANSWERS if name in row), None)
            if not text or value is None:
                raise TaskError(
                    f"{self.name}: {file} row {index}: expected a question and an answer with a number"
                )
            found[text] = value
        return found

    def heldout(self, combination: str) -> bool:
        """By the file for a folder with two, by the hash of the text else."""
        return combination.removeprefix("text/") in self._sides[True]

    def draw(self, rng, heldout, knobs):
        """See Task."""
        rows = list(self._sides[heldout].items())
        if not rows:
            side = "test" if heldout else "train"
            raise TaskError(f"{self.name}: {self.path}: no problem on the {side} side")
        text, value = rng.choice(rows)
        # Drawn again, not cut: half a problem has no answer.
        if len(text) > knobs["longest"]:
            return None
        return Problem(ASK, None, text, value, f"#### {value}", f"text/{text}", "text")

    def reward(self, problem, response_text):
        """A worked answer may be long: only its end is read."""
        # Before `final_answer`, which takes a longer answer for none.
        return super().reward(problem, str(response_text)[-MAX_CHARS:])

    def score(self, problem, answer):
        """The number of the last line, which ends with it where it is marked by "####": a worked answer may
        say anything before, nothing after."""
        last = tame(answer.splitlines()[-1])
        # The last line alone: earlier ones hold the numbers of the steps.
        marked = "####" in last
        return float(gsm8k_number(last) == problem.answer and (not marked or ends(last)))
