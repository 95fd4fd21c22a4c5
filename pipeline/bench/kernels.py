"""`earlyfusion bench kernels`: correctness of every kernel, then its speed and memory beside its peers.

Part 1 compares each side with the float64 definition, outputs and gradients, on small odd shapes (bfloat16 on
a GPU, float32 on a CPU). Part 2 times all sides in turn in one process: CUDA events with a flushed L2 cache
on a GPU, the clock on a CPU; median with 10th and 90th percentile, peak memory, achieved rates, and the share
of the floor given by copy bandwidth and matrix-product rate measured in the same process. A peer that is
missing or fails is listed with its reason. The file is written anew after every row, and --resume goes on
with one that was broken off. The exit code is 1 if one of our kernels misses its tolerance.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from pydantic import NonNegativeInt

from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import write_json
from earlyfusion.pipeline.bench.case import (
    PEERS,
    Case,
    Setting,
    errors,
    forward_and_backward,
    slopes_of,
    tensors_in,
)
from earlyfusion.pipeline.bench.cases import CASES
from earlyfusion.pipeline.bench.record import Result, chosen
from earlyfusion.pipeline.bench.timing import (
    copy_bandwidth,
    default_device,
    interleaved,
    peak_bytes,
    product_rate,
)
from earlyfusion.pipeline.errors import EXIT_FAILURE, EXIT_OK
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.options import Options, verb
from earlyfusion.pipeline.runtime import installed

# What a figure depends on beside the device.
PACKAGES = ("torch", "triton", "fla-core", "transformers")


class KernelOptions(Options):
    against: str = ",".join(PEERS)
    """peers to measure beside ours, separated by commas"""
    only: str = ",".join(CASES)
    """groups of kernels, separated by commas"""
    device: Literal["cuda", "cpu"] = default_device().type  # type: ignore[assignment]
    """cuda or cpu"""
    rounds: NonNegativeInt = 0
    """timed calls of every side (0: 30 on a GPU, 5 on a CPU)"""
    shapes: str = ""
    """cases of part 2 whose label holds one of these, between commas"""
    resume: bool = False
    """keep the rows that are in the --json file already"""
    json_: str = "runs/bench/kernels.json"
    """where the numbers are saved"""


def environment(setting: Setting) -> Result:
    """Device, versions and measured rates that the numbers depend on."""
    device, name = setting.device, platform.processor() or "cpu"
    if setting.gpu:
        name = torch.cuda.get_device_name(device)
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "packages": {package: installed(package) for package in PACKAGES},
        "copy_tb_per_s": copy_bandwidth(device) / 1e12,
        "product_tflop_per_s": product_rate(device, setting.dtype) / 1e12,
        "dtype": str(setting.dtype),
    }


class Report:
    """What the command saves: {"environment", "errors", "cases"}, rows by the name of their case, written
    whole after every row, so that a run that is killed leaves all its rows.

    Raises UserError for a file to go on with that was made elsewhere or is none.
    """

    def __init__(self, path: Path, environment: Result, resume: bool) -> None:
        self.path = path
        self.content: Result = {"environment": environment, "errors": {}, "cases": {}}
        if not resume or not path.exists():
            return
        try:
            found = json.loads(path.read_text())
            self.content, made_with = {key: found[key] for key in self.content}, found["environment"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--resume: {path} is no report; give another --json") from None

        # Rows of two machines or versions do not compare.
        for name in ("device", "dtype", "packages", "threads"):
            if made_with.get(name) != environment[name]:
                raise UserError(
                    f"--resume: {path} was made with {name} {made_with.get(name)}, this is "
                    f"{environment[name]}; rows of both do not compare, give another --json"
                )

    def row(self, part: str, case: Case, make: Callable[[], Result]) -> Result:
        """The row of a case, made unless it is there."""
        rows = self.content[part]
        # Written after every row: a run of hours that is killed loses one.
        if case.label not in rows:
            rows[case.label] = make() | {"failed": case.skipped}
            write_json(self.path, self.content)
        return rows[case.label]


def measure(case: Case, setting: Setting, rounds: int) -> Result:
    """Timings, memory and achieved rates of every side, and the floors; a side that raises goes to
    `case.skipped` with its message."""
    # Drawn once, outside of what is timed.
    slopes: list[torch.Tensor] = []

    def forward(name: str) -> None:
        with torch.no_grad():
            case.sides[name](*case.leaves)

    def both(name: str) -> None:
        forward_and_backward(case.sides[name], case.leaves, slopes)

    # Forward alone, then with the backward: users of both read this.
    passes = [("forward", forward, case.forward)]
    if case.backward is not None:
        passes.append(("both", both, case.forward + case.backward))
        with torch.no_grad():
            slopes = slopes_of(list(tensors_in(case.sides["ours"](*case.leaves))))

    result: Result = {"sides": {}}
    for kind, run, work in passes:
        calls = {side: partial(run, side) for side in case.sides}
        timings, failed = interleaved(calls, setting.device, rounds)
        case.skipped |= failed
        floor = result[f"{kind}_floor_ms"] = work.floor_ms(setting.device, setting.dtype)
        for side, timing in timings.items():
            milliseconds = timing["median_ms"]
            result["sides"].setdefault(side, {})[kind] = {
                **timing,
                # Rates count the least work: a side that moves more shows less.
                "tb_per_s": work.bytes / milliseconds / 1e9,
                "tflop_per_s": work.flops / milliseconds / 1e9,
                "share_of_floor": floor / milliseconds,
                "peak_mib": peak_bytes(calls[side], setting.device) / 2**20,
            }
    return result


def cases(setting: Setting, groups: Sequence[str]) -> Iterator[Case]:
    """The cases of some groups, made one at a time; what a group draws does not depend on the others."""
    for group in groups:
        # --only must not change what a case is fed.
        setting.generator.manual_seed(0)
        for case in CASES[group](setting):
            case.label = f"{group}: {case.label}"
            yield case


def show_case(label: str, row: Result) -> None:
    """One measured case; "ours is x" above 1 means that ours is quicker."""
    columns = {}
    for kind in ("forward", "both"):
        for side, passes in row["sides"].items():
            if kind in passes:
                columns[f"{side} {kind}"] = figures = dict(passes[kind])
                if side != "ours" and kind in row["sides"].get("ours", ()):
                    figures["ours is x"] = figures["median_ms"] / row["sides"]["ours"][kind]["median_ms"]
    show(label, columns, "; ".join(f"{side} not run: {why}" for side, why in row["failed"].items()))


@verb
def kernels(options: KernelOptions) -> int:
    """Entry of `earlyfusion bench kernels`. Raises UserError if no case has a label as asked for."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but no CUDA device is visible; use --device cpu")
    against, groups = chosen(options.against, PEERS, "--against"), chosen(options.only, CASES, "--only")
    dtype, rounds = torch.float32, options.rounds or 5
    if options.device == "cuda":
        dtype, rounds = torch.bfloat16, options.rounds or 30
    setting = Setting(torch.device(options.device), dtype, against)
    report = Report(Path(options.json_), environment(setting), options.resume)
    print(json.dumps(report.content["environment"], indent=2))

    # A quick kernel that is wrong is no kernel: the check comes first.
    well = True
    columns: dict[str, dict[str, str]] = {"error": {}, "bar": {}}
    for case in cases(replace(setting, check=True), groups):
        found = report.row("errors", case, partial(errors, case))
        well = well and found.get("ours", float("inf")) <= case.tolerance
        for side in found.keys() & case.sides:
            columns["error"][f"{case.label}: {side}"] = f"{found[side]:.1e}"
            columns["bar"][f"{case.label}: {side}"] = f"{case.tolerance:.0e}"
    show("error against the float64 definition (2-norm, worst tensor)", columns)

    # Cases that are left out are made too: inputs are drawn one after the other.
    texts, labels = chosen(options.shapes), []
    for case in cases(setting, groups):
        labels.append(case.label)
        if texts and not any(text in case.label for text in texts):
            continue
        show_case(case.label, report.row("cases", case, partial(measure, case, setting, rounds)))
        # Inputs of the next case need the memory of this one.
        del case
        if setting.gpu:
            torch.cuda.empty_cache()
    for text in texts:
        if not any(text in label for label in labels):
            raise UserError(f"--shapes {text!r} is in no label; there are {', '.join(labels)}")

    print(f"saved {options.json_}")
    if well:
        return EXIT_OK
    print("a kernel of ours misses its tolerance")
    return EXIT_FAILURE
