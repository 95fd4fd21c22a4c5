"""Kimi Delta Attention and its short convolution, token by token: the definition every faster form must
match.

Source: Kimi Linear technical report (arXiv 2510.26692), equation 1. Per value head, with state S of shape [K,
V]:

    S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T,    o_t = scale * S_t^T q_t

q and k are L2-normalised, alpha = exp(g) per key channel (`log_decay`), beta = sigmoid(b). The state
is float32. Gradients come from autograd. Slow; meant for tests and for reading.

Legend: T tokens, B sequences, N documents, H query/key heads, G value heads (a multiple of H; value head g
reads query/key head g // (G / H)), K key dim, V value dim, C channels, W taps.

The two KDA forget gates, in natural log units.

``lower_bound is None``: g = -exp(A_log) * softplus(f + dt_bias), unbounded below (Kimi Linear 48B).
``lower_bound = L < 0``: g = L * sigmoid(exp(A_log) * (f + dt_bias)), inside (L, 0) (Kimi K3).
The decay of one key channel over one token is alpha = exp(g), in [0, 1].

Legend: T tokens, G value heads, K key dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.products import wide_dtype, without_autocast
from earlyfusion.kernels.segments import Segments

L2_EPS = 1e-6


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, in the dtype of x."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


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
    """One token of each of B sequences: decay the state, predict, update, then read with q.

    Arguments are as in :func:`kda`, with B in the place of T. Returns (o_BGV in the dtype of v, new
    state_BGKV).
    """
    dtype = wide_dtype(q_BHK, v_BGV, state_BGKV)
    group = v_BGV.shape[1] // q_BHK.shape[1]
    scale = q_BHK.shape[-1] ** -0.5
    q_BGK = l2_normalize(q_BHK.to(dtype)).repeat_interleave(group, dim=1)
    k_BGK = l2_normalize(k_BHK.to(dtype)).repeat_interleave(group, dim=1)
    alpha_BGK = log_decay(f_BGK, A_log_G, dt_bias_GK, lower_bound).to(dtype).exp()
    beta_BG1 = torch.sigmoid(b_BG.to(dtype)).unsqueeze(-1)

    # The order of the delta rule: forget first, then ask what the decayed state predicts for this key, then
    # correct it by what the value has beyond that.
    decayed_BGKV = state_BGKV.to(dtype) * alpha_BGK.unsqueeze(-1)
    with without_autocast(q_BHK):
        predicted_BGV = torch.einsum("bgk,bgkv->bgv", k_BGK, decayed_BGKV)
    delta_BGV = beta_BG1 * (v_BGV.to(dtype) - predicted_BGV)
    state_BGKV = decayed_BGKV + k_BGK.unsqueeze(-1) * delta_BGV.unsqueeze(-2)
    with without_autocast(q_BHK):
        # Read after the update: a token sees itself.
        o_BGV = scale * torch.einsum("bgk,bgkv->bgv", q_BGK, state_BGKV)
    return o_BGV.to(v_BGV.dtype), state_BGKV


def kda(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    f_TGK: Tensor,
    b_TG: Tensor,
    A_log_G: Tensor,
    dt_bias_GK: Tensor,
    segments: Segments,
    *,
    lower_bound: float | None = None,
    initial_state_NGKV: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """KDA over packed documents, one token after the other.

    Args:
        q_THK, k_THK: queries and keys after the convolution, before normalisation.
        v_TGV: values. f_TGK: gate pre-activations. b_TG: logits of beta.
        A_log_G, dt_bias_GK: gate parameters, see `log_decay`.
        segments: the documents of the row; no state passes from one to the next.
        lower_bound: None for the softplus gate, a negative number for the bounded gate.
        initial_state_NGKV: state before the first token of each document, zero by default.
        output_final_state: also return the state after each document's last token.

    Returns:
        (o_TGV in the dtype of v, final_state_NGKV in float32, or float64 for float64 inputs, or None).
    """
    rows, state_NGKV = (q_THK, k_THK, v_TGV, f_TGK, b_TG), initial_state_NGKV
    if state_NGKV is None:
        shape = segments.num, *f_TGK.shape[1:], v_TGV.shape[2]
        state_NGKV = torch.zeros(shape, dtype=wide_dtype(q_THK, v_TGV), device=v_TGV.device)

    # The empty first parts keep the dtype and the shape where there is no document at all.
    outputs, states = [torch.zeros_like(v_TGV[:0])], [state_NGKV[:0]]
    for n, (start, length) in enumerate(zip(segments.offsets, segments.lengths)):
        state = state_NGKV[n : n + 1]
        for t in range(start, start + length):
            # A token is a batch of one sequence, so that decoding and training share one law.
            q, k, v, f, b = (tensor[t : t + 1] for tensor in rows)
            o, state = kda_step(q, k, v, f, b, A_log_G, dt_bias_GK, state, lower_bound)
            outputs.append(o)
        states.append(state)
    return torch.cat(outputs), torch.cat(states) if output_final_state else None


def short_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    segments: Segments,
    *,
    initial_taps_NCW1: Tensor | None = None,
    output_taps: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution of W taps, then SiLU: y_t = silu(sum_w weight[:, w] * x_{t - (W - 1) +
    w}).

    Inputs before the first token of a document are zero, or ``initial_taps_NCW1`` (oldest first).

    Returns:
        (y_TC in the dtype of x, taps_NCW1 or None): taps are the last W - 1 inputs of each document, oldest
        first, including the initial taps where the document is shorter than W - 1.
    """
    channels, width = weight_CW.shape
    dtype = wide_dtype(x_TC, weight_CW)
    taps_NCW1 = initial_taps_NCW1
    if taps_NCW1 is None:
        taps_NCW1 = x_TC.new_zeros(segments.num, channels, width - 1)

    outputs, taps = [torch.zeros_like(x_TC)[:0]], [x_TC.new_zeros(0, channels, width - 1)]
    for n, (start, length) in enumerate(zip(segments.offsets, segments.lengths)):
        # What stands before a document is its own past or zero, never its neighbour's end.
        padded = torch.cat([taps_NCW1[n].to(dtype), x_TC[start : start + length].to(dtype).T], dim=1)
        with without_autocast(x_TC):
            z_CT = F.conv1d(padded.unsqueeze(0), weight_CW.to(dtype).unsqueeze(1), groups=channels).squeeze(0)
        outputs.append(F.silu(z_CT).T.to(x_TC.dtype))
        taps.append(padded[None, :, padded.shape[1] - (width - 1) :].to(x_TC.dtype))
    return torch.cat(outputs), torch.cat(taps) if output_taps else None


# ---- the forget gates


def log_decay(f_TGK: Tensor, A_log_G: Tensor, dt_bias_GK: Tensor, lower_bound: float | None) -> Tensor:
    """g_TGK in nats per token, all entries <= 0, in float32 (float64 if an argument is). Leading axes of f
    are free."""
    dtype = wide_dtype(f_TGK, A_log_G, dt_bias_GK)
    rate_G1 = A_log_G.to(dtype).exp().unsqueeze(-1)
    x_TGK = f_TGK.to(dtype) + dt_bias_GK.to(dtype)
    if lower_bound is None:
        # exp(A_log) is the rate of a head, between 1 and 16 when it is made.
        return F.softplus(x_TGK) * -rate_G1
    return torch.sigmoid(x_TGK * rate_G1) * lower_bound
