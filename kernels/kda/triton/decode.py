"""Device code of KDA decoding (launched by kernels/kda/decode.py; needs triton).

One program holds BV value rows of one head's state, V first ([BV, K], K contiguous), reads it once, advances
it by one token and writes it once. It also runs the convolution, whose inputs of earlier tokens lie in a ring
of R rows per slot (token at absolute position p in row p mod R). The new row overwrites none that another
program may still read as long as R >= W.

Legend: B sequences, S slots, R ring rows, H query/key heads, G value heads, K key dim, V value dim, C = 2 H K
+ G V convolution channels, W taps.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from earlyfusion.kernels.kda.triton.prep import L2_EPS, log2_decay


@triton.jit
def conv_at(x, ring, weight, channel, inside, t, C, R, W: constexpr, N: constexpr):
    """silu of the convolution at absolute position t for N channels; x at the new token, ring at the slot."""
    z = tl.zeros([N], tl.float32)
    for w in tl.static_range(W - 1):
        at = t - (W - 1) + w
        row = tl.load(ring + (at + R) % R * C + channel, mask=inside & (at >= 0), other=0.0).to(tl.float32)
        z += row * tl.load(weight + channel * W + w, mask=inside, other=0.0).to(tl.float32)
    newest = tl.load(x + channel, mask=inside, other=0.0).to(tl.float32)
    z += newest * tl.load(weight + channel * W + W - 1, mask=inside, other=0.0).to(tl.float32)
    return z * tl.sigmoid(z)


@triton.jit
def keep_row(x, ring, channel, inside, t, C, R):
    """Store the raw inputs of the new token t in the ring."""
    tl.store(ring + t % R * C + channel, tl.load(x + channel, mask=inside, other=0.0), mask=inside)


@triton.jit
def decode(
    x,
    f,
    b,
    weight,
    A_log,
    dt_bias,
    state,
    x_ring,
    slot,
    position,
    o,
    scale,
    lower_bound,
    slots,
    R,
    G,
    GROUP: constexpr,
    K: constexpr,
    V: constexpr,
    KP: constexpr,
    BV: constexpr,
    W: constexpr,
    BOUNDED: constexpr,
):
    """The next token of one sequence; x [B, C], f [B, G, K], b [B, G], state [S, G, V, K].

    A slot outside [0, slots) marks a padded sequence: nothing is read or written but zeros in its row of o.
    Grid (V / BV, B, G).
    """
    n, g = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    s = tl.load(slot + n).to(tl.int64)
    live = (s >= 0) & (s < slots)
    c, d = tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, KP)
    inside_c, inside_d = (c < V) & live, (d < K) & live
    s = tl.where(live, s, 0)
    tile = inside_c[:, None] & inside_d[None, :]
    state += (s * G + g) * V * K + c[:, None] * K + d[None, :]
    # The whole state of these value rows stays in registers.
    S = tl.load(state, mask=tile, other=0.0).to(tl.float32)
    # q, k and v of a token lie side by side.
    h, H = g // GROUP, G // GROUP
    q_c, k_c, v_c = h * K + d, (H + h) * K + d, 2 * H * K + g * V + c
    C = 2 * H * K + G * V
    x += n * C
    x_ring += s * R * C

    # The convolution of this head's channels.
    t = tl.load(position + n).to(tl.int32)
    q = conv_at(x, x_ring, weight, q_c, inside_d, t, C, R, W, KP)
    k = conv_at(x, x_ring, weight, k_c, inside_d, t, C, R, W, KP)
    v = conv_at(x, x_ring, weight, v_c, inside_c, t, C, R, W, BV)

    # Norms, decay, prediction, update, output.
    gate = tl.load(f + (n * G + g) * K + d, mask=inside_d, other=0.0).to(tl.float32)
    gate += tl.load(dt_bias + g * K + d, mask=inside_d, other=0.0).to(tl.float32)
    beta = tl.sigmoid(tl.load(b + n * G + g).to(tl.float32))
    rate = tl.exp(tl.load(A_log + g).to(tl.float32))
    q *= tl.rsqrt(tl.sum(q * q) + L2_EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k) + L2_EPS)
    S *= tl.exp2(log2_decay(gate, rate, lower_bound, BOUNDED))[None, :]
    delta = beta * (v - tl.sum(S * k[None, :], axis=1))
    S += delta[:, None] * k[None, :]
    out = tl.sum(S * q[None, :], axis=1)
    tl.store(o + (n * G + g) * V + c, tl.where(live, out, 0.0).to(o.dtype.element_ty), mask=c < V)
    # Written once, after the output is taken.
    tl.store(state, S, mask=tile)

    # What all value blocks of a head share is kept by the first of them.
    keep_row(x, x_ring, v_c, inside_c, t, C, R)
    if (tl.program_id(0) == 0) & (g % GROUP == 0):
        keep_row(x, x_ring, q_c, inside_d, t, C, R)
        keep_row(x, x_ring, k_c, inside_d, t, C, R)
