"""The two KDA forget gates, in natural log units, with their closed-form gradients.

``lower_bound is None``: g = -exp(A_log) * softplus(f + dt_bias), unbounded below (Kimi Linear 48B).
``lower_bound = L < 0``: g = L * sigmoid(exp(A_log) * (f + dt_bias)), inside (L, 0) (Kimi K3).
The decay of one key channel over one token is alpha = exp(g), in [0, 1].

Legend: T tokens, G value heads, K key dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any argument is float64, else float32: gates, states and sums are never kept in half
    precision."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def check_lower_bound(lower_bound: float | None) -> None:
    """Raise ValueError unless the bound is None or negative."""
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(
            f"KDA gate: lower_bound={lower_bound} given; expected None (unbounded softplus gate) or a"
            " negative number of nats per token such as -5.0"
        )


def log_decay(f_TGK: Tensor, A_log_G: Tensor, dt_bias_GK: Tensor, lower_bound: float | None) -> Tensor:
    """g_TGK in nats per token, all entries <= 0, in float32 (float64 if an argument is). Leading axes of f
    are free."""
    check_lower_bound(lower_bound)
    dtype = wide_dtype(f_TGK, A_log_G, dt_bias_GK)
    rate_G1 = A_log_G.to(dtype).exp().unsqueeze(-1)
    x_TGK = f_TGK.to(dtype) + dt_bias_GK.to(dtype)
    if lower_bound is None:
        # exp(A_log) is the rate of a head, between 1 and 16 when it is made.
        return F.softplus(x_TGK) * -rate_G1
    return torch.sigmoid(x_TGK * rate_G1) * lower_bound


def log_decay_backward(
    dg_TGK: Tensor,
    f_TGK: Tensor,
    g_TGK: Tensor,
    A_log_G: Tensor,
    dt_bias_GK: Tensor,
    lower_bound: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (df_TGK, dA_log_G, ddt_bias_GK) from dg and the g that :func:`log_decay` returned.

    The derivative of the bounded gate is taken from its value, L * s * (1 - s) = g * (1 - g / L): it goes to
    exactly 0 where the sigmoid saturates, so a huge exp(A_log) never meets an infinity.
    """
    dtype = g_TGK.dtype
    rate_G1 = A_log_G.to(dtype).exp().unsqueeze(-1)
    x_TGK = f_TGK.to(dtype) + dt_bias_GK.to(dtype)
    if lower_bound is None:
        dA_log_G = (dg_TGK * g_TGK).sum(0).sum(-1)
        df_TGK = x_TGK.sigmoid_().mul_(dg_TGK).mul_(-rate_G1)
    else:
        # From the value, not from the sigmoid again: where it saturates the difference is an exact zero.
        inner_TGK = torch.addcmul(g_TGK, g_TGK, g_TGK, value=-1.0 / lower_bound).mul_(dg_TGK).mul_(rate_G1)
        dA_log_G = (inner_TGK * x_TGK).sum(0).sum(-1)
        df_TGK = inner_TGK
    return df_TGK, dA_log_G, df_TGK.sum(0)
