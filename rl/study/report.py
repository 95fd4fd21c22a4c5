"""The page of a transfer study: OUT/report.html, one file that loads nothing from elsewhere.

write_report(config, out, results) -> Path        results: what analysis.analyse gave; shown by study.html

Curves are read from the runs' own folders; what was shown and answered stands in the report of each run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from earlyfusion.kernels.files import read_jsonl
from earlyfusion.pipeline.progress import is_finite
from earlyfusion.pipeline.report.data import Series
from earlyfusion.pipeline.report.page import number, write_page
from earlyfusion.rl.report.measured import read_measured
from earlyfusion.rl.study.plan import StudyConfig

Row = Mapping[str, Any]
# Both are warnings on the page, not exclusions: the claims stand as registered.
FULL = 0.95
"""Accuracy of the starts above which a gain cannot be told."""
SHORT = 0.9
"""Share of problems solved by a rule of place above which the skill is not needed."""

points = partial(number, form="+.1f", scale=100)
"""A difference in points, with its sign; a dash where there is none."""
percent = partial(number, form=".1f", scale=100)
"""A share in percent."""


def write_report(config: StudyConfig, out: Path, results: Row) -> Path:
    """Write the page; returns its path."""
    pass_k = f"pass@{config.measure.samples}"
    metrics = ("accuracy", "p_target", "p_matched", pass_k, "ece")
    others = [label for label in results["start"] if label != results["primary"]]
    table, drawn = [], []
    for arm in config.arms:
        # An arm that has not run yet has no rows.
        mine = {(row["label"], row["metric"]): row for row in results["rows"] if row["arm"] == arm.name}
        if not mine:
            continue
        label = next((row["label"] for row in mine.values() if row["registered"]), results["primary"])
        found = {metric: mine.get((label, metric)) for metric in metrics}
        table.append(
            {
                **arm.model_dump(),
                "prompts": [config.label(task) for task in arm.tasks],
                "verdict": results["verdicts"][arm.name],
                "metrics": found,
                "others": {other: mine.get((other, "accuracy")) for other in others},
                "temperature": results["temperatures"][arm.name],
            }
        )
        row = found["accuracy"]
        if row is not None:
            scaled = {key: 100 * row[key] for key in ("value", "low", "high")}
            # Every run is a dot: means hide a single run that carries an arm.
            dots = [[100 * x for x in runs] for runs in row["per_seed"]]
            drawn.append({"label": arm.name, **scaled, "dots": dots})

    page = {
        **results,
        "title": "Vision RL and the same skill in words",
        "note": "Transfer study",
        "study": config.model_dump(),
        "headline": headline(results),
        "metrics": metrics[1:],
        "others": others,
        "table": table,
        "drawn": drawn,
        "curves": curves(config, out),
        "costs": costs(out),
    }
    return write_page(out / "report.html", "study.html", page)


def headline(results: Row) -> str:
    """What came out, in plain sentences."""
    sentences = {
        "gain, above": "A gain in words that its controls do not show",
        "gain": "A gain in words that its controls may explain",
        "loss": "A loss in words",
        "": "No difference in words could be shown",
    }
    # The order matters: a verdict belongs to the first beginning that it has.
    named: dict[str, list[str]] = {start: [] for start in sentences}
    for name, about in results["arms"].items():
        if about["kind"] == "treated":
            verdict = results["verdicts"][name]
            named[next(start for start in sentences if verdict.startswith(start))].append(name)
    told = [f"{sentences[start]}: {', '.join(names)}." for start, names in named.items() if names]

    start, rule = results["start"].get(results["primary"]), results["shortcuts"].get(results["primary"])
    if start and start["accuracy"]["mean"] > FULL:
        solved = percent(start["accuracy"]["mean"])
        told.append(
            f"The starts solve {solved} % of the primary problems already: there is no room to see a gain,"
            " take a harder skill."
        )
    if rule and rule["solves"] >= SHORT:
        told.append(
            f"“{rule['rule'].capitalize()}” solves {percent(rule['solves'])} % of the primary problems: a"
            " gain can be that rule and not the skill."
        )
    return " ".join(told) or "Nothing was measured yet."


# ---- From the runs' own folders.

Values = dict[int, float]
"""Update -> number of one run."""


def logged(folder: Path, key: str) -> Values:
    """A number of the logged updates of a run."""
    found = {}
    for record in read_jsonl(folder / "metrics.jsonl"):
        if record.get("event") == "train" and is_finite(record.get(key)):
            found[int(record["step"])] = float(record[key])
    return found


def accuracy(folder: Path, label: str) -> Values:
    """Greedy accuracy of one kind of problem, measured during a run."""
    found = {}
    for update, records in read_measured(folder).items():
        solved = [float(record["solved"]) for record in records if record.get("label") == label]
        if solved:
            found[update] = statistics.fmean(solved)
    return found


def curves(config: StudyConfig, out: Path) -> list[tuple[str, str, dict[str, Series]]]:
    """(title, unit, arm -> mean over its runs, at the updates that all of them have)."""

    def of_arms(read: Callable[[Path, str], Values], key: str) -> dict[str, Series]:
        found: dict[str, Series] = {}
        for arm in config.arms:
            # A run that logged nothing must not empty the intersection; an arm without runs keeps its colour.
            known = [read(folder, key) for folder in sorted(out.glob(f"runs/*/{arm.name}/*"))]
            known = [values for values in known if values]
            steps = sorted(set.intersection(*map(set, known))) if known else []
            means = [statistics.fmean(run[step] for run in known) for step in steps]
            found[arm.name] = ([float(step) for step in steps], means)
        return found

    skill = config.skill
    return [
        ("Score of the task on the arm's own prompts", "score", of_arms(logged, "score")),
        ("Reward trained on (random in the random arm)", "reward", of_arms(logged, "reward")),
        (f"Greedy accuracy, {skill}/picture", "accuracy", of_arms(accuracy, f"{skill}/picture")),
        (f"Greedy accuracy, {skill}/twin", "accuracy", of_arms(accuracy, f"{skill}/twin")),
        ("Entropy of the next token", "nats", of_arms(logged, "entropy")),
    ]


def costs(out: Path) -> list[dict[str, Any]]:
    """What every arm cost: runs, and the median of their seconds."""
    seconds: dict[str, list[float]] = {}
    for record in read_jsonl(out / "study.jsonl"):
        # A stage is "run/<start>/<arm>/<run>".
        kind, *place = str(record.get("stage")).split("/")
        if record.get("event") == "done" and kind == "run":
            seconds.setdefault(place[1], []).append(float(record["seconds"]))
    return [{"arm": arm, "runs": len(own), "seconds": statistics.median(own)} for arm, own in seconds.items()]
