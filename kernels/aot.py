"""Compile Triton kernels ahead of time, without a GPU, and read what the assembler made of them.

``compile_variant`` compiles one kernel for one architecture and returns registers per thread, spilled bytes,
shared memory and the PTX. A kernel module that defines ``aot_variants() -> list[Variant]`` (or
``aot_variants(arch)``, where tiles depend on the architecture) can be printed as a table:

    python -m earlyfusion.kernels.aot earlyfusion.kernels.kda.triton.aot --arch 90 80 [--json FILE]

The command exits with 1 if a variant spills or asks for more shared memory than a block may have. The process
must not run Triton's interpreter (``TRITON_INTERPRET``); the command removes that variable for itself. Triton
is imported only when something is compiled.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from earlyfusion.kernels.files import write_json

# Shared memory one block may use, bytes (CUDA programming guide,
# compute capabilities table; 1 KiB is reserved).
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(frozen=True)
class Compiled:
    """What came out of one compilation."""

    name: str
    arch: int
    num_warps: int
    registers: int  # per thread
    spills: int  # bytes of local memory per thread
    shared_bytes: int  # per block
    uses_wgmma: bool
    uses_mma: bool  # any tensor core instruction
    ptx: str = field(repr=False)

    @property
    def fits(self) -> bool:
        """No spills and the shared memory of one block suffices."""
        return self.spills == 0 and self.shared_bytes <= SHARED_LIMIT.get(self.arch, 48 * 1024)


@dataclass(frozen=True)
class Variant:
    """One kernel with the types and constants it is launched with. ``signature`` names every run-time
    argument."""

    name: str
    fn: Any
    signature: Mapping[str, Any]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    divisible: tuple[str, ...] = ()  # integer arguments that are multiples of 16; pointers always are
    only_arch: int | None = None  # set where tile sizes depend on the architecture


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of stack per thread) read from a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+)\s+STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump gave no resource usage: {text[:400]!r}")
    return int(found[1]), int(found[2])


def compile_variant(variant: Variant, arch: int, max_registers: int | None = None) -> Compiled:
    """Compile a variant for ``sm_<arch>``; no device is needed. max_registers: cap on registers per thread.

    Raises:
        ValueError: an argument of the kernel is neither in ``signature`` nor in ``constexprs``, or the kernel
            was made under TRITON_INTERPRET.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn, signature, constexprs = variant.fn, variant.signature, variant.constexprs
    if not isinstance(fn, triton.runtime.jit.JITFunction):
        raise ValueError(
            f"compile_variant: fn is a {type(fn).__name__}, expected a triton JITFunction. Under"
            " TRITON_INTERPRET=1 kernels are interpreted; compile in a process without that variable."
        )
    missing = [arg for arg in fn.arg_names if arg not in signature and arg not in constexprs]
    if missing:
        raise ValueError(
            f"compile_variant: {fn.__name__} needs {', '.join(missing)}; give a type or a constant for each"
        )

    # Pointers, also those of a tuple, and the integers named are multiples of 16, as the launcher finds them.
    types = {arg: "constexpr" if arg in constexprs else signature[arg] for arg in fn.arg_names}
    aligned: list[tuple[int, ...]] = []
    for number, (arg, kind) in enumerate(types.items()):
        if isinstance(kind, tuple):
            aligned += [(number, part) for part in range(len(kind))]
        elif kind.startswith("*") or (arg in variant.divisible and kind != "constexpr"):
            aligned.append((number,))
    attrs = {place: [["tt.divisibility", 16]] for place in aligned}

    # No device: the target is named, and what the assembler made is read from the file.
    source = ASTSource(fn=fn, signature=types, constexprs=dict(constexprs), attrs=attrs)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    if max_registers is not None:
        options["maxnreg"] = max_registers
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, stack = _resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return Compiled(
        name=variant.name,
        arch=arch,
        num_warps=variant.num_warps,
        registers=registers,
        spills=stack,
        shared_bytes=compiled.metadata.shared,
        uses_wgmma="wgmma.mma_async" in ptx,
        uses_mma="mma.sync" in ptx or "wgmma.mma_async" in ptx,
        ptx=ptx,
    )


def variants_of(module: str, arch: int) -> list[Variant]:
    """What a module launches on ``sm_<arch>``."""
    make: Callable[..., list[Variant]] = import_module(module).aot_variants
    variants = make(arch) if inspect.signature(make).parameters else make()
    return [variant for variant in variants if variant.only_arch in (None, arch)]


def table(rows: Sequence[Compiled]) -> str:
    """The rows as a Markdown table."""
    headings = ("kernel", "sm", "warps", "registers", "spills, B", "shared, KiB", "tensor cores")
    lines = [headings, ("---",) * len(headings)]
    for row in rows:
        cores = "wgmma" if row.uses_wgmma else "mma"
        shared = f"{row.shared_bytes / 1024:.1f}"
        figures = (row.arch, row.num_warps, row.registers, row.spills, shared, cores if row.uses_mma else "-")
        lines.append((row.name, *map(str, figures)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the variants of the named modules and print the table. 0: all fit, 1: one spills or is too
    large."""
    parser = argparse.ArgumentParser(prog="earlyfusion.kernels.aot", description=__doc__)
    add = parser.add_argument
    add("modules", nargs="+", help="kernel modules that define aot_variants()")
    add("--arch", nargs="+", type=int, default=[90, 80], help="compute capabilities (default: 90 80)")
    add("--only", default="", help="compile only variants whose name contains this (default: all)")
    add("--json", help="also write the rows, without PTX, to this file")
    args = parser.parse_args(argv)

    os.environ.pop("TRITON_INTERPRET", None)
    rows = []
    for module in args.modules:
        for arch in args.arch:
            chosen = [variant for variant in variants_of(module, arch) if args.only in variant.name]
            rows += [compile_variant(variant, arch) for variant in chosen]
    print(table(rows))
    if args.json is not None:
        write_json(args.json, [{**asdict(row), "ptx": "", "fits": row.fits} for row in rows])
    return 0 if rows and all(row.fits for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
