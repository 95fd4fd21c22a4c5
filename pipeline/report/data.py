"""The report's section on data: what the run read, as it came out and not as it was configured."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from earlyfusion.pipeline.report.charts import line_chart

if TYPE_CHECKING:
    from earlyfusion.pipeline.report.run import Run


def data_part(run: Run) -> str:
    """Shares of sources and of vision over steps, passes over every source, samples left out by reason."""
    records = [r for r in run.events("train") if any(key.startswith("data/share/") for key in r)]
    if not records:
        return ""
    shares = {key.removeprefix("data/share/"): run.series(key) for key in run.keys("data/share/")}
    kinds = {"in documents with a picture": "data/vision_share", "image features": "data/media_share"}
    vision = {label: run.series(key) for label, key in kinds.items() if run.series(key)[0]}
    charts = [
        ("Shares of the tokens by source", shares, "share of the tokens of every source over steps"),
        ("Vision among the tokens", vision, "share of vision among the tokens over steps"),
    ]
    figures = "".join(
        f"<div><h3>{title}</h3>{line_chart(series, ylabel='share', size=(4.8, 2.3), description=description)}</div>"
        for title, series, description in charts
    )
    last = _last_of_stages(records)
    note = (
        "Counted in the batches that were trained on, since the beginning of each stage; not the weights of"
        " the recipe."
    )
    body = f'<div class="row">{figures}</div>{_sources_table(last)}{_skipped_table(last)}'
    return f'<section><h2>What it read</h2><p class="note">{note}</p>{body}</section>'


def _last_of_stages(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The last record of every stage, in order."""
    return {str(record.get("stage", "")): record for record in records}


def _sources_table(last: dict[str, dict[str, Any]]) -> str:
    rows = []
    for stage, record in last.items():
        for key in record:
            if key.startswith("data/share/") and isinstance(record[key], int | float):
                name = key.removeprefix("data/share/")
                epochs = record.get(f"data/epoch/{name}")
                passes = f"{epochs:.2f}" if isinstance(epochs, int | float) else "–"
                rows.append(
                    f"<tr><td>{html.escape(stage)}</td><td>{html.escape(name)}</td>"
                    f"<td>{100 * record[key]:.1f} %</td><td>{passes}</td></tr>"
                )
    head = "<tr><th>stage</th><th>source</th><th>share of the tokens</th><th>passes</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _skipped_table(last: dict[str, dict[str, Any]]) -> str:
    rows = [
        f"<tr><td>{html.escape(stage)}</td><td>{html.escape(key.removeprefix('data/skipped/'))}</td>"
        f"<td>{record[key]:,.0f}</td></tr>"
        for stage, record in last.items()
        for key in record
        if key.startswith("data/skipped/") and isinstance(record[key], int | float)
    ]
    if not rows:
        return ""
    head = "<tr><th>stage</th><th>left out because</th><th>samples (skipped.jsonl)</th></tr>"
    return f"<h3>Left out</h3><table>{head}{''.join(rows)}</table>"
