"""The largest attention logit per head from the softmax normaliser: what QK-Clip needs, at no cost until it
clips.

A row with c visible keys satisfies  max_j s_ij <= lse_i <= max_j s_ij + log c.  Hence

* if no lse exceeds tau, no logit does: the largest lse is an upper bound that leaves QK-Clip inactive;
* otherwise S_h >= floor_h = max_i (lse_i - log c_i), and only rows with lse_i >= floor_h can hold S_h. Those
  rows are multiplied with the keys of their document again, which gives S_h exactly, mask included.

Legend: T tokens, H query heads, G key heads, n = H / G, D key dim, C candidate rows, L keys of a document.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from earlyfusion.kernels.precision import accumulate_dtype, compute_dtype, without_autocast
from earlyfusion.kernels.segments import Segments, check_packed

# Too large a slack only costs some rows; too small a one would miss the maximum.
SLACK = 1e-2  # relative; covers a kernel's error: 7e-3 in torch's bfloat16 CPU flash kernel
LOGITS_AT_ONCE = 1 << 22  # elements of the recomputed [H, C, L]


def floors(lse_TH: Tensor, segments: Segments, causal: bool) -> Tensor:
    """Lower bound [H] of every head's largest logit, less what the log-sum-exp may be wrong by."""

    def build() -> Tensor:
        if causal:
            visible_T = segments.position(lse_TH.device) + 1
        else:
            # Without a mask every row sees its whole document.
            visible_T = torch.tensor(segments.lengths, device=lse_TH.device)[
                segments.ids(lse_TH.device).long()
            ]
        return visible_T.to(lse_TH.dtype).log()[:, None]

    # The same for all layers of a row.
    log_T1 = segments.cached(("max_logit.visible", causal, lse_TH.dtype, str(lse_TH.device)), build)
    floor_H = (lse_TH - log_T1).amax(dim=0)
    return floor_H - SLACK * (1 + floor_H.abs())


@torch.no_grad()
def max_logit(
    q_THD: Tensor,
    k_TGD: Tensor,
    lse_TH: Tensor,
    segments: Segments,
    *,
    causal: bool,
    scale: float,
    tau: float,
) -> Tensor:
    """Largest scaled logit over visible pairs, float32 [H], exact whenever some head could exceed ``tau``.

    Args:
        lse_TH: from :func:`earlyfusion.kernels.attention.varlen.attention` . Rows set to -inf are left out
            of the maximum (filler).
        tau: the clipping threshold.
    Returns:
        If no head's largest log-sum-exp exceeds tau: that log-sum-exp, an upper bound of S_h that is <= tau.
        Otherwise S_h of every head. ``-inf`` for an empty row.
    Raises:
        ValueError: the row does not match ``segments``.

    One host sync (the comparison with tau); a second one for the row list only when it
    opens.
    """
    check_packed("max_logit", q_THD, segments)
    if segments.total == 0:
        return torch.full((q_THD.shape[1],), float("-inf"), device=q_THD.device)
    bound_H = lse_TH.amax(dim=0)
    # The one look at the device; mostly it ends here.
    if not bool((bound_H > tau).any()):
        return bound_H.float()
    rows = (lse_TH >= floors(lse_TH, segments, causal)).any(dim=1).nonzero()[:, 0].tolist()
    dtype = compute_dtype(q_THD, k_TGD)  # the operands attention multiplied, under autocast too
    wide = accumulate_dtype(dtype)
    q_TGnD = q_THD.to(dtype).unflatten(1, (k_TGD.shape[1], -1))
    # Only rows that can hold a maximum are multiplied again, document by document.
    best_H = torch.full_like(bound_H, float("-inf"))
    # Long rows in pieces: the logits of all candidates could be large.
    step = max(1, LOGITS_AT_ONCE // (q_THD.shape[1] * segments.max_length))
    with without_autocast(q_THD):
        for start, length in zip(segments.offsets, segments.lengths):
            k_LGD = k_TGD[start : start + length].to(dtype).to(wide)
            mine = rows[bisect_left(rows, start) : bisect_left(rows, start + length)]
            for low in range(0, len(mine), step):
                index_C = torch.tensor(mine[low : low + step], device=q_THD.device)
                logits_GnCL = torch.einsum("cgnd,lgd->gncl", q_TGnD[index_C].to(wide), k_LGD) * scale
                if causal:
                    hidden_CL = torch.arange(length, device=q_THD.device) > (index_C - start)[:, None]
                    logits_GnCL = logits_GnCL.masked_fill(hidden_CL, float("-inf"))
                found_H = logits_GnCL.flatten(2).amax(dim=2).flatten()
                best_H = torch.maximum(best_H, found_H.to(best_H.dtype))
    return best_H.float()
