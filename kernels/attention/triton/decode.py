"""Absorbed latent attention of one decode step on a GPU: pages read in place, long sequences split over
programs.

All heads of a sequence share keys and values, so a program takes up to 32 heads and walks over the rows of
its share of the sequence; a row is read once for both products. Shares are joined by their log-sum-exps. The
grid depends on shapes only, never on the lengths, so a step can be captured in a CUDA graph.

Legend: B sequences, H heads, R latent width, S rows of a page, N most pages of a sequence, X shares of a
sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from earlyfusion.kernels.attention.triton.flash import (
    LN2,
    LOG2E,
    add_product,
    dot,
    inner,
    load,
    load_halves,
    split_dim,
    store_halves,
    zero_halves,
)
from earlyfusion.kernels.launch import hardware, on_device, power_of_two
from earlyfusion.kernels.segments import INTEGERS, check_decode, check_tensors

KEYS = 32  # of a tile


@triton.jit
def decode_share(
    query_BHR,
    pages_PSR,
    table_BN,
    lengths_B,
    mixed_XBHr,
    lse_XBH,
    scale,
    B,
    N,
    PAGES,
    share,
    H: constexpr,
    S: constexpr,
    R: constexpr,
    RANK: constexpr,
    REST: constexpr,
    BH: constexpr,
    BN: constexpr,
):
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    ok_h = head < H
    # A length beyond the table would read pages of nobody.
    length = tl.minimum(tl.load(lengths_B + b), N * S)
    begin = part * share
    stop = tl.minimum(begin + share, length)
    q_row = b * H + head
    q = load_halves(query_BHR, q_row, R, ok_h, RANK)
    q_rest = q[0]
    # Without a shared part a latent row is its value.
    if REST > 0:
        q_rest = load(query_BHR, q_row, R, ok_h, RANK.ALL, REST, R)
    m, l = tl.full([BH], float("-inf"), tl.float32), tl.zeros([BH], tl.float32)
    acc = zero_halves(BH, RANK)
    for first in range(begin, stop, BN):
        token = first + tl.arange(0, BN)
        ok = token < stop
        page = tl.load(table_BN + b * N + token // S, mask=ok, other=0).to(tl.int64)
        # An index that is no page is not read; its logits are -inf.
        ok = ok & (page >= 0) & (page < PAGES)
        row = page * S + token % S
        k_a, k_b = load_halves(pages_PSR, row, R, ok, RANK)
        k = k_a.to(q[0].dtype), k_b.to(q[0].dtype)
        s = inner(q, k, RANK)
        if REST > 0:
            k_rest = load(pages_PSR, row, R, ok, RANK.ALL, REST, R)
            s = dot(q_rest, tl.trans(k_rest.to(q[0].dtype)), s)
        s = tl.where(ok[None, :], s * (scale * LOG2E), float("-inf"))

        # Online softmax; before the first key that counts there is no maximum to shrink by.
        new = tl.maximum(m, tl.max(s, axis=1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p, shrink = tl.exp2(s - base[:, None]), tl.exp2(m - base)
        l = l * shrink + tl.sum(p, axis=1)
        m = new
        acc = acc[0] * shrink[:, None], acc[1] * shrink[:, None]
        acc = add_product(acc, p.to(q[0].dtype), k, RANK)
    safe = tl.where(l > 0, l, 1.0)
    out_row = part * (B * H) + b * H + head
    mixed = acc[0] / safe[:, None], acc[1] / safe[:, None]
    store_halves(mixed_XBHr, out_row, RANK.ALL, ok_h, mixed, RANK)
    tl.store(lse_XBH + out_row, tl.where(l > 0, (m + tl.log2(safe)) * LN2, float("-inf")), mask=ok_h)


@triton.jit
def join_shares(mixed_XRr, lse_XR, out_Rr, COUNT, ROWS, RANK: constexpr, RP: constexpr, XP: constexpr):
    """Shares by their log-sum-exps; one without tokens has -inf and no weight. Grid (B H)."""
    row = tl.program_id(0).to(tl.int64)
    share, col = tl.arange(0, XP), tl.arange(0, RP)
    sums = tl.load(lse_XR + share * ROWS + row, mask=share < COUNT, other=float("-inf"))
    top = tl.max(sums, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(sums - top), axis=0)
    acc = tl.zeros([RP], tl.float32)
    for i in range(0, COUNT):
        at = i * ROWS + row
        weight = tl.exp(tl.load(lse_XR + at) - top)
        acc += weight * tl.load(mixed_XRr + at * RANK + col, mask=col < RANK, other=0.0)
    out = acc / tl.where(total > 0, total, 1.0)
    tl.store(out_Rr + row * RANK + col, out.to(out_Rr.dtype.element_ty), mask=col < RANK)


def mla_decode(
    query_BHR: Tensor, pages_PSR: Tensor, table_BN: Tensor, lengths_B: Tensor, rank: int, scale: float
) -> Tensor:
    """See :func:`earlyfusion.kernels.attention.naive.mla_decode`. A page number outside the pages is not
    read.

    Raises:
        ValueError: shapes, dtypes, devices or layouts do not fit, or a latent row is wider than 1024.
    """
    check_decode(query_BHR, pages_PSR, table_BN, lengths_B, rank)
    if not query_BHR.numel():
        return torch.empty_like(query_BHR[..., :rank])
    check_tensors("mla_decode", query_BHR, query_BHR=query_BHR, pages_PSR=pages_PSR)
    check_tensors("mla_decode", query_BHR, INTEGERS, table_BN=table_BN, lengths_B=lengths_B)
    batch, heads, width = query_BHR.shape
    if width > 1024:
        raise ValueError(f"mla_decode: query_BHR has latent width {width}; the kernel takes at most 1024")
    rest = max(16, power_of_two(width - rank)) if width > rank else 0
    # A row is read once for all heads of a program; before sm_90 32 of them spill.
    about = hardware(query_BHR.device)
    tile = 32 if heads % 32 == 0 and about.arch >= 90 else 16
    tiles = triton.cdiv(heads, tile)
    # Two programs a multiprocessor hide each other's loads; a share has at least 256 tokens.
    wanted = 2 * about.multiprocessors // (batch * tiles)
    most = table_BN.shape[1] * pages_PSR.shape[1]
    share = max(256 if query_BHR.is_cuda else KEYS, -(-most // max(1, wanted)))
    share = -(-share // KEYS) * KEYS
    count = max(1, -(-most // share))
    mixed_XBHr = query_BHR.new_empty(count, batch, heads, rank, dtype=torch.float32)
    lse_XBH = query_BHR.new_empty(count, batch, heads, dtype=torch.float32)
    with on_device(query_BHR):
        decode_share[(batch, tiles, count)](
            query_BHR,
            pages_PSR,
            table_BN,
            lengths_B,
            mixed_XBHr,
            lse_XBH,
            scale,
            batch,
            table_BN.shape[1],
            pages_PSR.shape[0],
            share,
            H=heads,
            S=pages_PSR.shape[1],
            R=width,
            RANK=split_dim(rank),
            REST=rest,
            BH=tile,
            BN=KEYS,
            num_warps=4,
            num_stages=2 if tile == 16 else 1,
        )
        # One share is already the answer.
        if count == 1:
            return mixed_XBHr[0].to(query_BHR.dtype)
        out_BHr = query_BHR.new_empty(batch, heads, rank)
        join_shares[(batch * heads,)](
            mixed_XBHr,
            lse_XBH,
            out_BHr,
            count,
            batch * heads,
            RANK=rank,
            RP=power_of_two(rank),
            XP=power_of_two(count),
        )
    return out_BHr
