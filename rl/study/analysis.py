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

Everything else (calibration, other forms and skills, the probes) is described, not claimed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from earlyfusion.eval.measured import Measured, by_problem, ece, load_measured, sampled_pass, summary
from earlyfusion.eval.stats import holm, mean_estimate
from earlyfusion.rl.study.plan import START, Arm, StudyConfig, beside, measured_file
from earlyfusion.rl.study.shortcuts import shortcut
from earlyfusion.rl.study.statistics import DRAWS, Array, compare_arms, word

# A gain that one of these shows as well is not owed to the pictures.
CONTROLS = ("random", "sft", "text", "unrelated")
"""Arms that every arm is compared with, where the study has them, besides its own `against`."""
SHARPER = ("random", "sft")
"""Controls an arm must beat before its gain may be called its own."""
Row = dict[str, Any]


class Answers:
    """Everything that was measured so far.

    runs, matched: (arm, start) -> one entry for every run, by label; the start itself is an arm with one run,
    which has nothing to be matched with. keys: label -> problems that all models answered, in order.
    """

    def __init__(self, config: StudyConfig, out: Path) -> None:
        self.samples = config.measure.samples
        self.runs: dict[tuple[str, int], list[dict[str, dict[str, Measured]]]] = defaultdict(list)
        self.matched: dict[tuple[str, int], list[Row]] = defaultdict(list)
        self.keys: dict[str, list[str]] = {}
        self.starts = []
        for p in range(config.seeds):
            # Without its start nothing of a seed can be compared.
            if not measured_file(out, p).is_file():
                continue
            self.starts.append(p)
            self.add(START, p, measured_file(out, p))
            for arm, run in config.runs():
                file = measured_file(out, p, arm.name, run)
                # The stage that measures writes both, one after the other.
                if beside(file, "matched").is_file():
                    self.add(arm.name, p, file)
                    text = beside(file, "matched").read_text(encoding="utf-8")
                    self.matched[arm.name, p].append(json.loads(text))

    def add(self, arm: str, p: int, file: Path) -> None:
        """Read one model's answers."""
        records = by_problem(load_measured(file))
        self.runs[arm, p].append(records)
        for label, known in records.items():
            # Models that were asked other problems would be compared on other questions.
            self.keys[label] = [key for key in self.keys.get(label, known) if key in known]

    def arrays(self, arm: str, label: str, metric: str) -> dict[int, Array]:
        """Start -> values [R, I] of an arm's runs; [R, 1] for "ece". "p_matched" is the difference to the
        start at the run's entropy: every run has a start of its own, so it is taken run by run."""
        found = {}
        for p in self.starts:
            rows = []
            for number, run in enumerate(self.runs[arm, p]):
                if label in run:
                    own = [run[label][key] for key in self.keys[label]]
                    rows.append(self.values(own, metric))
                    if metric == "p_matched" and arm != START:
                        other = self.matched[arm, p][number][label]["p_target"]
                        rows[-1] -= [other[key] for key in self.keys[label]]
            if rows:
                found[p] = np.array(rows)
        return found

    def values(self, records: Sequence[Measured], metric: str) -> Array:
        """A metric of one run, problem by problem."""
        if metric == "ece":
            return np.array([ece([one.confidence for one in records], [one.solved for one in records])])
        values = []
        for one in records:
            if metric == "accuracy":
                values.append(float(one.solved))
            elif metric.startswith("pass@"):
                values.append(sampled_pass(one, self.samples))
            else:
                values.append(one.p_target)
        return np.array(values)


def primary_of(config: StudyConfig, arm: Arm) -> str:
    """The label an arm is judged on: the primary one; after a thought for an arm that was trained to
    think."""
    return config.primary_label + ("/thought" if arm.thought else "")


def compared(base: dict[int, Array], treated: dict[int, Array], draws: int) -> Row | None:
    """Means, difference with its intervals, and every run's own difference; None where the arms share no
    start."""
    # Runs may be missing; a start alone says nothing of an arm.
    both = [p for p in treated if p in base]
    if not both:
        return None
    a, b = [base[p] for p in both], [treated[p] for p in both]
    before, after = (float(np.mean([runs.mean() for runs in side])) for side in (a, b))
    per_seed = []
    for start, runs in zip(a, b):
        per_seed.append([float(run.mean() - start.mean()) for run in runs])
    estimate = compare_arms(a, b, draws=draws)
    return {"before": before, "after": after, **estimate, "per_seed": per_seed}


def analyse(config: StudyConfig, out: Path, draws: int = DRAWS) -> Row:
    """All tables of the report as plain data (also OUT/study.json)."""
    answers = Answers(config, out)
    arms = [arm for arm in config.arms if any(answers.runs[arm.name, p] for p in answers.starts)]
    claims = ["accuracy", "p_target", "p_matched"]
    if config.measure.samples > 1:
        claims.append(f"pass@{config.measure.samples}")
    starts = [answers.runs[START, p][0] for p in answers.starts]
    labels = [label for label in config.labels() if any(label in records for records in starts)]

    # Every arm against its start.
    rows: list[Row] = []
    for arm in arms:
        for label in labels:
            # Other forms and skills are described in fewer figures, none of them claimed.
            metrics = claims if config.registered(label) else ["accuracy", "p_target"]
            for metric in [*metrics, "ece"]:
                treated, base = (answers.arrays(name, label, metric) for name in (arm.name, START))
                # The start at the run's entropy is taken off already.
                if metric == "p_matched":
                    base = {p: np.zeros_like(own) for p, own in base.items()}
                found = compared(base, treated, draws)
                if found is not None:
                    registered = label == primary_of(config, arm) and metric in claims
                    about = {"arm": arm.name, "label": label, "metric": metric, "registered": registered}
                    rows.append({**about, **found})
    family = [row for row in rows if row["registered"]]
    judge(family)

    differences = [row for arm in arms for row in against_controls(config, answers, arm, arms, draws)]
    return {
        "skill": config.skill,
        "unrelated": config.unrelated,
        "primary": config.primary_label,
        "seeds": answers.starts,
        "family": len(family),
        "draws": draws,
        "start": {label: start_summary(starts, label) for label in labels},
        "rows": rows,
        "differences": differences,
        "verdicts": {arm.name: verdict(arm, family, differences) for arm in arms},
        "arms": {arm.name: {"kind": arm.kind} for arm in arms},
        "temperatures": {arm.name: temperature_of(config, answers, arm) for arm in arms},
        "shortcuts": {label: shortcut(starts[0][label].values()) for label in labels},
        "probe": read_probes(config, out),
    }


def judge(rows: Sequence[Row]) -> None:
    """Add Holm's p values over these rows, and the word that each earns."""
    for row, p in zip(rows, holm([row["p"] for row in rows])):
        row["p_holm"], row["word"] = p, word(row, p)


def against_controls(
    config: StudyConfig, answers: Answers, arm: Arm, arms: Sequence[Arm], draws: int
) -> list[Row]:
    """Differences in differences of one arm: (arm - start) - (control - start), where both were measured
    alike."""
    rows = []
    own = primary_of(config, arm)
    for control in arms:
        if control.name not in (*CONTROLS, *arm.against) or control.name == arm.name:
            continue
        other = primary_of(config, control)
        shared = [key for key in answers.keys[own] if key in answers.keys[other]]
        gains = []
        for name, label in ((control.name, other), (arm.name, own)):
            # Arms that think are judged after their thought, on the same problems.
            kept = [answers.keys[label].index(key) for key in shared]
            start, after = (answers.arrays(one, label, "accuracy") for one in (START, name))
            gains.append({p: (after[p] - start[p])[:, kept] for p in after if p in start})
        found = compared(gains[0], gains[1], draws)
        if found is not None:
            about = {"arm": arm.name, "control": control.name, "label": own, "metric": "accuracy"}
            found |= {"control_gain": found.pop("before"), "arm_gain": found.pop("after")}
            rows.append({**about, **found})
    judge(rows)
    for row in rows:
        row["word"] = {"gain": "above", "loss": "below"}.get(row["word"], row["word"])
    return rows


def verdict(arm: Arm, family: Sequence[Row], differences: Sequence[Row]) -> str:
    """One sentence on an arm's greedy accuracy in words."""
    said = "not measured"
    for row in family:
        if (row["arm"], row["metric"]) == (arm.name, "accuracy"):
            said = row["word"]
    needed = (*SHARPER, *arm.against)
    mine = [row for row in differences if row["arm"] == arm.name and row["control"] in needed]
    if said != "gain" or arm.name in CONTROLS or not mine:
        return said
    # Sharper answers and more fine-tuning earn gains too; an arm must be above both.
    open_ = [row["control"] for row in mine if row["word"] != "above"]
    if open_:
        return f"gain, not told apart from {', '.join(open_)}"
    return f"gain, above {', '.join(row['control'] for row in mine)}"


def start_summary(starts: Sequence[dict[str, dict[str, Measured]]], label: str) -> Row:
    """Metric -> mean over the starts, and each start."""
    told = [summary(records[label].values())[label] for records in starts if label in records]
    found = {}
    for name in told[0]:
        each = [row[name] for row in told]
        found[name] = {"mean": float(np.mean(each)), "each": each}
    return found


def temperature_of(config: StudyConfig, answers: Answers, arm: Arm) -> Row:
    """How the start was matched to an arm's entropy on its primary label, mean over the runs."""
    mine = [run[primary_of(config, arm)] for p in answers.starts for run in answers.matched[arm.name, p]]
    found: Row = {key: float(np.mean([one[key] for one in mine])) for key in ("temperature", "entropy")}
    return {**found, "reached": all(one["reached"] for one in mine)}


# ---- Linear probes: means over runs, and changes from each start.


def read_probes(config: StudyConfig, out: Path) -> Row:
    """What was probed so far, {} if nothing was; pairs are "fitted on>read off":

    {"start": {pair: accuracy by depth}, "arms": {arm: {pair: {"change", "low", "high": by depth}}}},
    Student's t over the starts, runs of a start averaged first.
    """

    def read(p: int, arm: str = START, run: int = 0) -> dict[str, Array]:
        file = beside(measured_file(out, p, arm, run), "probe")
        found: dict[str, Array] = {}
        if file.is_file():
            # Fitted on one form, read off another: the pair names both.
            for fitted, row in json.loads(file.read_text(encoding="utf-8")).items():
                found |= {f"{fitted}>{form}": np.array(depths) for form, depths in row.items()}
        return found

    starts = {p: found for p in range(config.seeds) if (found := read(p))}
    if not starts:
        return {}
    pairs = list(next(iter(starts.values())))
    result: Row = {"start": {}, "arms": defaultdict(dict)}
    for pair in pairs:
        result["start"][pair] = np.mean([one[pair] for one in starts.values()], axis=0).tolist()
        for arm in config.arms:
            changes_PL = []
            for p, start in starts.items():
                runs = [found[pair] for run in range(config.rl_seeds) if (found := read(p, arm.name, run))]
                if runs:
                    changes_PL.append(np.mean(runs, axis=0) - start[pair])
            if changes_PL:
                spans = [mean_estimate(column) for column in np.array(changes_PL).T]
                names = {"change": "value", "low": "low", "high": "high"}
                told = {name: [getattr(span, field) for span in spans] for name, field in names.items()}
                result["arms"][arm.name][pair] = told
    return result
