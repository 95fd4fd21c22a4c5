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
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from pydantic import NonNegativeInt
from rich.console import Console
from torch import Tensor

from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.kernels.files import write_json
from earlyfusion.pipeline.bench.case import PEERS, Case, Setting, Side
from earlyfusion.pipeline.bench.cases import CASES
from earlyfusion.pipeline.bench.record import Result, show
from earlyfusion.pipeline.bench.timing import copy_bandwidth, interleaved, peak_bytes, product_rate, reason
from earlyfusion.pipeline.errors import EXIT_FAILURE, EXIT_OK
from earlyfusion.pipeline.options import Options, verb
from earlyfusion.pipeline.runtime import installed

PACKAGES = ("torch", "triton", "fla-core", "transformers", "liger-kernel")


class KernelOptions(Options):
    against: str = ",".join(PEERS)
    """peers to measure beside ours, separated by commas"""
    only: str = ",".join(CASES)
    """groups of kernels, separated by commas"""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """cuda or cpu"""
    rounds: NonNegativeInt = 0
    """timed calls of every side (0: 30 on a GPU, 5 on a CPU)"""
    shapes: str = ""
    """cases of part 2 whose label holds one of these, between commas"""
    resume: bool = False
    """keep the rows that are in the --json file already"""
    seed: int = 0
    """seed of all inputs"""
    json_: str = "runs/bench/kernels.json"
    """where the numbers are saved"""


def chosen(text: str, choices: Sequence[str], option: str) -> list[str]:
    """The names in a text; raises UserError for one that is not among the choices."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in choices:
            raise UserError(f"bench kernels: {option} {name!r} is unknown; {did_you_mean(name, choices)}")
    return names


def device_named(name: str) -> torch.device:
    """The device of an option; raises UserError where there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"bench kernels: --device {name!r} names no device; give cuda or cpu") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("bench kernels: --device cuda, but no CUDA device is visible; use --device cpu")
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


def environment(device: torch.device, dtype: torch.dtype) -> Result:
    """Device, versions and measured rates that the numbers depend on."""
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": {name: installed(name) for name in PACKAGES},
        "copy_tb_per_s": copy_bandwidth(device) / 1e12,
        "product_tflop_per_s": product_rate(device, dtype) / 1e12,
        "dtype": str(dtype).removeprefix("torch."),
    }


class Report:
    """What the command saves: {"environment", "errors", "cases"}, written whole after every row, so that a
    run that is killed leaves all its rows.

    Raises UserError for a file to go on with that was made elsewhere or is none.
    """

    def __init__(self, path: Path, environment: Result, resume: bool) -> None:
        self.path = path
        self.content: Result = {"environment": environment, "errors": [], "cases": []}
        if not resume or not path.exists():
            return
        try:
            found = json.loads(path.read_text())
            self.content, made_with = {key: found[key] for key in self.content}, found["environment"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"bench kernels: --resume: {path} is no report ({error!r}); give another --json"
            ) from None

        # Rows of two machines or versions do not compare.
        for name in ("device", "dtype", "packages", "threads"):
            if made_with.get(name) != environment[name]:
                raise UserError(
                    f"bench kernels: --resume: {path} was made with {name} {made_with.get(name)}, this is "
                    f"{environment[name]}; rows of both do not compare, give another --json"
                )

    def row(self, part: str, case: Case) -> Result | None:
        """The row of a case, if it has been made."""
        for row in self.content[part]:
            if (row["group"], row["label"]) == (case.group, case.label):
                return row
        return None

    def add(self, part: str, row: Result) -> Result:
        self.content[part].append(row)
        write_json(self.path, self.content)
        return row


def outputs_of(side: Side, leaves: Sequence[Tensor]) -> list[Tensor]:
    """What a side returns, as a list."""
    outputs = side(*leaves)
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def forward_and_backward(side: Side, leaves: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, and the gradients of all leaves that require one, for fixed cotangents of the outputs."""
    outputs = outputs_of(side, leaves)[: len(cotangents)]
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    if not trained:
        return outputs

    # Outputs without a gradient (a mask, say) have no slope.
    pairs = [(out, slope.to(out.dtype)) for out, slope in zip(outputs, cotangents) if out.requires_grad]
    got, slopes = [out for out, _ in pairs], [slope for _, slope in pairs]
    return [*outputs, *torch.autograd.grad(got, trained, slopes, allow_unused=True)]


def relative_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Worst over tensors of ||got - expected|| / ||expected||; infinite if anything is not finite."""
    worst = 0.0
    for one, law in zip(got, expected, strict=True):
        one, law = one.detach().double(), law.detach().double().to(one.device)
        if not bool(torch.isfinite(one).all()):
            return float("inf")
        worst = max(worst, float((one - law).norm() / law.norm().clamp_min(1e-30)))
    return worst


def copied(leaves: Sequence[Tensor], wide: bool = False) -> list[Tensor]:
    """The same inputs anew, in float64 if `wide`: a kernel may update a state in place."""
    copies = []
    for leaf in leaves:
        copy = leaf.detach().clone()
        copy = copy.double() if wide and copy.is_floating_point() else copy
        copies.append(copy.requires_grad_(leaf.requires_grad))
    return copies


def errors(case: Case) -> dict[str, float]:
    """Relative error (2-norm, worst tensor) of every side against the law in float64, outputs and
    gradients."""
    if case.law is None:
        return {}

    # The law in float64 is as near to the truth as it gets.
    expected = forward_and_backward(case.law, copied(case.leaves, wide=True), case.cotangents)
    found = {}
    for name, side in case.sides.items():
        try:
            got = forward_and_backward(side, copied(case.inputs(name)), case.cotangents)
            found[name] = relative_error(got, expected)
        except Exception as error:  # a peer's failure is a result of the comparison
            case.skipped[name] = reason(error)
    return found


def measure(case: Case, setting: Setting, rounds: int) -> Result:
    """Timings, memory and achieved rates of every side; a side that raises is reported with its message."""

    def forward(name: str) -> None:
        with torch.no_grad():
            case.sides[name](*case.inputs(name))

    def both(name: str) -> None:
        forward_and_backward(case.sides[name], case.inputs(name), case.cotangents)

    result: Result = {"group": case.group, "label": case.label, "sides": {}, "failed": dict(case.skipped)}

    # Forward alone, then with the backward: users of both read this.
    passes = [("forward", forward, case.forward)]
    if case.backward is not None:
        passes.append(("both", both, case.forward + case.backward))

    for kind, run, work in passes:
        calls = {side: partial(run, side) for side in case.sides}
        timings, failed = interleaved(calls, setting.device, rounds)
        result["failed"] |= failed
        floor = result[f"{kind}_floor_ms"] = work.floor_ms(setting.device, setting.dtype)
        for side, timing in timings.items():
            seconds = timing["median_ms"] / 1e3
            result["sides"].setdefault(side, {})[kind] = {
                **timing,
                # Rates count the least work: a side that moves more shows less.
                "tb_per_s": work.bytes / seconds / 1e12,
                "tflop_per_s": work.flops / seconds / 1e12,
                "share_of_floor": floor / timing["median_ms"],
                "peak_mib": peak_bytes(calls[side], setting.device) / 2**20,
            }
    return result


def cases(setting: Setting, groups: Sequence[str]) -> Iterator[Case]:
    """The cases of some groups, made one at a time; what a group draws does not depend on the others."""
    for group in groups:
        setting.generator.manual_seed(setting.seed)
        for case in CASES[group](setting):
            case.group = group
            yield case


def check(setting: Setting, groups: Sequence[str], console: Console, report: Report) -> bool:
    """Part 1. Returns whether all of ours are within tolerance."""
    rows = []
    for case in cases(setting, groups):
        row = report.row("errors", case)
        if row is None:
            found = errors(case)
            row = {
                "group": case.group,
                "label": case.label,
                "errors": found,
                "tolerance": case.tolerance,
                "within": found.get("ours", float("inf")) <= case.tolerance,
                "failed": dict(case.skipped),
            }
            report.add("errors", row)
        rows.append(row)

    columns: dict[str, dict[str, str]] = {"error": {}, "bar": {}}
    for row in rows:
        for side, error in row["errors"].items():
            name = f"{row['group']} {row['label']}: {side}"
            columns["error"][name] = f"{error:.1e}"
            columns["bar"][name] = f"{row['tolerance']:.0e}" if side == "ours" else ""
    show(console, "error against the float64 definition (2-norm, worst tensor)", columns)
    return all(row["within"] for row in rows)


def show_case(console: Console, result: Result) -> None:
    """One measured case; "ours is x" above 1 means that ours is quicker."""
    columns = {}
    for kind in ("forward", "both"):
        ours = result["sides"].get("ours", {}).get(kind)
        for side, passes in result["sides"].items():
            if kind in passes:
                row = dict(passes[kind])
                if ours and side != "ours":
                    row["ours is x"] = row["median_ms"] / ours["median_ms"]
                columns[f"{side} {kind}"] = row
    show(console, f"{result['group']}: {result['label']}", columns)
    for side, why in result["failed"].items():
        console.print(f"{side} not run: {why}", markup=False)


def time_cases(
    setting: Setting, groups: Sequence[str], rounds: int, shapes: str, console: Console, report: Report
) -> None:
    """Part 2, one case at a time so that memory is given back in between.

    Raises UserError if no case has a label as asked for.
    """
    # All labels are needed to say what there is, where none was meant.
    texts = [text.strip() for text in shapes.split(",") if text.strip()]
    labels = []
    for case in cases(setting, groups):  # also those that are left out: inputs are drawn one after the other
        labels.append(case.label)
        if texts and not any(text in case.label for text in texts):
            continue
        result = report.row("cases", case)
        if result is None:
            with console.status(f"{case.group}: {case.label}"):
                result = report.add("cases", measure(case, setting, rounds))
        show_case(console, result)
        del case
        if setting.gpu:
            torch.cuda.empty_cache()

    for text in texts:
        if not any(text in label for label in labels):
            raise UserError(f"bench kernels: --shapes {text!r} is in no label; there are {', '.join(labels)}")


@verb
def kernels(options: KernelOptions) -> int:
    """Entry of `earlyfusion bench kernels`."""
    device = device_named(options.device)
    against = frozenset(chosen(options.against, PEERS, "--against"))
    groups = chosen(options.only, list(CASES), "--only")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    console = Console()
    if not console.is_terminal:  # a log file has no width; wrapped figures are hard to read
        console = Console(width=150)
    report = Report(Path(options.json_), environment(device, dtype), options.resume)
    console.print_json(json.dumps(report.content["environment"]))

    # A quick kernel that is wrong is no kernel: the check comes first.
    well = check(Setting(device, dtype, against, options.seed, check=True), groups, console, report)
    setting = Setting(device, dtype, against, options.seed)
    rounds = options.rounds or (30 if setting.gpu else 5)
    time_cases(setting, groups, rounds, options.shapes, console, report)
    console.print(f"saved {options.json_}")
    if not well:
        console.print("[red]a kernel of ours misses its tolerance[/red]")
    return EXIT_OK if well else EXIT_FAILURE
