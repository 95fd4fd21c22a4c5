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

Data: --data FOLDER with test and validation as jsonl or parquet, or --data FILE (test; validation beside it).
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from earlyfusion.data.row_files import read_rows
from earlyfusion.data.tasks.scoring import LETTERS, mmlu_pro_letter, published_guess
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
    summarize,
)
from earlyfusion.eval.protocol import EvalError, Model, Question, Request
from earlyfusion.kernels.files import Record

CONTEXT, SHOTS = 4096, 5
COT = "Let's think step by step."
INTRO = "The following are multiple choice questions (with answers) about {category}."
HOW = (
    " Think step by step and then"
    ' finish your answer with "the answer is (X)" where X is the correct letter choice.\n\n'
)
FILES = ("{}.jsonl", "{}.parquet", "{}-*.parquet", "data/{}-*.parquet", "{}.jsonl.gz")


@benchmark("mmlu_pro", "12,032 questions, 3-10 options; forms cot, mcf, cf")
class MmluPro(BaseTask):
    """See the file's head."""

    name = "mmlu_pro"
    forms = ("cot", "mcf", "cf")
    scored_forms = ("mcf", "cf")
    new_tokens = 2048

    def setup(self) -> None:
        self.context = CONTEXT
        self.count_tokens: Callable[[str], int] = len

    @cached_property
    def rows(self) -> tuple[list[Record], list[Record]]:
        """(test, validation), cleaned."""
        path = self.data_path()
        test = data_files(path, *(name.format("test") for name in FILES))
        folder = path if path.is_dir() else path.parent
        try:
            validation = data_files(folder, *(name.format("validation") for name in FILES))
        except EvalError:  # told when an example is needed: --shots 0 needs none
            validation = []
        # Cleaned at once: a broken row is named before a model is loaded.
        return _cleaned(test), _cleaned(validation)

    def data_hash(self) -> str:
        """sha256 over the cleaned rows of both splits, the same for every file format."""
        # The examples are part of every prompt, so they are part of the data.
        return rows_hash(chain(*self.rows))

    def prepare(self, model: Model) -> None:
        """Prompts of the cot form are fitted to the model's context."""
        self.count_tokens = model.count_tokens
        if model.max_length and model.max_length < CONTEXT:
            # A model with a shorter context keeps half of it for the answer.
            self.context = model.max_length
            self.new_tokens = min(self.new_tokens, self.context // 2)

    def questions(self, limit: int | None = None) -> Iterable[Question]:
        """Test questions, those of a category together. Raises EvalError when a category lacks examples."""
        test, validation = self.rows
        count = SHOTS if self.options.shots is None else self.options.shots
        chosen = spread(test, [row["category"] for row in test], limit)

        # Category by category: the prompts of one share their beginning, which a model then reads once.
        for category in dict.fromkeys(row["category"] for row in chosen):
            examples = [row for row in validation if row["category"] == category][:count]
            if len(examples) < count:
                raise EvalError(
                    f"{self.name}: category {category!r} has {len(examples)} validation examples, {count} are"
                    " needed; put the validation split beside the test split, or lower --shots"
                )
            for row in (row for row in chosen if row["category"] == category):
                prompt, meta = (
                    self.head(category, examples) + self.block(row),
                    {"row": row, "examples": examples},
                )
                key, choices = str(row["question_id"]), tuple(row["options"])
                yield Question(key, prompt, row["answer"], category, choices, meta)

    def head(self, category: str, examples: Sequence[Record]) -> str:
        """What all questions of a category have in common."""
        intro = ""
        if self.form != "cf":
            intro = INTRO.format(category=category) + (HOW if self.form == "cot" else "") + "\n\n"
        return intro + "".join(self.block(example, solved=True) for example in examples)

    def block(self, row: Record, solved: bool = False) -> str:
        """One question, with its answer and a blank line when it is an example."""
        # The wording of the official script, blank by blank.
        block = f"Question:\n{row['question']}\n"
        if self.form != "cf":
            block += "Options:\n" + lettered(row["options"], "{}. {}")
        if not solved:
            return block + (f"Answer: {COT}" if self.form == "cot" else "Answer:")

        if self.form == "cot":
            return block + row["cot_content"].replace(f"A: {COT}", f"Answer: {COT}") + "\n\n"
        answer = row["answer"]
        if self.form == "cf":
            answer = row["options"][LETTERS.index(answer)]
        return f"{block}Answer: {answer}\n\n"

    def requests(self, question: Question, repeat: int) -> Sequence[Request]:
        """One generation, or one log-likelihood per option."""
        row, examples = question.meta["row"], question.meta["examples"]
        head = self.head(question.category, examples)
        if self.form != "cot":
            # Letters are told with their blank, as the model would write them after "Answer:".
            answers = LETTERS[: len(row["options"])] if self.form == "mcf" else row["options"]
            return choice_requests(question.prompt, [f" {answer}" for answer in answers], len(head))

        # As many examples as leave room for the answer, perhaps none: the published rule.
        block, room = self.block(row), max(self.context - self.new_tokens, 1)
        while examples and self.count_tokens(head + block) >= room:
            examples = examples[:-1]
            head = self.head(question.category, examples)
        return [self.generation(head + block, question.id, repeat, ("Question:",), len(head))]

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """score: the published rule (a guess where nothing was extracted); score_strict: unextracted is
        wrong. Questions of the same text are one cluster."""
        if self.form == "cot":
            record = judge(outputs[0].text, question.target, len(question.choices))
        else:
            gold = LETTERS.index(question.target)
            record = score_choices(question.choices, outputs, gold, letters=self.form == "mcf")
        record["cluster"] = hashlib.sha256(question.meta["row"]["question"].encode()).hexdigest()[:12]
        return record

    def aggregate(self, records: Sequence[Record]) -> Record:
        """Micro average over questions (and macro_score over categories); for cot also score_strict."""
        return summarize(records, ("score", "score_strict", "score_sum"))


def judge(text: str, gold: str, options: int) -> Record:
    """Record fields of one worked answer: extracted letter or None, the guess where there is none."""
    letter, _ = mmlu_pro_letter(text) or (None, 0)
    # The script seeds its guess anew for each question, so it is a constant of the number of options.
    guess = None if letter else LETTERS[published_guess(options)]
    return {
        "extracted": letter,
        "guess": guess,
        "target": gold,
        "score": float((letter or guess) == gold),
        "score_strict": float(letter == gold),
        "chance": 1 / options,
    }


def _cleaned(files: Iterable[Path]) -> list[Record]:
    return [clean(row) for file in files for row in read_rows(file)]


def clean(row: Record) -> Record:
    """The fields that count, options stripped and without "N/A"."""
    where = f"mmlu_pro question {row.get('question_id')!r}"
    # Blanks around the right option alone would give it away to a model that compares texts.
    options = [str(option).strip() for option in need(row, "options", where) if str(option) != "N/A"]
    answer = str(need(row, "answer", where))
    if answer not in LETTERS[: len(options)]:
        raise EvalError(f"{where}: answer {answer!r} is not a letter of its {len(options)} options")

    texts = {key: str(need(row, key, where)) for key in ("question", "category")}
    texts["cot_content"] = str(row.get("cot_content") or "")
    return {"question_id": row["question_id"], **texts, "options": options, "answer": answer}
