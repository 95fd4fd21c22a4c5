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

Statistics of arms that share starts and problems:

    x[p, r, i]   the value of problem i, of run r from start p; the start itself is an arm with one run (r =
                 0)
    c[p, i]      mean over r of treated[p, r, i] - mean over r of base[p, r, i];  delta = mean of c

Starts and problems are crossed (all models answer the same problems) and both are samples of what could have
been, so
    Var(delta) = (MS_starts + MS_problems - MS_rest) / (P I)          two-way random effects, unbiased
with Satterthwaite's degrees of freedom: about P - 1 when starts disagree, more when problems do. The scatter
of the runs is in MS_starts. `low`, `high` and p are Student's t.

A hierarchical bootstrap of starts, runs and problems is too narrow in the tails for a handful of starts (5
starts: t is 2.78, not 1.96), so there is none.

With one start there is no telling what another start would do: all intervals are nan, and nothing may be
claimed.

Source: Searle, Casella, McCulloch 1992 chapter 4.
Legend: P starts, R runs, I problems.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from earlyfusion.eval.measured import Measured, by_problem, ece, load_measured, sampled_pass, summary
from earlyfusion.eval.stats import ALPHA, Estimate, holm, interval, mean_estimate
from earlyfusion.kernels.files import Record
from earlyfusion.pipeline.report.page import read_dict
from earlyfusion.rl.study.plan import START, Arm, StudyConfig, beside, measured_file

Array = NDArray[np.float64]
# A gain that one of these shows as well is not owed to the pictures.
CONTROLS = ("random", "sft", "text", "unrelated")
"""Arms that every arm is compared with, where the study has them, besides its own `against`."""
SHARPER = ("random", "sft")
"""Controls an arm must beat before its gain may be called its own."""
Row = Record


@dataclass
class Model:
    """What was measured of one model. records: label -> key -> answer; matched: label -> the start at this
    model's entropy ({} for a start); probe: "fitted on>read off" -> accuracy by depth ({} without probes)."""

    records: dict[str, dict[str, Measured]]
    matched: Record
    probe: Record


Models = Mapping[str, Mapping[int, Sequence[Model]]]
"""Arm -> start -> its runs; the start itself is an arm with one run."""


def load_models(config: StudyConfig, out: Path) -> Models:
    """Everything that was measured so far."""
    models: dict[str, dict[int, list[Model]]] = defaultdict(lambda: defaultdict(list))
    for p in range(config.seeds):
        # Without its start nothing of a seed can be compared.
        if not measured_file(out, p).is_file():
            continue
        for name, run in [(START, 0), *((arm.name, run) for arm, run in config.runs())]:
            file = measured_file(out, p, name, run)
            # The stage that measures writes a run's answers first and its matched start last.
            if name == START or beside(file, "matched").is_file():
                beside_it = (read_dict(beside(file, kind)) for kind in ("matched", "probe"))
                models[name][p].append(Model(by_problem(load_measured(file)), *beside_it))
    return models


def arrays(models: Models, arm: str, label: str, metric: str) -> dict[int, Array]:
    """Start -> values [R, I] of an arm's runs, the same problems in the same order by the plan that all share
    (`plan.write_recipes`); [R, 1] for "ece"."""
    found = {}
    for p, runs in models[arm].items():
        rows = [values(model, label, metric) for model in runs if label in model.records]
        if rows:
            found[p] = np.array(rows)
    return found


def values(model: Model, label: str, metric: str) -> list[float]:
    """A metric of one model, problem by problem. "p_matched" is the difference to the start at the model's
    entropy: every run has a start of its own, so it is taken run by run, and is 0 for a start."""
    own = list(model.records[label].values())
    if metric == "ece":
        return [ece([one.confidence for one in own], [one.solved for one in own])]
    if metric == "accuracy":
        return [float(one.solved) for one in own]
    if metric.startswith("pass@"):
        return [sampled_pass(one, int(metric.removeprefix("pass@"))) for one in own]
    start = {one.key: 0.0 for one in own}
    if metric == "p_matched":
        start = {one.key: one.p_target for one in own}
        if model.matched:
            start = model.matched[label]["p_target"]
    return [one.p_target - start[one.key] for one in own]


def primary_of(config: StudyConfig, arm: Arm) -> str:
    """The label an arm is judged on: the primary one; after a thought for an arm that was trained to
    think."""
    return config.primary_label + ("/thought" if arm.thought else "")


def compared(base: dict[int, Array], treated: dict[int, Array]) -> Row | None:
    """Means, difference with its intervals, and every run's own difference; None where the arms share no
    start."""
    # Runs may be missing; a start alone says nothing of an arm.
    both = [p for p in treated if p in base]
    if not both:
        return None
    a, b = [base[p] for p in both], [treated[p] for p in both]
    before, after = (float(np.mean([runs.mean() for runs in side])) for side in (a, b))
    per_seed = [(runs.mean(1) - start.mean()).tolist() for start, runs in zip(a, b)]
    return {"before": before, "after": after, **vars(compare_arms(a, b)), "per_seed": per_seed}


def analyse(config: StudyConfig, out: Path) -> Row:
    """All tables of the report as plain data (also OUT/study.json)."""
    models = load_models(config, out)
    arms = [arm for arm in config.arms if arm.name in models]
    claims = ["accuracy", "p_target", "p_matched"]
    if config.measure.samples > 1:
        claims.append(f"pass@{config.measure.samples}")
    starts = [runs[0].records for runs in models[START].values()]
    labels = [label for label in config.labels() if any(label in records for records in starts)]

    # Every arm against its start.
    rows: list[Row] = []
    for arm in arms:
        for label in labels:
            # Other forms and skills are described in fewer figures, none of them claimed.
            metrics = claims if config.registered(label) else ["accuracy", "p_target"]
            for metric in [*metrics, "ece"]:
                base, treated = (arrays(models, name, label, metric) for name in (START, arm.name))
                found = compared(base, treated)
                if found is not None:
                    registered = label == primary_of(config, arm) and metric in claims
                    about = {"arm": arm.name, "label": label, "metric": metric, "registered": registered}
                    rows.append({**about, **found})
    family = [row for row in rows if row["registered"]]
    judge(family)

    # What every start knows of a label, before any arm.
    told: dict[str, list[Row]] = defaultdict(list)
    for records in starts:
        for label, row in summary(one for known in records.values() for one in known.values()).items():
            told[label].append(row)
    differences = [row for arm in arms for row in against_controls(config, models, arm, arms)]
    return {
        "primary": config.primary_label,
        "seeds": list(models[START]),
        "family": len(family),
        "start": told,
        "rows": rows,
        "differences": differences,
        "verdicts": {arm.name: verdict(arm, family, differences) for arm in arms},
        "arms": {arm.name: {"kind": arm.kind} for arm in arms},
        "temperatures": {arm.name: temperatures(models, arm.name, primary_of(config, arm)) for arm in arms},
        "shortcuts": {label: shortcut(starts[0][label].values()) for label in labels},
        "probe": probes(models),
    }


def judge(rows: Sequence[Row]) -> None:
    """Add Holm's p values over these rows, and the word that each earns."""
    for row, p in zip(rows, holm([row["p"] for row in rows])):
        row["p_holm"], row["word"] = p, word(row, p)


def against_controls(config: StudyConfig, models: Models, arm: Arm, arms: Sequence[Arm]) -> list[Row]:
    """Differences in differences of one arm: (arm - start) - (control - start), where both were measured
    alike."""
    rows = []
    own = primary_of(config, arm)
    for control in arms:
        if control.name not in (*CONTROLS, *arm.against) or control.name == arm.name:
            continue
        # Arms that think are judged after their thought, on the same problems.
        gains = []
        for name, label in ((control.name, primary_of(config, control)), (arm.name, own)):
            start, after = (arrays(models, one, label, "accuracy") for one in (START, name))
            gains.append({p: after[p] - start[p] for p in after if p in start})
        found = compared(gains[0], gains[1])
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


def temperatures(models: Models, arm: str, label: str) -> list[Row]:
    """How the start was matched to the entropy of each run of an arm."""
    found = []
    for runs in models[arm].values():
        for model in runs:
            found.append({key: model.matched[label][key] for key in ("temperature", "entropy", "reached")})
    return found


def probes(models: Models) -> Row:
    """What the linear probes read so far, {} if nothing was probed:

    {"start": {pair: accuracy by depth}, "arms": {arm: {pair: change from the start by depth}}}, changes as
    estimates of Student's t over the starts, runs of a start averaged first.
    """
    starts = {p: runs[0].probe for p, runs in models[START].items() if runs[0].probe}
    if not starts:
        return {}
    result: Row = {"start": {}, "arms": defaultdict(dict)}
    for pair in next(iter(starts.values())):
        result["start"][pair] = np.mean([one[pair] for one in starts.values()], axis=0).tolist()
        for arm in models.keys() - {START}:
            changes_PL = []
            for p, runs in models[arm].items():
                read = [model.probe[pair] for model in runs if model.probe]
                if read and p in starts:
                    changes_PL.append(np.mean(read, axis=0) - starts[p][pair])
            if changes_PL:
                estimates = map(mean_estimate, np.array(changes_PL).T)
                result["arms"][arm][pair] = [vars(estimate) for estimate in estimates]
    return result


# ---- Statistics.


def compare_arms(base: Sequence[Array], treated: Sequence[Array]) -> Estimate:
    """Delta of two arms. base, treated: for every start values [R, I]; R may differ, I may not (1 for what
    is no mean over problems, such as a calibration error).

    Raises ValueError when the arms do not have the same starts and problems.
    """
    return crossed_mean(np.stack([b.mean(0) - a.mean(0) for a, b in zip(base, treated, strict=True)]))


def crossed_mean(cells_PI: Array) -> Estimate:
    """Mean of a table whose rows and columns are both sampled; nan where there is one row."""
    starts, n, value = len(cells_PI), cells_PI.size, float(cells_PI.mean())
    if starts < 2:
        return interval(value, math.nan, 0, n)

    # Mean squares of starts, of problems and of what is left, as variances of the mean.
    by_start_P, by_item_I = cells_PI.mean(1) - value, cells_PI.mean(0) - value
    rest_PI = cells_PI - value - by_start_P[:, None] - by_item_I
    parts, spread = [], 0.0
    for residuals in (by_start_P, by_item_I, rest_PI):
        free = math.prod(max(1, size - 1) for size in residuals.shape)
        parts.append(float((residuals**2).sum()) / free / residuals.size)
        spread += parts[-1] ** 2 / free
    # The unbiased sum may fall below its own parts by chance; a claim must not profit.
    variance = max(parts[0] + parts[1] - parts[2], parts[0], parts[1])
    df = variance**2 / spread if spread > 0 else starts - 1
    se = math.sqrt(variance) if variance > 1e-24 else 0.0  # what rounding leaves of no scatter is none
    return interval(value, se, min(df, n - 1), n)


def word(row: Record, p_holm: float) -> str:
    """ "gain" or "loss" only where the interval excludes 0 and the adjusted p value agrees; else what could
    not be shown."""
    if math.isnan(row["se"]):
        return "one start: nothing can be said"
    # An interval of no width means that nothing varied, not that all is known.
    above = row["se"] > 0 and row["low"] > 0
    below = row["se"] > 0 and row["high"] < 0
    if not p_holm <= ALPHA or not (above or below):
        return "no difference shown"
    return "gain" if above else "loss"


# ---- Rules of place.


def shortcut(records: Iterable[Measured]) -> Record | None:
    """What a rule that reads no meaning solves of these problems: the best rule of place; None where no
    answer stands in the words (pictures, most counts).

    The rules: the k-th answer word of a problem's words, the first of line k. A model that learns one gains
    without the skill. Answer words of a problem are the targets of its category, wherever they stand.

    rule: "answer word 2", "first answer word of line 2"; the last one where there are fewer. solves,
    at_random: shares of problems that it solves, and that an answer word drawn evenly solves.
    """
    known = list(records)
    targets: dict[str, set[str]] = defaultdict(set)
    for one in known:
        targets[one.category].add(one.target)

    # Every rule's votes, one a problem; at random a word counts as often as it is named.
    right: dict[str, int] = defaultdict(int)
    lines = [[named(line, targets[one.category]) for line in one.prompt.splitlines()] for one in known]
    words = [[word for line in told for word in line] for told in lines]
    most_words, most_lines = max(map(len, words)), max(map(len, lines))
    drawn = 0.0
    for one, told, said in zip(known, lines, words):
        for k in range(most_words):
            right[f"answer word {k + 1}"] += said[: k + 1][-1:] == [one.target]
        for k in range(1, most_lines):
            right[f"first answer word of line {k + 1}"] += (told[: k + 1][-1:] or [[]])[0][:1] == [one.target]
        drawn += (one.target in said) / max(1, len(set(said)))
    # Pictures, and words that do not hold the answer, leave no rule of place.
    if not most_words:
        return None
    best = max(right, key=lambda rule: right[rule])
    return {"rule": best, "solves": right[best] / len(known), "at_random": drawn / len(known)}


def named(words: str, targets: set[str]) -> list[str]:
    """The targets that stand in the words, in their order."""
    # The longest first: "dark red" is not "red".
    either = "|".join(sorted(map(re.escape, targets), key=len, reverse=True))
    return re.findall(rf"(?<!\w)(?:{either})(?!\w)", words)
