"""Both phases of attention over residual sources in C++ (kernels/cpu/residual.cpp), with their gradients:
what two_phase.py takes for float32 on a CPU.

Legend: n sources, S sub-layers (queries), T tokens, D hidden.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.cpu.program import AT, INT, REAL, call, fields
from earlyfusion.kernels.rowwise import starts, sums


class Residual(ctypes.Structure):
    _fields_ = [
        *fields(INT, "sources queries width"),
        ("eps", REAL),
        *fields(AT, "v qw o lse d_o d_lse dv dqw"),
    ]


class Merging(ctypes.Structure):
    _fields_ = [
        ("width", INT),
        ("eps", REAL),
        *fields(AT, "o1 lse partial qw h dh d_o1 d_lse dpartial dqw"),
    ]


class Phase1(torch.autograd.Function):
    """(qw_SD, eps, n sources) to S mixtures and S log-sum-exps."""

    @staticmethod
    def forward(ctx: Any, qw_SD: Tensor, eps: float, *sources: Tensor) -> tuple[Tensor, ...]:
        qw, v = qw_SD.contiguous(), [source.contiguous() for source in sources]
        # Separate tensors: gradients of parts of one would be put together again.
        rows, width = v[0].shape
        o = [qw.new_empty(rows, width) for _ in qw]
        lse = [qw.new_empty(rows) for _ in qw]
        made = Residual(len(v), len(qw), width, eps)
        call("residual_mix", made, starts(rows), v=v, qw=qw, o=o, lse=lse)
        ctx.save_for_backward(qw_SD, *sources)
        ctx.eps = eps
        return *o, *lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        qw, *v = (tensor.contiguous() for tensor in ctx.saved_tensors)
        (rows, width), queries = v[0].shape, len(qw)
        dense = [gradient.contiguous() for gradient in gradients]
        dv, dqw = [torch.empty_like(source) for source in v], sums(rows, queries, width)
        made = Residual(len(v), queries, width, ctx.eps)
        about = {"d_o": dense[:queries], "d_lse": dense[queries:]}
        call("residual_mix", made, starts(rows), v=v, qw=qw, dv=dv, dqw=dqw, **about)
        return dqw.sum(0), None, *dv


class Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, o1_TD: Tensor, lse1_T: Tensor, partial_TD: Tensor, qw_D: Tensor, eps: float
    ) -> Tensor:
        given = [tensor.contiguous() for tensor in (o1_TD, lse1_T, partial_TD, qw_D)]
        rows, width = partial_TD.shape
        h_TD = partial_TD.new_empty(rows, width)
        named = dict(zip(("o1", "lse", "partial", "qw"), given))
        call("residual_merge", Merging(width, eps), starts(rows), **named, h=h_TD)
        ctx.save_for_backward(*given)
        ctx.eps = eps
        return h_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_TD: Tensor) -> tuple[Tensor | None, ...]:
        # As they were handed over, dense.
        named = dict(zip(("o1", "lse", "partial", "qw"), ctx.saved_tensors))
        rows, width = dh_TD.shape
        made = {"d_o1": named["o1"], "d_lse": named["lse"], "dpartial": named["partial"]}
        made = {name: torch.empty_like(like) for name, like in made.items()}
        dqw = sums(rows, width)
        given = named | made | {"dh": dh_TD.contiguous(), "dqw": dqw}
        call("residual_merge", Merging(width, ctx.eps), starts(rows), **given)
        return *made.values(), dqw.sum(0), None
