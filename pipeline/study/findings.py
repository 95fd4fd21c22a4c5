"""What the runs of a ladder say: differences seed by seed, tokens for the same loss, and the page.

    difference    loss of an arm - loss of the base, of the same seed (same data, same order), size by size
                  and as the mean over sizes; Student's t over seeds
    claims        mean over sizes of every asked arm and metric, Holm over all of them: "lower" and "higher"
                  only where the interval excludes 0 and the adjusted p is at most 0.05
    tokens        how many the base needs for the loss of an arm, as a multiple of the arm's: on the straight
                  line through the base's losses over log tokens, between the lengths at which it was run.
                  Geometric mean over seeds with Student's t; a loss outside those lengths is counted, not
                  extrapolated
    trend         slope of log multiple over log parameters (scipy's linear regression), with its interval
    instrument    an arm that must not differ from the base, and one that must be worse

With n seeds a difference has n - 1 degrees of freedom: three seeds give intervals of 4.3 standard errors.
"""

import math
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy import special, stats

from earlyfusion.eval.stats import ALPHA, holm, mean_estimate
from earlyfusion.kernels.files import Record, read_jsonl, write_json
from earlyfusion.model.hub.folder import tensor_headers
from earlyfusion.pipeline.report.page import write_page
from earlyfusion.pipeline.study.ladder import (
    LadderArm,
    LadderConfig,
    Size,
    chosen,
    measured,
    run_of,
    tried,
)

Losses = dict[int, float]
"""Seed -> loss."""


def smallest(spread: float, seeds: int) -> float:
    """The difference that is shown with 80 % power by that many seeds, Student's t at 5 % two-sided."""
    df = seeds - 1
    return float(special.stdtrit(df, 1 - ALPHA / 2) + special.stdtrit(df, 0.8)) * spread / math.sqrt(seeds)


def power(config: LadderConfig) -> str:
    """What the study can see, said before its first run."""
    if config.seeds < 2:
        return "one seed: nothing can be claimed"
    spreads = smallest(1.0, config.seeds)
    return (
        f"{config.seeds} seeds show, with 80 % power, a difference of {spreads:.1f} standard deviations of a"
        " difference between seeds"
    )


def losses(config: LadderConfig, out: Path, size: Size, arm: LadderArm, length: float, key: str) -> Losses:
    found: Losses = {}
    for seed in range(config.seeds):
        run = measured(run_of(out, size.name, arm.name, length, seed))
        if run is not None and math.isfinite(run.get(key, math.nan)):
            found[seed] = float(run[key])
    return found


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


def differences(config: LadderConfig, out: Path) -> list[Record]:
    """Every arm beside the base, size by size, and over all sizes (size "all")."""
    rows: list[Record] = []
    for arm in config.arms[1:]:
        for metric, key in config.metrics.items():
            by_seed: dict[int, list[float]] = {}
            for size in config.sizes:
                base = losses(config, out, size, config.base, config.base.tokens, key)
                own = losses(config, out, size, arm, arm.tokens, key)
                change = {seed: own[seed] - base[seed] for seed in own if seed in base}
                for seed, value in change.items():
                    by_seed.setdefault(seed, []).append(value)
                if change:
                    values = [*change.values()]
                    means = {"base": fmean(base[s] for s in change), "after": fmean(own[s] for s in change)}
                    about = {"arm": arm.name, "metric": metric, "size": size.name, "expect": arm.expect}
                    rows.append(about | means | vars(mean_estimate(values)) | {"per_seed": values})
            # Seeds that are there in every size.
            whole = [fmean(found) for found in by_seed.values() if len(found) == len(config.sizes)]
            if whole:
                about = {"arm": arm.name, "metric": metric, "size": "all", "expect": arm.expect}
                rows.append(about | vars(mean_estimate(whole)) | {"per_seed": whole})
    claims = [row for row in rows if row["size"] == "all" and not row["expect"]]
    for row, p in zip(claims, holm([row["p"] for row in claims])):
        row["p_holm"], row["word"] = p, word(row, p)
    return rows


def word(row: Record, p: float) -> str:
    """What a claim may say."""
    if math.isnan(row["se"]):
        return "one seed: nothing can be said"
    if not p <= ALPHA or row["low"] <= 0 <= row["high"]:
        return "no difference shown"
    return "lower" if row["high"] < 0 else "higher"


def logits(folder: Path) -> tuple[list[float], list[float]]:
    """(tokens, the largest attention logit of any head) of the records of a run."""
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if line.get("max_logit")]
    largest = [max(value for heads in line["max_logit"].values() for value in heads) for line in lines]
    return [line["tokens"] for line in lines], largest


def token_rows(config: LadderConfig, out: Path, parameters: dict[str, int]) -> list[Record]:
    """How many tokens the base needs for each arm's loss, by size and with its trend."""
    rows: list[Record] = []
    for arm in config.arms[1:]:
        for metric, key in config.metrics.items() if config.base_tokens and not arm.expect else ():
            logs: list[tuple[float, float]] = []
            for size in config.sizes:
                curves = {
                    x: losses(config, out, size, config.base, x, key) for x in config.lengths(config.base)
                }
                found = []
                for seed, target in losses(config, out, size, arm, arm.tokens, key).items():
                    base = {x: values[seed] for x, values in curves.items() if seed in values}
                    found.append(multiple(base, target) / arm.tokens if len(base) > 1 else math.nan)
                inside = [math.log(value) for value in found if 0 < value < math.inf]
                logs += [(math.log(parameters.get(size.name, 1)), value) for value in inside]
                row: Record = {"arm": arm.name, "metric": metric, "size": size.name, "seeds": len(found)}
                row["more"], row["fewer"] = found.count(math.inf), found.count(0.0)
                if inside:
                    mean = mean_estimate(inside)
                    row |= {name: math.exp(getattr(mean, name)) for name in ("value", "low", "high")}
                rows.append(row)
            # Parameters are told once a run of the base is there.
            if len({x for x, _ in logs}) > 1 and len(logs) > 2:
                fit = stats.linregress(*np.array(logs).T)
                half = float(special.stdtrit(len(logs) - 2, 1 - ALPHA / 2)) * fit.stderr
                slope = {"value": fit.slope, "low": fit.slope - half, "high": fit.slope + half}
                rows.append({"arm": arm.name, "metric": metric, "size": "trend", "seeds": len(logs), **slope})
    return rows


def instrument(config: LadderConfig, rows: list[Record]) -> list[Record]:
    """Whether the arms that test the study came out as they must, on the registered metric."""
    found = []
    registered = next(iter(config.metrics))
    for row in rows:
        if row["expect"] and row["size"] == "all" and row["metric"] == registered:
            good = row["low"] > 0 if row["expect"] == "worse" else row["low"] <= 0 <= row["high"]
            found.append(row | {"good": bool(good)})
    return found


def headline(config: LadderConfig, results: Record) -> str:
    """What came out, in plain sentences."""
    tests = results["instrument"]
    told = []
    for arm in config.arms:
        if arm.expect and arm.name not in {row["arm"] for row in tests if row["good"]}:
            wrong = "was not told from" if arm.expect == "worse" else "differs from"
            told.append(f"The study failed its own test: {arm.name} {wrong} {config.base.name}.")
    metric = next(iter(config.metrics))
    for row in results["rows"]:
        if row["size"] != "all" or row["expect"] or row["metric"] != metric:
            continue
        span = f"{row['value']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"
        said = {"lower": "a lower loss than", "higher": "a higher loss than"}.get(row["word"])
        said = f"{said} {config.base.name}" if said else f"{row['word']} to {config.base.name}"
        told.append(f"{row['arm']}: {said} ({metric} {span}).")
    return " ".join(told) or "Nothing was measured yet."


def write_findings(config: LadderConfig, out: Path) -> None:
    """study.json, the page and one sentence; nothing where no run is done."""
    rows = differences(config, out)
    if not rows:
        return
    tuning: list[Record] = []
    parameters: dict[str, int] = {}
    curves: dict[tuple[str, str], dict[str, Any]] = {}
    for size in config.sizes:
        for arm in config.arms:
            places = product(config.lengths(arm), range(config.seeds))
            folders = [run_of(out, size.name, arm.name, length, seed) for length, seed in places]
            done = [run for folder in folders if (run := measured(folder)) is not None]
            for folder in folders if arm is config.base else ():
                if weights := [*(folder / "model").glob("*.safetensors")]:
                    shapes = tensor_headers(weights).values()
                    parameters[size.name] = sum(math.prod(shape) for _, shape, _ in shapes)
            if "max_logit" in config.metrics.values() and done:
                curve = logits(folders[0])
                curves.setdefault(("largest logit over tokens", size.name), {})[arm.name] = curve
            for metric, key in config.metrics.items():
                points = sorted((run["tokens"], run[key]) for run in done if key in run)
                if points:
                    curves.setdefault((metric, size.name), {})[arm.name] = tuple(zip(*points))
            if arm.values:
                tested = tried(config, out, size.name, arm)
                taken = chosen(config, out, size.name, arm)[arm.tune] if tested else None
                about = {"size": size.name, "arm": arm.name, "key": arm.tune}
                tuning.append(about | {"tried": tested, "taken": taken})
    results: Record = {
        "rows": rows,
        "instrument": instrument(config, rows),
        "tokens": token_rows(config, out, parameters),
        "tuning": tuning,
        "parameters": parameters,
    }
    results["headline"] = headline(config, results)
    write_json(out / "study.json", {"config": config.model_dump(mode="json"), **results})
    named = {f"{metric}, size {size}": drawn for (metric, size), drawn in curves.items()}
    data = {**results, "title": config.title, "note": "Study", "study": config, "curves": named}
    data["power"] = power(config)
    page = write_page(out / "report.html", "ladder.html", data)
    print(results["headline"])
    print(f"written: {page}, {out / 'study.json'}")
