"""The layers that everything else is made of: projections, embedding, RMS norms, the dense feed-forward, and
state that stays fp32; with the one table of initial values.

| parameter | initial value |
|---|---|
| every projection, expert, router, embedding, head | N(0, initializer_range) |
| short convolutions | N(0, initializer_range) |
| norm weights (RMSNorm, o_norm, AttnRes key norms) | 1 |
| AttnRes pseudo-queries | 0 (uniform average of the sources at step 0) |
| router selection bias | 0 |
| KDA A_log, softplus gate | log U(1, 16) |
| KDA A_log, bounded gate | 0 |
| KDA dt_bias, both gates | softplus^-1(dt), dt = max(exp U(log 1e-3, log 1e-1), 1e-4) |

Sources: the released Kimi-Linear code as ported in transformers (`_init_weights`); Attention Residuals
(arXiv 2603.15031) for the zero queries. A module's `reset_parameters` sets only the parameters it holds
itself (the torch convention); children come before their parents, so that a parent that has a different wish
for a stock torch layer has the last word.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.products import linear


class Linear(nn.Linear):
    """nn.Linear without bias, drawn from N(0, std)."""

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        # Before the base class, whose constructor already calls reset_parameters.
        self.std = std
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight)


class Embedding(nn.Embedding):
    """nn.Embedding drawn from N(0, std)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or unchanged when it is fp64 (so that reference runs in double precision stay double)."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, times sigmoid(gate) where one is given
    (KDA's norm over each head's channels); statistics in fp32 (fp64 for fp64 inputs).

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

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        # One operation for norm and gate: head outputs are read once.
        return resolve("rms_norm", x)(x, self.weight, gate, self.eps)


class SwiGLU(nn.Module):
    """y = W_down (silu(W_gate x) * W_up x): feed-forward of the first, dense layers and the shared experts of
    a MoE layer."""

    def __init__(self, hidden_size: int, intermediate_size: int, std: float) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, std)
        self.up_proj = Linear(hidden_size, intermediate_size, std)
        self.down_proj = Linear(intermediate_size, hidden_size, std)

    def forward(self, x_TD: Tensor) -> Tensor:
        # Two matrices and not one joined: the names and shapes of public checkpoints.
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))


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
