"""Evaluation results as files: one JSON object per measurement, `<run>/eval/<name>_<step>.json`.

Whoever evaluates writes with `save_result`; the report reads them all. A file is complete or absent. Keys
common to all results: `name` (str, which measurement), `step` (int, optimizer step of the weights measured);
the rest is the measurement's own.
"""

from pathlib import Path
from typing import Any

from earlyfusion.kernels.files import write_json

STEP_DIGITS = 7


def save_result(run_dir: str | Path, name: str, step: int, payload: dict[str, Any]) -> Path:
    """Save one measurement; `payload` may hold numbers, strings, lists and dicts. Returns the file's path."""
    path = Path(run_dir) / "eval" / f"{name}_{step:0{STEP_DIGITS}d}.json"
    return write_json(path, {"name": name, "step": step, **payload})
