"""From the answers of all models to the claims of a transfer study.

Registered before any run (and printed at the head of the report):
    primary     greedy accuracy on the held-out problems of the skill told in words (`StudyConfig.primary`),
                arm - start
    family      every arm x (accuracy, p_target, p_matched, pass@k) on that label; Holm over all of them
    p_matched   p_target of the arm against the start at the temperature that gives it the arm's entropy
                (sharpening)
    controls    every arm against each control arm by difference in differences, which on equal starts is arm
                - control; Holm over the controls of the arm
    words       "gain" and "loss" only where the interval excludes 0 and the adjusted p value is at most 0.05
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from earlyfusion.eval.measured import Measured, by_problem, ece, load_measured, sampled_pass, summary
from earlyfusion.eval.stats import Estimate, holm
from earlyfusion.rl.study.shortcuts import shortcut
from earlyfusion.rl.study.transfer.plan import START, Arm, StudyConfig, matched_file, measured_file
from earlyfusion.rl.study.transfer.statistics import (
    DRAWS,
    Array,
    Delta,
    adjusted,
    compare_arms,
    seed_deltas,
    word,
)

CONTROLS = ("random", "sft", "text", "unrelated")
"""Arms that every arm is compared with, where the study has them, besides its own `against`."""
SHARPER = ("random", "sft")
"""Controls an arm must beat before its gain may be called its own."""
Records = dict[str, dict[str, Measured]]


@dataclass
class Answers:
    """Everything that was measured. runs: (start, arm, run) -> label -> key -> record; the start is run 0 of
    "none". matched: the same keys -> label -> {temperature, entropy, wanted, reached, p_target: {key: p}}."""

    runs: dict[tuple[int, str, int], Records] = field(default_factory=dict)
    matched: dict[tuple[int, str, int], dict[str, Any]] = field(default_factory=dict)

    def starts(self, arm: str, label: str) -> list[int]:
        """Pretraining seeds that have both the start and a run of this arm with this label."""
        with_arm = {p for (p, name, _), records in self.runs.items() if name == arm and label in records}
        return sorted(p for p in with_arm if label in self.runs.get((p, START, 0), {}))

    def of(self, arm: str, start: int, label: str) -> list[tuple[int, dict[str, Measured]]]:
        """(run, records by key) of an arm from one start."""
        found = [
            (r, records[label])
            for (p, name, r), records in self.runs.items()
            if (p, name) == (start, arm) and label in records
        ]
        return sorted(found, key=lambda pair: pair[0])


def read_answers(config: StudyConfig, out: Path) -> Answers:
    """What the measuring stages wrote so far."""
    answers = Answers()
    for p in range(config.seeds):
        wanted = [(START, 0)] + [(arm.name, r) for arm in config.arms for r in range(config.rl_seeds)]
        for arm, r in wanted:
            file = measured_file(out, p, arm, r)
            if not file.is_file():
                continue
            answers.runs[p, arm, r] = by_problem(load_measured(file))
            if arm != START and (found := matched_file(out, p, arm, r)).is_file():
                answers.matched[p, arm, r] = json.loads(found.read_text(encoding="utf-8"))
    return answers


Value = Callable[[Measured], float]


def metrics_of(samples: int) -> dict[str, Value]:
    """Metric -> its value for one problem."""
    found: dict[str, Value] = {
        "accuracy": lambda one: float(one.solved),
        "p_target": lambda one: one.p_target,
    }
    if samples > 1:
        found[f"pass@{samples}"] = lambda one: sampled_pass(one, samples)
    return found


def arrays(
    answers: Answers, arm: str, label: str, value: Value, starts: Sequence[int], keys: Sequence[str]
) -> list[Array]:
    """For every start the values [R, I] of an arm."""
    return [
        np.array(
            [[value(records[key]) for key in keys] for _, records in answers.of(arm, p, label)],
            dtype=np.float64,
        )
        for p in starts
    ]


def common_keys(answers: Answers, arms: Sequence[str], label: str, starts: Sequence[int]) -> list[str]:
    """Problems that all these models answered, in order."""
    sets = [set(records) for arm in arms for p in starts for _, records in answers.of(arm, p, label)]
    shared = set.intersection(*sets) if sets else set()
    first = answers.of(arms[0], starts[0], label)[0][1] if starts else {}
    return [key for key in first if key in shared]


def compare(
    answers: Answers, base: str, treated: str, label: str, metric: str, samples: int, draws: int
) -> tuple[Delta, list[list[float]], float, float] | None:
    """(difference, per-seed differences, mean of base, mean of treated), or None where they share no
    start."""
    starts = [p for p in answers.starts(treated, label) if p in answers.starts(base, label) or base == START]
    if not starts:
        return None
    keys = common_keys(answers, [base, treated], label, starts)
    if metric == "p_matched":
        return _matched(answers, treated, label, starts, keys, draws)
    if metric == "ece":
        a, b = ([_errors(answers.of(arm, p, label), keys) for p in starts] for arm in (base, treated))
        estimate = compare_arms(a, b, draws=draws)
    else:
        value = metrics_of(samples)[metric]
        a, b = (arrays(answers, arm, label, value, starts, keys) for arm in (base, treated))
        estimate = compare_arms(a, b, draws=draws)
    means = [float(np.mean([part.mean() for part in side])) for side in (a, b)]
    return estimate, seed_deltas(a, b), means[0], means[1]


def _errors(runs: Sequence[tuple[int, dict[str, Measured]]], keys: Sequence[str]) -> Array:
    """Calibration error of every run, [R, 1]."""
    return np.array(
        [
            [ece([records[k].confidence for k in keys], [records[k].solved for k in keys])]
            for _, records in runs
        ]
    )


def _matched(
    answers: Answers, arm: str, label: str, starts: Sequence[int], keys: Sequence[str], draws: int
) -> tuple[Delta, list[list[float]], float, float] | None:
    """The arm's p_target against the start's at the arm's entropy; every run has a start of its own, so the
    difference is taken run by run and compared with zero."""
    differences, of_start, of_arm, kept = [], [], [], []
    for p in starts:
        rows = []
        for r, records in answers.of(arm, p, label):
            found = answers.matched.get((p, arm, r), {}).get(label)
            if found is None:
                continue
            own = np.array([records[key].p_target for key in keys])
            other = np.array([found["p_target"][key] for key in keys])
            rows.append(own - other)
            of_arm.append(own.mean())
            of_start.append(other.mean())
        if rows:
            differences.append(np.array(rows))
            kept.append(p)
    if not kept:
        return None
    zero = [np.zeros((1, len(keys))) for _ in kept]
    estimate = compare_arms(zero, differences, draws=draws)
    return estimate, seed_deltas(zero, differences), float(np.mean(of_start)), float(np.mean(of_arm))


def primary_of(config: StudyConfig, arm: Arm) -> str:
    """The label an arm is judged on: the primary one; after a thought for an arm that was trained to
    think."""
    return config.primary_label + ("/thought" if arm.thought else "")


def family_metrics(config: StudyConfig) -> list[str]:
    """Metrics of the registered family."""
    return [*(name for name in metrics_of(config.measure.samples) if name != "ece"), "p_matched"]


def analyse(config: StudyConfig, out: Path, draws: int = DRAWS) -> dict[str, Any]:
    """All tables of the report as plain data (also OUT/study.json)."""
    answers = read_answers(config, out)
    labels = config.labels()
    arms = [arm for arm in config.arms if any(name == arm.name for _, name, _ in answers.runs)]
    samples = config.measure.samples
    rows: list[dict[str, Any]] = []
    for arm in arms:
        for label in labels:
            known = family_metrics(config) if config.registered(label) else ("accuracy", "p_target")
            for metric in (*known, "ece"):
                found = compare(answers, START, arm.name, label, metric, samples, draws)
                if found is not None:
                    rows.append(_row(config, arm, label, metric, found))
    family = [row for row in rows if row["registered"]]
    estimates = {(row["arm"], row["metric"]): delta_of(row) for row in family}
    p_holm = adjusted(estimates)
    for row in rows:
        if row["registered"]:
            row["p_holm"] = p_holm[row["arm"], row["metric"]]
            row["word"] = word(delta_of(row), row["p_holm"])
    differences = [d for arm in arms for d in _against(config, answers, arm, [a.name for a in arms], draws)]
    verdicts = {arm.name: verdict(config, arm, rows, differences) for arm in arms}
    return {
        "skill": config.skill,
        "unrelated": config.unrelated,
        "primary": config.primary_label,
        "seeds": sorted({p for p, _, _ in answers.runs}),
        "family": len(family),
        "draws": draws,
        "start": _start(answers, labels),
        "rows": rows,
        "differences": differences,
        "verdicts": verdicts,
        "arms": {
            arm.name: {"about": arm.about, "kind": arm.kind, "runs": _runs(answers, arm.name)} for arm in arms
        },
        "temperatures": _temperatures(config, answers, arms),
        "shortcuts": _shortcuts(answers, labels),
    }


def _row(config: StudyConfig, arm: Arm, label: str, metric: str, found: tuple[Any, ...]) -> dict[str, Any]:
    estimate, deltas, before, after = found
    registered = label == primary_of(config, arm) and metric in family_metrics(config)
    about = {"arm": arm.name, "label": label, "metric": metric, "registered": registered}
    return {**about, "before": before, "after": after, **plain(estimate), "per_seed": deltas}


def plain(delta: Delta) -> dict[str, Any]:
    """A difference as JSON."""
    return {**delta.estimate.to_dict(), "boot_low": delta.boot_low, "boot_high": delta.boot_high}


def delta_of(row: Mapping[str, Any]) -> Delta:
    """The difference of a row."""
    estimate = Estimate(**{name: row[name] for name in ("value", "se", "low", "high", "p", "df", "n")})
    return Delta(estimate, row["boot_low"], row["boot_high"])


def controls_of(arm: Arm, present: Sequence[str]) -> list[str]:
    """Control arms an arm is compared with."""
    return [name for name in dict.fromkeys((*CONTROLS, *arm.against)) if name in present and name != arm.name]


def _against(
    config: StudyConfig, answers: Answers, arm: Arm, present: Sequence[str], draws: int
) -> list[dict[str, Any]]:
    """Differences in differences of one arm: (arm - start) - (control - start), where both were measured
    alike."""
    rows = []
    own = primary_of(config, arm)
    known = {one.name: one for one in config.arms}
    for control in controls_of(arm, present):
        other = primary_of(config, known[control])
        starts = [p for p in answers.starts(arm.name, own) if p in answers.starts(control, other)]
        if not starts:
            continue
        keys = common_keys(answers, [arm.name], own, starts)
        shared = set(common_keys(answers, [control], other, starts))
        keys = [key for key in keys if key in shared]
        a = _gains(answers, control, other, starts, keys)
        b = _gains(answers, arm.name, own, starts, keys)
        about = {"arm": arm.name, "control": control, "label": own, "metric": "accuracy"}
        means = {
            "control_gain": float(np.mean([x.mean() for x in a])),
            "arm_gain": float(np.mean([x.mean() for x in b])),
        }
        estimate = compare_arms(a, b, draws=draws)
        rows.append({**about, **means, **plain(estimate), "per_seed": seed_deltas(a, b)})
    for row, p in zip(rows, holm([row["p"] for row in rows])):
        row["p_holm"] = p
        row["word"] = word(delta_of(row), p).replace("gain", "above").replace("loss", "below")
    return rows


def _gains(answers: Answers, arm: str, label: str, starts: Sequence[int], keys: Sequence[str]) -> list[Array]:
    """For every start the change [R, I] of greedy accuracy from the start, problem by problem."""
    value = metrics_of(0)["accuracy"]
    before = arrays(answers, START, label, value, starts, keys)
    after = arrays(answers, arm, label, value, starts, keys)
    return [b - a for a, b in zip(before, after)]


def verdict(
    config: StudyConfig, arm: Arm, rows: Sequence[Mapping[str, Any]], differences: Sequence[Mapping[str, Any]]
) -> str:
    """One sentence on an arm's greedy accuracy in words."""
    row = next(
        (r for r in rows if r["arm"] == arm.name and r["registered"] and r["metric"] == "accuracy"), None
    )
    if row is None:
        return "not measured"
    said = str(row["word"])
    if said != "gain":
        return said
    mine = [d for d in differences if d["arm"] == arm.name]
    needed = [d for d in mine if d["control"] in (*SHARPER, *arm.against)]
    open_ = [d["control"] for d in needed if d["word"] != "above"]
    if arm.name in CONTROLS or not needed:
        return said
    return (
        f"{said}, not told apart from {', '.join(open_)}"
        if open_
        else f"{said}, above {', '.join(d['control'] for d in needed)}"
    )


def _start(answers: Answers, labels: Sequence[str]) -> dict[str, Any]:
    """Label -> metric -> (mean over the starts, each start)."""
    found: dict[str, dict[str, Any]] = {}
    starts = sorted(p for p, arm, _ in answers.runs if arm == START)
    for label in labels:
        told = [
            summary(answers.runs[p, START, 0][label].values())[label]
            for p in starts
            if label in answers.runs[p, START, 0]
        ]
        if told:
            found[label] = {
                name: {"mean": float(np.mean([t[name] for t in told])), "each": [t[name] for t in told]}
                for name in told[0]
            }
    return found


def _shortcuts(answers: Answers, labels: Sequence[str]) -> dict[str, Any]:
    """Label -> the best rule that reads no meaning (see shortcuts.py), where words hold answers."""
    starts = [records for (_, arm, _), records in sorted(answers.runs.items()) if arm == START]
    found = {label: shortcut(starts[0][label].values()) for label in labels if starts and label in starts[0]}
    return {label: asdict(rule) for label, rule in found.items() if rule is not None}


def _runs(answers: Answers, arm: str) -> list[tuple[int, int]]:
    return sorted((p, r) for p, name, r in answers.runs if name == arm)


def _temperatures(config: StudyConfig, answers: Answers, arms: Sequence[Arm]) -> dict[str, Any]:
    """Arm -> how the start was matched to its entropy on its primary label."""
    found = {}
    for arm in arms:
        label = primary_of(config, arm)
        mine = [
            m[label] for (_, name, _), m in sorted(answers.matched.items()) if name == arm.name and label in m
        ]
        if mine:
            found[arm.name] = {
                "temperature": float(np.mean([m["temperature"] for m in mine])),
                "entropy": float(np.mean([m["wanted"] for m in mine])),
                "reached": all(m["reached"] for m in mine),
            }
    return found
