"""`earlyfusion doctor`: what is installed, what each kernel operation runs on, and whether it keeps its law.

Exit code 0 when every operation agrees with its naive form within tolerance, 1 when one does not. Warnings
(traps that are known to bite) do not change the exit code. Optional packages are looked up, never imported,
except torchvision, whose import is the trap itself and is tried in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table

from earlyfusion.data.tables import print_table
from earlyfusion.kernels.cpu.build import status
from earlyfusion.kernels.dispatch import table
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.products import quick
from earlyfusion.pipeline.doctor_cases import CASES, TOLERANCE, TOLERANCES, disagreement
from earlyfusion.pipeline.errors import EXIT_FAILURE, EXIT_OK
from earlyfusion.pipeline.runtime import check_versions, installed

PACKAGES = (
    "earlyfusion torch triton transformers accelerate tokenizers safetensors webdataset pydantic easy-vqa"
    " pillow numpy decord timm torchvision fla-core tensorboard"
).split()


def torchvision_works(timeout_s: float = 60.0) -> bool:
    """Whether `import torchvision` succeeds, tried in another process: a failed import poisons the one it
    runs in."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import torchvision"], capture_output=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def traps() -> list[str]:
    """Known traps found on this machine, each with its cure."""
    found = []
    if importlib.util.find_spec("torchvision") is not None and not torchvision_works():
        found.append(
            "torchvision is installed but cannot be imported beside this torch; transformers' vision classes,"
            " timm and the `accelerate` command fail: pip uninstall torchvision timm, or install the build"
            " that fits torch"
        )
    if torch.version.cuda is not None and not torch.cuda.is_available():
        found.append(
            f"torch is a CUDA {torch.version.cuda} build but no GPU is visible; if there is one, look at the"
            " driver and CUDA_VISIBLE_DEVICES; if not, the CPU build (constraints.txt) saves gigabytes"
        )
    has_fla = importlib.util.find_spec("fla") is not None and importlib.util.find_spec("triton") is not None
    if has_fla and not torch.cuda.is_available():
        found.append(
            "fla and triton are installed without a GPU: transformers' KimiLinear then picks GPU kernels and"
            " fails on this CPU; earlyfusion itself does not use them"
        )
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if threads > cores:
        found.append(
            f"torch uses {threads} threads on {cores} cores: set OMP_NUM_THREADS={cores} or train.threads"
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        found.append("TRITON_INTERPRET=1: Triton kernels run interpreted, very slowly, and wrongly in bf16")
    return found


def versions_table() -> Table:
    """Python and the packages that matter, each with its version."""
    out = Table(title="versions", title_justify="left", show_header=False)
    out.add_row("python", f"{platform.python_version()}  {sys.executable}")
    for package in PACKAGES:
        out.add_row(package, installed(package) or "-")
    return out


def devices_table() -> Table:
    """CPU and GPUs, and what each kind of work runs on."""
    out = Table(title="devices", title_justify="left", show_header=False)
    out.add_row(
        "cpu", f"{os.cpu_count()} cores, torch threads {torch.get_num_threads()}, {platform.machine()}"
    )
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        capability = f"sm_{facts.major}{facts.minor}"
        out.add_row(f"cuda:{index}", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, {capability}")
    chosen = "oneDNN (EF_ONEDNN=0: torch's own choice)" if quick() else "torch's own choice"
    out.add_row("float32 products on the cpu", chosen)
    out.add_row("engine on the cpu", status())
    out.add_row("EF_KERNELS", os.environ.get("EF_KERNELS", "auto (not set)"))
    return out


def kernels_table(device: torch.device) -> tuple[Table, list[str]]:
    """The table of operations with their measured disagreement, and the names of those that break their
    law."""
    out = Table(
        title=f"kernels on {device.type} (float32 against the naive float64 law)", title_justify="left"
    )
    for column in ("operation", "verdict", "max relative error", "in", "backend", "where"):
        out.add_column(column, overflow="fold")
    broken: list[str] = []
    for op, backend, where in table(device):
        verdict, worst, tensor = "NO CASE", "-", "-"
        if op in CASES:
            try:
                error, tensor = disagreement(op, device)
                worst = f"{error:.1e}"
                verdict = "ok" if error <= TOLERANCES.get(op, TOLERANCE) else "DISAGREES"
            except Exception as failure:  # whatever a backend raises is its verdict
                verdict, worst, tensor = "FAILS", type(failure).__name__, str(failure)[:80]
        if verdict != "ok":
            broken.append(op)
        out.add_row(op, verdict, worst, tensor, backend, where.removeprefix("earlyfusion."))
    return out, broken


def doctor(
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="whose kernels; auto: the GPU's where there is one")
    ] = "auto",
) -> int:
    """Check versions, devices, kernels and known traps; exit code 1 where a kernel breaks its law."""
    check_versions()
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu")
    chosen = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)

    kernels, broken = kernels_table(chosen)
    for shown in (versions_table(), devices_table(), kernels):
        print_table(console, shown)
    for trap in traps():
        console.print(f"warning: {trap}", markup=False, soft_wrap=True)

    verdict = "all well: every kernel keeps its law"
    if broken:
        verdict = f"not well: {', '.join(broken)} break their law; try EF_KERNELS=naive and report it"
    console.print(verdict, markup=False)
    return EXIT_FAILURE if broken else EXIT_OK
