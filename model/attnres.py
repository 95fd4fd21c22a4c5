"""Attention Residuals: every sub-layer chooses, per token, which earlier outputs it reads.

With sources v_0 (the embedding), v_1, ... and one learned pseudo-query w and key-norm weight g per sub-layer,

    h = sum_i p_i v_i,    p = softmax_i( <w * g, v_i / rms(v_i)> )        (values are not normalised)

replaces the residual stream. In block form the sub-layer outputs inside a block are summed, and the sources of a
sub-layer are b_0 = embedding, the finished block sums b_1 .. b_{n-1}, and the partial sum of its own block (absent
for the block's first sub-layer). After the last block one more (w, g) mixes all block sums. Full AttnRes is blocks
of one sub-layer. The very first sub-layer has a single source, so its mix is the identity.

Schedule: phase 1 mixes the finished sources for all sub-layers of a block in one pass; each sub-layer then merges
its row with the partial sum by an online softmax (exact).
Source: Attention Residuals (arXiv 2603.15031) section 3, algorithm 1; Kimi K3 (arXiv 2607.24653) section 2.2.

Shapes: T tokens, D hidden, S sub-layers of a block, n sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from earlyfusion.kernels.dispatch import resolve
from earlyfusion.model.norm import RMSNorm, at_least_fp32

SubLayer = Callable[[Tensor], Tensor]


class AttnResQuery(nn.Module):
    """A view of one (w, g) pair; the parameters are owned by the decoder (layer), under the checkpoint's names."""

    def __init__(self, query_D: nn.Parameter, norm: RMSNorm, name: str) -> None:
        raise TypeError("not a module")


class MixRecorder:
    """Mean mixing weights of every mix, split by a token mask; for reports, never in training.

    masks: name -> bool [T]. `rows` holds one (mix name, {mask name: weights [n] fp32}) per mix, in order; source 0 is
    the embedding and the last source of a row may be the running partial sum (`partial` names those rows).
    """

    def __init__(self, masks: dict[str, Tensor]) -> None:
        self.masks = masks
        self.rows: list[tuple[str, dict[str, Tensor]]] = []
        self.partial: set[str] = set()
