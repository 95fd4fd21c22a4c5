"""What the linear probes of a study found: means over runs, changes from each start, and their part of the
page.

    found = read_probes(config, out)          # {} where nothing was probed
    found["start"]["picture>twin"]            # accuracy by depth, mean over starts
    found["arms"]["vision"]["picture>twin"]   # {"after": [...], "change": [...], "low": [...], "high": [...]}
                                              by depth

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


def probe_part(results: Mapping[str, Any]) -> str:
    """The section of the page; empty where nothing was probed."""
    found = results.get("probe") or {}
    if not found:
        return ""
    pairs = list(found["start"])
    depths = len(found["start"][pairs[0]])
    names = [f"layer {depth + 1}" for depth in range(depths - 1)] + ["output"]
    rows = [
        f"<tr><td>{_say(pair)}</td>"
        + "".join(f"<td>{100 * x:.1f}</td>" for x in found["start"][pair])
        + "</tr>"
        for pair in pairs
    ]
    head = "".join(f"<th>{name}</th>" for name in ("starts, accuracy in %", *names))
    arms = "".join(_arms(found, pair, names) for pair in pairs)
    note = (
        "A ridge regression from the state at the last token of the prompt to the answer, fitted on training"
        " problems and read off held-out ones. Fitted on one form and read off the other, it asks whether"
        " both keep the answer in the same directions. Changes from the start in points, 95 % intervals over"
        " the starts; described, not claimed."
    )
    return (
        f'<section><h2>What the middle of the model holds</h2><p class="note">{note}</p><div'
        f' class="scroll"><table><tr>{head}'
        f"</tr>{''.join(rows)}</table></div>{arms}</section>"
    )


def _say(pair: str) -> str:
    fitted, read = pair.split(">")
    return f"fitted on {fitted}, read off {read}"


def _arms(found: Mapping[str, Any], pair: str, names: list[str]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("arm", *names))
    rows = []
    for arm, by_pair in found["arms"].items():
        one, cells = by_pair[pair], []
        for depth in range(len(names)):
            low, high = one["low"][depth], one["high"][depth]
            span = "" if low is None else f"<br><small>[{100 * low:+.1f}, {100 * high:+.1f}]</small>"
            cells.append(f'<td class="n">{100 * one["change"][depth]:+.1f}{span}</td>')
        rows.append(f"<tr><td><b>{arm}</b></td>{''.join(cells)}</tr>")
    if not rows:
        return ""
    table = f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
    return f"<details><summary>{_say(pair)}: changes of the arms</summary>{table}</details>"
