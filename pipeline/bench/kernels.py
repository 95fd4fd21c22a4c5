"""`earlyfusion bench kernels`: correctness of every kernel, then its speed and memory beside its peers.

Part 1 compares each side with the float64 definition, outputs and gradients, on small odd shapes (bfloat16 on
a GPU, float32 on a CPU). Part 2 times all sides in turn in one process: CUDA events with a flushed L2 cache
on a GPU, the clock on a CPU; medians, peak memory, ratios of ours to its peers, and the share of the floor
given by copy bandwidth and matrix-product rate measured in the same process. A peer that is missing or fails
is told with its reason. The file is written after every case, and --resume goes on with one that was broken
off. The exit code is 1 if one of our kernels misses its tolerance.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from pydantic import PositiveInt

from earlyfusion.data.options import Options, verb
from earlyfusion.pipeline.bench.case import (
    PEERS,
    Case,
    Setting,
    copy_bandwidth,
    errors,
    forward_and_backward,
    peak_bytes,
    product_rate,
    tensors_in,
    time_once,
)
from earlyfusion.pipeline.bench.cases import CASES
from earlyfusion.pipeline.bench.frame import (
    Result,
    alternate,
    chosen,
    compared,
    default_device,
    save_record,
    saved_record,
)
from earlyfusion.pipeline.errors import EXIT_FAILURE, EXIT_OK
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.runtime import keep_freed_memory


class KernelOptions(Options):
    against: str = ",".join(PEERS)
    """peers to measure beside ours, separated by commas"""
    only: str = ",".join(CASES)
    """groups of kernels, separated by commas"""
    rounds: PositiveInt = 30 if torch.cuda.is_available() else 5
    """timed calls of every side"""
    out: str = "runs/bench/kernels.json"
    """where the numbers are saved"""
    resume: bool = False
    """keep the cases that this file has already"""


def measure(case: Case, setting: Setting, rounds: int) -> Result:
    """Milliseconds, share of the floor and peak MiB of every side, forward alone and with the backward, and
    the ratios of ours to every peer. Raises what ours raises."""
    with torch.no_grad():
        # Drawn once, outside of what is timed, and where they are used: a path of 54 sub-layers has 10^9.
        slopes = [
            torch.randn_like(x, dtype=torch.float32).to(x)
            for x in tensors_in(case.sides["ours"](*case.leaves))
        ]

    def forward(side: str) -> None:
        with torch.no_grad():
            case.sides[side](*case.leaves)

    def both(side: str) -> None:
        forward_and_backward(case.sides[side], case.leaves, slopes)

    # Forward alone, then with the backward: users of both read this.
    passes: Sequence[Callable[[str], None]] = [forward, both][: len(case.work)]

    def run(side: str) -> Result:
        return {f"{do.__name__}_ms": time_once(partial(do, side), setting.device) for do in passes}

    results = alternate(case.sides, rounds + 1, run)
    # The first round compiles and allocates.
    columns = compared({side: found[1:] for side, found in results.items()})
    least, flops = 0.0, 0.0
    for do, work in zip(passes, case.work):
        least, flops = least + work[0], flops + work[1]
        rate = product_rate(setting.device, setting.dtype)
        floor_ms = 1e3 * max(least / copy_bandwidth(setting.device), flops / rate)
        for side in results:
            column, name = columns[side], do.__name__
            column[f"{name}_share_of_floor"] = floor_ms / column[f"{name}_ms"]
            column[f"{name}_peak_mib"] = peak_bytes(partial(do, side), setting.device) / 2**20
    return columns


def cases(setting: Setting, groups: Sequence[str]) -> Iterator[Case]:
    """The cases of some groups, made one at a time; what a group draws does not depend on the others."""
    for group in groups:
        # --only must not change what a case is fed.
        setting.generator.manual_seed(0)
        for case in CASES[group](setting):
            case.label = f"{group}: {case.label}"
            yield case


@verb
def kernels(options: KernelOptions) -> int:
    """Entry of `earlyfusion bench kernels`."""
    against, groups = chosen(options.against, PEERS, "--against"), chosen(options.only, CASES, "--only")
    keep_freed_memory()  # for all sides, as a run does
    device, dtype = default_device(), torch.float32
    if device.type == "cuda":
        dtype = torch.bfloat16
    setting = Setting(device, dtype, against)

    # A quick kernel that is wrong is no kernel: the check comes first.
    missed = []
    checked: dict[str, dict[str, float]] = {}
    for case in cases(replace(setting, check=True), groups):
        for side, error in errors(case).items():
            checked.setdefault(side, {})[case.label] = error
        if not checked["ours"][case.label] <= case.tolerance:
            missed.append(case.label)
    show("error against the float64 definition (2-norm, worst tensor)", checked)

    measured: Result = {}
    if options.resume and os.path.exists(options.out):
        measured = saved_record(options.out)["cases"]
    rates = {
        "copy_tb_per_s": copy_bandwidth(device) / 1e12,
        "product_tflop_per_s": product_rate(device, dtype) / 1e12,
    }
    for case in cases(setting, groups):
        if case.label not in measured:
            measured[case.label] = measure(case, setting, options.rounds)
        show(case.label, measured[case.label])
        # Written after every case: a run of hours that is killed loses one.
        save_record(options.out, options.model_dump(), rates=rates, errors=checked, cases=measured)
        # Inputs of the next case need the memory of this one.
        del case
        if setting.gpu:
            torch.cuda.empty_cache()

    if not missed:
        return EXIT_OK
    print(f"kernels of ours miss their tolerance: {', '.join(missed)}")
    return EXIT_FAILURE
