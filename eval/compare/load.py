"""Reads what `earlyfusion eval` left and lines up the runs of a comparison question by question.

    OUT/<task>/records.jsonl   one object a line: id, prompt_hash, score, category; optional repeat, cluster,
                               extracted, tokens (generated), metrics {name: number}
    OUT/<task>/summary.json    task, data_hash, model, metrics (of which chance and majority are shown)

A visual task's record also holds blind_score and words_score (eval/benchmarks/visual.py); each becomes a
line of its own, and so does what seeing adds, score - blind_score, question by question.

A question asked several times (repeat 0, 1, ...) has one score: the mean. Runs are comparable only if task by
task their data hashes, their questions and every prompt are equal; `aligned` refuses everything else.
"""

from __future__ import annotations

import glob
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from earlyfusion.data.errors import DataError
from earlyfusion.eval.harness import RECORDS, SUMMARY, read_records
from earlyfusion.eval.stats import Array

VIEWS = {"blind": "blind_score", "words": "words_score"}
"""Further lines of a task: name -> key of the record. Beside them stands "seeing": score - blind_score."""
LARGEST = 1e100
"""Numbers from here on are no scores; NaN and integers of 400 digits neither."""


class CompareError(DataError):
    """Runs that cannot be compared: what differs, and what to do."""


@dataclass(frozen=True)
class TaskRun:
    """One task of one run. Question i (in the order of the ids) has the scores `samples[i]`, whose mean is
    `scores[i]`."""

    task: str
    view: str
    """"" for the task's own score, else one of VIEWS, or "seeing"."""
    folder: Path
    summary: dict[str, Any]
    samples: list[list[float]]
    scores: Array
    categories: list[str]
    clusters: list[str]
    prompts: dict[tuple[str, int], str]
    """(id, repeat) -> hash of the prompt"""
    said: dict[str, float]
    """Of the task's own answers: "unextracted", the share nothing could be read from (absent where the task
    extracts nothing), and "tokens", the mean generated tokens."""

    @property
    def data_hash(self) -> str:
        """Of the questions' data."""
        return str(self.summary.get("data_hash") or "")


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: one run, or several that differ in their training seed only."""

    label: str
    runs: tuple[dict[str, TaskRun], ...]
    folders: tuple[Path, ...]

    def of(self, task: str) -> list[TaskRun]:
        """The task in every run."""
        return [run[task] for run in self.runs]


def load_arm(label: str, given: str, metric: str = "score") -> Arm:
    """Load "DIR", "DIR,DIR,..." or a quoted glob pattern. Raises CompareError when there is nothing to
    read."""
    folders: list[Path] = []
    for part in filter(None, map(str.strip, given.split(","))):
        # A folder may have brackets in its name.
        matching = [] if Path(part).exists() else sorted(glob.glob(part))
        folders += map(Path, matching or [part])
    if not folders:
        raise CompareError(f"{label}: {given!r} names no folder; give the --out folder of earlyfusion eval")
    return Arm(label, tuple(load_run(folder, metric) for folder in folders), tuple(folders))


def load_run(folder: Path, metric: str) -> dict[str, TaskRun]:
    """All tasks of one evaluation folder (or of a single task's folder)."""
    if not folder.is_dir():
        raise CompareError(f"{folder}: no such folder; give the --out folder of earlyfusion eval")
    runs: dict[str, TaskRun] = {}
    # A task's own folder is taken as well as the one above it.
    for path in (folder / RECORDS, *sorted(folder.glob(f"*/{RECORDS}"))):
        if path.is_file():
            runs |= {run.task: run for run in load_task(path, metric)}
    if not runs:
        raise CompareError(f"{folder}: holds no <task>/{RECORDS}; give the --out folder of earlyfusion eval")
    return runs


def load_task(path: Path, metric: str) -> list[TaskRun]:
    """The records of one task: the task's own line, then its views. Raises CompareError for rows that lack
    what is needed."""
    records = read_records(path)
    rows = [records[key] for key in sorted(records)]
    try:
        summary = dict(json.loads(path.with_name(SUMMARY).read_bytes()))
    except (OSError, ValueError, TypeError):
        rows = []
    if not rows:
        raise CompareError(f"{path.parent}: the evaluation did not finish: run it again, to the end")

    # A line of its own for every view that all records have.
    values = {"": [_number(row, metric, path) for row in rows]}
    for view, key in VIEWS.items():
        if metric == "score" and all(key in row for row in rows):
            values[view] = [_number(row, key, path) for row in rows]
    if "blind" in values:
        values["seeing"] = [seen - blind for seen, blind in zip(values[""], values["blind"])]

    # What all lines share: the questions, where they belong, how they were put.
    name = str(summary.get("task") or path.parent.resolve().name)
    first = {key: row for (key, _), row in reversed(sorted(records.items()))}
    categories = [str(first[key].get("category") or "all") for key in sorted(first)]
    clusters = [str(first[key].get("cluster") or key) for key in sorted(first)]
    prompts = {key: str(row.get("prompt_hash")) for key, row in records.items()}
    unread = [row["extracted"] is None for row in rows if "extracted" in row]
    tokens = [row["tokens"] for row in rows if row.get("tokens") is not None]
    answers = (("unextracted", unread), ("tokens", tokens))
    said = {what: float(np.mean(known)) for what, known in answers if known}

    lines = []
    for view, numbers in values.items():
        samples: dict[str, list[float]] = defaultdict(list)
        for (key, _), number in zip(sorted(records), numbers):
            samples[key].append(number)
        # The view is part of the name: Holm and the tables see tasks of their own. What is said of the
        # answers belongs to the task's own line.
        lines.append(
            TaskRun(
                task=f"{name} ({view})" if view else name,
                view=view,
                folder=path.parent,
                summary=summary,
                samples=list(samples.values()),
                scores=np.array([np.mean(group) for group in samples.values()]),
                categories=categories,
                clusters=clusters,
                prompts=prompts,
                said={} if view else said,
            )
        )
    return lines


def _number(row: dict[str, Any], metric: str, path: Path) -> float:
    # The score is the record's own whatever a metric of that name says.
    metrics = {**(row.get("metrics") or {}), "score": row.get("score")}
    value = {**row, **metrics}.get(metric)
    # NaN compares as false, so it is no number either.
    if not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise CompareError(
            f"{path}: question {row['id']!r} has no number {metric!r} (known here: {', '.join(metrics)});"
            " choose another --metric or evaluate again"
        )
    return float(value)


# equal questions


def aligned(arms: Sequence[Arm]) -> list[str]:
    """The tasks all runs of all arms share, after checking that they asked the same. Raises CompareError
    otherwise."""
    # Every run of every arm: seeds of one arm have to agree as arms do.
    runs = [run for arm in arms for run in arm.runs]
    shared = [task for task in runs[0] if all(task in run for run in runs)]
    if not shared:
        listed = "; ".join(f"{arm.label}: {', '.join(arm.runs[0])}" for arm in arms)
        raise CompareError(f"no task is in every run ({listed}); evaluate the same --tasks for all of them")
    for task in shared:
        for run in runs:
            _same(runs[0][task], run[task])
    return shared


def _same(a: TaskRun, b: TaskRun) -> None:
    where = f"{a.task}: {a.folder} and {b.folder}"
    if a.data_hash != b.data_hash or not a.data_hash:
        raise CompareError(
            f"{where} were asked different data (data hashes {a.data_hash[:12]} and {b.data_hash[:12]});"
            " evaluate both on the same --data, --limit and revision"
        )

    # Pairs that one side lacks would be left out silently, and the easy ones are answered first.
    missing = len(a.prompts.keys() ^ b.prompts.keys())
    if missing:
        raise CompareError(
            f"{where} answered different questions ({len(a.prompts)} and {len(b.prompts)} answers, {missing}"
            " not in both); finish both runs with equal --limit and --samples"
        )
    # A record without a hash says nothing of its prompt: it cannot be taken for equal.
    differing = [key for key, value in a.prompts.items() if value != b.prompts[key] or value in ("None", "")]
    if differing:
        raise CompareError(
            f"{where} were prompted differently ({len(differing)} of {len(a.prompts)} prompt hashes differ or"
            f" are missing, e.g. question {differing[0][0]!r}); use the same protocol, --shots and version"
            " for both"
        )
