"""Batched Newton-Schulz in plain torch: three batched products a step (two for a cubic preset), always on the
short side.

A matrix taller than wide is iterated transposed, so that the Gram matrix is min(m, n) square. The norm is
taken in at least fp32 before the cast, so tiny and huge gradients survive a 16-bit iteration.

Shapes: B matrices, m rows, n columns; inside the iteration s = min(m, n) rows, l = max(m, n) columns.

The *Gram form* touches the long side three times instead of twice per step. With R = X X^T, a step
X <- (a I + Z) X, Z = b R + c R^2, only needs s x s products once R is known:

    Q <- a Q + Q Z              (the product of the steps so far, X_i = Q X_0)
    R <- (a I + Z) R (a I + Z)  (the Gram matrix of X_i; everything commutes)

and X = Q X_0 at the end. Rounding errors of R grow like those of squared singular values, so the iteration
restarts: after two steps, and again every third, X is formed and R taken from it afresh. In float16 with
these restarts the result is as good as the direct iteration in bfloat16; in bfloat16, or without a restart,
singular values overshoot to 2 and more. Source: Gram Newton-Schulz (Dao-AILab, 2026).

FLOPs for s x l, five steps, one restart: direct 20 s^2 l + 10 s^3, this 8 s^2 l + 18 s^3, with symmetric
halves 6 s^2 l + 14 s^3: worth it for l >= 1.5 s.
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor

from earlyfusion.kernels.muon.naive import EPS, coefficients
from earlyfusion.kernels.segments import check_batch

ENVIRONMENT = "EF_MUON_FP32"
ASPECT = 1.5  # l / s from which the Gram form has fewer operations
RESTARTS = (2, 5, 8)  # steps before which X is formed

Product = Callable[..., Tensor]
"""product(X), product(R, b, c): see :func:`symmetric_product`, or a kernel for the same."""


def default_dtype(device: torch.device) -> torch.dtype:
    """Precision of the iteration when none is asked for.

    bf16 on an accelerator and on CPUs with bf16 dot products: measured on one core of an AVX512-BF16 machine,
    bf16 takes 0.2 to 0.6 of the fp32 time (64 of 32x128: 1.0 against 2.8 ms; 8 of 128x128: 1.5 against 6.0
    ms; 8 of 256x512: 15 against 73 ms). Other CPUs emulate bf16, so they get fp32. A rule, not a timing at
    run time: the same machine always computes the same numbers. EF_MUON_FP32=1: fp32 on every CPU, where runs
    are compared step by step.
    """
    # Orthogonality to two digits is enough for an update; speed is not.
    if device.type != "cpu":
        return torch.bfloat16
    if os.environ.get(ENVIRONMENT) == "1":
        return torch.float32
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return torch.bfloat16 if probe is not None and probe() else torch.float32


def normalised(G_Bmn: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """X_0 [B, s, l] with unit Frobenius norm (taken in float32 or wider), and whether it is transposed."""
    # The polar factor of the transpose is the transpose of the polar factor.
    tall = G_Bmn.shape[1] > G_Bmn.shape[2]
    G_Bsl = G_Bmn.mT if tall else G_Bmn
    wide = G_Bsl if G_Bsl.dtype == torch.float64 else G_Bsl.float()
    norm_B11 = torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True).clamp(min=EPS)
    return (wide / norm_B11).to(dtype).contiguous(), tall


def symmetric_product(X_Bsl: Tensor, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """``X X^T``, or ``beta X + alpha X X^T`` of symmetric matrices."""
    if not beta:
        return torch.bmm(X_Bsl, X_Bsl.mT)
    return torch.baddbmm(X_Bsl, X_Bsl, X_Bsl, beta=beta, alpha=alpha)


def newton_schulz(
    G_Bmn: Tensor,
    preset: str = "polar_express",
    dtype: torch.dtype | None = None,
    product: Product = symmetric_product,
) -> Tensor:
    """Approximate polar factors O_Bmn of G_Bmn, in G's dtype; see `naive.newton_schulz` for the definition.

    dtype: that of the iteration; None takes `default_dtype` of the device (fp64 input: fp64).

    Raises:
        ValueError: unknown preset, or G is not a floating-point [B, m, n].
    """
    check_batch(G_Bmn)
    steps = coefficients(preset)
    if dtype is None:
        dtype = torch.float64 if G_Bmn.dtype == torch.float64 else default_dtype(G_Bmn.device)
    if G_Bmn.numel() == 0:
        return torch.empty_like(G_Bmn)
    X_Bsl, tall = normalised(G_Bmn, dtype)
    for a, b, c in steps:
        gram_Bss = product(X_Bsl)
        # No fifth power, no square of the Gram matrix.
        if c == 0.0:
            X_Bsl = torch.baddbmm(X_Bsl, gram_Bss, X_Bsl, beta=a, alpha=b)
        else:
            X_Bsl = torch.baddbmm(X_Bsl, product(gram_Bss, b, c), X_Bsl, beta=a)
    return (X_Bsl.mT if tall else X_Bsl).to(G_Bmn.dtype)


def prefers_gram(batch: int, rows: int, columns: int) -> bool:
    """Whether the Gram form is used for this stack: several matrices, clearly longer than wide."""
    return batch > 1 and max(rows, columns) >= ASPECT * min(rows, columns)


def gram_newton_schulz(
    G_Bmn: Tensor,
    preset: str = "polar_express",
    dtype: torch.dtype = torch.float16,
    product: Product = symmetric_product,
) -> Tensor:
    """The same in the Gram form; dtype: of the iteration, float16 or wider. bfloat16 is refused: it diverges.

    Raises:
        ValueError: as `newton_schulz`, or dtype is bfloat16.
    """
    check_batch(G_Bmn)
    if dtype == torch.bfloat16:
        raise ValueError(
            "gram_newton_schulz: dtype is bfloat16, in which the Gram iteration diverges; use float16"
        )
    steps = coefficients(preset)
    if G_Bmn.numel() == 0:
        return torch.empty_like(G_Bmn)
    X_Bsl, tall = normalised(G_Bmn, dtype)
    identity_ss = torch.eye(X_Bsl.shape[1], dtype=dtype, device=X_Bsl.device)
    R_Bss, Q_Bss = product(X_Bsl), None
    for index, (a, b, c) in enumerate(steps):
        # Form X, and take its Gram matrix afresh: rounding has grown in R.
        if index in RESTARTS:
            assert Q_Bss is not None
            X_Bsl = torch.bmm(Q_Bss, X_Bsl)
            R_Bss, Q_Bss = product(X_Bsl), None
        Z_Bss = product(R_Bss, b, c) if c else b * R_Bss
        # The first product after a restart starts from the identity.
        if Q_Bss is None:
            Q_Bss = Z_Bss + a * identity_ss
        else:
            Q_Bss = torch.baddbmm(Q_Bss, Q_Bss, Z_Bss, beta=a)
        # R after the last step, or before a restart, is read by nobody.
        if index + 1 < len(steps) and index + 1 not in RESTARTS:
            half_Bss = torch.baddbmm(R_Bss, R_Bss, Z_Bss, beta=a)
            R_Bss = torch.baddbmm(half_Bss, Z_Bss, half_Bss, beta=a)
    assert Q_Bss is not None
    O_Bsl = torch.bmm(Q_Bss, X_Bsl)
    return (O_Bsl.mT if tall else O_Bsl).to(G_Bmn.dtype)
