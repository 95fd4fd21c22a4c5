"""One decode step of absorbed multi-head latent attention over paged latents.

In the absorbed form every head of a sequence attends over the same rows: the key of a cached token is its
whole latent row (normed latent and shared part), its value the first ``rank`` channels. With q_bh absorbed
queries of width R,

    s_j = scale <q_bh, row_j>      p = softmax over the sequence's tokens      mixed_bh = sum_j p_j
                                   row_j[:rank]

Token j of sequence b is row j % S of page table[b, j // S].

Legend: B sequences, H heads, R latent width, P pages, S rows of a page, N most pages of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from earlyfusion.kernels.checks import INTEGERS, check_shapes, check_tensors


def check_decode(
    query_BHR: Tensor, pages_PSR: Tensor, table_BN: Tensor, lengths_B: Tensor, rank: int
) -> None:
    """Raise ValueError unless the shapes and dtypes belong together."""
    check_shapes(
        "mla_decode", query_BHR=query_BHR, pages_PSR=pages_PSR, table_BN=table_BN, lengths_B=lengths_B
    )
    if not 0 < rank <= query_BHR.shape[2]:
        raise ValueError(
            f"mla_decode: rank is {rank}; expected 1 to {query_BHR.shape[2]}, the width of a latent row"
        )
    check_tensors("mla_decode", query_BHR, INTEGERS, "any", table_BN=table_BN, lengths_B=lengths_B)


def mla_decode(
    query_BHR: Tensor, pages_PSR: Tensor, table_BN: Tensor, lengths_B: Tensor, rank: int, scale: float
) -> Tensor:
    """The definition, gathered and masked; also the plain torch form (a step has one row a sequence).

    Args:
        lengths_B: cached tokens of every sequence, the newest included; 0 for an idle slot.
    Returns:
        mixed_BHr: mixed latents in the query's dtype (zeros for an idle slot).
    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_decode(query_BHR, pages_PSR, table_BN, lengths_B, rank)
    wide = torch.promote_types(query_BHR.dtype, torch.float32)
    # Whole pages are gathered; what lies past the end is masked.
    rows_BLR = pages_PSR[table_BN.long().clamp(0, pages_PSR.shape[0] - 1)].flatten(1, 2).to(wide)
    hidden_BL = torch.arange(rows_BLR.shape[1], device=query_BHR.device) >= lengths_B[:, None]
    # rows past the end may hold anything, and 0 * NaN is NaN
    rows_BLR = rows_BLR.masked_fill(hidden_BL[..., None], 0.0)
    logits_BHL = torch.einsum("bhr,blr->bhl", query_BHR.to(wide), rows_BLR) * scale
    logits_BHL = logits_BHL.masked_fill(hidden_BL[:, None], float("-inf"))
    # The softmax of an idle slot is that of nothing.
    p_BHL = torch.where(hidden_BL[:, None], 0.0, logits_BHL.softmax(dim=-1))
    return torch.einsum("bhl,blr->bhr", p_BHL, rows_BLR[..., :rank]).to(query_BHR.dtype)
