"""KDA decoding in Triton: one launch a layer for convolution, norm, gate, beta, state update and output.

``kda_step`` is the functional single step of the dispatch table. ``decode`` works on a :class:`DecodeCache`
of slots, picked by an index tensor, in place; it reads only device tensors and launches a fixed grid, so it
can stand inside a CUDA graph. It brings D new tokens per sequence. With ``commit=True`` the state advances
over them (plain decoding). With ``commit=False`` the outputs of all D are computed but only their small
inputs are kept (speculative verification): the next call is told in ``committed`` and ``position`` how many
of them were accepted, replays those from the cache, and the state is still read once and written once per
call.

Definition: ``short_conv`` and ``kda`` in kernels/kda/naive.py, token by token. Legend: B sequences, D new
tokens per sequence, S slots, R ring rows, H query/key heads, G value heads, K key dim, V value dim, C = 2 H K
+ G V channels (q, k, v joined), W taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from earlyfusion.kernels.kda.checks import check_sequences
from earlyfusion.kernels.kda.gate import check_lower_bound
from earlyfusion.kernels.launch import on_device, power_of_two
from earlyfusion.kernels.triton_support import check_floats, check_no_nan, check_shape, require_triton

MAX_DIM = 256


@dataclass
class DecodeCache:
    """State and recent inputs of S sequences of one layer. Made by :meth:`new`."""

    state_SGVK: Tensor  # float32, V first: the K values a program reduces over are contiguous
    x_SRC: Tensor  # inputs of the convolution; the token at position p stands in row p mod R
    f_SRGK: Tensor
    b_SRG: Tensor

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
        new_tokens: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> DecodeCache:
        """Empty slots. ``new_tokens``: the largest D of any call; the ring holds W - 1 + 2 D rows."""
        rows, channels = width - 1 + 2 * new_tokens, 2 * heads * key_dim + value_heads * value_dim
        new = lambda *shape, dtype=dtype: torch.zeros(*shape, dtype=dtype, device=device)
        return cls(
            new(slots, value_heads, value_dim, key_dim, dtype=torch.float32),
            new(slots, rows, channels),
            new(slots, rows, value_heads, key_dim),
            new(slots, rows, value_heads),
        )

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


def _check_dims(op: str, key_dim: int, value_dim: int) -> None:
    for name, size in (("q", key_dim), ("v", value_dim)):
        if not 1 <= size <= MAX_DIM:
            raise ValueError(
                f"{op}: {name} is {size} wide; expected 1 to {MAX_DIM} (EF_KERNELS=torch has no limit)"
            )


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

    Returns (o_BGV in the dtype of v, new state_BGKV in float32). ``state_BGKV`` is not modified; a state that
    is V first in memory (a transposed view) is read as it lies, and the new one lies the same way.

    Raises:
        ValueError: a wrong shape, dtype, device or stride, or NaN, naming the argument.
    """
    require_triton("kda_step")
    from earlyfusion.kernels.kda.triton import decode as triton_decode

    check_sequences(q_BHK, k_BHK, v_BGV, f_BGK, b_BG)
    (batch, heads, key_dim), (groups, value_dim) = q_BHK.shape, v_BGV.shape[1:]
    _check_dims("kda_step", key_dim, value_dim)
    check_shape("kda_step", "A_log", A_log_G, (groups,), "[G]")
    check_shape("kda_step", "dt_bias", dt_bias_GK, (groups, key_dim), "[G, K]")
    check_shape("kda_step", "state", state_BGKV, (batch, groups, key_dim, value_dim), "[B, G, K, V]")
    check_floats(
        "kda_step", q_BHK, q=q_BHK, k=k_BHK, v=v_BGV, f=f_BGK, b=b_BG, A_log=A_log_G, dt_bias=dt_bias_GK
    )
    check_lower_bound(lower_bound)
    check_no_nan("kda_step", f=f_BGK, b=b_BG, A_log=A_log_G, dt_bias=dt_bias_GK)
    if not state_BGKV.is_contiguous() and not state_BGKV.transpose(2, 3).is_contiguous():
        state_BGKV = state_BGKV.contiguous()
    check_floats(
        "kda_step", q_BHK, state=state_BGKV if state_BGKV.is_contiguous() else state_BGKV.transpose(2, 3)
    )
    new = torch.empty_like(state_BGKV, dtype=torch.float32)
    o_BGV = torch.empty(batch, groups, value_dim, dtype=v_BGV.dtype, device=v_BGV.device)
    if batch == 0:
        return o_BGV, new
    block = value_block(value_dim, key_dim)
    with on_device(q_BHK):
        triton_decode.step[(-(-value_dim // block), batch, groups)](
            q_BHK,
            k_BHK,
            v_BGV,
            f_BGK,
            b_BG,
            A_log_G.contiguous(),
            dt_bias_GK.contiguous(),
            state_BGKV,
            new,
            o_BGV,
            key_dim**-0.5 if scale is None else scale,
            lower_bound or 0.0,
            *(stride for x in (q_BHK, k_BHK, v_BGV, f_BGK) for stride in x.stride()[:2]),
            b_BG.stride(0),
            *state_BGKV.stride()[2:],
            groups,
            GROUP=groups // heads,
            K=key_dim,
            V=value_dim,
            KP=power_of_two(key_dim),
            BV=block,
            BOUNDED=lower_bound is not None,
            num_warps=4,
        )
    return o_BGV, new


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
    if x.ndim != 3:
        raise ValueError(f"decode: x is {tuple(x.shape)}; expected [B, D, C]")
    slots, groups, value_dim, key_dim = cache.state_SGVK.shape
    batch, tokens, channels = x.shape
    _check_dims("decode", key_dim, value_dim)
    heads, rest = divmod(channels - groups * value_dim, 2 * key_dim)
    if rest or heads < 1 or groups % heads:
        raise ValueError(
            f"decode: x has {channels} channels; expected 2 H K + G V with G V = {groups * value_dim}, K ="
            f" {key_dim} and H a divisor of {groups}"
        )
    width, rows = weight.shape[-1], cache.x_SRC.shape[1]
    if tokens < 1 or rows < width - 1 + 2 * tokens:
        raise ValueError(
            f"decode: x brings D = {tokens} tokens, but the cache has {rows} ring rows; expected 1 <= D and"
            f" at least W - 1 + 2 D = {width - 1 + 2 * tokens} rows. Make it with DecodeCache.new(...,"
            f" new_tokens={max(tokens, 1)})."
        )
    check_shape("decode", "weight", weight, (channels, width), "[C, W]")
    check_shape("decode", "f", f, (batch, tokens, groups, key_dim), "[B, D, G, K]")
    check_shape("decode", "b", b, (batch, tokens, groups), "[B, D, G]")
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
    x_BDC: Tensor,
    f_BDGK: Tensor,
    b_BDG: Tensor,
    weight_CW: Tensor,
    A_log_G: Tensor,
    dt_bias_GK: Tensor,
    cache: DecodeCache,
    slots_B: Tensor,
    committed_B: Tensor,
    position_B: Tensor,
    *,
    lower_bound: float | None = None,
    scale: float | None = None,
    commit: bool = True,
) -> Tensor:
    """Outputs o_BDGV (dtype of x) of D new tokens per sequence; the cache is advanced in place.

    Args:
        x_BDC: inputs of the convolution, q, k and v channels joined. f_BDGK, b_BDG: raw gate and beta logits.
        weight_CW: convolution kernel; A_log_G, dt_bias_GK: gate parameters.
        cache: must not hold the same slot twice in one call.
        slots_B: slot of every sequence; one outside [0, S) marks padding, whose outputs are zero.
        committed_B: tokens each slot's state holds. position_B: tokens accepted so far, the position of the
        first new
            token; those in between are replayed, at most R - D - W + 1 of them.
        commit: whether the state advances over the new tokens (it then holds position + D), or only over the
        replayed
            ones (it then holds position).

    Raises:
        ValueError: a wrong shape, dtype, device or stride, NaN, or too small a ring, naming the argument.
    """
    require_triton("decode")
    from earlyfusion.kernels.kda.triton import decode as triton_decode

    index = {"slots": slots_B, "committed": committed_B, "position": position_B}
    heads = _check_decode(x_BDC, f_BDGK, b_BDG, weight_CW, A_log_G, dt_bias_GK, cache, index)
    check_lower_bound(lower_bound)
    slots, groups, value_dim, key_dim = cache.state_SGVK.shape
    batch, tokens, channels = x_BDC.shape
    o_BDGV = torch.empty(batch, tokens, groups, value_dim, dtype=x_BDC.dtype, device=x_BDC.device)
    if batch == 0:
        return o_BDGV
    block = value_block(value_dim, key_dim)
    with on_device(x_BDC):
        triton_decode.fused_decode[(-(-value_dim // block), batch, groups)](
            x_BDC,
            f_BDGK,
            b_BDG,
            weight_CW,
            A_log_G,
            dt_bias_GK,
            cache.state_SGVK,
            cache.x_SRC,
            cache.f_SRGK,
            cache.b_SRG,
            slots_B,
            committed_B,
            position_B,
            o_BDGV,
            key_dim**-0.5 if scale is None else scale,
            lower_bound or 0.0,
            tokens,
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
            COMMIT=commit,
            num_warps=4,
        )
    return o_BDGV
