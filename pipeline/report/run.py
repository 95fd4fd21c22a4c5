"""The report of a run: one self-contained `report.html`, readable without a network and after the run folder
is gone.

    write_report(run_dir) -> Path        reads what is there, leaves out what is not, never needs the model

What it reads (every part optional; other keys and files are ignored):

`metrics.jsonl`  one JSON object a line, `{"step": int, "event": str, ...}`; broken lines are skipped and
                 counted.
  event "train"  numbers: `loss` (nats a token), `loss/<modality>` (loss/text, loss/image),
                 `loss/source/<source>`, `lr`, `grad_norm`, `tokens` (seen so far), `tokens_per_s`,
                 `patches_per_s`, `seconds` (since the start); `data/share/<source>`, `data/vision_share`,
                 `data/media_share`, `data/epoch/<source>`, `data/skipped/<reason>` (of the stage so far); now
                 and then: `expert_load` {"<layer>": [share of routed tokens per expert, sums to 1]},
                 `max_logit` {"<layer>": [largest attention logit per MLA head]}
  event "guard"  `kind`, `action`, `message`
  other events   listed in the run's diary if they carry `message`
`eval/*.json`    files of `eval/results.py`:
  name "easy_vqa"  the dict of `EasyVqaResult.to_dict()`     name "bpb"  the dict of `BpbResult.to_dict()`
  name "heldout"   {"sources": {name: `eval.heldout.summary`}, "all": numbers of all together}
  name "answer_loss", "tool_talks_<source>"  of a chat stage (pipeline/sft_eval.py)
  name "attnres"   the dict of `eval.attnres_probe.attnres_weights`
`samples/*.json` files of `eval/samples.py`: `{"step": int, "samples": [{"source", "image", "prompt",
"answer", "reference"}]}`,
                 `image` = data URI or a path relative to the run folder
`recipe.toml` or `recipe.json`, `versions.json` (name -> version), `facts.json` (name -> value; shown in the
head)
"""

import base64
import html
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from earlyfusion.eval.results import load_results, write_whole
from earlyfusion.pipeline.report.charts import Series
from earlyfusion.pipeline.report.chat import chat_part
from earlyfusion.pipeline.report.data import data_part
from earlyfusion.pipeline.report.parts import (
    evaluation_part,
    heldout_part,
    inside_part,
    loss_part,
    optimisation_part,
    samples_part,
    text_part,
)

STYLE = """
:root{--ink:#1d2433;--muted:#6b7487;--line:#e4e8ef;--paper:#fff;--wash:#f5f7fa;--good:#1f8a5f;--bad:#c0392b}
*{box-sizing:border-box}
body{margin:0;background:var(--wash);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1060px;margin:0 auto;padding:32px 20px 80px}
h1{font-size:26px;margin:0 0 2px}h2{font-size:18px;margin:0 0 4px}h3{font-size:14px;margin:18px 0 4px}
p.note,.muted{color:var(--muted);font-size:13px;margin:0 0 10px;max-width:76ch}
section{background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:20px 22px;margin-top:18px}
.cards{display:flex;flex-wrap:wrap;gap:12px;margin-top:18px}
.card{background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:12px 16px;min-width:148px;flex:1}
.card b{display:block;font-size:24px;font-variant-numeric:tabular-nums;line-height:1.25}
.card span{color:var(--muted);font-size:12px}
.row{display:flex;flex-wrap:wrap;gap:18px}.row>div{flex:1 1 440px;min-width:0}
svg{max-width:100%;height:auto}svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,sans-serif!important}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:4px 14px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--muted);font-weight:500}
.pictures{display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));gap:14px}
.picture{border:1px solid var(--line);border-radius:8px;padding:10px;font-size:13px;overflow-wrap:anywhere}
.picture img{display:block;width:100%;height:150px;object-fit:contain;background:var(--wash);border-radius:5px;
 image-rendering:auto;margin-bottom:8px}
.picture .q{color:var(--muted)}.good{color:var(--good)}.bad{color:var(--bad)}
pre{background:var(--wash);border-radius:8px;padding:12px;overflow:auto;font-size:12px;line-height:1.45;margin:6px 0}
details summary{cursor:pointer;font-weight:600}
"""


@dataclass
class Run:
    """Everything the report knows of a run, read once; all fields may be empty."""

    directory: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    broken_lines: int = 0
    easy_vqa: list[dict[str, Any]] = field(default_factory=list)
    bpb: list[dict[str, Any]] = field(default_factory=list)
    attnres: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    recipe: str = ""
    versions: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def events(self, event: str) -> list[dict[str, Any]]:
        """Records of one event, in file order."""
        return [record for record in self.records if record.get("event") == event]

    def series(self, key: str, event: str = "train") -> Series:
        """(steps, values) of a numeric key, finite values only."""
        pairs = [(r["step"], r[key]) for r in self.events(event) if is_chartable(r.get(key))]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def keys(self, prefix: str, event: str = "train") -> list[str]:
        """Numeric keys that start with `prefix`, in order of first appearance."""
        return list(
            dict.fromkeys(
                k
                for r in self.events(event)
                for k, v in r.items()
                if k.startswith(prefix) and is_chartable(v)
            )
        )

    def last(self, key: str, event: str = "train") -> float | None:
        """Latest value of a numeric key."""
        values = self.series(key, event)[1]
        return values[-1] if values else None


def is_chartable(value: Any) -> bool:
    """True for finite ints and floats (bool excluded); what is beyond 1e100 is no measurement, and no chart
    can hold it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def read_run(run_dir: str | Path) -> Run:
    """Read a run folder. Raises FileNotFoundError when it is no folder; every missing part is an empty
    field."""
    directory = Path(run_dir)
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{directory}: not a folder; expected the output folder of a run (with metrics.jsonl)"
        )
    run = Run(directory)
    run.records, run.broken_lines = _read_jsonl(directory / "metrics.jsonl")
    run.easy_vqa = load_results(directory, "easy_vqa")
    run.bpb = load_results(directory, "bpb")
    run.attnres = load_results(directory, "attnres")
    run.samples = sorted(_read_samples(directory), key=lambda record: record["step"])
    run.recipe = _read_recipe(directory)
    run.versions = _read_dict(directory / "versions.json")
    run.facts = _read_dict(directory / "facts.json")
    return run


def write_report(run_dir: str | Path) -> Path:
    """Write `<run_dir>/report.html` and return its path. The page loads nothing: pictures and drawings are
    inline."""
    run = read_run(run_dir)
    sections: list[Callable[[], str]] = [
        partial(evaluation_part, run),
        partial(heldout_part, run),
        partial(chat_part, run, image_source),
        partial(samples_part, run, image_source),
    ]
    sections += [
        partial(part, run) for part in (loss_part, text_part, data_part, inside_part, optimisation_part)
    ]
    sections += [partial(diary_part, run), partial(recipe_part, run)]
    parts = [_drawn(section) for section in sections]
    title = str(run.facts.get("name", run.directory.resolve().name))
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width,initial-scale=1"><title>{html.escape(title)} · earlyfusion</title>'
        f"<style>{STYLE}</style></head><body><main><h1>{html.escape(title)}</h1>"
        f'<p class="note">{html.escape(_subtitle(run))}</p>{_drawn(partial(_cards, run))}{"".join(parts)}</main></body></html>\n'
    )
    target = run.directory / "report.html"
    return write_whole(target, page)


def _drawn(section: Callable[[], str]) -> str:
    """A section, or a note in its place: a file of another hand in the folder must not take the page from the
    run."""
    try:
        return section()
    except Exception as error:
        what = html.escape(f"{type(error).__name__}: {error!s:.200}")
        return f'<section><p class="note">A part of the page could not be drawn ({what}).</p></section>'


def _subtitle(run: Run) -> str:
    facts = [f"{key.replace('_', ' ')}: {value}" for key, value in run.facts.items() if key != "name"]
    return " · ".join(facts) if facts else "Joint vision-text pretraining run"


def _cards(run: Run) -> str:
    cards: list[tuple[str, str]] = []
    if run.easy_vqa:
        final = run.easy_vqa[-1]
        cards.append((f"{100 * final['accuracy']:.1f} %", "easy-VQA test accuracy"))
        if is_chartable(final.get("blind_accuracy")):
            margin = final["accuracy"] - final["blind_accuracy"]
            cards.append(
                (
                    f"{100 * final['blind_accuracy']:.1f} %",
                    f"the same, blind (seeing adds {100 * margin:+.1f})",
                )
            )
    if run.bpb:
        final = run.bpb[-1]
        cards.append(
            (
                f"{final['bits_per_byte']:.3f}",
                f"bits per byte, held-out text (gzip {final['gzip_bits_per_byte']:.3f})",
            )
        )
    for key, label, form in (
        ("loss", "training loss", lambda v: f"{v:.3f}"),
        ("tokens", "tokens seen", lambda v: f"{v / 1e6:.2f} M" if v >= 1e6 else f"{v:,.0f}"),
        ("seconds", "minutes of training", lambda v: f"{v / 60:.1f}"),
    ):
        value = run.last(key)
        if value is not None:
            cards.append((form(value), label))
    boxes = "".join(
        f'<div class="card"><b>{html.escape(v)}</b><span>{html.escape(l)}</span></div>' for v, l in cards
    )
    return f'<div class="cards">{boxes}</div>' if boxes else ""


def diary_part(run: Run) -> str:
    """The section of messages: evaluations, checkpoints, what the guard did."""
    entries = [r for r in run.records if isinstance(r.get("message"), str)]
    if not entries and not run.broken_lines:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(str(r['step']))}</td><td>{html.escape(str(r.get('event', '')))}</td>"
        f"<td>{html.escape(' '.join(str(r[k]) for k in ('kind', 'action') if k in r))}</td>"
        f"<td>{html.escape(r['message'])}</td></tr>"
        for r in entries[-200:]
    )
    table = (
        f"<table><tr><th>step</th><th>event</th><th>what</th><th>message</th></tr>{rows}</table>"
        if rows
        else ""
    )
    broken = (
        f'<p class="note">{run.broken_lines} unreadable line(s) of metrics.jsonl left out.</p>'
        if run.broken_lines
        else ""
    )
    return f"<section><h2>Events</h2>{broken}{table}</section>"


def recipe_part(run: Run) -> str:
    """The section that says how to run it again: versions and the resolved recipe."""
    if not run.recipe and not run.versions:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(str(k))}</td><td>{html.escape(str(v))}</td></tr>"
        for k, v in run.versions.items()
    )
    versions = f"<details><summary>Versions</summary><table>{rows}</table></details>" if rows else ""
    recipe = (
        f"<details><summary>Resolved recipe</summary><pre>{html.escape(run.recipe)}</pre></details>"
        if run.recipe
        else ""
    )
    return f"<section><h2>To run it again</h2>{recipe}{versions}</section>"


def image_source(run: Run, image: Any) -> str | None:
    """A data URI for a sample's picture; None when it is missing or outside the run folder."""
    if not isinstance(image, str) or not image:
        return None
    if image.startswith("data:image/"):
        return image
    try:
        path = (run.directory / image).resolve()
        inside = path.is_relative_to(run.directory.resolve()) and path.is_file()
    except (OSError, ValueError):  # a null character, half a character, a name of 5,000
        return None
    if not inside:
        return None
    kind = {".jpg": "jpeg", ".jpeg": "jpeg"}.get(path.suffix.lower(), "png")
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _read_jsonl(path: Path) -> tuple[list[dict[str, Any]], int]:
    records, broken = [], 0
    for line in _lines(path):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            broken += 1
            continue
        if isinstance(record, dict) and is_chartable(record.get("step")):
            records.append(record)
        else:
            broken += 1
    return records, broken


def _lines(path: Path) -> Iterable[str]:
    if not path.is_file():
        return []
    return [line for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]


def _read_dict(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_samples(directory: Path) -> list[dict[str, Any]]:
    found = [_read_dict(path) for path in sorted((directory / "samples").glob("*.json"))]
    return [r for r in found if is_chartable(r.get("step")) and isinstance(r.get("samples"), list)]


def _read_recipe(directory: Path) -> str:
    for name in ("recipe.toml", "recipe.json", "recipe.txt"):
        path = directory / name
        if path.is_file():
            return path.read_text(encoding="utf-8", errors="replace")
    return ""
