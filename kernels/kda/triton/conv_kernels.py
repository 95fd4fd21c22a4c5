"""Device code of the short causal convolution (launched by kernels/kda/triton/conv.py; needs triton).

z_t = sum_w weight[:, w] x_{t - (W - 1) + w}, y = silu(z), inside each document; ``position`` holds the place
of every token in its document, so a read reaches back by ``back`` tokens only where position >= back. All
sums in float32.

Legend: T tokens, C channels, W taps, N documents, BT x BC tile of one program.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pre_activation(
    x,
    weight,
    taps,
    position,
    ids,
    t,
    live,
    c,
    inside_c,
    C,
    stride_x,
    HAS_TAPS: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """z of rows t (where live) and channels c, float32 [BT, BC]."""
    pos = tl.load(position + t, mask=live, other=0)
    if HAS_TAPS:
        base = tl.load(ids + t, mask=live, other=0).to(tl.int64) * C * (W - 1)
    z = tl.zeros([BT, BC], tl.float32)
    for w in tl.static_range(W):
        back = W - 1 - w
        w_c = tl.load(weight + c * W + w, mask=inside_c, other=0.0).to(tl.float32)
        reach = live & (pos >= back)
        x_tc = tl.load(
            x + (t - back).to(tl.int64)[:, None] * stride_x + c[None, :],
            mask=reach[:, None] & inside_c[None, :],
            other=0.0,
        ).to(tl.float32)
        if HAS_TAPS:
            before = (live & (pos < back))[:, None] & inside_c[None, :]
            x_tc += tl.load(
                taps + base[:, None] + c[None, :] * (W - 1) + (pos + w)[:, None], mask=before, other=0.0
            ).to(tl.float32)
        z += x_tc * w_c[None, :]
    return z


@triton.jit
def _silu_gradient(z):
    s = tl.sigmoid(z)
    return s * (1.0 + z * (1.0 - s))


@triton.jit
def conv_forward(
    x,
    weight,
    taps,
    position,
    ids,
    y,
    T,
    C,
    stride_x,
    HAS_TAPS: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """y [T, C], one tile per program."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    live, inside_c = t < T, c < C
    z = _pre_activation(
        x, weight, taps, position, ids, t, live, c, inside_c, C, stride_x, HAS_TAPS, W, BT, BC
    )
    out = z * tl.sigmoid(z)
    tl.store(
        y + t.to(tl.int64)[:, None] * C + c[None, :],
        out.to(y.dtype.element_ty),
        mask=live[:, None] & inside_c[None, :],
    )


@triton.jit
def conv_backward(
    x,
    weight,
    taps,
    position,
    ids,
    dy,
    dx,
    dweight,
    T,
    C,
    stride_x,
    HAS_TAPS: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """dx [T, C] and this tile's share of dweight, float32 [programs, W, C]; the pre-activations are
    recomputed.

    x_t enters z_{t + s} with tap W - 1 - s, if t + s is in the same document, that is if its position is at
    least s.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside_c = c < C
    here = (t < T)[:, None] & inside_c[None, :]
    x_tc = tl.load(x + t.to(tl.int64)[:, None] * stride_x + c[None, :], mask=here, other=0.0).to(tl.float32)
    dx_tc = tl.zeros([BT, BC], tl.float32)
    for s in tl.static_range(W):
        rows = t + s
        pos = tl.load(position + rows, mask=rows < T, other=-1)
        live = (rows < T) & (pos >= s)
        z = _pre_activation(
            x, weight, taps, position, ids, rows, live, c, inside_c, C, stride_x, HAS_TAPS, W, BT, BC
        )
        dy_tc = tl.load(
            dy + rows.to(tl.int64)[:, None] * C + c[None, :],
            mask=live[:, None] & inside_c[None, :],
            other=0.0,
        )
        dz = dy_tc.to(tl.float32) * _silu_gradient(z)
        w_c = tl.load(weight + c * W + (W - 1 - s), mask=inside_c, other=0.0).to(tl.float32)
        dx_tc += dz * w_c[None, :]
        out = dweight + (tl.program_id(0).to(tl.int64) * W + (W - 1 - s)) * C + c
        tl.store(out, tl.sum(dz * x_tc, axis=0), mask=inside_c)
    tl.store(dx + t.to(tl.int64)[:, None] * C + c[None, :], dx_tc.to(dx.dtype.element_ty), mask=here)


@triton.jit
def conv_taps_backward(
    x,
    weight,
    taps,
    position,
    ids,
    cu_seqlens,
    dy,
    dtaps,
    dweight,
    T,
    C,
    stride_x,
    W: tl.constexpr,
    BC: tl.constexpr,
):
    """What the first W - 1 tokens of one document send to its initial taps and, through those taps, to
    dweight.

    Tap j is read by position p <= j with weight[j - p]. dtaps [N, C, W - 1]; dweight float32 [N, W, C],
    zeroed before.
    """
    n = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside_c = c < C
    start, end = tl.load(cu_seqlens + n), tl.load(cu_seqlens + n + 1)
    one = tl.arange(0, 1)
    for j in tl.static_range(W - 1):
        place = (n.to(tl.int64) * C + c) * (W - 1) + j
        tap = tl.load(taps + place, mask=inside_c, other=0.0).to(tl.float32)
        dtap = tl.zeros([BC], tl.float32)
        for p in tl.static_range(W - 1):
            if p <= j:
                rows = start + p + one
                live = rows < end
                z = _pre_activation(
                    x, weight, taps, position, ids, rows, live, c, inside_c, C, stride_x, True, W, 1, BC
                )
                dy_tc = tl.load(
                    dy + rows.to(tl.int64)[:, None] * C + c[None, :],
                    mask=live[:, None] & inside_c[None, :],
                    other=0.0,
                )
                dz = tl.sum(dy_tc.to(tl.float32) * _silu_gradient(z), axis=0)
                dtap += dz * tl.load(weight + c * W + (j - p), mask=inside_c, other=0.0).to(tl.float32)
                share = dweight + (n.to(tl.int64) * W + (j - p)) * C + c
                tl.store(share, tl.load(share, mask=inside_c, other=0.0) + dz * tap, mask=inside_c)
        tl.store(dtaps + place, dtap.to(dtaps.dtype.element_ty), mask=inside_c)
