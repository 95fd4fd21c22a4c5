"""Newton-Schulz on the Gram matrix: the long side is touched three times instead of twice per step.

With R = X X^T, a step X <- (a I + Z) X, Z = b R + c R^2, only needs s x s products once R is known:

    Q <- a Q + Q Z              (the product of the steps so far, X_i = Q X_0)
    R <- (a I + Z) R (a I + Z)  (the Gram matrix of X_i; everything commutes)

and X = Q X_0 at the end. Rounding errors of R grow like those of squared singular values, so the iteration
restarts: after two steps, and again every third, X is formed and R taken from it afresh. In float16 with
these restarts the result is as good as the direct iteration in bfloat16; in bfloat16, or without a restart,
singular values overshoot to 2 and more. Source: Gram Newton-Schulz (Dao-AILab, 2026).

FLOPs for s x l, five steps, one restart: direct 20 s^2 l + 10 s^3, this 8 s^2 l + 18 s^3, with symmetric
halves 6 s^2 l + 14 s^3: worth it for l >= 1.5 s.

Shapes: B matrices, m rows, n columns; s = min(m, n), l = max(m, n).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from earlyfusion.kernels.muon.naive import check_batch, coefficients
from earlyfusion.kernels.muon.newton_schulz import normalised

SymmetricProduct = Callable[[Tensor, Tensor | None, float, float], Tensor]

ASPECT = 1.5  # l / s from which the Gram form has fewer operations
FIRST_RESTART, NEXT_RESTART = 2, 3  # steps


def restarts(steps: int) -> frozenset[int]:
    """Steps before which X is formed: 2, 5, 8, ... as long as more than one step is left."""
    return frozenset(range(FIRST_RESTART, steps, NEXT_RESTART))


def symmetric_product(X_Bsl: Tensor, added_Bss: Tensor | None, beta: float, alpha: float) -> Tensor:
    """``beta * added + alpha * X X^T``; ``added`` symmetric or absent."""
    if added_Bss is None:
        return torch.bmm(X_Bsl, X_Bsl.mT).mul_(alpha)
    return torch.baddbmm(added_Bss, X_Bsl, X_Bsl.mT, beta=beta, alpha=alpha)


def prefers_gram(batch: int, rows: int, columns: int) -> bool:
    """Whether the Gram form is used for this stack: several matrices, clearly longer than wide."""
    return batch > 1 and max(rows, columns) >= ASPECT * min(rows, columns)


def gram_newton_schulz(
    G_Bmn: Tensor,
    preset: str = "polar_express",
    dtype: torch.dtype = torch.float16,
    product: SymmetricProduct = symmetric_product,
) -> Tensor:
    """Approximate polar factors O_Bmn of G_Bmn, in G's dtype; the Gram form of `newton_schulz`.

    Args:
        dtype: of the iteration; float16 (or wider). bfloat16 is refused: it diverges.
        product: symmetric product to use, plain torch or a kernel.
    Raises:
        ValueError: unknown preset, G is not a floating-point [B, m, n], or dtype is bfloat16.
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
    restart_at = restarts(len(steps))
    R_Bss, Q_Bss = product(X_Bsl, None, 0.0, 1.0), None
    for index, (a, b, c) in enumerate(steps):
        # Form X, and take its Gram matrix afresh: rounding has grown in R.
        if index in restart_at:
            assert Q_Bss is not None
            X_Bsl = torch.bmm(Q_Bss, X_Bsl)
            R_Bss, Q_Bss = product(X_Bsl, None, 0.0, 1.0), None
        Z_Bss = product(R_Bss, R_Bss, b, c) if c else b * R_Bss
        # The first product after a restart starts from the identity.
        if Q_Bss is None:
            Q_Bss = Z_Bss + a * identity_ss
        else:
            Q_Bss = torch.baddbmm(Q_Bss, Q_Bss, Z_Bss, beta=a)
        # R after the last step, or before a restart, is read by nobody.
        if index + 1 < len(steps) and index + 1 not in restart_at:
            half_Bss = torch.baddbmm(R_Bss, R_Bss, Z_Bss, beta=a)
            R_Bss = torch.baddbmm(half_Bss, Z_Bss, half_Bss, beta=a)
    assert Q_Bss is not None
    O_Bsl = torch.bmm(Q_Bss, X_Bsl)
    return (O_Bsl.mT if tall else O_Bsl).to(G_Bmn.dtype)
