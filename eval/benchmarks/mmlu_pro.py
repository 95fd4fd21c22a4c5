"""MMLU-Pro (Wang et al. 2024, arXiv 2406.01574): 12,032 questions of 14 categories with 3 to 10 options.

Forms
    cot   the official protocol (TIGER-AI-Lab/MMLU-Pro, evaluate_from_local.py): five worked examples of the
          question's own category; examples are dropped until the prompt has fewer than 4096 - 2048 tokens;
          greedy, at most 2048 new tokens, stop at "Question:"; three-level extraction; where nothing is
          found, the guess of the script
    mcf   log-likelihood of the letter after "Answer:", five examples of the category
    cf    log-likelihood of the option's text, per character; the form in which small models rise above chance
          first

Options are stripped: in 489 questions only the right option has blanks around it. Scored by the letter, as
published.

Data: --data FOLDER with test and validation as jsonl or parquet, --data FILE (test; validation beside it), or
--data hub:REVISION for TIGER-Lab/MMLU-Pro through `datasets` at that commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from earlyfusion.data.row_files import read_rows
from earlyfusion.data.tasks.scoring.answers import LETTERS, mmlu_pro_letter, published_guess
from earlyfusion.eval.benchmarks.base import (
    BaseTask,
    choice_requests,
    data_files,
    grouped,
    lettered,
    mean,
    need,
    request_seed,
    rows_hash,
    sampling,
    score_choices,
    spread,
    summarize,
)
from earlyfusion.eval.protocol import (
    EvalError,
    GenerateRequest,
    Model,
    Question,
    Record,
    Request,
    TaskOptions,
)
from earlyfusion.eval.registry import benchmark

HUB_NAME, HUB = "TIGER-Lab/MMLU-Pro", "hub:"
CONTEXT, NEW_TOKENS, SHOTS = 4096, 2048, 5
STOP = "Question:"
COT = "Let's think step by step."
INTRO = (
    "The following are multiple choice questions (with answers) about {category}. Think step by step and then"
    ' finish your answer with "the answer is (X)" where X is the correct letter choice.\n\n\n\n'
)
SHORT_INTRO = "The following are multiple choice questions (with answers) about {category}.\n\n"


@benchmark("mmlu_pro", "12,032 questions, 3-10 options; forms cot, mcf, cf")
class MmluPro(BaseTask):
    """See the file's head. options.extra: "levels" (1 to 3, extraction levels of the cot form; default 3)."""

    name = "mmlu_pro"
    version = "1"
    forms = ("cot", "mcf", "cf")

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        self.kind = "generate" if self.form == "cot" else "score"
        self.levels = int(options.extra.get("levels", 3))
        self.new_tokens = options.max_new_tokens or NEW_TOKENS
        self._model: Model | None = None
        self._rows: tuple[list[dict[str, Any]], list[dict[str, Any]]] | None = None

    def rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(test, validation), cleaned; read once."""
        if self._rows is None:
            given = str(self.options.data or "")
            test, validation = _hub(given[len(HUB) :]) if given.startswith(HUB) else _local(self.data_path())
            self._rows = (
                [clean(row, self.name) for row in test],
                [clean(row, self.name) for row in validation],
            )
        return self._rows

    def data_hash(self) -> str:
        """sha256 over the cleaned rows of both splits, the same for every file format."""
        test, validation = self.rows()
        return rows_hash([*test, *validation])

    def prepare(self, model: Model) -> None:
        """Keep the model to count tokens with."""
        self._model = model

    def questions(self, limit: int | None, shots: int | None, seed: int) -> Iterable[Question]:
        """Test questions, those of a category together. Raises EvalError when a category lacks examples."""
        test, validation = self.rows()
        count = SHOTS if shots is None else shots
        # Worked examples are those of the question's own category, in file order.
        examples: dict[str, list[dict[str, Any]]] = {}
        for row in validation:
            examples.setdefault(row["category"], []).append(row)

        chosen = spread(test, [row["category"] for row in test], limit)
        for row in grouped(chosen, [row["category"] for row in chosen]):
            own = examples.get(row["category"], [])[:count]
            if len(own) < count:
                raise EvalError(
                    f"{self.name}: category {row['category']!r} has {len(own)} validation examples, {count}"
                    " are needed; put the validation split beside the test split, or lower --shots"
                )
            yield Question(
                id=str(row["question_id"]),
                prompt=self.prompt(row, own),
                target=row["answer"],
                category=row["category"],
                choices=tuple(row["options"]),
                meta={"row": row, "examples": own, "seed": seed},
            )

    def prompt(self, row: dict[str, Any], examples: Sequence[dict[str, Any]]) -> str:
        """The prompt with all the given examples."""
        return self.head(row["category"], examples) + self._block(row, None)

    def head(self, category: str, examples: Sequence[dict[str, Any]]) -> str:
        """What all questions of a category have in common."""
        if self.form == "cf":
            intro = ""
        else:
            intro = (INTRO if self.form == "cot" else SHORT_INTRO).format(category=category)
        return intro + "".join(self._block(example, example) for example in examples)

    def _block(self, row: dict[str, Any], solved: dict[str, Any] | None) -> str:
        """One question, with its answer and a blank line when `solved` is given."""
        block = f"Question:\n{row['question']}\n"
        if self.form != "cf":
            block += "Options:\n" + lettered(row["options"], "{}. {}")

        if self.form == "cot":
            if solved is None:
                return f"{block}Answer: {COT}"
            return block + solved["cot_content"].replace(f"A: {COT}", f"Answer: {COT}") + "\n\n"
        if solved is None:
            return block + "Answer:"
        answer = (
            solved["answer"] if self.form == "mcf" else solved["options"][LETTERS.index(solved["answer"])]
        )
        return f"{block}Answer: {answer}\n\n"

    def requests(self, question: Question, repeat: int) -> Sequence[Request]:
        """One generation, or one log-likelihood per option."""
        row, examples = question.meta["row"], question.meta["examples"]
        if self.form == "cot":
            examples, new_tokens = self._fitting(row, examples)
            head = self.head(row["category"], examples)
            temperature, top_p = sampling(self.options)
            seed = request_seed(question.meta["seed"], question.id, repeat)
            prompt = head + self._block(row, None)
            return [GenerateRequest(prompt, new_tokens, (STOP,), temperature, top_p, seed, shared=len(head))]
        # All options of a question follow one context, which is read once.
        head = self.head(row["category"], examples)
        answers = LETTERS[: len(row["options"])] if self.form == "mcf" else row["options"]
        return choice_requests(str(question.prompt), [f" {answer}" for answer in answers], len(head))

    def _fitting(self, row: dict[str, Any], examples: Sequence[dict[str, Any]]) -> tuple[Sequence[Any], int]:
        """As many examples as leave room: prompt tokens < context - new tokens; at least none."""
        if self._model is None:
            return examples, self.new_tokens
        # A model with a shorter context keeps half of it for the answer.
        context = min(CONTEXT, self._model.max_length or CONTEXT)
        new_tokens = min(self.new_tokens, context // 2) if context < CONTEXT else self.new_tokens
        while examples and self._model.count_tokens(self.prompt(row, examples)) >= max(
            context - new_tokens, 1
        ):
            examples = examples[:-1]
        return examples, new_tokens

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """score: the published rule (a guess where nothing was extracted); score_strict: unextracted is
        wrong."""
        cluster = hashlib.sha256(question.meta["row"]["question"].encode()).hexdigest()[:12]
        if self.form != "cot":
            gold = LETTERS.index(question.target)
            record = score_choices(question, outputs, gold, letters=self.form == "mcf")
        else:
            record = judge(outputs[0].text, question.target, len(question.choices), self.levels)
        return {**record, "cluster": cluster}

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """Micro average over questions (and macro_score over categories); for cot also score_strict and the
        levels."""
        keys = [key for key in ("score", "score_strict", "score_sum") if records and key in records[0]]
        result = summarize(records, keys)
        if "score_strict" in keys:
            for level in (1, 2, 3):
                result[f"level_{level}"] = mean([float(r.get("level") == level) for r in records])
        return result


def judge(text: str, gold: str, options: int, levels: int = 3) -> Record:
    """Record fields of one worked answer: extracted letter or None, the level, the guess where there is
    none."""
    found = mmlu_pro_letter(text, levels)
    guess = None if found else LETTERS[published_guess(options)]
    return {
        "extracted": found[0] if found else None,
        "level": found[1] if found else None,
        "guess": guess,
        "target": gold,
        "score": float((found[0] if found else guess) == gold),
        "score_strict": float(found is not None and found[0] == gold),
        "chance": 1 / options,
    }


def rescore(path: Path, levels: int = 3) -> dict[str, Any]:
    """Extract again from published outputs (rows with options, answer, category, generated_text or
    model_outputs, and pred where stored). Returns summarize's numbers and `differences`: rows whose stored
    pred is another letter."""
    records, differences = [], 0
    for number, row in enumerate(read_rows(path), 1):
        where = f"{path}:{number}"
        text = row.get("generated_text", row.get("model_outputs"))
        if text is None:
            raise EvalError(
                f"{where}: no field 'generated_text' or 'model_outputs' (fields: {', '.join(row)})"
            )

        record = judge(str(text), need(row, "answer", where), len(need(row, "options", where)), levels)
        differences += "pred" in row and (row["pred"] or None) != record["extracted"]
        records.append(
            {"id": str(need(row, "question_id", where)), "category": row.get("category", ""), **record}
        )
    return {"differences": differences, "levels": levels, **summarize(records, ("score", "score_strict"))}


def clean(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields that count, options stripped and without "N/A"."""
    where = f"{where} question {row.get('question_id')!r}"
    options = [str(option).strip() for option in need(row, "options", where) if str(option) != "N/A"]
    answer = str(need(row, "answer", where))
    if answer not in LETTERS[: len(options)]:
        raise EvalError(f"{where}: answer {answer!r} is not a letter of its {len(options)} options")

    return {
        "question_id": row["question_id"],
        "question": str(need(row, "question", where)),
        "options": options,
        "answer": answer,
        "category": str(need(row, "category", where)),
        "cot_content": str(row.get("cot_content") or ""),
    }


def _local(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    names = ("{}.jsonl", "{}.parquet", "{}-*.parquet", "data/{}-*.parquet", "{}.jsonl.gz")
    folder = path if path.is_dir() else path.parent
    test = data_files(path, *(name.format("test") for name in names))
    try:
        validation = data_files(folder, *(name.format("validation") for name in names))
    except EvalError:
        validation = []
    rows = [list(chain.from_iterable(read_rows(file) for file in files)) for files in (test, validation)]
    return rows[0], rows[1]


def _hub(revision: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if len(revision) < 7:
        raise EvalError(f"--data hub:REVISION needs a commit of {HUB_NAME} (files change between revisions)")
    try:
        from datasets import load_dataset
    except ModuleNotFoundError:
        raise EvalError("--data hub:... needs datasets; pip install 'earlyfusion[eval]'") from None
    loaded = load_dataset(HUB_NAME, revision=revision)
    return list(loaded["test"]), list(loaded["validation"])
