"""The measurements of a run for its report: what each kind of held-out problem gained or lost, with its
uncertainty.

OUT/eval/update-<update>.jsonl holds one JSON object a line, the fields of records.Measured without the
picture. The same problems are asked every time, so that differences are taken problem by problem. A picture
is not stored: it is a function of the problem's key, and is drawn again.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image as PILImage

from earlyfusion.data.errors import DataError
from earlyfusion.data.tasks.problem import THOUGHT_CUE, Task
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tasks.rendering import render_text
from earlyfusion.eval.compare.text import p_text
from earlyfusion.eval.stats import Estimate, clustered_estimate, holm, sign_flip_p
from earlyfusion.pipeline.report.charts import Series, line_chart
from earlyfusion.pipeline.report.run import is_chartable

Record = dict[str, Any]
Pair = tuple[Record, Record]
_NAME = re.compile(r"update-(\d+)\.jsonl")
ALL = "all"
TOGETHER = 8
"""Kinds of prompts drawn in one chart; more are drawn task by task."""


def read_measured(out: Path) -> dict[int, list[Record]]:
    """Update -> the records measured after it, in order of updates. Broken lines and other files are left
    out."""
    found: dict[int, list[Record]] = {}
    for path in (out / "eval").glob("update-*.jsonl"):
        match = _NAME.fullmatch(path.name)
        if match:
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            found[int(match[1])] = [record for line in lines if (record := _record(line)) is not None]
    return {update: found[update] for update in sorted(found) if found[update]}


def _record(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    good = (
        isinstance(record, dict) and isinstance(record.get("key"), str) and is_chartable(record.get("score"))
    )
    return record if good else None


def split_key(key: str) -> tuple[str, str, str, str]:
    """(task, split, level as JSON, seed) of "counting/test/0/12". Raises ValueError for anything else."""
    name, split, rest = key.split("/", 2)
    level, seed = rest.rsplit("/", 1)
    return name, split, level, seed


def label_of(record: Mapping[str, Any]) -> str:
    """The entry that a measurement or a logged group belongs to, as TaskEntry.label writes it."""
    if isinstance(record.get("label"), str) and record["label"]:
        return str(record["label"])
    try:
        level = split_key(str(record.get("key", "")))[2]
    except ValueError:
        level = str(record.get("difficulty", "?"))
    label = f"{record.get('task', '?')}/{level}/{record.get('form', '?')}"
    return label + (
        "/thought" if str(record.get("prompt", "")).rstrip().endswith(THOUGHT_CUE.strip()) else ""
    )


def by_label(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records of each entry, in order of first appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(label_of(record), []).append(record)
    return groups


def pairs_by_label(first: Sequence[Record], last: Sequence[Record]) -> dict[str, list[Pair]]:
    """Entry -> (before, after) of every problem that was measured both times."""
    before = {(label_of(record), record["key"]): record for record in first}
    pairs: dict[str, list[Pair]] = {}
    for record in last:
        label = label_of(record)
        if (label, record["key"]) in before:
            pairs.setdefault(label, []).append((before[label, record["key"]], record))
    return pairs


@dataclass(frozen=True)
class Change:
    """One line of the table. before, after: mean scores; delta: their paired difference; p: of the sign-flip
    test; won, lost: problems solved only after, only before; ended: share of answers that ended by
    themselves; solved_4x: share solved with four times the limit; the rest are (before, after) means, nan
    where not measured."""

    label: str
    before: float
    after: float
    delta: Estimate
    p: float
    won: int
    lost: int
    solved: tuple[float, float]
    p_target: tuple[float, float]
    entropy: tuple[float, float]
    sampled: tuple[float, float]
    ended: tuple[float, float]
    solved_4x: tuple[float, float]

    @property
    def verdict(self) -> str:
        """gain or loss only where the 95 % interval excludes 0."""
        if not self.delta.excludes_zero:
            return "not shown"
        return "gain" if self.delta.value > 0 else "loss"


def change(label: str, pairs: Sequence[Pair]) -> Change:
    """The paired statistics of an entry. Problems with one key are one cluster: they are one scene in several
    forms."""
    differences = [after["score"] - before["score"] for before, after in pairs]
    clusters = [after["key"] for _, after in pairs]
    delta = clustered_estimate(differences, clusters)
    solved = [(bool(before.get("solved")), bool(after.get("solved"))) for before, after in pairs]
    return Change(
        label,
        _mean(before["score"] for before, _ in pairs),
        _mean(after["score"] for _, after in pairs),
        delta,
        sign_flip_p(differences, clusters=clusters),
        sum(after and not before for before, after in solved),
        sum(before and not after for before, after in solved),
        (_mean(before for before, _ in solved), _mean(after for _, after in solved)),
        _means(pairs, "p_target"),
        _means(pairs, "entropy"),
        (_mean(_best(before) for before, _ in pairs), _mean(_best(after) for _, after in pairs)),
        _means(pairs, "ended"),
        _means(pairs, "solved_4x"),
    )


def _best(record: Record) -> float:
    scores = [score for score in record.get("sampled") or () if is_chartable(score)]
    return max(scores) if scores else math.nan


def _mean(values: Iterable[float]) -> float:
    kept = [float(value) for value in values if math.isfinite(value)]
    return sum(kept) / len(kept) if kept else math.nan


def _means(pairs: Sequence[Pair], key: str) -> tuple[float, float]:
    before, after = (
        [pair[side][key] for pair in pairs if isinstance(pair[side].get(key), (bool, int, float))]
        for side in (0, 1)
    )
    return _mean(before), _mean(after)


def changes(first: Sequence[Record], last: Sequence[Record]) -> list[Change]:
    """One line for each entry, then one for all together if there are several."""
    pairs = pairs_by_label(first, last)
    rows = [change(label, members) for label, members in pairs.items()]
    if len(rows) > 1:
        rows.append(change(ALL, [pair for members in pairs.values() for pair in members]))
    return rows


def measured_part(measured: Mapping[int, Sequence[Record]]) -> str:
    """The section of the report: the table, and curves when there are more than two measurements."""
    if not measured:
        return ""
    first, last = min(measured), max(measured)
    if first == last:
        lines = "".join(
            f"<tr><td>{html.escape(label)}</td><td>{len(records):,}</td><td>{_points(_mean(r['score'] for r in records))}"
            "</td></tr>"
            for label, records in by_label(measured[first]).items()
        )
        table = f"<table><tr><th>problems</th><th>n</th><th>score</th></tr>{lines}</table>"
        note = f"Measured once, after update {first:,}: nothing to compare with yet."
        return f'<section><h2>Held-out problems</h2><p class="note">{note}</p>{table}</section>'
    rows = changes(measured[first], measured[last])
    note = (
        f"Greedy answers to the same held-out problems after update {first:,} and after update {last:,};"
        " scores in points of 100. The interval is that of the paired difference (95 %, Student t; forms of"
        " one problem count as one); p is of the sign-flip test, after Holm over the kinds of problems."
        " “Gain” and “loss” stand only where the interval excludes 0. → right, → wrong: problems solved only"
        " after, only before. An answer that the limit cut off counts as none: “ended” is the share that"
        " ended by themselves, “right, 4×” the share solved with four times the limit. It all speaks of"
        " other problems of these kinds, not of other training seeds."
    )
    body = _table(rows) + (_curves(measured) if len(measured) > 2 else "")
    return (
        f'<section><h2>Before and after, on held-out problems</h2><p class="note">{note}</p>{body}</section>'
    )


def _table(rows: Sequence[Change]) -> str:
    with_samples = any(math.isfinite(value) for row in rows for value in row.sampled)
    names = ["problems", "n", "before", "after", "change", "95 %", "p", "", "→ right", "→ wrong", "p(target)"]
    names += ["ended", "right, 4×", "entropy"] + (["best sample"] if with_samples else [])
    head = "".join(f"<th>{name}</th>" for name in names)
    claims = holm([row.p for row in rows if row.label != ALL])
    ps = {row.label: p for row, p in zip((row for row in rows if row.label != ALL), claims)}
    return (
        "<div"
        f' class="wide"><table><tr>{head}</tr>{"".join(_row(r, ps, with_samples) for r in rows)}</table></div>'
    )


def _row(row: Change, ps: Mapping[str, float], with_samples: bool) -> str:
    style = {"gain": "good", "loss": "bad"}.get(row.verdict, "muted-cell")
    delta = row.delta
    if not delta.se >= 0:
        interval = "–"
    elif delta.se == 0:
        interval = "[none changed]" if delta.value == 0 else "[all changed alike]"
    else:
        low, high = (
            max(-1.0, delta.low),
            min(1.0, delta.high),
        )  # scores lie in [0, 1], and so do their differences
        interval = f"[{100 * low:+.1f}, {100 * high:+.1f}]"
    cells = [html.escape(row.label), f"{delta.n:,}", _points(row.before), _points(row.after)]
    cells += [f"{100 * delta.value:+.1f}", interval, p_text(ps.get(row.label, row.p))]
    cells += [f'<span class="{style}">{row.verdict}</span>', str(row.won), str(row.lost)]
    cells += [_arrow(values, 1) for values in (row.p_target, row.ended, row.solved_4x)]
    cells += [_arrow(row.entropy, 2, 1.0)] + ([_arrow(row.sampled, 1)] if with_samples else [])
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _points(value: float) -> str:
    return f"{100 * value:.1f}" if math.isfinite(value) else "–"


def _arrow(values: tuple[float, float], digits: int, scale: float = 100.0) -> str:
    texts = [f"{scale * value:.{digits}f}" if math.isfinite(value) else "–" for value in values]
    return " → ".join(texts)


def charts_by_task(series: Mapping[str, Series], title: str) -> list[tuple[str, dict[str, Series]]]:
    """(heading, curves) of one chart for all, or of one for each task when there are too many curves to tell
    apart."""
    if len(series) <= TOGETHER:
        return [(title, dict(series))]
    charts: dict[str, dict[str, Series]] = {}
    for label, curve in series.items():
        charts.setdefault(label.split("/")[0], {})[label] = curve
    return [(f"{title}: {name}", curves) for name, curves in charts.items()]


def _curves(measured: Mapping[int, Sequence[Record]]) -> str:
    points: dict[str, list[tuple[int, float]]] = {}
    for update, records in measured.items():
        for label, members in by_label(records).items():
            points.setdefault(label, []).append((update, _mean(record["score"] for record in members)))
    series: dict[str, Series] = {label: ([x for x, _ in p], [y for _, y in p]) for label, p in points.items()}
    figures = []
    for heading, curves in charts_by_task(series, "Greedy score over updates"):
        size = (8.6, 3.2) if len(series) <= TOGETHER else (4.8, 2.3)
        drawing = line_chart(
            curves, ylabel="score", points=True, size=size, description="held-out score over updates"
        )
        figures.append(f"<div><h3>{html.escape(heading)}</h3>{drawing}</div>")
    return figures[0] if len(figures) == 1 else f'<div class="row">{"".join(figures)}</div>'


@lru_cache(maxsize=64)
def _task(name: str, options: str) -> Task:
    return make_task(name, **json.loads(options))


def redraw(
    record: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]] | None = None
) -> PILImage.Image | None:
    """The picture of a measured problem, from its key; None for words alone, and where the problem of that
    key is no longer the one that was asked (another version, other data). options: task name -> options of
    the recipe."""
    form = record.get("form")
    try:
        name, split, level, seed = split_key(str(record["key"]))
        task = _task(name, json.dumps((options or {}).get(name, {}), sort_keys=True))
        problem = task.sample(int(seed), split, json.loads(level))  # type: ignore[arg-type]
    except (DataError, OSError, TypeError, ValueError, KeyError):
        return None
    if problem.key != record["key"] or problem.target != record.get("target"):
        return None
    if form == "rendered":
        return render_text(problem.description)
    return problem.picture if form == "picture" else None
