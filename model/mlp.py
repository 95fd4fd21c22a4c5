"""Dense SwiGLU feed-forward: y = W_down (silu(W_gate x) * W_up x)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from earlyfusion.model.init import Linear


class SwiGLU(nn.Module):
    """Feed-forward of the first, dense layers and the shared experts of a MoE layer."""

    def __init__(self, hidden_size: int, intermediate_size: int, std: float) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, std)
        self.up_proj = Linear(hidden_size, intermediate_size, std)
        self.down_proj = Linear(intermediate_size, hidden_size, std)

    def forward(self, x_TD: Tensor) -> Tensor:
        # Two matrices and not one joined: the names and shapes of public checkpoints.
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))
