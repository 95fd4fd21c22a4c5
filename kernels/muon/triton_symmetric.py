"""Newton-Schulz on a GPU with symmetric products: half of the tiles of X X^T are computed, the rest is
mirrored.

Both products of a step that are known to be symmetric, R = X X^T and Z = b R + c R R^T, go through one kernel
with the addition in its epilogue; the rest stays with cuBLAS. Stacks of long matrices (experts) take the Gram
form in float16 (`gram`), everything else the direct iteration in bfloat16.

Shapes: B matrices, s rows, l columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from earlyfusion.kernels.attention.triton.flash import dot
from earlyfusion.kernels.checks import check_shapes, check_tensors
from earlyfusion.kernels.launch import on_device, power_of_two
from earlyfusion.kernels.muon import gram
from earlyfusion.kernels.muon import newton_schulz as torch_form
from earlyfusion.kernels.muon.naive import check_batch, coefficients

LEAST_SIDE = 256  # below, half of the tiles is less than what cuBLAS gains by other means


@triton.jit
def symmetric_tiles(
    x_Bsl, added_Bss, out_Bss, S, L, beta, alpha, BM: tl.constexpr, BK: tl.constexpr, ADD: tl.constexpr
):
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
        at_out = batch * S * S + row64[:, None] * S + col64[None, :]
        if ADD:
            acc += beta * tl.load(added_Bss + at_out, mask=keep, other=0.0).to(tl.float32)
        out = acc.to(out_Bss.dtype.element_ty)
        # The diagonal tiles are computed whole, but only their lower half is stored.
        lower = keep & (row[:, None] >= col[None, :])  # so that the result is symmetric to the last bit
        tl.store(out_Bss + at_out, out, mask=lower)
        mirrored = batch * S * S + col64[None, :] * S + row64[:, None]
        tl.store(out_Bss + mirrored, out, mask=lower)


def symmetric_product(X_Bsl: Tensor, added_Bss: Tensor | None, beta: float, alpha: float) -> Tensor:
    """``beta * added + alpha * X X^T`` in X's dtype, float32 accumulation; ``added`` must be symmetric.

    Raises:
        ValueError: X is not a contiguous float32, bfloat16 or float16 [B, s, l], or ``added`` is not [B, s,
        s] like it.
    """
    batch, side, length = check_shapes("symmetric_product", X_Bsl=X_Bsl, added_Bss=added_Bss).values()
    check_tensors("symmetric_product", X_Bsl, X_Bsl=X_Bsl)
    if added_Bss is not None:
        check_tensors("symmetric_product", X_Bsl, (X_Bsl.dtype,), "any", added_Bss=added_Bss)
        added_Bss = added_Bss.contiguous()
    out_Bss = X_Bsl.new_empty(batch, side, side)
    if not out_Bss.numel():
        return out_Bss
    half = X_Bsl.dtype != torch.float32
    tile = min(128 if half else 64, max(16, power_of_two(side)))
    with on_device(X_Bsl):
        symmetric_tiles[(triton.cdiv(side, tile), triton.cdiv(side, tile), batch)](
            X_Bsl,
            X_Bsl if added_Bss is None else added_Bss,
            out_Bss,
            side,
            length,
            float(beta),
            float(alpha),
            BM=tile,
            BK=64 if half else 32,
            ADD=added_Bss is not None,
            num_warps=8 if tile == 128 else 4,
            num_stages=3,
        )
    return out_Bss


def newton_schulz(G_Bmn: Tensor, preset: str = "polar_express", dtype: torch.dtype | None = None) -> Tensor:
    """Approximate polar factors O_Bmn of G_Bmn, in G's dtype; see `naive.newton_schulz` for the definition.

    dtype: that of the iteration. None takes float16 in the Gram form for stacks of long matrices, else
    bfloat16; a given dtype (float64 goes to plain torch) takes the direct iteration.

    Raises:
        ValueError: unknown preset, or G is not a floating-point [B, m, n].
    """
    check_batch(G_Bmn)
    steps = coefficients(preset)
    batch, rows, columns = G_Bmn.shape
    # Half of few tiles is less than cuBLAS gains by other means.
    small = min(rows, columns) < LEAST_SIDE and G_Bmn.is_cuda
    if torch.float64 in (dtype, G_Bmn.dtype) or small:
        return torch_form.newton_schulz(G_Bmn, preset, dtype)
    if dtype is None and gram.prefers_gram(batch, rows, columns):
        return gram.gram_newton_schulz(G_Bmn, preset, product=symmetric_product)
    if G_Bmn.numel() == 0:
        return torch.empty_like(G_Bmn)
    X_Bsl, tall = torch_form.normalised(G_Bmn, dtype or torch.bfloat16)
    for a, b, c in steps:
        R_Bss = symmetric_product(X_Bsl, None, 0.0, 1.0)
        if c == 0.0:
            X_Bsl = torch.baddbmm(X_Bsl, R_Bss, X_Bsl, beta=a, alpha=b)
        else:
            X_Bsl = torch.baddbmm(X_Bsl, symmetric_product(R_Bss, R_Bss, b, c), X_Bsl, beta=a)
    return (X_Bsl.mT if tall else X_Bsl).to(G_Bmn.dtype)
