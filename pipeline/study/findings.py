"""What a study found: differences with their intervals, tokens for the same loss, one page.

Every arm is compared seed by seed with the base, or with the arms that it names; arms of one seed share their
data and, where they have one, their start.

    differences   by size, and as the mean over sizes: mean over seeds, Student's t. Where problems are
                  grouped (`cluster`), seeds and groups are crossed, and both are a sample (eval/stats.py)
    claims        the means over sizes of every arm that is asked and every claimed metric; Holm over all of
                  them; a claim needs its interval to exclude 0 and Holm's p to be at most 0.05
    seen          the smallest true difference that 80 % of such studies would show
    tokens        the base at several lengths, each with its whole schedule; on the straight line between its
                  losses over log tokens lies the length at which it reaches the loss of another arm.
                  Geometric mean over seeds with Student's t; a loss outside those lengths is counted, not
                  extrapolated
    trend         slope of log multiple over log parameters (scipy's linear regression), with its interval
    within        items that a run learned as it was trained against those that it did not, as they are asked;
                  and the ratio of the two gains (jackknife over seeds)
    instrument    arms whose outcome is known

With n seeds a difference has n - 1 degrees of freedom: three seeds give intervals of 4.3 standard errors.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy import stats

from earlyfusion.eval.stats import ALPHA, Estimate, crossed_mean, holm, interval, mean_estimate, seen
from earlyfusion.kernels.files import Record, write_json
from earlyfusion.model.hub.folder import tensor_headers
from earlyfusion.pipeline.report.page import write_page
from earlyfusion.pipeline.study.plan import (
    BEST_OF,
    Size,
    Start,
    StudyArm,
    StudyConfig,
    chosen,
    run_of,
    tried,
)
from earlyfusion.pipeline.study.records import Cells, Metric, Run

ALL = "all"
"""Stands for the mean over sizes."""
SOLVED = 0.5
"""Share of an item's problems from which it counts as learned."""
Seeds = dict[int, Cells]
"""Seed -> figure, by group of problems."""
Place = tuple[str, str, float]
"""Size, arm, share of the steps."""


class Results:
    """The finished runs of a study, without the seeds whose start fails a gate."""

    def __init__(self, config: StudyConfig, out: Path) -> None:
        self.config = config
        self.runs: dict[Place, dict[int, Run]] = defaultdict(dict)
        for size, arm, seed in product(config.sizes, config.trained, range(config.seeds)):
            for length in config.lengths(arm):
                run = Run(run_of(out, size.name, arm.name, length, seed))
                if run.done:
                    self.runs[size.name, arm.name, length][seed] = run
        self.left_out: dict[int, str] = {}
        for size in config.sizes:
            for seed, run in self.runs[size.name, config.base_arm.name, config.base_arm.tokens].items():
                for gate in config.gates:
                    value = run.value(Metric(key=gate.key, of="first"))
                    if not gate.least <= value <= gate.most:
                        self.left_out[seed] = f"{gate.key} of its start is {value:.3f}"

    def of(self, size: Size, arm: Start, length: float) -> dict[int, Run]:
        """Seed -> run."""
        found = self.runs[size.name, arm.name, length]
        return {seed: run for seed, run in found.items() if seed not in self.left_out}

    def figures(self, size: str, arm: Start, metric: Metric, of: str = "", length: float = 0.0) -> Seeds:
        """The metric of an arm by seed; of size "all" the mean over sizes, where a seed is there in all."""
        sizes = [one for one in self.config.sizes if size in (one.name, ALL)]
        length = length or (arm.tokens if isinstance(arm, StudyArm) else 1.0)
        found: dict[int, list[Cells]] = defaultdict(list)
        for one in sizes:
            for seed, run in self.of(one, arm, length).items():
                cells = run.cells(metric, self.config.cluster, of)
                if cells:
                    found[seed].append(cells)
        whole = {seed: cells for seed, cells in found.items() if len(cells) == len(sizes)}
        return {
            seed: {key: fmean(one[key] for one in each) for key in each[0]} for seed, each in whole.items()
        }

    def rival(self, size: str, names: str, metric: Metric) -> Seeds:
        """What an arm is compared with: of "a|b" the better of the two, seed by seed."""
        arms = [arm for arm in self.config.trained if arm.name in names.split(BEST_OF)]
        every = [self.figures(size, arm, metric) for arm in arms]
        best = max if metric.better == "higher" else min
        shared = set.intersection(*(set(one) for one in every))
        return {seed: best((one[seed] for one in every), key=level) for seed in sorted(shared)}


def level(cells: Cells) -> float:
    """The mean over groups."""
    return fmean(cells.values())


def estimate(figures: Mapping[int, Cells]) -> Estimate:
    """Mean over seeds, crossed with groups where all seeds have the same ones."""
    rows = list(figures.values())
    groups = set(rows[0])
    if len(groups) > 1 and all(set(row) == groups for row in rows):
        return crossed_mean(np.array([[row[group] for group in sorted(groups)] for row in rows]))
    return mean_estimate([level(row) for row in rows])


def told(figures: Mapping[int, Cells]) -> Record:
    """An estimate as plain data, with every seed's own."""
    found = estimate(figures)
    return {**vars(found), "seen": seen(found), "per_seed": [level(row) for row in figures.values()]}


def smallest(spread: float, seeds: int) -> float:
    """The difference that is shown with 80 % power by that many seeds."""
    return seen(interval(0.0, spread / math.sqrt(seeds), seeds - 1, seeds))


def power(config: StudyConfig) -> str:
    """What the study can see, said before its first run."""
    if config.seeds < 2:
        return "one seed: nothing can be claimed"
    spreads = smallest(1.0, config.seeds)
    return (
        f"{config.seeds} seeds show, with 80 % power, a difference of {spreads:.1f} standard deviations of a"
        " difference between seeds"
    )


def places(config: StudyConfig) -> list[str]:
    """Sizes in tables."""
    return [*(size.name for size in config.sizes), ALL] if len(config.sizes) > 1 else [ALL]


def own_figures(results: Results) -> list[Record]:
    """Every metric of every start and arm by itself."""
    rows: list[Record] = []
    config = results.config
    for arm, (name, metric), size in product(config.trained, config.metrics.items(), places(config)):
        if figures := results.figures(size, arm, metric):
            rows.append({"arm": arm.name, "metric": name, "size": size, **told(figures)})
    return rows


def differences(results: Results) -> list[Record]:
    """Every arm beside what it is compared with."""
    config = results.config
    rows: list[Record] = []
    for arm in config.arms:
        against = arm.against or ([config.base_arm.name] if arm is not config.base_arm else [])
        asked = [(name, one) for name, one in config.metrics.items() if arm.name in (one.arms or [arm.name])]
        for rival, (name, metric), size in product(against, asked, places(config)):
            base, own = results.rival(size, rival, metric), results.figures(size, arm, metric)
            change = {
                seed: {group: own[seed][group] - base[seed][group] for group in own[seed]}
                for seed in own
                if seed in base and set(own[seed]) <= set(base[seed])
            }
            if change:
                means = {
                    "base": fmean(level(base[s]) for s in change),
                    "after": fmean(level(own[s]) for s in change),
                }
                about = {
                    "arm": arm.name,
                    "against": rival,
                    "metric": name,
                    "size": size,
                    "expect": arm.expect,
                }
                rows.append(about | means | told(change))
    claims = [row for row in rows if claim(config, row)]
    for row, p in zip(claims, holm([row["p"] for row in claims])):
        row["p_holm"], row["word"] = p, word(row, p)
    return rows


def claim(config: StudyConfig, row: Record) -> bool:
    """Whether a difference is claimed."""
    return row["size"] == ALL and not row["expect"] and config.metrics[row["metric"]].claimed


def word(row: Record, p: float) -> str:
    """What a claim may say."""
    if math.isnan(row["se"]):
        return "one seed: nothing can be said"
    # An interval of no width means that nothing varied, not that all is known.
    if not p <= ALPHA or row["low"] <= 0 <= row["high"] or row["se"] == 0:
        return "no difference shown"
    return "lower" if row["high"] < 0 else "higher"


def multiple(base: dict[float, float], target: float) -> float:
    """Share of the tokens at which the base has this loss; inf where the longest run has not, 0 where the
    shortest has more than it needs.

    base: share of the tokens -> loss.
    """
    lengths = sorted(base)
    # A longer run that happens to be worse must not hide an earlier one that got there.
    for short, long in pairwise(lengths):
        if base[short] > target >= base[long]:
            way = (base[short] - target) / (base[short] - base[long])
            return short * (long / short) ** way
    if base[lengths[0]] <= target:
        return 0.0
    return math.inf


def token_rows(results: Results, parameters: dict[str, int]) -> list[Record]:
    """How many tokens the base needs for each arm's loss, by size and with its trend."""
    config, rows = results.config, []
    base_arm = config.base_arm
    asked = [arm for arm in config.arms[1:] if not arm.expect] if config.base_tokens else []
    for arm, (name, metric) in product(asked, config.metrics.items()):
        logs: list[tuple[float, float]] = []
        for size in (one.name for one in config.sizes):
            lengths = config.lengths(base_arm)
            curves = {x: results.figures(size, base_arm, metric, length=x) for x in lengths}
            found = []
            for seed, target in results.figures(size, arm, metric).items():
                base = {x: level(values[seed]) for x, values in curves.items() if seed in values}
                found.append(multiple(base, level(target)) / arm.tokens if len(base) > 1 else math.nan)
            inside = [math.log(value) for value in found if 0 < value < math.inf]
            logs += [(math.log(parameters.get(size, 1)), value) for value in inside]
            row: Record = {"arm": arm.name, "metric": name, "size": size, "seeds": len(found)}
            row["more"], row["fewer"] = found.count(math.inf), found.count(0.0)
            if inside:
                mean = mean_estimate(inside)
                row |= {part: math.exp(getattr(mean, part)) for part in ("value", "low", "high")}
            rows.append(row)
        # Parameters are told once a run of the base is there.
        if len({x for x, _ in logs}) > 1 and len(logs) > 2:
            fit = stats.linregress(*np.array(logs).T)
            found_slope = interval(float(fit.slope), float(fit.stderr), len(logs) - 2, len(logs))
            about = {"arm": arm.name, "metric": name, "size": "trend", "seeds": len(logs)}
            rows.append(about | vars(found_slope))
    return rows


def within_rows(results: Results) -> list[Record]:
    """For every arm: items that it learned as it was trained against the others, as they are asked; and the
    gain as asked over the gain as trained."""
    config = results.config
    if config.within is None:
        return []
    trained, asked = (config.metrics[name] for name in (config.within.trained, config.within.asked))
    rows = []
    for arm in config.arms:
        ends = [results.figures(ALL, arm, metric, "last") for metric in (trained, asked)]
        split: dict[int, Cells] = {}
        learned, shown = [], []
        for seed in ends[0].keys() & ends[1].keys():
            known = {group for group, value in ends[0][seed].items() if value > SOLVED}
            parts: list[list[float]] = [[], []]
            for group, value in ends[1][seed].items():
                parts[group in known].append(value)
            learned += parts[True]
            shown += parts[False]
            if all(parts):
                split[seed] = {"": fmean(parts[True]) - fmean(parts[False])}
        row: Record = {"arm": arm.name, "items": len(learned), "others": len(shown)}
        row |= {"learned": fmean(learned)} if learned else {}
        row |= {"not_learned": fmean(shown)} if shown else {}
        row |= told(split) if split else {}
        gains = [results.figures(ALL, arm, metric, "gain") for metric in (trained, asked)]
        both = sorted(gains[0].keys() & gains[1].keys())
        if len(both) > 2:
            row["ratio"] = vars(ratio(*([level(one[seed]) for seed in both] for one in gains)))
        rows.append(row)
    return rows


def ratio(below: Sequence[float], above: Sequence[float]) -> Estimate:
    """Mean of `above` over mean of `below`, with the jackknife's standard error over the pairs."""
    x, y = np.array(below), np.array(above)
    # No gain at all has no ratio.
    with np.errstate(invalid="ignore", divide="ignore"):
        n, value = len(x), float(y.sum() / x.sum())
        left = (y.sum() - y) / (x.sum() - x)
    return interval(value, math.sqrt((n - 1) / n * float(((left - left.mean()) ** 2).sum())), n - 1, n)


def instrument(config: StudyConfig, rows: list[Record], own: list[Record]) -> list[Record]:
    """Whether the arms that test the study came out as they must, on the registered metric."""
    found = []
    sign = 1 if config.metrics[config.registered].better == "lower" else -1
    of = {arm.name: arm.expect for arm in config.arms}
    for row in [*rows, *own]:
        expect, alone = of.get(row["arm"], ""), "against" not in row
        if row["metric"] != config.registered or row["size"] != ALL or alone != (expect == "nothing"):
            continue
        # Signed so that above 0 is worse.
        low, high = sorted((sign * row["low"], sign * row["high"]))
        good = {"worse": low > 0, "better": high < 0, "same": low <= 0 <= high, "nothing": high >= 0}
        if expect:
            found.append(row | {"expect": expect, "good": bool(good[expect])})
    return found


WRONG = {
    "same": "differs from",
    "worse": "was not told from",
    "better": "was not told from",
    "nothing": "is better than nothing beside",
}
"""What an arm that tests the study did instead."""


def headline(config: StudyConfig, results: Record) -> str:
    """What came out, in plain sentences."""
    passed = {row["arm"] for row in results["instrument"] if row["good"]}
    sentences = []
    for arm in config.arms:
        if arm.expect and arm.name not in passed:
            beside = " and ".join(arm.against or [config.base_arm.name])
            wrong = f"{arm.name} {WRONG[arm.expect]} {beside}"
            sentences.append(f"The study failed its own test: {wrong}.")
    for row in results["rows"]:
        if row["metric"] == config.registered and "word" in row:
            span = f"{row['value']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"
            joined = {"lower": "lower than", "higher": "higher than"}.get(
                row["word"], f"{row['word']}, beside"
            )
            sentences.append(f"{row['arm']}: {row['metric']} {joined} {row['against']} ({span}).")
    for seed, why in results["left_out"].items():
        sentences.append(f"Seed {seed} is left out: {why}.")
    return " ".join(sentences) or "Nothing was measured yet."


def curves_of(results: Results) -> dict[str, dict[str, Any]]:
    """Title -> arm -> (x, values): the mean of seeds over a run where it is known, else every run at its
    end."""
    config = results.config
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for size, (name, metric), arm in product(config.sizes, config.metrics.items(), config.arms):
        title = f"{name}, size {size.name}" if len(config.sizes) > 1 else name
        runs = [run for x in config.lengths(arm) for run in results.of(size, arm, x).values()]
        every = [curve for run in runs if (curve := run.curve(metric))]
        if every and min(map(len, every)) > 1 and len(config.lengths(arm)) == 1:
            length = min(map(len, every))
            x = [point[0] for point in every[0][:length]]
            found[title][arm.name] = (x, [fmean(curve[i][1] for curve in every) for i in range(length)])
        elif every:
            found[title][arm.name] = tuple(zip(*sorted(curve[-1] for curve in every)))
    return found


def write_findings(config: StudyConfig, out: Path) -> None:
    """study.json, the page and one sentence; nothing where no run is done."""
    results = Results(config, out)
    own = own_figures(results)
    if not own:
        return
    tuning: list[Record] = []
    parameters: dict[str, int] = {}
    for size in config.sizes:
        for run in results.of(size, config.base_arm, config.base_arm.tokens).values():
            shapes = tensor_headers([*(run.folder / "model").glob("*.safetensors")]).values()
            parameters[size.name] = sum(math.prod(shape) for _, shape, _ in shapes)
        for arm in config.arms:
            if arm.values:
                tested = tried(config, out, size.name, arm)
                taken = chosen(config, out, size.name, arm)[arm.tune] if tested else None
                about = {"size": size.name, "arm": arm.name, "key": arm.tune}
                tuning.append(about | {"tried": tested, "taken": taken})
    rows = differences(results)
    found: Record = {
        "rows": rows,
        "own": own,
        "instrument": instrument(config, rows, own),
        "tokens": token_rows(results, parameters),
        "within": within_rows(results),
        "tuning": tuning,
        "parameters": parameters,
        "left_out": results.left_out,
    }
    found["headline"] = headline(config, found)
    write_json(out / "study.json", {"config": config.model_dump(mode="json"), **found})
    data = {**found, "title": config.title, "note": "Study", "study": config, "curves": curves_of(results)}
    data["power"] = power(config)
    data["drawn"] = {
        f"{row['arm']} − {row['against']}": row | {"per_seed": [[value] for value in row["per_seed"]]}
        for row in rows
        if row["metric"] == config.registered and row["size"] == ALL
    }
    page = write_page(out / "report.html", "study.html", data)
    print(found["headline"])
    print(f"written: {page}, {out / 'study.json'}")
