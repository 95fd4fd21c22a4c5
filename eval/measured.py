"""Measurements of held-out problems: their numbers, their files, and two of them paired.

    accuracy    share of greedy answers that are solved (`SOLVED_FROM`); one cut off by the limit is no answer
    ended       share of greedy answers that ended by themselves; accuracy_4x, ended_4x: with four times the
    limit p_target    probability of exactly the target's tokens and the end after them, over the whole
    vocabulary pass@k      1 - C(n - c, k) / C(n, k) for c solved of n samples: unbiased (Chen et al. 2021,
    arXiv 2107.03374) ece         sum over bins of n_b / n |accuracy - confidence|, bins of equal mass (Nguyen
                                  and O'Connor 2015)

A file holds one problem a line, without its picture: that can be drawn again from the key. Who measures:
eval/measure.py.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
from PIL import Image as PILImage

from earlyfusion.data.errors import DataError
from earlyfusion.eval.stats import ALPHA, holm, mean_estimate, sign_flip_p
from earlyfusion.kernels.files import Record, write_jsonl

SOLVED_FROM = {"grounding": 0.5, "pointing": 0.5, "polygon": 0.5}
"""Score from which an answer counts as solved: overlap of one half for places, everything for the rest."""
SOLVED_ELSE = 0.999
BINS = 10
MEANS = ("accuracy", "ended", "accuracy_4x", "ended_4x", "score", "p_target", "confidence", "entropy")
"""Figures of a summary that are the mean of a field; accuracy is that of "solved"."""


@dataclass(frozen=True)
class Measured:
    """One held-out problem, answered greedily. score: the task's, in [0, 1]; p_target: probability of the
    target answer's tokens and the end after them; confidence: probability of the greedy answer; entropy: mean
    over the greedy answer's tokens of the next-token entropy, nats; sampled: scores of the sampled answers,
    if any were asked for."""

    task: str
    form: str
    key: str
    category: str
    prompt: str
    target: str
    answer: str
    score: float
    solved: bool
    p_target: float
    confidence: float
    entropy: float
    sampled: tuple[float, ...] = ()
    picture: PILImage.Image | None = None
    label: str = ""
    """Of the entry that was measured."""
    ended: bool = True
    """Whether the greedy answer ended by itself within the limit; one that was cut off counts as no
    answer."""
    solved_4x: bool = False
    ended_4x: bool = True
    """The same with four times the limit, which shows how an answer that was cut off would have gone on."""
    sandbox: str = ""
    """Walls that the sandbox of its programs lacked; "" for none, or without programs."""


def solved(task: str, score: float) -> bool:
    """Whether a score counts as solved."""
    return score >= SOLVED_FROM.get(task, SOLVED_ELSE)


# numbers


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of k samples drawn without replacement from these is correct; k is from 1 to
    `samples`."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def sampled_pass(one: Measured, k: int) -> float:
    """pass@k of one problem's samples."""
    return pass_at_k(len(one.sampled), sum(solved(one.task, score) for score in one.sampled), k)


def ece(confidence: Sequence[float], right: Sequence[bool | float], bins: int = BINS) -> float:
    """Expected calibration error with bins of equal mass."""
    # Sums before the absolute value: a bin is right when it is right on average.
    gap = np.asarray(right, dtype=np.float64) - np.asarray(confidence, dtype=np.float64)
    # Bins of equal mass: a model that is always sure would leave most bins of equal width empty.
    order = np.argsort(np.asarray(confidence), kind="stable")
    parts = np.array_split(order, min(bins, len(order)))
    return float(sum(abs(gap[part].sum()) for part in parts) / len(order))


def summary(measured: Iterable[Measured]) -> dict[str, dict[str, float]]:
    """Label -> n, accuracy, score, p_target, confidence, ece, entropy, and with samples pass@1, pass@2,
    pass@4, ..."""
    rows = {}
    for label, records in by_problem(measured).items():
        part = list(records.values())
        row: dict[str, float] = {"n": len(part)}
        for name in MEANS:
            values = [getattr(one, name.replace("accuracy", "solved")) for one in part]
            row[name] = float(np.mean(values))
        row["ece"] = ece([one.confidence for one in part], [one.solved for one in part])
        # Powers of two are evenly spaced on the axis on which pass@k is read.
        # pass@k for powers of two, as far as every problem has samples.
        k, most = 1, min(len(one.sampled) for one in part)
        while k <= most:
            row[f"pass@{k}"] = float(np.mean([sampled_pass(one, k) for one in part]))
            k *= 2
        rows[label] = row
    return rows


# files


def write_measured(path: str | Path, measured: Iterable[Measured]) -> Path:
    """Write the records, whole or not at all; returns the path."""
    records = []
    for one in measured:
        # A picture can be drawn again from the key, and would be most of the file.
        records.append({name: value for name, value in vars(one).items() if name != "picture"})
    return write_jsonl(path, records)


def load_measured(path: str | Path) -> list[Measured]:
    """Read the records. Raises DataError for a file that is missing or holds something else."""
    if not Path(path).is_file():
        raise DataError(
            f"{path}: no such file; expected measurements as `earlyfusion measure --out DIR` writes them"
        )
    found = []
    text = Path(path).read_text(encoding="utf-8")
    for number, line in enumerate(filter(None, text.split("\n")), 1):
        try:
            fields = json.loads(line)
            found.append(
                Measured(**{**fields, "ended": fields["ended"], "sampled": tuple(fields["sampled"])})
            )
        except (ValueError, TypeError, LookupError) as error:
            raise DataError(
                f"{path} line {number}: not a measurement ({error}; without 'ended' cut answers were"
                " judged by their beginning); measure again"
            ) from None
    return found


# pairs


def by_problem(measured: Iterable[Measured]) -> dict[str, dict[str, Measured]]:
    """label -> key -> record."""
    found: dict[str, dict[str, Measured]] = {}
    for one in measured:
        found.setdefault(one.label or f"{one.task}/{one.form}", {})[one.key] = one
    return found


def paired(before: Sequence[Measured], after: Sequence[Measured]) -> list[Record]:
    """One row for every label and metric that both hold (pass@1, the share of right samples, where samples
    were drawn): means, difference, SE, interval, p of the sign-flip test, p_holm over all rows, and `clear`:
    the interval excludes 0 and p_holm <= ALPHA. Only problems of both take part.

    Raises DataError when they have none in common.
    """
    first = by_problem(before)
    rows: list[Record] = []
    for label, records in by_problem(after).items():
        # Only problems that both answered: a difference of two sets would compare the sets.
        pairs = [(first[label][key], one) for key, one in records.items() if key in first.get(label, {})]
        for metric, value in METRICS.items() if pairs else ():
            if metric == "pass@1" and not all(one.sampled for pair in pairs for one in pair):
                continue
            a, b = np.array([[value(one) for one in pair] for pair in pairs], dtype=np.float64).T
            # Problem by problem: what both find hard cancels out.
            difference = mean_estimate(b - a)
            row: Record = {"label": label, "metric": metric}
            row |= {"before": float(a.mean()), "after": float(b.mean())}
            row |= {**vars(difference), "p": sign_flip_p(b - a), "clear": difference.excludes_zero}
            rows.append(row)
    if not rows:
        raise DataError("the two measurements share no problem; measure both with the same tasks and --seed")

    for row, adjusted in zip(rows, holm([row["p"] for row in rows])):
        row["p_holm"] = adjusted
        row["clear"] &= adjusted <= ALPHA
    return rows


METRICS: dict[str, Callable[[Measured], float]] = {
    "accuracy": attrgetter("solved"),
    "accuracy_4x": attrgetter("solved_4x"),
    "score": attrgetter("score"),
    "p_target": attrgetter("p_target"),
    "pass@1": partial(sampled_pass, k=1),
}
"""What is paired, of every record."""
