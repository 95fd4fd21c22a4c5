"""The report of a reinforcement learning run: OUT/report.html, one file that loads nothing from elsewhere.

    earlyfusion rollouts OUT      makes it again: while the run goes on, after it, and on a copied folder
    write_rl_report(out) -> Path  reads what is there, leaves out what is not, needs no model

Reads metrics.jsonl (events "train" and "eval"), eval/update-*.jsonl, rollouts.jsonl with its pictures, and
the recipe.toml, versions.json and facts.json that every run writes. rl.html says what is shown of it.
"""

import json
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import pvariance
from typing import Annotated, Any

import typer
from PIL import Image as PILImage
from pydantic import BaseModel, ValidationError

from earlyfusion.data.errors import DataError
from earlyfusion.data.synth.panels import render_text
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.eval.measured import Measured, by_problem, load_measured, paired, summary
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record
from earlyfusion.pipeline.progress import duration
from earlyfusion.pipeline.report.page import (
    Series,
    data_uri,
    family,
    image_source,
    read_run,
    series,
    write_page,
)
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.rollouts.log import read_rollouts

TOGETHER = 8
"""Kinds of prompts drawn in one chart; more are drawn task by task."""


def rollouts(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="the --out folder of the run")],
    each: Annotated[int, typer.Option(min=1, help="pictures of one sort (best, worst, ...) and kind")] = 3,
) -> None:
    """Make report.html of a reinforcement learning run: curves, held-out gains, a gallery of rollouts.

    earlyfusion rollouts runs/rl --each 6
    """
    # A folder of anything else would get an empty page, which nobody asked for.
    if not any((out / name).is_file() for name in ("metrics.jsonl", "rollouts.jsonl")):
        raise UserError(f"{out}: no metrics.jsonl and no rollouts.jsonl here; give the --out folder of a run")
    path = write_rl_report(out, each=each)
    print(f"report: {path} ({path.stat().st_size / 1e6:.1f} MB)")


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


def changes(measured: Mapping[int, Sequence[Measured]]) -> list[Record]:
    """One row for each kind of problem, and one of all together where there are several: the paired
    difference of its score between the first and the last measurement (`eval.measured.paired`), and all means
    before and after as `sides`."""
    if len(measured) < 2:
        return []
    first, last = list(measured[min(measured)]), list(measured[max(measured)])
    if len(summary(last)) > 1:
        # Problems of several kinds are paired one by one as well; the label keeps their keys apart.
        for side in (first, last):
            side += [replace(one, label="all", key=f"{one.label} {one.key}") for one in side]
    before, after = summary(first), summary(last)
    # Every number as (before, after), so that none is shown without the other.
    rows = [row for row in paired(first, last) if row["metric"] == "score"]
    return [row | {"sides": (before[row["label"]], after[row["label"]])} for row in rows]


def measured_curves(evals: Sequence[Record], metric: str) -> dict[str, Series]:
    """Kind of problem -> a metric of its held-out problems over updates, from the events "eval"."""
    curves: dict[str, Series] = defaultdict(lambda: ([], []))
    for record in evals:
        for label, row in record.items():
            if isinstance(row, dict) and metric in row:
                curves[label][0].append(record["step"])
                curves[label][1].append(row[metric])
    return dict(curves)


def kinds(train: Sequence[Record], key: str) -> dict[str, Series]:
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


# ---- The gallery.

Pair = tuple[Measured, Measured]


class Said(BaseModel):
    """One answer of a logged group."""

    text: Any
    score: float | None
    reward: float | None
    advantage: float | None
    finish: Any
    status: Any


class Group(BaseModel):
    """One line of rollouts.jsonl, as far as a page shows it."""

    update: int
    label: str = "all"
    key: str
    form: str
    prompt: Any
    target: Any
    image: str | None
    mean_score: float
    answers: list[Said]

    @property
    def spread(self) -> float:
        """Variance of the rewards: how much the group has to teach."""
        return pvariance([one.reward or 0.0 for one in self.answers])


def read_groups(out: Path) -> list[Group]:
    """The logged groups, in order; lines of another hand are left out."""
    groups = []
    for record in read_rollouts(out):
        try:
            groups.append(Group.model_validate(record))
        except ValidationError:
            continue
    return groups


def gallery(out: Path, measured: Mapping[int, Sequence[Measured]], recipe: str, each: int) -> list[Record]:
    """The kinds of prompts, each with its `groups` and `pairs` by title, every one as (picture, group or
    pair). each: how many of one sort."""
    groups: dict[str, list[Group]] = defaultdict(list)
    for group in read_groups(out):
        groups[group.label].append(group)
    first: Mapping[str, Mapping[str, Measured]] = {}
    last = first
    if len(measured) > 1:
        first, last = (by_problem(measured[update]) for update in (min(measured), max(measured)))
    options = task_options(recipe)

    def shown(one: Group | Measured, logged: str | None = None) -> str | None:
        """The picture as it was logged, else drawn again."""
        if (source := image_source(out, logged)) is not None:
            return source
        drawn = redraw(one.key, one.form, one.target, options)
        return None if drawn is None else data_uri(drawn)

    kinds = []
    # A kind may be logged and not measured, or measured and not trained on.
    for label in dict.fromkeys([*groups, *last]):
        own, before, after = groups[label], first.get(label, {}), last.get(label, {})
        pairs = [(before[key], after[key]) for key in after if key in before]
        kind: Record = {"label": label, "logged": len(own), "measured": len(pairs)}
        kind["groups"], kind["pairs"] = {}, {}
        for title, some in sorts(own, each).items():
            kind["groups"][title] = [(shown(group, group.image), group) for group in some]
        for title, changed in flips(pairs).items():
            heading = f"{title} ({len(changed)} of {len(pairs)})"
            kind["pairs"][heading] = [(shown(pair[1]), pair) for pair in changed[:each]]
        kinds.append(kind)
    return kinds


def sorts(groups: Sequence[Group], each: int) -> dict[str, list[Group]]:
    """The best, worst and most divided groups of the second half of the log, no group in two of them; newer
    ones first among equals."""
    # What the trained policy does, not the one at the start.
    updates = sorted({group.update for group in groups})
    late = [group for group in groups if group.update >= updates[len(updates) // 2]]
    late.sort(key=lambda group: (group.mean_score, -group.update))
    # A third each: with few groups no sort takes all.
    share = min(each, -(-len(late) // 3))
    worst, rest = late[:share], late[share:]
    rest.sort(key=lambda group: (-group.mean_score, -group.update))
    best = rest[:share]
    # Equal rewards teach nothing.
    divided = [group for group in rest[share:] if group.spread > 0]
    divided.sort(key=lambda group: -group.spread)
    return {"Best": best, "Worst": worst, "Most divided": divided[:share]}


def flips(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Problems solved only after, only before, neither time. Largest changes first, and among equals those
    whose right answer gained, lost or has the least probability."""
    ordered = sorted(
        pairs, key=lambda pair: (pair[1].score - pair[0].score, pair[1].p_target - pair[0].p_target)
    )
    found: dict[str, list[Pair]] = {}
    # What is solved both times has nothing to show.
    for title, before, after in (
        ("Changed: wrong → right", False, True),
        ("Changed: right → wrong", True, False),
        ("Wrong before and after", False, False),
    ):
        found[title] = [pair for pair in ordered if (pair[0].solved, pair[1].solved) == (before, after)]
    # Gains are the end of the order.
    found["Changed: wrong → right"].reverse()
    return found


def task_options(recipe: str) -> dict[str, Record]:
    """Task name -> options, from the text of a recipe; {} when it cannot be read."""
    try:
        config = RLConfig.model_validate(tomllib.loads(recipe))
    except ValueError:
        return {}
    return {entry.name: entry.options for entry in (*config.measured, *config.tasks)}


def redraw(key: str, form: str, target: str, options: Record) -> PILImage.Image | None:
    """The picture of a problem, which no measurement stores: a function of its key. options: of the recipe's
    tasks, by name.

    None for words alone, and where the problem of that key is no longer the one that was asked (another
    version, other data).
    """
    try:
        name, split, rest = key.split("/", 2)
        level, seed = rest.rsplit("/", 1)
        # The task is made with the recipe's own options: its problems are functions of them as well.
        task = make_task(name, **options.get(name, {}))
        problem = task.sample(int(seed), split, json.loads(level))  # type: ignore[arg-type]
    except (DataError, OSError, TypeError, ValueError, KeyError):
        return None
    if (problem.key, problem.target) != (key, target):
        return None
    if form == "rendered":
        return render_text(problem.description)
    return problem.image if form == "picture" else None
