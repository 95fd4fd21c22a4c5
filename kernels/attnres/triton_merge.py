"""Phase 2 of Attention Residuals on a GPU: running sum, merge and pre-norm in one pass, forward and backward.

    y = partial (+ out)     s = r <qw, y>, r = rsqrt(mean y^2 + eps)     a = sigmoid(s - lse1)
    h = (1 - a) o1 + a y    x = h rn g, rn = rsqrt(mean h^2 + norm_eps)     (with the norm)

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

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.aot import Variant
from earlyfusion.kernels.attnres import fused, two_phase
from earlyfusion.kernels.launch import FLOATS, check_tensor, column_tile, on_device, programs
from earlyfusion.kernels.precision import compute_dtype

ROWS = 4  # tokens of a forward tile
ROWS_BACKWARD = 8  # more rows share one update of the partial sums
PROGRAMS_PER_MULTIPROCESSOR = 3


@triton.jit
def _tile(base, t_R, col, keep, D: tl.constexpr):
    return tl.load(base + t_R[:, None] * D + col[None, :], mask=keep, other=0.0).to(tl.float32)


@triton.jit
def merge_forward(
    o1_TD,
    lse1_T,
    partial_TD,
    out_TD,
    qw_D,
    norm_D,
    summed_TD,
    x_TD,
    T,
    eps,
    norm_eps,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
):
    t_R = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    ok_R = t_R < T
    yy = tl.zeros([BT, BD], tl.float32)
    qy, oo, oy = tl.zeros_like(yy), tl.zeros_like(yy), tl.zeros_like(yy)
    for d in range(0, D, BD):
        col = d + tl.arange(0, BD)
        keep = ok_R[:, None] & (col < D)[None, :]
        y = _tile(partial_TD, t_R, col, keep, D)
        if ADD:
            y += _tile(out_TD, t_R, col, keep, D)
            stored = y.to(summed_TD.dtype.element_ty)
            tl.store(summed_TD + t_R[:, None] * D + col[None, :], stored, mask=keep)
            y = stored.to(tl.float32)  # the sum as later readers see it
        qw = tl.load(qw_D + col, mask=col < D, other=0.0).to(tl.float32)
        yy += y * y
        qy += y * qw[None, :]
        if NORM:
            o1 = _tile(o1_TD, t_R, col, keep, D)
            oo += o1 * o1
            oy += o1 * y
    yy_R = tl.sum(yy, axis=1)
    s_R = tl.sum(qy, axis=1) * tl.rsqrt(yy_R / D + eps)
    lse1_R = tl.load(lse1_T + t_R, mask=ok_R, other=0.0).to(tl.float32)
    a_R = tl.sigmoid(s_R - lse1_R)
    b_R = tl.sigmoid(lse1_R - s_R)  # 1 - a without the cancellation
    rn_R = tl.full([BT], 1.0, tl.float32)
    if NORM:
        hh_R = b_R * b_R * tl.sum(oo, axis=1) + 2 * a_R * b_R * tl.sum(oy, axis=1) + a_R * a_R * yy_R
        rn_R = tl.rsqrt(tl.maximum(hh_R, 0.0, propagate_nan=tl.PropagateNan.ALL) / D + norm_eps)
    for d in range(0, D, BD):
        col = d + tl.arange(0, BD)
        keep = ok_R[:, None] & (col < D)[None, :]
        y = _tile(partial_TD, t_R, col, keep, D)
        if ADD:
            y = (y + _tile(out_TD, t_R, col, keep, D)).to(summed_TD.dtype.element_ty).to(tl.float32)
        x = b_R[:, None] * _tile(o1_TD, t_R, col, keep, D) + a_R[:, None] * y
        if NORM:
            x *= rn_R[:, None] * tl.load(norm_D + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
        tl.store(x_TD + t_R[:, None] * D + col[None, :], x.to(x_TD.dtype.element_ty), mask=keep)


@triton.jit
def _row_scalars(
    o1_TD,
    lse1_T,
    y_TD,
    dx_TD,
    qw_D,
    norm_D,
    t_R,
    ok_R,
    eps,
    norm_eps,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    NORM: tl.constexpr,
):
    """a, 1 - a, r, s, rn, k = rn^2 mean(u h), ds of every row."""
    yy = tl.zeros([BT, BD], tl.float32)
    qy, oo, oy, uo, uy = (
        tl.zeros_like(yy),
        tl.zeros_like(yy),
        tl.zeros_like(yy),
        tl.zeros_like(yy),
        tl.zeros_like(yy),
    )
    for d in range(0, D, BD):
        col = d + tl.arange(0, BD)
        keep = ok_R[:, None] & (col < D)[None, :]
        y, o1, u = (
            _tile(y_TD, t_R, col, keep, D),
            _tile(o1_TD, t_R, col, keep, D),
            _tile(dx_TD, t_R, col, keep, D),
        )
        if NORM:
            u *= tl.load(norm_D + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
            oo += o1 * o1
            oy += o1 * y
        yy += y * y
        qy += y * tl.load(qw_D + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
        uo += u * o1
        uy += u * y
    yy_R, uo_R, uy_R = tl.sum(yy, axis=1), tl.sum(uo, axis=1), tl.sum(uy, axis=1)
    r_R = tl.rsqrt(yy_R / D + eps)
    s_R = tl.sum(qy, axis=1) * r_R
    lse1_R = tl.load(lse1_T + t_R, mask=ok_R, other=0.0).to(tl.float32)
    a_R, b_R = tl.sigmoid(s_R - lse1_R), tl.sigmoid(lse1_R - s_R)
    rn_R, k_R = tl.full([BT], 1.0, tl.float32), tl.zeros([BT], tl.float32)
    along_R = uy_R - uo_R  # <dh, y - o1>
    if NORM:
        oo_R, oy_R = tl.sum(oo, axis=1), tl.sum(oy, axis=1)
        hh_R = b_R * b_R * oo_R + 2 * a_R * b_R * oy_R + a_R * a_R * yy_R
        rn_R = tl.rsqrt(tl.maximum(hh_R, 0.0, propagate_nan=tl.PropagateNan.ALL) / D + norm_eps)
        k_R = rn_R * rn_R * (b_R * uo_R + a_R * uy_R) / D
        h_along_R = b_R * (oy_R - oo_R) + a_R * (yy_R - oy_R)  # <h, y - o1>
        along_R = rn_R * (along_R - k_R * h_along_R)
    return a_R, b_R, r_R, s_R, rn_R, k_R, a_R * b_R * along_R


@triton.jit
def merge_backward(
    o1_TD,
    lse1_T,
    y_TD,
    qw_D,
    norm_D,
    dx_TD,
    dlater_TD,
    do1_TD,
    dlse1_T,
    dy_TD,
    partial_P2D,
    T,
    rows_per_program,
    eps,
    norm_eps,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    LATER: tl.constexpr,
    NORM: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    start = program * rows_per_program
    end = tl.minimum(start + rows_per_program, T)
    mine = partial_P2D + program * 2 * D
    for first in range(start, end, BT):
        t_R = first + tl.arange(0, BT)
        ok_R = t_R < end
        a_R, b_R, r_R, s_R, rn_R, k_R, ds_R = _row_scalars(
            o1_TD, lse1_T, y_TD, dx_TD, qw_D, norm_D, t_R, ok_R, eps, norm_eps, D, BT, BD, NORM
        )
        tl.store(dlse1_T + t_R, -ds_R, mask=ok_R)
        for d in range(0, D, BD):
            col = d + tl.arange(0, BD)
            keep, inside = ok_R[:, None] & (col < D)[None, :], col < D
            y, o1, dx = (
                _tile(y_TD, t_R, col, keep, D),
                _tile(o1_TD, t_R, col, keep, D),
                _tile(dx_TD, t_R, col, keep, D),
            )
            qw = tl.load(qw_D + col, mask=inside, other=0.0).to(tl.float32)
            dh = dx
            if NORM:
                h = b_R[:, None] * o1 + a_R[:, None] * y
                dh = dx * tl.load(norm_D + col, mask=inside, other=0.0).to(tl.float32)[None, :]
                dh = rn_R[:, None] * (dh - k_R[:, None] * h)
                dg = tl.sum(dx * h * rn_R[:, None], axis=0)
                tl.store(mine + D + col, dg + tl.load(mine + D + col, mask=inside, other=0.0), mask=inside)
            do1 = b_R[:, None] * dh
            tl.store(do1_TD + t_R[:, None] * D + col[None, :], do1.to(do1_TD.dtype.element_ty), mask=keep)
            slope = (ds_R * r_R)[:, None]
            dy = a_R[:, None] * dh + slope * (qw[None, :] - y * (r_R * s_R / D)[:, None])
            if LATER:
                dy += _tile(dlater_TD, t_R, col, keep, D)
            tl.store(dy_TD + t_R[:, None] * D + col[None, :], dy.to(dy_TD.dtype.element_ty), mask=keep)
            dqw = tl.sum(slope * y, axis=0)
            tl.store(mine + col, dqw + tl.load(mine + col, mask=inside, other=0.0), mask=inside)
        tl.debug_barrier()  # the next rows read partial sums that other threads wrote


def _check(op: str, o1_TD: Tensor, lse1_T: Tensor, partial_TD: Tensor, **vectors: Tensor) -> None:
    if partial_TD.dim() != 2:
        raise ValueError(f"{op}: partial_TD has shape {tuple(partial_TD.shape)}; expected [T, D]")
    device, (tokens, width) = partial_TD.device, partial_TD.shape
    check_tensor(op, "partial_TD", partial_TD)
    check_tensor(op, "o1_TD", o1_TD, partial_TD.shape, FLOATS, device)
    check_tensor(op, "lse1_T", lse1_T, (tokens,), (torch.float32,), device)
    for name, vector in vectors.items():
        check_tensor(op, name, vector, (width,), FLOATS, device)


class _Merge(torch.autograd.Function):
    """(o1, lse1, partial, out | None, qw, norm | None, eps, norm_eps) -> (partial + out, x), or x alone
    without out."""

    @staticmethod
    def forward(
        ctx: Any,
        o1_TD: Tensor,
        lse1_T: Tensor,
        partial_TD: Tensor,
        out_TD: Tensor | None,
        qw_D: Tensor,
        norm_D: Tensor | None,
        eps: float,
        norm_eps: float,
    ) -> Any:
        tokens, width = partial_TD.shape
        add, norm = out_TD is not None, norm_D is not None
        summed_TD = torch.empty_like(partial_TD) if add else partial_TD
        x_TD = torch.empty_like(partial_TD, dtype=compute_dtype(partial_TD) if norm else partial_TD.dtype)
        if tokens:
            with on_device(partial_TD):
                merge_forward[(triton.cdiv(tokens, ROWS),)](
                    o1_TD,
                    lse1_T,
                    partial_TD,
                    out_TD if add else partial_TD,
                    qw_D,
                    norm_D if norm else qw_D,
                    summed_TD,
                    x_TD,
                    tokens,
                    eps,
                    norm_eps,
                    D=width,
                    BT=ROWS,
                    BD=column_tile(width, 256),
                    ADD=add,
                    NORM=norm,
                    num_warps=4,
                    num_stages=2,
                )
        ctx.save_for_backward(o1_TD, lse1_T, summed_TD, qw_D, norm_D)
        ctx.eps, ctx.norm_eps, ctx.add = eps, norm_eps, add
        ctx.dtypes = partial_TD.dtype, out_TD.dtype if out_TD is not None else None
        return (summed_TD, x_TD) if add else x_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        o1_TD, lse1_T, y_TD, qw_D, norm_D = ctx.saved_tensors
        dx_TD = gradients[-1].contiguous()
        later_TD = gradients[0].contiguous() if ctx.add else dx_TD
        tokens, width = y_TD.shape
        do1_TD, dy_TD, dlse1_T = torch.empty_like(o1_TD), torch.empty_like(y_TD), torch.empty_like(lse1_T)
        most = PROGRAMS_PER_MULTIPROCESSOR * programs(y_TD.device)
        split = -(-max(1, -(-tokens // most)) // ROWS_BACKWARD) * ROWS_BACKWARD
        partial_P2D = qw_D.new_zeros(-(-tokens // split), 2, width, dtype=torch.float32)
        norm = norm_D is not None
        if tokens:
            with on_device(y_TD):
                merge_backward[(partial_P2D.shape[0],)](
                    o1_TD,
                    lse1_T,
                    y_TD,
                    qw_D,
                    norm_D if norm else qw_D,
                    dx_TD,
                    later_TD,
                    do1_TD,
                    dlse1_T,
                    dy_TD,
                    partial_P2D,
                    tokens,
                    split,
                    ctx.eps,
                    ctx.norm_eps,
                    D=width,
                    BT=ROWS_BACKWARD,
                    BD=column_tile(width, 128),
                    LATER=ctx.add,
                    NORM=norm,
                    num_warps=4,
                    num_stages=2,
                )
        dqw_D, dnorm_D = partial_P2D.sum(dim=0).unbind()
        out_dtype = ctx.dtypes[1]
        return (
            do1_TD,
            dlse1_T,
            dy_TD,
            None if out_dtype is None else dy_TD.to(out_dtype),
            dqw_D.to(qw_D.dtype),
            dnorm_D.to(norm_D.dtype) if norm else None,
            None,
            None,
        )


def merge(o1_TD: Tensor, lse1_T: Tensor, partial_TD: Tensor, qw_D: Tensor, eps: float) -> Tensor:
    """Add the running partial sum to a phase-1 result of the same query; h_TD in the dtype of ``partial_TD``.

    Raises:
        ValueError: shapes, dtypes, devices or layouts do not fit. float64 goes to the plain torch form.
    """
    if partial_TD.dtype == torch.float64:
        return two_phase.merge(o1_TD, lse1_T, partial_TD, qw_D, eps)
    _check("attnres_merge", o1_TD, lse1_T, partial_TD, qw_D=qw_D)
    return _Merge.apply(o1_TD, lse1_T, partial_TD, None, qw_D, None, eps, 0.0)


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
    """Running sum, merge and pre-norm at once; see :func:`earlyfusion.kernels.attnres.fused.step`.

    Raises:
        ValueError: shapes, dtypes, devices or layouts do not fit. float64 goes to the plain torch form.
    """
    if partial_TD.dtype == torch.float64:
        return fused.step(o1_TD, lse1_T, partial_TD, out_TD, qw_D, norm_D, eps, norm_eps)
    _check("attnres_step", o1_TD, lse1_T, partial_TD, qw_D=qw_D, norm_D=norm_D)
    if out_TD is None:
        return partial_TD, _Merge.apply(o1_TD, lse1_T, partial_TD, None, qw_D, norm_D, eps, norm_eps)
    check_tensor("attnres_step", "out_TD", out_TD, partial_TD.shape, FLOATS, partial_TD.device)
    return _Merge.apply(o1_TD, lse1_T, partial_TD, out_TD, qw_D, norm_D, eps, norm_eps)


def aot_variants() -> list[Any]:
    """Kernels and shapes that are compiled ahead of time."""
    variants = []
    for d in (2304, 4096, 7168):
        common = {
            "lse1_T": "*fp32",
            "qw_D": "*fp32",
            "norm_D": "*fp32",
            "T": "i32",
            "eps": "fp32",
            "norm_eps": "fp32",
        }
        half = dict.fromkeys(("o1_TD", "partial_TD", "out_TD", "summed_TD", "x_TD"), "*bf16")
        forward = {"D": d, "BT": ROWS, "BD": column_tile(d, 256), "ADD": True, "NORM": True}
        variants.append(Variant(f"attnres step forward d={d}", merge_forward, {**half, **common}, forward))
        half = dict.fromkeys(("o1_TD", "y_TD", "dx_TD", "dlater_TD", "do1_TD", "dy_TD"), "*bf16")
        more = {"dlse1_T": "*fp32", "partial_P2D": "*fp32", "rows_per_program": "i32"}
        backward = {"D": d, "BT": ROWS_BACKWARD, "BD": column_tile(d, 128), "LATER": True, "NORM": True}
        variants.append(
            Variant(f"attnres step backward d={d}", merge_backward, {**half, **common, **more}, backward)
        )
    return variants
