"""RMS normalisation, plain and gated. Statistics in fp32 (fp64 for fp64 inputs).

Shapes: T tokens, D hidden, H heads, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from earlyfusion.kernels.dispatch import resolve


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or unchanged when it is fp64 (so that reference runs in double precision stay double)."""
    return x if x.dtype == torch.float64 else x.float()


class Fp32State(nn.Module):
    """Base of modules whose own floating buffers are counters, biases or maxima that must stay fp32.

    `.to(torch.bfloat16)` casts every buffer it meets; a selection bias or a token count rounded to 8 bits is
    wrong. Here such a cast moves the buffers to the new device and leaves their values alone.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp32State:
        # The base class casts; what it cast is put back from here, on the new device.
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in kept.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self


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
        # With weight one a norm starts as the plain division by the root mean square.
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return resolve("rms_norm", x)(x, self.weight, None, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class GatedRMSNorm(RMSNorm):
    """KDA's output norm: RMSNorm over each head's V channels, times sigmoid(gate); fp32 inside, one cast at
    the end."""

    def forward(self, x_THV: Tensor, gate_THV: Tensor) -> Tensor:  # type: ignore[override]
        # One operation for norm and gate: head outputs are read once.
        return resolve("rms_norm", x_THV)(x_THV, self.weight, gate_THV, self.eps)
