"""RMS normalisation, plain and gated. Statistics in fp32 (fp64 for fp64 inputs).

Shapes: T tokens, D hidden, H heads, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.precision import compute_dtype


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or unchanged when it is fp64 (so that reference runs in double precision stay double)."""
    return x if x.dtype == torch.float64 else x.float()


class Fp32State(nn.Module):
    """Base of modules whose own floating buffers are counters, biases or maxima that must stay fp32.

    `.to(torch.bfloat16)` casts every buffer it meets; a selection bias or a token count rounded to 8 bits is
    wrong. Here such a cast moves the buffers to the new device and leaves their values alone.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp32State:
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in kept.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self


class _RmsNorm(torch.autograd.Function):
    """y = x r w (* sigmoid(gate)) with r = (mean(x^2) + eps)^-1/2, and the closed-form gradients

        dx = r (u - x^ mean(u x^)),   dw = sum dn x^,   dgate = dy n s (1 - s)

    for x^ = x r, n = x^ w, s = sigmoid(gate), dn = dy s, u = dn w. Torch has a fused forward on a CPU but
    assembles the backward from a dozen passes; this is half the time of both together.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, out_dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.eps = eps
        fp = at_least_fp32(x)
        y = F.rms_norm(fp, weight.shape, weight.to(fp.dtype), eps)
        if gate is not None:
            y.mul_(at_least_fp32(gate).sigmoid())
        return y.to(out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate = ctx.saved_tensors
        fp = at_least_fp32(x)
        size, w = fp.shape[-1], weight.to(fp.dtype)
        r = torch.linalg.vecdot(fp, fp).div_(size).add_(ctx.eps).rsqrt_().unsqueeze(-1)
        unit, dn, dgate = fp * r, dy.to(fp.dtype), None
        if gate is not None:
            s = at_least_fp32(gate).sigmoid()
            dn = dn * s
            dgate = (dn * unit).mul_(w).mul_(s.neg_().add_(1.0)).to(gate.dtype)
        dweight = (dn * unit).view(-1, size).sum(0).to(weight.dtype)
        u = dn * w
        mean = torch.linalg.vecdot(u, unit).unsqueeze(-1).div_(-size)
        return u.addcmul_(unit, mean).mul_(r).to(x.dtype), dweight, dgate, None, None


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    The result is in the dtype the following matmuls compute in (bf16 under autocast), so that several
    projections of one normed input share a single cast.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cpu and torch.is_grad_enabled():
            return _RmsNorm.apply(x, self.weight, None, self.eps, compute_dtype(x))
        fp = at_least_fp32(x)
        return F.rms_norm(fp, self.weight.shape, self.weight.to(fp.dtype), self.eps).to(compute_dtype(x))

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class GatedRMSNorm(RMSNorm):
    """KDA's output norm: RMSNorm over each head's V channels, times sigmoid(gate); fp32 inside, one cast at
    the end."""

    def forward(self, x_THV: Tensor, gate_THV: Tensor) -> Tensor:  # type: ignore[override]
        return _RmsNorm.apply(x_THV, self.weight, gate_THV, self.eps, compute_dtype(x_THV))
