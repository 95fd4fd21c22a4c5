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

VIEWS = {"blind": "blind_score", "words": "words_score", "seeing": ""}
"""Further lines of a task: name -> key of the record (seeing: score - blind_score)."""


class CompareError(DataError):
    """Runs that cannot be compared: what differs, and what to do."""


@dataclass(frozen=True)
class TaskRun:
    """One task of one run. `scores[i]` belongs to question `ids[i]`; `samples[i]` are its scores one by
    one."""

    task: str
    folder: Path
    data_hash: str
    prompt_hash: str
    """Over (id, repeat, prompt hash) of all rows."""
    ids: tuple[str, ...]
    scores: Array
    samples: tuple[tuple[float, ...], ...]
    categories: tuple[str, ...]
    clusters: tuple[str, ...]
    prompts: dict[tuple[str, int], str]
    unextracted: float | None
    """Share of answers nothing could be read from; None where the task extracts nothing."""
    tokens: float | None
    """Mean generated tokens an answer."""
    summary: dict[str, Any] = field(default_factory=dict)
    view: str = ""
    """"" for the task's own score, else one of VIEWS."""

    @property
    def mean(self) -> float:
        """Mean over questions."""
        return float(self.scores.mean())


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
    for part in filter(None, (part.strip() for part in given.split(","))):
        found = (
            sorted(glob.glob(part)) if any(c in part for c in "*?[") and not Path(part).exists() else [part]
        )
        folders += [Path(name) for name in found if not glob.has_magic(part) or Path(name).is_dir()]
    if not folders:
        raise CompareError(f"{label}: {given!r} names no folder; give the --out folder of earlyfusion eval")
    return Arm(label, tuple(load_run(folder, metric) for folder in folders), tuple(folders))


def load_run(folder: Path, metric: str = "score") -> dict[str, TaskRun]:
    """All tasks of one evaluation folder (or of a single task's folder)."""
    if not folder.is_dir():
        raise CompareError(f"{folder}: no such folder; give the --out folder of earlyfusion eval")
    places = (
        [folder]
        if (folder / "records.jsonl").is_file()
        else sorted(p.parent for p in folder.glob("*/records.jsonl"))
    )
    if not places:
        raise CompareError(
            f"{folder}: holds no <task>/records.jsonl; give the --out folder of earlyfusion eval"
        )
    runs = [run for place in places for run in load_task(place, metric)]
    return {run.task: run for run in runs}


def load_task(folder: Path, metric: str = "score") -> list[TaskRun]:
    """One task folder: the task's own line, then its views. Raises CompareError for rows that lack what is
    needed."""
    rows = list(_rows(folder / "records.jsonl").values())
    if not rows:
        raise CompareError(f"{folder / 'records.jsonl'}: no rows; run earlyfusion eval to the end first")
    rows.sort(key=lambda row: (str(row["id"]), int(row.get("repeat") or 0)))
    summary = _summary(folder / "summary.json")
    values = {"": [_number(row, metric, folder) for row in rows]}
    for view, key in VIEWS.items():
        if metric == "score" and key and all(key in row for row in rows):
            values[view] = [_number(row, key, folder) for row in rows]
    if "blind" in values:
        values["seeing"] = [seen - blind for seen, blind in zip(values[""], values["blind"])]
    return [_line(view, numbers, rows, summary, folder) for view, numbers in values.items()]


def _line(
    view: str, numbers: Sequence[float], rows: Sequence[dict[str, Any]], summary: dict[str, Any], folder: Path
) -> TaskRun:
    by_id: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        by_id.setdefault(str(row["id"]), []).append(index)
    samples = tuple(tuple(numbers[i] for i in places) for places in by_id.values())
    prompts = {(str(row["id"]), int(row.get("repeat") or 0)): str(row.get("prompt_hash")) for row in rows}
    digest = hashlib.sha256(
        "\n".join(f"{i}\t{r}\t{h}" for (i, r), h in sorted(prompts.items())).encode()
    ).hexdigest()
    first = [rows[places[0]] for places in by_id.values()]
    extracting = [row for row in rows if "extracted" in row] if view == "" else []
    counted = [float(row["tokens"]) for row in rows if view == "" and _measured(row.get("tokens"))]
    task = str(summary.get("task") or folder.resolve().name)
    return TaskRun(
        task=f"{task} ({view})" if view else task,
        view=view,
        folder=folder,
        data_hash=str(summary.get("data_hash") or ""),
        prompt_hash=digest,
        ids=tuple(by_id),
        scores=np.array([float(np.mean(group)) for group in samples]),
        samples=samples,
        categories=tuple(str(row.get("category") or "all") for row in first),
        clusters=tuple(str(row.get("cluster") or row["id"]) for row in first),
        prompts=prompts,
        unextracted=sum(row["extracted"] is None for row in extracting) / len(rows) if extracting else None,
        tokens=sum(counted) / len(counted) if counted else None,
        summary=summary,
    )


def _rows(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Rows by (id, repeat); a question written twice by a resumed run counts once, the last time."""
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
    return rows


def _measured(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e100


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CompareError(f"{path}: cannot be read ({one_line(error)}); evaluate again") from None


def _number(row: dict[str, Any], metric: str, folder: Path) -> float:
    given = row.get("metrics")
    metrics = given if isinstance(given, dict) else {}
    value = row.get("score") if metric == "score" else metrics.get(metric, row.get(metric))
    if not isinstance(value, int | float) or not abs(value) < 1e100:  # also NaN, and integers of 400 digits
        known = ", ".join(["score", *metrics])
        raise CompareError(
            f"{folder / 'records.jsonl'}: question {row['id']!r} has no number {metric!r} (known here:"
            f" {known}); choose another --metric or evaluate again"
        )
    return float(value)


def _summary(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
    except (CompareError, ValueError, RecursionError):
        raise CompareError(
            f"{path}: missing or unreadable; the evaluation did not finish: run it again"
        ) from None
    return found if isinstance(found, dict) else {}


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
