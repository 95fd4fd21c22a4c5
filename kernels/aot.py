"""Compile Triton kernels ahead of time, without a GPU, and read what the assembler made of them.

``compile_for`` compiles one kernel for one architecture and returns registers per thread, spilled bytes,
shared memory and the PTX. A kernel module that defines ``aot_variants() -> list[Variant]`` (or
``aot_variants(arch)``, where tiles depend on the architecture) can be printed as a table:

    python -m earlyfusion.kernels.aot earlyfusion.kernels.kda.triton_fwd --arch 90 80 [--json FILE]

The command exits with 1 if a variant spills or asks for more shared memory than a block may have. The process
must not run Triton's interpreter (``TRITON_INTERPRET``); the command removes that variable for itself. Triton
is imported only when something is compiled.
"""

from __future__ import annotations

import argparse
import inspect
import json
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

# Shared memory one block may use, bytes (CUDA programming guide, compute capabilities table; 1 KiB is
# reserved).
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


def compile_for(
    fn: Any,
    signature: Mapping[str, Any],
    constexprs: Mapping[str, Any],
    *,
    arch: int = 90,
    num_warps: int = 4,
    num_stages: int = 2,
    divisible: Sequence[str] = (),
    max_registers: int | None = None,
    name: str | None = None,
) -> Compiled:
    """Compile ``fn`` (a ``@triton.jit`` function) for ``sm_<arch>``; no device is needed.

    Args:
        signature: type of every run-time argument by name, for instance ``{"x": "*bf16", "n": "i32"}``; a
        tuple of
            pointers is a tuple of types.
        constexprs: value of every ``tl.constexpr`` argument by name.
        divisible: integer arguments to be taken as multiples of 16, as the launcher does when they are.
        max_registers: cap on registers per thread (``maxnreg`` of a launch).

    Raises:
        ValueError: an argument of the kernel is neither in ``signature`` nor in ``constexprs``, or ``fn`` was
        made
            under TRITON_INTERPRET.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(fn, triton.runtime.jit.JITFunction):
        raise ValueError(
            f"compile_for: fn is a {type(fn).__name__}, expected a triton JITFunction. Under"
            " TRITON_INTERPRET=1 kernels are interpreted; compile in a process without that variable."
        )
    missing = [arg for arg in fn.arg_names if arg not in signature and arg not in constexprs]
    if missing:
        raise ValueError(
            f"compile_for: {fn.__name__} needs {', '.join(missing)}; give a type or a constant for each"
        )
    types = {arg: "constexpr" if arg in constexprs else signature[arg] for arg in fn.arg_names}
    aligned = [["tt.divisibility", 16]]
    attrs: dict[tuple[int, ...], Any] = {}
    for i, arg in enumerate(fn.arg_names):
        if isinstance(types[arg], tuple):  # a tuple of pointers
            for j in range(len(types[arg])):
                attrs[(i, j)] = aligned
        elif types[arg].startswith("*") or (arg in divisible and types[arg] != "constexpr"):
            attrs[(i,)] = aligned
    source = ASTSource(fn=fn, signature=types, constexprs=dict(constexprs), attrs=attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    if max_registers is not None:
        options["maxnreg"] = max_registers
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, stack = _resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return Compiled(
        name=name or fn.__name__,
        arch=arch,
        num_warps=num_warps,
        registers=registers,
        spills=stack,
        shared_bytes=compiled.metadata.shared,
        uses_wgmma="wgmma.mma_async" in ptx,
        uses_mma="mma.sync" in ptx or "wgmma.mma_async" in ptx,
        ptx=ptx,
    )


def compile_variants(variants: Sequence[Variant], archs: Sequence[int] = (90,)) -> list[Compiled]:
    """Every variant for every architecture, variants outermost."""
    return [
        compile_for(
            v.fn,
            v.signature,
            v.constexprs,
            arch=arch,
            num_warps=v.num_warps,
            num_stages=v.num_stages,
            divisible=v.divisible,
            name=v.name,
        )
        for v in variants
        for arch in archs
        if v.only_arch in (None, arch)
    ]


def format_table(rows: Sequence[Compiled]) -> str:
    """The rows as a Markdown table."""
    width = max((len(row.name) for row in rows), default=6)
    lines = [
        f"| {'kernel':{width}} | sm | warps | registers | spills, B | shared, KiB | tensor cores |",
        f"|{'-' * (width + 2)}|----|-------|-----------|-----------|-------------|--------------|",
    ]
    for row in rows:
        cores = "wgmma" if row.uses_wgmma else "mma" if row.uses_mma else "-"
        lines.append(
            f"| {row.name:{width}} | {row.arch} | {row.num_warps:5} | {row.registers:9} | {row.spills:9} "
            f"| {row.shared_bytes / 1024:11.1f} | {cores:12} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the variants of the named modules and print the table. 0: all fit, 1: one spills or is too
    large."""
    parser = argparse.ArgumentParser(
        prog="earlyfusion.kernels.aot", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("modules", nargs="+", help="kernel modules that define aot_variants()")
    parser.add_argument(
        "--arch", nargs="+", type=int, default=[90, 80], help="compute capabilities (default: 90 80)"
    )
    parser.add_argument(
        "--only", default="", help="compile only variants whose name contains this (default: all)"
    )
    parser.add_argument(
        "--json", type=Path, default=None, help="also write the rows, without PTX, to this file"
    )
    args = parser.parse_args(argv)
    os.environ.pop("TRITON_INTERPRET", None)
    rows: list[Compiled] = []
    for module in args.modules:
        make: Callable[..., list[Variant]] = import_module(module).aot_variants
        by_arch = bool(inspect.signature(make).parameters)
        for arch in args.arch:
            variants = make(arch) if by_arch else make()
            rows += compile_variants([v for v in variants if args.only in v.name], [arch])
    print(format_table(rows))
    if args.json is not None:
        plain = [{k: v for k, v in asdict(row).items() if k != "ptx"} | {"fits": row.fits} for row in rows]
        args.json.write_text(json.dumps(plain, indent=1))
    return 0 if rows and all(row.fits for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
