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
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from earlyfusion.data.errors import DataError
from earlyfusion.eval.stats import Array
from earlyfusion.kernels.errors import one_line

VIEWS = {"blind": "blind_score", "words": "words_score"}
"""Further lines of a task: name -> key of the record. Beside them stands "seeing": score - blind_score."""
LARGEST = 1e100
"""Numbers from here on are no scores; NaN and integers of 400 digits neither."""


class CompareError(DataError):
    """Runs that cannot be compared: what differs, and what to do."""


@dataclass(frozen=True)
class TaskRun:
    """One task of one run. Question i has the id `ids[i]` (in order) and the scores `samples[i]`, whose mean
    is `scores[i]`."""

    task: str
    folder: Path
    data_hash: str
    ids: tuple[str, ...]
    samples: tuple[tuple[float, ...], ...]
    scores: Array
    categories: tuple[str, ...]
    clusters: tuple[str, ...]
    prompts: dict[tuple[str, int], str]
    """(id, repeat) -> hash of the prompt"""
    unextracted: float | None
    """Share of answers nothing could be read from; None where the task extracts nothing."""
    tokens: float | None
    """Mean generated tokens an answer."""
    summary: dict[str, Any] = field(default_factory=dict)
    view: str = ""
    """"" for the task's own score, else one of VIEWS, or "seeing"."""

    @property
    def mean(self) -> float:
        """Mean over questions."""
        return float(self.scores.mean())

    @property
    def prompt_hash(self) -> str:
        """Over (id, repeat, prompt hash) of all rows."""
        rows = "\n".join(f"{i}\t{repeat}\t{hashed}" for (i, repeat), hashed in sorted(self.prompts.items()))
        return hashlib.sha256(rows.encode()).hexdigest()


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: one run, or several that differ in their training seed only."""

    label: str
    runs: tuple[dict[str, TaskRun], ...]
    folders: tuple[Path, ...]

    def tasks(self) -> list[str]:
        """Tasks that every run has, in the order of the first."""
        return [task for task in self.runs[0] if all(task in run for run in self.runs)]

    def of(self, task: str) -> list[TaskRun]:
        """The task in every run."""
        return [run[task] for run in self.runs]


def load_arm(label: str, given: str, metric: str = "score") -> Arm:
    """Load "DIR", "DIR,DIR,..." or a quoted glob pattern. Raises CompareError when there is nothing to
    read."""
    folders: list[Path] = []
    for part in map(str.strip, given.split(",")):
        if not part:
            continue
        if glob.has_magic(part) and not Path(part).exists():
            folders += [Path(name) for name in sorted(glob.glob(part)) if Path(name).is_dir()]
        else:
            folders.append(Path(part))
    if not folders:
        raise CompareError(f"{label}: {given!r} names no folder; give the --out folder of earlyfusion eval")
    return Arm(label, tuple(load_run(folder, metric) for folder in folders), tuple(folders))


def load_run(folder: Path, metric: str = "score") -> dict[str, TaskRun]:
    """All tasks of one evaluation folder (or of a single task's folder)."""
    if not folder.is_dir():
        raise CompareError(f"{folder}: no such folder; give the --out folder of earlyfusion eval")
    places = [folder] if (folder / "records.jsonl").is_file() else sorted(folder.glob("*/"))
    runs: dict[str, TaskRun] = {}
    for place in places:
        if (place / "records.jsonl").is_file():
            runs |= {run.task: run for run in load_task(place, metric)}
    if not runs:
        raise CompareError(
            f"{folder}: holds no <task>/records.jsonl; give the --out folder of earlyfusion eval"
        )
    return runs


def load_task(folder: Path, metric: str = "score") -> list[TaskRun]:
    """One task folder: the task's own line, then its views. Raises CompareError for rows that lack what is
    needed."""
    rows = _rows(folder / "records.jsonl")
    summary = _summary(folder / "summary.json")
    # A line of its own for every view that all records have.
    values = {"": [_number(row, metric, folder) for row in rows]}
    for view, key in VIEWS.items():
        if metric == "score" and all(key in row for row in rows):
            values[view] = [_number(row, key, folder) for row in rows]
    if "blind" in values:
        values["seeing"] = [seen - blind for seen, blind in zip(values[""], values["blind"])]
    return [_line(view, numbers, rows, summary, folder) for view, numbers in values.items()]


def _line(
    view: str, numbers: Sequence[float], rows: Sequence[dict[str, Any]], summary: dict[str, Any], folder: Path
) -> TaskRun:
    """The rows of a task with one number each."""
    samples: dict[str, list[float]] = {}
    first: dict[str, dict[str, Any]] = {}
    for row, number in zip(rows, numbers):
        samples.setdefault(str(row["id"]), []).append(number)
        first.setdefault(str(row["id"]), row)

    # What is said of the answers belongs to the task's own line.
    extracted = [row["extracted"] for row in rows if "extracted" in row and not view]
    tokens = [float(row["tokens"]) for row in rows if _is_number(row.get("tokens")) and not view]
    task = str(summary.get("task") or folder.resolve().name)
    return TaskRun(
        task=f"{task} ({view})" if view else task,
        view=view,
        folder=folder,
        data_hash=str(summary.get("data_hash") or ""),
        ids=tuple(samples),
        samples=tuple(map(tuple, samples.values())),
        scores=np.array([float(np.mean(group)) for group in samples.values()]),
        categories=tuple(str(row.get("category") or "all") for row in first.values()),
        clusters=tuple(str(row.get("cluster") or row["id"]) for row in first.values()),
        prompts={(str(row["id"]), int(row.get("repeat") or 0)): str(row.get("prompt_hash")) for row in rows},
        unextracted=extracted.count(None) / len(rows) if extracted else None,
        tokens=float(np.mean(tokens)) if tokens else None,
        summary=summary,
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    """Rows in the order of (id, repeat); a question written twice by a resumed run counts once, the last
    time."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows[str(row["id"]), int(row.get("repeat") or 0)] = row
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CompareError(
                f"{path}:{number}: not a record ({type(error).__name__}: {one_line(error)}); expected a JSON"
                " object with id, prompt_hash and score; run earlyfusion eval again with the same --out to"
                " mend the file"
            ) from None

    if not rows:
        raise CompareError(f"{path}: no rows; run earlyfusion eval to the end first")
    return [row for _, row in sorted(rows.items())]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CompareError(f"{path}: cannot be read ({one_line(error)}); evaluate again") from None


def _number(row: dict[str, Any], metric: str, folder: Path) -> float:
    metrics = row.get("metrics")
    metrics = metrics if isinstance(metrics, dict) else {}
    value = row.get(metric) if metric == "score" else metrics.get(metric, row.get(metric))
    if not _is_number(value):
        known = ", ".join(["score", *metrics])
        raise CompareError(
            f"{folder / 'records.jsonl'}: question {row['id']!r} has no number {metric!r} (known here:"
            f" {known}); choose another --metric or evaluate again"
        )
    return float(value)  # type: ignore[arg-type]


def _summary(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
    except (CompareError, ValueError, RecursionError):
        raise CompareError(
            f"{path}: missing or unreadable; the evaluation did not finish: run it again"
        ) from None
    return found if isinstance(found, dict) else {}


# equal questions


def aligned(arms: Sequence[Arm]) -> list[str]:
    """The tasks all runs of all arms share, after checking that they asked the same. Raises CompareError
    otherwise."""
    shared = [task for task in arms[0].tasks() if all(task in arm.tasks() for arm in arms[1:])]
    if not shared:
        listed = "; ".join(f"{arm.label}: {', '.join(arm.tasks()) or 'none'}" for arm in arms)
        raise CompareError(f"no task is in every run ({listed}); evaluate the same --tasks for all of them")
    for task in shared:
        first, *others = [run for arm in arms for run in arm.of(task)]
        for other in others:
            _same(first, other)
    return shared


def _same(a: TaskRun, b: TaskRun) -> None:
    where = f"{a.task}: {a.folder} and {b.folder}"
    if a.data_hash != b.data_hash or not a.data_hash:
        shown = [value[:12] or "(none)" for value in (a.data_hash, b.data_hash)]
        raise CompareError(
            f"{where} were asked different data (data hashes {shown[0]} and {shown[1]}); evaluate both on the"
            " same --data, --limit and revision"
        )

    if a.prompts.keys() != b.prompts.keys():
        missing = len(a.prompts.keys() ^ b.prompts.keys())
        raise CompareError(
            f"{where} answered different questions ({len(a.prompts)} and {len(b.prompts)} answers, {missing}"
            " not in both); finish both runs with equal --limit and --samples"
        )

    differing = [key for key in a.prompts if a.prompts[key] != b.prompts[key]]
    if differing or any(value in ("None", "") for value in a.prompts.values()):
        example = differing[0][0] if differing else next(iter(a.prompts))[0]
        raise CompareError(
            f"{where} were prompted differently ({len(differing)} of {len(a.prompts)} prompt hashes differ or"
            f" are missing, e.g. question {example!r}); use the same protocol, --shots and version for both"
        )
