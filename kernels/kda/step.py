"""One decode token of Kimi Delta Attention with few, batched torch operations (no gradient).

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

from earlyfusion.kernels.kda.checks import check_sequences
from earlyfusion.kernels.kda.gate import compute_dtype, full_precision, log_decay
from earlyfusion.kernels.kda.naive import l2_normalize


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
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Advance B sequences by one token; arguments as in :func:`earlyfusion.kernels.kda.naive.kda_step`.

    Returns (o_BGV in the dtype of v, new state_BGKV in float32, or float64 for float64 inputs).
    ``state_BGKV`` is not modified.
    """
    check_sequences(q_BHK, k_BHK, v_BGV, f_BGK, b_BG)
    dtype = compute_dtype(q_BHK, v_BGV, state_BGKV)
    group = v_BGV.shape[1] // q_BHK.shape[1]
    scale = q_BHK.shape[-1] ** -0.5 if scale is None else scale
    qk_2BGK = l2_normalize(torch.stack([q_BHK, k_BHK]).to(dtype))
    if group > 1:
        qk_2BGK = qk_2BGK.repeat_interleave(group, dim=2)
    alpha_BGK = log_decay(f_BGK, A_log_G, dt_bias_GK, lower_bound).to(dtype).exp_()
    beta_BG1 = torch.sigmoid(b_BG.to(dtype)).unsqueeze(-1)

    state_BGKV = state_BGKV.to(dtype)
    with full_precision(q_BHK.device):
        reads_BG2V = (qk_2BGK * alpha_BGK).permute(1, 2, 0, 3) @ state_BGKV
    delta_BGV = beta_BG1 * (v_BGV.to(dtype) - reads_BG2V[:, :, 1])
    overlap_BG1 = (qk_2BGK[0] * qk_2BGK[1]).sum(-1, keepdim=True)
    o_BGV = torch.addcmul(reads_BG2V[:, :, 0], overlap_BG1, delta_BGV).mul_(scale)
    new_BGKV = (state_BGKV * alpha_BGK.unsqueeze(-1)).addcmul_(
        qk_2BGK[1].unsqueeze(-1), delta_BGV.unsqueeze(-2)
    )
    return o_BGV.to(v_BGV.dtype), new_BGKV


@torch.no_grad()
def conv_step_(x_BC: Tensor, weight_WC: Tensor, taps_NWC: Tensor) -> Tensor:
    """One token of each of B sequences through the short convolution and SiLU -> y_BC; the taps are advanced
    in place.

    weight_WC: newest input last, in the dtype of x. taps_NWC: the last W - 1 inputs of the first N <= B rows,
    oldest first; the rows after them are padding.
    """
    live, past = taps_NWC.shape[:2]
    y_BC = x_BC * weight_WC[past]
    y_NC = y_BC[:live]
    for tap in range(past):
        y_NC.addcmul_(taps_NWC[:, tap], weight_WC[tap])
    for tap in range(past - 1):
        taps_NWC[:, tap].copy_(taps_NWC[:, tap + 1])
    taps_NWC[:, past - 1].copy_(x_BC[:live])
    return F.silu(y_BC, inplace=True)


@torch.no_grad()
def kda_step_(qkv_B3HK: Tensor, alpha_BHK: Tensor, beta_BH: Tensor, state_NHKV: Tensor, eps: float) -> Tensor:
    """One token of each of B sequences, the states of the first N <= B advanced in place (the rest is
    padding).

    qkv_B3HK: after convolution and SiLU, contiguous, one dim for keys and values; alpha: decays in [0, 1];
    beta: in [0, 1]; eps: of the norms of q and k. All in the dtype of the contiguous state. Returns o_BHV
    without the factor K^-1/2; zeros for padding. With S := diag(alpha) S: delta = beta (v - k^T S), o = q^T S
    + (q . k) delta, S += k delta^T.
    """
    rows, _, heads, dim = qkv_B3HK.shape
    live = state_NHKV.shape[0]
    raw = qkv_B3HK[:, :2]
    qk_BH2K = raw.new_empty(rows, heads, 2, dim)
    length_B2H = torch.linalg.vecdot(raw, raw).add_(eps).rsqrt_()
    torch.mul(raw.transpose(1, 2), length_B2H.transpose(1, 2).unsqueeze(-1), out=qk_BH2K)
    qk = qk_BH2K[:live]
    state_NHKV.mul_(alpha_BHK[:live].unsqueeze(-1))
    flat = state_NHKV.view(-1, *state_NHKV.shape[2:])
    reads = torch.bmm(qk.view(-1, 2, dim), flat).view(live, heads, 2, -1)
    delta_NHV = torch.sub(qkv_B3HK[:live, 2], reads[:, :, 1]).mul_(beta_BH[:live].unsqueeze(-1))
    overlap_NH1 = torch.linalg.vecdot(qk[:, :, 0], qk[:, :, 1]).unsqueeze(-1)
    o_NHV = torch.addcmul(reads[:, :, 0], overlap_NH1, delta_NHV)
    state_NHKV.addcmul_(qk[:, :, 1].unsqueeze(-1), delta_NHV.unsqueeze(-2))
    return o_NHV if live == rows else torch.cat([o_NHV, o_NHV.new_zeros(rows - live, *o_NHV.shape[1:])])
