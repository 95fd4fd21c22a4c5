"""Two measurements of the same problems: paired differences with intervals, and the family's adjusted p
values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from earlyfusion.data.errors import DataError
from earlyfusion.eval.stats import holm, mean_estimate, sign_flip_p
from earlyfusion.rl.measure.run import solved
from earlyfusion.rl.records import Measured

ALPHA = 0.05


def _metrics(one: Measured) -> dict[str, float]:
    found = {
        "accuracy": float(one.solved),
        "accuracy_4x": float(one.solved_4x),
        "score": one.score,
        "p_target": one.p_target,
    }
    if one.sampled:
        found["pass@1"] = sum(solved(one.task, score) for score in one.sampled) / len(one.sampled)
    return found


def by_problem(measured: Sequence[Measured]) -> dict[str, dict[str, Measured]]:
    """label -> key -> record."""
    found: dict[str, dict[str, Measured]] = {}
    for one in measured:
        found.setdefault(one.label, {})[one.key] = one
    return found


def paired(before: Sequence[Measured], after: Sequence[Measured]) -> list[dict[str, Any]]:
    """One row for every label and metric that both hold (pass@1, the share of right samples, where samples
    were drawn): means, difference, SE, interval, p of the sign-flip test, p_holm over all rows, and `clear`:
    the interval excludes 0 and p_holm <= ALPHA. Only problems of both take part.

    Raises DataError when they have none in common.
    """
    first, second = by_problem(before), by_problem(after)
    rows: list[dict[str, Any]] = []
    for label, records in second.items():
        keys = [key for key in records if key in first.get(label, {})]
        if not keys:
            continue
        pairs = [(_metrics(first[label][key]), _metrics(records[key])) for key in keys]
        for metric in (
            name for name in pairs[0][0] if all(name in one and name in other for one, other in pairs)
        ):
            a, b = ([pair[side][metric] for pair in pairs] for side in (0, 1))
            d = [y - x for x, y in zip(a, b)]
            estimate = mean_estimate(d)
            means = {"before": sum(a) / len(a), "after": sum(b) / len(b)}
            rows.append(
                {"label": label, "metric": metric, **means, **estimate.to_dict(), "p": sign_flip_p(d)}
            )
    if not rows:
        raise DataError("the two measurements share no problem; measure both with the same tasks and --seed")
    for row, adjusted in zip(rows, holm([row["p"] for row in rows])):
        row["p_holm"] = adjusted
        row["clear"] = bool(row["se"] > 0 and (row["low"] > 0 or row["high"] < 0) and adjusted <= ALPHA)
    return rows
