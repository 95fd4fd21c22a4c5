"""What the benchmarks share: a side in a process of its own, and the record that is saved."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from earlyfusion.pipeline.statefile import write_text


class SideFailed(Exception):
    """A side's process ended badly; the message is the last line it wrote to stderr."""


def run_side(module: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run `python -m module request` and return the JSON object of its last line. Raises SideFailed."""
    done = subprocess.run([sys.executable, "-m", module, json.dumps(request)], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["?"])[-1]
        raise SideFailed(f"process ended with {done.returncode}: {last[:300]}")
    return json.loads(lines[-1])


def new_record(options: argparse.Namespace) -> dict[str, Any]:
    """When, where and with which options; sets torch's CPU threads to `options.threads`."""
    torch.set_num_threads(options.threads)
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": {"cpu": platform.processor() or platform.machine(), "threads": options.threads},
        "torch": torch.__version__,
        "options": vars(options),
    }


def save_record(record: dict[str, Any], out: str, console: Console) -> None:
    """Write the record as JSON and say where."""
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(record, indent=1) + "\n")
    console.print(f"saved {path}")
