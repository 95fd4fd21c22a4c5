"""What the benchmarks share: sides in processes of their own that take turns, the record that is saved,
tables.

python -m earlyfusion.pipeline.bench.record MODULE:FUNCTION JSON     one side: FUNCTION(**JSON) as a JSON line
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from earlyfusion.data.tables import print_table
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import write_json

Result = dict[str, Any]


class SideFailed(UserError):
    """A side's process ended badly; the message holds the last line that it wrote to stderr."""


def start_side(side: Callable[..., Result], request: Result, **environment: str) -> subprocess.Popen[str]:
    """Start `side(**request)` in a process of its own; `result_of` waits for it."""
    name = f"{side.__module__}:{side.__qualname__}"
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", __name__, name, json.dumps(request)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def result_of(process: subprocess.Popen[str]) -> Result:
    """What a side returned: the JSON object of its last line. Raises SideFailed."""
    output, errors = process.communicate()

    # Libraries may print too: the result is the last line that is an object.
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if process.returncode != 0 or not lines:
        last = (errors.strip().splitlines() or ["?"])[-1]
        name = str(process.args[-2]).removeprefix("earlyfusion.pipeline.")  # type: ignore[index]
        raise SideFailed(f"{name} ended with {process.returncode}: {last[:300]}")
    return json.loads(lines[-1])


def run_side(side: Callable[..., Result], request: Result, **environment: str) -> Result:
    """`side(**request)`, computed in a process of its own. Raises SideFailed."""
    return result_of(start_side(side, request, **environment))


def in_turn(
    sides: Iterable[str], rounds: int, run: Callable[[str], Result], console: Console, what: str
) -> dict[str, list[Result]]:
    """The results of every side, each once a round: A B A B ..., so that the machine's moods hit all
    alike."""
    results: dict[str, list[Result]] = {side: [] for side in sides}
    for number in range(rounds):
        for side, found in results.items():
            with console.status(f"{what}, round {number + 1}/{rounds}: {side}"):
                found.append(run(side))
    return results


def new_record(options: Mapping[str, Any]) -> Result:
    """When, where and with which options; sets torch's CPU threads to options["threads"] where given."""
    # What a figure depends on beside the code stands in every record.
    if options.get("threads"):
        torch.set_num_threads(options["threads"])
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "threads": torch.get_num_threads(),
        },
        "torch": torch.__version__,
        "options": dict(options),
    }


def save_record(record: Result, out: str, console: Console) -> None:
    """Write the record as JSON and say where."""
    console.print(f"saved {write_json(out, record)}")


def show(console: Console, title: str, columns: Mapping[str, Mapping[str, Any]], caption: str = "") -> None:
    """Print figures as a table: {column: {row: value}}; a row is named as in the record."""
    table = Table("", title=title, title_justify="left", caption=caption or None)

    # Columns may have rows of their own: a dict keeps all names in order.
    rows: dict[str, None] = {}
    for name, figures in columns.items():
        table.add_column(name, justify="right")
        rows |= dict.fromkeys(figures)
    for row in rows:
        table.add_row(row, *(shown(figures.get(row)) for figures in columns.values()))
    print_table(console, table)


def shown(value: Any) -> str:
    """A figure as text: four digits, or whole from a thousand on; nothing for None."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)


def main(name: str, request: str) -> None:
    """One side, in its process."""
    module, _, function = name.partition(":")
    print(json.dumps(getattr(importlib.import_module(module), function)(**json.loads(request))))


if __name__ == "__main__":
    main(*sys.argv[1:])
