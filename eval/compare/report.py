"""compare.html: one self-contained page with the tables and drawings of a comparison; it loads nothing."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from earlyfusion.eval.compare.charts import forest, histogram, power, seeds_strip, wins_and_losses
from earlyfusion.eval.compare.text import Unit, p_text
from earlyfusion.kernels.files import write_atomic

STYLE = """
:root{--ink:#1d2433;--muted:#6b7487;--line:#e4e8ef;--paper:#fff;--wash:#f5f7fa;--good:#1f8a5f;--bad:#c0392b}
*{box-sizing:border-box}
body{margin:0;background:var(--wash);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1060px;margin:0 auto;padding:32px 20px 80px}
h1{font-size:26px;margin:0 0 2px}h2{font-size:18px;margin:0 0 4px}h3{font-size:14px;margin:18px 0 4px}
p.note{color:var(--muted);font-size:13px;margin:0 0 10px;max-width:82ch}
section{background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:20px 22px;margin-top:18px;overflow-x:auto}
.row{display:flex;flex-wrap:wrap;gap:18px}.row>div{flex:1 1 300px;min-width:0}
svg{max-width:100%;height:auto}svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,sans-serif!important}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:4px 14px 4px 0;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child,td.words{text-align:left}
th{color:var(--muted);font-weight:500}.gain{color:var(--good)}.loss{color:var(--bad)}
code{font-size:12px}
"""

METHOD = (
    "Every delta is paired: both models answered the same questions, checked by the hashes of data and"
    " prompts. The 95 % interval is Student's t on the clustered standard error (clusters: questions about"
    " one picture or text). p: sign-flip test; p Holm: adjusted over all tasks of the table, or over the"
    " categories of one task. Visible from: the smallest true delta this test shows with 80 % power at 5 %"
    " two-sided. A delta is called a gain or a loss only if its interval excludes 0, its p does after Holm,"
    " and, with several seeds, so does the interval for new questions and new seeds."
)


def write_html(path: Path, result: dict[str, Any]) -> Path:
    """Write the page of a `compare_arms` result; complete or not at all."""
    unit = Unit(result)
    parts = [_headline(result, unit)] + [_task(entry, unit) for entry in result["tasks"] if not entry["view"]]
    title = f"{_names(result, 'treated')} against {_names(result, 'base')}"
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width,initial-scale=1"><title>{html.escape(title)} ·'
        f" earlyfusion</title><style>{STYLE}</style></head><body><main><h1>{html.escape(title)}</h1><p"
        f' class="note">{html.escape(METHOD)}</p>{"".join(parts)}{_provenance(result)}</main></body></html>\n'
    )
    return write_atomic(path, page)


def _names(result: dict[str, Any], arm: str) -> str:
    return ", ".join(Path(folder).name or folder for folder in result["arms"][arm])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already."""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in head) + f"</tr>{body}</table>"


def _headline(result: dict[str, Any], unit: Unit) -> str:
    entries = result["tasks"]
    with_control = any("difference_in_differences" in entry for entry in entries)
    head = ["task", "n", "base", "treated", "delta", "95 %", "p", "p Holm", "visible from"]
    head += ["minus the control's", "95 %"] if with_control else []
    rows = []
    for entry in entries:
        delta = entry["delta"]
        row = [
            html.escape(entry["task"]),
            f"{entry['n']:,}",
            unit(entry["base"]["score"]),
            unit(entry["treated"]["score"]),
        ]
        row += [f"{unit(delta['value'], True)} ± {unit(delta['se'])}", unit.range(delta), p_text(delta["p"])]
        row += [p_text(delta["p_holm"]), unit(delta["smallest_delta"])]
        if with_control:
            against = entry["difference_in_differences"]
            row += [unit(against["value"], True), unit.range(against)]
        word = entry["verdict"].split(",")[0]
        rows.append(
            [
                *(p.replace("<.", "&lt;.") for p in row),
                f'<span class="{word}">{html.escape(entry["verdict"])}</span>',
            ]
        )
    lines = [
        {
            "label": e["task"],
            **e["delta"],
            "control": e.get("control_delta"),
            "published": e["published"] if not e["view"] else None,
        }
        for e in entries
    ]
    note = ""
    if any(entry["published"] for entry in entries):
        note = (
            '<p class="note">Blue mark: the change after vision RL in the Kimi K2.5 report (MMLU-Pro +1.7,'
            " GPQA-Diamond +2.1; arXiv 2602.02276, Table 2), published without a control arm and without"
            " error bars.</p>"
        )
    drawing = forest(lines, unit, "delta of every task with its 95 percent interval")
    return (
        "<section><h2>All tasks,"
        f" {html.escape(unit.name)}</h2>{_table([*head, 'verdict'], rows)}{drawing}{note}</section>"
    )


def _task(entry: dict[str, Any], unit: Unit) -> str:
    delta, name = entry["delta"], entry["task"]
    figures = [
        _figure("Bootstrap", histogram(delta["bootstrap"], delta["value"], unit, f"bootstrap of {name}"))
    ]
    if delta["mcnemar"]:
        figures.append(
            _figure("Questions that changed", wins_and_losses(delta["mcnemar"], f"wins and losses, {name}"))
        )
        if delta["discordance"] > 0:
            figures.append(
                _figure(
                    "What n questions show", power(delta["discordance"], entry["n"], unit, f"power, {name}")
                )
            )
    if entry["seeds"]:
        figures.append(_figure("Seeds", seeds_strip(entry["seeds"], unit, f"scores of the seeds, {name}")))
    parts = [f'<p class="note">{html.escape(_says(entry, unit))}</p>', _facts(entry, unit)]
    parts.append(f'<div class="row">{"".join(figures)}</div>')
    if entry["categories"]:
        rows = [
            [
                html.escape(c["category"]),
                f"{c['n']:,}",
                unit(c["base"]),
                unit(c["treated"]),
                f"{unit(c['value'], True)} ± {unit(c['se'])}",
                unit.range(c),
                p_text(c["p_holm"]).replace("<", "&lt;"),
                unit(c["smallest_delta"]),
            ]
            for c in entry["categories"]
        ]
        lines = [{"label": c["category"], **c} for c in entry["categories"]]
        head = ["category", "n", "base", "treated", "delta", "95 %", "p Holm", "visible from"]
        parts += [
            "<h3>By category</h3>",
            _table(head, rows),
            forest(lines, unit, f"delta by category, {name}"),
        ]
    return f"<section><h2>{html.escape(name)}</h2>{''.join(parts)}</section>"


def _figure(title: str, drawing: str) -> str:
    return f"<div><h3>{title}</h3>{drawing}</div>"


def _says(entry: dict[str, Any], unit: Unit) -> str:
    """What this test can and cannot see, in a sentence or two."""
    delta = entry["delta"]
    words = f"{entry['verdict'].capitalize()}: {unit(delta['value'], True)} {unit.range(delta)}. "
    words += (
        f"With {entry['n']:,} questions a true change below {unit(delta['smallest_delta'])} would be missed"
        " more than "
    )
    words += "one time in five. "
    if entry["published"] and delta["smallest_delta"] > entry["published"]:
        words += (
            f"The published change of {unit(entry['published'], True)} is below that: this run alone cannot"
            " confirm it. "
        )
    if entry["seeds"] is None:
        words += "One training seed an arm: whether another seed would show the same is not known. "
    if "control" not in entry:
        words += (
            "No control arm: what the same compute without the treatment would have changed is not known."
        )
    return words


def _facts(entry: dict[str, Any], unit: Unit) -> str:
    delta, rows = entry["delta"], []
    for label, value in (
        ("SE paired", delta["se_paired"]),
        (f"SE clustered ({entry['clusters']:,} clusters)", delta["se_clustered"]),
        ("SE if unpaired", delta["se_unpaired"]),
        ("SE clustered by category", delta["se_clustered_by_category"]),
        ("SE from sampling alone", delta["sampling_se"]),
        ("visible from, by discordance", delta["smallest_delta_mcnemar"]),
    ):
        if value is not None:
            rows.append([label, unit(value)])
    rows.append(["bootstrap 95 %", unit.range(delta["bootstrap"])])
    rows.append(["p of the t test", p_text(delta["p_t"]).replace("<", "&lt;")])
    if delta["mcnemar"]:
        table = delta["mcnemar"]
        rows.append(
            [
                "McNemar exact, chi-square",
                f"{p_text(table['p_exact'])}, {p_text(table['p_chi2'])}".replace("<", "&lt;"),
            ]
        )
    if entry["seeds"]:
        both = entry["seeds"]
        rows.append(["over seeds", f"{unit(both['seeds']['value'], True)} {unit.range(both['seeds'])}"])
        rows.append(["over new questions and seeds", unit.range(both["both"])])
    sides = []
    for arm in ("base", "treated", "control"):
        if arm in entry:
            s = entry[arm]
            missing = "-" if s["unextracted"] is None else f"{100 * s['unextracted']:.1f} %"
            tokens = "-" if s["tokens"] is None else f"{s['tokens']:.1f}"
            sides.append([arm, unit(s["score"]), unit(s["se"]), missing, tokens])
    for name in ("chance", "majority"):
        if isinstance(entry["baselines"].get(name), int | float):
            sides.append([name, unit(entry["baselines"][name]), "", "", ""])
    arms = _table(["", "score", "SE", "unextracted", "tokens an answer"], sides)
    return f'<div class="row"><div>{_table(["statistic", unit.name], rows)}</div><div>{arms}</div></div>'


def _provenance(result: dict[str, Any]) -> str:
    arms = _table(
        ["arm", "folders"],
        [[html.escape(arm), html.escape(", ".join(f))] for arm, f in result["arms"].items()],
    )
    rows = [
        [
            html.escape(e["task"]),
            *(f"<code>{html.escape(e[kind][:16])}</code>" for kind in ("data_hash", "prompt_hash")),
        ]
        for e in result["tasks"]
    ]
    hashes = _table(["task", "data sha256", "prompts sha256"], rows)
    return f"<section><h2>Provenance</h2>{arms}<h3>Equal in all arms</h3>{hashes}</section>"
