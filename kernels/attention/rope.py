"""Splitting a packed qkv projection and turning q and k by a 2-D RoPE, as one operation.

    q_t = turn(qkv_t[0]), k_t = turn(qkv_t[1]), v_t = qkv_t[2];    turn: (x_2c + i x_2c+1) * turns_tc

Adjacent channels are a pair (pair 2i carries the column, pair 2i + 1 the row of a patch; the turns already
say so).

Legend: T tokens (patches), H heads, D head dim, C = D / 2 pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from earlyfusion.kernels.checks import check_qkv


def qkv_rope_naive(qkv_T3HD: Tensor, turns_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, pair by pair in real numbers. Returns ``(q_THD, k_THD, v_THD)`` in the dtype of qkv."""
    check_qkv(qkv_T3HD, turns_TC)
    q, k, v = qkv_T3HD.unbind(1)
    wide = torch.promote_types(qkv_T3HD.dtype, torch.float32)
    cos, sin = turns_TC.real[:, None].to(wide), turns_TC.imag[:, None].to(wide)

    def turn(x: Tensor) -> Tensor:
        # As two real numbers, so that the law does not lean on complex arithmetic.
        even, odd = x[..., 0::2].to(wide), x[..., 1::2].to(wide)
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)

    return turn(q), turn(k), v


def qkv_rope(qkv_T3HD: Tensor, turns_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(q_THD, k_THD, v_THD)`` through one complex product; float32 inside, the dtype of qkv outside.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_qkv(qkv_T3HD, turns_TC)
    qk, v = qkv_T3HD.split((2, 1), dim=1)  # split and unbind: their backward is one concatenation
    wide = torch.promote_types(qkv_T3HD.dtype, torch.float32)
    # q and k in one product.
    pairs = torch.view_as_complex(qk.to(wide).unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * turns_TC[:, None, None]).flatten(-2).to(qkv_T3HD.dtype)
    q, k = turned.unbind(1)
    return q, k, v.squeeze(1)
