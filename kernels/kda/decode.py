"""KDA decoding in Triton: one launch a layer for convolution, norm, gate, beta, state update and output.

``decode`` works on a :class:`DecodeCache` of slots, picked by an index tensor, in place; it reads only device
tensors and launches a fixed grid, so it can stand inside a CUDA graph. It brings one new token per sequence.

Definition: ``short_conv`` and ``kda`` in kernels/kda/naive.py, token by token. Legend: B sequences, S slots,
R ring rows, H query/key heads, G value heads, K key dim, V value dim, C = 2 H K + G V channels (q, k, v
joined), W taps.

One decode token of Kimi Delta Attention and its convolution with few, batched torch operations.

The state is read once for the prediction and once for the output: with u = alpha * k and w = alpha * q,

    kS = u^T S,  delta = beta * (v - kS),  o = scale * (w^T S + (q . k) delta),  S' = alpha S + k delta^T

so both reads go through one batched matrix product on the state before its update. Definition:
kernels/kda/naive.py.

Legend: B sequences, H query/key heads, G value heads, K key dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.dispatch import load
from earlyfusion.kernels.kda.naive import l2_normalize, log_decay
from earlyfusion.kernels.launch import on_device, power_of_two
from earlyfusion.kernels.products import accumulate_dtype, wide_dtype, without_autocast
from earlyfusion.kernels.segments import (
    INTEGERS,
    Inputs,
    check_kda,
    check_lower_bound,
    check_shapes,
    check_tensors,
)

MAX_DIM = 256


@dataclass
class DecodeCache:
    """State and recent inputs of S sequences of one layer. Made by :meth:`new`."""

    state_SGVK: Tensor  # float32, V first: the K values a program reduces over are contiguous
    x_SRC: Tensor  # inputs of the convolution; the token at position p stands in row p mod R

    @classmethod
    def new(
        cls,
        slots: int,
        heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        width: int = 4,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> DecodeCache:
        """Empty slots; the ring holds as many rows as the convolution has taps."""
        # q, k and v of a token lie side by side, as the projection leaves them.
        channels = 2 * heads * key_dim + value_heads * value_dim
        state = torch.zeros(slots, value_heads, value_dim, key_dim, dtype=torch.float32, device=device)
        return cls(state, torch.zeros(slots, width, channels, dtype=dtype, device=device))


@torch.no_grad()
def decode(
    x_BC: Tensor,
    f_BGK: Tensor,
    b_BG: Tensor,
    weight_CW: Tensor,
    A_log_G: Tensor,
    dt_bias_GK: Tensor,
    cache: DecodeCache,
    slots_B: Tensor,
    position_B: Tensor,
    *,
    lower_bound: float | None = None,
) -> Tensor:
    """Outputs o_BGV (dtype of x) of one new token per sequence; the cache is advanced in place.

    Args:
        x_BC: inputs of the convolution, q, k and v channels joined. f_BGK, b_BG: raw gate and beta logits.
        weight_CW: convolution kernel; A_log_G, dt_bias_GK: gate parameters.
        cache: must not hold the same slot twice in one call.
        slots_B: slot of every sequence; one outside [0, S) marks padding, whose outputs are zero.
        position_B: tokens each slot holds, the position of the new token.

    Raises:
        ValueError: a wrong shape, dtype, device or stride, or too small a ring, naming the argument.
    """
    # Found by its path: the engine imports this file also where triton is missing.
    kernel: Any = load("earlyfusion.kernels.kda.triton.decode:decode")

    # The cache first: its sizes are the layer's.
    state, ring = cache.state_SGVK, cache.x_SRC
    tensors = {
        "f_BGK": f_BGK,
        "b_BG": b_BG,
        "weight_CW": weight_CW,
        "A_log_G": A_log_G,
        "dt_bias_GK": dt_bias_GK,
    }
    index = {"slots_B": slots_B, "position_B": position_B}
    given = {"cache_state_SGVK": state, "cache_x_SRC": ring, "x_BC": x_BC, **tensors}
    sizes = check_shapes("decode", **given, **index)
    check_tensors("decode", state, **given)
    check_tensors("decode", state, INTEGERS, **index)
    check_lower_bound(lower_bound)
    for name in "KV":
        if not 1 <= sizes[name] <= MAX_DIM:
            raise ValueError(
                f"decode: {name} is {sizes[name]}; expected 1 to {MAX_DIM} (EF_KERNELS=torch: any)"
            )
    # The number of query heads is nowhere given: it is what the channels leave for q and k.
    slots, groups, value_dim, key_dim = state.shape
    heads, rest = divmod(sizes["C"] - groups * value_dim, 2 * key_dim)
    if rest or heads < 1 or groups % heads:
        raise ValueError(
            f"decode: x_BC has {sizes['C']} channels; expected 2 H K + G V with G V = {groups * value_dim},"
            f" K = {key_dim} and H a divisor of {groups}"
        )
    # A program may write the new row while another still reads the oldest.
    rows, width = sizes["R"], sizes["W"]
    if rows < width:
        raise ValueError(f"decode: the cache has {rows} ring rows; expected at least W = {width}")

    batch = sizes["B"]
    o_BGV = torch.empty(batch, groups, value_dim, dtype=x_BC.dtype, device=x_BC.device)
    # Value rows of the state per program; wider keys leave fewer registers for them.
    block = min(power_of_two(value_dim), 16 if key_dim > 128 else 32)
    if batch:
        with on_device(x_BC):
            kernel[(-(-value_dim // block), batch, groups)](
                x_BC,
                *tensors.values(),
                state,
                ring,
                *index.values(),
                o_BGV,
                key_dim**-0.5,
                lower_bound or 0.0,
                slots,
                rows,
                groups,
                GROUP=groups // heads,
                K=key_dim,
                V=value_dim,
                KP=power_of_two(key_dim),
                BV=block,
                W=width,
                BOUNDED=lower_bound is not None,
                num_warps=4,
            )
    return o_BGV


# ---- the same token in plain torch, states given and returned ----


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
    check_kda("kda_step", x, state_BGKV.shape[0], lower_bound)
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
