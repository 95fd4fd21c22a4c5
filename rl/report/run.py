"""The report of a reinforcement learning run: OUT/report.html, one file that loads nothing from elsewhere.

    earlyfusion rollouts OUT      makes it again: while the run goes on, after it, and on a copied folder
    write_rl_report(out) -> Path  reads what is there, leaves out what is not, needs no model

Reads metrics.jsonl (events "train"), eval/update-*.jsonl, rollouts.jsonl with its pictures, and the
recipe.toml,
versions.json and facts.json that every run writes. The template rl.html says what is shown of it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline.progress import duration
from earlyfusion.pipeline.report.data import Series, data_uri, family, image_source, read_run, series
from earlyfusion.pipeline.report.page import write_page
from earlyfusion.rl.report.gallery import gallery
from earlyfusion.rl.report.measured import (
    ALL,
    Record,
    by_label,
    changes,
    pairs_by_label,
    read_measured,
    redraw,
    score_curves,
)
from earlyfusion.rl.rollouts.log import FILE, read_rollouts

PHASES = ("rollout", "score", "train", "other")
TOGETHER = 8
"""Kinds of prompts drawn in one chart; more are drawn task by task."""


def rollouts(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="the --out folder of the run")],
    each: Annotated[int, typer.Option(min=1, help="pictures of one sort (best, worst, ...) and kind")] = 3,
) -> None:
    """Make report.html of a reinforcement learning run: curves, held-out gains, a gallery of rollouts.

    earlyfusion rollouts runs/rl --each 6
    """
    logged, measured = read_rollouts(out), read_measured(out)
    if not logged and not measured and not (out / "metrics.jsonl").is_file():
        raise UserError(f"{out}: neither metrics.jsonl nor {FILE} is here; give the --out folder of a run")

    path = write_rl_report(out, each=each)
    # What was found is said, so that an empty page does not surprise.
    kinds = len(by_label(logged))
    print(
        f"rollouts: {len(logged):,} groups of {kinds} kinds;"
        f" measured after updates {list(measured) or '(none)'}"
    )
    print(f"report:   {path} ({path.stat().st_size / 1e6:.1f} MB)")


def write_rl_report(out: str | Path, *, each: int = 3) -> Path:
    """Write OUT/report.html and return its path. each: pictures of one sort and kind of prompt in the
    gallery.

    Raises FileNotFoundError when OUT is no folder.
    """
    run = rl_page(Path(out), each)
    return write_page(run["folder"] / "report.html", "rl.html", run)


def rl_page(out: Path, each: int = 3) -> dict[str, Any]:
    """What the template rl.html shows."""
    run = read_run(out, "Reinforcement learning run")
    train, measured = run["train"], read_measured(out)
    options = task_options(run["recipe"])

    def picture(record: Record) -> str | None:
        """As it was logged, else drawn again."""
        if (logged := image_source(out, record.get("image"))) is not None:
            return logged
        drawn = redraw(record, options)
        return None if drawn is None else data_uri(drawn)

    # An update that the guard refused is marked like its events.
    refused = [step for step, count in zip(*series(train, "refused")) if count]
    rewards, scores = whole_and_kinds(train, "reward"), whole_and_kinds(train, "score")
    return run | {
        "marks": sorted({*run["marks"], *refused}),
        "measured": measured,
        "changes": changes(pairs_by_label(measured)),
        "score_curves": by_task(score_curves(measured)) if len(measured) > 2 else {},
        "rewards": by_task(rewards),
        # One chart tells all where the reward is the task's own score.
        "scores": by_task(scores) if scores != rewards else {},
        "seconds": phase_seconds(train),
        "duration": duration,
        "gallery": gallery(read_rollouts(out), measured, picture, each),
    }


def task_options(recipe: str) -> dict[str, dict[str, Any]]:
    """Task name -> options, from the text of a recipe; {} when it cannot be read."""
    try:
        tree = tomllib.loads(recipe)
    except tomllib.TOMLDecodeError:
        return {}
    # Measured tasks may differ from those trained on.
    section = tree.get("eval")
    found: dict[str, dict[str, Any]] = {}
    for entries in (tree.get("tasks"), section.get("tasks") if isinstance(section, dict) else None):
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("options"), dict):
                found.setdefault(str(entry.get("name")), entry["options"])
    return found


def phase_seconds(train: Sequence[Record]) -> dict[str, float]:
    """Phase -> seconds of the whole run: the mean of the logged updates times the number of updates."""
    # Not every update is logged: the mean stands for those between.
    updates = max((record["step"] for record in train), default=0)
    logged = {phase: series(train, f"time/{phase}_s")[1] for phase in PHASES}
    return {phase: updates * sum(values) / len(values) for phase, values in logged.items() if values}


def whole_and_kinds(train: Sequence[Record], key: str) -> dict[str, Series]:
    """A number of each kind of prompt over updates, and of all last, so that a kind keeps its colour
    everywhere."""
    curves = family(train, f"{key}/")
    return curves if len(curves) == 1 else curves | {ALL: series(train, key)}


def by_task(curves: Mapping[str, Series]) -> dict[str, dict[str, Series]]:
    """Addition to a heading -> curves: one chart for all, or one for each task when they are too many to tell
    apart."""
    if len(curves) <= TOGETHER:
        return {"": dict(curves)}
    charts: dict[str, dict[str, Series]] = {}
    for label, curve in curves.items():
        charts.setdefault(": " + label.split("/")[0], {})[label] = curve
    return charts
