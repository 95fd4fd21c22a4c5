"""What an operation asks of its arguments. An argument's name says its shape: q_THK is [T, H, K].

Kernels trust their pointers, so what could make one read outside its tensor is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what the Triton kernels read and write
INTEGERS = (torch.int32, torch.int64)


def check_shapes(
    op: str, known: Mapping[str, int] | None = None, /, **tensors: Tensor | None
) -> dict[str, int]:
    """The size of every letter, among them those that are known before; None is left out.

    The letters after an argument's last underscore are its axes; a letter stands for one size throughout, a
    digit for itself.

    Raises:
        ValueError: naming the first argument that does not fit, what was given and what was expected.
    """
    sizes = dict(known or {})
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        # The naming rule of this room is the specification.
        axes = name.rpartition("_")[2]
        expected = [int(axis) if axis.isdigit() else sizes.get(axis) for axis in axes]
        shape = tuple(tensor.shape)
        fits = len(shape) == len(axes)
        for size, wanted in zip(shape, expected):
            fits = fits and wanted in (None, size)
        if not fits:
            fixed = [f"{axis} = {sizes[axis]}" for axis in axes if axis in sizes]
            given = f" with {', '.join(fixed)}" if fixed else ""
            raise ValueError(f"{op}: {name} is {shape}; expected [{', '.join(axes)}]{given}")
        # The first argument that has an axis fixes its size.
        sizes.update(zip(axes, shape))
    return sizes


def check_multiple(op: str, what: str, size: int, of: str, unit: int) -> None:
    """ValueError unless ``size`` whats are a multiple of ``unit`` ofs."""
    if unit < 1 or size % unit:
        raise ValueError(f"{op}: {size} {what} for {unit} {of}; expected a multiple")


def check_tensors(
    op: str,
    like: Tensor,
    dtypes: Sequence[torch.dtype] = FLOATS,
    layout: str = "contiguous",
    /,
    **tensors: Tensor | None,
) -> None:
    """Dtype, device (that of ``like``) and layout: "contiguous", "rows" (unit stride on the last axis) or
    "any".

    Raises:
        ValueError: naming the argument, what was given and what was expected.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            # Text is made only when something is wrong: checks run at every call.
            allowed = ", ".join(str(dtype) for dtype in dtypes)
            raise ValueError(f"{op}: {name} is {tensor.dtype}; expected {allowed}")
        if tensor.device != like.device:
            raise ValueError(f"{op}: {name} is on {tensor.device}; expected {like.device} like the first")
        dense = layout == "any" or tensor.is_contiguous()
        if layout == "rows" and tensor.ndim:
            dense = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
        if not dense:
            raise ValueError(f"{op}: {name} has strides {tensor.stride()}; pass {name}.contiguous()")
