"""One decode token of Kimi Delta Attention and its convolution with few, batched torch operations.

The state is read once for the prediction and once for the output: with u = alpha * k and w = alpha * q,

    kS = u^T S,  delta = beta * (v - kS),  o = scale * (w^T S + (q . k) delta),  S' = alpha S + k delta^T

so both reads go through one batched matrix product on the state before its update. Definition:
kernels/kda/naive.py.

Legend: B sequences, H query/key heads, G value heads, K key dim, V value dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.checks import Inputs, check_kda
from earlyfusion.kernels.kda.gate import log_decay, wide_dtype
from earlyfusion.kernels.kda.naive import l2_normalize
from earlyfusion.kernels.precision import accumulate_dtype, without_autocast


@torch.no_grad()
def kda_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BGV: Tensor,
    f_BGK: Tensor,
    b_BG: Tensor,
    A_log_G: Tensor,
    dt_bias_GK: Tensor,
    state_BGKV: Tensor,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Advance B sequences by one token; arguments as in :func:`earlyfusion.kernels.kda.naive.kda_step`.

    Returns (o_BGV in the dtype of v, new state_BGKV in float32, or float64 for float64 inputs).
    ``state_BGKV`` is not modified.
    """
    x = Inputs(q_BHK, k_BHK, v_BGV, f_BGK, b_BG, A_log_G, dt_bias_GK)
    check_kda("kda_step", x, state_BGKV.shape[0])
    dtype = wide_dtype(q_BHK, v_BGV, state_BGKV)
    group = v_BGV.shape[1] // q_BHK.shape[1]
    scale = q_BHK.shape[-1] ** -0.5
    qk_2BGK = l2_normalize(torch.stack([q_BHK, k_BHK]).to(dtype))
    if group > 1:
        qk_2BGK = qk_2BGK.repeat_interleave(group, dim=2)
    alpha_BGK = log_decay(f_BGK, A_log_G, dt_bias_GK, lower_bound).to(dtype).exp_()
    beta_BG1 = torch.sigmoid(b_BG.to(dtype)).unsqueeze(-1)

    state_BGKV = state_BGKV.to(dtype)
    with without_autocast(q_BHK):
        # The state is the large operand: q and k read it in one pass, before it is changed.
        reads_BG2V = (qk_2BGK * alpha_BGK).permute(1, 2, 0, 3) @ state_BGKV
    delta_BGV = beta_BG1 * (v_BGV.to(dtype) - reads_BG2V[:, :, 1])
    # What q would read of this very token, without going through the new state.
    overlap_BG1 = (qk_2BGK[0] * qk_2BGK[1]).sum(-1, keepdim=True)
    o_BGV = torch.addcmul(reads_BG2V[:, :, 0], overlap_BG1, delta_BGV).mul_(scale)
    # A new tensor: the caller may hold the old state, for instance in a prefix cache.
    new_BGKV = (state_BGKV * alpha_BGK.unsqueeze(-1)).addcmul_(
        qk_2BGK[1].unsqueeze(-1), delta_BGV.unsqueeze(-2)
    )
    return o_BGV.to(v_BGV.dtype), new_BGKV


def conv_step(x_NC: Tensor, weight_CW: Tensor, taps_NCW1: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of N sequences through the short convolution and SiLU -> (y_NC, the next taps_NCW1).

    Sums in fp32 (fp64 for fp64), oldest input first. The taps are laid out channel-last in memory.
    """
    dtype = accumulate_dtype(x_NC.dtype)
    weight_WC = weight_CW.to(dtype).T
    # Channels last, as they lie: every tap is then one contiguous row.
    past_NWC = taps_NCW1.transpose(1, 2)
    y_NC = past_NWC[:, 0].to(dtype) * weight_WC[0]
    for tap in range(1, past_NWC.shape[1]):
        y_NC.addcmul_(past_NWC[:, tap].to(dtype), weight_WC[tap])
    y_NC.addcmul_(x_NC.to(dtype), weight_WC[-1])

    # The oldest input leaves, the newest comes in; the dtype stays that of the taps.
    kept_NWC = torch.cat([past_NWC[:, 1:], x_NC.to(past_NWC.dtype).unsqueeze(1)], dim=1)
    return F.silu(y_NC, inplace=True).to(x_NC.dtype), kept_NWC.transpose(1, 2)
