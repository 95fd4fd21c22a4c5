"""What the benchmarks share: sides in processes of their own that take turns, and the record that is saved.

python -m earlyfusion.pipeline.bench.record MODULE:FUNCTION JSON     one side: FUNCTION(**JSON) as a JSON line
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.kernels.files import write_json

Result = dict[str, Any]


# A peer that is missing ends its own process, not the comparison.
class SideFailed(UserError):
    """A side's process ended badly; the message holds the last line that it wrote to stderr."""


def run_side(side: Callable[..., Result], request: Result, **environment: str) -> Result:
    """`side(**request)`, computed in a process of its own. Raises SideFailed."""
    name = f"{side.__module__}:{side.__qualname__}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", __name__, name, json.dumps(request)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )

    # Libraries may print too: the result is the last line that is an object.
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        last = ["?", *done.stderr.strip().splitlines()][-1]
        short = name.removeprefix("earlyfusion.pipeline.")
        raise SideFailed(f"{short} ended with {done.returncode}: {last[:300]}")
    return json.loads(lines[-1])


def in_turn(
    sides: Iterable[str], rounds: int, run: Callable[[str], Result]
) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """The results of every side, each once a round: A B A B ..., so that the machine's moods hit all alike;
    and of peers that cannot run here the reason. The first side is ours: where it fails, SideFailed is
    raised."""
    # Mutable while it is walked: a side that fails leaves.
    results: dict[str, list[Result]] = {side: [] for side in sides}
    refused: dict[str, str] = {}
    for number in range(rounds):
        for side in list(results):
            print(f"round {number + 1} of {rounds}: {side}", file=sys.stderr)
            try:
                results[side].append(run(side))
            except SideFailed as error:
                if side == next(iter(results)):
                    raise
                # What failed once is not asked again.
                refused[side] = str(error)
                del results[side]
    return results, refused


def medians(found: list[Result]) -> dict[str, float]:
    """The median over the rounds of every figure of a side."""
    return {key: statistics.median(one[key] for one in found) for key in found[0]}


def chosen(text: str, choices: Iterable[str] | None = None, option: str = "") -> list[str]:
    """The names between commas; raises UserError for one that is not among the choices."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if choices is not None and name not in choices:
            raise UserError(f"{option} {name!r} is unknown; {did_you_mean(name, choices)}")
    return names


def save_record(out: str, options: Mapping[str, Any], **parts: Any) -> None:
    """Write the parts as JSON, with what a figure depends on beside the code, and say where."""
    record = {
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "threads": torch.get_num_threads(),
        },
        "torch": torch.__version__,
        "options": dict(options),
        **parts,
    }
    print(f"saved {write_json(out, record)}")


if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(":")
    print(json.dumps(getattr(importlib.import_module(module), function)(**json.loads(sys.argv[2]))))
