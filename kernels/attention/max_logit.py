"""The largest attention logit per head from the softmax normaliser: what QK-Clip needs, at no cost until it
clips.

A row with c visible keys satisfies  max_j s_ij <= lse_i <= max_j s_ij + log c.  Hence

* if no lse exceeds tau, no logit does: the largest lse is an upper bound that leaves QK-Clip inactive;
* otherwise S_h >= floor_h = max_i (lse_i - log c_i), and only rows with lse_i >= floor_h can hold S_h. Those
  rows are multiplied with the keys of their document again, which gives S_h exactly, mask included.

Legend: T tokens, H query heads, G key heads, n = H / G, D key dim, C candidate rows, L keys of a document.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from earlyfusion.kernels.precision import accumulate_dtype, compute_dtype, without_autocast
from earlyfusion.kernels.segments import Segments, check_packed

# Too large a slack only costs some rows; too small a one would miss the maximum.
SLACK = (
    1e-2  # relative; covers the error of a kernel's log-sum-exp (7e-3 in torch's bfloat16 CPU flash kernel)
)
LOGITS_AT_ONCE = 1 << 22  # elements of the recomputed [H, C, L]


@dataclass
class GateCounts:
    """How often the gate asked the device (one scalar comparison, the op's host sync) and how many rows it
    redid."""

    comparisons: int = 0
    opened: int = 0
    rows: int = 0


COUNTS = GateCounts()


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


def _candidate_rows(lse_TH: Tensor, segments: Segments, causal: bool) -> list[int]:
    """Sorted packed indices of rows that may hold some head's maximum."""
    return (lse_TH >= floors(lse_TH, segments, causal)).any(dim=1).nonzero()[:, 0].tolist()


def _document_max(q_CHD: Tensor, k_LGD: Tensor, last_C: Tensor | None, scale: float) -> Tensor:
    """Largest logit [H] of C query rows over L keys; ``last_C`` is the last visible key of every row."""
    dtype = accumulate_dtype(q_CHD.dtype)
    q_CGnD = q_CHD.to(dtype).unflatten(1, (k_LGD.shape[1], -1))
    logits_HCL = torch.einsum("cgnd,lgd->gncl", q_CGnD, k_LGD.to(dtype)).flatten(0, 1) * scale
    if last_C is not None:
        hidden_CL = torch.arange(k_LGD.shape[0], device=last_C.device) > last_C[:, None]
        logits_HCL = logits_HCL.masked_fill(hidden_CL, float("-inf"))
    return logits_HCL.flatten(1).amax(dim=1)


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
        lse_TH: from :func:`earlyfusion.kernels.attention.varlen.attention` with ``return_lse``. Rows set to
        -inf are
            left out of the maximum (filler).
        tau: the clipping threshold.
    Returns:
        If no head's largest log-sum-exp exceeds tau: that log-sum-exp, an upper bound of S_h that is <= tau.
        Otherwise S_h of every head. ``-inf`` for an empty row.
    Raises:
        ValueError: the row does not match ``segments``.

    One host sync (the comparison with tau, counted in ``COUNTS``); a second one for the row list only when it
    opens.
    """
    check_packed("max_logit", q_THD, segments)
    if segments.total == 0:
        return torch.full((q_THD.shape[1],), float("-inf"), device=q_THD.device)
    bound_H = lse_TH.amax(dim=0)
    COUNTS.comparisons += 1
    # The one look at the device; mostly it ends here.
    if not bool((bound_H > tau).any()):
        return bound_H.float()
    rows = _candidate_rows(lse_TH, segments, causal)
    COUNTS.opened += 1
    COUNTS.rows += len(rows)
    dtype = compute_dtype(q_THD, k_TGD)  # the operands attention multiplied, under autocast too
    q_THD, k_TGD = q_THD.to(dtype), k_TGD.to(dtype)
    # Only rows that can hold a maximum are multiplied again, document by document.
    best_H = torch.full_like(bound_H, float("-inf"))
    # Long rows in pieces: the logits of all candidates could be large.
    step, cursor = max(1, LOGITS_AT_ONCE // (q_THD.shape[1] * segments.max_length)), 0
    with without_autocast(q_THD):
        for start, length in zip(segments.offsets, segments.lengths):
            first = cursor
            while cursor < len(rows) and rows[cursor] < start + length:
                cursor += 1
            for low in range(first, cursor, step):
                index_C = torch.tensor(rows[low : min(low + step, cursor)], device=q_THD.device)
                last_C = index_C - start if causal else None
                found_H = _document_max(q_THD[index_C], k_TGD[start : start + length], last_C, scale)
                best_H = torch.maximum(best_H, found_H.to(best_H.dtype))
    return best_H.float()
