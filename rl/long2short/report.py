"""OUT/report.html of a DPO run for length: the table before and after, the curves, and answers that
changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from earlyfusion.pipeline.report.data import read_run
from earlyfusion.pipeline.report.page import write_page
from earlyfusion.rl.long2short.heldout import DIGITS, Held, difference, read_held, shown


def write_report(out: Path, summary: Mapping[str, Any]) -> Path:
    """One file that loads nothing from elsewhere; reads metrics.jsonl and heldout/. Returns its path."""
    rows = []
    for row in summary["heldout"]:
        metrics = [
            text(row[metric], digits) for metric, digits in DIGITS.items() for text in (shown, difference)
        ]
        rows.append([row["label"], row["way"], row["n"], *metrics])
    run = read_run(out) | {"title": f"long2short · {out.resolve().name}", "summary": summary}
    return write_page(out / "report.html", "long2short.html", run | {"rows": rows, **changed(out)})


def changed(out: Path) -> dict[str, Any]:
    """Greedy answers to the same problems: compared, how many; moved, (before, after) of those that are not
    what they were, the largest changes of length first."""
    paths = [out / "heldout" / f"{name}.jsonl" for name in ("before", "after")]
    if not all(path.is_file() for path in paths):
        return {}
    before, after = (greedy(path) for path in paths)
    # Problems measured both times.
    pairs = [(before[key], after[key]) for key in after if key in before]
    moved = [(a, b) for a, b in pairs if a.answer != b.answer]
    moved.sort(key=lambda pair: -abs(pair[1].tokens - pair[0].tokens))
    return {"compared": len(pairs), "moved": moved}


def greedy(path: Path) -> dict[tuple[str, str], Held]:
    """(label, key) -> the greedy answer to a held-out problem."""
    return {(one.label, one.key): one for one in read_held(path) if one.way == "greedy"}
