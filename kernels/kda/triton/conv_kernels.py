"""Device code of the short causal convolution (launched by kernels/kda/triton/conv.py; needs triton).

z_t = sum_w weight[:, w] x_{t - (W - 1) + w}, y = silu(z), inside each document; ``position`` holds the place
of every token in its document, so a read reaches back by ``back`` tokens only where position >= back. All
sums in float32.

Legend: T tokens, C channels, W taps, N documents, BT x BC tile of one program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language import constexpr


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
def _pre_activation(row, t, live, c, W: constexpr, BT: constexpr, BC: constexpr):
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
def _dz(row, dy, t, live, c, W: constexpr, BT: constexpr, BC: constexpr):
    """Gradient of the pre-activation, which is computed again."""
    z = _pre_activation(row, t, live, c, W, BT, BC)
    at = dy + t.to(tl.int64)[:, None] * row.C + c[None, :]
    dy_tc = tl.load(at, mask=live[:, None] & (c < row.C)[None, :], other=0.0)
    s = tl.sigmoid(z)
    return dy_tc.to(tl.float32) * (s * (1.0 + z * (1.0 - s)))


@triton.jit
def conv_forward(row, y, W: constexpr, BT: constexpr, BC: constexpr):
    """y [T, C], one tile per program."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    live = t < row.T
    z = _pre_activation(row, t, live, c, W, BT, BC)
    at = y + t.to(tl.int64)[:, None] * row.C + c[None, :]
    out = (z * tl.sigmoid(z)).to(y.dtype.element_ty)
    tl.store(at, out, mask=live[:, None] & (c < row.C)[None, :])


@triton.jit
def conv_backward(row, dy, dx, dweight, W: constexpr, BT: constexpr, BC: constexpr):
    """dx [T, C] and this tile's share of dweight, float32 [programs, W, C].

    x_t enters z_{t + s} with tap W - 1 - s, if t + s is in the same document, that is if its position is at
    least s.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside_c = c < row.C
    here = (t < row.T)[:, None] & inside_c[None, :]
    at = row.x + t.to(tl.int64)[:, None] * row.stride + c[None, :]
    x_tc = tl.load(at, mask=here, other=0.0).to(tl.float32)
    dx_tc = tl.zeros([BT, BC], tl.float32)
    for s in tl.static_range(W):
        # Rows behind this one that still read it.
        pos = tl.load(row.position + t + s, mask=t + s < row.T, other=-1)
        dz = _dz(row, dy, t + s, (t + s < row.T) & (pos >= s), c, W, BT, BC)
        w_c = tl.load(row.weight + c * W + (W - 1 - s), mask=inside_c, other=0.0).to(tl.float32)
        dx_tc += dz * w_c[None, :]
        out = dweight + (tl.program_id(0).to(tl.int64) * W + (W - 1 - s)) * row.C + c
        tl.store(out, tl.sum(dz * x_tc, axis=0), mask=inside_c)
    at = dx + t.to(tl.int64)[:, None] * row.C + c[None, :]
    tl.store(at, dx_tc.to(dx.dtype.element_ty), mask=here)


@triton.jit
def conv_taps_backward(row, cu_seqlens, dy, dtaps, dweight, W: constexpr, BC: constexpr):
    """What the first W - 1 tokens of one document send to its initial taps and, through those taps, to
    dweight.

    Tap j is read by position p <= j with weight[j - p]. dtaps [N, C, W - 1]; dweight float32 [N, W, C],
    zeroed before.
    """
    n = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside_c = c < row.C
    start, end = tl.load(cu_seqlens + n), tl.load(cu_seqlens + n + 1)
    # A block of one row, so that the helper above serves.
    one = tl.arange(0, 1)
    for j in tl.static_range(W - 1):
        place = (n.to(tl.int64) * row.C + c) * (W - 1) + j
        tap = tl.load(row.taps + place, mask=inside_c, other=0.0).to(tl.float32)
        dtap = tl.zeros([BC], tl.float32)
        for p in tl.static_range(W - 1):
            if p <= j:
                t = start + p + one
                dz = tl.sum(_dz(row, dy, t, t < end, c, W, 1, BC), axis=0)
                dtap += dz * tl.load(row.weight + c * W + (j - p), mask=inside_c, other=0.0).to(tl.float32)
                share = dweight + (n.to(tl.int64) * W + (j - p)) * row.C + c
                tl.store(share, tl.load(share, mask=inside_c, other=0.0) + dz * tap, mask=inside_c)
        tl.store(dtaps + place, dtap.to(dtaps.dtype.element_ty), mask=inside_c)
