"""Batched Newton-Schulz in plain torch: three batched products a step (two for a cubic preset), always on the
short side.

A matrix taller than wide is iterated transposed, so that the Gram matrix is min(m, n) square. The norm is
taken in at least fp32 before the cast, so tiny and huge gradients survive a 16-bit iteration.

Shapes: B matrices, m rows, n columns; inside the iteration s = min(m, n) rows, l = max(m, n) columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from earlyfusion.kernels.muon.naive import EPS, check_batch, coefficients


def default_dtype(device: torch.device) -> torch.dtype:
    """Precision of the iteration when none is asked for.

    bf16 on an accelerator and on CPUs with bf16 dot products: measured on one core of an AVX512-BF16 machine,
    bf16 takes 0.2 to 0.6 of the fp32 time (64 of 32x128: 1.0 against 2.8 ms; 8 of 128x128: 1.5 against 6.0
    ms; 8 of 256x512: 15 against 73 ms). Other CPUs emulate bf16, so they get fp32. A rule, not a timing at
    run time: the same machine always computes the same numbers.
    """
    # Orthogonality to two digits is enough for an update; speed is not.
    if device.type != "cpu":
        return torch.bfloat16
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


def newton_schulz(G_Bmn: Tensor, preset: str = "polar_express", dtype: torch.dtype | None = None) -> Tensor:
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
        gram_Bss = torch.bmm(X_Bsl, X_Bsl.mT)
        # No fifth power, no square of the Gram matrix.
        if c == 0.0:
            X_Bsl = torch.baddbmm(X_Bsl, gram_Bss, X_Bsl, beta=a, alpha=b)
        else:
            poly_Bss = torch.baddbmm(gram_Bss, gram_Bss, gram_Bss, beta=b, alpha=c)
            X_Bsl = torch.baddbmm(X_Bsl, poly_Bss, X_Bsl, beta=a)
    return (X_Bsl.mT if tall else X_Bsl).to(G_Bmn.dtype)
