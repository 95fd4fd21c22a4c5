"""The report of a reinforcement learning run: OUT/report.html, one file that loads nothing from elsewhere.

    earlyfusion rollouts OUT      makes it again: while the run goes on, after it, and on a copied folder
    write_rl_report(out) -> Path  reads what is there, leaves out what is not, needs no model

Reads metrics.jsonl (events "train" and "eval"), eval/update-*.jsonl, rollouts.jsonl with its pictures, and
the recipe.toml, versions.json and facts.json that every run writes. rl.html says what is shown of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from earlyfusion.data.errors import DataError
from earlyfusion.eval.measured import Measured, load_measured, paired, summary
from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline.progress import duration
from earlyfusion.pipeline.report.data import Series, family, read_run, series
from earlyfusion.pipeline.report.page import write_page
from earlyfusion.rl.report.gallery import gallery, read_groups

TOGETHER = 8
"""Kinds of prompts drawn in one chart; more are drawn task by task."""


def rollouts(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="the --out folder of the run")],
    each: Annotated[int, typer.Option(min=1, help="pictures of one sort (best, worst, ...) and kind")] = 3,
) -> None:
    """Make report.html of a reinforcement learning run: curves, held-out gains, a gallery of rollouts.

    earlyfusion rollouts runs/rl --each 6
    """
    logged, measured = read_groups(out), read_measured(out)
    if not logged and not measured and not (out / "metrics.jsonl").is_file():
        raise UserError(f"{out}: no metrics.jsonl and no rollouts.jsonl here; give the --out folder of a run")

    path = write_rl_report(out, each=each)
    # What was found is said, so that an empty page does not surprise.
    print(f"rollouts: {len(logged):,} groups; measured after updates {list(measured) or '(none)'}")
    print(f"report:   {path} ({path.stat().st_size / 1e6:.1f} MB)")


def write_rl_report(out: str | Path, *, each: int = 3) -> Path:
    """Write OUT/report.html and return its path. each: pictures of one sort and kind of prompt in the
    gallery.

    Raises FileNotFoundError when OUT is no folder.
    """
    out = Path(out)
    run = read_run(out, "Reinforcement learning run")
    measured = read_measured(out)
    rewards, scores = kinds(run["train"], "reward"), kinds(run["train"], "score")
    # An update that the guard refused is marked like its events.
    refused = [step for step, count in zip(*series(run["train"], "refused")) if count]
    page = {
        "marks": sorted({*run["marks"], *refused}),
        "measured": measured,
        "rewards": by_task(rewards),
        # One chart tells all where the reward is the task's own score.
        "scores": by_task(scores) if scores != rewards else {},
        "score_curves": by_task(measured_curves(run["evals"], "score")) if len(measured) > 2 else {},
        "duration": duration,
        # Called inside the page: a file of another hand costs its own part, not the whole report.
        "changes": partial(changes, measured),
        "gallery": partial(gallery, out, measured, run["recipe"], each),
    }
    return write_page(out / "report.html", "rl.html", run | page)


def read_measured(out: Path) -> dict[int, list[Measured]]:
    """Update -> what was measured after it, in order of updates; files of other kinds are left out."""
    found = {}
    for path in sorted((out / "eval").glob("update-*.jsonl")):
        try:
            found[int(path.stem.removeprefix("update-"))] = load_measured(path)
        except (DataError, ValueError):
            continue
    return {update: records for update, records in found.items() if records}


def changes(measured: Mapping[int, Sequence[Measured]]) -> list[dict[str, Any]]:
    """One row for each kind of problem: the paired difference of its score between the first and the last
    measurement (`eval.measured.paired`), and all means before and after as `sides`."""
    if len(measured) < 2:
        return []
    first, last = measured[min(measured)], measured[max(measured)]
    before, after = summary(first), summary(last)
    # Every number as (before, after), so that none is shown without the other.
    rows = [row for row in paired(first, last) if row["metric"] == "score"]
    return [row | {"sides": (before[row["label"]], after[row["label"]])} for row in rows]


def measured_curves(evals: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Series]:
    """Kind of problem -> a metric of its held-out problems over updates, from the events "eval"."""
    curves: dict[str, Series] = defaultdict(lambda: ([], []))
    for record in evals:
        for label, row in record.items():
            if isinstance(row, dict) and metric in row:
                curves[label][0].append(record["step"])
                curves[label][1].append(row[metric])
    return dict(curves)


def kinds(train: Sequence[Mapping[str, Any]], key: str) -> dict[str, Series]:
    """A number of each kind of prompt over updates, and of all last, so that a kind keeps its colour
    everywhere."""
    curves = family(train, f"{key}/")
    return curves if len(curves) == 1 else curves | {"all": series(train, key)}


def by_task(curves: Mapping[str, Series]) -> dict[str, dict[str, Series]]:
    """Addition to a heading -> curves: one chart for all, or one for each task when they are too many to tell
    apart."""
    charts: dict[str, dict[str, Series]] = defaultdict(dict)
    for label, curve in curves.items():
        heading = "" if len(curves) <= TOGETHER else ": " + label.split("/")[0]
        charts[heading][label] = curve
    return charts
