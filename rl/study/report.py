"""The page of a transfer study: OUT/report.html, one file that loads nothing from elsewhere.

write_report(config, out, results) -> Path        results: what analysis.analyse gave; shown by study.html

Curves are read from the runs' own folders; what was shown and answered stands in the report of each run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from earlyfusion.pipeline.report.data import Series, read_run, series
from earlyfusion.pipeline.report.page import number, write_page
from earlyfusion.rl.report.run import measured_curves
from earlyfusion.rl.study.analysis import primary_of
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

SENTENCES = {
    "gain, above": "A gain in words that its controls do not show",
    "gain": "A gain in words that its controls may explain",
    "loss": "A loss in words",
    "": "No difference in words could be shown",
}
"""Beginning of a verdict -> what it means; a verdict belongs to the first beginning that it has."""


def write_report(config: StudyConfig, out: Path, results: Row) -> Path:
    """Write the page; returns its path."""
    rows: dict[str, dict[str, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in results["rows"]:
        rows[row["arm"]][row["label"]][row["metric"]] = row
    page = {
        **results,
        "title": "Vision RL and the same skill in words",
        "note": "Transfer study",
        "study": config,
        "headline": headline(results),
        "judged": {arm.name: primary_of(config, arm) for arm in config.arms},
        "rows": rows,
        "curves": curves(config, out),
    }
    return write_page(out / "report.html", "study.html", page)


def headline(results: Row) -> str:
    """What came out, in plain sentences."""
    named: dict[str, list[str]] = {start: [] for start in SENTENCES}
    for name, about in results["arms"].items():
        if about["kind"] == "treated":
            verdict = results["verdicts"][name]
            named[next(start for start in SENTENCES if verdict.startswith(start))].append(name)
    told = [f"{SENTENCES[start]}: {', '.join(names)}." for start, names in named.items() if names]

    start, rule = results["start"].get(results["primary"]), results["shortcuts"].get(results["primary"])
    solved = fmean(row["accuracy"] for row in start) if start else 0.0
    if solved > FULL:
        told.append(
            f"The starts solve {percent(solved)} % of the primary problems already: there is no room to see a"
            " gain, take a harder skill."
        )
    if rule and rule["solves"] >= SHORT:
        told.append(
            f"“{rule['rule'].capitalize()}” solves {percent(rule['solves'])} % of the primary problems: a"
            " gain can be that rule and not the skill."
        )
    return " ".join(told) or "Nothing was measured yet."


def curves(config: StudyConfig, out: Path) -> list[tuple[str, str, dict[str, Series]]]:
    """(title, unit, arm -> mean over its runs, at the updates that all of them have), from the runs' own
    folders."""
    charts: list[tuple[str, str, dict[str, Series]]] = [
        ("Score of the task on the arm's own prompts", "score", {}),
        ("Reward trained on (random in the random arm)", "reward", {}),
        ("Entropy of the next token, nats", "entropy", {}),
        (f"{config.skill}/picture", "accuracy", {}),
        (f"{config.skill}/twin", "accuracy", {}),
    ]
    for arm in config.arms:
        runs = [read_run(folder) for folder in sorted(out.glob(f"runs/*/{arm.name}/*"))]
        for title, key, arms in charts:
            known = []
            for run in runs:
                curve = series(run["train"], key)
                if key == "accuracy":
                    curve = measured_curves(run["evals"], key).get(title, curve)
                # A run that logged nothing must not empty the intersection.
                if curve[0]:
                    known.append(dict(zip(*curve)))
            # An arm without runs keeps its colour.
            steps = sorted(set.intersection(*map(set, known))) if known else []
            arms[arm.name] = (steps, [fmean(run[step] for run in known) for step in steps])
    return charts
