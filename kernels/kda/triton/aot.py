"""Every Triton kernel of this folder with the types and constants it is launched with, for ahead-of-time
compilation.

python -m earlyfusion.kernels.aot earlyfusion.kernels.kda.triton.aot
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from earlyfusion.kernels.aot import Variant
from earlyfusion.kernels.kda.decode import value_block
from earlyfusion.kernels.kda.triton import conv_kernels as triton_conv_kernels
from earlyfusion.kernels.kda.triton import decode as triton_decode
from earlyfusion.kernels.kda.triton import grad as triton_grad
from earlyfusion.kernels.kda.triton import prep as triton_prep
from earlyfusion.kernels.kda.triton import scan as triton_scan
from earlyfusion.kernels.kda.triton.conv import TILE_C, WARPS, tile_rows
from earlyfusion.kernels.kda.triton.plan import tiles

HEAD_DIMS = ((32, 32), (64, 64), (128, 128), (256, 256), (128, 256), (64, 128))
_TYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
_WIDE = {
    "carry",
    "A_log",
    "dt_bias",
    "initial",
    "final",
    "dfinal",
    "dinitial",
    "moves",
    "edge",
    "entry",
    "dA_log",
    "ddt_bias",
}
_INDEX = {
    "run_start",
    "run_end",
    "run_chunk",
    "chunk_start",
    "chunk_length",
    "document_run",
    "position",
    "ids",
    "cu_seqlens",
}
_COUNTS = {"T", "C", "G", "stride_x", "stride_b", "key_dim", "value_dim", "levels"}


def signature(fn: Any, dtype: str, constexprs: dict[str, Any], **override: str) -> dict[str, str]:
    """Types of the run-time arguments, by what their names mean in this folder."""
    types = {}
    for name in fn.arg_names:
        if name in constexprs:
            continue
        if name in override:
            types[name] = override[name]
        elif name in _INDEX:
            types[name] = "*i32"
        elif name in ("scale", "lower_bound"):
            types[name] = "fp32"
        elif name.startswith("stride_") or (name in _COUNTS and name != "T") or name == "tokens":
            types[name] = "i32"
        else:
            types[name] = "*fp32" if name in _WIDE else f"*{dtype}"
    return types


def _variant(
    name: str, fn: Any, dtype: str, blocks: dict[str, int], constexprs: dict[str, Any], **override: str
) -> Variant:
    tile = dict(blocks)
    warps, stages = tile.pop("num_warps"), tile.pop("num_stages")
    constexprs = {**constexprs, **tile}
    types = signature(fn, dtype, constexprs, **override)
    divisible = tuple(
        n for n, t in types.items() if t == "i32" and n.startswith("stride_") and n != "stride_b"
    )
    return Variant(name, fn, types, constexprs, warps, stages, divisible)


def kda_variants(
    dtype: str,
    key_dim: int,
    value_dim: int,
    bounded: bool,
    chunk: int | None = None,
    crowded: bool = False,
    hopper: bool = True,
) -> list[Variant]:
    """All launches of one head shape; with the bounded gate, or crowded, only those that differ."""
    tile = tiles(key_dim, value_dim, dtype == "fp32", crowded, hopper, chunk)
    C = tile.chunk
    dot = _TYPES[dtype]
    precision = {"DOT": dot, "PREC": "tf32x3"}
    dims = {"K": key_dim, "V": value_dim, "C": C}
    pairs = {"BOUNDED": bounded, "GROUP": 1}
    inverse = tl.float32 if dtype == "fp32" else tl.float16
    label = f"{dtype} K{key_dim} V{value_dim} C{C}{' crowded' if crowded else ''}"
    gate = "bounded" if bounded else "softplus"
    made = [
        _variant(
            f"prep {label} {gate}",
            triton_prep.prep,
            dtype,
            tile.prep,
            {"K": key_dim, "C": C, "INV": inverse, **pairs, **precision},
        ),
        _variant(
            f"grad {label} {gate}",
            triton_grad.chunk_gradients,
            dtype,
            tile.grad,
            {**dims, **pairs, **precision},
        ),
    ]
    if bounded:
        return made
    columns = value_dim // tile.dual["BV"]
    ends = {"HAS_INITIAL": True, "HAS_FINAL": True}
    both = {"HAS_INITIAL": True, "HAS_DFINAL": True, "HAS_DINITIAL": True, "COLUMNS": columns}
    scans = [
        _variant(f"scan {label}", triton_scan.forward_scan, dtype, tile.scan, {**dims, **ends, **precision}),
        _variant(f"dual {label}", triton_scan.dual_scan, dtype, tile.dual, {**dims, **both, **precision}),
    ]
    if crowded:
        return scans
    return [
        *made,
        *scans,
        *(
            _variant(
                f"move {label} {way}",
                triton_scan.transition,
                dtype,
                tile.move,
                {**dims, "REVERSE": way == "back", **precision},
                out="*fp32",
            )
            for way in ("forth", "back")
        ),
        _variant(
            f"join {label}",
            triton_scan.combine,
            dtype,
            tile.join,
            {"K": key_dim, "V": value_dim, "HAS_EDGE": True, "REVERSE": False, "PREC": "tf32x3"},
        ),
    ]


def stateless_variants(dtype: str, key_dim: int, value_dim: int, hopper: bool = True) -> list[Variant]:
    """The scans as training launches them by default: no state comes in, none goes out, and the launcher
    passes None."""
    tile = tiles(key_dim, value_dim, dtype == "fp32", False, hopper, None)
    dims = {"K": key_dim, "V": value_dim, "C": tile.chunk, "DOT": _TYPES[dtype], "PREC": "tf32x3"}
    label = f"{dtype} K{key_dim} V{value_dim} C{tile.chunk} without states"
    forward = {**dims, "HAS_INITIAL": False, "HAS_FINAL": False, "initial": None, "final": None}
    columns = value_dim // tile.dual["BV"]
    both = {
        **dims,
        "HAS_INITIAL": False,
        "HAS_DFINAL": False,
        "HAS_DINITIAL": False,
        "COLUMNS": columns,
        "initial": None,
        "dfinal": None,
        "dinitial": None,
    }
    join = {"K": key_dim, "V": value_dim, "HAS_EDGE": False, "REVERSE": True, "PREC": "tf32x3", "edge": None}
    return [
        _variant(f"scan {label}", triton_scan.forward_scan, dtype, tile.scan, forward),
        _variant(f"dual {label}", triton_scan.dual_scan, dtype, tile.dual, both),
        _variant(f"join {label}", triton_scan.combine, dtype, tile.join, join),
    ]


def conv_variants(dtype: str) -> list[Variant]:
    """The three convolution kernels, W = 4."""
    made = []
    for taps in (False, True):
        blocks = {"num_warps": WARPS, "num_stages": 2, "BT": tile_rows(taps), "BC": TILE_C}
        constants: dict[str, Any] = {"HAS_TAPS": taps, "W": 4} | ({} if taps else {"taps": None})
        extra: dict[str, str] = {"T": "i32", "dweight": "*fp32"}
        for name, fn in (
            ("forward", triton_conv_kernels.conv_forward),
            ("backward", triton_conv_kernels.conv_backward),
        ):
            made.append(
                _variant(
                    f"conv {name} {dtype}{' taps' if taps else ''}", fn, dtype, blocks, constants, **extra
                )
            )
    blocks = {"num_warps": 1, "num_stages": 2, "BC": TILE_C}
    made.append(
        _variant(
            f"conv taps backward {dtype}",
            triton_conv_kernels.conv_taps_backward,
            dtype,
            blocks,
            {"W": 4},
            T="i32",
            dweight="*fp32",
        )
    )
    return made


def decode_variants(dtype: str, key_dim: int, value_dim: int) -> list[Variant]:
    """The decoding kernel."""
    blocks = {"num_warps": 4, "num_stages": 3, "BV": value_block(value_dim, key_dim)}
    constants = {"GROUP": 1, "K": key_dim, "V": value_dim, "KP": key_dim, "W": 4, "BOUNDED": False}
    pointers = {"state": "*fp32", "weight": "*fp32", "slot": "*i64", "position": "*i64"}
    counts = {name: "i32" for name in ("slots", "R", "C", "H", "G")}
    label = f"decode {dtype} K{key_dim} V{value_dim}"
    return [_variant(label, triton_decode.decode, dtype, blocks, constants, **pointers, **counts)]


def aot_variants(arch: int = 90) -> list[Variant]:
    """Everything launched on ``sm_<arch>``: both gates for each head shape in bfloat16, one shape in float16,
    two in float32, the smaller chunks, the convolution, decoding."""
    hopper = arch >= 90
    made: list[Variant] = []
    for key_dim, value_dim in HEAD_DIMS:
        for bounded in (False, True):
            made += kda_variants("bf16", key_dim, value_dim, bounded, hopper=hopper)
        if hopper and key_dim < 256 and value_dim >= 64:
            made += kda_variants("bf16", key_dim, value_dim, False, crowded=True)
    made += stateless_variants("bf16", 128, 128, hopper)
    for chunk in (16, 32) if hopper else (16,):
        made += kda_variants("bf16", 128, 128, False, chunk, hopper=hopper)
    made += kda_variants("fp16", 128, 128, False, hopper=hopper)
    made += kda_variants("fp32", 32, 32, False) + kda_variants("fp32", 64, 64, False)
    for key_dim, value_dim in ((64, 64), (128, 128), (256, 256)):
        made += decode_variants("bf16", key_dim, value_dim)
    return made + conv_variants("bf16") + conv_variants("fp32")
