"""Compile Triton kernels ahead of time, without a GPU, and read what the assembler made of them.

Every operation is called here as a model calls it, forward and backward, on tensors of the CPU; a launch
compiles its kernel for the architecture asked for and runs nothing. So what is compiled is what the launchers
launch: their tiles, their constants, and what Triton itself makes of the arguments (pointers and strides that
are multiples of 16, integers that are 1).

    python tests/kernels/aot.py [OPERATION ...] [--arch 90 80] [--only PART]

prints a table: registers per thread, spilled bytes, shared memory of a block. It exits with 1 if a kernel
spills or asks for more shared memory than a block may have. Triton's interpreter (``TRITON_INTERPRET``) must
be off in the process; the command turns it off for itself.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from earlyfusion.kernels import launch
from earlyfusion.kernels.dispatch import ENVIRONMENT, resolve
from earlyfusion.kernels.kda.decode import DecodeCache, decode
from earlyfusion.kernels.segments import Segments

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MULTIPROCESSORS = 132  # of the GPU that is pretended: an H100's

# Shared memory one block may use, bytes (CUDA programming guide, compute capabilities table; 1 KiB is
# reserved).
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


class Compiled(NamedTuple):
    """What came out of one compilation."""

    name: str
    arch: int
    num_warps: int
    registers: int  # per thread
    spills: int  # bytes of local memory per thread
    shared_bytes: int  # per block
    cores: str  # the tensor core instructions used: wgmma, mma or -
    fits: bool  # no spills, and the shared memory of one block suffices
    ptx: str


Use = tuple[str, str, Callable[[], Any]]
"""(operation, label, one use of it): every launch in it is compiled."""


# ---- what is launched: every operation, at the shapes of the models ----


def leaf(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype).requires_grad_()


def leaves(count: int, *shape: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [leaf(*shape, dtype=dtype) for _ in range(count)]


def use(op: str, *args: Any, **options: Any) -> None:
    """An operation's Triton form, forward and, where something has a gradient, backward."""
    roots: list[Tensor] = []
    # Outputs may be tuples of tuples; whatever has a gradient is asked for it.
    pending = [resolve(op, "cpu")(*args, **options)]
    while pending:
        part = pending.pop()
        if isinstance(part, tuple):
            pending += part
        elif part is not None and part.requires_grad:
            roots.append(part)
    if roots:
        torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])


def use_kda(
    key_dim: int, value_dim: int, dtype: torch.dtype, documents: int, states: bool, **options: Any
) -> None:
    """Documents of 130 tokens: two whole chunks and a rest. With 32 heads, five of them fill the device."""
    # A last chunk that is not full: the masks must be compiled as well.
    tokens, segments = (130 * documents, 32), Segments((130,) * documents)
    q, k, f = leaves(3, *tokens, key_dim, dtype=dtype)
    v, b = leaf(*tokens, value_dim, dtype=dtype), leaf(*tokens, dtype=dtype)
    if states:
        state = leaf(documents, 32, key_dim, value_dim, dtype=FP32)
        options |= {"initial_state_NGKV": state, "output_final_state": True}
    use("kda", q, k, v, f, b, leaf(32, dtype=FP32), leaf(32, key_dim, dtype=FP32), segments, **options)


def kda() -> Iterator[Use]:
    """Both gates for each head shape in bfloat16, whole documents and segments of them, few documents and
    many, these with states and without; the smaller chunks; one shape in float16, two in float32. One decode
    step."""
    half = (128, 128, BF16)
    segmented: Any = {"segment_chunks": 1}
    for key_dim, value_dim in ((32, 32), (64, 64), (128, 128), (256, 256), (128, 256), (64, 128)):
        label, shape = f"bfloat16 K{key_dim} V{value_dim}", (key_dim, value_dim, BF16)
        for bound in (None, -5.0):
            call = partial(use_kda, *shape, 1, True, **segmented, lower_bound=bound)
            yield "kda", f"{label} bound {bound}", call
        yield "kda", f"{label} crowded", partial(use_kda, *shape, 5, True, segment_chunks=0)
        yield "kda", f"{label} alone", partial(use_kda, *shape, 5, False, segment_chunks=0)
    for count in (0, 1):
        yield "kda", f"bfloat16 stateless {count}", partial(use_kda, *half, 1, False, segment_chunks=count)
    for chunk in (16, 32):
        yield "kda", f"bfloat16 C{chunk}", partial(use_kda, *half, 1, True, **segmented, chunk=chunk)
    for dim, dtype in ((128, FP16), (32, FP32), (64, FP32)):
        yield "kda", f"{dtype} K{dim}", partial(use_kda, dim, dim, dtype, 1, True, **segmented)

    for dim in (64, 128, 256):
        rows = [torch.zeros(5, *shape, dtype=BF16) for shape in ((96 * dim,), (32, dim), (32,))]
        gate = torch.zeros(96 * dim, 4), torch.zeros(32), torch.zeros(32, dim)
        cache, slots = DecodeCache.new(64, 32, 32, dim, dim), torch.arange(5)
        inputs: list[Any] = [*rows, *gate, cache, slots, slots]
        for bound in (None, -5.0):
            yield "kda_decode", f"K{dim} bound {bound}", partial(decode, *inputs, lower_bound=bound)


def uses() -> Iterator[Use]:
    yield from kda()

    # Not a multiple of 16: what the launcher may assume of a length is the least.
    segments, tokens = Segments((200, 9)), 209
    for dtype in (BF16, FP32):
        x, weight = leaf(tokens, 2304, dtype=dtype), leaf(2304, 4, dtype=FP32)
        yield "short_conv", f"{dtype}", partial(use, "short_conv", x, weight, segments)
        # Taps come in where nobody wants a gradient.
        taps = {"initial_taps_NCW1": torch.zeros(2, 2304, 3, dtype=dtype)}
        read = x.detach(), weight.detach(), segments
        yield "short_conv", f"{dtype} with taps", partial(use, "short_conv", *read, **taps)

    # MLA of 192 and 128, also after earlier keys and with its largest logits; the towers' 72 and 128.
    for heads, width, value, causal in ((32, 192, 128, True), (16, 72, 72, False), (12, 128, 128, False)):
        attend = *leaves(2, tokens, heads, width), leaf(tokens, heads, value), segments
        yield "attention", str(width), partial(use, "attention", *attend, causal=causal, scale=0.1)
    q, k, v = (leaf(tokens, 32, dim) for dim in (192, 192, 128))
    append = q[:150], k, v, Segments((141, 9)), segments
    yield "attention", "append", partial(use, "attention_append", *append, scale=0.1)
    largest = q, k, torch.zeros(tokens, 32), segments
    yield "attention", "192", partial(use, "max_logit", *largest, causal=True, scale=0.1, tau=100.0)
    for heads, dim in ((16, 72), (12, 128)):
        turns = torch.zeros(tokens, dim // 2, dtype=torch.complex64)
        yield "qkv_rope", str(dim), partial(use, "qkv_rope", leaf(tokens, 3, heads, dim), turns)
    query, pages = torch.zeros(5, 32, 576, dtype=BF16), torch.zeros(9, 64, 576, dtype=BF16)
    table, lengths = torch.zeros(5, 40, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    yield "mla_decode", "512 + 64", partial(use, "mla_decode", query, pages, table, lengths, 512, 0.1)

    # 48B (9 blocks), a width of 4,096, K3, and one mix over all 54 sources.
    shapes = ("48B", 9, 6, 2304), ("d4096", 5, 8, 4096), ("K3", 8, 24, 7168), ("full", 54, 1, 2304)
    for label, count, queries, width in shapes:
        opened = leaves(count, tokens, width), leaf(queries, width, dtype=FP32)
        yield "attnres", label, partial(use, "attnres_phase1", *opened, 1e-5)
        o1, *sums = leaves(3, tokens, width)
        step = o1, leaf(tokens, dtype=FP32), *sums, *leaves(2, width, dtype=FP32)
        yield "attnres", label, partial(use, "attnres_step", *step, 1e-5, 1e-5)

    # The widths of the 48B model, and its vocabulary.
    ids, weights = torch.zeros(401, 2, dtype=torch.int64), leaf(401, 2, dtype=FP32)
    experts = leaf(401, 2304), ids, weights, leaf(4, 2048, 2304), leaf(4, 2304, 1024)
    yield "moe_experts", "48B", partial(use, "moe_experts", *experts)
    head = leaf(33, 64), leaf(163_840, 64), torch.zeros(33, dtype=torch.int64)
    yield "loss", "cross-entropy", partial(use, "linear_cross_entropy", *head, torch.ones(33))
    yield "loss", "log-probabilities", partial(use, "token_log_probs", *head)
    for batch, wanted in ((2, None), (1, None), (1, FP32)):
        gradients = torch.zeros(batch, 256, 528)
        yield "newton_schulz", f"{batch} {wanted}", partial(use, "newton_schulz", gradients, dtype=wanted)


# ---- the device that compiles ----


def cuobjdump(cubin: bytes, option: str) -> str:
    """What the program that comes with Triton prints of a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of stack per thread) read from a cubin."""
    text = cuobjdump(cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+)\s+STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump gave no resource usage: {text[:400]!r}")
    return int(found[1]), int(found[2])


def _compiled(name: str, arch: int, kernel: Any) -> Compiled:
    ptx, warps, shared = kernel.asm["ptx"], kernel.metadata.num_warps, kernel.metadata.shared
    registers, stack = resources(kernel.asm["cubin"])
    cores = "-"
    if "wgmma.mma_async" in ptx:
        cores = "wgmma"
    elif "mma.sync" in ptx:
        cores = "mma"
    fits = stack == 0 and shared <= SHARED_LIMIT.get(arch, 48 * 1024)
    return Compiled(name, arch, warps, registers, stack, shared, cores, fits, ptx)


Launcher = Callable[..., Any]
"""(compile, kernel's function, its arguments, grid, options) of a launch that is not made."""


@contextmanager
def compiling(arch: int, launched: Launcher) -> Iterator[None]:
    """Launches of Triton kernels go to `launched`, on a machine without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    function = triton.runtime.jit.JITFunction
    original, before = function.run, launch.OFF_GPU

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launched(partial(original, self, grid=grid, warmup=True), self, args, grid, options)

    # Triton asks its driver for the target; ours needs no device. The key of Triton's caches is the current
    # device: one set of kernels for each architecture.
    compiler = SimpleNamespace(
        get_current_device=lambda: arch,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
    )
    driver.set_active(compiler)
    # On CPU tensors, too.
    os.environ[ENVIRONMENT] = "triton"
    launch.OFF_GPU, function.run = launch.Hardware(arch, MULTIPROCESSORS), run
    try:
        yield
    finally:
        function.run, launch.OFF_GPU = original, before


def compile_operation(
    operation: str, arch: int, only: str = "", ones: bool = False, **overrides: Any
) -> list[Compiled]:
    """Every kernel that an operation launches, each once; nothing of it runs.

    only: kernels whose "name label" contains this. ones: all integer arguments are 1. overrides: options of
    the launches, such as maxnreg (a cap on registers per thread).
    """
    import triton

    made: dict[int, tuple[str, Any]] = {}
    labels: list[str] = []

    def launched(compile: Launcher, kernel: Any, args: tuple[Any, ...], grid: Any, options: Any) -> None:
        name = f"{kernel.__name__} {labels[-1]}"
        if only not in name:
            return
        # What the launcher does by itself with an argument of 1.
        if ones:
            args = tuple(1 if type(x) is int else x for x in args)
        # Triton up to 3.6 hands on nothing else of a named tuple of constants: see launch.constant.
        plain = int, float, triton.language.dtype, triton.language.constexpr
        for constants in (value for value in options.values() if isinstance(value, tuple)):
            strays = [part for part in constants if not isinstance(part, plain)]
            assert not strays, f"{kernel.__name__}: {strays} are no numbers; wrap them in launch.constant"
        found = compile(*args, **{**options, **overrides})
        made.setdefault(id(found), (name, found))  # Triton gives the same object for the same launch

    with compiling(arch, launched):
        for name, label, call in uses():
            if name == operation:
                labels.append(label)
                call()
    return [_compiled(name, arch, kernel) for name, kernel in made.values()]


def main() -> int:
    """Compile and print the table. 0: all fit, 1: one spills or is too large."""
    parser = argparse.ArgumentParser(prog="aot.py", description=__doc__)
    add = parser.add_argument
    add("operations", nargs="*", help="such as kda (default: all)")
    add("--arch", nargs="+", type=int, default=[90, 80], help="compute capabilities (default: 90 80)")
    add("--only", default="", help="compile only kernels whose name contains this (default: all)")
    args = parser.parse_args()

    os.environ.pop("TRITON_INTERPRET", None)
    rows: list[Compiled] = []
    for operation in args.operations or dict.fromkeys(name for name, *_ in uses()):
        for arch in args.arch:
            rows += compile_operation(operation, arch, args.only)

    # A table in Markdown.
    columns = Compiled._fields[:-2]
    for line in (columns, ("---",) * len(columns), *(row[:-2] for row in rows)):
        print(f"| {' | '.join(map(str, line))} |")
    return 0 if rows and all(row.fits for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
