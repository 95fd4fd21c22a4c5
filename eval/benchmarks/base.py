"""What a benchmark is, how it gets its name, and what benchmarks share: data, a limit, requests, and numbers
from records. A file of eval/benchmarks says its own name:

    @benchmark("counting", "how many objects: exact, mean absolute error")
    class Counting(BaseTask): ...

The files are imported when a benchmark is first asked for.
"""

import hashlib
import importlib
import json
import math
import pkgutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeVar

from earlyfusion.data.tasks.scoring import LETTERS, best_choice
from earlyfusion.eval.protocol import (
    EvalError,
    GenerateRequest,
    LogProb,
    Model,
    Prompt,
    Question,
    Request,
    ScoreRequest,
    TaskOptions,
)
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.kernels.files import Record

Item = TypeVar("Item")
Factory = TypeVar("Factory", bound=Callable[[TaskOptions], "BaseTask"])


class BaseTask:
    """One benchmark in one form. A benchmark writes questions, requests and score, and overrides what it does
    its own way.

    kind: "generate", "score", "rolling" or "loss": which of the model's methods answers. forms: the first is
    the default; scored_forms are of the kind "score". needs: capabilities beside the kind, such as
    frozenset({"image"}). new_tokens: longest answer where the user names none. private: question text,
    options and outputs must leave no trace; records then
    hold ids, hashes, letters and scores alone. zero_shot: worked examples are refused.
    """

    name = ""
    kind = "generate"
    version = "1"
    needs: frozenset[str] = frozenset()
    private = False
    zero_shot = False
    forms: tuple[str, ...] = ("",)
    scored_forms: tuple[str, ...] = ()
    new_tokens = 64

    def __init__(self, options: TaskOptions) -> None:
        self.options = options
        self.form = options.form or self.forms[0]
        self.new_tokens = options.max_new_tokens or self.new_tokens
        if self.form in self.scored_forms:
            self.kind = "score"
        if options.shots and self.zero_shot:
            raise EvalError(
                f"{self.name}: --shots {options.shots}: all forms are zero-shot; leave --shots out"
            )
        # A task without forms takes any --form: the option is for those of the call that have it.
        if self.forms != ("",) and self.form not in self.forms:
            raise EvalError(
                f"{self.name}: form {self.form!r} is not one of {', '.join(self.forms)}; choose with --form"
            )
        self.setup()

    def setup(self) -> None:
        """What a task makes of its options, once."""

    @property
    def label(self) -> str:
        """Name of the task's folder: its name, followed by the form where that is not the default."""
        if self.forms == ("",) or self.form == self.forms[0]:
            return self.name
        return f"{self.name}_{self.form}"

    # What a benchmark writes.

    def questions(self, limit: int | None = None) -> Iterable[Question]:
        """At most `limit` questions (at least 1; spread over the categories), in a fixed order."""
        raise NotImplementedError

    def requests(self, question: Question, repeat: int) -> Sequence[Request]:
        """What to ask for the `repeat`-th sample; several where a score needs several (options, a view)."""
        raise NotImplementedError

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """At least {extracted, score}: extracted is a JSON value or None (nothing usable in the output),
        score a number, higher is better. Further JSON values are kept in the record."""
        raise NotImplementedError

    # What it may do its own way.

    def prepare(self, model: Model) -> None:
        """Called once before `questions`: a place to look at the model."""

    def aggregate(self, records: Sequence[Record]) -> Record:
        """Named numbers: at least those of `summarize`."""
        return summarize(records)

    def data_hash(self) -> str:
        """sha256 of the data file, or of the names and contents of a folder's files."""
        path, digest = self.data_path(), hashlib.sha256()
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if not file.is_file():
                continue
            # Names count as well: the same pictures under other names are another data set.
            if file != path:
                digest.update(str(file.relative_to(path)).encode() + b"\0")
            digest.update(file.read_bytes())
        return digest.hexdigest()

    # What it is given.

    def data_path(self) -> Path:
        """The file or folder given with --data. Raises EvalError when none was given or it is not there."""
        # Asked for when the data are needed: --list and unknown forms should not depend on them.
        path = self.options.data
        if path is None:
            raise EvalError(
                f"{self.name}: needs its data; pass --data PATH (or {self.name}=PATH for one of several)"
            )
        if not path.exists():
            raise EvalError(f"{self.name}: --data {path}: no such file or folder")
        return path

    def generation(
        self, prompt: Prompt, question: str, repeat: int, stop: tuple[str, ...] = (), shared: int = 0
    ) -> GenerateRequest:
        """How a prompt of this task is continued: as asked, else greedily for one sample and at temperature
        1.0 with top-p 0.95 for several (avg@k as Kimi K2.5)."""
        options = self.options
        temperature, top_p = (0.0, 1.0) if options.samples == 1 else (1.0, 0.95)
        if options.temperature is not None:
            temperature = options.temperature
        if options.top_p is not None:
            top_p = options.top_p
        # A seed of its own: an answer does not change when other questions are added or left out.
        seed = request_seed(options.seed, question, repeat)
        return GenerateRequest(prompt, self.new_tokens, stop, temperature, top_p, seed, shared)


# names


class Benchmark(NamedTuple):
    """make: TaskOptions -> BaseTask. text: one line for the list."""

    make: Callable[[TaskOptions], BaseTask]
    text: str


_KNOWN: dict[str, Benchmark] = {}


def benchmark(name: str, text: str) -> Callable[[Factory], Factory]:
    """Decorator of a class or function that makes a task of TaskOptions."""

    def add(factory: Factory) -> Factory:
        _KNOWN[name] = Benchmark(factory, text)
        return factory

    return add


def known_benchmarks() -> Mapping[str, Benchmark]:
    """All benchmarks, by name."""
    # Importing a file is what registers its benchmarks.
    for found in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{found.name}")
    return dict(sorted(_KNOWN.items()))


def build_task(
    given: str, options: TaskOptions | None = None, data: Mapping[str, str | Path] | None = None
) -> BaseTask:
    """The task of "name" or "name:form", with its own path of `data` where there is one. Raises EvalError for
    an unknown name."""
    name, _, form = given.partition(":")
    # All files are imported first: a name is only unknown when nobody has said it.
    known = known_benchmarks()
    if name not in known:
        raise EvalError(
            f"unknown task {name!r}; {did_you_mean(name, known)}; tasks of lm-evaluation-harness are"
            " asked with --harness lm-eval"
        )

    # A form in the name, and a path for the task alone, go before those for all tasks.
    options = options or TaskOptions()
    path = Path(data[name]) if data and name in data else options.data
    return known[name].make(replace(options, form=form or options.form, data=path))


# numbers


def summarize(records: Sequence[Record], keys: Sequence[str] = ("score",)) -> Record:
    """Means over questions (of the mean over their repeats), with baselines and categories.

    Returns n (questions), samples (records), the mean of every one of `keys` that records have,
    standard_error of score, unextracted (share of records whose `extracted` is None), chance (mean of the
    records' `chance`), majority (share of the most frequent `target`, if that is a short string),
    by_category, macro_score, tokens (mean).
    """
    repeats: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        repeats[str(record["id"])].append(record)

    # The mean over repeats first, so that a question with more of them does not count more.
    categories: dict[str, list[Record]] = defaultdict(list)
    for group in repeats.values():
        categories[str(group[0].get("category") or "")].append(_means(group, keys))
    questions = [question for part in categories.values() for question in part]

    # A baseline is said only where every record knows it.
    chances = [record.get("chance") for record in records]
    targets = [record.get("target") for record in records]
    result: Record = {
        "n": len(questions),
        "samples": len(records),
        **_means(questions, keys),
        "standard_error": standard_error(questions),
        "unextracted": mean([record.get("extracted") is None for record in records]),
        "chance": None if None in chances else mean(chances),
        "majority": None,
        "tokens": mean([record.get("tokens") or 0 for record in records]),
    }
    if records and all(isinstance(target, str) and len(target) <= 16 for target in targets):
        result["majority"] = Counter(targets).most_common(1)[0][1] / len(targets)
    # The macro score weighs categories alike, as MMLU-Pro's table does; the headline weighs questions.
    if set(categories) != {""}:
        result["by_category"] = {}
        for category, part in sorted(categories.items()):
            found = {"n": len(part), **_means(part, keys), "standard_error": standard_error(part)}
            result["by_category"][category] = found
        result["macro_score"] = mean([entry["score"] for entry in result["by_category"].values()])
    return result


def standard_error(rows: Sequence[Record]) -> float | None:
    """sd / sqrt(n) of the scores, which one question alone does not have."""
    return stdev(row["score"] for row in rows) / math.sqrt(len(rows)) if len(rows) > 1 else None


def _means(rows: Sequence[Record], keys: Sequence[str]) -> dict[str, float]:
    """A key that no row has is left out."""
    means = {}
    for key in keys:
        if values := [row[key] for row in rows if key in row]:
            means[key] = fmean(values)
    return means


def mean(values: Sequence[Any]) -> float:
    """The mean; NaN of nothing (written as null)."""
    return fmean(values) if values else math.nan


# data


def spread(items: Sequence[Item], categories: Sequence[str], limit: int | None) -> list[Item]:
    """At most `limit` items, taken in turn from the categories, in the original order.

    A larger limit always holds every item of a smaller one.
    """
    # Round by round: all first items of a category, then all second ones.
    rounds: Counter[str] = Counter()
    ranks = []
    for index, category in enumerate(categories):
        ranks.append((rounds[category], index))
        rounds[category] += 1
    # Back in file order: prompts of neighbours share their beginnings.
    chosen = sorted(index for _, index in sorted(ranks)[:limit])
    return [items[index] for index in chosen]


def evenly(items: Sequence[Item], limit: int | None) -> list[Item]:
    """At most `limit` items at even distances, in their order."""
    count = min(limit or len(items), len(items))
    return [items[place * len(items) // count] for place in range(count)]


def data_files(path: Path, *names: str) -> list[Path]:
    """The file itself, or in a folder the first of `names` (glob patterns) that matches anything; sorted."""
    if path.is_file():
        return [path]
    for name in names:
        files = sorted(path.glob(name))
        if files:
            return files
    raise EvalError(f"{path}: no such file, or a folder that holds none of {', '.join(names)}")


def rows_hash(rows: Iterable[Record]) -> str:
    """sha256 of rows as canonical JSON lines: the same for every file format."""
    digest = hashlib.sha256()
    for row in rows:
        # Sorted keys: a parquet file and a jsonl file of the same rows hash alike.
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def need(row: Record, key: str, where: str) -> Any:
    """row[key]; raises EvalError naming the key (and the ones there are) without quoting the row."""
    # A parquet file has every column in every row, as None.
    if row.get(key) is None:
        raise EvalError(f"{where}: no field {key!r} (fields: {', '.join(map(str, row))})")
    return row[key]


def request_seed(seed: int, question: str, repeat: int) -> int:
    """A seed for one answer: a function of the run's seed, the question's id and the repeat alone (31
    bits)."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{question}/{repeat}".encode()).digest()[:4], "big") >> 1


# multiple choice by log-likelihood


def lettered(options: Sequence[str], pattern: str) -> str:
    """One line per option, for example pattern "{}. {}"."""
    return "".join(pattern.format(letter, option) + "\n" for letter, option in zip(LETTERS, options))


def choice_requests(context: Prompt, continuations: Sequence[str], shared: int = 0) -> list[ScoreRequest]:
    """One score request for every option; all follow one context, which is read once."""
    return [ScoreRequest(context, continuation, shared) for continuation in continuations]


def score_choices(options: Sequence[str], outputs: Sequence[LogProb], gold: int, *, letters: bool) -> Record:
    """Record fields of a log-likelihood multiple choice.

    letters: options are letters, all of about one token, compared by ln p; otherwise by ln p per character of
    the option (lm-evaluation-harness' acc_norm), with the unnormalised verdict (its acc) as score_sum.
    logprobs: ln p of every option.
    """
    sums = [output.sum for output in outputs]
    chosen = best_choice(sums)
    record: Record = {}
    if not letters:
        record["score_sum"] = float(chosen == gold)
        # Long options have small probabilities: per character they can be compared.
        chosen = best_choice([total / max(len(option), 1) for total, option in zip(sums, options)])
    record["extracted"], record["target"] = LETTERS[chosen], LETTERS[gold]
    record["score"], record["chance"] = float(chosen == gold), 1 / len(outputs)
    record["logprobs"] = [round(value, 6) for value in sums]
    return record
