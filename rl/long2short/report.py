"""OUT/report.html of a DPO run for length: the table before and after, the curves, and answers that
changed."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from earlyfusion.pipeline.report.charts import line_chart
from earlyfusion.pipeline.report.run import STYLE
from earlyfusion.pipeline.statefile import write_text
from earlyfusion.pipeline.track import read_metrics
from earlyfusion.rl.long2short.heldout import DIGITS, Held, difference, read_held, shown

CHARTS = (
    ("Loss", "nats", ("loss",)),
    ("Margin of chosen over rejected", "nats", ("margin",)),
    ("Share of pairs with a margin above 0", "share", ("preferred",)),
    ("Log ratio to the start", "nats an answer", ("chosen", "rejected")),
)
CHANGED = 24
"""Answers that are shown."""


def write_report(out: Path, summary: Mapping[str, Any]) -> Path:
    """One file that loads nothing from elsewhere; reads metrics.jsonl and heldout/. Returns its path."""
    records = read_metrics(out / "metrics.jsonl", "train") if (out / "metrics.jsonl").is_file() else []
    title = html.escape(f"long2short · {out.resolve().name}")
    told = (
        f"DPO from {summary['model']}: {summary['pairs']} pairs of answers to {summary['problems']} problems,"
        f" {summary['steps']} of {summary['of']} updates"
    )
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width,initial-scale=1"><title>{title}</title><style>{STYLE}</style></head><body><main>'
        f"<h1>{title}</h1><p"
        f' class="note">{html.escape(told)}</p>{_table(summary["heldout"])}{_charts(records)}'
        f"{_changed(out)}</main></body></html>\n"
    )
    target = out / "report.html"
    write_text(target, page.encode("utf-8", "replace").decode("utf-8"))
    return target


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "<p>No held-out problems were measured.</p>"
    heads = ("task", "answers", "problems", "accuracy", "difference", "tokens", "difference")
    body = ""
    for row in rows:
        cells = [str(row["label"]), str(row["way"]), str(row["n"])]
        for metric, digits in DIGITS.items():
            cells += [shown(row[metric], digits), difference(row[metric], digits)]
        body += "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
    head = "".join(f"<th>{name}</th>" for name in heads)
    note = "Means before > after; mean paired difference with its 95 % Student t interval over problems."
    return (
        "<section><h2>Held-out problems</h2><p"
        f' class="note">{note}</p><table><tr>{head}</tr>{body}</table></section>'
    )


def _charts(records: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for title, unit, names in CHARTS:
        series = {
            name: ([r["step"] for r in records if name in r], [r[name] for r in records if name in r])
            for name in names
        }
        if any(xs for xs, _ in series.values()):
            parts.append(
                f"<h3>{title}</h3>{line_chart(series, description=title, ylabel=unit, size=(6.4, 2.2))}"
            )
    return f"<section><h2>Training</h2>{''.join(parts)}</section>" if parts else ""


def _changed(out: Path) -> str:
    """Greedy answers that are not what they were, the largest changes of length first."""
    paths = [out / "heldout" / f"{name}.jsonl" for name in ("before", "after")]
    if not all(path.is_file() for path in paths):
        return ""
    first: dict[tuple[str, str], Held] = {
        (o.label, o.key): o for o in read_held(paths[0]) if o.way == "greedy"
    }
    both = [
        (first[o.label, o.key], o)
        for o in read_held(paths[1])
        if o.way == "greedy" and (o.label, o.key) in first
    ]
    moved = sorted(
        (p for p in both if p[0].answer != p[1].answer), key=lambda p: -abs(p[1].tokens - p[0].tokens)
    )
    body = ""
    for a, b in moved[:CHANGED]:
        cells = [
            b.label,
            b.key,
            *(f"{'right' if o.right else 'wrong'}, {o.tokens:g}: {o.answer}" for o in (a, b)),
        ]
        body += "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
    head = "<tr><th>task</th><th>problem</th><th>before</th><th>after</th></tr>"
    note = f"{len(moved)} of {len(both)} greedy answers changed; verdict, tokens and text."
    return f'<section><h2>Changed answers</h2><p class="note">{note}</p><table>{head}{body}</table></section>'
