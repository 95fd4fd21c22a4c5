"""SwiGLU experts, dropless: the definition.

    y_t = sum_j weights_tj * down_e ( silu(gate_e x_t) * (up_e x_t) ),   e = expert_ids_tj

or with SiTU (Kimi K3) in place of silu(g) * u:  beta tanh(g / beta) sigmoid(g) * lambda tanh(u / lambda),
which is bounded; lambda None: u itself.

``gate_e`` and ``up_e`` are the first and second F rows of ``gate_up[e]``.

Legend: T tokens, D hidden, J experts per token, E experts, F expert width, C = 2F.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.products import accumulate_dtype, compute_dtype, without_autocast

Situ = tuple[float, float | None]
"""(beta, lambda) of SiTU."""


def activate(gate: Tensor, up: Tensor, situ: Situ | None) -> Tensor:
    """silu(gate) * up, or SiTU of both, which is computed in the accumulation dtype and rounded once."""
    if situ is None:
        return F.silu(gate) * up if torch.is_grad_enabled() else F.silu(gate).mul_(up)
    (beta, bound), dtype = situ, gate.dtype
    gate, up = (x.to(accumulate_dtype(dtype)) for x in (gate, up))
    bounded = up if bound is None else bound * torch.tanh(up / bound)
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bounded).to(dtype)


def moe_experts(
    x_TD: Tensor,
    expert_ids_TJ: Tensor,
    weights_TJ: Tensor,
    gate_up_ECD: Tensor,
    down_EDF: Tensor,
    situ: Situ | None = None,
) -> Tensor:
    """Expert mixture y_TD, one expert at a time.

    Args:
        expert_ids_TJ: int64 in [0, E).
        weights_TJ: router weights, usually float32.
        situ: None for SwiGLU.
    Returns:
        y_TD in the compute dtype of x and the expert weights (see :mod:`earlyfusion.kernels.products`).
    """
    out_dtype = compute_dtype(x_TD, gate_up_ECD, down_EDF)
    dtype = accumulate_dtype(out_dtype)
    x = x_TD.to(out_dtype).to(dtype)
    y_TD = torch.zeros_like(x)
    with without_autocast(x_TD):
        for expert, (gate_up_CD, down_DF) in enumerate(zip(gate_up_ECD, down_EDF)):
            # A token may name the same expert twice: its weights add up.
            weight_T1 = (weights_TJ.to(dtype) * (expert_ids_TJ == expert)).sum(dim=1, keepdim=True)
            token_ids = (expert_ids_TJ == expert).any(dim=1).nonzero()[:, 0]
            gate, up = (x[token_ids] @ gate_up_CD.to(out_dtype).to(dtype).T).chunk(2, dim=-1)
            out = activate(gate, up, situ) @ down_DF.to(out_dtype).to(dtype).T
            y_TD = y_TD.index_add(0, token_ids, weight_T1[token_ids] * out)
    return y_TD.to(out_dtype)
