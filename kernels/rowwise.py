"""RMS normalisation and the activation of SwiGLU with their gradients in C++ (kernels/cpu/rowwise.cpp): what
training takes for float32 on a CPU.

    y = x r w (* sigmoid(gate)),  r = (mean(x^2) + eps)^-1/2        y = silu(gate) up (* a weight of the row)

Legend: R rows, D width.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.cpu.program import AT, INT, REAL, call, fields, library

ROWS = 256
"""Rows whose contributions to the gradient of a weight are summed together, as in the C++."""


class Norm(ctypes.Structure):
    _fields_ = [("width", INT), ("eps", REAL), *fields(AT, "x weight gate y dy dx dweight dgate")]


class Swiglu(ctypes.Structure):
    _fields_ = [*fields(INT, "width step dstep"), *fields(AT, "gate up weight y dy dgate dup dweight")]


def serves(*tensors: Tensor | None) -> bool:
    """Whether these are what the C++ takes, and it is there."""
    given = [x for x in tensors if x is not None]
    # A tensor of another kind may have no memory: those of a rehearsal (pipeline/planner) have none.
    if torch.compiler.is_compiling() or any(type(x) not in (Tensor, torch.nn.Parameter) for x in given):
        return False
    return all(x.is_cpu and x.dtype == torch.float32 for x in given) and library() is not None


def starts(rows: int) -> list[int]:
    return [*range(0, rows, ROWS), rows]


def sums(rows: int, *shape: int) -> Tensor:
    return torch.zeros(-(-rows // ROWS), *shape, dtype=torch.float32)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


class RmsNorm(torch.autograd.Function):
    """(x [..., D], weight [D], gate like x or None, eps)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
        # Written whole by the C++; statistics are not kept, a row's is a pass over what is in the cache.
        y, rows = x.new_empty(x.shape), _rows(x)
        given = {"x": rows, "weight": weight.contiguous(), "gate": gate if gate is None else _rows(gate)}
        call("norm_rows", Norm(x.shape[-1], eps), starts(len(rows)), **given, y=y)
        ctx.save_for_backward(*given.values())
        ctx.eps = eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        given = dict(zip(("x", "weight", "gate"), ctx.saved_tensors))
        x, gate = given["x"], given["gate"]
        # A block of rows sums for itself, so that threads change no bit.
        dweight = sums(len(x), x.shape[1])
        made = {"dx": torch.empty_like(x), "dgate": None if gate is None else torch.empty_like(gate)}
        call(
            "norm_rows",
            Norm(x.shape[1], ctx.eps),
            starts(len(x)),
            **given,
            **made,
            dy=_rows(dy),
            dweight=dweight,
        )
        dx, dgate = (None if one is None else one.view(dy.shape) for one in made.values())
        return dx, dweight.sum(0), dgate, None


def swiglu_rows(gate_RD: Tensor, up_RD: Tensor, weight_R: Tensor | None) -> Tensor:
    """y [R, D]; gate and up may be halves of wider rows, of one stride. No gradient."""
    y_RD, made = gate_RD.new_empty(gate_RD.shape), Swiglu(gate_RD.shape[1], gate_RD.stride(0))
    call("swiglu_rows", made, starts(len(y_RD)), gate=gate_RD, up=up_RD, weight=weight_R, y=y_RD)
    return y_RD


def swiglu_rows_back(
    gate_RD: Tensor, up_RD: Tensor, weight_R: Tensor | None, dy_RD: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y once more, the gradients of gate and up side by side [R, 2 D], and of the weights."""
    rows, width = gate_RD.shape
    # Side by side, as one product takes them.
    y_RD, dboth = gate_RD.new_empty(rows, width), gate_RD.new_empty(rows, 2 * width)
    dweight_R = None if weight_R is None else torch.empty_like(weight_R)
    made = Swiglu(width, gate_RD.stride(0), 2 * width)
    call(
        "swiglu_rows",
        made,
        starts(rows),
        gate=gate_RD,
        up=up_RD,
        weight=weight_R,
        y=y_RD,
        dy=dy_RD,
        dgate=dboth,
        dup=dboth[:, width:],
        dweight=dweight_R,
    )
    return y_RD, dboth, dweight_R


class Swiglued(torch.autograd.Function):
    """silu(gate) up, of two dense [R, D]."""

    @staticmethod
    def forward(ctx: Any, gate_RD: Tensor, up_RD: Tensor) -> Tensor:
        ctx.save_for_backward(gate_RD, up_RD)
        return swiglu_rows(gate_RD, up_RD, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor, ...]:
        gate_RD, up_RD = ctx.saved_tensors
        return swiglu_rows_back(gate_RD, up_RD, None, dy_RD.contiguous())[1].chunk(2, dim=1)
