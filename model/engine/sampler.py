"""Choosing tokens so that the choice does not depend on anything but the request.

A token is drawn as argmax_v (logit_v / temperature + g_v) with Gumbel noise g (equal to sampling from the
softmax). The noise is not a stream but a function of (seed, request, sample, position, v): whatever the
batch, the chunking of the prompt, a pause or a move to another engine, the same token meets the same noise.
So "lossless" can be tested as equality of tokens, up to rounding of the logits.

The function is an integer hash: splitmix64 of the host key and the position makes two 32-bit words, and two
rounds of a 32-bit finaliser (xor-shift and multiply) mix the token id into them. Everything runs on the
device of the logits.

Shapes: B rows of a batch, V vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from earlyfusion.kernels.cpu.program import sample, takes

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _signed(value: int, bits: int = 64) -> int:
    """The two's complement number with the same bits, as torch integers want it."""
    # torch has no unsigned 64-bit arithmetic; two's complement multiplies to the same bits.
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def sequence_key(seed: int, request_id: str, sample: int) -> int:
    """A signed 64-bit key of one sample of one request; equal on every machine."""
    text = f"{seed & _MASK64}|{sample}|{request_id}".encode()
    return _signed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))


def _shift_right(x: Tensor, bits: int, width: int) -> Tensor:
    """Logical shift of signed integers."""
    return (x >> bits).bitwise_and_((1 << (width - bits)) - 1)


def _splitmix(x: Tensor) -> Tensor:
    """The output function of splitmix64 on int64."""
    x = (x ^ _shift_right(x, 30, 64)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27, 64)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31, 64)


def _mix32_(x: Tensor) -> Tensor:
    """A 32-bit finaliser in place on int32: every input bit moves every output bit with probability near
    1/2."""
    x ^= _shift_right(x, 16, 32)
    x *= _signed(0x7FEB352D, 32)
    x ^= _shift_right(x, 15, 32)
    x *= _signed(0x846CA68B, 32)
    x ^= _shift_right(x, 16, 32)
    return x


def gumbel(keys_B: Tensor, positions_B: Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel noise [B, V] fp32 of the generated token at each position (0 is the first) of each
    sequence."""
    # One word per sequence and position; the token id is mixed in afterwards, in 32 bits.
    word_B = _splitmix(keys_B + positions_B * _signed(_GOLDEN))
    low_B1 = word_B.to(torch.int32).unsqueeze(1)
    high_B1 = (word_B >> 32).to(torch.int32).unsqueeze(1)
    token_V = torch.arange(vocabulary, dtype=torch.int32, device=keys_B.device) * _signed(0x9E3779B9, 32)
    x_BV = _mix32_(token_V + low_B1)
    x_BV ^= high_B1
    # 31 bits, small numbers exactly: u near 0 becomes the large
    # noise that decides, so it needs the fine steps there
    u_BV = (
        _mix32_(x_BV)
        .bitwise_and_(0x7FFFFFFF)
        .to(torch.float32)
        .add_(0.5)
        .mul_(2.0**-31)
        .clamp_(max=1 - 2.0**-24)
    )
    return u_BV.neg_().log1p_().neg_().log_().neg_()


@dataclass(frozen=True)
class Needs:
    """What a batch needs at all, known on the host, so that nothing else is computed."""

    drawn: bool
    top_p: bool
    min_p: bool
    logprobs: bool


@dataclass(frozen=True)
class Controls:
    """Sampling of every row. keys_B int64, positions_B int64 (generated tokens so far), the rest fp32 [B]."""

    keys_B: Tensor
    positions_B: Tensor
    temperature_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    needs: Needs


def restrict(scaled_BV: Tensor, controls: Controls) -> Tensor:
    """-inf outside the top-p and min-p sets of softmax(scaled); in place where that is possible.

    top-p: the smallest set of likeliest tokens whose mass reaches p (ties: smaller ids first). min-p:
    probability at least p times the largest. The likeliest token always stays.
    """
    if controls.needs.min_p:
        floor_B1 = scaled_BV.amax(-1, keepdim=True) + controls.min_p_B.log().unsqueeze(1)
        limited_BV = scaled_BV.masked_fill(scaled_BV < floor_B1, float("-inf"))
    else:
        limited_BV = scaled_BV
    if not controls.needs.top_p:
        return limited_BV
    # Stable: ties fall to smaller ids, on every device alike.
    ordered_BV, ids_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
    p_BV = ordered_BV.double().softmax(-1)
    before_BV = p_BV.cumsum(-1) - p_BV  # mass of the likelier tokens; 0 for the first
    # a row with p = 1 keeps everything: its cumulated mass may round to 1 early
    p_B1 = controls.top_p_B.double().unsqueeze(1)
    outside_BV = (before_BV >= p_B1) & (p_B1 < 1.0)
    return limited_BV.masked_fill(torch.zeros_like(outside_BV).scatter_(1, ids_BV, outside_BV), float("-inf"))


def choose(logits_BV: Tensor, controls: Controls, banned: Tensor) -> Tensor:
    """Chosen ids and their log-probabilities as one float64 tensor [3, B] (ids are exact in it; one copy to
    the host).

    banned: int64 ids for all rows, or bool [B, V]. fp32 logits are overwritten unless needs.logprobs. Row 1:
    log-probability under the distribution drawn from (0 for greedy rows). Row 2: log softmax of the untouched
    logits. Rows 1 and 2 are NaN unless needs.logprobs. On a CPU with a C++ compiler kernels/cpu/sample.cpp
    does this for fp32 logits; its noise differs from `gumbel` by rounding.
    """
    needs = controls.needs
    if takes(logits_BV):
        each = (controls.keys_B, controls.positions_B, controls.temperature_B, controls.top_p_B)
        return sample(logits_BV, *each, controls.min_p_B, banned, drawn=needs.drawn, logprobs=needs.logprobs)

    # Without log-probabilities nobody looks at the logits again, and they may be overwritten.
    raw_BV, known = logits_BV.float(), needs.logprobs
    allowed_BV = raw_BV.clone() if known else raw_BV
    if banned.dtype == torch.bool:
        allowed_BV.masked_fill_(banned, float("-inf"))
    else:
        allowed_BV.index_fill_(1, banned, float("-inf"))

    if not needs.drawn:
        ids_B = allowed_BV.argmax(-1)
        scaled_BV = None
    else:
        greedy_B1 = (controls.temperature_B == 0).unsqueeze(1)
        scaled_BV = allowed_BV / controls.temperature_B.unsqueeze(1).masked_fill(greedy_B1, 1.0)
        scaled_BV = restrict(scaled_BV, controls)
        noise_BV = gumbel(controls.keys_B, controls.positions_B, raw_BV.shape[1]).masked_fill_(greedy_B1, 0.0)
        ids_B = noise_BV.add_(scaled_BV).argmax(-1)

    out_3B = torch.full((3, ids_B.shape[0]), float("nan"), dtype=torch.float64, device=ids_B.device)
    out_3B[0] = ids_B
    if known:
        at_B1 = ids_B.unsqueeze(1)
        out_3B[2] = (raw_BV.gather(1, at_B1) - raw_BV.logsumexp(-1, keepdim=True)).squeeze(1)
        if scaled_BV is None:
            out_3B[1] = 0.0
        else:
            drawn_B1 = scaled_BV.gather(1, at_B1) - scaled_BV.logsumexp(-1, keepdim=True)
            out_3B[1] = drawn_B1.masked_fill(controls.temperature_B.unsqueeze(1) == 0, 0.0).squeeze(1)
    return out_3B
