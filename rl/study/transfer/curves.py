"""Curves, rollouts and costs of a study's runs, read from the runs' own folders."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from earlyfusion.kernels.files import read_jsonl
from earlyfusion.pipeline.progress import is_finite
from earlyfusion.pipeline.report.data import Series, image_source
from earlyfusion.rl.report.gallery import group_card
from earlyfusion.rl.report.measured import read_measured
from earlyfusion.rl.study.transfer.plan import Arm, StudyConfig, run_folder

SHOWN_GROUPS = 3
"""Groups of answers shown of an arm's first run, at its first and its last record."""
Values = dict[int, float]
"""Update -> number of one run."""


def folders(config: StudyConfig, out: Path, arm: str) -> list[Path]:
    """Folders of an arm's runs that exist."""
    every = [run_folder(out, p, arm, r) for p in range(config.seeds) for r in range(config.rl_seeds)]
    return [folder for folder in every if folder.is_dir()]


def mean_curve(runs: Iterable[Values]) -> Series:
    """Mean over the runs at every update that all of them have; runs without any are left out."""
    # A run that logged nothing must not empty the intersection.
    known = [run for run in runs if run]
    steps = sorted(set.intersection(*map(set, known))) if known else []
    return [float(step) for step in steps], [statistics.fmean(run[step] for run in known) for step in steps]


def train_records(folder: Path) -> list[dict[str, Any]]:
    """The logged updates of a run."""
    return [record for record in read_jsonl(folder / "metrics.jsonl") if record.get("event") == "train"]


def logged(folder: Path, key: str) -> Values:
    """A number of the logged updates of a run."""
    return {int(r["step"]): float(r[key]) for r in train_records(folder) if is_finite(r.get(key))}


def accuracy(folder: Path, label: str) -> Values:
    """Greedy accuracy of one kind of problem, measured during a run more than once."""
    found = {}
    for update, records in read_measured(folder).items():
        solved = [float(record["solved"]) for record in records if record.get("label") == label]
        if solved:
            found[update] = statistics.fmean(solved)
    # One measurement is no curve.
    return found if len(found) > 1 else {}


def curves(config: StudyConfig, out: Path) -> list[tuple[str, str, dict[str, Series]]]:
    """(title, unit, arm -> mean over its runs); an arm without runs stays, so that all keep their colours."""

    def of_arms(read: Callable[[Path, str], Values], key: str) -> dict[str, Series]:
        arms = [arm.name for arm in config.arms]
        return {arm: mean_curve(read(folder, key) for folder in folders(config, out, arm)) for arm in arms}

    skill = config.skill
    return [
        ("Score of the task on the arm's own prompts", "score", of_arms(logged, "score")),
        ("Reward trained on (random in the random arm)", "reward", of_arms(logged, "reward")),
        (f"Greedy accuracy, {skill}/picture", "accuracy", of_arms(accuracy, f"{skill}/picture")),
        (f"Greedy accuracy, {skill}/twin", "accuracy", of_arms(accuracy, f"{skill}/twin")),
        ("Entropy of the next token", "nats", of_arms(logged, "entropy")),
    ]


def _image(folder: Path, record: Mapping[str, Any]) -> str | None:
    return image_source(folder, record.get("image"))


def rollouts(config: StudyConfig, out: Path) -> dict[str, list[dict[str, Any]]]:
    """Title -> cards of what was shown and answered, early and late, in the first run of every arm."""
    cards: dict[str, list[dict[str, Any]]] = {}
    for arm in config.arms:
        for folder in folders(config, out, arm.name)[:1]:
            records = [r for r in read_jsonl(folder / "rollouts.jsonl") if is_finite(r.get("update"))]
            # A run of one record is early and late at once.
            for update in dict.fromkeys(record["update"] for record in (*records[:1], *records[-1:])):
                shown = [record for record in records if record["update"] == update][:SHOWN_GROUPS]
                cards[f"{arm.name}, update {update}"] = [
                    group_card(record, partial(_image, folder)) for record in shown
                ]
    return cards


def costs(config: StudyConfig, out: Path) -> list[dict[str, Any]]:
    """What every arm cost, as medians over its runs: updates, answers and seconds an update, seconds of a
    run."""
    seconds: dict[str, list[float]] = {}
    for record in read_jsonl(out / "study.jsonl"):
        # A stage is "run/<start>/<arm>/<run>".
        if record.get("event") == "done" and str(record.get("stage", "")).startswith("run/"):
            seconds.setdefault(record["stage"].split("/")[2], []).append(float(record["seconds"]))
    rows = [cost(config, out, arm, seconds.get(arm.name, [])) for arm in config.arms]
    return [row for row in rows if row["runs"] or row["seconds"]]


def cost(config: StudyConfig, out: Path, arm: Arm, seconds: list[float]) -> dict[str, Any]:
    """One row of `costs`."""
    runs = [records for folder in folders(config, out, arm.name) if (records := train_records(folder))]
    row: dict[str, Any] = {"arm": arm.name, "runs": len(runs)}
    row["updates"] = median(records[-1]["step"] for records in runs)
    for key in ("answers", "step_s"):
        row[key] = median(median(float(r.get(key) or 0) for r in records) for records in runs)
    return row | {"seconds": median(seconds)}


def median(values: Iterable[Any]) -> float | None:
    """The median; None of nothing."""
    found = list(values)
    return statistics.median(found) if found else None
