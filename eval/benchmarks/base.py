"""What benchmarks share: reading their files, hashing them, spreading a limit, and turning records into
numbers."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from earlyfusion.data.tasks.scoring.answers import LETTERS, best_choice
from earlyfusion.eval.protocol import (
    EvalError,
    LogProb,
    Model,
    Prompt,
    Question,
    Record,
    ScoreRequest,
    TaskOptions,
)

Item = TypeVar("Item")


class BaseTask:
    """Defaults of the Task protocol; a benchmark sets name, version and kind and writes questions, requests,
    score."""

    name = ""
    kind = "generate"
    version = "1"
    needs: frozenset[str] = frozenset()
    private = False
    forms: tuple[str, ...] = ()

    def __init__(self, options: TaskOptions) -> None:
        self.options = options
        self.form = options.form or (self.forms[0] if self.forms else "")
        if self.forms and self.form not in self.forms:
            raise EvalError(
                f"{self.name}: form {self.form!r} is not one of {', '.join(self.forms)}; choose with --form"
            )

    def data_hash(self) -> str:
        """sha256 of the data file(s)."""
        return file_hash(self.data_path())

    def data_path(self) -> Path:
        """The file or folder given with --data. Raises EvalError when none was given or it is not there."""
        if self.options.data is None:
            raise EvalError(
                f"{self.name}: needs its data; give --data PATH (or {self.name}=PATH for one of several)"
            )
        path = Path(self.options.data)
        if not path.exists():
            raise EvalError(f"{self.name}: --data {path}: no such file or folder")
        return path

    def prepare(self, model: Model) -> None:
        """Nothing to prepare."""

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """See `summarize`."""
        return summarize(records)


def summarize(records: Sequence[Record], keys: Sequence[str] = ("score",)) -> dict[str, Any]:
    """Means over questions (of the mean over their repeats), with baselines and categories.

    Returns n (questions), samples (records), the mean of every one of `keys`, standard_error of score,
    unextracted (share of records whose `extracted` is None), chance (mean of the records' `chance`, if they
    have one), majority (share of the most frequent `target`, if they have one and it is a short string),
    by_category, tokens (mean).
    """
    by_id: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_id[str(record["id"])].append(record)
    categories: dict[str, list[list[Record]]] = defaultdict(list)
    for group in by_id.values():
        categories[str(group[0].get("category") or "")].append(group)

    chances = [r["chance"] for r in records if r.get("chance") is not None]
    result: dict[str, Any] = {
        "n": len(by_id),
        "samples": len(records),
        **_means(by_id.values(), keys),
        "standard_error": standard_error([mean([r["score"] for r in group]) for group in by_id.values()]),
        "unextracted": mean([float(r.get("extracted") is None) for r in records]),
        "chance": mean(chances) if len(chances) == len(records) else None,
        "majority": _majority(records),
        "tokens": mean([r.get("tokens") or 0 for r in records]),
    }
    if set(categories) != {""}:
        result["by_category"] = {}
        for category, groups in sorted(categories.items()):
            result["by_category"][category] = {"n": len(groups), **_means(groups, keys)}
        result["macro_score"] = mean([entry["score"] for entry in result["by_category"].values()])
    return result


def _means(questions: Collection[Sequence[Record]], keys: Sequence[str]) -> dict[str, float]:
    """Means over questions of the means over their repeats, so that more repeats do not count more. A key
    that no record has is left out."""
    means = {}
    for key in keys:
        values = []
        for group in questions:
            held = [record[key] for record in group if key in record]
            values += [mean(held)] if held else []
        if values or not questions:
            means[key] = mean(values)
    return means


def _majority(records: Sequence[Record]) -> float | None:
    targets = [r.get("target") for r in records]
    if not targets or not all(isinstance(t, str) and len(t) <= 16 for t in targets):
        return None
    return Counter(targets).most_common(1)[0][1] / len(targets)


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing (written as null)."""
    return math.fsum(values) / len(values) if values else math.nan


def standard_error(values: Sequence[float]) -> float | None:
    """sd / sqrt(n) over questions; None for fewer than two."""
    n = len(values)
    if n < 2:
        return None
    centre = math.fsum(values) / n
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (n - 1) / n)


def spread(items: Sequence[Item], categories: Sequence[str], limit: int | None) -> list[Item]:
    """At most `limit` items, taken in turn from the categories (each in its own order), in the original
    order.

    A larger limit always holds every item of a smaller one.
    """
    if limit is None or limit >= len(items):
        return list(items)
    if limit < 1:
        raise EvalError(f"--limit {limit}: give at least 1")
    # Round by round, in a round the categories by first appearance.
    rounds: Counter[str] = Counter()
    order: dict[str, int] = {}
    ranks = []
    for index, category in enumerate(categories):
        ranks.append((rounds[category], order.setdefault(category, len(order)), index))
        rounds[category] += 1
    chosen = sorted(index for _, _, index in sorted(ranks)[:limit])
    return [items[index] for index in chosen]


def grouped(items: Sequence[Item], categories: Sequence[str]) -> list[Item]:
    """Items with those of one category next to each other, categories by first appearance (so prefixes stay
    cached)."""
    first: dict[str, int] = {}
    for category in categories:
        first.setdefault(category, len(first))
    order = sorted(range(len(items)), key=lambda index: (first[categories[index]], index))
    return [items[index] for index in order]


def data_files(path: Path, *names: str) -> list[Path]:
    """The file itself, or in a folder the first of `names` (glob patterns) that matches anything; sorted."""
    if path.is_file():
        return [path]
    for name in names:
        found = sorted(p for p in path.glob(name) if p.is_file())
        if found:
            return found
    raise EvalError(f"{path}: holds none of {', '.join(names)}")


def file_hash(path: Path) -> str:
    """sha256 of a file, or of the names and contents of a folder's files."""
    # Names count as well: the same pictures under other names are another data set.
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        if not path.is_file():
            digest.update(str(file.relative_to(path)).encode() + b"\0")
        with file.open("rb") as handle:
            for block in iter(lambda: handle.read(1 << 20), b""):
                digest.update(block)
    return digest.hexdigest()


def rows_hash(rows: Iterable[Mapping[str, Any]]) -> str:
    """sha256 of rows as canonical JSON lines: the same for jsonl, parquet and `datasets`."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def need(row: Mapping[str, Any], key: str, where: str) -> Any:
    """row[key]; raises EvalError naming the key (and the ones there are) without quoting the row."""
    if key not in row or row[key] is None:
        raise EvalError(f"{where}: no field {key!r} (fields: {', '.join(map(str, row))})")
    return row[key]


def request_seed(seed: int, question: str, repeat: int) -> int:
    """A seed for one answer: a function of the run's seed, the question's id and the repeat alone (31
    bits)."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{question}/{repeat}".encode()).digest()[:4], "big") >> 1


def sampling(options: TaskOptions) -> tuple[float, float]:
    """(temperature, top_p): as asked; else greedy for one sample, 1.0 and 0.95 for several (avg@k as Kimi
    K2.5)."""
    default = (0.0, 1.0) if options.samples == 1 else (1.0, 0.95)
    temperature = default[0] if options.temperature is None else options.temperature
    return temperature, (default[1] if options.top_p is None else options.top_p)


def lettered(options: Sequence[str], pattern: str) -> str:
    """One line per option, for example pattern "{}. {}"."""
    return "".join(pattern.format(LETTERS[i], option) + "\n" for i, option in enumerate(options))


def choice_requests(context: Prompt, continuations: Sequence[str], shared: int = 0) -> list[ScoreRequest]:
    """One score request for every option."""
    return [ScoreRequest(context, continuation, shared) for continuation in continuations]


def score_choices(question: Question, outputs: Sequence[LogProb], gold: int, *, letters: bool) -> Record:
    """Record fields of a log-likelihood multiple choice.

    letters: options are letters, all of about one token, compared by ln p; otherwise by ln p per character of
    the option (lm-evaluation-harness' acc_norm), with the unnormalised verdict (its acc) as score_sum.
    logprobs: ln p of every option.
    """
    sums = [output.sum for output in outputs]
    by_sum = chosen = best_choice(sums)
    extra: Record = {}
    if not letters:
        lengths = [max(len(choice), 1) for choice in question.choices]
        chosen = best_choice([total / length for total, length in zip(sums, lengths)])
        extra = {"score_sum": float(by_sum == gold)}

    return {
        "extracted": LETTERS[chosen],
        "target": LETTERS[gold],
        "score": float(chosen == gold),
        "chance": 1 / len(outputs),
        "logprobs": [round(value, 6) for value in sums],
        **extra,
    }
