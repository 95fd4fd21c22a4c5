"""qkv split and adjacent-pair 2-D RoPE on a GPU: qkv is read once, q and k are written once, v stays where it
is.

Forward traffic per token and head: 4 D elements (read q, k; write q, k) instead of about 14 with float32
complex temporaries. Backward: one kernel turns dq and dk back and writes the whole dqkv, where autograd would
concatenate. A head dim is cut into two power-of-two tiles (72 = 64 + 16).

Legend: T tokens (patches), H heads, D head dim, C = D / 2 pairs, BT tokens of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language import constexpr

from earlyfusion.kernels.attention.triton.flash import split_dim
from earlyfusion.kernels.launch import on_device
from earlyfusion.kernels.segments import check_qkv, check_tensors

ROWS = 16


@triton.jit
def turn(
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
def rope(
    q,
    k,
    v,
    q_out,
    k_out,
    v_out,
    turns,
    T,
    source: constexpr,
    target: constexpr,
    H: constexpr,
    X: constexpr,
    BT: constexpr,
    SIGN: constexpr,
):
    """q_out and k_out [T, H, D] are q and k turned; with ``v`` it is copied. source, target: elements from
    token to token."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    place = tl.program_id(1) * X.ALL
    ok = token < T
    for part in tl.static_range(2):
        x, out = (k if part else q) + place, (k_out if part else q_out) + place
        turn(x, out, turns, token, ok, source, target, 0, X.A, X.ALL, BT, SIGN)
        if X.B > 0:
            turn(x, out, turns, token, ok, source, target, X.A, X.B, X.ALL, BT, SIGN)
    # The gradient of v goes straight into its third of dqkv.
    if v is not None:
        for first in tl.static_range(0, X.A + X.B, 16):
            col = first + tl.arange(0, 16)
            keep = ok[:, None] & (col < X.ALL)[None, :]
            x = tl.load(v + place + token[:, None] * source + col[None, :], mask=keep, other=0.0)
            tl.store(v_out + place + token[:, None] * target + col[None, :], x, mask=keep)


def _launch(qkv: Sequence[Tensor | None], outs: Sequence[Tensor | None], turns: Tensor, sign: int) -> None:
    """Over all tokens and heads of three [T, H, D]."""
    assert qkv[0] is not None and outs[0] is not None
    tokens, heads, dim = qkv[0].shape
    if tokens:
        grid, steps = (triton.cdiv(tokens, ROWS), heads), (qkv[0].stride(0), outs[0].stride(0))
        with on_device(turns):
            rope[grid](
                *qkv, *outs, turns, tokens, *steps, H=heads, X=split_dim(dim), BT=ROWS, SIGN=sign, num_warps=4
            )


class _QkvRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_T3HD: Tensor, turns_TC2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv_T3HD.unbind(1)
        q_out, k_out = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2))
        _launch((q, k, None), (q_out, k_out, None), turns_TC2, 1)
        # A turn is undone by the turn back: q and k are not needed.
        ctx.save_for_backward(turns_TC2)
        return q_out, k_out, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        dq, dk, dv = (x.contiguous() for x in gradients)
        (turns_TC2,) = ctx.saved_tensors
        dqkv_T3HD = dq.new_empty(dq.shape[0], 3, *dq.shape[1:])
        _launch((dq, dk, dv), dqkv_T3HD.unbind(1), turns_TC2, -1)
        return dqkv_T3HD, None


def qkv_rope(qkv_T3HD: Tensor, turns_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(q_THD, k_THD, v_THD)``, the last a view of qkv; see
    :func:`earlyfusion.kernels.attention.varlen.qkv_rope`.

    Raises:
        ValueError: shapes, dtypes, devices or layouts do not fit.
    """
    check_qkv(qkv_T3HD, turns_TC)
    check_tensors("qkv_rope", qkv_T3HD, qkv_T3HD=qkv_T3HD)
    check_tensors("qkv_rope", qkv_T3HD, (torch.complex64,), turns_TC=turns_TC)
    return _QkvRope.apply(qkv_T3HD, torch.view_as_real(turns_TC))
