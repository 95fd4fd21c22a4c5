"""Phase 1 of Attention Residuals on a GPU: the S queries of a block over its n finished sources, forward and
backward.

A program takes BT tokens. Its rows are (token, source) pairs, gathered through a tuple of pointers, so the
sources need no stacking; the queries of a token are (token, query) rows of a second tile. Scores, mixtures
and gradients are then small matrix products between the two, masked to pairs of the same token:

    forward    s = QW V^T r      P = softmax(s)        O  = P V
    backward   dP = X V^T        A = P (dP - delta) r  dV = P^T X + A^T QW - c V

Both passes walk over D in tiles that divide it (2304 = 9 x 256); the second one finds the rows in the cache.
float32 factors are split into 16-bit parts, so that the products run on tensor cores and lose nothing: V and
X are 16-bit already. The gradient of the queries, sum_t A V, is a second kernel over column slabs with one
partial sum per program and a fixed order of addition: nothing is atomic, and no float32 tensor of [T, D]
exists.

Saved: sources, queries and the scores [T, n, S] (120 bytes a token for n = 5, S = 6, against 23 kB of
sources).

Legend: n sources, S sub-layers (queries), T tokens, D hidden; R = BT * NP source rows and M = BT * SP query
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.aot import Variant
from earlyfusion.kernels.attnres import two_phase
from earlyfusion.kernels.attnres.naive import check_sources
from earlyfusion.kernels.launch import check_tensor, column_tile, on_device, power_of_two, programs

MOST_SOURCES = 128  # the backward takes three pointers each, and a kernel's arguments may take 4 kB


@triton.jit
def dot_parts(a, b, PARTS: tl.constexpr):
    """a @ b for float32 ``a`` and stored ``b``: exact products on tensor cores, ``a`` in PARTS 16-bit
    parts."""
    if b.dtype == tl.float32:
        out = tl.dot(a, b, input_precision="tf32x3")
    else:
        part = a.to(b.dtype)
        out = tl.dot(part, b)
        for _ in tl.static_range(PARTS - 1):
            a -= part.to(tl.float32)
            part = a.to(b.dtype)
            out = tl.dot(part, b, out)
    return out


@triton.jit
def dot_stored(a, b):
    """a @ b for two stored operands."""
    if b.dtype == tl.float32:
        out = tl.dot(a, b, input_precision="tf32x3")
    else:
        out = tl.dot(a, b)
    return out


@triton.jit
def pick(pointers, index, COUNT: tl.constexpr):
    """Block of pointers: ``pointers[index]`` for every entry of ``index`` (the first where it is out of
    range)."""
    base = pointers[0] + tl.zeros_like(index)
    for i in tl.static_range(1, COUNT):
        base = tl.where(index == i, pointers[i], base)
    return base


@triton.jit
def phase1_forward(
    sources,
    outs,
    qw_SD,
    lse_ST,
    scores_TnS,
    inverse_Tn,
    T,
    eps,
    N: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    NP: tl.constexpr,
    SP: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BT
    row, query = tl.arange(0, BT * NP), tl.arange(0, BT * SP)
    i_R, t_R = (row % NP).to(tl.int64), first + row // NP
    s_M, t_M = (query % SP).to(tl.int64), first + query // SP
    ok_R, ok_M = (i_R < N) & (t_R < T), (s_M < S) & (t_M < T)
    v_R = pick(sources, i_R, N) + t_R * D
    square_RB = tl.zeros([BT * NP, BD], tl.float32)
    s_MR = tl.zeros([BT * SP, BT * NP], tl.float32)
    for d in range(0, D, BD):
        col = d + tl.arange(0, BD)
        v = tl.load(v_R[:, None] + col[None, :], mask=ok_R[:, None] & (col < D)[None, :], other=0.0)
        qw = tl.load(
            qw_SD + s_M[:, None] * D + col[None, :], mask=(s_M < S)[:, None] & (col < D)[None, :], other=0.0
        )
        s_MR += dot_parts(qw.to(tl.float32), tl.trans(v), 3)
        wide = v.to(tl.float32)
        square_RB += wide * wide
    r_R = tl.rsqrt(tl.sum(square_RB, axis=1) / D + eps)
    s_MR *= r_R[None, :]
    own_MR = (t_M[:, None] == t_R[None, :]) & (i_R < N)[None, :]
    top_M = tl.max(tl.where(own_MR, s_MR, float("-inf")), axis=1)
    p_MR = tl.where(own_MR, tl.exp(s_MR - top_M[:, None]), 0.0)
    total_M = tl.sum(p_MR, axis=1)
    p_MR /= total_M[:, None]
    tl.store(lse_ST + s_M * T + t_M, top_M + tl.log(total_M), mask=ok_M)
    tl.store(inverse_Tn + t_R * N + i_R, r_R, mask=ok_R)
    at_MR = (t_R * N + i_R)[None, :] * S + s_M[:, None]
    tl.store(scores_TnS + at_MR, s_MR, mask=own_MR & ok_M[:, None] & ok_R[None, :])
    o_M = pick(outs, s_M, S) + t_M * D
    for d in range(0, D, BD):
        col = d + tl.arange(0, BD)
        v = tl.load(v_R[:, None] + col[None, :], mask=ok_R[:, None] & (col < D)[None, :], other=0.0)
        o = dot_parts(p_MR, v, 2)
        tl.store(o_M[:, None] + col[None, :], o.to(v.dtype), mask=ok_M[:, None] & (col < D)[None, :])


@triton.jit
def phase1_backward(
    sources,
    douts,
    laters,
    dsources,
    qw_SD,
    lse_ST,
    dlse_ST,
    scores_TnS,
    inverse_Tn,
    a_TnS,
    T,
    N: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    NP: tl.constexpr,
    SP: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    CARRY: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BT
    row, query = tl.arange(0, BT * NP), tl.arange(0, BT * SP)
    i_R, t_R = (row % NP).to(tl.int64), first + row // NP
    s_M, t_M = (query % SP).to(tl.int64), first + query // SP
    ok_R, ok_M = (i_R < N) & (t_R < T), (s_M < S) & (t_M < T)
    v_R = pick(sources, i_R, N) + t_R * D
    x_M = pick(douts, s_M, S) + t_M * D
    dp_MR = tl.zeros([BT * SP, BT * NP], tl.float32)
    for d in range(0, D, BD):
        col = d + tl.arange(0, BD)
        v = tl.load(v_R[:, None] + col[None, :], mask=ok_R[:, None] & (col < D)[None, :], other=0.0)
        x = tl.load(x_M[:, None] + col[None, :], mask=ok_M[:, None] & (col < D)[None, :], other=0.0)
        dp_MR += dot_stored(x, tl.trans(v))
    own_MR = (t_M[:, None] == t_R[None, :]) & ok_M[:, None] & ok_R[None, :]
    at_MR = (t_R * N + i_R)[None, :] * S + s_M[:, None]
    s_MR = tl.load(scores_TnS + at_MR, mask=own_MR, other=0.0)
    r_R = tl.load(inverse_Tn + t_R * N + i_R, mask=ok_R, other=0.0)
    lse_M = tl.load(lse_ST + s_M * T + t_M, mask=ok_M, other=0.0)
    dlse_M = tl.load(dlse_ST + s_M * T + t_M, mask=ok_M, other=0.0)
    p_MR = tl.where(own_MR, tl.exp(s_MR - lse_M[:, None]), 0.0)
    delta_M = tl.sum(p_MR * dp_MR, axis=1) - dlse_M
    a_MR = p_MR * (dp_MR - delta_M[:, None]) * r_R[None, :]
    c_R = tl.sum(a_MR * s_MR, axis=0) * r_R / D
    tl.store(a_TnS + at_MR, a_MR, mask=own_MR)
    p_RM, a_RM = tl.trans(p_MR), tl.trans(a_MR)
    dv_R = pick(dsources, i_R, N) + t_R * D
    later_R = pick(laters, i_R, N) + t_R * D
    for d in range(0, D, BD):
        col = d + tl.arange(0, BD)
        keep_R, keep_M = ok_R[:, None] & (col < D)[None, :], ok_M[:, None] & (col < D)[None, :]
        v = tl.load(v_R[:, None] + col[None, :], mask=keep_R, other=0.0)
        x = tl.load(x_M[:, None] + col[None, :], mask=keep_M, other=0.0)
        qw = tl.load(qw_SD + s_M[:, None] * D + col[None, :], mask=keep_M, other=0.0).to(tl.float32)
        dv = dot_parts(p_RM, x, 2)
        dv = tl.dot(a_RM, qw, dv, input_precision="tf32x3")
        dv -= c_R[:, None] * v.to(tl.float32)
        if CARRY:
            dv += tl.load(later_R[:, None] + col[None, :], mask=keep_R, other=0.0).to(tl.float32)
        tl.store(dv_R[:, None] + col[None, :], dv.to(v.dtype), mask=keep_R)


@triton.jit
def query_gradient(
    sources,
    a_TnS,
    partial_PSD,
    T,
    rows_per_program,
    N: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    NP: tl.constexpr,
    SP: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """One column slab and one range of tokens: sum_t sum_i a_tis v_ti, in token order."""
    col = tl.program_id(0) * BD + tl.arange(0, BD)
    part = tl.program_id(1).to(tl.int64)
    row, s_S = tl.arange(0, BT * NP), tl.arange(0, SP)
    i_R = (row % NP).to(tl.int64)
    base_R = pick(sources, i_R, N)
    start = part * rows_per_program
    end = tl.minimum(start + rows_per_program, T)
    acc_SB = tl.zeros([SP, BD], tl.float32)
    for first in range(start, end, BT):
        t_R = first + row // NP
        ok_R = (i_R < N) & (t_R < end)
        v = tl.load(
            base_R[:, None] + t_R[:, None] * D + col[None, :],
            mask=ok_R[:, None] & (col < D)[None, :],
            other=0.0,
        )
        at_SR = (t_R * N + i_R)[None, :] * S + s_S[:, None]
        a = tl.load(a_TnS + at_SR, mask=ok_R[None, :] & (s_S < S)[:, None], other=0.0)
        acc_SB += dot_parts(a, v, 2)
    out = partial_PSD + (part * S + s_S)[:, None] * D + col[None, :]
    tl.store(out, acc_SB, mask=(s_S < S)[:, None] & (col < D)[None, :])


def tiles(sources: int, queries: int, width: int) -> dict[str, int]:
    """Tile sizes: powers of two, at least 16 rows on either side, columns that divide the width where
    possible."""
    rows, columns = max(8, power_of_two(sources)), max(8, power_of_two(queries))
    tokens = 2 if rows <= 16 else 1
    columns = max(columns, 16 // tokens)
    larger = tokens * max(rows, columns)
    most = 128 if larger <= 32 else 64 if larger <= 128 else 32
    return {
        "N": sources,
        "S": queries,
        "D": width,
        "NP": rows,
        "SP": columns,
        "BT": tokens,
        "BD": column_tile(width, most),
    }


def forward_sizes(sizes: dict[str, int]) -> dict[str, int]:
    """The forward splits the queries into three parts per tile; narrower tiles keep it at 128 registers."""
    return sizes | {"BD": min(64, sizes["BD"])}


def warps(sizes: dict[str, int]) -> int:
    """Warps of a program: more where the tiles are large, so that they stay in registers."""
    return 4 if sizes["BT"] * max(sizes["NP"], sizes["SP"]) <= 32 else 8


def _check(sources: Sequence[Tensor], qw_SD: Tensor, op: str = "attnres_phase1") -> None:
    check_sources(sources, qw_SD.shape[-1])
    first = sources[0]
    for index, source in enumerate(sources):
        check_tensor(op, f"sources[{index}]", source, first.shape, (first.dtype,), first.device)
    if qw_SD.dim() != 2 or qw_SD.shape[0] < 1:
        raise ValueError(f"{op}: qw_SD has shape {tuple(qw_SD.shape)}; expected [queries, {first.shape[1]}]")
    check_tensor(op, "qw_SD", qw_SD, None, (torch.float32, torch.bfloat16, torch.float16), first.device)


class _Phase1(torch.autograd.Function):
    """(qw, eps, carry, n, *sources) -> S mixtures, lse [S, T], and with ``carry`` the sources again.

    With ``carry`` the caller goes on with the returned sources. Their gradient (of all later blocks) then
    arrives here and is added inside the kernel, which saves a pass over the gradients of all sources per
    block.
    """

    @staticmethod
    def forward(ctx: Any, qw_SD: Tensor, eps: float, carry: bool, stacked: bool, *sources: Tensor) -> tuple:
        tokens, width = sources[0].shape
        queries, count = qw_SD.shape[0], len(sources)
        base = sources[0]
        buffer = base.new_empty(queries, tokens, width) if stacked else None
        rows = (
            buffer.unbind() if buffer is not None else [base.new_empty(tokens, width) for _ in range(queries)]
        )
        lse_ST = base.new_empty(queries, tokens, dtype=torch.float32)
        scores_TnS = base.new_empty(tokens, count, queries, dtype=torch.float32)
        inverse_Tn = base.new_empty(tokens, count, dtype=torch.float32)
        sizes = tiles(count, queries, width)
        if tokens:
            with on_device(base):
                phase1_forward[(triton.cdiv(tokens, sizes["BT"]),)](
                    tuple(sources),
                    tuple(rows),
                    qw_SD,
                    lse_ST,
                    scores_TnS,
                    inverse_Tn,
                    tokens,
                    eps,
                    **forward_sizes(sizes),
                    num_warps=warps(sizes),
                    num_stages=3,
                )
        ctx.save_for_backward(qw_SD, lse_ST, scores_TnS, inverse_Tn, *sources)
        ctx.carry, ctx.sizes = carry, sizes
        outs = (buffer,) if buffer is not None else tuple(rows)
        passed = tuple(source.view_as(source) for source in sources) if carry else ()
        return *outs, lse_ST, *passed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        qw_SD, lse_ST, scores_TnS, inverse_Tn, *sources = ctx.saved_tensors
        (tokens, width), count = sources[0].shape, len(sources)
        later = gradients[len(gradients) - count :] if ctx.carry else ()
        *douts, dlse_ST = gradients[: len(gradients) - len(later)]
        if len(douts) == 1 and douts[0].dim() == 3:
            douts = list(douts[0].contiguous().unbind())
        dtype = sources[0].dtype
        douts = [x.to(dtype).contiguous() for x in douts]
        later = tuple(x.to(dtype).contiguous() for x in later) or tuple(sources)
        dsources = [torch.empty_like(source) for source in sources]
        a_TnS = torch.empty_like(scores_TnS)
        sizes = ctx.sizes
        split, partial_PSD = query_partials(qw_SD, tokens, sizes)
        if tokens:
            with on_device(qw_SD):
                phase1_backward[(triton.cdiv(tokens, sizes["BT"]),)](
                    tuple(sources),
                    tuple(douts),
                    later,
                    tuple(dsources),
                    qw_SD,
                    lse_ST,
                    dlse_ST.contiguous(),
                    scores_TnS,
                    inverse_Tn,
                    a_TnS,
                    tokens,
                    **sizes,
                    CARRY=ctx.carry,
                    num_warps=warps(sizes),
                    num_stages=2,
                )
                slab = query_sizes(sizes)
                query_gradient[(triton.cdiv(width, slab["BD"]), partial_PSD.shape[0])](
                    tuple(sources),
                    a_TnS,
                    partial_PSD,
                    tokens,
                    split,
                    **slab,
                    num_warps=warps(slab),
                    num_stages=2,
                )
        dqw_SD = partial_PSD.sum(dim=0).to(qw_SD.dtype)
        return dqw_SD, None, None, None, *dsources


def query_sizes(sizes: dict[str, int]) -> dict[str, int]:
    """Tiles of the query gradient: at least 16 query rows, and enough tokens a step to fill a product."""
    return sizes | {"SP": max(16, sizes["SP"]), "BT": max(1, 32 // sizes["NP"]), "BD": min(128, sizes["BD"])}


def query_partials(qw_SD: Tensor, tokens: int, sizes: dict[str, int]) -> tuple[int, Tensor]:
    """Tokens per program (a function of shape and device alone, so sums have one order) and the partial
    sums."""
    slab = query_sizes(sizes)
    slabs = -(-sizes["D"] // slab["BD"])
    wanted = max(1, min(4 * programs(qw_SD.device) // slabs, -(-tokens // slab["BT"])))
    split = max(1, -(-tokens // wanted))
    count = -(-tokens // split)
    return split, qw_SD.new_empty(count, *qw_SD.shape, dtype=torch.float32)


def phase1(sources: Sequence[Tensor], qw_SD: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mix finished sources for S queries at once; see :func:`earlyfusion.kernels.attnres.naive.phase1`.

    Returns:
        ``(o_STD, lse_ST)``, both differentiable, the first in the sources' dtype, the second float32.
    Raises:
        ValueError: no sources; shapes, dtypes, devices or layouts do not fit. float64 and more than
            128 sources go to the plain torch form.
    """
    if sources and (sources[0].dtype == torch.float64 or len(sources) > MOST_SOURCES):
        return two_phase.phase1(sources, qw_SD, eps)
    _check(sources, qw_SD)
    return _Phase1.apply(qw_SD, eps, False, True, *sources)


def open_block(
    sources: Sequence[Tensor], qw_SD: Tensor, eps: float
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Phase 1 as a block uses it; see :func:`earlyfusion.kernels.attnres.fused.open_block`."""
    if sources and (sources[0].dtype == torch.float64 or len(sources) > MOST_SOURCES):
        o_STD, lse_ST = two_phase.phase1(sources, qw_SD, eps)
        return o_STD.unbind(), lse_ST.unbind(), tuple(sources)
    _check(sources, qw_SD, "attnres_open")
    queries = qw_SD.shape[0]
    outs = _Phase1.apply(qw_SD, eps, True, False, *sources)
    return outs[:queries], outs[queries].unbind(), outs[queries + 1 :]


def aot_variants() -> list[Any]:
    """Kernels and shapes that are compiled ahead of time: 48B (9 blocks), d = 4096, K3, and a full-mode
    mix."""
    variants = []
    for label, n, s, d in (
        ("48B", 9, 6, 2304),
        ("d4096", 5, 8, 4096),
        ("K3", 8, 24, 7168),
        ("full", 54, 1, 2304),
    ):
        sizes = tiles(n, s, d)
        rows, outs = ("*bf16",) * n, ("*bf16",) * s
        state = {
            "qw_SD": "*fp32",
            "lse_ST": "*fp32",
            "scores_TnS": "*fp32",
            "inverse_Tn": "*fp32",
            "T": "i32",
        }
        forward = {"sources": rows, "outs": outs, **state, "eps": "fp32"}
        backward = {
            "sources": rows,
            "douts": outs,
            "laters": rows,
            "dsources": rows,
            **state,
            "dlse_ST": "*fp32",
            "a_TnS": "*fp32",
        }
        slab = query_sizes(sizes)
        gradient = {
            "sources": rows,
            "a_TnS": "*fp32",
            "partial_PSD": "*fp32",
            "T": "i32",
            "rows_per_program": "i32",
        }
        variants += [
            Variant(
                f"attnres phase1 forward {label}",
                phase1_forward,
                forward,
                forward_sizes(sizes),
                warps(sizes),
                3,
            ),
            Variant(
                f"attnres phase1 backward {label}",
                phase1_backward,
                backward,
                {**sizes, "CARRY": True},
                warps(sizes),
            ),
            Variant(f"attnres query gradient {label}", query_gradient, gradient, slab, warps(slab), 2),
        ]
    return variants
