"""qkv split and adjacent-pair 2-D RoPE on a GPU: qkv is read once, q and k are written once, v stays where it
is.

Forward traffic per token and head: 4 D elements (read q, k; write q, k) instead of about 14 with float32
complex temporaries. Backward: one kernel turns dq and dk back and writes the whole dqkv, where autograd would
concatenate. A head dim is cut into two power-of-two tiles (72 = 64 + 16).

Legend: T tokens (patches), H heads, D head dim, C = D / 2 pairs, BT tokens of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language import constexpr

from earlyfusion.kernels.attention import rope
from earlyfusion.kernels.attention.triton.flash import split_dim
from earlyfusion.kernels.checks import check_tensors
from earlyfusion.kernels.launch import on_device

ROWS = 16


@triton.jit
def _turn(
    source,
    target,
    turns,
    token,
    ok,
    stride_source,
    stride_target,
    FIRST: constexpr,
    TILE: constexpr,
    D: constexpr,
    BT: constexpr,
    SIGN: constexpr,
):
    """target = source turned; channels FIRST .. FIRST + TILE of every token."""
    col, pair = FIRST + tl.arange(0, TILE), FIRST // 2 + tl.arange(0, TILE // 2)
    keep = ok[:, None] & (col < D)[None, :]
    # Two adjacent channels are the real and the imaginary part.
    x = tl.load(source + token[:, None] * stride_source + col[None, :], mask=keep, other=0.0).to(tl.float32)
    at = turns + token[:, None] * D + 2 * pair[None, :]
    inside = ok[:, None] & (2 * pair < D)[None, :]
    cos = tl.load(at, mask=inside, other=1.0)
    sin = tl.load(at + 1, mask=inside, other=0.0) * SIGN
    even, odd = tl.split(tl.reshape(x, [BT, TILE // 2, 2]))
    out = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [BT, TILE])
    tl.store(
        target + token[:, None] * stride_target + col[None, :], out.to(target.dtype.element_ty), mask=keep
    )


@triton.jit
def rope_forward(
    qkv,
    turns,
    q,
    k,
    T,
    H: constexpr,
    D: constexpr,
    DA: constexpr,
    DB: constexpr,
    BT: constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    ok = token < T
    for part in tl.static_range(2):
        source = qkv + (part * H + head) * D
        # Parts 0 and 1 of qkv; values are not turned.
        target = (k if part == 1 else q) + head * D
        _turn(source, target, turns, token, ok, 3 * H * D, H * D, 0, DA, D, BT, 1)
        if DB > 0:
            _turn(source, target, turns, token, ok, 3 * H * D, H * D, DA, DB, D, BT, 1)


@triton.jit
def rope_backward(
    dq,
    dk,
    dv,
    turns,
    dqkv,
    T,
    H: constexpr,
    D: constexpr,
    DA: constexpr,
    DB: constexpr,
    BT: constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    ok = token < T
    for part in tl.static_range(2):
        source = (dk if part == 1 else dq) + head * D
        target = dqkv + (part * H + head) * D
        _turn(source, target, turns, token, ok, H * D, 3 * H * D, 0, DA, D, BT, -1)
        if DB > 0:
            _turn(source, target, turns, token, ok, H * D, 3 * H * D, DA, DB, D, BT, -1)
    # The gradient of v goes straight into its third of dqkv.
    for first in tl.static_range(0, DA + DB, 16):
        col = first + tl.arange(0, 16)
        keep = ok[:, None] & (col < D)[None, :]
        x = tl.load(dv + head * D + token[:, None] * (H * D) + col[None, :], mask=keep, other=0.0)
        tl.store(dqkv + (2 * H + head) * D + token[:, None] * (3 * H * D) + col[None, :], x, mask=keep)


class _QkvRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_T3HD: Tensor, turns_TC2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, _, heads, dim = qkv_T3HD.shape
        q_THD, k_THD = (qkv_T3HD.new_empty(tokens, heads, dim) for _ in range(2))
        _launch(rope_forward, qkv_T3HD, turns_TC2, q_THD, k_THD, like=q_THD)
        # A turn is undone by the turn back: q and k are not needed.
        ctx.save_for_backward(turns_TC2)
        return q_THD, k_THD, qkv_T3HD[:, 2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_THD: Tensor, dk_THD: Tensor, dv_THD: Tensor) -> tuple[Tensor, None]:
        (turns_TC2,) = ctx.saved_tensors
        dq, dk, dv = (x.contiguous() for x in (dq_THD, dk_THD, dv_THD))
        tokens, heads, dim = dq.shape
        dqkv_T3HD = dq.new_empty(tokens, 3, heads, dim)
        _launch(rope_backward, dq, dk, dv, turns_TC2, dqkv_T3HD, like=dq)
        return dqkv_T3HD, None


def _launch(kernel: Any, *tensors: Tensor, like: Tensor) -> None:
    """Over all tokens and heads of [T, H, D]."""
    tokens, heads, dim = like.shape
    da, db = split_dim(dim)
    if tokens:
        grid = triton.cdiv(tokens, ROWS), heads
        with on_device(like):
            kernel[grid](*tensors, tokens, H=heads, D=dim, DA=da, DB=db, BT=ROWS, num_warps=4)


def qkv_rope(qkv_T3HD: Tensor, turns_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(q_THD, k_THD, v_THD)``, the last a view of qkv; see
    :func:`earlyfusion.kernels.attention.rope.qkv_rope`.

    Raises:
        ValueError: shapes, dtypes, devices or layouts do not fit. float64 goes to the plain torch form.
    """
    rope.check_qkv(qkv_T3HD, turns_TC)
    if qkv_T3HD.dtype == torch.float64:
        return rope.qkv_rope(qkv_T3HD, turns_TC)
    check_tensors("qkv_rope", qkv_T3HD, qkv_T3HD=qkv_T3HD)
    check_tensors("qkv_rope", qkv_T3HD, (torch.complex64,), turns_TC=turns_TC)
    return _QkvRope.apply(qkv_T3HD, torch.view_as_real(turns_TC))
