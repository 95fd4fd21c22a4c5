"""RMS normalisation, plain or gated: y = x / sqrt(mean(x^2) + eps) * w (* sigmoid(gate)).

Statistics in float32 (float64 for float64); the result is in the dtype that the following products compute
in, so that several projections of one normed input share a single cast.

Shapes: any number of leading dimensions, the last one is normalised.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.products import accumulate_dtype, compute_dtype


def rms_norm(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
    """The definition, and the form for inference."""
    wide = accumulate_dtype(x.dtype)
    # Cast first: statistics of 8-bit mantissas would be noise.
    y = F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps)
    # In the dtype of the gate: it may be wider than x.
    if gate is not None:
        y = y * gate.to(accumulate_dtype(gate.dtype)).sigmoid()
    return y.to(compute_dtype(x))


def rms_norm_closed(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
    """The same with the closed-form gradient; on a CPU half the time of what autograd would assemble."""
    return _RmsNorm.apply(x, weight, gate, eps)


def rms_norm_on_gpu(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
    """By torch's own kernels, which have a gradient of their own; with a gate as :func:`rms_norm_closed`."""
    form = rms_norm if gate is None else rms_norm_closed
    return form(x, weight, gate, eps)


class _RmsNorm(torch.autograd.Function):
    """dx = r (u - x^ mean(u x^)),   dw = sum dn x^,   dgate = dy n s (1 - s)

    for r = (mean(x^2) + eps)^-1/2, x^ = x r, n = x^ w, s = sigmoid(gate), dn = dy s, u = dn w.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.eps = eps
        return rms_norm(x, weight, gate, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate = ctx.saved_tensors
        fp = x.to(accumulate_dtype(x.dtype))
        size, w = fp.shape[-1], weight.to(fp.dtype)
        r = torch.linalg.vecdot(fp, fp).div_(size).add_(ctx.eps).rsqrt_().unsqueeze(-1)
        # From x again: the normed input is not kept.
        unit, dn, dgate = fp * r, dy.to(fp.dtype), None
        if gate is not None:
            s = gate.to(accumulate_dtype(gate.dtype)).sigmoid()
            dn = dn * s
            dgate = (dn * unit).mul_(w).mul_(s.neg_().add_(1.0)).to(gate.dtype)

        dweight = (dn * unit).view(-1, size).sum(0).to(weight.dtype)
        # What lies along x changes nothing but its length, which the norm takes away.
        u = dn * w
        mean = torch.linalg.vecdot(u, unit).unsqueeze(-1).div_(-size)
        return u.addcmul_(unit, mean).mul_(r).to(x.dtype), dweight, dgate, None
