"""qkv split and adjacent-pair 2-D RoPE on a GPU: qkv is read once, q and k are written once, v stays where it
is.

Forward traffic per token and head: 4 D elements (read q, k; write q, k) instead of about 14 with float32
complex temporaries. Backward: one kernel turns dq and dk back and writes the whole dqkv, where autograd
would concatenate. A program takes columns of a token's whole row, whichever heads they belong to: nothing is
padded, and the angles that heads share come from the cache.

Legend: T tokens (patches), H heads, D head dim, C = D / 2 pairs, BT tokens and BC columns of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language import constexpr

from earlyfusion.kernels.launch import column_tile, on_device
from earlyfusion.kernels.segments import check_qkv, check_tensors

ROWS, COLUMNS = 16, 128


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
    WIDTH: constexpr,
    D: constexpr,
    VECTOR: constexpr,
    BT: constexpr,
    BC: constexpr,
    SIGN: constexpr,
):
    """q_out and k_out [T, H D] are q and k turned; v, if there is one, is copied. Grid (T / BT, H D / BC, 2
    or 3). source, target: elements from token to token. VECTOR divides D: the angles of as many columns are
    neighbours."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    col, part = tl.program_id(1) * BC + tl.arange(0, BC), tl.program_id(2)
    keep = (token < T)[:, None] & (col < WIDTH)[None, :]
    from_at, to_at = token[:, None] * source + col[None, :], token[:, None] * target + col[None, :]
    if part == 2:
        # The gradient of v goes straight into its third of dqkv.
        if v is not None:
            tl.store(v_out + to_at, tl.load(v + from_at, mask=keep, other=0.0), mask=keep)
    else:
        x_at, out_at = q + from_at, q_out + to_at
        if part == 1:
            x_at, out_at = k + from_at, k_out + to_at
        x = tl.load(x_at, mask=keep, other=0.0).to(tl.float32)
        # Two adjacent channels are the real and the imaginary part, two adjacent numbers cosine and sine.
        angle = tl.max_contiguous(tl.multiple_of(col % D, VECTOR), VECTOR)
        turn = tl.load(turns + token[:, None] * D + angle[None, :], mask=keep, other=0.0)
        even, odd = tl.split(tl.reshape(x, [BT, BC // 2, 2]))
        cos, sin = tl.split(tl.reshape(turn, [BT, BC // 2, 2]))
        sin *= SIGN
        out = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [BT, BC])
        tl.store(out_at, out.to(q_out.dtype.element_ty), mask=keep)


def _launch(qkv: Sequence[Tensor | None], outs: Sequence[Tensor | None], turns: Tensor, sign: int) -> None:
    """Over all tokens and columns of three [T, H, D]."""
    assert qkv[0] is not None and outs[0] is not None
    tokens, heads, dim = qkv[0].shape
    if tokens:
        columns, parts = column_tile(heads * dim, COLUMNS), 2 if qkv[2] is None else 3
        grid = triton.cdiv(tokens, ROWS), triton.cdiv(heads * dim, columns), parts
        sizes = {"WIDTH": heads * dim, "D": dim, "VECTOR": math.gcd(dim, 8), "BT": ROWS, "BC": columns}
        with on_device(turns):
            rope[grid](
                *qkv,
                *outs,
                turns,
                tokens,
                qkv[0].stride(0),
                outs[0].stride(0),
                **sizes,
                SIGN=sign,
                num_warps=4,
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
