"""Depthwise causal convolution with SiLU over packed documents, in Triton: forward, backward, taps.

z_t = sum_w weight[:, w] x_{t - (W - 1) + w}, y = silu(z), inside each document; ``position`` holds the place
of every token in its document, so a read reaches back by ``back`` tokens only where position >= back. All
sums in float32.

One launch serves the joined channels of q, k and v (x may be a slice of a wider projection: only the last
axis must be dense). Forward reads x and writes y; backward reads x and dy, writes dx, and sums dweight in a
fixed order (no atomics). Gradients of a row that begins with taps come from the plain torch form: only the
engine, which wants none, hands taps in.

Definition: ``short_conv`` in kernels/kda/naive.py. Legend: T tokens, C channels, W taps, N documents, BT x BC
tile of one program.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (tuples grow in the device code)
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language import constexpr

from earlyfusion.kernels.kda import conv
from earlyfusion.kernels.launch import on_device
from earlyfusion.kernels.segments import FLOATS, Segments, check_conv, check_tensors

TILE_T, TILE_C = 16, 128
STRIP, STRIP_C, AHEAD = 64, 128, 4  # rows and channels of a program of the backward, rows loaded at once


class Row(NamedTuple):
    """What every kernel reads of a packed row: pointers, then sizes."""

    x: Any
    weight: Any
    taps: Any  # None: zeros
    position: Any
    ids: Any
    T: int
    C: int
    stride: int  # of x, from token to token


@triton.jit
def pre_activation(row, t, live, c, W: constexpr, BT: constexpr, BC: constexpr):
    """z of rows t (where live) and channels c, float32 [BT, BC]."""
    inside_c = c < row.C
    pos = tl.load(row.position + t, mask=live, other=0)
    if row.taps is not None:
        base = tl.load(row.ids + t, mask=live, other=0).to(tl.int64) * row.C * (W - 1)
    z = tl.zeros([BT, BC], tl.float32)
    # Unrolled: W is 4, and the loads of all taps are in flight together.
    for w in tl.static_range(W):
        back = W - 1 - w
        w_c = tl.load(row.weight + c * W + w, mask=inside_c, other=0.0).to(tl.float32)
        reach = live & (pos >= back)
        at = row.x + (t - back).to(tl.int64)[:, None] * row.stride + c[None, :]
        x_tc = tl.load(at, mask=reach[:, None] & inside_c[None, :], other=0.0).to(tl.float32)
        if row.taps is not None:
            before = (live & (pos < back))[:, None] & inside_c[None, :]
            at = row.taps + base[:, None] + c[None, :] * (W - 1) + (pos + w)[:, None]
            x_tc += tl.load(at, mask=before, other=0.0).to(tl.float32)
        z += x_tc * w_c[None, :]
    return z


@triton.jit
def conv_forward(row, y, W: constexpr, BT: constexpr, BC: constexpr):
    """y [T, C], one tile per program."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    live = t < row.T
    z = pre_activation(row, t, live, c, W, BT, BC)
    at = y + t.to(tl.int64)[:, None] * row.C + c[None, :]
    out = (z * tl.sigmoid(z)).to(y.dtype.element_ty)
    tl.store(at, out, mask=live[:, None] & (c < row.C)[None, :])


@triton.jit
def conv_backward(row, dy, dx, dweight, W: constexpr, BC: constexpr, STRIP: constexpr, AHEAD: constexpr):
    """dx [T, C] and this strip's share of dweight, float32 [strips, W, C].

    A program walks down a strip of rows and keeps, of the last W - 1, what the next rows still need: x, and
    dx as far as it is summed. So every pre-activation is computed once. x_t enters z_{t + s} with tap
    W - 1 - s, if the position of t + s in its document is at least s. AHEAD rows are loaded before the first
    is used.
    """
    start = tl.program_id(0) * STRIP
    end = tl.minimum(start + STRIP, row.T)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < row.C
    none = tl.zeros([BC], tl.float32)
    taps, before, sums, shares = (), (), (), (none,)
    for w in tl.static_range(W):
        taps += (tl.load(row.weight + c * W + w, mask=inside, other=0.0).to(tl.float32),)
    # The newest first.
    for w in tl.static_range(W - 1):
        t = start - 1 - w
        at = row.x + t.to(tl.int64) * row.stride + c
        before += (tl.load(at, mask=inside & (t >= 0), other=0.0).to(tl.float32),)
        sums += (none,)
        shares += (none,)

    # W - 1 rows behind the strip still read its last ones.
    for first in range(start, end + W - 1, AHEAD):
        xs, dys, places = (), (), ()
        for ahead in tl.static_range(AHEAD):
            t = first + ahead
            there = inside & (t < row.T)
            xs += (tl.load(row.x + t.to(tl.int64) * row.stride + c, mask=there, other=0.0).to(tl.float32),)
            dys += (tl.load(dy + t.to(tl.int64) * row.C + c, mask=there, other=0.0).to(tl.float32),)
            places += (tl.load(row.position + t, mask=t < row.T, other=-1),)
        for ahead in tl.static_range(AHEAD):
            t, place = first + ahead, places[ahead]
            window = (xs[ahead],) + before
            z = none
            for s in tl.static_range(W):
                z += tl.where(place >= s, window[s], 0.0) * taps[W - 1 - s]
            gate = tl.sigmoid(z)
            dz = dys[ahead] * (gate * (1.0 + z * (1.0 - gate)))
            # Rows behind the strip belong to the next one's share.
            mine = tl.where(t < end, dz, 0.0)
            summed, shared = (), ()
            for s in tl.static_range(W):
                reached = place >= s
                part = tl.where(reached, dz, 0.0) * taps[W - 1 - s]
                if s > 0:
                    part += sums[s - 1]
                summed += (part,)
                shared += (shares[s] + tl.where(reached, mine, 0.0) * window[s],)
            shares, sums, before = shared, summed[: W - 1], window[: W - 1]
            # No later row reads this one.
            done = t - (W - 1)
            at = dx + done.to(tl.int64) * row.C + c
            tl.store(at, summed[W - 1].to(dx.dtype.element_ty), mask=inside & (done >= start) & (done < end))
    for s in tl.static_range(W):
        out = dweight + (tl.program_id(0).to(tl.int64) * W + (W - 1 - s)) * row.C + c
        tl.store(out, shares[s], mask=inside)


def _row(segments: Segments, x_TC: Tensor, weight_CW: Tensor, taps: Any) -> Row:
    # Positions and ids instead of a mask: a read reaches back only as far as its document.
    (tokens, channels), device = x_TC.shape, x_TC.device
    places = segments.position(device), segments.ids(device)
    return Row(x_TC, weight_CW, taps, *places, tokens, channels, x_TC.stride(0))


class _TritonConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_CW: Tensor, taps: Tensor | None, segments: Segments) -> Tensor:
        y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
        # Fewer channels a tile where reads may go to the taps as well, which costs registers.
        (tokens, channels), width = x_TC.shape, TILE_C if taps is None else TILE_C // 2
        grid = triton.cdiv(tokens, TILE_T), triton.cdiv(channels, width)
        row, options = _row(segments, x_TC, weight_CW, taps), {"BT": TILE_T, "BC": width, "num_warps": 4}
        with on_device(x_TC):
            conv_forward[grid](row, y_TC, W=weight_CW.shape[1], **options)
        ctx.save_for_backward(x_TC, weight_CW)
        ctx.segments = segments
        return y_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, weight_CW = ctx.saved_tensors
        dx_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
        # One row of sums per program, added up in order.
        (tokens, channels), width = x_TC.shape, weight_CW.shape[1]
        grid = triton.cdiv(tokens, STRIP), triton.cdiv(channels, STRIP_C)
        shares = torch.empty(grid[0], width, channels, dtype=torch.float32, device=x_TC.device)
        row, options = _row(ctx.segments, x_TC, weight_CW, None), {"STRIP": STRIP, "AHEAD": AHEAD}
        made = dy_TC.contiguous(), dx_TC, shares
        with on_device(x_TC):
            conv_backward[grid](row, *made, W=width, BC=STRIP_C, **options, num_warps=1)
        return dx_TC, shares.sum(0).t().to(weight_CW.dtype), None, None


def short_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    segments: Segments,
    *,
    initial_taps_NCW1: Tensor | None = None,
    output_taps: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution and SiLU per document; arguments and results as in the naive form.

    Raises:
        ValueError: naming the argument, for a wrong shape, dtype or device, a last axis that is not dense,
            fewer than 2 taps, or tokens that do not fit the segments.
    """
    # Caches hold taps channels last.
    taps = None if initial_taps_NCW1 is None else initial_taps_NCW1.contiguous()
    check_conv(x_TC, weight_CW, taps, segments)
    check_tensors("short_conv", x_TC, FLOATS, "rows", x=x_TC, weight=weight_CW, initial_taps=taps)
    trains = torch.is_grad_enabled() and (x_TC.requires_grad or weight_CW.requires_grad)
    if segments.total == 0 or (taps is not None and (trains or taps.requires_grad)):
        return conv.short_conv(x_TC, weight_CW, segments, initial_taps_NCW1=taps, output_taps=output_taps)
    y_TC = _TritonConv.apply(x_TC, weight_CW.contiguous(), taps, segments)
    return y_TC, conv.final_taps(x_TC, taps, segments, weight_CW.shape[1]) if output_taps else None
