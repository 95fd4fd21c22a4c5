"""`earlyfusion bench kernels`: correctness of every kernel, then its speed and memory beside its peers.

Part 1 compares each side with the float64 definition, outputs and gradients, on small odd shapes (bfloat16 on
a GPU, float32 on a CPU). Part 2 times all sides in turn in one process: CUDA events with a flushed L2 cache
on a GPU, the clock on a CPU; median with 10th and 90th percentile, peak memory, achieved rates, and the share
of the floor given by copy bandwidth and matrix-product rate measured in the same process. A peer that is
missing or fails is listed with its reason. The file is written anew after every row, and --resume goes on
with one that was broken off. The exit code is 1 if one of our kernels misses its tolerance.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.pipeline.bench import timing as bench
from earlyfusion.pipeline.bench.cmd import BenchFormatter
from earlyfusion.pipeline.bench.kernels import kda as bench_kernels_kda
from earlyfusion.pipeline.bench.kernels import products as bench_kernels_products
from earlyfusion.pipeline.bench.kernels import residual as bench_kernels_residual
from earlyfusion.pipeline.bench.kernels.case import Case, Setting, errors, measure
from earlyfusion.pipeline.errors import EXIT_OK
from earlyfusion.pipeline.runtime import installed
from earlyfusion.pipeline.statefile import write_text

PEERS = ("fla", "torch", "eager", "transformers", "recurrence", "muon", "liger")
GROUPS = ("kda", "attnres", "loss", "attention", "rope", "decode", "moe", "muon")
MODULES = {
    bench_kernels_kda: ("kda",),
    bench_kernels_residual: ("attnres", "loss"),
    bench_kernels_products: ("attention", "rope", "decode", "moe", "muon"),
}


def parser() -> argparse.ArgumentParser:
    """Options of `earlyfusion bench kernels`."""
    options = argparse.ArgumentParser(
        prog="earlyfusion bench kernels", description=__doc__, formatter_class=BenchFormatter
    )
    options.add_argument(
        "--against", default=",".join(PEERS), help="peers to measure beside ours, separated by commas"
    )
    options.add_argument("--only", default=",".join(GROUPS), help="groups of kernels, separated by commas")
    options.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu"
    )
    options.add_argument(
        "--rounds", type=int, default=0, help="timed calls of every side (0: 30 on a GPU, 5 on a CPU)"
    )
    options.add_argument(
        "--shapes", default="", help="cases of part 2 whose label holds one of these, between commas"
    )
    options.add_argument(
        "--resume", action="store_true", help="keep the rows that are in the --json file already"
    )
    options.add_argument("--quick", action="store_true", help="the first shapes of every group only")
    options.add_argument("--check-only", action="store_true", help="part 1 only")
    options.add_argument("--seed", type=int, default=0, help="seed of all inputs")
    options.add_argument("--json", default="runs/bench/kernels.json", help="where the numbers are saved")
    return options


def _chosen(text: str, choices: Sequence[str], option: str) -> frozenset[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in choices:
            raise UserError(f"bench kernels: {option} {name!r} is unknown; {did_you_mean(name, choices)}")
    return frozenset(names)


def _cases(setting: Setting, groups: frozenset[str], quick: bool) -> Iterator[partial[Case]]:
    for module, names in MODULES.items():
        if groups & set(names):
            yield from module.cases(setting, quick)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"bench kernels: --device {name!r} names no device; give cuda or cpu") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("bench kernels: --device cuda, but no CUDA device is visible; use --device cpu")
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


def environment(device: torch.device) -> dict[str, Any]:
    """Device, versions and measured rates that the numbers depend on."""
    packages = {
        name: installed(name) for name in ("torch", "triton", "fla-core", "transformers", "liger-kernel")
    }
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": packages,
        "copy_tb_per_s": bench.copy_bandwidth(device) / 1e12,
        "product_tflop_per_s": bench.product_rate(device, dtype) / 1e12,
        "dtype": str(dtype).removeprefix("torch."),
    }


class Report:
    """What the command saves: {"environment", "errors", "cases"}, written whole after every row, under a name
    of its own first, so that a run that is killed leaves all its rows.

    Raises UserError for a file to go on with that was made elsewhere or is none.
    """

    def __init__(self, path: Path, environment: dict[str, Any], resume: bool) -> None:
        self.path = path
        self.content: dict[str, Any] = {"environment": environment, "errors": [], "cases": []}
        path.parent.mkdir(parents=True, exist_ok=True)
        if not resume or not path.exists():
            return
        try:
            found = json.loads(path.read_text())
            kept, differs = {key: found[key] for key in self.content}, found["environment"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"bench kernels: --resume: {path} is no report ({error!r}); give another --json"
            ) from None
        for name in ("device", "dtype", "packages", "threads"):
            if differs.get(name) != environment[name]:
                raise UserError(
                    f"bench kernels: --resume: {path} was made with {name} {differs.get(name)}, this is "
                    f"{environment[name]}; rows of both do not compare, give another --json"
                )
        self.content = kept

    def find(self, part: str, case: Case) -> dict[str, Any] | None:
        """The row of a case, if it has been made."""
        same = (row for row in self.content[part] if (row["group"], row["label"]) == (case.group, case.label))
        return next(same, None)

    def add(self, part: str, row: dict[str, Any]) -> dict[str, Any]:
        self.content[part].append(row)
        self.save()
        return row

    def save(self) -> None:
        unfinished = self.path.with_name(self.path.name + ".part")
        write_text(unfinished, json.dumps(self.content, indent=1) + "\n")
        unfinished.replace(self.path)


def check(setting: Setting, groups: frozenset[str], console: Console, report: Report) -> bool:
    """Part 1. Returns whether all of ours are within tolerance."""
    table = Table(title="error against the float64 definition (2-norm, worst tensor)", title_justify="left")
    for heading in ("group", "case", "ours", "bar", "peers"):
        table.add_column(heading)
    well = True
    for make in _cases(setting, groups, quick=False):
        case = make()
        if case.group not in groups:
            continue
        row = report.find("errors", case)
        if row is None:
            found = errors(case)
            good = found.get("ours", float("inf")) <= case.tolerance
            row = report.add(
                "errors",
                {
                    "group": case.group,
                    "label": case.label,
                    "errors": found,
                    "tolerance": case.tolerance,
                    "within": good,
                    "failed": dict(case.skipped),
                },
            )
        found, good = row["errors"], row["within"]
        well &= good
        peers = ", ".join(f"{name} {error:.1e}" for name, error in found.items() if name != "ours")
        verdict = f"{found.get('ours', float('nan')):.1e}" + ("" if good else " [red]over[/red]")
        table.add_row(case.group, case.label, verdict, f"{case.tolerance:.0e}", peers)
    console.print(table)
    return well


def case_table(result: dict[str, Any]) -> Table:
    """One measured case; ratios above 1 mean that ours is quicker."""
    table = Table(title=f"{result['group']}: {result['label']}", title_justify="left")
    for heading in (
        "side",
        "pass",
        "ms",
        "p10 - p90",
        "ours is x",
        "peak MiB",
        "TB/s",
        "TFLOP/s",
        "of floor",
    ):
        table.add_column(heading, justify="left" if heading in ("side", "pass") else "right")
    for key, label in (("forward", "forward"), ("both", "fwd + bwd")):
        reference = result["sides"].get("ours", {}).get(key)
        for side, passes in result["sides"].items():
            if key not in passes:
                continue
            row = passes[key]
            ratio = f"{row['median_ms'] / reference['median_ms']:.2f}" if reference and side != "ours" else ""
            table.add_row(
                side,
                label,
                f"{row['median_ms']:.4g}",
                f"{row['p10_ms']:.4g} - {row['p90_ms']:.4g}",
                ratio,
                f"{row['peak_mib']:.1f}",
                f"{row['tb_per_s']:.3g}",
                f"{row['tflop_per_s']:.3g}",
                f"{row['share_of_floor']:.0%}",
            )
    for side, reason in result["failed"].items():
        table.add_row(side, "not run", reason, *[""] * 6)
    return table


def timed(
    make_setting: Callable[[bool], Setting],
    groups: frozenset[str],
    options: argparse.Namespace,
    console: Console,
    report: Report,
) -> None:
    """Part 2, one case at a time so that memory is given back in between.

    Raises UserError if no case has a label as asked for.
    """
    setting = make_setting(False)
    rounds = options.rounds or (30 if setting.gpu else 5)
    shapes = [text.strip() for text in options.shapes.split(",") if text.strip()]
    labels = []
    for make in _cases(setting, groups, options.quick):
        case = make()  # also of those that are left out: inputs are drawn one after the other
        if case.group not in groups:
            continue
        labels.append(case.label)
        if shapes and not any(text in case.label for text in shapes):
            continue
        result = report.find("cases", case)
        if result is None:
            with console.status(f"{case.group}: {case.label}"):
                result = report.add("cases", measure(case, setting, rounds))
        console.print(case_table(result))
        del case
        if setting.gpu:
            torch.cuda.empty_cache()
    for text in shapes:
        if not any(text in label for label in labels):
            raise UserError(f"bench kernels: --shapes {text!r} is in no label; there are {', '.join(labels)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `earlyfusion bench kernels`."""
    options = parser().parse_args(argv)
    if options.rounds < 0:
        raise UserError(
            f"bench kernels: --rounds {options.rounds}; give a positive number, or 0 for the default"
        )
    device = _device(options.device)
    against = _chosen(options.against, PEERS, "--against")
    groups = _chosen(options.only, GROUPS, "--only")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def setting(check: bool) -> Setting:
        generator = torch.Generator(device=device).manual_seed(options.seed)
        return Setting(device, dtype, against, generator, check)

    console = Console()
    if not console.is_terminal:  # a log file has no width; wrapped figures are hard to read
        console = Console(width=150)
    report = Report(Path(options.json), environment(device), options.resume)
    console.print_json(json.dumps(report.content["environment"]))
    well = check(setting(True), groups, console, report)
    if not options.check_only:
        timed(setting, groups, options, console, report)
    report.save()
    console.print(f"saved {options.json}")
    if not well:
        console.print("[red]a kernel of ours misses its tolerance[/red]")
        return 1
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
