"""Device code of the last two backward launches: all gradients of one chunk of one value head (needs triton).

With dO, S, R of the forward and dS', E of the reverse scan (kernels/kda/triton/scan.py), in units of the
normalised q, k:

    dP = tril(dO R^T),   dA = -stril(beta E R^T),   dV = beta E,   db = (1 - beta) sum_v E R
    dq = s 2^G (dO S^T),   r = -2^G (beta E S^T),   c = 2^{G_C - G} (R dS'^T)          (through the states)
    dq += s dP' k,   r += dA' k,   c += s dP'^T q + dA'^T k                            (inside the chunk, ' =
                     with decay)
    dg_t = sum_{i >= t} (q dq + k (r - c))_i + sum_v S' dS',   dk = r + c
    q . dq = dO . O,   k . dk = E . (2 R - beta V)                                  (what the norms take away)

c is what k sends as a column, r as a row. sum_v S' dS' is taken as 2^{G_C} sum_v S dS' + sum_t k c, so S' is
not read. O is linear in a token's q; R is beta (V - k S), and k R^T is what a token adds to the state: hence
the last line, by which slabs of channels are programs of their own, after one that multiplies all values. At
each level of the tree of kernels/kda/triton/prep.py, with u = (late: s q x, early: k x),

    x (dP + dP^T)_level u = (late: dq, early: the P part of c),   x (dA + dA^T)_level (k x) = (late: r, early:
    c);

inside a block of 16 the two directions are products of their own. The gradients of the gate activation, of
beta's sigmoid and of the two norms are taken here as well. dA_log and dt_bias leave as one partial sum per
program, added up in a fixed order by the host: no atomics.

Legend: T tokens, C tokens per chunk, BK key channels and BV value columns per slab, G value heads, N chunks.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from earlyfusion.kernels.kda.triton.prep import (
    BLOCK,
    BLOCK_CLAMP,
    GRADIENT_FLOOR,
    LOG2E,
    anchor,
    dot,
    is_late,
    load_rows,
    middle,
    since_rows,
    slab_decay,
)


@triton.jit
def pair_gradients(
    x,
    o,
    do,
    residual,
    E,
    pairs,
    dv,
    db,
    chunks,
    scale,
    lower_bound,
    strides,
    G,
    value_dim,
    S: constexpr,
    BV: constexpr,
):
    """What one chunk of one value head needs the values for: dP + dP^T and dA + dA^T without diagonal
    [T, G, C], s sum_v dO R, q . dq and k . dk [T, G]; dV = beta E and the gradient of b."""
    C: constexpr = S.C
    chunk, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, C)
    live = i < tl.load(chunks.length + chunk)
    start = tl.load(chunks.start + chunk).to(tl.int64)
    head = start * G + g  # of this chunk's first row in [T, G, ..]
    v = x.v + start * strides.v_t + g * strides.v_h
    o, do, dv = o + head * S.V, do + head * S.V, dv + head * S.V
    residual, E = residual + head * S.V, E + head * S.V
    beta_at = x.b + start * strides.b + g + i * strides.b
    beta = tl.sigmoid(tl.load(beta_at, mask=live, other=0.0).to(tl.float32))

    dP, dA = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    along_b, along_q = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    along_k, same = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for e in range(0, value_dim, BV):
        column = e + tl.arange(0, BV)
        at = i[:, None] * (G * S.V) + column[None, :]
        dod = tl.load(do + at, mask=live[:, None], other=0.0).to(S.DOT)
        R = tl.load(residual + at, mask=live[:, None], other=0.0)
        Ed = tl.load(E + at, mask=live[:, None], other=0.0)
        out = tl.load(o + at, mask=live[:, None], other=0.0).to(tl.float32)
        value = load_rows(v, i, live, strides.v_t, column)
        dP += dot(dod, tl.trans(R), S.PREC)
        dA += dot(Ed, tl.trans(R), S.PREC)
        wide_do, wide_R, wide_E = dod.to(tl.float32), R.to(tl.float32), Ed.to(tl.float32)
        along_b += tl.sum(wide_E * wide_R, axis=1)
        along_q += tl.sum(wide_do * out, axis=1)
        along_k -= tl.sum(wide_E * value, axis=1)
        same += tl.sum(wide_do * wide_R, axis=1)
        tl.store(dv + at, (wide_E * beta[:, None]).to(dv.dtype.element_ty), mask=live[:, None])

    # What is of a token alone.
    at = head + i * G
    tl.store(db + at, ((1.0 - beta) * along_b).to(db.dtype.element_ty), mask=live)
    tl.store(pairs.same + at, same * scale, mask=live)
    tl.store(pairs.along_q + at, along_q, mask=live)
    tl.store(pairs.along_k + at, 2.0 * along_b + beta * along_k, mask=live)
    # Both triangles at once: a pair sends to its row and to its column.
    lower = i[:, None] > i[None, :]
    dP = tl.where(lower, dP, 0.0).to(S.DOT)
    dA = tl.where(lower, -beta[:, None] * dA, 0.0).to(S.DOT)
    at = i[:, None] * (G * C) + i[None, :]
    backP, backA = tl.trans(dP), tl.trans(dA)
    tl.store(pairs.dP + head * C + at, dP + backP, mask=live[:, None])
    tl.store(pairs.dA + head * C + at, dA + backA, mask=live[:, None])
    if S.BLOCKS:
        here = ((i // BLOCK)[:, None] == (i // BLOCK)[None, :]) & live[:, None]
        own = pairs.blocks + head * BLOCK * 4 + i[:, None] * (G * BLOCK * 4) + (i % BLOCK)[None, :]
        tl.store(own, dP, mask=here)
        tl.store(own + BLOCK, backP, mask=here)
        tl.store(own + BLOCK * 2, dA, mask=here)
        tl.store(own + BLOCK * 3, backA, mask=here)


@triton.jit
def state_gradients(
    do,
    residual,
    E,
    states,
    dstates,
    i,
    live,
    G,
    beta,
    channel,
    value_dim,
    S: constexpr,
    BK: constexpr,
    BV: constexpr,
):
    """(dO S^T, beta E S^T, R dS'^T) [C, BK] and sum_v S dS' [BK] of one slab of key channels."""
    C: constexpr = S.C
    dq = tl.zeros([C, BK], tl.float32)
    dr, dc = tl.zeros_like(dq), tl.zeros_like(dq)
    overlap = tl.zeros([BK], tl.float32)
    for e in range(0, value_dim, BV):
        c = e + tl.arange(0, BV)
        at = i[:, None] * (G * S.V) + c[None, :]
        state_at = channel[:, None] * S.V + c[None, :]
        state, D = tl.load(states + state_at), tl.load(dstates + state_at)
        dq += dot(tl.load(do + at, mask=live[:, None], other=0.0).to(S.DOT), tl.trans(state), S.PREC)
        dc += dot(tl.load(residual + at, mask=live[:, None], other=0.0), tl.trans(D), S.PREC)
        Ed = tl.load(E + at, mask=live[:, None], other=0.0).to(tl.float32)
        dr += dot((Ed * beta[:, None]).to(S.DOT), tl.trans(state), S.PREC)
        overlap += tl.sum(state.to(tl.float32) * D.to(tl.float32), axis=1)
    return dq, dr, dc, overlap


@triton.jit
def gate_gradient(dg, x, g2, rate, lower_bound, S: constexpr):
    """(df, share of dA_log) [C, BK] from dg, the gradient of the log decay in nats."""
    dg = tl.where(g2 <= (BLOCK_CLAMP if S.BLOCKS else GRADIENT_FLOOR), 0.0, dg)
    g = g2 / LOG2E
    if S.BOUNDED:
        df = dg * g * (1.0 - g / lower_bound) * rate
        return df, df * x
    return -rate * tl.sigmoid(x) * dg, dg * g


@triton.jit
def to_rows(dq, dr, kn, since, blocks, at, here, S: constexpr):
    """dq and r with what pairs inside a block of BLOCK add; since: G - G_middle."""
    columns = (kn * tl.exp2(-since)).to(S.DOT)
    row = tl.exp2(since)
    dq += row * dot(tl.load(blocks + at, mask=here, other=0.0), columns, S.PREC)
    dr += row * dot(tl.load(blocks + BLOCK * 2 + at, mask=here, other=0.0), columns, S.PREC)
    return dq, dr


@triton.jit
def to_columns(dc, qn, kn, since, blocks, at, here, S: constexpr):
    """c with what pairs inside a block of BLOCK add, through both scores in one sum."""
    row = tl.exp2(since)
    back = dot(tl.load(blocks + BLOCK + at, mask=here, other=0.0), (qn * row).to(S.DOT), S.PREC)
    back += dot(tl.load(blocks + BLOCK * 3 + at, mask=here, other=0.0), (kn * row).to(S.DOT), S.PREC)
    return dc + tl.exp2(-since) * back


@triton.jit
def level_mask(B, C: constexpr, UNIT: constexpr):
    """``half_mask`` to load by. UNIT divides B: the compiler reads from the division by it how many columns
    next to each other are alike."""
    half = tl.arange(0, C) // UNIT // (B // UNIT)
    segment = half // 2
    return (segment[:, None] == segment[None, :]) & (half[:, None] != half[None, :])


@triton.jit
def within_level(dq, dr, dc, qn, kn, near, dP, dA, at, live, B, S: constexpr, UNIT: constexpr):
    """dq, r and c with what the pairs of level B add; qn carries the factor ``scale``."""
    mask, late = level_mask(B, S.C, UNIT) & live[:, None], is_late(B, S.C)[:, None]
    # One product for both directions of a level.
    u = tl.where(late, qn, kn) * near
    through_P = near * dot(tl.load(dP + at, mask=mask, other=0.0), u.to(S.DOT), S.PREC)
    through_A = near * dot(tl.load(dA + at, mask=mask, other=0.0), (kn * near).to(S.DOT), S.PREC)
    dq += tl.where(late, through_P, 0.0)
    dr += tl.where(late, through_A, 0.0)
    dc += tl.where(late, 0.0, through_P + through_A)
    return dq, dr, dc


@triton.jit
def chunk_gradients(
    x,
    decays,
    do,
    kept,
    pairs,
    into,
    chunks,
    scale,
    lower_bound,
    strides,
    G,
    value_dim,
    levels,
    S: constexpr,
    BK: constexpr,
    BV: constexpr,
):
    """A slab of key channels of one chunk of one value head. ``into``: gradients of q, k [T, G, K] (per value
    head), f, and partial sums for A_log [N K / BK, G], dt_bias [N, G, K]. value_dim and levels are not
    constants, as in prep."""
    C: constexpr = S.C
    # Pairs inside a block of 2^4 tokens are met before the tree.
    FIRST: constexpr = 4 if S.BLOCKS else 0
    UNIT: constexpr = BLOCK if S.BLOCKS else 1
    slabs: constexpr = S.K // BK
    chunk, g = (tl.program_id(0) // slabs).to(tl.int64), tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) % slabs * BK + tl.arange(0, BK)
    i = tl.arange(0, C)
    length = tl.load(chunks.length + chunk)
    live = i < length
    start = tl.load(chunks.start + chunk).to(tl.int64)
    q = x.q + start * strides.q_t + (g // S.GROUP) * strides.q_h
    k = x.k + start * strides.k_t + (g // S.GROUP) * strides.k_h
    f = x.f + start * strides.f_t + g * strides.f_h
    head = start * G + g  # of this chunk's first row in [T, G, ..]
    do, residual, E = do + head * S.V, kept.residual + head * S.V, kept.E + head * S.V
    place = (chunk * G + g) * S.K * S.V
    states, dstates = kept.states + place, kept.dstates + place
    dP, dA = pairs.dP + head * C, pairs.dA + head * C
    dq_out, dk_out, df_out = into.q + head * S.K, into.k + head * S.K, into.f + head * S.K
    beta_at = x.b + start * strides.b + g + i * strides.b
    beta = tl.sigmoid(tl.load(beta_at, mask=live, other=0.0).to(tl.float32))
    norm_q = tl.load(decays.norm_q + head + i * G, mask=live, other=0.0)
    norm_k = tl.load(decays.norm_k + head + i * G, mask=live, other=0.0)
    rate = tl.exp(tl.load(x.A_log + g).to(tl.float32))
    # Through the states.
    dq, dr, dc, overlap = state_gradients(
        do, residual, E, states, dstates, i, live, G, beta, channel, value_dim, S, BK, BV
    )
    sums, row = decays.sums + head * S.K, G * S.K
    total = tl.load(sums + (length - 1) * row + channel)
    Gc = load_rows(sums, i, live, row, channel)
    kn = load_rows(k, i, live, strides.k_t, channel) * norm_k[:, None]
    decay = tl.exp2(Gc)
    dq *= decay
    dr *= -decay
    dc *= tl.exp2(tl.minimum(total[None, :] - Gc, 0.0))
    # Waits where its result will be, not in registers.
    last_at = into.dt_bias + (chunk * G + g) * S.K + channel
    tl.store(last_at, tl.exp2(total) * overlap + tl.sum(kn * dc, axis=0))
    at = i[:, None] * (G * C) + i[None, :]
    # Each part loads what it needs again, so that only sums stay in registers.
    if S.BLOCKS:
        here = ((i // BLOCK)[:, None] == (i // BLOCK)[None, :]) & live[:, None]
        at_own = i[:, None] * (G * BLOCK * 4) + (i % BLOCK)[None, :]
        blocks = pairs.blocks + head * BLOCK * 4
        # A loop of one turn: or the compiler mixes parts, and more has to be held at a time.
        for _ in range(0, tl.minimum(length, 1)):
            tl.debug_barrier()
            kn = load_rows(k, i, live, strides.k_t, channel) * norm_k[:, None]
            Gc = load_rows(sums, i, live, row, channel)
            since = since_rows(sums, Gc, middle(length, C), i, live, row, channel)
            dq, dr = to_rows(dq, dr, kn, since, blocks, at_own, here, S)
        for _ in range(0, tl.minimum(length, 1)):
            tl.debug_barrier()
            qn = load_rows(q, i, live, strides.q_t, channel) * (norm_q * scale)[:, None]
            kn = load_rows(k, i, live, strides.k_t, channel) * norm_k[:, None]
            Gc = load_rows(sums, i, live, row, channel)
            since = since_rows(sums, Gc, middle(length, C), i, live, row, channel)
            dc = to_columns(dc, qn, kn, since, blocks, at_own, here, S)
    # Not unrolled: the compiler would move all sums to the end and spill what they are made of.
    for level in range(FIRST, levels):
        B = 1 << level
        tl.debug_barrier()
        qn = load_rows(q, i, live, strides.q_t, channel) * (norm_q * scale)[:, None]
        kn = load_rows(k, i, live, strides.k_t, channel) * norm_k[:, None]
        Gc = load_rows(sums, i, live, row, channel)
        near = tl.exp2(-tl.abs(since_rows(sums, Gc, anchor(B, length, C), i, live, row, channel)))
        dq, dr, dc = within_level(dq, dr, dc, qn, kn, near, dP, dA, at, live, B, S, UNIT)

    # What follows is loaded again, so that the loop above does not hold it in registers.
    tl.debug_barrier()
    norm_q = tl.load(decays.norm_q + head + i * G, mask=live, other=0.0)[:, None]
    norm_k = tl.load(decays.norm_k + head + i * G, mask=live, other=0.0)[:, None]
    qn = load_rows(q, i, live, strides.q_t, channel) * norm_q
    kn = load_rows(k, i, live, strides.k_t, channel) * norm_k
    dq *= scale
    dG = qn * dq + kn * (dr - dc)
    # A token reading itself: no decay in between, so nothing of it reaches the gate.
    same = tl.load(pairs.same + head + i * G, mask=live, other=0.0)[:, None]
    along_q = tl.load(pairs.along_q + head + i * G, mask=live, other=0.0)[:, None]
    along_k = tl.load(pairs.along_k + head + i * G, mask=live, other=0.0)[:, None]
    # From gradients of x / |x| to gradients of x.
    dq = norm_q * (dq + same * kn - qn * along_q)
    dk = norm_k * (dr + dc + same * qn - kn * along_k)
    at = i[:, None] * (G * S.K) + channel[None, :]
    tl.store(dq_out + at, dq.to(dq_out.dtype.element_ty), mask=live[:, None])
    tl.store(dk_out + at, dk.to(dk_out.dtype.element_ty), mask=live[:, None])

    tl.debug_barrier()
    raw, g2 = slab_decay(f, x.dt_bias + g * S.K, rate, lower_bound, i, live, strides.f_t, channel, S)
    dg = tl.cumsum(dG, axis=0, reverse=True) + tl.load(last_at)[None, :]
    df, share = gate_gradient(dg, raw, g2, rate, lower_bound, S)
    df = tl.where(live[:, None], df, 0.0)
    tl.store(df_out + at, df.to(df_out.dtype.element_ty), mask=live[:, None])
    tl.debug_barrier()
    tl.store(last_at, tl.sum(df, axis=0))
    of_rate = tl.sum(tl.sum(tl.where(live[:, None], share, 0.0), axis=1), axis=0)
    tl.store(into.A_log + tl.program_id(0).to(tl.int64) * G + g, of_rate)
