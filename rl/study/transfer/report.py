"""The page of a transfer study: OUT/report.html, one file that loads nothing from elsewhere.

write_report(config, out, results) -> Path        results: what analysis.analyse gave; shown by study.html
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from earlyfusion.pipeline.report.page import number, write_page
from earlyfusion.rl.study.transfer.curves import costs, curves, rollouts
from earlyfusion.rl.study.transfer.plan import StudyConfig

Row = Mapping[str, Any]
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
    return write_page(out / "report.html", "study.html", study_page(config, out, results))


def study_page(config: StudyConfig, out: Path, results: Row) -> dict[str, Any]:
    """What the template study.html shows."""
    metrics = ("accuracy", "p_target", "p_matched", f"pass@{config.measure.samples}", "ece")
    # Forms and skills beside the registered one: described, not claimed.
    others = [label for label in results["start"] if label != results["primary"]]
    arms, drawn = [], []
    for arm in config.arms:
        # An arm that has not run yet has no rows.
        if arm.name not in results["arms"]:
            continue
        label = primary_label(results, arm.name)
        found = {metric: pick(results, arm.name, label, metric) for metric in metrics}
        own = {
            "prompts": [config.label(task) for task in arm.tasks],
            "verdict": results["verdicts"][arm.name],
        }
        own |= {"metrics": found, "others": {o: pick(results, arm.name, o, "accuracy") for o in others}}
        arms.append({**arm.model_dump(), **own, "temperature": results["temperatures"].get(arm.name)})
        if (row := found["accuracy"]) is not None:
            scaled = {key: row[key] and 100 * row[key] for key in ("value", "low", "high")}
            dots = [[100 * x for x in runs if x is not None] for runs in row["per_seed"]]
            drawn.append({"label": arm.name, **scaled, "dots": dots})

    # The results themselves are the page's data; added is what is read from the runs.
    return {
        **results,
        "title": "Vision RL and the same skill in words",
        "note": "Transfer study",
        "study": config.model_dump(),
        "headline": headline(results),
        "metrics": metrics[1:],
        "others": others,
        "table": arms,
        "drawn": drawn,
        "curves": curves(config, out),
        "rollouts": rollouts(config, out),
        "costs": costs(config, out),
    }


def pick(results: Row, arm: str, label: str, metric: str) -> Row | None:
    """A row of the analysis."""
    wanted = (arm, label, metric)
    return next((row for row in results["rows"] if (row["arm"], row["label"], row["metric"]) == wanted), None)


def primary_label(results: Row, arm: str) -> str:
    """The registered label of an arm."""
    registered = [row["label"] for row in results["rows"] if row["arm"] == arm and row["registered"]]
    return [*registered, results["primary"]][0]


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

    solved = results["start"].get(results["primary"], {}).get("accuracy", {}).get("mean", 0)
    if solved > FULL:
        told.append(
            f"The starts solve {percent(solved)} % of the primary problems already: there is no room to see a"
            " gain, take a harder skill."
        )
    rule = results["shortcuts"].get(results["primary"])
    if rule is not None and rule["solves"] >= SHORT:
        told.append(
            f"“{rule['rule'].capitalize()}” solves {percent(rule['solves'])} % of the primary problems: a"
            " gain can be that rule and not the skill."
        )
    return " ".join(told) or "Nothing was measured yet."
