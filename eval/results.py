"""Evaluation results as files: one JSON object per measurement, `<run>/eval/<name>_<step>.json`.

Whoever evaluates writes with `save_result`; the report, the model card and later comparisons read with
`load_results`. A file is complete or absent (written beside, then renamed). Keys common to all results:
`name` (str, which measurement), `step` (int, optimizer step of the weights measured); the rest is the
measurement's own.
"""

import json
from pathlib import Path
from typing import Any

from earlyfusion.kernels.files import write_json

STEP_DIGITS = 7


def save_result(run_dir: str | Path, name: str, step: int, payload: dict[str, Any]) -> Path:
    """Save one measurement; `payload` may hold numbers, strings, lists and dicts. Returns the file's path."""
    record = {"name": name, "step": int(step), **payload}
    return write_json(Path(run_dir) / "eval" / f"{name}_{int(step):0{STEP_DIGITS}d}.json", record)


def _is_step(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 53


def load_results(run_dir: str | Path, name: str) -> list[dict[str, Any]]:
    """All measurements called `name`, sorted by step. Unreadable files are left out: a report must not fail
    on them."""
    results = []
    for path in sorted((Path(run_dir) / "eval").glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(record, dict) and record.get("name") == name and _is_step(record.get("step")):
            results.append(record)
    return sorted(results, key=lambda record: record["step"])
