"""Phase 1 of Attention Residuals on a GPU: the S queries of a block over its n finished sources, forward and
backward.

A program takes BT tokens. Its rows are (token, source) pairs, gathered through a tuple of pointers, so the
sources need no stacking; what a token has for every query are (token, query) rows of a second tile. The
queries themselves are the same for all tokens: scores are one product of them with all rows. Mixtures and
gradients are small products between the two tiles, masked to pairs of the same token:

    forward    s = QW V^T r      P = softmax(s)        O  = P V
    backward   dP = X V^T        A = P (dP - delta) r  dV = P^T X + A^T QW - c V

Both passes walk over D in tiles that divide it (2304 = 9 x 256); the second one finds the rows in the cache.
float32 factors are split into two 16-bit parts, which leave 2^-17 of them, so that the products run on
tensor cores; V and X are 16-bit already, and the queries are split once, before the launch. The gradient of
the queries, sum_t A V, is a second kernel over column slabs with one partial sum per program and a fixed
order of addition: nothing is atomic, and no float32 tensor of [T, D] exists.

Saved: sources, queries and the scores [T, n, S] (120 bytes a token for n = 5, S = 6, against 23 kB of
sources).

Legend: n sources, S sub-layers (queries), T tokens, D hidden; R = BT * NP source rows and M = BT * SP query
rows.

Between two sub-layers under Attention Residuals on a GPU: running sum, merge and pre-norm in one pass.

    y = partial (+ out)     s = r <qw, y>, r = rsqrt(mean y^2 + eps)     a = sigmoid(s - lse1)
    h = (1 - a) o1 + a y    x = h rn g, rn = rsqrt(mean h^2 + norm_eps)

Everything a row needs besides its entries is a handful of inner products, taken in a first walk over D; the
second walk finds the row in the cache and writes the result. |h|^2 comes from the same products. Backward,
with u = dx g:

    dh = rn (u - h rn^2 mean(u h))      ds = a (1 - a) <dh, y - o1>       do1 = (1 - a) dh     dlse1 = -ds
    dy = a dh + ds r (qw - y r s / D) + dy_later          dqw = sum ds r y     dg = sum dx h rn

Programs are persistent: each owns a fixed range of rows and one float32 row of partial sums for dqw and dg,
which are added up in program order afterwards. No atomics, no float32 tensor of [T, D].

Legend: T tokens, D hidden.
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

from earlyfusion.kernels.attention.triton.flash import dot
from earlyfusion.kernels.attnres import two_phase
from earlyfusion.kernels.attnres.two_phase import Rows, SubLayer, Watch
from earlyfusion.kernels.launch import column_tile, hardware, on_device, power_of_two
from earlyfusion.kernels.products import compute_dtype
from earlyfusion.kernels.segments import check_shapes, check_sources, check_tensors

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
def phase1_forward(sources, outs, qw_PSD, lse_ST, scores_TnS, inverse_Tn, T, eps, S: constexpr):
    first = tl.program_id(0).to(tl.int64) * S.BT
    i_R, t_R, ok_R, v_R = source_rows(sources, first, T, S)
    s_M, t_M, ok_M = query_rows(first, T, S)
    s_S, t_T, i_N = tl.arange(0, S.SP), first + tl.arange(0, S.BT), tl.arange(0, S.NP)
    R: constexpr = S.BT * S.NP
    BD: constexpr = S.BD
    SP: constexpr = S.SP
    PARTS: constexpr = S.PARTS
    # Norms and scores in one walk over D.
    square_RB, s_SR = tl.zeros([R, BD], tl.float32), tl.zeros([SP, R], tl.float32)
    for d in range(0, S.D, BD):
        col = d + tl.arange(0, BD)
        v = load_columns(v_R, ok_R, col, S.D)
        for part in tl.static_range(PARTS):
            qw = load_columns(qw_PSD + (part * S.S + s_S) * S.D, s_S < S.S, col, S.D)
            s_SR = dot(qw, tl.trans(v), s_SR)
        wide = v.to(tl.float32)
        square_RB += wide * wide

    # Softmax over the sources of the same token.
    r_R = tl.rsqrt(tl.sum(square_RB, axis=1) / S.D + eps)
    s_SR *= r_R[None, :]
    tl.store(inverse_Tn + t_R * S.N + i_R, r_R, mask=ok_R)
    at_SR = (t_R * S.N + i_R)[None, :] * S.S + s_S[:, None]
    tl.store(scores_TnS + at_SR, s_SR, mask=ok_R[None, :] & (s_S < S.S)[:, None])
    s_STN = tl.where((i_N < S.N)[None, None, :], tl.reshape(s_SR, [SP, S.BT, S.NP]), float("-inf"))
    top_ST = tl.max(s_STN, axis=2)
    p_STN = tl.exp(s_STN - top_ST[:, :, None])
    total_ST = tl.sum(p_STN, axis=2)
    p_STN /= total_ST[:, :, None]
    keep_ST = (s_S < S.S)[:, None] & (t_T < T)[None, :]
    tl.store(lse_ST + s_S[:, None] * T + t_T[None, :], top_ST + tl.log(total_ST), mask=keep_ST)

    # The mixtures: rows (token, query), zero for the sources of other tokens. This walk finds the rows in the
    # cache.
    same = tl.arange(0, S.BT)[:, None, None, None] == tl.arange(0, S.BT)[None, None, :, None]
    p_MR = tl.reshape(tl.where(same, p_STN[None, :, :, :], 0.0), [S.BT * SP, R])
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
    qw_PSD,
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

    # What multiplies D columns is either 16-bit as stored, or a handful of coefficients; those of the
    # queries, which all tokens share, without the zeros of other tokens.
    SP: constexpr = S.SP
    PARTS: constexpr = S.PARTS
    p_RM, a_RS = tl.trans(p_MR), tl.trans(tl.sum(tl.reshape(a_MR, [S.BT, SP, R]), axis=0))
    s_S = tl.arange(0, SP)
    dv_R = pick(dsources, i_R, S.N) + t_R * S.D
    for d in range(0, S.D, S.BD):
        col = d + tl.arange(0, S.BD)
        v, x = load_columns(v_R, ok_R, col, S.D), load_columns(x_M, ok_M, col, S.D)
        dv = dot_parts(p_RM, x, 2)
        for part in tl.static_range(PARTS):
            qw = load_columns(qw_PSD + (part * S.S + s_S) * S.D, s_S < S.S, col, S.D)
            dv += dot_parts(a_RS, qw, 2)
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
    PARTS: int  # of the queries

    def launch(self, stages: int, warps: int) -> dict[str, Any]:
        """Options of a launch; more warps where the tiles are large, so that they stay in registers."""
        largest = self.BT * max(self.NP, self.SP)
        # One product of 16 x 16 is one warp's work: more would compute it again.
        warps = warps if largest <= 32 else 4 if largest <= 64 else 8
        return {"S": self, "num_warps": warps, "num_stages": stages}


def tiles(sources: int, queries: int, width: int, parts: int) -> Sizes:
    """Powers of two, at least 16 rows on either side, columns that divide the width where possible."""
    # 16 rows on either side are the least that a product takes.
    rows, columns = max(8, power_of_two(sources)), max(16, power_of_two(queries))
    tokens = 2 if rows == 8 else 1
    larger, most = tokens * max(rows, columns), 32
    if larger <= 32:
        most = 128
    elif larger <= 128:
        most = 64
    return Sizes(sources, queries, width, rows, columns, tokens, column_tile(width, most), parts)


def query_parts(qw_SD: Tensor, dtype: torch.dtype) -> Tensor:
    """[P, S, D] in the dtype of the sources, whose sum is the queries: two parts of 16 bit, or themselves."""
    if dtype.itemsize == 4:
        return qw_SD.to(dtype)[None].contiguous()
    high_SD = qw_SD.to(dtype)
    return torch.stack([high_SD, (qw_SD - high_SD.to(qw_SD.dtype)).to(dtype)])


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
        parts_PSD = query_parts(qw_SD, base.dtype)
        sizes = tiles(count, queries, width, parts_PSD.shape[0])
        if tokens:
            made = lse_ST, scores_TnS, inverse_Tn, tokens, eps
            with on_device(base):
                phase1_forward[(triton.cdiv(tokens, sizes.BT),)](
                    sources, outs, parts_PSD, *made, **sizes.launch(3, warps=1)
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

        # Tiles of the query gradient: enough tokens a step to fill a product.
        slab = sizes._replace(BT=max(1, 32 // sizes.NP), BD=min(128, sizes.BD))
        slabs = triton.cdiv(width, slab.BD)
        # Enough programs for the device, and few enough that their partial sums stay small: a function of
        # shape and device alone, so sums have one order.
        most = 4 * hardware(qw_SD.device).multiprocessors // slabs
        split = max(1, triton.cdiv(tokens, max(1, min(most, triton.cdiv(tokens, slab.BT)))))
        partial_PSD = qw_SD.new_empty(triton.cdiv(tokens, split), *qw_SD.shape, dtype=torch.float32)
        if tokens:
            parts_PSD = query_parts(qw_SD, sources[0].dtype)
            made = parts_PSD, lse_ST, dlse_ST, scores_TnS, inverse_Tn, a_TnS, tokens
            with on_device(qw_SD):
                phase1_backward[(triton.cdiv(tokens, sizes.BT),)](
                    sources, douts, laters, dsources, *made, **sizes.launch(2, warps=2)
                )
                query_gradient[(slabs, partial_PSD.shape[0])](
                    sources, a_TnS, partial_PSD, tokens, split, **slab.launch(2, warps=2)
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


# Few rows, so that many programs share the launch; the walk over D is long enough.
ROWS = 4  # tokens of a forward tile
ROWS_BACKWARD = 8  # more rows share one update of the partial sums
PROGRAMS_PER_MULTIPROCESSOR = 3


# Without `out` the sum is the block's first output, and there is nothing to add.
class StepRows(NamedTuple):
    """What the kernels read."""

    o1: Tensor
    lse1: Tensor
    y: Tensor  # the running sum
    out: Tensor | None  # what is to be added to it
    qw: Tensor
    norm: Tensor


@triton.jit
def tile(base, t, col, keep, D: constexpr):
    return tl.load(base + t[:, None] * D + col[None, :], mask=keep, other=0.0).to(tl.float32)


@triton.jit
def store_tile(base, t, col, keep, values, D: constexpr):
    tl.store(base + t[:, None] * D + col[None, :], values.to(base.dtype.element_ty), mask=keep)


@triton.jit
def vector(base, col, D: constexpr):
    return tl.load(base + col, mask=col < D, other=0.0).to(tl.float32)


@triton.jit
def shares(x, t, ok, yy, qy, oo, oy, eps, norm_eps, D: constexpr):
    """(a, 1 - a, r, s, rn) of rows, from the inner products of y, qw and o1."""
    r = tl.rsqrt(yy / D + eps)
    s = qy * r
    lse1 = tl.load(x.lse1 + t, mask=ok, other=0.0).to(tl.float32)
    a, b = tl.sigmoid(s - lse1), tl.sigmoid(lse1 - s)  # 1 - a without the cancellation
    # |h|^2 from inner products: h itself is not there yet.
    hh = b * b * oo + 2 * a * b * oy + a * a * yy
    rn = tl.rsqrt(tl.maximum(hh, 0.0, propagate_nan=tl.PropagateNan.ALL) / D + norm_eps)
    return a, b, r, s, rn


@triton.jit
def merge_forward(x, summed, normed, T, eps, norm_eps, D: constexpr, BT: constexpr, BD: constexpr):
    """normed [T, D]; with ``x.out`` also the new sum."""
    # 64 bits: rows times D passes 2^31 for long batches.
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    ok = t < T
    yy = tl.zeros([BT, BD], tl.float32)
    qy, oo, oy = tl.zeros_like(yy), tl.zeros_like(yy), tl.zeros_like(yy)
    for d in range(0, D, BD):
        col = d + tl.arange(0, BD)
        keep = ok[:, None] & (col < D)[None, :]
        y = tile(x.y, t, col, keep, D)
        if x.out is not None:
            # Rounded before it is used, as the definition has it.
            y = (y + tile(x.out, t, col, keep, D)).to(summed.dtype.element_ty)
            store_tile(summed, t, col, keep, y, D)
            y = y.to(tl.float32)  # the sum as later readers see it
        o1 = tile(x.o1, t, col, keep, D)
        yy += y * y
        qy += y * vector(x.qw, col, D)[None, :]
        oo += o1 * o1
        oy += o1 * y
    yy, qy, oo, oy = tl.sum(yy, axis=1), tl.sum(qy, axis=1), tl.sum(oo, axis=1), tl.sum(oy, axis=1)
    a, b, _, _, rn = shares(x, t, ok, yy, qy, oo, oy, eps, norm_eps, D)

    for d in range(0, D, BD):
        col = d + tl.arange(0, BD)
        keep = ok[:, None] & (col < D)[None, :]
        y = tile(x.y, t, col, keep, D)
        if x.out is not None:
            y = (y + tile(x.out, t, col, keep, D)).to(summed.dtype.element_ty).to(tl.float32)
        h = b[:, None] * tile(x.o1, t, col, keep, D) + a[:, None] * y
        store_tile(normed, t, col, keep, h * (rn[:, None] * vector(x.norm, col, D)[None, :]), D)


@triton.jit
def row_scalars(x, dx, t, ok, eps, norm_eps, D: constexpr, BT: constexpr, BD: constexpr):
    """a, 1 - a, r, s, rn, k = rn^2 mean(u h), ds of every row."""
    yy = tl.zeros([BT, BD], tl.float32)
    qy, oo, oy = tl.zeros_like(yy), tl.zeros_like(yy), tl.zeros_like(yy)
    uo, uy = tl.zeros_like(yy), tl.zeros_like(yy)
    for d in range(0, D, BD):
        col = d + tl.arange(0, BD)
        keep = ok[:, None] & (col < D)[None, :]
        y, o1, u = tile(x.y, t, col, keep, D), tile(x.o1, t, col, keep, D), tile(dx, t, col, keep, D)
        u *= vector(x.norm, col, D)[None, :]
        oo += o1 * o1
        oy += o1 * y
        yy += y * y
        qy += y * vector(x.qw, col, D)[None, :]
        uo += u * o1
        uy += u * y
    yy, uo, uy = tl.sum(yy, axis=1), tl.sum(uo, axis=1), tl.sum(uy, axis=1)
    qy, oo, oy = tl.sum(qy, axis=1), tl.sum(oo, axis=1), tl.sum(oy, axis=1)
    a, b, r, s, rn = shares(x, t, ok, yy, qy, oo, oy, eps, norm_eps, D)
    k = rn * rn * (b * uo + a * uy) / D
    h_along = b * (oy - oo) + a * (yy - oy)  # <h, y - o1>
    along = rn * (uy - uo - k * h_along)  # <dh, y - o1>
    return a, b, r, s, rn, k, a * b * along


@triton.jit
def merge_backward(
    x,
    dx,
    dlater,
    do1,
    dlse1,
    dy_out,
    partial_P2D,
    T,
    rows_per_program,
    eps,
    norm_eps,
    D: constexpr,
    BT: constexpr,
    BD: constexpr,
):
    """dlater: the gradient of the sum that its later readers left, or None."""
    program = tl.program_id(0).to(tl.int64)
    start = program * rows_per_program
    end = tl.minimum(start + rows_per_program, T)
    mine = partial_P2D + program * 2 * D
    for first in range(start, end, BT):
        t = first + tl.arange(0, BT)
        ok = t < end
        a, b, r, s, rn, k, ds = row_scalars(x, dx, t, ok, eps, norm_eps, D, BT, BD)
        tl.store(dlse1 + t, -ds, mask=ok)
        slope = (ds * r)[:, None]
        for d in range(0, D, BD):
            col = d + tl.arange(0, BD)
            keep, inside = ok[:, None] & (col < D)[None, :], col < D
            y, o1, dn = tile(x.y, t, col, keep, D), tile(x.o1, t, col, keep, D), tile(dx, t, col, keep, D)
            h = b[:, None] * o1 + a[:, None] * y
            dh = rn[:, None] * (dn * vector(x.norm, col, D)[None, :] - k[:, None] * h)
            dg = tl.sum(dn * h * rn[:, None], axis=0)
            tl.store(mine + D + col, dg + vector(mine + D, col, D), mask=inside)
            store_tile(do1, t, col, keep, b[:, None] * dh, D)
            dy = a[:, None] * dh + slope * (vector(x.qw, col, D)[None, :] - y * (r * s / D)[:, None])
            if dlater is not None:
                dy += tile(dlater, t, col, keep, D)
            store_tile(dy_out, t, col, keep, dy, D)
            tl.store(mine + col, tl.sum(slope * y, axis=0) + vector(mine, col, D), mask=inside)
        tl.debug_barrier()  # the next rows read partial sums that other threads wrote


class _Step(torch.autograd.Function):
    """(eps, norm_eps, o1, lse1, partial, out | None, qw, norm) -> (the sum, x); without out x alone."""

    @staticmethod
    def forward(ctx: Any, eps: float, norm_eps: float, *tensors: Any) -> Any:
        rows = StepRows(*tensors)
        (tokens, width), summed = rows.y.shape, rows.y
        if rows.out is not None:
            # A new tensor: the old sum may be saved for its own backward.
            summed = torch.empty_like(rows.y)
        normed = torch.empty_like(rows.y, dtype=compute_dtype(rows.y))
        if tokens:
            options = {"D": width, "BT": ROWS, "BD": column_tile(width, 256), "num_warps": 4, "num_stages": 2}
            with on_device(summed):
                merge_forward[(triton.cdiv(tokens, ROWS),)](
                    rows, summed, normed, tokens, eps, norm_eps, **options
                )
        ctx.save_for_backward(rows.o1, rows.lse1, summed, rows.qw, rows.norm)
        ctx.eps, ctx.out_dtype = (eps, norm_eps), rows.out.dtype if rows.out is not None else None
        return normed if rows.out is None else (summed, normed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        o1, lse1, y, qw, norm = ctx.saved_tensors
        rows, (tokens, width) = StepRows(o1, lse1, y, None, qw, norm), y.shape
        *later, dx = (gradient.contiguous() for gradient in gradients)
        do1, dy, dlse1 = torch.empty_like(o1), torch.empty_like(y), torch.empty_like(lse1)
        most = PROGRAMS_PER_MULTIPROCESSOR * hardware(y.device).multiprocessors
        # A multiple of the tile, so that no two programs share rows.
        split = -(-max(1, -(-tokens // most)) // ROWS_BACKWARD) * ROWS_BACKWARD
        # Row 0 collects for the query, row 1 for the norm's weight.
        partial_P2D = qw.new_zeros(-(-tokens // split), 2, width, dtype=torch.float32)
        if tokens:
            options = {"BT": ROWS_BACKWARD, "BD": column_tile(width, 128), "num_warps": 4, "num_stages": 2}
            made = do1, dlse1, dy, partial_P2D
            with on_device(y):
                merge_backward[(partial_P2D.shape[0],)](
                    rows, dx, later[0] if later else None, *made, tokens, split, *ctx.eps, D=width, **options
                )
        dqw, dnorm = partial_P2D.sum(dim=0).unbind()
        dout = None if ctx.out_dtype is None else dy.to(ctx.out_dtype)
        return None, None, do1, dlse1, dy, dout, dqw.to(qw.dtype), dnorm.to(norm.dtype)


def step(
    o1_TD: Tensor,
    lse1_T: Tensor,
    partial_TD: Tensor,
    out_TD: Tensor | None,
    qw_D: Tensor,
    norm_D: Tensor,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """Running sum, merge and pre-norm at once; see :func:`earlyfusion.kernels.attnres.naive.step`.

    Raises:
        ValueError: shapes, dtypes, devices or layouts do not fit.
    """
    rows = {"partial_TD": partial_TD, "o1_TD": o1_TD, "out_TD": out_TD, "qw_D": qw_D, "norm_D": norm_D}
    check_shapes("attnres_step", **rows, lse1_T=lse1_T)
    check_tensors("attnres_step", partial_TD, **rows)
    check_tensors("attnres_step", partial_TD, (torch.float32,), lse1_T=lse1_T)
    made = _Step.apply(eps, norm_eps, o1_TD, lse1_T, partial_TD, out_TD, qw_D, norm_D)
    return made if out_TD is not None else (partial_TD, made)


def block(
    sources: Sequence[Tensor],
    sublayers: Sequence[SubLayer],
    qw_SD: Tensor,
    eps: float,
    watch: Watch | None = None,
) -> tuple[Sequence[Tensor], Tensor]:
    """See :func:`earlyfusion.kernels.attnres.naive.block`: one kernel between two sub-layers for running
    sum, merge and pre-norm."""
    # A probe wants to see the mix: then the steps are taken one by one.
    if watch is not None:
        return two_phase.block(sources, sublayers, qw_SD, eps, watch)
    mixes, lses, sources = phase1(sources, qw_SD, eps)
    # The first sub-layer has no sum to add to: its mix needs no merge.
    summed_TD = sublayers[0](mixes[0]).to(sources[0].dtype).contiguous()

    # The newest output is added to the sum by the kernel in front of the next sub-layer, the last one here.
    newest_TD: Tensor | None = None
    for (norm, body), o_TD, lse_T, qw_D in list(zip(sublayers, mixes, lses, qw_SD.unbind()))[1:]:
        summed_TD, x_TD = step(o_TD, lse_T, summed_TD, newest_TD, qw_D, norm.weight, eps, norm.eps)
        newest_TD = body(x_TD).contiguous()
    return sources, summed_TD if newest_TD is None else summed_TD + newest_TD
