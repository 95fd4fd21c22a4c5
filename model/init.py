"""Initialisation: the one table.

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

import math

import torch
from torch import Tensor, nn

from earlyfusion.kernels.products import linear


class Linear(nn.Linear):
    """nn.Linear without bias, drawn from N(0, std)."""

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        # Before the base class, whose constructor already calls reset_parameters.
        self.std = std
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        normal_(self.weight, self.std)

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight)


class Embedding(nn.Embedding):
    """nn.Embedding drawn from N(0, std)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        normal_(self.weight, self.std)


@torch.no_grad()
def normal_(weight: Tensor, std: float) -> Tensor:
    """N(0, std) in place."""
    return weight.normal_(0.0, std)


@torch.no_grad()
def decay_rate_(A_log_H: Tensor, bounded: bool) -> Tensor:
    """log of the per-head decay rate: log U(1, 16) for the softplus gate, 0 for the bounded one."""
    # A decay rate of 1 for the bounded gate, whose lower bound sets the scale.
    return A_log_H.zero_() if bounded else A_log_H.uniform_(1.0, 16.0).log_()


@torch.no_grad()
def time_step_bias_(dt_bias: Tensor) -> Tensor:
    """softplus^-1 of a time step drawn log-uniformly from [1e-3, 1e-1]; stable form dt + log(1 -
    exp(-dt))."""
    # Log-uniform: channels start with time constants over two decades, so some forget soon and some late.
    dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_().clamp_(min=1e-4)
    return dt_bias.add_(torch.log(-torch.expm1(-dt_bias)))
