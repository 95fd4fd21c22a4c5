"""The report's section on a chat stage: held-out answers, tool calls, and conversations as they went."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from earlyfusion.eval.results import load_results
from earlyfusion.pipeline.report.charts import Series, line_chart

if TYPE_CHECKING:
    from earlyfusion.pipeline.report.run import Run

MEASURES = {
    "well_formed": "keeps the form",
    "called": "calls the tool",
    "ran": "the program runs",
    "result": "the right result",
    "answered": "the right answer",
}
"""Of eval/tool_talks.py, in the order in which each asks more than the one before."""
LONGEST = 1200
"""Characters of one message that are shown."""
ImageSource = Callable[..., str | None]


def chat_part(run: Run, image_source: ImageSource) -> str:
    """Loss on held-out answers, share of valid tool calls, played conversations; "" for a run without
    them."""
    losses = load_results(run.directory, "answer_loss")
    names = list(dict.fromkeys(name for record in losses for name in record.get("sources", {})))
    talks = {name: load_results(run.directory, f"tool_talks_{name}") for name in names}
    talks = {name: records for name, records in talks.items() if records}
    return _loss_section(losses, names) + "".join(
        _talk_section(run, n, r, image_source) for n, r in talks.items()
    )


def _loss_section(losses: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    if not losses:
        return ""
    series = {
        name: _points([{"step": r["step"], **r["sources"].get(name, {})} for r in losses], "loss")
        for name in names
    }
    drawing = line_chart(
        series, ylabel="nats a token", points=True, description="loss on held-out answers over steps"
    )
    first, last = losses[0], losses[-1]
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{_number(first, name)}</td><td>{_number(last, name)}</td>"
        f"<td>{html.escape(str(last['sources'].get(name, {}).get('conversations', 0)))}</td></tr>"
        for name in names
    )
    table = (
        f"<table><tr><th>source</th><th>at step {first['step']:,}</th><th>at step {last['step']:,}</th>"
        f"<th>conversations</th></tr>{rows}</table>"
    )
    note = "Mean over the learned tokens only: what the assistant says. What users and tools say has no loss."
    return f'<section><h2>Held-out answers</h2><p class="note">{note}</p>{drawing}{table}</section>'


def _number(record: Mapping[str, Any], name: str) -> str:
    value = record["sources"].get(name, {}).get("loss")
    return f"{value:.3f}" if isinstance(value, int | float) else "–"


def _points(records: Sequence[Mapping[str, Any]], key: str) -> Series:
    pairs = [(record["step"], record[key]) for record in records if isinstance(record.get(key), int | float)]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _talk_section(
    run: Run, name: str, records: Sequence[Mapping[str, Any]], image_source: ImageSource
) -> str:
    last = records[-1]
    drawing = ""
    if len(records) > 1:
        series = {label: _points(records, key) for key, label in MEASURES.items()}
        drawing = line_chart(
            series, ylabel="share", points=True, description=f"tool calls of {name} over steps"
        )
    head = "".join(f"<th>{label}</th>" for label in MEASURES.values())
    kinds = {**last.get("by_kind", {}), "all": last}
    rows = "".join(
        f"<tr><td>{html.escape(kind)}</td><td>{html.escape(str(row.get('talks', 0)))}</td>"
        + "".join(f"<td>{100 * row.get(key, 0):.0f} %</td>" for key in MEASURES)
        + "</tr>"
        for kind, row in kinds.items()
    )
    table = f"<table><tr><th>question</th><th>n</th>{head}</tr>{rows}</table>"
    shown = "".join(_conversation(run, game, image_source) for game in last.get("shown", []))
    note = (
        f"Held-out questions of the source, answered greedily at step {last['step']:,}; programs ran in the"
        " sandbox. Each column counts only where the one before it held, but for the last: an answer may be"
        " right without a tool."
    )
    return (
        f"<section><h2>Tool calls: {html.escape(name)}</h2><p"
        f' class="note">{note}</p>{drawing}{table}{shown}</section>'
    )


def _conversation(run: Run, game: Mapping[str, Any], image_source: ImageSource) -> str:
    marks = game.get("marks", {})
    verdict = ", ".join(label if marks.get(key) else f"not: {label}" for key, label in MEASURES.items())
    colour = "good" if marks.get("answered") else "bad"
    source = image_source(run, game.get("picture"))
    picture = (
        f'<img src="{html.escape(source)}" alt="" style="height:96px;image-rendering:pixelated">'
        if source
        else ""
    )
    messages = "".join(_message(message) for message in game.get("messages", []))
    return (
        f"<h3>expected: {html.escape(str(game.get('expected', '')))} <span"
        f' class="{colour}">({verdict})</span></h3>{picture}{messages}'
    )


def _message(message: Mapping[str, Any]) -> str:
    parts = [f"<b>{html.escape(str(message.get('role', '')))}</b>"]
    if message.get("thinking"):
        parts.append(f'<i class="muted">{html.escape(str(message["thinking"])[:LONGEST])}</i>')
    text = str(message.get("text", ""))
    if text:
        parts.append(html.escape(text[:LONGEST]))
    parts += [
        html.escape("\n".join(f"{key}: {value}" for key, value in call.items())[:LONGEST])
        for call in message.get("calls", [])
    ]
    return f"<pre>{chr(10).join(parts)}</pre>"
