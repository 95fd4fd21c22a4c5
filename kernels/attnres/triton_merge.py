"""Between two sub-layers under Attention Residuals on a GPU: running sum, merge and pre-norm in one pass.

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

from earlyfusion.kernels.attnres import two_phase
from earlyfusion.kernels.attnres.triton_phase1 import phase1
from earlyfusion.kernels.attnres.two_phase import SubLayer, Watch
from earlyfusion.kernels.checks import check_shapes, check_tensors
from earlyfusion.kernels.launch import column_tile, hardware, on_device
from earlyfusion.kernels.products import compute_dtype

# Few rows, so that many programs share the launch; the walk over D is long enough.
ROWS = 4  # tokens of a forward tile
ROWS_BACKWARD = 8  # more rows share one update of the partial sums
PROGRAMS_PER_MULTIPROCESSOR = 3


# Without `out` the sum is the block's first output, and there is nothing to add.
class Rows(NamedTuple):
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
        rows = Rows(*tensors)
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
        rows, (tokens, width) = Rows(o1, lse1, y, None, qw, norm), y.shape
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
