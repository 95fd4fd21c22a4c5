"""The frame of every benchmark: sides that take turns, medians, ratios to ours, and the record that is saved.

python -m earlyfusion.pipeline.bench.frame MODULE:FUNCTION JSON     one side: FUNCTION(**JSON) as a JSON line
"""

import importlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from earlyfusion.kernels.errors import UserError, did_you_mean, one_line
from earlyfusion.kernels.files import Record, write_json
from earlyfusion.pipeline.runtime import installed

Result = Record
GROWTH = "runs/bench/growth.json"
"""Where `bench growth` leaves what it measured, and `plan` looks for it."""
# What a figure depends on beside the device.
PACKAGES = ("torch", "triton", "fla-core", "transformers")


# A peer that is missing ends its own process, not the comparison.
class SideFailed(UserError):
    """A side's process ended badly; the message holds the last line that it wrote to stderr."""


def default_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def now() -> float:
    """Seconds of the clock; waits for the device first."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_mib() -> float:
    """Peak resident memory of this process in MiB (or of the CUDA device when one is used)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


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


def alternate(sides: Iterable[str], rounds: int, run: Callable[[str], Result]) -> dict[str, list[Result]]:
    """The results of every side, each once a round: A B A B ..., so that the machine's moods hit all alike.

    The first side is ours, and its errors are raised; a peer that cannot run here leaves with a line.
    """
    results: dict[str, list[Result]] = {side: [] for side in sides}
    ours = next(iter(results))
    for _ in range(rounds):
        # A copy of the names: a side that fails leaves, and is not asked again.
        for side in list(results):
            try:
                results[side].append(run(side))
            except Exception as error:
                if side == ours:
                    raise
                print(f"{side} does not run here: {one_line(error)}")
                del results[side]
    return results


def medians(found: list[Result]) -> dict[str, float]:
    """The median over the rounds of every figure of a side."""
    return {key: statistics.median(one[key] for one in found) for key in found[0]}


def compared(results: Mapping[str, list[Result]]) -> Result:
    """Columns of a table: the medians of every side, and for every peer those of ours over it.

    A ratio is of neighbours in time, which met the same machine.
    """
    columns: Result = {side: medians(found) for side, found in results.items()}
    ours, *peers = results
    for peer in peers:
        ratios = []
        for a, b in zip(results[ours], results[peer]):
            ratios.append({key: a[key] / b[key] for key in a})
        columns[f"{ours} / {peer}"] = medians(ratios)
    return columns


def chosen(text: str, choices: Iterable[str], option: str) -> list[str]:
    """The names between commas; raises UserError for one that is not among the choices."""
    names = [name for name in text.replace(" ", "").split(",") if name]
    for name in names:
        if name not in choices:
            raise UserError(f"{option} {name!r} is unknown; {did_you_mean(name, choices)}")
    return names


def numbers(text: str) -> list[int]:
    """A list such as 1,8,64; raises UserError for anything else."""
    parts = text.replace(" ", "").split(",")
    if not all(part.isdigit() and int(part) for part in parts):
        raise UserError(f"bench: {text!r}: expected numbers of at least 1, such as 1,8,64")
    return [int(part) for part in parts]


def environment() -> Record:
    """What a figure depends on beside the code and the moment."""
    device = platform.processor() or platform.machine()
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    packages = {package: installed(package) for package in PACKAGES}
    return {
        "device": device,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "packages": packages,
    }


def save_record(out: str, options: Record, **parts: Any) -> None:
    """Write the parts as JSON, with what a figure depends on beside the code, and say where."""
    when, load = time.strftime("%Y-%m-%d %H:%M:%S"), os.getloadavg()[0]
    record = {"when": when, "load": load, **environment(), "options": options, **parts}
    print(f"saved {write_json(out, record)}")


def saved_record(out: str) -> Record:
    """What `save_record` wrote. Raises UserError if it was made on another machine or by other versions."""
    try:
        record = dict(json.loads(Path(out).read_bytes()))
    except (ValueError, TypeError):
        # No record: nothing in it fits.
        record = {}
    for name, value in environment().items():
        if record.get(name) != value:
            raise UserError(
                f"{out} was made with {name} {record.get(name)}, this is {value}: rows of both do not "
                "compare, give another --out"
            )
    return record


if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(":")
    print(json.dumps(getattr(importlib.import_module(module), function)(**json.loads(sys.argv[2]))))
