"""The page of a transfer study: OUT/report.html, one file that loads nothing from elsewhere.

write_report(config, out, results) -> Path        results: what transfer_analysis.analyse gave
"""

from __future__ import annotations

import html
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from earlyfusion.pipeline.report.run import STYLE
from earlyfusion.rl.study.transfer.charts import dots
from earlyfusion.rl.study.transfer.curves import cost_table, curves_part, rollouts_part
from earlyfusion.rl.study.transfer.plan import StudyConfig
from earlyfusion.rl.study.transfer.probe import probe_part

Row = Mapping[str, Any]
PUBLISHED = (
    ("MMLU-Pro", 84.7, 86.4, "12,032 items of up to 10 options"),
    ("GPQA-Diamond", 84.3, 86.4, "198 items: standard error of one run 2.5 points"),
    ("LongBench v2", 56.7, 58.9, "503 items"),
)
"""Kimi K2.5 report, Table 2: before and after visual reinforcement learning."""
FULL = 0.95
"""Accuracy of the starts above which a gain cannot be told."""
SHORT = 0.9
"""Share of problems solved by a rule of place above which the skill is not needed."""
MORE = """
.gain{color:var(--good);font-weight:600}.loss{color:var(--bad);font-weight:600}td.n{white-space:nowrap}
.scroll{overflow-x:auto}small{color:var(--muted)}
"""


def write_report(config: StudyConfig, out: Path, results: Row) -> Path:
    """Write the page; returns its path."""
    parts = [
        _question(config, results),
        _primary(config, results),
        _controls(results),
        _others(config, results),
        probe_part(results),
        _published(config, results),
        curves_part(config, out),
        rollouts_part(config, out),
        cost_table(config, out),
        _methods(config, results),
    ]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Transfer study</title>'
        '<meta name="viewport" content="width=device-width,'
        f' initial-scale=1"><style>{STYLE}{MORE}</style></head><body>'
        f"<main><h1>Vision RL and the same skill in words</h1>{''.join(parts)}</main></body></html>\n"
    )
    target = out / "report.html"
    temporary = out / f".report.html.{os.getpid()}.tmp"
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, target)
    return target


def points(value: float | None, digits: int = 1) -> str:
    """A difference in points, with its sign; a dash where there is none."""
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:+.{digits}f}"


def percent(value: float | None) -> str:
    """A share in percent."""
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.1f}"


def pick(results: Row, arm: str, label: str, metric: str) -> Row | None:
    """A row of the analysis."""
    return next(
        (r for r in results["rows"] if (r["arm"], r["label"], r["metric"]) == (arm, label, metric)), None
    )


def _section(title: str, note: str, body: str) -> str:
    return f'<section><h2>{title}</h2><p class="note">{note}</p>{body}</section>' if body else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f'<td class="n">{cell}</td>' for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _word(text: str) -> str:
    kind = (
        "gain" if text.startswith(("gain", "above")) else "loss" if text.startswith(("loss", "below")) else ""
    )
    return f'<span class="{kind}">{html.escape(text)}</span>'


def _span(row: Row) -> str:
    if not math.isfinite(row["se"] if row["se"] is not None else math.nan):
        return "–"
    return f"[{points(row['low'])}, {points(row['high'])}]"


def _boot(row: Row) -> str:
    low, high = row["boot_low"], row["boot_high"]
    return "–" if low is None or not math.isfinite(low) else f"[{points(low)}, {points(high)}]"


def _p(value: float | None) -> str:
    return (
        "–" if value is None or not math.isfinite(value) else "&lt; .001" if value < 0.001 else f"{value:.3f}"
    )


def _primary_label(results: Row, arm: str) -> str:
    """The registered label of an arm."""
    return next(
        (r["label"] for r in results["rows"] if r["arm"] == arm and r["registered"]), results["primary"]
    )


def headline(results: Row) -> str:
    """What came out, in plain sentences."""
    verdicts: Mapping[str, str] = results["verdicts"]
    treated = [name for name, about in results["arms"].items() if about["kind"] == "treated"]
    gains = [name for name in treated if verdicts[name].startswith("gain, above")]
    unclear = [name for name in treated if verdicts[name].startswith("gain, not") or verdicts[name] == "gain"]
    losses = [name for name in treated if verdicts[name] == "loss"]
    said = []
    if gains:
        said.append(f"A gain in words that its controls do not show: {', '.join(gains)}.")
    if unclear:
        said.append(f"A gain in words that its controls may explain: {', '.join(unclear)}.")
    if losses:
        said.append(f"A loss in words: {', '.join(losses)}.")
    rest = [name for name in treated if name not in {*gains, *unclear, *losses}]
    if rest:
        said.append(f"No difference in words could be shown: {', '.join(rest)}.")
    said += [*room(results), *shortcut_warning(results)]
    return " ".join(said) or "Nothing was measured yet."


def room(results: Row) -> list[str]:
    """A warning where the starts leave nothing to gain on the primary metric."""
    start = results["start"].get(results["primary"])
    if start is None or start["accuracy"]["mean"] <= FULL:
        return []
    solved = percent(start["accuracy"]["mean"])
    return [
        f"The starts solve {solved} % of the primary problems already: there is no room to see a gain, take a"
        " harder skill."
    ]


def shortcut_warning(results: Row) -> list[str]:
    """A warning where a rule that reads no meaning solves nearly all primary problems."""
    found = results["shortcuts"].get(results["primary"])
    if found is None or found["solves"] < SHORT:
        return []
    return [
        f"“{found['rule'].capitalize()}” solves {percent(found['solves'])} % of the primary problems: a gain"
        " can be that rule and not the skill."
    ]


def _question(config: StudyConfig, results: Row) -> str:
    starts = len(results["seeds"])
    note = (
        f"Skill S: {html.escape(config.skill)}; unrelated skill: {html.escape(config.unrelated)}. {starts}"
        f" pretrained starts, up to {config.rl_seeds} runs of every arm from each; equal updates and prompts."
    )
    registered = (
        "<p><b>Registered before the runs.</b> Primary metric: greedy accuracy on held-out problems of S in"
        f" words ({html.escape(results['primary'])}), arm minus start. Family: every arm × (greedy accuracy,"
        f" p(correct), p(correct) at equal entropy, pass@k) on that label, {results['family']} claims, Holm."
        " “Gain” and “loss” are written only where the 95 % interval excludes 0 and Holm's p is at most"
        " 0.05.</p>"
    )
    start = [
        [
            html.escape(label),
            percent(t["accuracy"]["mean"]),
            " ".join(percent(v) for v in t["accuracy"]["each"]),
            percent(t["p_target"]["mean"]),
            percent(t["ece"]["mean"]),
            *_short(results, label),
        ]
        for label, t in results["start"].items()
    ]
    body = f"<p>{html.escape(headline(results))}</p>{registered}<h3>The starts</h3>" + _table(
        [
            "held-out problems",
            "accuracy, %",
            "each start",
            "p(correct), %",
            "ECE, %",
            "best rule of place, %",
            "any answer word, %",
        ],
        start,
    )
    return _section("What was asked, and what came out", note, body)


def _short(results: Row, label: str) -> list[str]:
    found = results["shortcuts"].get(label)
    if found is None:
        return ["–", "–"]
    return [
        f"{percent(found['solves'])}<br><small>{html.escape(found['rule'])}</small>",
        percent(found["at_random"]),
    ]


def _primary(config: StudyConfig, results: Row) -> str:
    rows, surer, drawn = [], [], []
    for name, about in results["arms"].items():
        label = _primary_label(results, name)
        accuracy = pick(results, name, label, "accuracy")
        if accuracy is None:
            continue
        cells = [
            f"<b>{name}</b><br><small>{html.escape(about['about'])}</small>",
            percent(accuracy["before"]),
        ]
        cells += [percent(accuracy["after"]), points(accuracy["value"]), _span(accuracy), _boot(accuracy)]
        rows.append([*cells, _p(accuracy.get("p_holm")), _word(results["verdicts"][name])])
        surer.append([f"<b>{name}</b>", *_more_cells(config, results, name, label)])
        drawn.append(_dot_row(name + (" (after a thought)" if label.endswith("thought") else ""), accuracy))
    if not rows:
        return ""
    head = ["arm", "start", "after", "Δ", "95 %", "bootstrap", "p Holm", "verdict"]
    note = "Greedy accuracy in percent, changes in points. A claim needs both intervals and Holm’s p."
    chart = dots(
        drawn, "Change of greedy accuracy in words, run by run", "change of greedy accuracy in words, points"
    )
    legend = (
        "One dot a run, one colour a start; diamond and bar: mean and 95 % interval over starts, runs and"
        " problems."
    )
    first = _section("The skill in words", note, _table(head, rows) + chart + f'<p class="note">{legend}</p>')
    note = (
        "Changes in points, 95 % intervals below. At equal entropy: against the start at the temperature T"
        " that gives it the arm's entropy; a model that only became surer gains p(correct) but nothing there."
        " ECE: lower is better; it is described, not claimed."
    )
    head = [
        "arm",
        "p(correct)",
        "p(correct) at equal entropy",
        f"pass@{config.measure.samples}",
        "ECE",
        "T",
        "nats",
    ]
    return first + _section("Better, or only surer?", note, _table(head, surer))


def _more_cells(config: StudyConfig, results: Row, name: str, label: str) -> list[str]:
    cells = []
    for metric in ("p_target", "p_matched", f"pass@{config.measure.samples}", "ece"):
        row = pick(results, name, label, metric)
        said = str(row.get("word", "")) if row is not None else ""
        said = _word(said) if said in ("gain", "loss") else ""
        cells.append("–" if row is None else f"{points(row['value'])} {said}<br><small>{_span(row)}</small>")
    heat = results["temperatures"].get(name)
    if heat is None:
        return [*cells, "–", "–"]
    return [
        *cells,
        f"{heat['temperature']:.2f}{'' if heat['reached'] else ' (limit)'}",
        f"{heat['entropy']:.2f}",
    ]


def _dot_row(name: str, row: Row) -> dict[str, Any]:
    scale = lambda x: 100 * x if x is not None else math.nan
    return {
        "name": name,
        "value": scale(row["value"]),
        "low": scale(row["low"]),
        "high": scale(row["high"]),
        "clear": row.get("word") in ("gain", "loss"),
        "per_seed": [[scale(x) for x in runs] for runs in row["per_seed"]],
    }


def _controls(results: Row) -> str:
    rows: dict[str, list[list[str]]] = {"treated": [], "control": []}
    for d in results["differences"]:
        cells = [
            f"<b>{d['arm']}</b>",
            d["control"],
            points(d["arm_gain"]),
            points(d["control_gain"]),
            points(d["value"]),
        ]
        rows[results["arms"][d["arm"]]["kind"]].append([*cells, _span(d), _p(d["p_holm"]), _word(d["word"])])
    note = (
        "Difference in differences of greedy accuracy in words: (arm − its start) − (control − its start),"
        " same starts and problems. Holm over the controls of each arm. What a control shows as well is not"
        " owed to the arm’s pictures."
    )
    head = ["arm", "control", "Δ arm", "Δ control", "difference", "95 %", "p Holm", ""]
    body = _table(head, rows["treated"]) if rows["treated"] else ""
    if rows["control"]:
        body += (
            "<details><summary>the controls among"
            f" themselves</summary>{_table(head, rows['control'])}</details>"
        )
    return _section("Against the controls", note, body)


def _others(config: StudyConfig, results: Row) -> str:
    labels = [label for label in results["start"] if label != results["primary"]]
    rows = []
    for name in results["arms"]:
        cells = [f"<b>{name}</b>"]
        for label in labels:
            row = pick(results, name, label, "accuracy")
            cells.append(
                "–"
                if row is None
                else f"{percent(row['after'])} ({points(row['value'])})<br><small>{_span(row)}</small>"
            )
        rows.append(cells)
    note = (
        "Greedy accuracy after training, in brackets the change from the start. Described, not claimed: no"
        " correction."
    )
    return _section(
        "Pictures, rendered words, the unrelated skill",
        note,
        _table(["arm", *map(html.escape, labels)], rows) if rows else "",
    )


def _published(config: StudyConfig, results: Row) -> str:
    rows = [
        [name, f"{before:.1f}", f"{after:.1f}", f"{after - before:+.1f}", "not published", note]
        for name, before, after, note in PUBLISHED
    ]
    ours = pick(results, "vision", results["primary"], "accuracy")
    if ours is not None:
        told = (
            f"{results['verdicts']['vision']}; {len(results['seeds'])} starts × {config.rl_seeds} runs,"
            f" {_span(ours)}"
        )
        rows.append(
            [
                "<b>here</b>: S in words",
                percent(ours["before"]),
                percent(ours["after"]),
                points(ours["value"]),
                told,
                "procedural problems",
            ]
        )
    note = (
        "Kimi K2.5 report, Table 2: text benchmarks before and after visual reinforcement learning, one"
        " model, no control arm and no interval. Ours is a small model from scratch on one procedural skill;"
        " it stands at chance on those benchmarks, so the numbers stand side by side but do not test each"
        " other."
    )
    return _section(
        "Beside Kimi K2.5", note, _table(["", "before", "after", "Δ", "control, interval", ""], rows)
    )


def _methods(config: StudyConfig, results: Row) -> str:
    arms = "".join(
        f"<li><b>{arm.name}</b> ({arm.kind}): {html.escape(arm.about)}; prompts"
        f" {html.escape(', '.join(config.label(t) for t in arm.tasks))}</li>"
        for arm in config.arms
    )
    body = (
        f"<ul>{arms}</ul><p>Starts and problems are crossed: Var(Δ) = (MS starts + MS problems − MS rest) /"
        " (P·I), Student’s t with Satterthwaite’s degrees of freedom; the scatter of the runs is in that of"
        f" the starts. Hierarchical bootstrap, {results['draws']:,} draws: starts, runs inside starts, and"
        " problems with replacement, pairs kept together. A claim needs both intervals and Holm’s p."
        " Everything in numbers: study.json.</p><p>Limits: one skill, one family of small models, held-out"
        " combinations of the same generator; a null result here says that no difference of this size could"
        " be seen, not that there is none.</p>"
    )
    return _section("Arms and methods", "", body)
