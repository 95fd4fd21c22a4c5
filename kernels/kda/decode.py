"""KDA decoding in Triton: one launch a layer for convolution, norm, gate, beta, state update and output.

``decode`` works on a :class:`DecodeCache` of slots, picked by an index tensor, in place; it reads only device
tensors and launches a fixed grid, so it can stand inside a CUDA graph. It brings one new token per sequence.

Definition: ``short_conv`` and ``kda`` in kernels/kda/naive.py, token by token. Legend: B sequences, S slots,
R ring rows, H query/key heads, G value heads, K key dim, V value dim, C = 2 H K + G V channels (q, k, v
joined), W taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from earlyfusion.kernels.kda.gate import check_lower_bound
from earlyfusion.kernels.launch import on_device, power_of_two
from earlyfusion.kernels.triton_support import check_floats, check_no_nan, check_shape, require_triton

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
        channels = 2 * heads * key_dim + value_heads * value_dim
        state = torch.zeros(slots, value_heads, value_dim, key_dim, dtype=torch.float32, device=device)
        return cls(state, torch.zeros(slots, width, channels, dtype=dtype, device=device))

    def fill(
        self, slots: Sequence[int], state_NGKV: Tensor, taps_NCW1: Tensor, lengths: Sequence[int]
    ) -> None:
        """Bring prefilled sequences in: final states and taps of ``kda`` and ``short_conv``, tokens so far of
        each."""
        rows, taps = self.x_SRC.shape[1], taps_NCW1.shape[2]
        for n, (slot, length) in enumerate(zip(slots, lengths)):
            self.state_SGVK[slot] = state_NGKV[n].transpose(1, 2)
            for back in range(1, min(taps, length) + 1):
                self.x_SRC[slot, (length - back) % rows] = taps_NCW1[n, :, taps - back].to(self.x_SRC.dtype)


def value_block(value_dim: int, key_dim: int) -> int:
    """Value rows of the state per program."""
    return min(power_of_two(value_dim), 16 if key_dim > 128 else 32)


def _check_decode(
    x: Tensor,
    f: Tensor,
    b: Tensor,
    weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cache: DecodeCache,
    index: dict[str, Tensor],
) -> int:
    """Everything the kernel takes for granted; returns H, the number of query/key heads."""
    if x.ndim != 2:
        raise ValueError(f"decode: x is {tuple(x.shape)}; expected [B, C]")
    slots, groups, value_dim, key_dim = cache.state_SGVK.shape
    batch, channels = x.shape
    for name, size in (("K", key_dim), ("V", value_dim)):
        if not 1 <= size <= MAX_DIM:
            raise ValueError(
                f"decode: {name} is {size}; expected 1 to {MAX_DIM} (EF_KERNELS=torch: no limit)"
            )
    heads, rest = divmod(channels - groups * value_dim, 2 * key_dim)
    if rest or heads < 1 or groups % heads:
        raise ValueError(
            f"decode: x has {channels} channels; expected 2 H K + G V with G V = {groups * value_dim}, K ="
            f" {key_dim} and H a divisor of {groups}"
        )
    width, rows = weight.shape[-1], cache.x_SRC.shape[1]
    if rows < width:
        raise ValueError(f"decode: the cache has {rows} ring rows; expected at least W = {width}")
    check_shape("decode", "weight", weight, (channels, width), "[C, W]")
    check_shape("decode", "f", f, (batch, groups, key_dim), "[B, G, K]")
    check_shape("decode", "b", b, (batch, groups), "[B, G]")
    check_shape("decode", "A_log", A_log, (groups,), "[G]")
    check_shape("decode", "dt_bias", dt_bias, (groups, key_dim), "[G, K]")
    check_shape("decode", "cache.x", cache.x_SRC, (slots, rows, channels), "[S, R, C]")
    check_floats(
        "decode", x, x=x, f=f, b=b, weight=weight, A_log=A_log, dt_bias=dt_bias, cache_state=cache.state_SGVK
    )
    contiguous = {"x": x, "f": f, "b": b, "weight": weight, "A_log": A_log, "dt_bias": dt_bias}
    for name, tensor in contiguous.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"decode: {name} has strides {tensor.stride()}; expected a contiguous tensor, pass"
                f" {name}.contiguous()"
            )
    for name, tensor in index.items():
        check_shape("decode", name, tensor, (batch,), "[B]")
        if (
            tensor.dtype not in (torch.int32, torch.int64)
            or tensor.device != x.device
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"decode: {name} is {tensor.dtype} on {tensor.device}; expected contiguous int32 or int64 on"
                f" {x.device}"
            )
    check_no_nan("decode", f=f, b=b, A_log=A_log, dt_bias=dt_bias)
    return heads


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
    scale: float | None = None,
) -> Tensor:
    """Outputs o_BGV (dtype of x) of one new token per sequence; the cache is advanced in place.

    Args:
        x_BC: inputs of the convolution, q, k and v channels joined. f_BGK, b_BG: raw gate and beta logits.
        weight_CW: convolution kernel; A_log_G, dt_bias_GK: gate parameters.
        cache: must not hold the same slot twice in one call.
        slots_B: slot of every sequence; one outside [0, S) marks padding, whose outputs are zero.
        position_B: tokens each slot holds, the position of the new token.

    Raises:
        ValueError: a wrong shape, dtype, device or stride, NaN, or too small a ring, naming the argument.
    """
    require_triton("decode")
    from earlyfusion.kernels.kda.triton import decode as triton_decode

    index = {"slots": slots_B, "position": position_B}
    heads = _check_decode(x_BC, f_BGK, b_BG, weight_CW, A_log_G, dt_bias_GK, cache, index)
    check_lower_bound(lower_bound)
    slots, groups, value_dim, key_dim = cache.state_SGVK.shape
    batch, channels = x_BC.shape
    o_BGV = torch.empty(batch, groups, value_dim, dtype=x_BC.dtype, device=x_BC.device)
    if batch == 0:
        return o_BGV
    block = value_block(value_dim, key_dim)
    with on_device(x_BC):
        triton_decode.decode[(-(-value_dim // block), batch, groups)](
            x_BC,
            f_BGK,
            b_BG,
            weight_CW,
            A_log_G,
            dt_bias_GK,
            cache.state_SGVK,
            cache.x_SRC,
            slots_B,
            position_B,
            o_BGV,
            key_dim**-0.5 if scale is None else scale,
            lower_bound or 0.0,
            slots,
            cache.x_SRC.shape[1],
            channels,
            heads,
            groups,
            GROUP=groups // heads,
            K=key_dim,
            V=value_dim,
            KP=power_of_two(key_dim),
            BV=block,
            W=weight_CW.shape[1],
            BOUNDED=lower_bound is not None,
            num_warps=4,
        )
    return o_BGV
