"""Attention inside every document of a packed row: the definition.

For query i and key j of the same document (j <= i if causal), with n = H / G query heads per key head,

    s_hij = scale * <q_hi, k_gj>,  g = h // n        lse_hi = log sum_j exp s_hij
    o_hi  = sum_j exp(s_hij - lse_hi) v_gj           S_h = max_ij s_hij   (visible pairs only)

Legend: T tokens, N documents, H heads, D key dim, V value dim.

One decode step of absorbed multi-head latent attention over paged latents.

In the absorbed form every head of a sequence attends over the same rows: the key of a cached token is its
whole latent row (normed latent and shared part), its value the first ``rank`` channels. With q_bh absorbed
queries of width R,

    s_j = scale <q_bh, row_j>      p = softmax over the sequence's tokens      mixed_bh = sum_j p_j
                                   row_j[:rank]

Token j of sequence b is row j % S of page table[b, j // S].

Legend: B sequences, H heads, R latent width, P pages, S rows of a page, N most pages of a sequence.
"""

import torch
from torch import Tensor

from earlyfusion.kernels.products import accumulate_dtype, compute_dtype, without_autocast
from earlyfusion.kernels.segments import Segments


def _document_logits(q_THD: Tensor, k_THD: Tensor, causal: bool, scale: float) -> Tensor:
    """Masked logits [H, T, T] of one document in accumulation precision."""
    dtype = accumulate_dtype(q_THD.dtype)
    logits_HTT = torch.einsum("ihd,jhd->hij", q_THD.to(dtype), k_THD.to(dtype)) * scale
    if causal:
        # Above the diagonal stands the future.
        hidden_TT = torch.ones(logits_HTT.shape[1:], dtype=torch.bool, device=q_THD.device).triu(1)
        logits_HTT = logits_HTT.masked_fill(hidden_TT, float("-inf"))
    return logits_HTT


def attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THV: Tensor,
    segments: Segments,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Softmax attention, documents isolated from each other, one document at a time.

    Returns:
        ``(o_THV, lse_TH)``: the output in the compute dtype (see :mod:`earlyfusion.kernels.products`) and
        the natural-log softmax normaliser in float32 (float64 for float64 inputs), detached.
    """
    out_dtype = compute_dtype(q_THD, k_THD, v_THV)
    dtype = accumulate_dtype(out_dtype)
    outputs, lses = [], []
    with without_autocast(q_THD):
        for start, length in zip(segments.offsets, segments.lengths):
            rows = slice(start, start + length)
            # Rounded to the compute dtype first: that is what the fast forms multiply.
            logits_HTT = _document_logits(q_THD[rows].to(out_dtype), k_THD[rows].to(out_dtype), causal, scale)
            # P from the log-sum-exp, as the fast forms have it.
            lse_HT = logits_HTT.logsumexp(dim=-1)
            p_HTT, part_THV = torch.exp(logits_HTT - lse_HT[..., None]), v_THV[rows].to(out_dtype).to(dtype)
            outputs.append(torch.einsum("hij,jhv->ihv", p_HTT, part_THV))
            lses.append(lse_HT.detach().T)
    if not outputs:  # an empty row keeps its place in the graph
        empty = (q_THD.sum() + k_THD.sum() + v_THV.sum()).to(out_dtype)
        o_THV = empty.expand(0, q_THD.shape[1], v_THV.shape[2])
        return o_THV, q_THD.new_zeros(0, q_THD.shape[1], dtype=dtype)
    return torch.cat(outputs).to(out_dtype), torch.cat(lses)


def attention_append(
    q_THD: Tensor, k_LHD: Tensor, v_LHV: Tensor, segments: Segments, key_segments: Segments, *, scale: float
) -> Tensor:
    """Causal attention of the newest tokens of every document over all its keys; -> [T, H, V] in the compute
    dtype.

    q_THD: the last ``segments.lengths[n]`` tokens of document n, of which k_LHD and v_LHV hold all
    ``key_segments.lengths[n]`` tokens, the newest included: a prompt read in chunks, or continued after a
    shared prefix.
    """
    outputs = [q_THD.new_zeros(0, q_THD.shape[1], v_LHV.shape[2], dtype=compute_dtype(q_THD, k_LHD, v_LHV))]
    for first, new, begin, length in zip(
        segments.offsets, segments.lengths, key_segments.offsets, key_segments.lengths
    ):
        keys = slice(begin, begin + length)
        # rows that are not asked for stand before the new ones: the
        # definition above, of which the end is kept
        q_LHD = torch.cat([q_THD.new_zeros(length - new, *q_THD.shape[1:]), q_THD[first : first + new]])
        o_LHV, _ = attention(q_LHD, k_LHD[keys], v_LHV[keys], Segments((length,)), causal=True, scale=scale)
        outputs.append(o_LHV[length - new :])
    return torch.cat(outputs)


@torch.no_grad()
def max_logit(
    q_THD: Tensor,
    k_THD: Tensor,
    lse_TH: Tensor,
    segments: Segments,
    *,
    causal: bool,
    scale: float,
    tau: float,
) -> Tensor:
    """Exact S_h, float32 [H], from materialised logits; ``-inf`` for an empty row.

    ``lse_TH`` and ``tau`` are not needed here; the gated form
    (:func:`earlyfusion.kernels.attention.varlen.max_logit`) shares the signature.
    """
    # Documents without rows leave -inf, which clips nothing.
    best_H = torch.full((q_THD.shape[1],), float("-inf"), device=q_THD.device)
    dtype = compute_dtype(q_THD, k_THD)
    q_THD, k_THD = q_THD.to(dtype), k_THD.to(dtype)
    with without_autocast(q_THD):
        for start, length in zip(segments.offsets, segments.lengths):
            rows = slice(start, start + length)
            logits_HTT = _document_logits(q_THD[rows], k_THD[rows], causal, scale)
            best_H = torch.maximum(best_H, logits_HTT.flatten(1).amax(dim=1).float())
    return best_H


# ---- one token over paged latents ----


def mla_decode(
    query_BHR: Tensor, pages_PSR: Tensor, table_BN: Tensor, lengths_B: Tensor, rank: int, scale: float
) -> Tensor:
    """The definition, gathered and masked; also the plain torch form (a step has one row a sequence).

    Args:
        lengths_B: cached tokens of every sequence, the newest included; 0 for an idle slot.
    Returns:
        mixed_BHr: mixed latents in the query's dtype (zeros for an idle slot).
    """
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


# ---- split and turn of a projection ----


def qkv_rope(qkv_T3HD: Tensor, turns_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, pair by pair in real numbers. Returns ``(q_THD, k_THD, v_THD)`` in the dtype of qkv."""
    q, k, v = qkv_T3HD.unbind(1)
    wide = torch.promote_types(qkv_T3HD.dtype, torch.float32)
    cos, sin = turns_TC.real[:, None].to(wide), turns_TC.imag[:, None].to(wide)

    def turn(x: Tensor) -> Tensor:
        # As two real numbers, so that the law does not lean on complex arithmetic.
        even, odd = x[..., 0::2].to(wide), x[..., 1::2].to(wide)
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)

    return turn(q), turn(k), v
