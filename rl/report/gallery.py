"""The gallery of a run's report: for each kind of prompt the best, worst and most divided rollouts, and the
held-out problems whose greedy answer changed between the first and the last measurement. rl.html draws them.
"""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import pvariance
from typing import Any

from PIL import Image as PILImage
from pydantic import BaseModel, ValidationError

from earlyfusion.data.errors import DataError
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tasks.rendering import render_text
from earlyfusion.eval.measured import Measured, by_problem
from earlyfusion.pipeline.report.data import data_uri, image_source
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.rollouts.log import read_rollouts

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


def gallery(
    out: Path, measured: Mapping[int, Sequence[Measured]], recipe: str, each: int
) -> list[dict[str, Any]]:
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
        kind: dict[str, Any] = {"label": label, "logged": len(own), "measured": len(pairs)}
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


def task_options(recipe: str) -> dict[str, dict[str, Any]]:
    """Task name -> options, from the text of a recipe; {} when it cannot be read."""
    try:
        config = RLConfig.model_validate(tomllib.loads(recipe))
    except ValueError:
        return {}
    return {entry.name: entry.options for entry in (*config.measured, *config.tasks)}


def redraw(key: str, form: str, target: str, options: Mapping[str, Any]) -> PILImage.Image | None:
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
    return problem.picture if form == "picture" else None
