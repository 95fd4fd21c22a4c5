"""Flash attention inside the documents of a packed row, for head dims that torch's kernels pad or refuse.

A head dim is cut into at most two power-of-two tiles: 192 = 128 + 64 and 72 = 64 + 16 take 0 and 11 % more
lanes than they need, where padding to a power of two takes 33 and 78 %. Keys and values have their own dims
(MLA: 192 and 128), nothing is padded in memory, grouped heads read their keys in place. The host knows the
document lengths, so the table of query tiles is built without looking at the device and cached with the
packed row.

Forward: online softmax in base 2, the log-sum-exp is returned; the queries may be the newest tokens of
documents whose earlier keys were computed before (`attention_append`). Backward: one kernel per key tile for
dK and dV (walking over its group's heads and queries), one per query tile for dQ; P is recomputed, nothing is
atomic.

Legend: T tokens, H query heads, G key/value heads, D key dim, V value dim, BM query rows, BN keys of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.aot import Variant
from earlyfusion.kernels.attention import naive, varlen
from earlyfusion.kernels.attention.checks import check_append, check_attention
from earlyfusion.kernels.launch import FLOATS, arch, on_device, power_of_two
from earlyfusion.kernels.precision import compute_dtype
from earlyfusion.kernels.segments import Segments

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _dot(a, b, acc):
    if a.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _load(base, row, stride, ok, FIRST: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr):
    """Rows x TILE channels from FIRST on."""
    col = FIRST + tl.arange(0, TILE)
    return tl.load(
        base + row[:, None] * stride + col[None, :], mask=ok[:, None] & (col < DIM)[None, :], other=0.0
    )


@triton.jit
def _store(base, row, stride, ok, value, FIRST: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr):
    col = FIRST + tl.arange(0, TILE)
    keep = ok[:, None] & (col < DIM)[None, :]
    tl.store(base + row[:, None] * stride + col[None, :], value.to(base.dtype.element_ty), mask=keep)


@triton.jit
def _scores(
    q_a,
    q_b,
    k,
    key,
    stride,
    ok,
    D: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Queries times the keys of a tile, [BM, BN], unscaled and unmasked."""
    s = _dot(q_a, tl.trans(_load(k, key, stride, ok, 0, DA, D)), tl.zeros([BM, BN], tl.float32))
    if DB > 0:
        s = _dot(q_b, tl.trans(_load(k, key, stride, ok, DA, DB, D)), s)
    return s


@triton.jit
def _forward_keys(
    q_a,
    q_b,
    k,
    v,
    stride_k,
    stride_v,
    row,
    end,
    begin,
    stop,
    m,
    l,
    acc_a,
    acc_b,
    scale2,
    D: tl.constexpr,
    V: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    VA: tl.constexpr,
    VB: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    for n in range(begin, stop, BN):
        key = n + tl.arange(0, BN).to(tl.int64)
        ok = key < end
        s = _scores(q_a, q_b, k, key, stride_k, ok, D, DA, DB, BM, BN) * scale2
        if MASK:
            visible = ok[None, :]
            if CAUSAL:
                visible = visible & (key[None, :] <= row[:, None])
            s = tl.where(visible, s, float("-inf"))
        new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(m - new)
        l = l * shrink + tl.sum(p, axis=1)
        m = new
        v_a = _load(v, key, stride_v, ok, 0, VA, V)
        p = p.to(v_a.dtype)
        acc_a = _dot(p, v_a, acc_a * shrink[:, None])
        if VB > 0:
            acc_b = _dot(p, _load(v, key, stride_v, ok, VA, VB, V), acc_b * shrink[:, None])
    return m, l, acc_a, acc_b


@triton.jit
def flash_forward(
    q_THD,
    k_TGD,
    v_TGV,
    o_THV,
    lse_TH,
    tile_first,
    tile_begin,
    tile_end,
    tile_shift,
    scale,
    sq_t,
    sq_h,
    sk_t,
    sk_g,
    sv_t,
    sv_g,
    H: tl.constexpr,
    REPEAT: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    VA: tl.constexpr,
    VB: tl.constexpr,
    CAUSAL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """tile_shift: how far a document's queries stand from their own keys, or None where they stand
    together."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tl.load(tile_first + tile).to(tl.int64)
    begin, end = tl.load(tile_begin + tile).to(tl.int64), tl.load(tile_end + tile).to(tl.int64)
    row = first + tl.arange(0, BM)
    if tile_shift is not None:
        first += tl.load(tile_shift + tile).to(tl.int64)
    place = first + tl.arange(0, BM)  # of the queries among the keys
    ok = place < end
    q, group = q_THD + head * sq_h, head // REPEAT
    k, v = k_TGD + group * sk_g, v_TGV + group * sv_g
    q_a = _load(q, row, sq_t, ok, 0, DA, D)
    q_b = q_a
    if DB > 0:
        q_b = _load(q, row, sq_t, ok, DA, DB, D)
    m, l = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    acc_a, acc_b = tl.zeros([BM, VA], tl.float32), tl.zeros([BM, VB if VB > 0 else 16], tl.float32)
    scale2 = scale * LOG2E
    stop = tl.minimum(first + BM, end) if CAUSAL else end
    whole = (
        begin + (tl.minimum(first + 1, end) - begin if CAUSAL else end - begin) // BN * BN
    )  # seen by every row
    m, l, acc_a, acc_b = _forward_keys(
        q_a,
        q_b,
        k,
        v,
        sk_t,
        sv_t,
        place,
        end,
        begin,
        whole,
        m,
        l,
        acc_a,
        acc_b,
        scale2,
        D,
        V,
        DA,
        DB,
        VA,
        VB,
        BM,
        BN,
        False,
        CAUSAL,
    )
    m, l, acc_a, acc_b = _forward_keys(
        q_a,
        q_b,
        k,
        v,
        sk_t,
        sv_t,
        place,
        end,
        whole,
        stop,
        m,
        l,
        acc_a,
        acc_b,
        scale2,
        D,
        V,
        DA,
        DB,
        VA,
        VB,
        BM,
        BN,
        True,
        CAUSAL,
    )
    o = o_THV + head * V
    _store(o, row, H * V, ok, acc_a / l[:, None], 0, VA, V)
    if VB > 0:
        _store(o, row, H * V, ok, acc_b / l[:, None], VA, VB, V)
    tl.store(lse_TH + row * H + head, (m + tl.log2(l)) * LN2, mask=ok)


@triton.jit
def row_dots(o_THV, do_THV, delta_TH, rows, V: tl.constexpr, VP: tl.constexpr, BR: tl.constexpr):
    """delta = <o, do> of every (token, head)."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    ok = row < rows
    o, do = _load(o_THV, row, V, ok, 0, VP, V), _load(do_THV, row, V, ok, 0, VP, V)
    tl.store(delta_TH + row, tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1), mask=ok)


@triton.jit
def flash_backward_keys(
    q_THD,
    k_TGD,
    v_TGV,
    do_THV,
    lse_TH,
    delta_TH,
    dk_TGD,
    dv_TGV,
    tile_first,
    tile_begin,
    tile_end,
    scale,
    sq_t,
    sq_h,
    sk_t,
    sk_g,
    sv_t,
    sv_g,
    H: tl.constexpr,
    REPEAT: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    VA: tl.constexpr,
    VB: tl.constexpr,
    CAUSAL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    tile, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tl.load(tile_first + tile).to(tl.int64)
    begin, end = tl.load(tile_begin + tile).to(tl.int64), tl.load(tile_end + tile).to(tl.int64)
    key = first + tl.arange(0, BN)
    ok_n = key < end
    k, v = k_TGD + group * sk_g, v_TGV + group * sv_g
    k_a, v_a = _load(k, key, sk_t, ok_n, 0, DA, D), _load(v, key, sv_t, ok_n, 0, VA, V)
    k_b, v_b = k_a, v_a
    dk_a, dv_a = tl.zeros([BN, DA], tl.float32), tl.zeros([BN, VA], tl.float32)
    dk_b, dv_b = (
        tl.zeros([BN, DB if DB > 0 else 16], tl.float32),
        tl.zeros([BN, VB if VB > 0 else 16], tl.float32),
    )
    if DB > 0:
        k_b = _load(k, key, sk_t, ok_n, DA, DB, D)
    if VB > 0:
        v_b = _load(v, key, sv_t, ok_n, VA, VB, V)
    for repeat in range(REPEAT):
        head = group * REPEAT + repeat
        for start in range(first if CAUSAL else begin, end, BM):
            row = start + tl.arange(0, BM)
            ok_m = row < end
            q_a = _load(q_THD + head * sq_h, row, sq_t, ok_m, 0, DA, D)
            do_a = _load(do_THV + head * V, row, H * V, ok_m, 0, VA, V)
            s = _dot(k_a, tl.trans(q_a), tl.zeros([BN, BM], tl.float32))
            if DB > 0:
                q_b = _load(q_THD + head * sq_h, row, sq_t, ok_m, DA, DB, D)
                s = _dot(k_b, tl.trans(q_b), s)
            lse = tl.load(lse_TH + row * H + head, mask=ok_m, other=0.0)
            delta = tl.load(delta_TH + row * H + head, mask=ok_m, other=0.0)
            visible = ok_n[:, None] & ok_m[None, :]
            if CAUSAL:
                visible = visible & (key[:, None] <= row[None, :])
            p = tl.where(visible, tl.exp2(s * (scale * LOG2E) - (lse * LOG2E)[None, :]), 0.0)
            dv_a = _dot(p.to(q_a.dtype), do_a, dv_a)
            dp = _dot(v_a, tl.trans(do_a), tl.zeros([BN, BM], tl.float32))
            if VB > 0:
                do_b = _load(do_THV + head * V, row, H * V, ok_m, VA, VB, V)
                dv_b = _dot(p.to(q_a.dtype), do_b, dv_b)
                dp = _dot(v_b, tl.trans(do_b), dp)
            ds = (p * (dp - delta[None, :])).to(q_a.dtype)
            dk_a = _dot(ds, q_a, dk_a)
            if DB > 0:
                dk_b = _dot(ds, q_b, dk_b)
    groups: tl.constexpr = H // REPEAT
    _store(dk_TGD + group * D, key, groups * D, ok_n, dk_a * scale, 0, DA, D)
    _store(dv_TGV + group * V, key, groups * V, ok_n, dv_a, 0, VA, V)
    if DB > 0:
        _store(dk_TGD + group * D, key, groups * D, ok_n, dk_b * scale, DA, DB, D)
    if VB > 0:
        _store(dv_TGV + group * V, key, groups * V, ok_n, dv_b, VA, VB, V)


@triton.jit
def flash_backward_queries(
    q_THD,
    k_TGD,
    v_TGV,
    do_THV,
    lse_TH,
    delta_TH,
    dq_THD,
    tile_first,
    tile_begin,
    tile_end,
    scale,
    sq_t,
    sq_h,
    sk_t,
    sk_g,
    sv_t,
    sv_g,
    H: tl.constexpr,
    REPEAT: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    VA: tl.constexpr,
    VB: tl.constexpr,
    CAUSAL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tl.load(tile_first + tile).to(tl.int64)
    begin, end = tl.load(tile_begin + tile).to(tl.int64), tl.load(tile_end + tile).to(tl.int64)
    row = first + tl.arange(0, BM)
    ok_m = row < end
    group = head // REPEAT
    k, v = k_TGD + group * sk_g, v_TGV + group * sv_g
    q_a, do_a = (
        _load(q_THD + head * sq_h, row, sq_t, ok_m, 0, DA, D),
        _load(do_THV + head * V, row, H * V, ok_m, 0, VA, V),
    )
    q_b, do_b = q_a, do_a
    dq_a, dq_b = tl.zeros([BM, DA], tl.float32), tl.zeros([BM, DB if DB > 0 else 16], tl.float32)
    if DB > 0:
        q_b = _load(q_THD + head * sq_h, row, sq_t, ok_m, DA, DB, D)
    if VB > 0:
        do_b = _load(do_THV + head * V, row, H * V, ok_m, VA, VB, V)
    lse = tl.load(lse_TH + row * H + head, mask=ok_m, other=0.0)
    delta = tl.load(delta_TH + row * H + head, mask=ok_m, other=0.0)
    for n in range(begin, tl.minimum(first + BM, end) if CAUSAL else end, BN):
        key = n + tl.arange(0, BN)
        ok_n = key < end
        k_a, v_a = _load(k, key, sk_t, ok_n, 0, DA, D), _load(v, key, sv_t, ok_n, 0, VA, V)
        s = _dot(q_a, tl.trans(k_a), tl.zeros([BM, BN], tl.float32))
        dp = _dot(do_a, tl.trans(v_a), tl.zeros([BM, BN], tl.float32))
        if DB > 0:
            k_b = _load(k, key, sk_t, ok_n, DA, DB, D)
            s = _dot(q_b, tl.trans(k_b), s)
        if VB > 0:
            dp = _dot(do_b, tl.trans(_load(v, key, sv_t, ok_n, VA, VB, V)), dp)
        visible = ok_n[None, :] & ok_m[:, None]
        if CAUSAL:
            visible = visible & (key[None, :] <= row[:, None])
        p = tl.where(visible, tl.exp2(s * (scale * LOG2E) - (lse * LOG2E)[:, None]), 0.0)
        ds = (p * (dp - delta[:, None])).to(k_a.dtype)
        dq_a = _dot(ds, k_a, dq_a)
        if DB > 0:
            dq_b = _dot(ds, k_b, dq_b)
    _store(dq_THD + head * D, row, H * D, ok_m, dq_a * scale, 0, DA, D)
    if DB > 0:
        _store(dq_THD + head * D, row, H * D, ok_m, dq_b * scale, DA, DB, D)


def split_dim(width: int) -> tuple[int, int]:
    """A head dim as two power-of-two tiles of at least 16, the second 0 where one suffices without waste."""
    if width <= 16:
        return 16, 0
    large = 1 << (width.bit_length() - 1)
    return (large, 0) if large == width else (large, max(16, power_of_two(width - large)))


def dims(key_dim: int, value_dim: int) -> dict[str, int]:
    """Head dims and their tiles, as the kernels' constants."""
    (da, db), (va, vb) = split_dim(key_dim), split_dim(value_dim)
    return {"D": key_dim, "V": value_dim, "DA": da, "DB": db, "VA": va, "VB": vb}


def tile_sizes(
    dtype: torch.dtype, widest: int, longest: int, backward: bool, capability: int
) -> tuple[dict[str, int], int]:
    """BM, BN and the number of warps: what fits into registers without spilling on the architecture."""
    if dtype == torch.float32:
        rows, keys, warps = 32, 32, 4
    elif capability < 90:  # operands live in registers there
        rows, keys, warps = (32, 32, 4) if backward else (64, 32, 8 if widest > 128 else 4)
    elif backward:
        rows, keys, warps = 64, 64, 8
    else:
        rows, keys, warps = 128, 64, 8
    short = max(16, power_of_two(longest))
    rows, keys = min(rows, short), min(keys, short)
    return {"BM": rows, "BN": keys}, warps if rows > 32 else 4


def query_tiles(segments: Segments, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """First row, document begin and document end of every tile, longest documents first; int32, cached."""

    def build() -> tuple[Tensor, Tensor, Tensor]:
        table = [
            (first, begin, begin + length)
            for begin, length in sorted(zip(segments.offsets, segments.lengths), key=lambda item: -item[1])
            for first in range(begin, begin + length, rows)
        ]
        columns: Any = (torch.tensor(column, dtype=torch.int32).to(device) for column in zip(*table))
        return tuple(columns)

    return segments.cached(("attention.tiles", rows, str(device)), build)


def append_tiles(
    segments: Segments, key_segments: Segments, rows: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `query_tiles`, for new tokens whose documents have earlier keys: begin and end are the keys', and
    the fourth column is what brings a query's row to the row of its own key."""

    def build() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        documents = zip(segments.offsets, segments.lengths, key_segments.offsets, key_segments.lengths)
        table = [
            (row, begin, begin + length, begin + length - (first + new))
            for first, new, begin, length in sorted(documents, key=lambda item: -item[3])
            for row in range(first, first + new, rows)
        ]
        columns: Any = (torch.tensor(column, dtype=torch.int32).to(device) for column in zip(*table))
        return tuple(columns)

    return segments.cached(("attention.append", key_segments.lengths, rows, str(device)), build)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, segments: Segments, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        tokens, heads, key_dim = q_THD.shape
        sizes, warps = tile_sizes(
            q_THD.dtype, max(key_dim, v_TGV.shape[2]), segments.max_length, False, arch(q_THD.device)
        )
        o_THV = q_THD.new_empty(tokens, heads, v_TGV.shape[2])
        lse_TH = q_THD.new_empty(tokens, heads, dtype=torch.float32)
        tiles = query_tiles(segments, sizes["BM"], q_THD.device)
        strides = [s for x in (q_THD, k_TGD, v_TGV) for s in x.stride()[:2]]
        with on_device(q_THD):
            flash_forward[(tiles[0].shape[0], heads)](
                q_THD,
                k_TGD,
                v_TGV,
                o_THV,
                lse_TH,
                *tiles,
                None,
                scale,
                *strides,
                H=heads,
                REPEAT=heads // k_TGD.shape[1],
                **dims(key_dim, v_TGV.shape[2]),
                CAUSAL=causal,
                **sizes,
                num_warps=warps,
                num_stages=2,
            )
        ctx.save_for_backward(q_THD, k_TGD, v_TGV, o_THV, lse_TH)
        ctx.settings = segments, causal, scale
        ctx.mark_non_differentiable(lse_TH)
        return o_THV, lse_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THV: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGV, o_THV, lse_TH = ctx.saved_tensors
        segments, causal, scale = ctx.settings
        tokens, heads, key_dim = q_THD.shape
        groups, value_dim = v_TGV.shape[1:]
        do_THV = do_THV.to(o_THV.dtype).contiguous()
        delta_TH = torch.empty_like(lse_TH)
        dq_THD, dk_TGD, dv_TGV = (
            torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_TGD, v_TGV)
        )
        sizes, warps = tile_sizes(
            q_THD.dtype, max(key_dim, value_dim), segments.max_length, True, arch(q_THD.device)
        )
        strides = [s for x in (q_THD, k_TGD, v_TGV) for s in x.stride()[:2]]
        by_key = query_tiles(segments, sizes["BN"], q_THD.device)
        by_query = query_tiles(segments, sizes["BM"], q_THD.device)
        constants = {
            "H": heads,
            "REPEAT": heads // groups,
            **dims(key_dim, value_dim),
            "CAUSAL": causal,
            **sizes,
            "num_warps": warps,
            "num_stages": 2,
        }
        with on_device(q_THD):
            row_dots[(triton.cdiv(tokens * heads, 16),)](
                o_THV,
                do_THV,
                delta_TH,
                tokens * heads,
                V=value_dim,
                VP=max(16, power_of_two(value_dim)),
                BR=16,
            )
            flash_backward_keys[(by_key[0].shape[0], groups)](
                q_THD,
                k_TGD,
                v_TGV,
                do_THV,
                lse_TH,
                delta_TH,
                dk_TGD,
                dv_TGV,
                *by_key,
                scale,
                *strides,
                **constants,
            )
            flash_backward_queries[(by_query[0].shape[0], heads)](
                q_THD, k_TGD, v_TGV, do_THV, lse_TH, delta_TH, dq_THD, *by_query, scale, *strides, **constants
            )
        return dq_THD, dk_TGD, dv_TGV, None, None, None


def prefers_torch(q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor) -> bool:
    """Whether torch's variable-length kernel runs this: no gradient is asked for (its backward adds up with
    atomics, so two runs would differ), half precision, equal dims of a multiple of 8, which it does not pad.
    """
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q_THD, k_TGD, v_TGV))
    return not trains and q_THD.shape[-1] == v_TGV.shape[-1] and varlen.varlen_available(q_THD, v_TGV)


def attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    segments: Segments,
    *,
    causal: bool,
    scale: float,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention, documents isolated; see :func:`earlyfusion.kernels.attention.naive.attention`.

    torch's own variable-length kernel where it fits exactly and no gradient is asked for (`prefers_torch`),
    else the kernels of this file. float64 and an empty row go to plain torch. Any strides with contiguous
    channels are read in place.

    Raises:
        ValueError: head counts, dims, dtypes or devices do not fit, the row does not match ``segments``, or a
        head dim
            is over 256.
    """
    check_attention(q_THD, k_TGD, v_TGV, segments)
    _check_kernel_takes(q_THD, k_TGD, v_TGV)
    dtype = compute_dtype(q_THD, k_TGD, v_TGV)
    q, k, v = (x.to(dtype) for x in (q_THD, k_TGD, v_TGV))
    if dtype == torch.float64 or segments.total == 0 or prefers_torch(q, k, v):
        return varlen.attention(q, k, v, segments, causal=causal, scale=scale, return_lse=return_lse)
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    o_THV, lse_TH = _Flash.apply(q, k, v, segments, causal, scale)
    return o_THV, lse_TH if return_lse else None


@torch.no_grad()
def attention_append(
    q_THD: Tensor, k_LGD: Tensor, v_LGV: Tensor, segments: Segments, key_segments: Segments, *, scale: float
) -> Tensor:
    """See :func:`earlyfusion.kernels.attention.naive.attention_append`; there is no backward pass.

    Raises:
        ValueError: as there, or a dtype, device or head dim (over 256) that the kernel does not take.
    """
    check_append(q_THD, k_LGD, v_LGV, segments, key_segments)
    dtype = compute_dtype(q_THD, k_LGD, v_LGV)
    if dtype == torch.float64 or segments.total == 0:
        return naive.attention_append(q_THD, k_LGD, v_LGV, segments, key_segments, scale=scale)
    _check_kernel_takes(q_THD, k_LGD, v_LGV)
    q, k, v = (x.to(dtype) for x in (q_THD, k_LGD, v_LGV))
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    heads, key_dim, value_dim = q.shape[1], q.shape[2], v.shape[2]
    longest, widest = key_segments.max_length, max(key_dim, value_dim)
    sizes, warps = tile_sizes(dtype, widest, longest, False, arch(q.device))
    o_THV = q.new_empty(q.shape[0], heads, value_dim)
    lse_TH = q.new_empty(q.shape[0], heads, dtype=torch.float32)
    tiles = append_tiles(segments, key_segments, sizes["BM"], q.device)
    strides = [s for x in (q, k, v) for s in x.stride()[:2]]
    with on_device(q):
        flash_forward[(tiles[0].shape[0], heads)](
            q,
            k,
            v,
            o_THV,
            lse_TH,
            *tiles,
            scale,
            *strides,
            H=heads,
            REPEAT=heads // k.shape[1],
            **dims(key_dim, value_dim),
            CAUSAL=True,
            **sizes,
            num_warps=warps,
            num_stages=2,
        )
    return o_THV


def _check_kernel_takes(q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor) -> None:
    """Raise ValueError naming the argument of a wrong dtype, device or head dim."""
    for name, tensor in (("q_THD", q_THD), ("k_TGD", k_TGD), ("v_TGV", v_TGV)):
        if tensor.dtype not in (*FLOATS, torch.float64):
            raise ValueError(f"attention: {name} is {tensor.dtype}; expected float32, bfloat16 or float16")
        if tensor.device != q_THD.device:
            raise ValueError(f"attention: {name} is on {tensor.device}; expected {q_THD.device} like q_THD")
        if tensor.shape[2] > 256:
            raise ValueError(
                f"attention: {name} has head dim {tensor.shape[2]}; the kernels take at most 256"
            )


def aot_variants() -> list[Any]:
    """Kernels that are compiled ahead of time: MLA 192/128 causal, also after earlier keys; the towers' 72
    and 128."""
    half = dict.fromkeys(
        ("q_THD", "k_TGD", "v_TGV", "o_THV", "do_THV", "dq_THD", "dk_TGD", "dv_TGV"), "*bf16"
    )
    strides = ("sq_t", "sq_h", "sk_t", "sk_g", "sv_t", "sv_g")
    types = {
        **half,
        "lse_TH": "*fp32",
        "delta_TH": "*fp32",
        "scale": "fp32",
        "rows": "i32",
        **dict.fromkeys(("tile_first", "tile_begin", "tile_end"), "*i32"),
        **dict.fromkeys(strides, "i32"),
    }
    variants = []
    shapes = (
        ("MLA 192/128", 32, 192, 128, True),
        ("tower 72", 16, 72, 72, False),
        ("tower 128", 12, 128, 128, False),
    )
    kernels = ((flash_forward, False), (flash_backward_keys, True), (flash_backward_queries, True))
    for label, heads, d, v, causal in shapes:
        for fn, backward in kernels:
            for capability in (90, 80):
                sizes, warps = tile_sizes(torch.bfloat16, max(d, v), 4096, backward, capability)
                constants = {"H": heads, "REPEAT": 1, **dims(d, v), "CAUSAL": causal, **sizes}
                name = f"{fn.__name__} {label}"
                together = {"tile_shift": None} if fn is flash_forward else {}
                variants.append(Variant(name, fn, types, constants | together, warps, 2, strides, capability))
                if together and causal:
                    shifted = types | {"tile_shift": "*i32"}
                    variants.append(
                        Variant(f"{name} append", fn, shifted, constants, warps, 2, strides, capability)
                    )
    variants.append(Variant("row_dots 128", row_dots, types, {"V": 128, "VP": 128, "BR": 16}))
    return variants
