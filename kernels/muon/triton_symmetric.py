"""Newton-Schulz on a GPU with symmetric products: half of the tiles of X X^T are computed, the rest is
mirrored.

Both products of a step that are known to be symmetric, R = X X^T and Z = b R + c R R^T, go through one kernel
with the addition in its epilogue; the rest stays with cuBLAS. Stacks of long matrices (experts) take the Gram
form in float16, everything else the direct iteration in bfloat16.

Shapes: B matrices, s rows, l columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from earlyfusion.kernels.attention.triton.flash import dot
from earlyfusion.kernels.launch import on_device, power_of_two
from earlyfusion.kernels.muon import newton_schulz as plain
from earlyfusion.kernels.segments import check_batch, check_shapes, check_tensors

LEAST_SIDE = 256  # below, half of the tiles is less than what cuBLAS gains by other means


@triton.jit
def symmetric_tiles(x_Bsl, out_Bss, S, L, beta, alpha, BM: tl.constexpr, BK: tl.constexpr, ADD: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    # Programs above the diagonal have nothing to do: they are mirrored.
    if j <= i:
        batch = tl.program_id(2).to(tl.int64)
        x = x_Bsl + batch * S * L
        row, col = i * BM + tl.arange(0, BM), j * BM + tl.arange(0, BM)
        # A stack of large matrices has more than 2^31 elements.
        row64, col64 = row.to(tl.int64), col.to(tl.int64)
        acc = tl.zeros([BM, BM], tl.float32)
        for k in range(0, L, BK):
            at = k + tl.arange(0, BK)
            left = tl.load(
                x + row64[:, None] * L + at[None, :], mask=(row < S)[:, None] & (at < L)[None, :], other=0.0
            )
            right = tl.load(
                x + col64[None, :] * L + at[:, None], mask=(col < S)[None, :] & (at < L)[:, None], other=0.0
            )
            acc = dot(left, right, acc)
        acc *= alpha
        keep = (row < S)[:, None] & (col < S)[None, :]
        # The matrix that is added is x itself, S x S.
        if ADD:
            at_x = row64[:, None] * S + col64[None, :]
            acc += beta * tl.load(x + at_x, mask=keep, other=0.0).to(tl.float32)
        out = acc.to(out_Bss.dtype.element_ty)
        # The diagonal tiles are computed whole, but only their lower half is stored, so that the result is
        # symmetric to the last bit.
        lower = keep & (row[:, None] >= col[None, :])
        place = out_Bss + batch * S * S
        tl.store(place + row64[:, None] * S + col64[None, :], out, mask=lower)
        tl.store(place + col64[None, :] * S + row64[:, None], out, mask=lower)


def symmetric_product(X_Bsl: Tensor, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """``X X^T``, or ``beta X + alpha X X^T`` of symmetric matrices, in X's dtype, float32 accumulation.

    Raises:
        ValueError: X is not a contiguous float32, bfloat16 or float16 [B, s, l], with beta [B, s, s].
    """
    known = dict.fromkeys("sl", X_Bsl.shape[-1]) if beta else None
    batch, side, length = (check_shapes("symmetric_product", known, X_Bsl=X_Bsl)[axis] for axis in "Bsl")
    check_tensors("symmetric_product", X_Bsl, X_Bsl=X_Bsl)
    out_Bss = X_Bsl.new_empty(batch, side, side)
    if not out_Bss.numel():
        return out_Bss
    half = X_Bsl.dtype != torch.float32
    tile = min(128 if half else 64, max(16, power_of_two(side)))
    with on_device(X_Bsl):
        symmetric_tiles[(triton.cdiv(side, tile), triton.cdiv(side, tile), batch)](
            X_Bsl,
            out_Bss,
            side,
            length,
            float(beta),
            float(alpha),
            BM=tile,
            BK=64 if half else 32,
            ADD=beta != 0,
            num_warps=8 if tile == 128 else 4,
            num_stages=3,
        )
    return out_Bss


def newton_schulz(G_Bmn: Tensor, preset: str = "polar_express", dtype: torch.dtype | None = None) -> Tensor:
    """Approximate polar factors O_Bmn of G_Bmn, in G's dtype; see `naive.newton_schulz` for the definition.

    dtype: that of the iteration. None takes float16 in the Gram form for stacks of long matrices, else
    bfloat16; a given dtype takes the direct iteration.

    Raises:
        ValueError: unknown preset, or G is not a floating-point [B, m, n].
    """
    check_batch(G_Bmn)
    batch, rows, columns = G_Bmn.shape
    # Half of few tiles is less than cuBLAS gains by other means.
    if min(rows, columns) < LEAST_SIDE and G_Bmn.is_cuda:
        return plain.newton_schulz(G_Bmn, preset, dtype)
    if dtype is None and plain.prefers_gram(batch, rows, columns):
        return plain.gram_newton_schulz(G_Bmn, preset, product=symmetric_product)
    return plain.newton_schulz(G_Bmn, preset, dtype or torch.bfloat16, symmetric_product)
