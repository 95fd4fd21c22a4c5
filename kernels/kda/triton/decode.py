"""Device code of KDA decoding (launched by kernels/kda/decode.py; needs triton).

One program holds BV value rows of one head's state, V first ([BV, K], K contiguous), reads it once, advances
it token by token and writes it once. In the fused form it also runs the convolution, whose inputs of earlier
tokens lie in a ring of R rows per slot (token at absolute position p in row p mod R): first it replays the
tokens committed .. position - 1 from the ring, whose inputs were stored but whose state was not, then it
processes D new tokens and stores their inputs. New rows never overwrite rows that another program may still
read as long as R >= replayed + D + W - 1.

Legend: B sequences, D new tokens per sequence, S slots, R ring rows, H query/key heads, G value heads, K key
dim, V value dim, C = 2 H K + G V convolution channels, W taps.
"""

import triton
import triton.language as tl

from earlyfusion.kernels.kda.triton.prep import L2_EPS, log2_decay


@triton.jit
def conv_at(x, ring, weight, channel, inside, t, first_new, C, R, W: tl.constexpr, N: tl.constexpr):
    """silu of the convolution at absolute position t for N channels; x at the first new token, ring at the
    slot."""
    z = tl.zeros([N], tl.float32)
    for w in tl.static_range(W):
        at = t - (W - 1) + w
        old = inside & (at >= 0) & (at < first_new)
        new = inside & (at >= first_new)
        row = tl.load(ring + (at + R) % R * C + channel, mask=old, other=0.0).to(tl.float32)
        row += tl.load(x + (at - first_new) * C + channel, mask=new, other=0.0).to(tl.float32)
        z += row * tl.load(weight + channel * W + w, mask=inside, other=0.0).to(tl.float32)
    return z * tl.sigmoid(z)


@triton.jit
def keep_row(x, ring, channel, inside, t, first_new, C, R):
    """Store the raw inputs of new token t in the ring."""
    tl.store(
        ring + t % R * C + channel,
        tl.load(x + (t - first_new) * C + channel, mask=inside, other=0.0),
        mask=inside,
    )


@triton.jit
def advance(S, q, k, v, x, beta, rate, lower_bound, scale, BOUNDED: tl.constexpr):
    """(state after the token, its output); q and k raw, x = f + dt_bias."""
    q *= tl.rsqrt(tl.sum(q * q) + L2_EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k) + L2_EPS)
    S *= tl.exp2(log2_decay(x, rate, lower_bound, BOUNDED))[None, :]
    delta = beta * (v - tl.sum(S * k[None, :], axis=1))
    S += delta[:, None] * k[None, :]
    return S, tl.sum(S * q[None, :], axis=1)


@triton.jit
def step(
    q,
    k,
    v,
    f,
    b,
    A_log,
    dt_bias,
    state,
    new_state,
    o,
    scale,
    lower_bound,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ft,
    stride_fh,
    stride_b,
    stride_sk,
    stride_sv,
    G,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """One token of each sequence, state [B, G, ..] into new_state of the same layout. Grid (V / BV, B, G)."""
    n, g = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    c, d = tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, KP)
    inside_c, inside_d = c < V, d < K
    tile = inside_c[:, None] & inside_d[None, :]
    at = (n * G + g) * K * V + c[:, None] * stride_sv + d[None, :] * stride_sk
    S = tl.load(state + at, mask=tile, other=0.0).to(tl.float32)
    h = g // GROUP
    q_d = tl.load(q + n * stride_qt + h * stride_qh + d, mask=inside_d, other=0.0).to(tl.float32)
    k_d = tl.load(k + n * stride_kt + h * stride_kh + d, mask=inside_d, other=0.0).to(tl.float32)
    v_c = tl.load(v + n * stride_vt + g * stride_vh + c, mask=inside_c, other=0.0).to(tl.float32)
    x = tl.load(f + n * stride_ft + g * stride_fh + d, mask=inside_d, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + g * K + d, mask=inside_d, other=0.0).to(tl.float32)
    beta = tl.sigmoid(tl.load(b + n * stride_b + g).to(tl.float32))
    rate = tl.exp(tl.load(A_log + g).to(tl.float32))
    S, out = advance(S, q_d, k_d, v_c, x, beta, rate, lower_bound, scale, BOUNDED)
    tl.store(new_state + at, S, mask=tile)
    tl.store(o + (n * G + g) * V + c, out.to(o.dtype.element_ty), mask=inside_c)


@triton.jit
def fused_decode(
    x,
    f,
    b,
    weight,
    A_log,
    dt_bias,
    state,
    x_ring,
    f_ring,
    b_ring,
    slot,
    committed,
    position,
    o,
    scale,
    lower_bound,
    new_tokens,
    slots,
    R,
    C,
    H,
    G,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    W: tl.constexpr,
    BOUNDED: tl.constexpr,
    COMMIT: tl.constexpr,
):
    """Replay, then D new tokens of one sequence; x [B, D, C], f [B, D, G, K], b [B, D, G], state [S, G, V,
    K].

    COMMIT stores the state after the new tokens, otherwise after the replay. A slot outside [0, slots) marks
    a padded sequence: nothing is read or written but zeros in its rows of o. Grid (V / BV, B, G).
    """
    n, g = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    s = tl.load(slot + n).to(tl.int64)
    live = (s >= 0) & (s < slots)
    c, d = tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, KP)
    inside_c, inside_d = (c < V) & live, (d < K) & live
    s = tl.where(live, s, 0)
    tile = inside_c[:, None] & inside_d[None, :]
    state += (s * G + g) * V * K + c[:, None] * K + d[None, :]
    S = tl.load(state, mask=tile, other=0.0).to(tl.float32)
    h = g // GROUP
    q_c, k_c, v_c = h * K + d, (H + h) * K + d, 2 * H * K + g * V + c
    x += n * new_tokens * C
    f += n * new_tokens * G * K + g * K + d
    b += n * new_tokens * G + g
    x_ring += s * R * C
    f_ring += s * R * G * K + g * K + d
    b_ring += s * R * G + g
    first_new = tl.load(position + n).to(tl.int32)
    begin = tl.maximum(tl.load(committed + n).to(tl.int32), first_new - R)
    bias = tl.load(dt_bias + g * K + d, mask=inside_d, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + g).to(tl.float32))
    owner = tl.program_id(0) == 0  # of what all value blocks of a head share
    for t in range(begin, first_new + new_tokens):
        is_new = t >= first_new
        if not COMMIT:
            if t == first_new:
                tl.store(state, S, mask=tile)
        q = conv_at(x, x_ring, weight, q_c, inside_d, t, first_new, C, R, W, KP)
        k = conv_at(x, x_ring, weight, k_c, inside_d, t, first_new, C, R, W, KP)
        v = conv_at(x, x_ring, weight, v_c, inside_c, t, first_new, C, R, W, BV)
        row, new_row = (t + R) % R, t - first_new
        gate = tl.load(f_ring + row * G * K, mask=inside_d & (t < first_new), other=0.0).to(tl.float32)
        gate += tl.load(f + new_row * G * K, mask=inside_d & is_new, other=0.0).to(tl.float32)
        logit = tl.load(b_ring + row * G, mask=live & (t < first_new), other=0.0).to(tl.float32)
        logit += tl.load(b + new_row * G, mask=live & is_new, other=0.0).to(tl.float32)
        S, out = advance(S, q, k, v, gate + bias, tl.sigmoid(logit), rate, lower_bound, scale, BOUNDED)
        if is_new:
            at = ((n * new_tokens + new_row) * G + g) * V + c
            tl.store(o + at, tl.where(live, out, 0.0).to(o.dtype.element_ty), mask=c < V)
            keep_row(x, x_ring, v_c, inside_c, t, first_new, C, R)
            if owner:
                if g % GROUP == 0:
                    keep_row(x, x_ring, q_c, inside_d, t, first_new, C, R)
                    keep_row(x, x_ring, k_c, inside_d, t, first_new, C, R)
                tl.store(
                    f_ring + row * G * K,
                    tl.load(f + new_row * G * K, mask=inside_d, other=0.0),
                    mask=inside_d,
                )
                tl.store(b_ring + row * G, tl.load(b + new_row * G), mask=live)
    if COMMIT:
        tl.store(state, S, mask=tile)
