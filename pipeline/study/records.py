"""What a run of a study left behind, and the figures that are read from it."""

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from earlyfusion.eval.measured import load_measured
from earlyfusion.kernels.files import Record, read_jsonl
from earlyfusion.pipeline.config.schema import Section
from earlyfusion.pipeline.report.page import read_dict

Cells = dict[str, float]
"""Group of problems -> mean; "" -> the figure itself where there are no groups."""
Curve = list[tuple[float, float]]
"""(step, value), in order; step 0 for a further measurement."""
LATE = 0.25
"""Share of the training records, the last ones, whose mean is how a run ends."""


class Metric(Section):
    """One figure of every run."""

    key: str | list[str]
    """Its name, or several whose mean it is: of an evaluation "heldout/text" or, of a label's figures,
    "rule/1/twin.accuracy"; of training records "loss"; of a further measurement the way to it,
    "tasks.rule/1/twin.accuracy". Of a table the largest number counts."""
    minus: str = ""
    """Key that is taken off: of another picture, say."""
    source: str = "eval"
    """eval: evaluations; train: training records; else the name of a measurement."""
    of: Literal["last", "first", "gain", "mean", "largest", "until"] = "last"
    """last: how the run ends (of training records the mean of the last quarter); gain: last minus first
    evaluation; mean and largest: of the whole run; until: steps until `level` is reached, all of the run's
    where it never is."""
    level: float = 0.0
    """What `until` waits for."""
    better: Literal["lower", "higher"] = "lower"
    """Which way is better."""
    claimed: bool = True
    """Whether differences are claims, under Holm; else they are described."""
    arms: list[str] = []
    """Arms that it is asked of; all if none is named."""

    @property
    def keys(self) -> list[str]:
        """What is read."""
        return [self.key] if isinstance(self.key, str) else self.key


@dataclass
class Run:
    """A run's folder."""

    folder: Path

    @property
    def done(self) -> bool:
        """Whether it came to its end."""
        return (self.folder / "model" / "config.json").is_file()

    @cached_property
    def records(self) -> dict[str, list[Record]]:
        """Event -> records."""
        found: dict[str, list[Record]] = defaultdict(list)
        for line in read_jsonl(self.folder / "metrics.jsonl"):
            found[str(line.get("event"))].append(line)
        # Evaluations of one step are told one by one.
        merged: dict[int, Record] = {}
        for line in found["eval"]:
            merged.setdefault(line["step"], {}).update(line)
        found["eval"] = [*merged.values()]
        return found

    def curve(self, metric: Metric) -> Curve:
        """Every figure of it; of several keys their mean, as long as all are told."""
        every = [self._curve(metric, key) for key in metric.keys]
        curve = [(points[0][0], fmean(value for _, value in points)) for points in zip(*every)]
        if metric.minus:
            off = self._curve(metric, metric.minus)
            return [(x, value - less) for (x, value), (_, less) in zip(curve, off)]
        return curve

    def _curve(self, metric: Metric, key: str) -> Curve:
        if metric.source not in ("eval", "train"):
            result = [*(self.folder / "measured" / metric.source).glob("*.json")]
            found = figure(read_dict(result[0]), key) if result else math.nan
            return [(0.0, found)] if found == found else []
        points = ((float(line["step"]), figure(line, key)) for line in self.records[metric.source])
        return [(step, value) for step, value in points if value == value]

    def value(self, metric: Metric, of: str = "") -> float:
        """The figure; nan where the run has none. of: in place of the metric's own."""
        curve, of = self.curve(metric), of or metric.of
        if not curve:
            return math.nan
        values = [value for _, value in curve]
        if of == "last" and metric.source == "train":
            return fmean(values[-max(1, round(LATE * len(values))) :])
        if of == "until":
            # From the side on which the run begins.
            rises = values[0] < metric.level
            steps = [x for x, _ in curve]
            reached = [x for x, v in curve if (v >= metric.level if rises else v <= metric.level)]
            return min([*reached, steps[-1]])
        return {
            "first": values[0],
            "last": values[-1],
            "gain": values[-1] - values[0],
            "mean": fmean(values),
            "largest": max(values),
        }[of]

    def cells(self, metric: Metric, cluster: str = "", of: str = "") -> Cells:
        """The figure by group of held-out problems, where the run wrote its answers down and the metric is
        their accuracy; else {"": figure}, {} where there is none."""
        labels, of = [key.removesuffix(".accuracy") for key in metric.keys], of or metric.of
        files = sorted((self.folder / "eval").glob("update-*.jsonl"))
        told = metric.source == "eval" and of in ("first", "last", "gain") and not metric.minus
        if cluster and files and told and all(key.endswith(".accuracy") for key in metric.keys):
            first, last = (grouped(file, labels, cluster) for file in (files[0], files[-1]))
            if of == "gain":
                return {group: last[group] - first[group] for group in last}
            return first if of == "first" else last
        value = self.value(metric, of)
        return {"": value} if math.isfinite(value) else {}


def grouped(file: Path, labels: list[str], cluster: str) -> Cells:
    """Group -> share of its problems that are solved; groups of several labels stay apart."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in load_measured(file):
        if one.label in labels:
            group = one.category if cluster == "category" else one.key
            found[f"{one.label} {group}" if len(labels) > 1 else group].append(float(one.solved))
    return {group: fmean(values) for group, values in found.items()}


def figure(record: Record, key: str) -> float:
    """The number at a key, or on the way to it through tables; of a table the largest. nan where there is
    none."""
    found: Any = record
    while key and isinstance(found, dict):
        # Labels hold points, too: the longest name that is there.
        names = [name for name in found if key == name or key.startswith(f"{name}.")]
        if not names:
            return math.nan
        name = max(names, key=len)
        found, key = found[name], key[len(name) + 1 :]
    # A place in a list: a head of a layer.
    if key.isdigit() and isinstance(found, list):
        found, key = found[int(key) : int(key) + 1], ""
    leaves = numbers(found)
    return max(leaves) if leaves and not key else math.nan


def numbers(value: Any) -> list[float]:
    """All numbers of nested tables and lists."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return [number for one in inner for number in numbers(one)]
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []
