"""The numbers of a comparison: for every task, and every category of it, the paired delta with what it can
show.

The headline interval is the clustered one (clusters = questions about one picture, or the same text; without
such clusters it equals the paired one). A delta is called a gain or a loss only if its interval excludes 0,
its p value still does after Holm over all tasks (of the same view), and, with several seeds, the interval for
new questions and new seeds does too. Everything is in the score's own unit; 0.017 of an accuracy is 1.7
points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from earlyfusion.eval.compare.load import Arm, TaskRun, aligned
from earlyfusion.eval.stats import (
    Array,
    Estimate,
    bootstrap_interval,
    clustered_estimate,
    correlation,
    holm,
    mcnemar,
    mean_estimate,
    questions_and_seeds,
    sampling_variance,
    seed_estimate,
    sign_flip_p,
    smallest_delta,
    smallest_delta_of_se,
    unpaired_se,
)

PUBLISHED = {"mmlu_pro": 0.017, "gpqa_diamond": 0.021}
"""Change after vision RL that the Kimi K2.5 report (arXiv 2602.02276, Table 2) gives; no control arm, no
error bars."""

ALPHA = 0.05
HISTOGRAM_BINS = 41


@dataclass(frozen=True)
class Options:
    """How much resampling, and which seeds belong together."""

    draws: int = 2000
    flips: int = 10_000
    seed: int = 0
    paired_seeds: bool = False


def compare_arms(
    base: Arm,
    treated: Arm,
    control: Arm | None = None,
    control_base: Arm | None = None,
    options: Options = Options(),
) -> dict[str, Any]:
    """The whole comparison as plain data (the JSON file). Raises CompareError for runs that did not ask the
    same.

    control: an arm that got everything but the treatment; control_base: where it began (default: base).
    """
    arms = [arm for arm in (base, treated, control, control_base) if arm is not None]
    tasks = aligned(arms)
    entries = [_task(task, base, treated, control, control_base or base, options) for task in tasks]

    # Holm's family are all tasks of one view: seen, blind and in words are asked apart.
    for view in dict.fromkeys(entry["view"] for entry in entries):
        family = [entry for entry in entries if entry["view"] == view]
        for entry, adjusted in zip(family, holm([entry["delta"]["p"] for entry in family])):
            entry["delta"]["p_holm"] = adjusted
            entry["verdict"] = verdict(entry)

    known: set[str] = set()
    for arm in arms:
        known = known.union(*arm.runs)
    return {
        "arms": {arm.label: [str(folder) for folder in arm.folders] for arm in arms},
        "tasks": entries,
        "left_out": sorted(known - set(tasks)),
        "options": {"draws": options.draws, "flips": options.flips, "seed": options.seed, "alpha": ALPHA},
    }


def _task(
    task: str, base: Arm, treated: Arm, control: Arm | None, control_base: Arm, options: Options
) -> dict[str, Any]:
    first = base.of(task)[0]
    a, b = question_means(base.of(task)), question_means(treated.of(task))
    single = len(base.runs) == len(treated.runs) == 1
    entry: dict[str, Any] = {
        "task": task,
        "view": first.view,
        "n": len(first.ids),
        "clusters": len(set(first.clusters)),
        "samples_per_question": max(len(group) for group in first.samples),
        "data_hash": first.data_hash,
        "prompt_hash": first.prompt_hash,
        "base": side(base.of(task)),
        "treated": side(treated.of(task)),
        "delta": delta_of(a, b, first, options, single=single),
        "seeds": _seeds(base, treated, task, a, b, first, options),
        "categories": _categories(a, b, first, options),
        "published": PUBLISHED.get(task),
        "baselines": {name: _baseline(first.summary, name) for name in ("chance", "majority")}
        if not first.view
        else {},
    }

    entry["delta"]["sampling_se"] = _sampling_se(base.of(task), treated.of(task))
    if control is not None:
        c, d = question_means(control.of(task)), question_means(control_base.of(task))
        entry["control"] = side(control.of(task))
        entry["control_delta"] = _headline(c - d, first).to_dict()
        difference = (b - a) - (c - d)
        flip = sign_flip_p(difference, clusters=first.clusters, draws=options.flips, seed=options.seed)
        found = _headline(difference, first).to_dict()
        entry["difference_in_differences"] = {**found, "p_sign_flip": flip}
    return entry


def _baseline(summary: dict[str, Any], name: str) -> float | None:
    value = (summary.get("metrics") or {}).get(name)
    return float(value) if isinstance(value, int | float) else None


def question_means(runs: Sequence[TaskRun]) -> Array:
    """Score of every question, mean over the arm's runs, which ask the same in the same order."""
    return np.mean([run.scores for run in runs], axis=0)


def side(runs: Sequence[TaskRun]) -> dict[str, Any]:
    """What is said of one arm on one task: score, its standard error, each seed, unextracted share, answer
    length."""
    means = [run.mean for run in runs]
    known = [run.unextracted for run in runs if run.unextracted is not None]
    lengths = [run.tokens for run in runs if run.tokens is not None]
    estimate = _headline(question_means(runs), runs[0])

    return {
        "score": estimate.value,
        "se": estimate.se,
        "low": estimate.low,
        "high": estimate.high,
        "seeds": means,
        "unextracted": sum(known) / len(known) if known else None,
        "tokens": sum(lengths) / len(lengths) if lengths else None,
        "model": [run.summary.get("model") for run in runs],
    }


def _headline(values: Array, run: TaskRun) -> Estimate:
    return clustered_estimate(values, run.clusters)


def delta_of(a: Array, b: Array, run: TaskRun, options: Options, *, single: bool) -> dict[str, Any]:
    """All statistics of one paired difference; `single` (one run an arm) allows McNemar and the discordance
    formula."""
    d = b - a
    # Clusters decide the interval, strata the bootstrap; the rest is shown for comparison.
    headline, paired = _headline(d, run), mean_estimate(d)
    by_category = clustered_estimate(d, run.categories) if len(set(run.categories)) > 1 else None
    low, high, means = bootstrap_interval(
        d, clusters=run.clusters, strata=run.categories, draws=options.draws, seed=options.seed
    )
    counts, edges = _histogram(means)

    table = mcnemar(a, b) if single else None
    discordance = float(np.mean(a != b)) if table is None else table.discordance
    flip = sign_flip_p(d, clusters=run.clusters, draws=options.flips, seed=options.seed)

    return {
        **headline.to_dict(),
        "p": flip,
        "p_t": headline.p,
        "se_paired": paired.se,
        "se_clustered": headline.se,
        "se_unpaired": unpaired_se(a, b),
        "se_clustered_by_category": by_category.se if by_category else None,
        "correlation": correlation(a, b),
        "bootstrap": {"low": low, "high": high, "counts": counts.tolist(), "edges": edges.tolist()},
        "mcnemar": table.to_dict() if table else None,
        "discordance": discordance,
        "smallest_delta": smallest_delta_of_se(headline.se, len(set(run.clusters))),
        "smallest_delta_mcnemar": smallest_delta(len(d), max(discordance, 3 / len(d))) if table else None,
    }


def _histogram(means: Array) -> tuple[Array, Array]:
    """Counts and edges; where the means lie on a lattice (binary answers), every bin holds equally many of
    its points."""
    steps = np.diff(np.unique(means.round(12)))
    if len(steps) == 0:
        return np.histogram(means, bins=1)
    lattice = float(steps.min())
    span = float(means.max() - means.min())
    if lattice * 20 * HISTOGRAM_BINS < span:  # as good as continuous
        return np.histogram(means, bins=HISTOGRAM_BINS)
    width = lattice * max(1, math.ceil(span / lattice / HISTOGRAM_BINS))
    start = float(means.min()) - lattice / 2
    return np.histogram(means, bins=start + width * np.arange(math.ceil((span + lattice) / width) + 1))


def _sampling_se(base: Sequence[TaskRun], treated: Sequence[TaskRun]) -> float | None:
    """The part of the SE that more samples a question would remove; None with one answer a question."""
    parts = [sampling_variance(run.samples) / len(arm) ** 2 for arm in (base, treated) for run in arm]
    total = sum(parts)
    return None if math.isnan(total) else math.sqrt(total)


def _seeds(
    base: Arm, treated: Arm, task: str, a: Array, b: Array, run: TaskRun, options: Options
) -> dict[str, Any] | None:
    """Intervals over seeds, and over questions and seeds together; None with one run in each arm."""
    if len(base.runs) == len(treated.runs) == 1:
        return None
    # One number a seed: its mean over the questions.
    before, after = [r.mean for r in base.of(task)], [r.mean for r in treated.of(task)]
    seeds = seed_estimate(before, after, paired=options.paired_seeds)
    both = questions_and_seeds(_headline(b - a, run), seeds)
    return {
        "base": before,
        "treated": after,
        "paired": options.paired_seeds,
        "seeds": seeds.to_dict(),
        "both": both.to_dict(),
    }


def _categories(a: Array, b: Array, run: TaskRun, options: Options) -> list[dict[str, Any]]:
    """One entry per category, with Holm's p over all of them; empty when there is one category only."""
    names = list(dict.fromkeys(run.categories))
    if len(names) < 2:
        return []
    entries = []
    for name in names:
        chosen = [i for i, category in enumerate(run.categories) if category == name]
        clusters = [run.clusters[i] for i in chosen]
        d = (b - a)[chosen]
        estimate = clustered_estimate(d, clusters)
        p = sign_flip_p(d, clusters=clusters, draws=options.flips, seed=options.seed)
        scores = {"base": float(a[chosen].mean()), "treated": float(b[chosen].mean())}
        see = {
            "se_paired": mean_estimate(d).se,
            "smallest_delta": smallest_delta_of_se(estimate.se, len(set(clusters))),
        }
        entries.append({"category": name, **scores, **estimate.to_dict(), "p": p, "p_t": estimate.p, **see})

    for entry, adjusted in zip(entries, holm([entry["p"] for entry in entries])):
        entry["p_holm"] = adjusted
    return entries


def verdict(entry: dict[str, Any]) -> str:
    """gain, loss or "no difference shown", with the limits of what was seen."""
    delta, seeds = entry["delta"], entry["seeds"]
    # A claim has to survive questions, seeds and the number of claims.
    intervals = [delta] + ([seeds["both"]] if seeds else [])
    clear = all(_excludes_zero(interval) for interval in intervals) and delta["p_holm"] <= ALPHA
    if not clear:
        if entry["n"] > 1 and _at_chance(entry):
            return "no difference shown (both at chance)"
        if seeds and _excludes_zero(delta):
            return "no difference shown (seeds disagree)"
        return "no difference shown"

    word = "gain" if delta["value"] > 0 else "loss"
    against = entry.get("difference_in_differences")
    if against is not None and not _excludes_zero(against):
        return f"{word}, not told apart from the control's"
    return word


def _excludes_zero(interval: dict[str, Any]) -> bool:
    low, high, se = interval["low"], interval["high"], interval["se"]
    return bool(se > 0 and (low > 0 or high < 0))


def _at_chance(entry: dict[str, Any]) -> bool:
    """Whether chance lies in the 95 % interval of both arms."""
    chance = entry["baselines"].get("chance")
    if chance is None:
        return False
    return all(entry[arm]["low"] <= chance <= entry[arm]["high"] for arm in ("base", "treated"))
