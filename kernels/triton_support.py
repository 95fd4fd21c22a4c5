"""What every Triton launcher needs: is triton there, is it interpreted, which dtype do dots run in, are
arguments sane.

Nothing here imports triton at module level, so a machine without it can import every launcher.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CHECKS = "EF_KERNEL_CHECKS"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def require_triton(op: str) -> Any:
    """The triton module, or an ImportError that says how to get it."""
    try:
        import triton
    except ImportError as error:
        raise ImportError(
            f"{op}: the triton backend needs triton, which is not installed; pip install"
            " 'earlyfusion[triton]', or set EF_KERNELS=torch"
        ) from error
    return triton


def interpreted(kernel: Any) -> bool:
    """True if ``kernel`` was defined under TRITON_INTERPRET=1 and therefore runs on CPU tensors, in numpy."""
    return type(kernel).__name__ == "InterpretedFunction"


def dot_dtype(dtype: torch.dtype, kernel: Any) -> torch.dtype:
    """Dtype of matrix product operands: that of the inputs; float32 under the interpreter, whose bfloat16 is
    broken."""
    return torch.float32 if interpreted(kernel) else dtype


def as_triton(dtype: torch.dtype) -> Any:
    """The ``tl`` dtype of a torch dtype."""
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def checks_wanted(tensor: Tensor) -> bool:
    """Look for NaN in arguments? Off CUDA always; on CUDA, where looking costs a host sync, with
    EF_KERNEL_CHECKS=1."""
    return tensor.device.type != "cuda" or os.environ.get(CHECKS, "0") == "1"


def check_floats(op: str, like: Tensor, **tensors: Tensor | None) -> None:
    """Every tensor stands on the device of ``like``, has a float dtype of 32 or 16 bits, and unit stride on
    its last axis.

    Raises:
        ValueError: naming the argument, what was given and what was expected.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{op}: {name} is {tensor.dtype}; expected float32, bfloat16 or float16")
        if tensor.device != like.device:
            raise ValueError(
                f"{op}: {name} is on {tensor.device}, but the first argument is on {like.device}"
            )
        if tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{op}: {name} has strides {tensor.stride()}; expected unit stride on the last axis. "
                f"Pass {name}.contiguous()."
            )


def check_same_dtype(op: str, **tensors: Tensor) -> None:
    """The tensors share one dtype; ValueError naming the first that differs from the first given."""
    first, *others = tensors.items()
    for name, tensor in others:
        if tensor.dtype != first[1].dtype:
            raise ValueError(
                f"{op}: {name} is {tensor.dtype} but {first[0]} is {first[1].dtype}; give both one dtype"
            )


def check_shape(op: str, name: str, tensor: Tensor, expected: Sequence[int], legend: str) -> None:
    """ValueError unless the tensor has exactly the expected shape."""
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{op}: {name} is {tuple(tensor.shape)}; expected {legend} = {tuple(expected)}")


def check_no_nan(op: str, **tensors: Tensor | None) -> None:
    """ValueError naming the first tensor that holds a NaN; see :func:`checks_wanted` for when this looks."""
    for name, tensor in tensors.items():
        if tensor is not None and checks_wanted(tensor) and bool(tensor.isnan().any()):
            raise ValueError(
                f"{op}: {name} holds NaN; find where it was made before the recurrence spreads it"
            )
