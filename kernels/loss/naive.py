"""Weighted next-token cross-entropy and per-token log-probabilities from hidden states: the definition.

    nll_t = lse_t - (W h_t)[label_t],   lse_t = logsumexp(W h_t)
    loss  = sum_t w_t nll_t
    logp_t = log softmax(W h_t / temperature)[label_t]

Legend: T tokens, D hidden, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.products import accumulate_dtype, compute_dtype, without_autocast

IGNORE = -100  # the label of a position without a loss, as in torch.nn.functional.cross_entropy


def _logits(h_TD: Tensor, weight_VD: Tensor) -> Tensor:
    dtype = compute_dtype(h_TD, weight_VD)
    full = accumulate_dtype(dtype)
    with without_autocast(h_TD):
        return h_TD.to(dtype).to(full) @ weight_VD.to(dtype).to(full).T


def linear_cross_entropy(
    h_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    loss_weights_T: Tensor,
) -> tuple[Tensor, Tensor]:
    """Loss of a packed row with all logits in memory.

    A position whose label is -100 or whose weight is 0 contributes nothing. ``loss_weights_T`` is data: it
    gets no gradient.

    Returns:
        ``(weighted_sum, nll_T)``: the float32 (float64 for float64) scalar and the detached per-token losses
        in nats, 0 at skipped positions.
    """
    counted_T = (labels_T != IGNORE) & (loss_weights_T != 0)
    # All of them: this is the memory that the other forms avoid.
    logits_TV = _logits(h_TD, weight_VD)
    nll_T = F.cross_entropy(
        logits_TV, labels_T.where(counted_T, IGNORE), ignore_index=IGNORE, reduction="none"
    )
    weights_T = loss_weights_T.detach().to(logits_TV.dtype).where(counted_T, 0.0)
    # where, not a product with 0: a skipped position may hold anything
    loss = (torch.where(counted_T, nll_T, 0.0) * weights_T).sum()
    return loss, torch.where(counted_T, nll_T, 0.0).detach()


def token_log_probs(
    h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability of every label and the entropy of its distribution.

    Args:
        labels_T: int64 vocabulary ids; -100 where none is asked for.
        temperature: logits are divided by it, as the sampler does.
    Returns:
        ``(logp_T, entropy_T)`` in nats, float32 (float64 for float64), 0 where the label is -100. The first
        is differentiable, the second detached.
    """
    counted_T = labels_T != IGNORE
    logp_TV = torch.log_softmax(_logits(h_TD, weight_VD) / temperature, dim=-1)
    picked_T = logp_TV.gather(1, labels_T.where(counted_T, 0)[:, None])[:, 0]
    entropy_T = -(logp_TV.exp() * logp_TV).sum(dim=-1).detach()
    return torch.where(counted_T, picked_T, 0.0), torch.where(counted_T, entropy_T, 0.0)
