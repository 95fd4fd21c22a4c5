"""From tower features to the width of the decoder.

Legend: M tokens, G patches of a token, C hidden size of the tower, D hidden size of the decoder.
"""

from __future__ import annotations

import torch
from torch import nn

from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.encoder import Linear, init_linear, make_norm, zero_anchor


class Projector(nn.Module):
    """Two linear layers with exact (erf) GELU over the G concatenated patches of a token.

    v1 (Kimi-VL, K2.5): LayerNorm of each patch `pre_norm`, then biased layers.
    v2 (Kimi K3): layers without bias, then RMSNorm `post_norm` of the result.
    Both norms take `projector_ln_eps`, never the tower's `norm_eps`, which in the V2 tower is a thousand
    times wider. Parameter names are those of `mm_projector.` in the K2.5 and K3 checkpoints.
    """

    def __init__(self, cfg: VisionConfig, hidden_size: int) -> None:
        super().__init__()
        self.std = cfg.initializer_range
        # The generations differ in where the norm stands and whether there are biases.
        first = cfg.projector == "v1"
        width = cfg.hidden_size * cfg.merge_size
        self.pre_norm = make_norm("layer", cfg.hidden_size, cfg.projector_ln_eps) if first else None
        self.proj = nn.Sequential(
            Linear(width, width, bias=first), nn.GELU(), Linear(width, hidden_size, bias=first)
        )
        self.post_norm = None if first else make_norm("rms", hidden_size, cfg.projector_ln_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, initializer_range^2) for matrices, ones for norms, zeros for biases."""
        for layer in self.proj:
            if isinstance(layer, nn.Linear):
                init_linear(layer, self.std)
        for norm in (self.pre_norm, self.post_norm):
            if norm is not None:
                norm.reset_parameters()

    def zero_anchor(self) -> torch.Tensor:
        """Scalar 0 through which every parameter receives a gradient of zeros."""
        return zero_anchor(self)

    def forward(self, features_MGC: torch.Tensor) -> torch.Tensor:
        """[M, G, C] -> [M, D]; M may be 0."""
        # v1 norms each patch by itself, before the patches of a token are joined.
        x = features_MGC if self.pre_norm is None else self.pre_norm(features_MGC)
        x = self.proj(x.flatten(1))
        # v2 norms what the decoder reads, so that images arrive at the scale of text.
        return x if self.post_norm is None else self.post_norm(x)
