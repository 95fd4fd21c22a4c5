"""What the linear probes of a study found: means over runs, and changes from each start.

    found = read_probes(config, out)          # {} where nothing was probed
    found["start"]["picture>twin"]            # accuracy by depth, mean over starts
    found["arms"]["vision"]["picture>twin"]   # {"after", "change", "low", "high": [...] by depth}

Intervals: Student's t over the starts, runs of a start averaged first. Described, not claimed: no correction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from earlyfusion.eval.stats import mean_estimate
from earlyfusion.rl.study.transfer.plan import START, StudyConfig, measured_file, probe_file

Depths = dict[str, np.ndarray]
"""Pair "fitted>read" -> accuracy by depth, float64 [L]."""


def read_probes(config: StudyConfig, out: Path) -> dict[str, Any]:
    """Everything that was probed so far; {} if nothing was."""
    starts = {p: found for p in range(config.seeds) if (found := _read(out, p, START, 0))}
    if not starts:
        return {}
    result: dict[str, Any] = {
        "start": {pair: _mean([one[pair] for one in starts.values()]) for pair in _pairs(starts)}
    }
    result["arms"] = {}
    for arm in config.arms:
        runs = {}
        for p in starts:
            own = [one for r in range(config.rl_seeds) if (one := _read(out, p, arm.name, r))]
            if own:
                runs[p] = own
        if runs:
            result["arms"][arm.name] = {pair: _change(starts, runs, pair) for pair in _pairs(starts)}
    return result


def _read(out: Path, seed: int, arm: str, run: int) -> Depths:
    file = probe_file(measured_file(out, seed, arm, run))
    if not file.is_file():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    return {
        f"{fitted}>{read}": np.array(depths) for fitted, row in found.items() for read, depths in row.items()
    }


def _pairs(starts: Mapping[int, Depths]) -> list[str]:
    return list(next(iter(starts.values())))


def _mean(parts: list[np.ndarray]) -> list[float]:
    return [float(x) for x in np.mean(parts, axis=0)]


def _change(starts: Mapping[int, Depths], runs: Mapping[int, list[Depths]], pair: str) -> dict[str, Any]:
    after_PL = np.array([np.mean([one[pair] for one in runs[p]], axis=0) for p in runs])
    change_PL = after_PL - np.array([starts[p][pair] for p in runs])
    spans = [mean_estimate(change_PL[:, depth]) for depth in range(change_PL.shape[1])]
    alone = len(change_PL) < 2  # one start has no spread
    return {
        "after": _mean(list(after_PL)),
        "change": [span.value for span in spans],
        "low": [None if alone else span.low for span in spans],
        "high": [None if alone else span.high for span in spans],
    }
