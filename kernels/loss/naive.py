"""Weighted next-token cross-entropy from hidden states: the definition.

    nll_t = logsumexp(W h_t) - (W h_t)[label_t]      loss = sum_t w_t * nll_t

Legend: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.precision import accumulate_dtype, compute_dtype, without_autocast

IGNORE = -100  # the label of a position without a loss, as in torch.nn.functional.cross_entropy


def check_loss(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, loss_weights_T: Tensor) -> None:
    """Raise ValueError unless the shapes belong together."""
    fits = h_TD.dim() == 2 and weight_VD.dim() == 2 and h_TD.shape[1] == weight_VD.shape[1]
    if not fits or labels_T.shape != h_TD.shape[:1] or loss_weights_T.shape != h_TD.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy: got h {tuple(h_TD.shape)}, weight {tuple(weight_VD.shape)}, labels "
            f"{tuple(labels_T.shape)}, loss weights {tuple(loss_weights_T.shape)}; expected [T, D], [V, D], [T], [T]"
        )


def linear_cross_entropy(
    h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, loss_weights_T: Tensor, *, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Loss of a packed row with all logits in memory (``chunk`` is part of the shared signature and unused here).

    A position whose label is -100 or whose weight is 0 contributes nothing. ``loss_weights_T`` is data: it gets no
    gradient.

    Returns:
        ``(weighted_sum, nll_T)``: the float32 (float64 for float64) scalar and the detached per-token losses in nats,
        0 at skipped positions.
    Raises:
        ValueError: shapes do not belong together.
    """
    check_loss(h_TD, weight_VD, labels_T, loss_weights_T)
    dtype = compute_dtype(h_TD, weight_VD)
    full = accumulate_dtype(dtype)
    counted_T = (labels_T != IGNORE) & (loss_weights_T != 0)
    with without_autocast(h_TD):
        logits_TV = h_TD.to(dtype).to(full) @ weight_VD.to(dtype).to(full).T
        nll_T = F.cross_entropy(logits_TV, labels_T.where(counted_T, IGNORE), ignore_index=IGNORE, reduction="none")
        weights_T = loss_weights_T.detach().to(full).where(counted_T, 0.0)
        return (nll_T * weights_T).sum(), torch.where(counted_T, nll_T, 0.0).detach()
