"""Text tasks that need an answer in words: BIG-Bench Hard and GSM8K.

bbh     --data FOLDER of <task>.json (or one such file), as suzgunmirac/BIG-Bench-Hard has them: {"examples":
        [{"input", "target"}]}. Forms
          mcf      log-likelihood of every possible target of the task (its options, or all targets that
                   occur)
          direct   the answer alone; the first examples of the file serve as shots (default 3) and are not
                   asked
          cot      worked answers; shots from extra "cot" = FOLDER of <task>.txt with blank-line separated
                   examples (the published cot-prompts), else none
        A limit takes from every task in turn. Extra "tasks" = names, comma-separated.
gsm8k   --data FOLDER with test.jsonl and train.jsonl (openai/grade-school-math). Five training problems as
        shots (default), greedy, the number after "####" or else the last number; score_strict wants the
        "####".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from earlyfusion.data.row_files import read_rows
from earlyfusion.data.tasks.scoring.answers import (
    bbh_answer,
    best_choice,
    first_line,
    gsm8k_number,
    same_words,
)
from earlyfusion.eval.benchmarks.base import (
    BaseTask,
    choice_requests,
    data_files,
    grouped,
    mean,
    need,
    request_seed,
    rows_hash,
    sampling,
    spread,
    summarize,
)
from earlyfusion.eval.protocol import EvalError, GenerateRequest, Question, Record, Request, TaskOptions
from earlyfusion.kernels.errors import did_you_mean

BBH_SHOTS, GSM8K_SHOTS = 3, 5
MOST_TARGETS = (
    32  # a task with more distinct targets (dyck languages, word sorting) has no closed list of answers
)
COT = "Let's think step by step."
_OPTION_LINE = re.compile(r"^(\([A-Z]\)|- .+)", re.MULTILINE)


class Bbh(BaseTask):
    """BIG-Bench Hard (Suzgun et al. 2022, arXiv 2210.09261); see the file's head."""

    name = "bbh"
    version = "1"
    forms = ("mcf", "direct", "cot")

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        self.kind = "score" if self.form == "mcf" else "generate"
        self.new_tokens = options.max_new_tokens or (1024 if self.form == "cot" else 32)
        self._tasks: dict[str, list[dict[str, str]]] | None = None

    def tasks(self) -> dict[str, list[dict[str, str]]]:
        """Task name -> examples, read once."""
        if self._tasks is None:
            found = {}
            for file in data_files(self.data_path(), "*.json", "bbh/*.json"):
                rows = read_rows(file)
                found[file.stem] = [
                    {key: str(need(row, key, f"{file} example {n}")) for key in ("input", "target")}
                    for n, row in enumerate(rows)
                ]
            wanted = [name for name in str(self.options.extra.get("tasks", "")).split(",") if name]
            for name in wanted:
                if name not in found:
                    raise EvalError(f"bbh: no task {name!r}; {did_you_mean(name, found)}")
            self._tasks = {name: rows for name, rows in found.items() if not wanted or name in wanted}
        return self._tasks

    def data_hash(self) -> str:
        """sha256 over the examples of the chosen tasks."""
        return rows_hash({"task": name, **row} for name, rows in self.tasks().items() for row in rows)

    def questions(self, limit: int | None, shots: int | None, seed: int) -> Iterable[Question]:
        """Examples beyond the shots; for mcf only tasks whose answers form a closed list."""
        count = BBH_SHOTS if shots is None else shots
        found: list[Question] = []
        for name, rows in self.tasks().items():
            targets = tuple(sorted({row["target"] for row in rows}))
            closed = len(targets) <= MOST_TARGETS
            if self.form == "mcf" and not closed:
                continue
            head = self._head(name, rows[:count], count)
            start = 0 if self.form == "cot" else count
            for index in range(start, len(rows)):
                row = rows[index]
                prompt = f"{head}Q: {row['input']}\nA:" + (f" {COT}\n" if self.form == "cot" else "")
                choices = _options(row["input"], targets) if closed else ()
                meta = {"head": len(head), "seed": seed}
                found.append(Question(f"{name}/{index:03d}", prompt, row["target"], name, choices, meta))
        if not found:
            raise EvalError(f"bbh: no example is left to ask with form {self.form!r} and {count} shots")
        categories = [question.category for question in found]
        chosen = spread(found, categories, limit)
        return grouped(chosen, [question.category for question in chosen])

    def _head(self, name: str, examples: Sequence[dict[str, str]], count: int) -> str:
        if self.form != "cot":
            return "".join(f"Q: {row['input']}\nA: {row['target']}\n\n" for row in examples)
        folder = self.options.extra.get("cot")
        if not folder:
            return ""
        file = Path(str(folder)) / f"{name}.txt"
        if not file.is_file():
            raise EvalError(
                f"bbh: {file}: no such file; extra cot=FOLDER needs one <task>.txt for every task"
            )
        text = file.read_text(encoding="utf-8").split("-----\n")[-1].strip()
        head, *worked = re.split(r"\n\n(?=Q:)", text)
        return "\n\n".join([head, *worked[:count]]) + "\n\n"

    def requests(self, question: Question, repeat: int) -> Sequence[Request]:
        """One log-likelihood per possible answer, or one generation."""
        head = question.meta["head"]
        if self.form == "mcf":
            return choice_requests(question.prompt, [f" {choice}" for choice in question.choices], head)
        stop = ("\n\n", "Q:") if self.form == "cot" else ("\n",)
        seed = request_seed(question.meta["seed"], question.id, repeat)
        return [
            GenerateRequest(
                question.prompt, self.new_tokens, stop, *sampling(self.options), seed, shared=head
            )
        ]

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """Exact match (case and final full stop aside), or the likeliest answer by ln p."""
        chance = 1 / len(question.choices) if question.choices else 0.0
        chosen: str | None
        if self.form == "mcf":
            chosen = question.choices[best_choice([output.sum for output in outputs])]
            extra: Record = {"logprobs": [round(output.sum, 6) for output in outputs]}
        else:
            text = outputs[0].text
            chosen, extra = (bbh_answer(text) if self.form == "cot" else first_line(text)), {}
        right = chosen is not None and same_words(chosen, question.target)
        return {
            "extracted": chosen,
            "target": question.target,
            "score": float(right),
            "chance": chance,
            **extra,
        }

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """Micro average; majority: the share of each task's most frequent answer in its whole file, over the
        records."""
        share = {
            name: Counter(row["target"] for row in rows).most_common(1)[0][1] / len(rows)
            for name, rows in self.tasks().items()
        }
        return summarize(records) | {"majority": mean([share[record["category"]] for record in records])}


def _options(text: str, targets: tuple[str, ...]) -> tuple[str, ...]:
    """The options that stand after "Options:" in the question; without them, every target of the task."""
    _, found, tail = text.partition("Options:")
    lines = [match.removeprefix("- ").strip() for match in _OPTION_LINE.findall(tail)] if found else []
    return tuple(lines) if len(lines) >= 2 else targets


class Gsm8k(BaseTask):
    """Grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168); see the file's head."""

    name = "gsm8k"
    version = "1"

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        self.new_tokens = options.max_new_tokens or 256

    def data_hash(self) -> str:
        """sha256 over the test problems."""
        return rows_hash(self._rows("test"))

    def _rows(self, split: str) -> list[dict[str, Any]]:
        path = self.data_path()
        folder = path if path.is_dir() else path.parent
        (file,) = (
            data_files(path, f"{split}.jsonl") if split == "test" else data_files(folder, f"{split}.jsonl")
        )
        return read_rows(file)

    def questions(self, limit: int | None, shots: int | None, seed: int) -> Iterable[Question]:
        """Test problems, each after the same shots."""
        count = GSM8K_SHOTS if shots is None else shots
        examples = self._rows("train")[:count] if count else []
        head = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in examples)
        rows = self._rows("test")
        for index, row in spread(list(enumerate(rows)), [""] * len(rows), limit):
            target = gsm8k_number(str(need(row, "answer", f"gsm8k row {index}")), flexible=False)
            if target is None:
                raise EvalError(f"gsm8k row {index}: the answer has no '#### number'")
            prompt = f"{head}Question: {need(row, 'question', f'gsm8k row {index}')}\nAnswer:"
            yield Question(f"{index:04d}", prompt, target, meta={"head": len(head), "seed": seed})

    def requests(self, question: Question, repeat: int) -> Sequence[Request]:
        """One generation."""
        stop = ("Question:", "</s>", "<|im_end|>")
        seed = request_seed(question.meta["seed"], question.id, repeat)
        head = question.meta["head"]
        return [
            GenerateRequest(
                question.prompt, self.new_tokens, stop, *sampling(self.options), seed, shared=head
            )
        ]

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """Equality of numbers."""
        found, strict = gsm8k_number(outputs[0].text), gsm8k_number(outputs[0].text, flexible=False)
        return {
            "extracted": found,
            "target": question.target,
            "score": float(found == question.target),
            "score_strict": float(strict == question.target),
            "chance": 0.0,
        }

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """score (flexible) and score_strict."""
        return summarize(records, ("score", "score_strict"))


def bbh(options: TaskOptions) -> Bbh:
    """Factory for the registry."""
    return Bbh(options)


def gsm8k(options: TaskOptions) -> Gsm8k:
    """Factory for the registry."""
    return Gsm8k(options)
