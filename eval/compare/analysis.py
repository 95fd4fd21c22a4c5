"""The numbers of a comparison: for every task, and every category of it, the paired delta with what it can
show.

The headline interval is the clustered one (clusters = questions about one picture, or the same text; without
such clusters it equals the paired one). A delta is called a gain or a loss only if its interval excludes 0,
its p value still does after Holm over all tasks (of the same view), and, with several seeds, the interval for
new questions and new seeds does too. Everything is in the score's own unit; 0.017 of an accuracy is 1.7
points.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from earlyfusion.eval.compare.load import Arm, TaskRun, aligned
from earlyfusion.eval.stats import (
    ALPHA,
    Array,
    bootstrap_interval,
    clustered_estimate,
    holm,
    mcnemar,
    mean_estimate,
    questions_and_seeds,
    sampling_variance,
    seed_estimate,
    sign_flip_p,
    smallest_delta,
    smallest_delta_of_se,
    welch,
)

PUBLISHED = {"mmlu_pro": 0.017, "gpqa_diamond": 0.021}
"""Change after vision RL that the Kimi K2.5 report (arXiv 2602.02276, Table 2) gives; no control arm, no
error bars."""

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
    entries = []
    for task in tasks:
        entry = _task(base.of(task), treated.of(task), options)
        if control is not None:
            # Both changes on the same questions, so their difference is paired as well.
            runs = control.of(task)
            own = question_means(runs) - question_means((control_base or base).of(task))
            entry["control"] = side(runs)
            entry["control_delta"] = clustered_estimate(own, runs[0].clusters).to_dict()
            beyond = _tested(entry["paired"] - own, runs[0].clusters, options)
            entry["difference_in_differences"] = beyond
        entries.append(entry)

    # Holm's family are all tasks of one view: seen, blind and in words are asked apart.
    for view in {entry["view"] for entry in entries}:
        _adjust([entry["delta"] for entry in entries if entry["view"] == view])
    for entry in entries:
        del entry["paired"]
        entry["verdict"] = verdict(entry)

    known = {task for arm in arms for run in arm.runs for task in run}
    return {
        "arms": {arm.label: [str(folder) for folder in arm.folders] for arm in arms},
        "tasks": entries,
        "left_out": sorted(known.difference(tasks)),
        "options": asdict(options),
    }


def _task(base: Sequence[TaskRun], treated: Sequence[TaskRun], options: Options) -> dict[str, Any]:
    """Everything about one task of the two arms. paired: the difference of every question."""
    first = base[0]
    # Question by question: the order of both is that of the ids, checked by `aligned`.
    a, b = question_means(base), question_means(treated)
    rows = "\n".join(f"{key}\t{repeat}\t{hashed}" for (key, repeat), hashed in sorted(first.prompts.items()))
    entry: dict[str, Any] = {
        "task": first.task,
        "view": first.view,
        "n": len(a),
        "clusters": len(set(first.clusters)),
        "data_hash": first.data_hash,
        "prompt_hash": hashlib.sha256(rows.encode()).hexdigest(),
        "base": side(base),
        "treated": side(treated),
        "paired": b - a,
        "delta": delta_of(a, b, first, options),
        "seeds": None,
        "categories": _categories(a, b, first, options),
        "published": PUBLISHED.get(first.task),
        "baselines": {},
    }
    if not first.view:
        metrics = first.summary.get("metrics") or {}
        entry["baselines"] = {name: metrics.get(name) for name in ("chance", "majority")}

    # The part of the SE that more samples a question would remove; nan with one answer a question.
    noise = sum(sampling_variance(run.samples) / len(arm) ** 2 for arm in (base, treated) for run in arm)
    entry["delta"]["sampling_se"] = None if math.isnan(noise) else math.sqrt(noise)
    if len(base) == len(treated) == 1:
        # Answers of one run an arm are won or lost; means over seeds are not.
        table = entry["delta"]["mcnemar"] = mcnemar(a, b)
        if table is not None:
            seen = max(table["discordance"], 3 / len(a))
            entry["delta"]["smallest_delta_mcnemar"] = smallest_delta(len(a), seen)
        return entry

    # Intervals over seeds (one number a seed: its mean over the questions), and over both together.
    before, after = entry["base"]["seeds"], entry["treated"]["seeds"]
    seeds = seed_estimate(before, after, paired=options.paired_seeds)
    both = questions_and_seeds(clustered_estimate(b - a, first.clusters), seeds)
    entry["seeds"] = {"base": before, "treated": after, "seeds": seeds.to_dict(), "both": both.to_dict()}
    return entry


def question_means(runs: Sequence[TaskRun]) -> Array:
    """Score of every question, mean over the arm's runs, which ask the same in the same order."""
    return np.mean([run.scores for run in runs], axis=0)


def side(runs: Sequence[TaskRun]) -> dict[str, Any]:
    """What is said of one arm on one task: score, its standard error, each seed, unextracted share, answer
    length."""
    # The same clusters as for the difference, or the two intervals could not be read together.
    estimate = clustered_estimate(question_means(runs), runs[0].clusters).to_dict()
    found = {"score": estimate["value"], **{name: estimate[name] for name in ("se", "low", "high")}}
    found["seeds"] = [float(run.scores.mean()) for run in runs]
    for name in ("unextracted", "tokens"):
        known = [run.said[name] for run in runs if name in run.said]
        found[name] = sum(known) / len(known) if known else None
    found["model"] = [run.summary.get("model") for run in runs]
    return found


def _tested(difference: Array, clusters: Sequence[str], options: Options) -> dict[str, Any]:
    """The clustered interval with the p of the sign-flip test, and beside it what they rest on."""
    # One test for tasks, categories and controls: what differs is the family that Holm is told of.
    estimate = clustered_estimate(difference, clusters)
    return {
        **estimate.to_dict(),
        "p": sign_flip_p(difference, clusters, draws=options.flips, seed=options.seed),
        "p_t": estimate.p,
        "se_paired": mean_estimate(difference).se,
        "smallest_delta": smallest_delta_of_se(estimate.se, len(set(clusters))),
    }


def delta_of(a: Array, b: Array, run: TaskRun, options: Options) -> dict[str, Any]:
    """All statistics of one paired difference."""
    low, high, means = bootstrap_interval(b - a, run.clusters, draws=options.draws, seed=options.seed)
    # Means of few binary answers lie on a lattice; more bins than its points would show a comb.
    points = len(np.unique(means.round(12)))
    counts, edges = np.histogram(means, bins=min(points, HISTOGRAM_BINS))
    tested = _tested(b - a, run.clusters, options)
    return {
        **tested,
        "se_clustered": tested["se"],
        "se_unpaired": welch(a, b).se,
        "bootstrap": {"low": low, "high": high, "counts": counts.tolist(), "edges": edges.tolist()},
        "discordance": float(np.mean(a != b)),
        "mcnemar": None,
        "smallest_delta_mcnemar": None,
    }


def _categories(a: Array, b: Array, run: TaskRun, options: Options) -> list[dict[str, Any]]:
    """One entry per category, with Holm's p over all of them; empty when there is one category only."""
    entries: list[dict[str, Any]] = []
    # Masks and not lists: a task has 12,032 questions and 14 categories.
    categories, clusters = np.array(run.categories), np.array(run.clusters)
    for name in dict.fromkeys(run.categories):
        own = categories == name
        if own.all():
            return []
        scores = {"base": float(a[own].mean()), "treated": float(b[own].mean())}
        entries.append({"category": name, **scores, **_tested((b - a)[own], clusters[own].tolist(), options)})
    _adjust(entries)
    return entries


def _adjust(claims: Sequence[dict[str, Any]]) -> None:
    """Enter Holm's p over a family."""
    for claim, adjusted in zip(claims, holm([claim["p"] for claim in claims])):
        claim["p_holm"] = adjusted


def verdict(entry: dict[str, Any]) -> str:
    """gain, loss or "no difference shown", with the limits of what was seen."""
    delta, seeds, control = entry["delta"], entry["seeds"], entry.get("difference_in_differences")
    # A claim has to survive questions, seeds and the number of claims.
    clear = _excludes_zero(delta)
    if clear and delta["p_holm"] <= ALPHA and (not seeds or _excludes_zero(seeds["both"])):
        word = "gain" if delta["value"] > 0 else "loss"
        if control is not None and not _excludes_zero(control):
            return f"{word}, not told apart from the control's"
        return word

    # Two models that guess differ by luck alone; that is said before anything else.
    chance = entry["baselines"].get("chance")
    sides = (entry["base"], entry["treated"])
    if chance is not None and all(one["low"] <= chance <= one["high"] for one in sides):
        return "no difference shown (both at chance)"
    if seeds and clear:
        return "no difference shown (seeds disagree)"
    return "no difference shown"


def _excludes_zero(interval: dict[str, Any]) -> bool:
    return bool(interval["se"] > 0 and (interval["low"] > 0 or interval["high"] < 0))
