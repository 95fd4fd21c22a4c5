"""`earlyfusion doctor`: what is installed, what each kernel operation runs on, and whether it keeps its law.

Exit code 0 when every operation agrees with its naive form within tolerance, 1 when one does not. Warnings
(traps that are known to bite) do not change the exit code. Optional packages are looked up, never imported,
except torchvision, whose import is the trap itself and is tried in a process of its own.
"""

import importlib.util
import os
import platform
import subprocess
import sys
from typing import Annotated, Literal

import torch
import typer
from rich.table import Table

from earlyfusion.data.tables import print_table
from earlyfusion.eval.website.browser import find_browser
from earlyfusion.kernels.cpu.program import status
from earlyfusion.kernels.dispatch import table
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.products import halves_pay, quick
from earlyfusion.pipeline.bench.case import Setting, errors
from earlyfusion.pipeline.bench.cases import CASES
from earlyfusion.pipeline.errors import EXIT_FAILURE, EXIT_OK
from earlyfusion.pipeline.runtime import check_versions, installed

# Whatever a report of a problem should name.
PACKAGES = (
    "earlyfusion torch triton transformers accelerate tokenizers safetensors webdataset pydantic easy-vqa"
    " pillow numpy decord av playwright scikit-image timm torchvision fla-core tensorboard"
).split()


def has(package: str) -> bool:
    """Whether a package is installed; it is not imported."""
    return importlib.util.find_spec(package) is not None


def torchvision_works() -> bool:
    """Whether `import torchvision` succeeds, in another process: a failed one poisons its own."""
    return subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode == 0


def traps() -> list[str]:
    """Known traps found on this machine, each with its cure."""
    # Each text names the trap and the way out; its value says whether it bites here.
    threads, cores, seen = torch.get_num_threads(), os.cpu_count() or 1, torch.cuda.is_available()
    known = {
        "torchvision is installed but cannot be imported beside this torch; transformers' vision classes,"
        " timm and the `accelerate` command fail: pip uninstall torchvision timm, or install the build"
        " that fits torch": has("torchvision") and not torchvision_works(),
        f"torch is a CUDA {torch.version.cuda} build but no GPU is visible; if there is one, look at the"
        " driver and CUDA_VISIBLE_DEVICES; if not, the CPU build (constraints.txt) saves gigabytes": (
            torch.version.cuda is not None and not seen
        ),
        "fla and triton are installed without a GPU: transformers' KimiLinear then picks GPU kernels and"
        " fails on this CPU; earlyfusion itself does not use them": has("fla") and has("triton") and not seen,
        f"torch uses {threads} threads on {cores} cores: set OMP_NUM_THREADS={cores} or train.threads": (
            threads > cores
        ),
        "TRITON_INTERPRET=1: Triton kernels run interpreted, very slowly, and wrongly in bf16": (
            os.environ.get("TRITON_INTERPRET") == "1"
        ),
    }
    return [text for text, bites in known.items() if bites]


def facts() -> dict[str, str]:
    """Versions, devices, and what each kind of work runs on."""
    found = {"python": f"{platform.python_version()}  {sys.executable}"}
    # Looked up, never imported: an import may be the very trap.
    for package in PACKAGES:
        found[package] = installed(package) or "-"
    found["cpu"] = f"{os.cpu_count()} cores, torch threads {torch.get_num_threads()}, {platform.machine()}"
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        found[f"cuda:{index}"] = f"{gpu.name}, {memory}, sm_{gpu.major}{gpu.minor}"
    found["float32 products on the cpu"] = "torch's own choice"
    if quick():
        found["float32 products on the cpu"] = "oneDNN (EF_ONEDNN=0: torch's own choice)"
    pay = "quicker: train.cpu_products" if halves_pay() else "not quicker"
    found["bfloat16 products on the cpu"] = pay
    # Building its C++ may fail for reasons that nothing else shows.
    found["engine on the cpu"] = status()
    try:
        found["browser for websites"] = find_browser()
    except UserError as error:
        found["browser for websites"] = f"- ({error})"
    found["EF_KERNELS"] = os.environ.get("EF_KERNELS", "auto (not set)")
    return found


def worst_errors(device: torch.device) -> dict[str, float]:
    """Operation -> its worst case's error as a share of what is allowed."""
    found: dict[str, float] = {}
    # float32 on small odd shapes: an error here is a mistake, not a rounding.
    setting = Setting(device, torch.float32, check=True)
    for cases in CASES.values():
        setting.generator.manual_seed(0)
        for case in cases(setting):
            share = errors(case)["ours"] / case.tolerance
            for op in case.ops.split():
                # An operation is as good as its worst case.
                found[op] = max(share, found.get(op, share))
    return found


def doctor(
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="whose kernels; auto: the GPU's where there is one")
    ] = "auto",
) -> int:
    """Check versions, devices, kernels and known traps; exit code 1 where a kernel breaks its law."""
    check_versions()
    gpu = torch.cuda.is_available()
    if device == "cuda" and not gpu:
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu")
    chosen = torch.device("cuda" if device != "cpu" and gpu else "cpu")

    machine = Table(title="versions and devices", title_justify="left", show_header=False)
    for fact in facts().items():
        machine.add_row(*fact)
    kernels = Table(title=f"kernels on {chosen.type} (float32 against the naive float64 law)")
    for column in ("operation", "verdict", "share of the tolerance", "backend", "where"):
        kernels.add_column(column, overflow="fold")
    found, broken = worst_errors(chosen), []
    for op, backend, where in table(chosen):
        # An operation without a case is not known to be well.
        share, verdict = found.get(op, float("inf")), "ok"
        # NaN is no agreement either.
        if not share <= 1:
            verdict = "BROKEN"
            broken.append(op)
        kernels.add_row(op, verdict, f"{share:.1e}", backend, where.removeprefix("earlyfusion."))

    for shown in (machine, kernels):
        print_table(shown)
    for trap in traps():
        print(f"warning: {trap}")
    if broken:
        print(f"not well: {', '.join(broken)} break their law; try EF_KERNELS=naive and report it")
        return EXIT_FAILURE
    print("all well: every kernel keeps its law")
    return EXIT_OK
