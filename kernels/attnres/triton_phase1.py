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
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language import constexpr

from earlyfusion.kernels.attnres import two_phase
from earlyfusion.kernels.attnres.two_phase import Rows
from earlyfusion.kernels.checks import check_shapes, check_sources, check_tensors
from earlyfusion.kernels.launch import column_tile, hardware, on_device, power_of_two

# Sources are separate tensors: stacking them would cost a pass over all of them per block.
MOST_SOURCES = 128  # the backward takes three pointers each, and a kernel's arguments may take 4 kB


@triton.jit
def dot_parts(a, b, PARTS: constexpr):
    """a @ b for ``a`` in float32, or as stored, and stored ``b``: exact products on tensor cores, ``a`` in
    PARTS 16-bit parts."""
    if b.dtype == tl.float32:
        out = tl.dot(a, b, input_precision="tf32x3")
    else:
        # What 16 bits leave of a float32 number is the next part.
        part = a.to(b.dtype)
        out = tl.dot(part, b)
        for _ in tl.static_range(PARTS - 1):
            a -= part.to(tl.float32)
            part = a.to(b.dtype)
            out = tl.dot(part, b, out)
    return out


@triton.jit
def pick(pointers, index, COUNT: constexpr):
    """Block of pointers: ``pointers[index]`` for every entry of ``index`` (the first where it is out of
    range)."""
    # A tuple of pointers is known at compile time only by place: one select per source.
    base = pointers[0] + tl.zeros_like(index)
    for i in tl.static_range(1, COUNT):
        base = tl.where(index == i, pointers[i], base)
    return base


@triton.jit
def source_rows(sources, first, end, S: constexpr):
    """The BT * NP (token, source) pairs of a tile: source, token, is there one, pointer to its row."""
    row = tl.arange(0, S.BT * S.NP)
    i, t = (row % S.NP).to(tl.int64), first + row // S.NP
    return i, t, (i < S.N) & (t < end), pick(sources, i, S.N) + t * S.D


@triton.jit
def query_rows(first, end, S: constexpr):
    """The BT * SP (token, query) pairs of a tile: query, token, is there one."""
    row = tl.arange(0, S.BT * S.SP)
    s, t = (row % S.SP).to(tl.int64), first + row // S.SP
    return s, t, (s < S.S) & (t < end)


@triton.jit
def load_columns(rows, ok, col, D: constexpr):
    """[rows, columns] from a pointer for each row."""
    return tl.load(rows[:, None] + col[None, :], mask=ok[:, None] & (col < D)[None, :], other=0.0)


@triton.jit
def phase1_forward(sources, outs, qw_SD, lse_ST, scores_TnS, inverse_Tn, T, eps, S: constexpr):
    first = tl.program_id(0).to(tl.int64) * S.BT
    i_R, t_R, ok_R, v_R = source_rows(sources, first, T, S)
    s_M, t_M, ok_M = query_rows(first, T, S)
    R: constexpr = S.BT * S.NP
    M: constexpr = S.BT * S.SP
    BD: constexpr = S.BD
    # Norms and scores in one walk over D.
    square_RB, s_MR = tl.zeros([R, BD], tl.float32), tl.zeros([M, R], tl.float32)
    for d in range(0, S.D, BD):
        col = d + tl.arange(0, BD)
        v = load_columns(v_R, ok_R, col, S.D)
        qw = load_columns(qw_SD + s_M * S.D, s_M < S.S, col, S.D)
        s_MR += dot_parts(qw.to(tl.float32), tl.trans(v), 3)
        wide = v.to(tl.float32)
        square_RB += wide * wide

    # Softmax over the sources of the same token.
    r_R = tl.rsqrt(tl.sum(square_RB, axis=1) / S.D + eps)
    s_MR *= r_R[None, :]
    # Rows of other tokens share the product and are masked out of the softmax.
    own_MR = (t_M[:, None] == t_R[None, :]) & (i_R < S.N)[None, :]
    top_M = tl.max(tl.where(own_MR, s_MR, float("-inf")), axis=1)
    p_MR = tl.where(own_MR, tl.exp(s_MR - top_M[:, None]), 0.0)
    total_M = tl.sum(p_MR, axis=1)
    p_MR /= total_M[:, None]
    tl.store(lse_ST + s_M * T + t_M, top_M + tl.log(total_M), mask=ok_M)
    tl.store(inverse_Tn + t_R * S.N + i_R, r_R, mask=ok_R)
    at_MR = (t_R * S.N + i_R)[None, :] * S.S + s_M[:, None]
    tl.store(scores_TnS + at_MR, s_MR, mask=own_MR & ok_M[:, None] & ok_R[None, :])

    # The mixtures: this walk finds the rows in the cache.
    o_M = pick(outs, s_M, S.S) + t_M * S.D
    for d in range(0, S.D, BD):
        col = d + tl.arange(0, BD)
        v = load_columns(v_R, ok_R, col, S.D)
        o = dot_parts(p_MR, v, 2)
        tl.store(o_M[:, None] + col[None, :], o.to(v.dtype), mask=ok_M[:, None] & (col < S.D)[None, :])


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
    S: constexpr,
):
    """laters: gradients of the sources that later blocks left, or None."""
    first = tl.program_id(0).to(tl.int64) * S.BT
    i_R, t_R, ok_R, v_R = source_rows(sources, first, T, S)
    s_M, t_M, ok_M = query_rows(first, T, S)
    x_M = pick(douts, s_M, S.S) + t_M * S.D
    R: constexpr = S.BT * S.NP
    M: constexpr = S.BT * S.SP
    dp_MR = tl.zeros([M, R], tl.float32)
    for d in range(0, S.D, S.BD):
        col = d + tl.arange(0, S.BD)
        v, x = load_columns(v_R, ok_R, col, S.D), load_columns(x_M, ok_M, col, S.D)
        dp_MR += dot_parts(x, tl.trans(v), 1)

    own_MR = (t_M[:, None] == t_R[None, :]) & ok_M[:, None] & ok_R[None, :]
    at_MR = (t_R * S.N + i_R)[None, :] * S.S + s_M[:, None]
    s_MR = tl.load(scores_TnS + at_MR, mask=own_MR, other=0.0)
    r_R = tl.load(inverse_Tn + t_R * S.N + i_R, mask=ok_R, other=0.0)
    lse_M = tl.load(lse_ST + s_M * T + t_M, mask=ok_M, other=0.0)
    dlse_M = tl.load(dlse_ST + s_M * T + t_M, mask=ok_M, other=0.0)
    p_MR = tl.where(own_MR, tl.exp(s_MR - lse_M[:, None]), 0.0)
    # As in the torch form: what all sources have in common has no gradient.
    delta_M = tl.sum(p_MR * dp_MR, axis=1) - dlse_M
    a_MR = p_MR * (dp_MR - delta_M[:, None]) * r_R[None, :]
    c_R = tl.sum(a_MR * s_MR, axis=0) * r_R / S.D
    tl.store(a_TnS + at_MR, a_MR, mask=own_MR)

    # Small matrices: what multiplies D columns is either 16-bit as stored, or a handful of coefficients.
    p_RM, a_RM = tl.trans(p_MR), tl.trans(a_MR)
    dv_R = pick(dsources, i_R, S.N) + t_R * S.D
    for d in range(0, S.D, S.BD):
        col = d + tl.arange(0, S.BD)
        v, x = load_columns(v_R, ok_R, col, S.D), load_columns(x_M, ok_M, col, S.D)
        qw = load_columns(qw_SD + s_M * S.D, ok_M, col, S.D).to(tl.float32)
        dv = dot_parts(p_RM, x, 2)
        dv = tl.dot(a_RM, qw, dv, input_precision="tf32x3")
        dv -= c_R[:, None] * v.to(tl.float32)
        if laters is not None:
            later_R = pick(laters, i_R, S.N) + t_R * S.D
            dv += load_columns(later_R, ok_R, col, S.D).to(tl.float32)
        keep = ok_R[:, None] & (col < S.D)[None, :]
        tl.store(dv_R[:, None] + col[None, :], dv.to(v.dtype), mask=keep)


@triton.jit
def query_gradient(sources, a_TnS, partial_PSD, T, rows_per_program, S: constexpr):
    """One column slab and one range of tokens: sum_t sum_i a_tis v_ti, in token order."""
    BD: constexpr = S.BD
    SP: constexpr = S.SP
    col = tl.program_id(0) * BD + tl.arange(0, BD)
    part, s_S = tl.program_id(1).to(tl.int64), tl.arange(0, SP)
    start = part * rows_per_program
    end = tl.minimum(start + rows_per_program, T)
    acc_SB = tl.zeros([SP, BD], tl.float32)
    for first in range(start, end, S.BT):
        # In token order, so that a sum has one value.
        i_R, t_R, ok_R, v_R = source_rows(sources, first, end, S)
        v = load_columns(v_R, ok_R, col, S.D)
        at_SR = (t_R * S.N + i_R)[None, :] * S.S + s_S[:, None]
        a = tl.load(a_TnS + at_SR, mask=ok_R[None, :] & (s_S < S.S)[:, None], other=0.0)
        acc_SB += dot_parts(a, v, 2)
    out = partial_PSD + (part * S.S + s_S)[:, None] * S.D + col[None, :]
    tl.store(out, acc_SB, mask=(s_S < S.S)[:, None] & (col < S.D)[None, :])


class Sizes(NamedTuple):
    """Constants that the kernels are compiled for."""

    N: int  # sources
    S: int  # queries
    D: int
    NP: int  # sources and queries of a tile, powers of two
    SP: int
    BT: int  # tokens and columns of a tile
    BD: int

    def launch(self, stages: int) -> dict[str, Any]:
        """Options of a launch; more warps where the tiles are large, so that they stay in registers."""
        warps = 4 if self.BT * max(self.NP, self.SP) <= 32 else 8
        return {"S": self, "num_warps": warps, "num_stages": stages}


def tiles(sources: int, queries: int, width: int) -> Sizes:
    """Powers of two, at least 16 rows on either side, columns that divide the width where possible."""
    # 16 rows on either side are the least that a product takes.
    rows = max(8, power_of_two(sources))
    tokens = 2 if rows <= 16 else 1
    columns = max(power_of_two(queries), 16 // tokens)
    larger, most = tokens * max(rows, columns), 32
    if larger <= 32:
        most = 128
    elif larger <= 128:
        most = 64
    return Sizes(sources, queries, width, rows, columns, tokens, column_tile(width, most))


class _Phase1(torch.autograd.Function):
    """(qw, eps, *sources) -> S mixtures, lse [S, T], and the sources again.

    The gradient of the returned sources (that of all later blocks) is added inside the kernel, which saves a
    pass over the gradients of all sources per block.
    """

    @staticmethod
    def forward(ctx: Any, qw_SD: Tensor, eps: float, *sources: Tensor) -> Rows:
        (tokens, width), queries, count, base = sources[0].shape, qw_SD.shape[0], len(sources), sources[0]
        outs = tuple(torch.empty_like(base) for _ in range(queries))
        lse_ST = base.new_empty(queries, tokens, dtype=torch.float32)
        scores_TnS = base.new_empty(tokens, count, queries, dtype=torch.float32)
        inverse_Tn = base.new_empty(tokens, count, dtype=torch.float32)
        sizes = tiles(count, queries, width)
        if tokens:
            # Queries are split into three parts per tile; narrower tiles keep it at 128 registers.
            narrow = sizes._replace(BD=min(64, sizes.BD))
            with on_device(base):
                phase1_forward[(triton.cdiv(tokens, sizes.BT),)](
                    sources, outs, qw_SD, lse_ST, scores_TnS, inverse_Tn, tokens, eps, **narrow.launch(3)
                )

        ctx.save_for_backward(qw_SD, lse_ST, scores_TnS, inverse_Tn, *sources)
        ctx.sizes = sizes
        # Sources that nobody reads again shall not cost a tensor of zeros each.
        ctx.set_materialize_grads(False)
        # Views, so that autograd sees the sources come out again.
        return *outs, lse_ST, *(source.view_as(source) for source in sources)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        qw_SD, lse_ST, scores_TnS, inverse_Tn, *saved = ctx.saved_tensors
        sources, sizes, (tokens, width) = tuple(saved), ctx.sizes, saved[0].shape

        def dense(gradient: Tensor | None, like: Tensor) -> Tensor:
            return torch.zeros_like(like) if gradient is None else gradient.to(like.dtype).contiguous()

        douts = tuple(dense(gradient, sources[0]) for gradient in gradients[: sizes.S])
        dlse_ST, laters = dense(gradients[sizes.S], lse_ST), None
        if any(gradient is not None for gradient in gradients[sizes.S + 1 :]):
            laters = tuple(map(dense, gradients[sizes.S + 1 :], sources))
        dsources, a_TnS = tuple(map(torch.empty_like, sources)), torch.empty_like(scores_TnS)

        # Tiles of the query gradient: at least 16 query rows, and enough tokens a step to fill a product.
        slab = sizes._replace(SP=max(16, sizes.SP), BT=max(1, 32 // sizes.NP), BD=min(128, sizes.BD))
        slabs = triton.cdiv(width, slab.BD)
        # Enough programs for the device, and few enough that their partial sums stay small: a function of
        # shape and device alone, so sums have one order.
        most = 4 * hardware(qw_SD.device).multiprocessors // slabs
        split = max(1, triton.cdiv(tokens, max(1, min(most, triton.cdiv(tokens, slab.BT)))))
        partial_PSD = qw_SD.new_empty(triton.cdiv(tokens, split), *qw_SD.shape, dtype=torch.float32)
        if tokens:
            made = qw_SD, lse_ST, dlse_ST, scores_TnS, inverse_Tn, a_TnS, tokens
            with on_device(qw_SD):
                phase1_backward[(triton.cdiv(tokens, sizes.BT),)](
                    sources, douts, laters, dsources, *made, **sizes.launch(2)
                )
                query_gradient[(slabs, partial_PSD.shape[0])](
                    sources, a_TnS, partial_PSD, tokens, split, **slab.launch(2)
                )
        return partial_PSD.sum(dim=0).to(qw_SD.dtype), None, *dsources


def phase1(sources: Sequence[Tensor], qw_SD: Tensor, eps: float) -> tuple[Rows, Rows, Rows]:
    """Mix finished sources for S queries at once; see :func:`earlyfusion.kernels.attnres.naive.phase1`.

    Raises:
        ValueError: no sources; shapes, dtypes, devices or layouts do not fit. More than 128 sources go to the
            plain torch form.
    """
    # A kernel's arguments have a limit.
    if len(sources) > MOST_SOURCES:
        return two_phase.phase1(sources, qw_SD, eps)
    op, queries = "attnres_phase1", qw_SD.shape[0]
    check_sources(sources, qw_SD.shape[-1])
    check_shapes(op, qw_SD=qw_SD)
    check_tensors(op, sources[0], **{"sources[0]": sources[0], "qw_SD": qw_SD})
    named = {f"sources[{index}]": source for index, source in enumerate(sources)}
    check_tensors(op, sources[0], (sources[0].dtype,), **named)
    outs = _Phase1.apply(qw_SD, eps, *sources)
    return outs[:queries], outs[queries].unbind(), outs[queries + 1 :]
