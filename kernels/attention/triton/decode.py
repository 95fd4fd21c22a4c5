"""Absorbed latent attention of one decode step on a GPU: pages read in place, long sequences split over
programs.

All heads of a sequence share keys and values, so a program takes 16 heads and walks over the rows of its
share of the sequence; a row is read once for both products. Shares are joined by their log-sum-exps. The grid
depends on shapes only, never on the lengths, so a step can be captured in a CUDA graph.

Legend: B sequences, H heads, R latent width, S rows of a page, N most pages of a sequence, X shares of a
sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from earlyfusion.kernels.aot import Variant
from earlyfusion.kernels.attention import decode
from earlyfusion.kernels.attention.triton.flash import LN2, LOG2E, _dot, split_dim
from earlyfusion.kernels.launch import FLOATS, check_tensor, on_device, power_of_two, programs

HEADS, KEYS = 16, 32


@triton.jit
def _rows(base, row, ok, FIRST: tl.constexpr, TILE: tl.constexpr, LAST: tl.constexpr, R: tl.constexpr):
    col = FIRST + tl.arange(0, TILE)
    return tl.load(
        base + row[:, None] * R + col[None, :], mask=ok[:, None] & (col < LAST)[None, :], other=0.0
    )


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
    H: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    VA: tl.constexpr,
    VB: tl.constexpr,
    REST: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
):
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    ok_h = head < H
    length = tl.minimum(tl.load(lengths_B + b), N * S)
    begin = part * share
    stop = tl.minimum(begin + share, length)
    q_row = b * H + head
    q_a = _rows(query_BHR, q_row, ok_h, 0, VA, RANK, R)
    q_b, q_r = q_a, q_a
    if VB > 0:
        q_b = _rows(query_BHR, q_row, ok_h, VA, VB, RANK, R)
    if REST > 0:
        q_r = _rows(query_BHR, q_row, ok_h, RANK, REST, R, R)
    m, l = tl.full([BH], float("-inf"), tl.float32), tl.zeros([BH], tl.float32)
    acc_a, acc_b = tl.zeros([BH, VA], tl.float32), tl.zeros([BH, VB if VB > 0 else 16], tl.float32)
    for first in range(begin, stop, BN):
        token = first + tl.arange(0, BN)
        ok = token < stop
        page = tl.load(table_BN + b * N + token // S, mask=ok, other=0).to(tl.int64)
        ok = ok & (page >= 0) & (page < PAGES)
        row = page * S + token % S
        k_a = _rows(pages_PSR, row, ok, 0, VA, RANK, R).to(q_a.dtype)
        s = _dot(q_a, tl.trans(k_a), tl.zeros([BH, BN], tl.float32))
        k_b = k_a
        if VB > 0:
            k_b = _rows(pages_PSR, row, ok, VA, VB, RANK, R).to(q_a.dtype)
            s = _dot(q_b, tl.trans(k_b), s)
        if REST > 0:
            s = _dot(q_r, tl.trans(_rows(pages_PSR, row, ok, RANK, REST, R, R).to(q_a.dtype)), s)
        s = tl.where(ok[None, :], s * (scale * LOG2E), float("-inf"))
        new = tl.maximum(m, tl.max(s, axis=1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p, shrink = tl.exp2(s - base[:, None]), tl.exp2(m - base)
        l = l * shrink + tl.sum(p, axis=1)
        m = new
        p = p.to(q_a.dtype)
        acc_a = _dot(p, k_a, acc_a * shrink[:, None])
        if VB > 0:
            acc_b = _dot(p, k_b, acc_b * shrink[:, None])
    safe = tl.where(l > 0, l, 1.0)
    out_row = part * (B * H) + b * H + head
    out = mixed_XBHr + out_row[:, None] * RANK
    col_a = tl.arange(0, VA)
    tl.store(out + col_a[None, :], acc_a / safe[:, None], mask=ok_h[:, None] & (col_a < RANK)[None, :])
    if VB > 0:
        col_b = VA + tl.arange(0, VB)
        tl.store(out + col_b[None, :], acc_b / safe[:, None], mask=ok_h[:, None] & (col_b < RANK)[None, :])
    tl.store(lse_XBH + out_row, tl.where(l > 0, (m + tl.log2(safe)) * LN2, float("-inf")), mask=ok_h)


def shares(batch: int, head_tiles: int, most_tokens: int, device: torch.device) -> tuple[int, int]:
    """(number of shares, tokens of a share): enough programs for the device, at least 256 tokens each."""
    wanted = max(1, 2 * programs(device) // max(1, batch * head_tiles))
    tokens = max(256 if device.type == "cuda" else KEYS, -(-most_tokens // wanted))
    tokens = -(-tokens // KEYS) * KEYS
    return max(1, -(-most_tokens // tokens)), tokens


def mla_decode(
    query_BHR: Tensor, pages_PSR: Tensor, table_BN: Tensor, lengths_B: Tensor, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    """See :func:`earlyfusion.kernels.attention.decode.mla_decode`. A page number outside the pages is not
    read.

    Raises:
        ValueError: shapes, dtypes, devices or layouts do not fit, or a latent row is wider than 1024.
    """
    decode.check_decode(query_BHR, pages_PSR, table_BN, lengths_B, rank)
    if query_BHR.dtype == torch.float64 or not query_BHR.numel():
        return decode.mla_decode(query_BHR, pages_PSR, table_BN, lengths_B, rank, scale)
    device = query_BHR.device
    check_tensor("mla_decode", "query_BHR", query_BHR, None, FLOATS)
    check_tensor("mla_decode", "pages_PSR", pages_PSR, None, FLOATS, device)
    for name, tensor in (("table_BN", table_BN), ("lengths_B", lengths_B)):
        check_tensor("mla_decode", name, tensor, None, (torch.int32, torch.int64), device)
    batch, heads, width = query_BHR.shape
    if width > 1024:
        raise ValueError(f"mla_decode: query_BHR has latent width {width}; the kernel takes at most 1024")
    va, vb = split_dim(rank)
    rest = max(16, power_of_two(width - rank)) if width > rank else 0
    tiles = triton.cdiv(heads, HEADS)
    count, share = shares(batch, tiles, table_BN.shape[1] * pages_PSR.shape[1], device)
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
            RANK=rank,
            VA=va,
            VB=vb,
            REST=rest,
            BH=HEADS,
            BN=KEYS,
            num_warps=4,
            num_stages=2,
        )
    if count == 1:
        return mixed_XBHr[0].to(query_BHR.dtype), lse_XBH[0]
    lse_BH = lse_XBH.logsumexp(dim=0)
    weight_XBH = torch.where(lse_XBH == float("-inf"), 0.0, torch.exp(lse_XBH - lse_BH))
    return (mixed_XBHr * weight_XBH[..., None]).sum(dim=0).to(query_BHR.dtype), lse_BH


def aot_variants() -> list[Any]:
    """The decode kernel for rank 512 + 64, 32 heads, pages of 64."""
    types = {
        "query_BHR": "*bf16",
        "pages_PSR": "*bf16",
        "table_BN": "*i32",
        "lengths_B": "*i32",
        "mixed_XBHr": "*fp32",
        "lse_XBH": "*fp32",
        "scale": "fp32",
        "B": "i32",
        "N": "i32",
        "PAGES": "i32",
        "share": "i32",
    }
    constants = {
        "H": 32,
        "S": 64,
        "R": 576,
        "RANK": 512,
        "VA": 512,
        "VB": 0,
        "REST": 64,
        "BH": HEADS,
        "BN": KEYS,
    }
    return [Variant("mla decode 512 + 64", decode_share, types, constants, 4, 2, ("share",))]
