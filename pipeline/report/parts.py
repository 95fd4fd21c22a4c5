"""The sections of a run's report: each takes the run and returns HTML, or "" when the run holds nothing for
it."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from earlyfusion.eval.results import load_results
from earlyfusion.pipeline.report.charts import Series, heat_map, line_chart

if TYPE_CHECKING:
    from earlyfusion.pipeline.report.run import Run


def _section(title: str, note: str, body: str) -> str:
    return f'<section><h2>{title}</h2><p class="note">{html.escape(note)}</p>{body}</section>' if body else ""


def _figure(title: str, drawing: str) -> str:
    return f"<div><h3>{html.escape(title)}</h3>{drawing}</div>"


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e100


def _points(records: Sequence[Mapping[str, Any]], key: str) -> Series:
    pairs = [(r["step"], r[key]) for r in records if _finite(r.get(key))]
    return [x for x, _ in pairs], [y for _, y in pairs]


def evaluation_part(run: Run) -> str:
    """easy-VQA accuracy over steps beside its image-blind control and the majority answer, and the last
    table."""
    if not run.easy_vqa:
        return ""
    last = run.easy_vqa[-1]
    names = {
        "accuracy": "with the picture",
        "blind_accuracy": "blind (grey picture)",
        "removed_accuracy": "picture left out",
    }
    series = {label: _points(run.easy_vqa, key) for key, label in names.items()}
    series = {label: points for label, points in series.items() if points[0]}
    majority = last.get("majority_accuracy")
    levels = {"majority answer": majority} if isinstance(majority, float) else {}
    drawing = line_chart(
        series, ylabel="accuracy", levels=levels, points=True, description="easy-VQA accuracy over steps"
    )
    kinds = last.get("by_kind") or {}
    columns = [key for key in names if any(key in row for row in kinds.values())]
    columns += ["majority_accuracy"] if any("majority_accuracy" in row for row in kinds.values()) else []
    head = "".join(f"<th>{names.get(c, 'majority')}</th>" for c in columns)
    whole = {key: last.get(key) for key in [*columns, "questions"]}
    rows = "".join(_kind_row(kind, row, columns) for kind, row in [*kinds.items(), ("all", whole)])
    table = f"<table><tr><th>question</th><th>n</th>{head}</tr>{rows}</table>"
    note = (
        f"Official test split, {last.get('questions', 0):,} of {last.get('questions_total', 0):,} questions"
        f" at step {last['step']:,}. An answer counts only if its tokens are the argmax over the whole"
        " vocabulary. Blind: the same questions with a mean-grey picture of the same size; what seeing adds"
        " is the distance between the two curves. Majority: the most frequent training answer to the same"
        " question text."
    )
    return _section(
        "Does it see? easy-VQA", note, f'<div class="row"><div>{drawing}</div><div>{table}</div></div>'
    )


def _kind_row(kind: str, row: Mapping[str, Any], columns: Sequence[str]) -> str:
    cells = "".join(
        f"<td>{100 * row[c]:.1f} %</td>" if isinstance(row.get(c), float) else "<td>–</td>" for c in columns
    )
    return (
        f"<tr><td>{html.escape(kind)}</td><td>{html.escape(str(row.get('questions', '')))}</td>{cells}</tr>"
    )


def heldout_part(run: Run) -> str:
    """Held-out loss of every source over steps, and the last table with its image-blind row."""
    records = load_results(run.directory, "heldout")
    if not records:
        return ""
    names = list(dict.fromkeys(name for record in records for name in record.get("sources", {})))
    series = {}
    for name in names:
        told = [{"step": record["step"], **record["sources"].get(name, {})} for record in records]
        series[name] = _points(told, "loss")
        if (blind := _points(told, "blind_loss"))[0]:
            series[f"{name}, grey picture"] = blind
    drawing = line_chart(series, ylabel="nats a token", points=True, description="held-out loss over steps")
    columns = {
        "samples": "samples",
        "tokens": "learned tokens",
        "loss": "loss",
        "seen_loss": "beside a picture",
        "blind_loss": "the same, grey picture",
        "text_loss": "text alone",
        "bits_per_byte": "bits per byte",
    }
    last = records[-1]
    rows = {**last["sources"], "all": last.get("all", {})}
    body = "".join(
        f"<tr><td>{html.escape(name)}</td>"
        + "".join(f"<td>{_plain(row.get(key))}</td>" for key in columns)
        + "</tr>"
        for name, row in rows.items()
    )
    head = "".join(f"<th>{label}</th>" for label in columns.values())
    left = {name: row["left_out"] for name, row in last["sources"].items() if row.get("left_out")}
    note = (
        f"Samples that every source holds out of training, at step {last['step']:,}: nats a learned token."
        " Grey picture: the same tokens with every pixel grey; what seeing adds is the distance between the"
        " two. Bits per byte: where a sample is learned text throughout."
    )
    note += f" Left out as unreadable: {left}." if left else ""
    table = f"<table><tr><th>source</th>{head}</tr>{body}</table>"
    return _section("Held-out loss by source", note, f"{drawing}{table}")


def _plain(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else "–"


def samples_part(run: Run, source: Callable[[Run, Any], str | None]) -> str:
    """The latest sample pictures with prompt, answer and reference; earlier answers of the same picture
    beneath."""
    if not run.samples:
        return ""
    latest = run.samples[-1]
    cards = []
    for index, sample in enumerate(latest["samples"]):
        image = source(run, sample.get("image"))
        picture = f'<img src="{html.escape(image)}" alt="">' if image else ""
        name = f'<div class="q">{html.escape(str(sample["source"]))}</div>' if sample.get("source") else ""
        answer, reference = str(sample.get("answer", "")).strip(), str(sample.get("reference", "")).strip()
        verdict = "good" if answer == reference else "bad"
        earlier = _earlier_answers(run.samples[:-1], index, sample)
        cards.append(
            f'<div class="picture">{picture}{name}<div'
            f' class="q">{html.escape(str(sample.get("prompt", "")))}</div><div'
            f' class="{verdict if reference else ""}">{html.escape(answer) or "(nothing)"}</div>'
            + (
                f'<div class="q">expected: {html.escape(reference)}</div>'
                if reference and verdict == "bad"
                else ""
            )
            + earlier
            + "</div>"
        )
    note = (
        f"Held-out samples of the sources and greedy answers at step {latest['step']:,}; green where answer"
        " and reference agree."
    )
    return _section("What it says", note, f'<div class="pictures">{"".join(cards)}</div>')


def _earlier_answers(records: Sequence[Mapping[str, Any]], index: int, sample: Mapping[str, Any]) -> str:
    lines = []
    for record in records[-4:]:
        if index < len(record["samples"]) and record["samples"][index].get("prompt") == sample.get("prompt"):
            lines.append(f"step {record['step']:,}: {record['samples'][index].get('answer', '')}")
    return "".join(f'<div class="q">{html.escape(line)}</div>' for line in lines)


def loss_part(run: Run) -> str:
    """Training loss in all, by modality and by source."""
    figures = []
    marks = [r["step"] for r in run.events("guard")]
    by_source = {key.removeprefix("loss/source/"): run.series(key) for key in run.keys("loss/source/")}
    modalities = [key for key in run.keys("loss/") if not key.startswith("loss/source/")]
    by_modality = {key.removeprefix("loss/"): run.series(key) for key in modalities}
    if run.series("loss")[0]:
        by_modality = {"all": run.series("loss"), **by_modality}
    for title, series in (("By modality", by_modality), ("By source", by_source)):
        if series:
            drawing = line_chart(
                series,
                ylabel="nats a token",
                marks=marks,
                smoothing=True,
                description=f"training loss {title.lower()}",
            )
            figures.append(_figure(title, drawing))
    note = "Cross-entropy of predicted tokens; pale: as logged, bold: moving average." + (
        " Red lines: guard events." if marks else ""
    )
    return _section("Loss", note, f'<div class="row">{"".join(figures)}</div>' if figures else "")


def text_part(run: Run) -> str:
    """Bits per byte on held-out text over steps, with general-purpose compressors as reference lines."""
    if not run.bpb:
        return ""
    last = run.bpb[-1]
    names = {
        "gzip_bits_per_byte": "gzip -9",
        "xz_bits_per_byte": "xz",
        "gzip_per_document_bits_per_byte": "gzip, each alone",
    }
    levels = {label: last[key] for key, label in names.items() if isinstance(last.get(key), float)}
    drawing = line_chart(
        {"model": _points(run.bpb, "bits_per_byte")},
        ylabel="bits per byte",
        levels=levels,
        points=True,
        description="bits per byte over steps",
    )
    note = (
        f"{last.get('documents', 0)} documents held out of training ({last.get('bytes', 0):,} bytes); every"
        " byte and the end of every document is paid for, and no context crosses a document. gzip and xz see"
        " all documents in one stream."
    )
    return _section("Held-out text", note, drawing)


def inside_part(run: Run) -> str:
    """Attention Residual weights, expert load, largest attention logits."""
    figures = _attnres_figures(run) + _expert_figures(run) + _logit_figures(run)
    note = (
        "What the sub-layers read from (Attention Residuals), who works (experts), and how sharp attention"
        " gets."
    )
    return _section("Inside the model", note, "".join(figures))


def _attnres_figures(run: Run) -> list[str]:
    if not run.attnres:
        return []
    last = run.attnres[-1]
    panels = {f"{name} tokens": last[name] for name in ("image", "text") if last.get(name)}
    if not panels:
        return []
    drawing = heat_map(
        panels,
        rows=[str(r) for r in last["sublayers"]],
        columns=[str(c) for c in last["sources"]],
        description="Attention Residual weights: sub-layer by source",
        ylabel="sub-layer",
        xlabel="source",
        high=1.0,
    )
    return [_figure("Attention Residuals: mean weight of each source (rows sum to 1)", drawing)]


def _expert_figures(run: Run) -> list[str]:
    records = [r for r in run.events("train") if isinstance(r.get("expert_load"), dict) and r["expert_load"]]
    if not records:
        return []
    latest = records[-1]["expert_load"]
    layers, width = list(latest), max(len(v) for v in latest.values())
    matrix = [[v * len(latest[l]) for v in latest[l]] + [None] * (width - len(latest[l])) for l in layers]
    drawing = heat_map(
        {f"step {records[-1]['step']:,}": matrix},
        rows=layers,
        columns=[str(e) for e in range(width)],
        description="expert load per layer",
        ylabel="layer",
        xlabel="expert",
        colours="RdBu_r",
        low=0.0,
        high=2.0,
        annotate=width <= 32,
        cell=(0.34 if width <= 32 else 0.08, 0.3),
    )
    worst = {f"layer {l}": _series(records, "expert_load", l, lambda v: max(v) * len(v)) for l in layers}
    curve = line_chart(
        worst,
        ylabel="busiest / fair share",
        description="load of the busiest expert over steps",
        levels={"even": 1.0},
    )
    return [
        '<div class="row">'
        + _figure("Expert load, relative to a fair share (1 = even)", drawing)
        + _figure("Busiest expert of each layer", curve)
        + "</div>"
    ]


def _logit_figures(run: Run) -> list[str]:
    records = [r for r in run.events("train") if isinstance(r.get("max_logit"), dict) and r["max_logit"]]
    if not records:
        return []
    series: dict[str, Series] = {}
    for layer, heads in records[-1]["max_logit"].items():
        for head in range(len(heads)) if len(heads) <= 4 else ():
            series[f"layer {layer}, head {head}"] = _series(records, "max_logit", layer, itemgetter(head))
        if len(heads) > 4:
            series[f"layer {layer}, largest"] = _series(records, "max_logit", layer, max)
    drawing = line_chart(
        series, ylabel="max logit", description="largest attention logit per MLA layer and head over steps"
    )
    return [_figure("Largest attention logit (QK-Clip acts above its threshold)", drawing)]


def _series(
    records: Sequence[Mapping[str, Any]], key: str, layer: str, reduce: Callable[[Any], float]
) -> Series:
    xs, ys = [], []
    for record in records:
        values = record[key].get(layer)
        if values and all(v is not None and math.isfinite(v) for v in values):
            xs.append(record["step"])
            ys.append(reduce(values))
    return xs, ys


def optimisation_part(run: Run) -> str:
    """Learning rate, gradient norm, speed."""
    marks = [r["step"] for r in run.events("guard")]
    figures = []
    for title, keys, ylabel, smoothing, log in (
        ("Learning rate", ["lr"], "lr", False, False),
        ("Gradient norm before clipping", ["grad_norm"], "norm", True, True),
        ("Tokens a second", ["tokens_per_s"], "tokens/s", True, False),
        ("Image patches a second", ["patches_per_s"], "patches/s", True, False),
    ):
        series = {key: run.series(key) for key in keys if run.series(key)[0]}
        if series:
            drawing = line_chart(
                series,
                ylabel=ylabel,
                smoothing=smoothing,
                log=log,
                marks=marks,
                size=(4.8, 2.3),
                description=f"{title} over steps",
            )
            figures.append(_figure(title, drawing))
    return _section(
        "Optimisation and speed", "", f'<div class="row">{"".join(figures)}</div>' if figures else ""
    )
