"""The measurements of a run for its report: what each kind of held-out problem gained or lost, with its
uncertainty.

OUT/eval/update-<update>.jsonl holds one JSON object a line, the fields of records.Measured without the
picture. The
same problems are asked every time, so that differences are taken problem by problem. A picture is not stored:
it is a function of the problem's key, and is drawn again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image as PILImage

from earlyfusion.data.errors import DataError
from earlyfusion.data.tasks.problem import THOUGHT_CUE, Task
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tasks.rendering import render_text
from earlyfusion.eval.stats import clustered_estimate, holm, sign_flip_p
from earlyfusion.kernels.files import read_jsonl
from earlyfusion.pipeline.progress import is_finite
from earlyfusion.pipeline.report.data import Series

Record = dict[str, Any]
Pair = tuple[Record, Record]
ALL = "all"
BESIDE = ("p_target", "entropy", "ended", "solved_4x")
"""Numbers of a measured problem that are shown before and after, beside its score."""


def read_measured(out: Path) -> dict[int, list[Record]]:
    """Update -> the records measured after it, in order of updates. Broken lines and other files are left
    out."""
    found: dict[int, list[Record]] = {}
    for path in sorted((out / "eval").glob("update-*.jsonl")):
        # Evaluations of other kinds lie in the same folder.
        match = re.fullmatch(r"update-(\d+)\.jsonl", path.name)
        records = [r for r in read_jsonl(path) if isinstance(r.get("key"), str) and is_finite(r.get("score"))]
        if match and records:
            found[int(match[1])] = records
    return dict(sorted(found.items()))


def split_key(key: str) -> tuple[str, str, str, str]:
    """(task, split, level as JSON, seed) of "counting/test/0/12". Raises ValueError for anything else."""
    name, split, rest = key.split("/", 2)
    level, seed = rest.rsplit("/", 1)
    return name, split, level, seed


def label_of(record: Mapping[str, Any]) -> str:
    """The entry that a measurement or a logged group belongs to, as TaskEntry.label writes it."""
    if isinstance(record.get("label"), str) and record["label"]:
        return record["label"]
    try:
        level = split_key(str(record.get("key", "")))[2]
    except ValueError:
        level = str(record.get("difficulty", "?"))
    label = f"{record.get('task', '?')}/{level}/{record.get('form', '?')}"
    # Older records name no label; a thought is known by its cue.
    thought = str(record.get("prompt", "")).rstrip().endswith(THOUGHT_CUE.strip())
    return f"{label}/thought" if thought else label


def by_label(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records of each entry, in order of first appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(label_of(record), []).append(record)
    return groups


def pairs_by_label(measured: Mapping[int, Sequence[Record]]) -> dict[str, list[Pair]]:
    """Entry -> (before, after) of every problem that both the first and the last measurement hold."""
    if len(measured) < 2:
        return {}
    # Only problems of both measurements can be paired.
    before = {(label_of(record), record["key"]): record for record in measured[min(measured)]}
    pairs: dict[str, list[Pair]] = {}
    for record in measured[max(measured)]:
        label = label_of(record)
        if (label, record["key"]) in before:
            pairs.setdefault(label, []).append((before[label, record["key"]], record))
    return pairs


def change(label: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    """The paired statistics of an entry. Problems with one key are one cluster: one scene in several forms.

    before, after: mean scores; delta: their paired difference; p: of the sign-flip test; won, lost: problems
    solved
    only after, only before; verdict: gain or loss only where the 95 % interval excludes 0; the rest are
    (before, after) means, nan where not measured: best of the sampled answers, and BESIDE.
    """
    differences = [after["score"] - before["score"] for before, after in pairs]
    clusters = [after["key"] for _, after in pairs]
    delta = clustered_estimate(differences, clusters)

    # Problems in four cells: solved before or not, after or not.
    solved = [(bool(before.get("solved")), bool(after.get("solved"))) for before, after in pairs]
    verdict = "not shown"
    if delta.excludes_zero:
        verdict = "gain" if delta.value > 0 else "loss"

    # Every number as (before, after), so that none is shown without the other.
    return {
        "label": label,
        "before": mean(before["score"] for before, _ in pairs),
        "after": mean(after["score"] for _, after in pairs),
        "delta": delta,
        "p": sign_flip_p(differences, clusters=clusters),
        "verdict": verdict,
        "won": sum(after and not before for before, after in solved),
        "lost": sum(before and not after for before, after in solved),
        "sampled": tuple(mean(map(best_sample, side)) for side in zip(*pairs)),
        **{key: tuple(mean(record.get(key) for record in side) for side in zip(*pairs)) for key in BESIDE},
    }


def best_sample(record: Record) -> float | None:
    """The best score of the sampled answers; None when none was asked for."""
    return max(filter(is_finite, record.get("sampled") or ()), default=None)


def mean(values: Iterable[Any]) -> float:
    """Mean of those that are numbers or truth values; nan for none."""
    kept = [float(value) for value in values if isinstance(value, bool) or is_finite(value)]
    return sum(kept) / len(kept) if kept else math.nan


def changes(pairs: Mapping[str, Sequence[Pair]]) -> list[dict[str, Any]]:
    """One row for each entry, p after Holm over them, then one for all together if there are several."""
    rows = [change(label, members) for label, members in pairs.items()]
    # All together is no claim of its own: it stands outside the family.
    for row, p in zip(rows, holm([row["p"] for row in rows])):
        row["p"] = p
    if len(rows) > 1:
        rows.append(change(ALL, [pair for members in pairs.values() for pair in members]))
    return rows


def score_curves(measured: Mapping[int, Sequence[Record]]) -> dict[str, Series]:
    """Entry -> mean greedy score over updates."""
    curves: dict[str, Series] = {}
    for update, records in measured.items():
        for label, members in by_label(records).items():
            updates, scores = curves.setdefault(label, ([], []))
            updates.append(update)
            scores.append(mean(record["score"] for record in members))
    return curves


@lru_cache(maxsize=64)
def _task(name: str, options: str) -> Task:
    return make_task(name, **json.loads(options))


def redraw(record: Record, options: Mapping[str, Mapping[str, Any]] | None = None) -> PILImage.Image | None:
    """The picture of a measured problem, from its key; options: task name -> options of the recipe.

    None for words alone, and where the problem of that key is no longer the one that was asked (another
    version, other data).
    """
    try:
        name, split, level, seed = split_key(str(record["key"]))
        # The task is made with the recipe's own options, once for all its problems.
        task = _task(name, json.dumps((options or {}).get(name, {}), sort_keys=True))
        problem = task.sample(int(seed), split, json.loads(level))  # type: ignore[arg-type]
    except (DataError, OSError, TypeError, ValueError, KeyError):
        return None
    if problem.key != record["key"] or problem.target != record.get("target"):
        return None
    if record.get("form") == "rendered":
        return render_text(problem.description)
    return problem.picture if record.get("form") == "picture" else None
