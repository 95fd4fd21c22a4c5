"""Compares runs of `earlyfusion eval`: reads them, lines them up question by question, and gives for every
task, and every category of it, the paired delta with what it can show.

    OUT/<task>/records.jsonl   one object a line: id, prompt_hash, score, category; optional repeat, cluster,
                               extracted, tokens (generated), metrics {name: number}
    OUT/<task>/summary.json    task, data_hash, model, metrics (of which chance and majority are shown)

A visual task's record also holds blind_score and words_score (eval/benchmarks/visual.py); each becomes a
line of its own, and so does what seeing adds, score - blind_score, question by question.

A question asked several times (repeat 0, 1, ...) has one score: the mean. Runs are comparable only if task by
task their data hashes, their questions and every prompt are equal; `aligned` refuses everything else.

The headline interval is the clustered one (clusters = questions about one picture, or the same text; without
such clusters it equals the paired one). A delta is called a gain or a loss only if its interval excludes 0,
its p value still does after Holm over all tasks (of the same view), and, with several seeds, the interval for
new questions and new seeds does too. Everything is in the score's own unit; 0.017 of an accuracy is 1.7
points.
"""

import glob
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from earlyfusion.data.errors import DataError
from earlyfusion.eval.harness import RECORDS, SUMMARY, read_records
from earlyfusion.eval.stats import (
    ALPHA,
    Array,
    Estimate,
    clustered_estimate,
    combined,
    holm,
    seed_estimate,
    sign_flip_p,
    smallest_delta,
)
from earlyfusion.kernels.files import Record

PUBLISHED = {"mmlu_pro": 0.017, "gpqa_diamond": 0.021}
"""Change after vision RL that the Kimi K2.5 report (arXiv 2602.02276, Table 2) gives; no control arm, no
error bars."""

VIEWS = {"blind": "blind_score", "words": "words_score"}
"""Further lines of a task: name -> key of the record. Beside them stands "seeing": score - blind_score."""
LARGEST = 1e100
"""Numbers from here on are no scores; NaN and integers of 400 digits neither."""


class CompareError(DataError):
    """Runs that cannot be compared: what differs, and what to do."""


@dataclass(frozen=True)
class TaskRun:
    """One task of one run. Question i (in the order of the ids) has the mean score `scores[i]` over its
    repeats."""

    task: str
    view: str
    """"" for the task's own score, else one of VIEWS, or "seeing"."""
    folder: Path
    data_hash: str
    summary: Record
    scores: Array
    categories: list[str]
    clusters: list[str]
    prompts: dict[tuple[str, int], str]
    """(id, repeat) -> hash of the prompt"""
    said: dict[str, float]
    """Of the task's own answers: "unextracted", the share nothing could be read from (absent where the task
    extracts nothing), and "tokens", the mean generated tokens."""


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

    # What all lines share: the questions, where they belong, how they were put. Rows stand in the order of
    # (id, repeat), so the first row of a question speaks for it.
    name = str(summary.get("task") or path.parent.resolve().name)
    ids, first, place = np.unique([key for key, _ in sorted(records)], return_index=True, return_inverse=True)
    said = {}
    if "extracted" in rows[0]:
        said["unextracted"] = float(np.mean([row.get("extracted") is None for row in rows]))
    if tokens := [row["tokens"] for row in rows if row.get("tokens") is not None]:
        said["tokens"] = float(np.mean(tokens))

    lines = []
    for view, numbers in values.items():
        # The view is part of the name: Holm and the tables see tasks of their own. What is said of the
        # answers belongs to the task's own line.
        lines.append(
            TaskRun(
                task=f"{name} ({view})" if view else name,
                view=view,
                folder=path.parent,
                data_hash=str(summary.get("data_hash") or ""),
                summary=summary,
                scores=np.bincount(place, weights=numbers) / np.bincount(place),
                categories=[str(rows[i].get("category") or "all") for i in first],
                clusters=[str(rows[i].get("cluster") or key) for i, key in zip(first, ids)],
                prompts={key: str(row.get("prompt_hash")) for key, row in records.items()},
                said={} if view else said,
            )
        )
    return lines


def _number(row: Record, metric: str, path: Path) -> float:
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


# numbers


def compare_arms(base: Arm, treated: Arm, control: Arm | None = None) -> Record:
    """The whole comparison as plain data (the JSON file). Raises CompareError for runs that did not ask the
    same.

    control: an arm that began at base and got everything but the treatment.
    """
    arms = [arm for arm in (base, treated, control) if arm is not None]
    tasks = aligned(arms)
    entries = []
    for task in tasks:
        sides = {"base": base.of(task), "treated": treated.of(task)}
        first = sides["base"][0]
        # Question by question: the order of both is that of the ids, checked by `aligned`.
        a, b = question_means(sides["base"]), question_means(sides["treated"])
        entry: Record = {
            "task": task,
            "view": first.view,
            "n": len(a),
            "clusters": len(set(first.clusters)),
            "data_hash": first.data_hash,
            "delta": _tested(b - a, first.clusters),
            "seeds": None,
            "categories": _categories(a, b, first),
            "published": PUBLISHED.get(task),
            "baselines": {},
        }
        if not first.view:
            metrics = first.summary.get("metrics") or {}
            entry["baselines"] = {name: metrics.get(name) for name in ("chance", "majority")}
        if control is not None:
            # Both changes on the same questions, so their difference is paired as well.
            sides["control"] = control.of(task)
            own = question_means(sides["control"]) - a
            entry["control_delta"] = _told(clustered_estimate(own, first.clusters))
            entry["difference_in_differences"] = _tested(b - a - own, first.clusters)
        entry |= {arm: side(runs) for arm, runs in sides.items()}

        # Intervals over seeds (one number a seed: its mean over the questions), and over both together.
        if len(base.runs) + len(treated.runs) > 2:
            questions = clustered_estimate(b - a, first.clusters)
            seeds = seed_estimate(entry["base"]["seeds"], entry["treated"]["seeds"])
            both = combined(questions.value, questions, seeds)
            entry["seeds"] = {"seeds": _told(seeds), "both": _told(both)}
        entries.append(entry)

    # Holm's family are all tasks of one view: seen, blind and in words are asked apart.
    for view in {entry["view"] for entry in entries}:
        _adjust([entry["delta"] for entry in entries if entry["view"] == view])
    for entry in entries:
        entry["verdict"] = verdict(entry)

    known = {task for arm in arms for run in arm.runs for task in run}
    return {
        "arms": {arm.label: [str(folder) for folder in arm.folders] for arm in arms},
        "tasks": entries,
        "left_out": sorted(known.difference(tasks)),
    }


def question_means(runs: Sequence[TaskRun]) -> Array:
    """Score of every question, mean over the arm's runs, which ask the same in the same order."""
    return np.mean([run.scores for run in runs], axis=0)


def side(runs: Sequence[TaskRun]) -> Record:
    """What is said of one arm on one task: score, its standard error, each seed, unextracted share, answer
    length."""
    # The same clusters as for the difference, or the two intervals could not be read together.
    estimate = clustered_estimate(question_means(runs), runs[0].clusters)
    found: Record = {"score": estimate.value, "se": estimate.se, "low": estimate.low, "high": estimate.high}
    found["seeds"] = [float(run.scores.mean()) for run in runs]
    for name in ("unextracted", "tokens"):
        known = [run.said[name] for run in runs if name in run.said]
        found[name] = sum(known) / len(known) if known else None
    return found


def _told(estimate: Estimate) -> Record:
    """As JSON, with whether the interval excludes 0."""
    return {**vars(estimate), "clear": estimate.excludes_zero}


def _tested(difference: Array, clusters: Sequence[str]) -> Record:
    """The clustered interval with the p of the sign-flip test, and the smallest delta that shows."""
    # One test for tasks, categories and controls: what differs is the family that Holm is told of.
    estimate = clustered_estimate(difference, clusters)
    return {
        **_told(estimate),
        "p": sign_flip_p(difference, clusters),
        "smallest_delta": smallest_delta(estimate.se, len(set(clusters))),
    }


def _categories(a: Array, b: Array, run: TaskRun) -> list[Record]:
    """One entry per category, with Holm's p over all of them; empty when there is one category only."""
    entries: list[Record] = []
    # Masks and not lists: a task has 12,032 questions and 14 categories.
    categories, clusters = np.array(run.categories), np.array(run.clusters)
    for name in dict.fromkeys(run.categories):
        own = categories == name
        if own.all():
            return []
        scores = {"base": float(a[own].mean()), "treated": float(b[own].mean())}
        entries.append({"category": name, **scores, **_tested((b - a)[own], clusters[own].tolist())})
    _adjust(entries)
    return entries


def _adjust(claims: Sequence[Record]) -> None:
    """Enter Holm's p over a family."""
    for claim, adjusted in zip(claims, holm([claim["p"] for claim in claims])):
        claim["p_holm"] = adjusted


def verdict(entry: Record) -> str:
    """gain, loss or "no difference shown", with the limits of what was seen."""
    delta, seeds, control = entry["delta"], entry["seeds"], entry.get("difference_in_differences")
    # A claim has to survive questions, seeds and the number of claims.
    if delta["clear"] and delta["p_holm"] <= ALPHA and (not seeds or seeds["both"]["clear"]):
        word = "gain" if delta["value"] > 0 else "loss"
        if control is not None and not control["clear"]:
            return f"{word}, not told apart from the control's"
        return word

    # Two models that guess differ by luck alone; that is said before anything else.
    chance = entry["baselines"].get("chance")
    sides = (entry["base"], entry["treated"])
    if chance is not None and all(one["low"] <= chance <= one["high"] for one in sides):
        return "no difference shown (both at chance)"
    if seeds and delta["clear"]:
        return "no difference shown (seeds disagree)"
    return "no difference shown"
