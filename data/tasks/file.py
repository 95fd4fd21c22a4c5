"""Questions of your own, from a file: one row a question, with pictures and clips, its answer and how answers
are checked.

    [[tasks]]
    name = "file"
    chat = true                     # the chat form; thought = true opens the thinking channel
    options = { path = "questions.jsonl", check = "number", heldout = 0.1 }

    {"messages": [{"role": "user", "content": "<image>how many?"}], "images": ["cups.jpg"], "answer": 3}
    {"question": "which?", "image": "a.png", "choices": ["cup", "pan"], "answer": "B", "check": "choice"}

A row has `messages` (data/chat/template.py: pictures and clips by path below the file's folder, as a data:
URI, as {"bytes": ...} and, with urls = true, by URL) or a `question` with `image` or `images`; and an
`answer`. Where the last message is the assistant's, its text is the answer. The names of TRL (prompt,
solution) and verl (prompt, reward_model.ground_truth) are read too. A row may say more:

    check             how its answers are checked, if not as the option `check` says
    choices           options, which are listed behind the question as (A), (B), ...
    group             rows of one group are held out together; without it, rows of equal content
    weight            how often it is asked, 1 if not given
    category          its line in tables
    max_new_tokens    most tokens of its answers, if fewer than the run's

    check         answer                     what earns 1
    words         a text, or several         one of them, without case, article and closing punctuation
    number        a number                   exactly this one number
    choice        a letter or an option      the letter, or the option in words
    boxes         [x0, y0, x1, y1], or       a soft F1 (data/tasks/scoring.py); pixels of the picture as it is
                  several                    stored
    math          a formula                  an equal one, by math-verify (pip install 'earlyfusion[rewards]')
    json_schema   a schema                   JSON that keeps it, by jsonschema (the same extra)
    package.module:function                  what the function of (problem, response) returns

The file is .jsonl, .parquet, .json, .csv or .tsv, a folder or pattern of them, or a Hugging Face dataset on
disk. All rows are read once, to be checked; then one at a time, when it is asked. A hash of the content
decides what is held out, so every row of a file that grows stays on its side.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from earlyfusion.data.chat.template import Media, Message, messages_of
from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.loading.order import Numbered, Permutation, held_out
from earlyfusion.data.row_files import Row, RowFile, row_files
from earlyfusion.data.sample import Image, Text, VideoFile
from earlyfusion.data.shards.fetch import cache_root, plain_copy
from earlyfusion.data.tasks import scoring
from earlyfusion.data.tasks.problem import Problem, Split, Task, TaskError, task
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.kernels.files import function_at, plain

QUICK = ("words", "number", "choice", "boxes")
"""Checks that return at once, whatever was said."""
PACKAGES = {"math": "math_verify", "json_schema": "jsonschema"}
"""Checks that need a package of the extra `rewards`."""
CHECKS = (*QUICK, *PACKAGES)
_QUESTION = ("question", "prompt", "problem")
_ANSWER = ("answer", "solution", "ground_truth")
GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, fill the interval most evenly."""
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


# ---- how answers are checked


def known_check(name: str) -> str:
    """The name of a check that can be run here. Raises TaskError for an unknown one and for one whose package
    is missing, UserError for a function that cannot be imported."""
    if ":" in name:
        function_at(name, "check")
    elif name not in CHECKS:
        raise TaskError(f"check {name!r}; {did_you_mean(name, CHECKS)}, or package.module:function")
    elif name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        package = PACKAGES[name].replace("_", "-")
        raise TaskError(f"check {name!r} needs {package}; pip install 'earlyfusion[rewards]'")
    return name


def gold_of(check: str, answer: Any, choices: Sequence[str]) -> Any:
    """The gold answer as its check takes it. Raises ValueError for one that it cannot be."""
    if check == "words":
        several = answer if isinstance(answer, list) else [answer]
        if not several or not all(isinstance(one, str | int | float) and str(one).strip() for one in several):
            raise ValueError("expected a text, or a list of texts any of which is right")
        return [str(one) for one in several]
    if check == "number":
        gold = scoring.normal_number(str(answer)) or scoring.gsm8k_number(str(answer))
        if gold is None:
            raise ValueError("expected a number")
        return gold
    if check == "choice":
        letters = scoring.LETTERS[: len(choices)] if choices else scoring.LETTERS
        if isinstance(answer, int) and choices and 0 <= answer < len(choices):
            return letters[answer]  # many files count their options from 0
        if str(answer) in choices:
            return letters[list(choices).index(str(answer))]
        if str(answer).strip("() .") in [*letters]:
            return str(answer).strip("() .")
        raise ValueError(f"expected a letter of {letters[:1]} to {letters[-1:]}, or one of the choices")
    if check == "boxes":
        boxes = (
            answer if isinstance(answer, list) and all(isinstance(box, list) for box in answer) else [answer]
        )
        if not all(len(box) == 4 and max(map(abs, map(float, box))) < float("inf") for box in boxes):
            raise ValueError("expected [x0, y0, x1, y1], four numbers, or a list of such boxes")
        return [tuple(map(float, box)) for box in boxes]
    if check == "math" and not str(answer).strip():
        raise ValueError("expected a formula or a number")
    if check == "json_schema":
        import jsonschema  # of the extra `rewards`

        schema = json.loads(answer) if isinstance(answer, str) else answer
        try:
            jsonschema.validators.validator_for(schema).check_schema(schema)
        except (jsonschema.SchemaError, AttributeError, TypeError) as error:
            raise ValueError(f"expected a JSON schema ({str(error).splitlines()[0]})") from None
        return schema
    return answer


def target_of(check: str, gold: Any, problem_target: Any) -> str:
    """An answer in words that earns the full reward, as far as one can be told from the gold answer."""
    if check == "words":
        return str(gold[0])
    if check == "boxes":
        return json.dumps([list(box) for box in gold])
    if check == "json_schema":
        return "" if problem_target is None else json.dumps(problem_target, ensure_ascii=False)
    return gold if isinstance(gold, str) else json.dumps(plain(gold), ensure_ascii=False)


def verdict(problem: Problem, text: str) -> float:
    """What a response earns by its problem's own check, in [0, 1] but for functions of one's own."""
    check, gold = problem.meta["check"], problem.meta["gold"]
    if ":" in check:
        return float(function_at(check, "check")(problem, text))
    if check == "json_schema":
        return _keeps_schema(text, gold)
    # Thinking and announcements are no answer; their end is.
    answer = scoring.final_answer(text)
    if not answer:
        return 0.0
    if check == "words":
        return max(scoring.words(answer, one) for one in gold)
    if check == "number":
        return scoring.number(answer, gold, problem.question)
    if check == "choice":
        choices = problem.meta["choices"] or list(scoring.LETTERS)
        return float(scoring.parse_choice(answer, choices) == gold)
    if check == "boxes":
        picture = problem.image
        size = picture.size if picture is not None else (1, 1)
        return scoring.boxes(answer, gold, size)
    return _equal_formula(text, gold)


def _equal_formula(text: str, gold: str) -> float:
    from math_verify import parse, verify  # of the extra `rewards`

    # No time limit inside: it needs a signal of the main thread, and the process has a deadline.
    said = parse(text.rpartition("</think>")[2], parsing_timeout=None)
    right = parse(gold, parsing_timeout=None) or parse(f"${gold}$", parsing_timeout=None)
    return float(bool(right) and verify(right, said, timeout_seconds=None))


def _keeps_schema(text: str, schema: Any) -> float:
    import jsonschema  # of the extra `rewards`

    said = text.rpartition("</think>")[2].strip()
    fenced = _FENCE.search(said)
    try:
        jsonschema.validate(json.loads(fenced[1] if fenced else said), schema)
    except (ValueError, RecursionError, jsonschema.ValidationError):
        return 0.0
    return 1.0


# ---- rows


def fetched(url: str) -> Path:
    """The local copy of a URL, made once."""
    return plain_copy(url, cache_root() / "media")


class Rows:
    """The rows of all files by one number."""

    def __init__(self, path: str, split: str | None, fetch: Callable[[str], Path] | None) -> None:
        self.files: list[RowFile] = row_files(path, split)
        self.numbers, self.fetch = Numbered(file.count for file in self.files), fetch

    def __len__(self) -> int:
        return len(self.numbers)

    def where(self, number: int) -> str:
        """File and row, counted from 1, for messages."""
        file, place = self.numbers.locate(number)
        return f"{self.files[file].path.name}:{place + 1}"

    def read(self, number: int) -> Row:
        """Raises BadSample."""
        file, place = self.numbers.locate(number)
        return self.files[file].read(place)

    def media(self, number: int) -> Media:
        """Paths of a row are relative to its file, and may not leave that folder."""
        path = self.files[self.numbers.locate(number)[0]].path
        return Media(path if path.is_dir() else path.parent, fetch=self.fetch)


@dataclass(frozen=True)
class Side:
    """The rows of training, or those held out: their numbers in the file, and the sums of their weights."""

    rows: Rows
    numbers: np.ndarray
    sums: np.ndarray

    def at(self, share: float) -> int:
        """The row at a share of all weight, from 0 to below 1."""
        return int(np.searchsorted(self.sums, share * self.sums[-1], side="right"))


def digest_of(row: Row) -> str:
    """A hash of all that a row holds, its pictures' bytes included."""

    def small(value: Any) -> Any:
        return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)

    return hashlib.sha256(json.dumps(row, sort_keys=True, default=small).encode()).hexdigest()


def _asked(row: Row, where: str, media: Media) -> tuple[list[Message], Any]:
    """The messages up to the user's last, and the answer as the row has it. Raises BadSample."""
    first = next((row[name] for name in _QUESTION if row.get(name) is not None), None)
    turns = row.get("messages", row.get("conversations", first if isinstance(first, list) else None))
    answer = next((row[name] for name in _ANSWER if row.get(name) is not None), None)
    if answer is None and isinstance(row.get("reward_model"), dict):  # verl
        answer = row["reward_model"].get("ground_truth")
    if turns is None:
        if not isinstance(first, str) or not first.strip():
            raise BadSample(f"{where}: no messages and no question; there are {sorted(row)}", "empty_text")
        turns = [{"role": "user", "content": first}]

    listed = row.get("choices")
    messages = messages_of({**row, "messages": turns, "conversations": turns}, where, media, learned=False)
    if messages and messages[-1].role == "assistant":
        said = messages.pop()
        answer = said.text.strip() if answer is None else answer
    if not messages or messages[-1].role != "user":
        raise BadSample(f"{where}: the conversation must end with a message of the user", "bad_json")
    if listed:
        options = "".join(f"\n({letter}) {option}" for letter, option in zip(scoring.LETTERS, listed))
        last = messages[-1]
        messages[-1] = Message("user", (*last.content, Text(options, 0.0)))
    return messages, answer


@task("file")
class FileTask(Task):
    """See the module.

    path: the file. split: of a dataset with several. heldout: the share of rows that is never trained on; or
    the path of a file that holds such rows, or "split:NAME". check: of rows that name none. urls: rows may
    name URLs. skip_bad_rows: a row that cannot be used is left out and told, where the first one else ends
    the run. Raises TaskError where nothing is left, DataError for rows and checks that cannot be used.
    """

    levels = ({},)

    def __init__(
        self,
        path: str,
        split: str | None = None,
        heldout: float | str = 0.1,
        check: str = "words",
        urls: bool = False,
        skip_bad_rows: bool = False,
    ) -> None:
        self.path, self.check, self.skip_bad_rows = path, known_check(check), skip_bad_rows
        self.skipped: list[str] = []
        self._checks: set[str] = set()
        self.media: set[str] = set()
        """Of "image" and "video": what rows show."""
        self._digest = hashlib.sha256()
        fetch = fetched if urls else None

        share = 0.0 if isinstance(heldout, str) else heldout
        if not 0 <= share < 1:
            raise TaskError(f"file: heldout = {heldout}; expected a share from 0 to below 1, or a path")
        train, test = self._sides(Rows(path, split, fetch), share)
        if isinstance(heldout, str):
            name = heldout.removeprefix("split:")
            other = Rows(heldout, split, fetch) if name == heldout else Rows(path, name, fetch)
            test = self._sides(other, 0.0)[0]
        self.sides = {"train": train, "test": test}
        if not len(train.numbers):
            raise TaskError(f"file: {path}: no row is left to train on; {self.told}")
        self.identity = self._digest.hexdigest()[:16]
        # One function of one's own decides how all answers are scored.
        self.quick = self._checks <= set(QUICK)

    def _sides(self, rows: Rows, share: float) -> tuple[Side, Side]:
        """All rows read once: checked, weighed and dealt out."""
        # URLs are fetched when a row is asked for, not to look at it.
        numbers: tuple[list[int], list[int]] = ([], [])
        weights: tuple[list[float], list[float]] = ([], [])
        for number in range(len(rows)):
            where = rows.where(number)
            try:
                row = rows.read(number)
                media = rows.media(number)
                if media.fetch is not None:
                    media = replace(media, fetch=Path)
                problem = self._problem(row, where, media, "train", number)
                given = row.get("weight")
                weight = 1.0 if given is None else float(given)
                if not 0 <= weight < float("inf"):
                    raise BadSample(f"{where}: weight {weight}; expected 0 or more", "bad_json")
            except BadSample as error:
                told = str(error) if where in str(error) else f"{where}: {error}"
                if not self.skip_bad_rows:
                    raise DataError(
                        f"{told}; mend the row, or leave such rows out with skip_bad_rows = true"
                    ) from None
                self.skipped.append(told)
                continue
            content = digest_of(row)
            self._digest.update(content.encode())
            self._checks.add(problem.meta["check"])
            parts = [part for message in problem.messages for part in message.content]
            self.media |= {"image" for part in parts if isinstance(part, Image)}
            self.media |= {"video" for part in parts if isinstance(part, VideoFile)}
            held = held_out(f"file/{row.get('group') or content}", share)
            if weight:
                numbers[held].append(number)
                weights[held].append(weight)
        train, test = (
            Side(rows, np.asarray(n, dtype=np.int64), np.cumsum(w)) for n, w in zip(numbers, weights)
        )
        return train, test

    def __getstate__(self) -> dict[str, Any]:
        # A process that only scores answers has no use for the rows.
        return {name: value for name, value in vars(self).items() if name not in ("sides", "_digest")}

    @property
    def told(self) -> str:
        """Rows on each side, and what was left out and why."""
        count = {side: len(found.numbers) for side, found in self.sides.items()}
        told = f"{count['train']} rows to train on, {count['test']} held out"
        return told + (f", {len(self.skipped)} left out ({self.skipped[0]})" if self.skipped else "")

    def sample(self, seed: int, split: Split = "train", difficulty: int = 0) -> Problem:
        """The row of a place on its side (`seed` modulo their number), as the key of its problem names it."""
        if split not in self.sides or difficulty:
            raise TaskError(
                f"file: split {split!r}, difficulty {difficulty}; a file has train and test, and level 0"
            )
        side = self.sides[split]
        if not len(side.numbers):
            raise TaskError(f"file: {self.path}: no row is held out; raise heldout, or name a file")
        place = seed % len(side.numbers)
        number = int(side.numbers[place])
        where = side.rows.where(number)
        return self._problem(side.rows.read(number), where, side.rows.media(number), split, place)

    def numbered(self, number: int, seed: int, difficulty: int = 0) -> Problem:
        """Every row once in a mixed order before any comes again; one of weight 2 twice as often as one of
        1."""
        side = self.sides["train"]
        size = len(side.numbers)
        epoch, step = divmod(number, size)
        # Even steps through the sum of all weights: chance decides on the order, not on how often. Where they
        # begin moves from pass to pass, so that rows of small weight have their turn too.
        step = Permutation(size, seed, "file", epoch)[step]
        begin = (0.5 + epoch * GOLDEN) % 1.0
        return self.sample(side.at((step + begin) / size), "train", difficulty)

    def test_problems(self, count: int, seed: int, difficulty: int = 0) -> list[Problem]:
        """Up to `count` of the rows that are held out, mixed by the seed."""
        size = len(self.sides["test"].numbers)
        order = Permutation(max(1, size), seed, "held out")
        return [self.sample(order[i], "test", difficulty) for i in range(min(count, size))]

    def reward(self, problem: Problem, response_text: str) -> float:
        """What the row's check gives. Functions of one's own may raise, and return any number."""
        return verdict(problem, response_text)

    def _problem(self, row: Row, where: str, media: Media, split: Split, place: int) -> Problem:
        """A row as a problem. Raises BadSample naming the row."""
        messages, answer = _asked(row, where, media)
        choices = [str(option) for option in row.get("choices") or ()]
        try:
            check = known_check(str(row.get("check") or self.check))
            if answer is None and ":" not in check:
                raise ValueError(f"there is none; there are {sorted(row)}")
            gold = gold_of(check, answer, choices)
            limit = row.get("max_new_tokens")
            if limit is not None and (not isinstance(limit, int) or limit < 1):
                raise ValueError(
                    f"{answer!r:.40} with max_new_tokens {limit!r}; expected a whole number from 1"
                )
        except (ValueError, TypeError) as error:
            raise BadSample(f"{where}: answer {answer!r:.60}: {error}", "bad_json") from None
        return Problem(
            question=messages[-1].text,
            picture=None,
            description="",
            answer=answer,
            target=target_of(check, gold, row.get("target")),
            combination=where,
            category=str(row.get("category") or ""),
            meta={"check": check, "gold": gold, "choices": choices},
            task=self.name,
            key=f"{self.name}/{split}/0/{place}",
            messages=tuple(messages),
            max_new_tokens=limit,
        )
