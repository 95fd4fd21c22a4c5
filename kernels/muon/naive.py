"""Newton-Schulz orthogonalisation, the definition: one matrix at a time, in high precision.

    X_0 = G / max(||G||_F, eps),    X_{i+1} = a_i X_i + b_i (X_i X_i^T) X_i + c_i (X_i X_i^T)^2 X_i

Every step maps each singular value s of X to a s + b s^3 + c s^5 and leaves the singular vectors alone; the
coefficients drive all values towards 1, so the result approximates the polar factor U V^T of G = U S V^T. A
preset is its list of (a, b, c), one triple a step. How far small singular values get in that many steps is
the preset's character: see `PRESETS`.

Shapes: B matrices, m rows, n columns.
"""

import torch
from torch import Tensor

from earlyfusion.kernels.errors import did_you_mean

Coefficients = tuple[tuple[float, float, float], ...]

EPS = 1e-7
"""Smallest Frobenius norm divided by: a zero matrix stays zero."""

_KELLER_JORDAN = (3.4445, -4.7750, 2.0315)

PRESETS: dict[str, Coefficients] = {
    # Amsel et al., The Polar Express (arXiv 2505.16932): minimax per step, each triple
    # already divided by its safety factor 1.01 (a / s, b / s^3, c / s^5)
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
    ),
    # Jordan et al. 2024, Muon: one triple with the steepest slope at
    # 0; values end in about [0.68, 1.14], never at 1
    "keller_jordan": (_KELLER_JORDAN,) * 5,
    # DeepSeek-V4: eight of those steps, then two that converge to 1
    "deepseek_v4": (_KELLER_JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2,
    # arXiv 2606.00371: no fifth power, one matrix product a step less
    "cubic": (
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ),
}


def coefficients(preset: str) -> Coefficients:
    """The triples of a preset."""
    if preset not in PRESETS:
        raise ValueError(f"unknown Newton-Schulz preset {preset!r}; {did_you_mean(preset, PRESETS)}")
    return PRESETS[preset]


def newton_schulz(G_Bmn: Tensor, preset: str = "polar_express", dtype: torch.dtype | None = None) -> Tensor:
    """Approximate polar factors O_Bmn of G_Bmn, in G's dtype.

    dtype: that of the iteration; None takes fp64 for fp64 input and fp32 for everything else.
    """
    steps = coefficients(preset)
    if dtype is None:
        dtype = torch.float64 if G_Bmn.dtype == torch.float64 else torch.float32
    out_Bmn = torch.empty_like(G_Bmn)
    for index in range(G_Bmn.shape[0]):
        X = G_Bmn[index].to(dtype)
        # Singular values of at most 1: the polynomials are made for that interval.
        X = X / torch.linalg.matrix_norm(X).clamp(min=EPS)
        for a, b, c in steps:
            gram = X @ X.mT
            X = a * X + (b * gram + c * (gram @ gram)) @ X
        out_Bmn[index] = X
    return out_Bmn
