"""Device code of the last backward launch: all gradients of one chunk of one value head (needs triton).

With dO, S, R of the forward and dS', E of the reverse scan (kernels/kda/triton/scan.py), in units of the
normalised q, k:

    dP = tril(dO R^T),   dA = -stril(beta E R^T),   dV = beta E,   db = (1 - beta) sum_v E R
    dq = s 2^G (dO S^T),   r = -2^G (beta E S^T),   c = 2^{G_C - G} (R dS'^T)          (through the states)
    dq += s dP' k,   r += dA' k,   c += s dP'^T q + dA'^T k                            (inside the chunk, ' =
                     with decay)
    dg_t = sum_{i >= t} (q dq + k (r - c))_i + sum_v S' dS',   dk = r + c

c is what k sends as a column, r as a row. sum_v S' dS' is taken as 2^{G_C} sum_v S dS' + sum_t k c, so S' is
not read. At each level of the tree of kernels/kda/triton/prep.py, with u = (late: s q x, early: k x),

    x (dP + dP^T)_level u = (late: dq, early: the P part of c),   x (dA + dA^T)_level (k x) = (late: r, early:
    c).

The gradients of the gate activation, of beta's sigmoid and of the two norms are taken here as well. dA_log
and dt_bias leave as one partial sum per chunk, added up in a fixed order by the host: no atomics.

Legend: T tokens, C tokens per chunk, BK key channels and BV value columns per slab, G value heads, N chunks.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from earlyfusion.kernels.kda.triton.prep import (
    GRADIENT_FLOOR,
    LOG2E,
    anchored,
    dot,
    is_late,
    level_mask,
    load_rows,
    row_norms,
    slab_decay,
)


@triton.jit
def pair_gradients(do, residual, E, dv, i, live, G, beta, value_dim, S: constexpr, BV: constexpr):
    """(dP + dP^T, dA + dA^T, sum_v E R, sum_v dO R), the first two without diagonal; writes dV = beta E on
    the way."""
    C: constexpr = S.C
    dP, dA = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    along, same = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for e in range(0, value_dim, BV):
        at = i[:, None] * (G * S.V) + (e + tl.arange(0, BV))[None, :]
        dod = tl.load(do + at, mask=live[:, None], other=0.0).to(S.DOT)
        R = tl.load(residual + at, mask=live[:, None], other=0.0)
        Ed = tl.load(E + at, mask=live[:, None], other=0.0)
        dP += dot(dod, tl.trans(R), S.PREC)
        dA += dot(Ed, tl.trans(R), S.PREC)
        along += tl.sum(Ed.to(tl.float32) * R.to(tl.float32), axis=1)
        same += tl.sum(dod.to(tl.float32) * R.to(tl.float32), axis=1)
        tl.store(dv + at, (Ed.to(tl.float32) * beta[:, None]).to(dv.dtype.element_ty), mask=live[:, None])
    # Both triangles at once: a pair sends to its row and to its column.
    lower = i[:, None] > i[None, :]
    dP = tl.where(lower, dP, 0.0).to(S.DOT)
    dA = tl.where(lower, -beta[:, None] * dA, 0.0).to(S.DOT)
    return dP + tl.trans(dP), dA + tl.trans(dA), along, same


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
def gate_gradient(dg, x, g2, rate, lower_bound, BOUNDED: constexpr):
    """(df, share of dA_log) [C, BK] from dg, the gradient of the log decay in nats."""
    dg = tl.where(g2 < GRADIENT_FLOOR, 0.0, dg)
    g = g2 / LOG2E
    if BOUNDED:
        df = dg * g * (1.0 - g / lower_bound) * rate
        return df, df * x
    return -rate * tl.sigmoid(x) * dg, dg * g


@triton.jit
def within_chunk(dq, dr, dc, qn, kn, Gc, dP, dA, scale, levels, S: constexpr, BK: constexpr):
    """dq, r and c with what the pairs inside the chunk add, level by level; qn carries the factor
    ``scale``."""
    for level in range(0, levels):
        B = 1 << level
        decays = anchored(Gc, B, S.C, BK)
        mask, late = level_mask(B, S.C), is_late(B, S.C)[:, None]
        # One product for both directions of a level.
        u = tl.where(late, qn, kn) * decays
        through_P = decays * dot(tl.where(mask, dP, 0.0).to(S.DOT), u.to(S.DOT), S.PREC)
        through_A = decays * dot(tl.where(mask, dA, 0.0).to(S.DOT), (kn * decays).to(S.DOT), S.PREC)
        dq += tl.where(late, scale * through_P, 0.0)
        dr += tl.where(late, through_A, 0.0)
        dc += tl.where(late, 0.0, through_P + through_A)
    return dq, dr, dc


@triton.jit
def normalize_gradients(out, base, norm, along, i, live, stride, G, key_dim, S: constexpr, BK: constexpr):
    """``out`` from gradients of x / |x| to gradients of x: norm (dy - y (y . dy)), in place."""
    for d in range(0, key_dim, BK):
        channel = d + tl.arange(0, BK)
        at = i[:, None] * (G * S.K) + channel[None, :]
        dy = tl.load(out + at, mask=live[:, None], other=0.0).to(tl.float32)
        y = load_rows(base, i, live, stride, channel) * norm[:, None]
        dx = norm[:, None] * (dy - y * along[:, None])
        tl.store(out + at, dx.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def chunk_gradients(
    x,
    do,
    kept,
    into,
    chunks,
    scale,
    lower_bound,
    strides,
    G,
    key_dim,
    value_dim,
    levels,
    S: constexpr,
    BK: constexpr,
    BV: constexpr,
):
    """``into``: gradients of q, k [T, G, K] (per value head), v, f, b, and partial sums for A_log [N, G],
    dt_bias [N, G, K]. key_dim, value_dim and levels are not constants, as in prep."""
    chunk, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, S.C)
    live = i < tl.load(chunks.length + chunk)
    start = tl.load(chunks.start + chunk).to(tl.int64)
    q = x.q + start * strides.q_t + (g // S.GROUP) * strides.q_h
    k = x.k + start * strides.k_t + (g // S.GROUP) * strides.k_h
    f = x.f + start * strides.f_t + g * strides.f_h
    head = start * G + g  # of this chunk's first row in [T, G, ..]
    do, residual, E = do + head * S.V, kept.residual + head * S.V, kept.E + head * S.V
    dq_out, dk_out, df_out = into.q + head * S.K, into.k + head * S.K, into.f + head * S.K
    place = (chunk * G + g) * S.K * S.V
    states, dstates = kept.states + place, kept.dstates + place

    # The pairs of the chunk, beta and the values.
    beta_at = x.b + start * strides.b + g + i * strides.b
    beta = tl.sigmoid(tl.load(beta_at, mask=live, other=0.0).to(tl.float32))
    dv = into.v + head * S.V
    dP, dA, along, same = pair_gradients(do, residual, E, dv, i, live, G, beta, value_dim, S, BV)
    db = (1.0 - beta) * along
    tl.store(into.b + head + i * G, db.to(into.b.dtype.element_ty), mask=live)
    same *= scale

    # Slab by slab: queries, keys and the gate.
    norm_q = row_norms(q, i, live, strides.q_t, key_dim, S.C, BK)
    norm_k = row_norms(k, i, live, strides.k_t, key_dim, S.C, BK)
    rate = tl.exp(tl.load(x.A_log + g).to(tl.float32))
    C: constexpr = S.C
    along_q, along_k = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    dA_log_sum = 0.0
    for d in range(0, key_dim, BK):
        channel = d + tl.arange(0, BK)
        dq, dr, dc, overlap = state_gradients(
            do, residual, E, states, dstates, i, live, G, beta, channel, value_dim, S, BK, BV
        )
        _, g2 = slab_decay(f, x.dt_bias + g * S.K, rate, lower_bound, i, live, strides.f_t, channel, S)
        Gc = tl.cumsum(g2, axis=0)
        total = tl.sum(tl.where((i == S.C - 1)[:, None], Gc, 0.0), axis=0)
        qn = load_rows(q, i, live, strides.q_t, channel) * (norm_q * scale)[:, None]
        kn = load_rows(k, i, live, strides.k_t, channel) * norm_k[:, None]
        decay = tl.exp2(Gc)
        dq *= scale * decay
        dr *= -decay
        dc *= tl.exp2(tl.minimum(total[None, :] - Gc, 0.0))
        last = tl.exp2(total) * overlap + tl.sum(kn * dc, axis=0)
        dq, dr, dc = within_chunk(dq, dr, dc, qn, kn, Gc, dP, dA, scale, levels, S, BK)
        f_at = i[:, None] * (G * S.K) + channel[None, :]

        # What follows is loaded again, so that the loop above does not hold it in registers.
        tl.debug_barrier()
        qn = load_rows(q, i, live, strides.q_t, channel) * norm_q[:, None]
        kn = load_rows(k, i, live, strides.k_t, channel) * norm_k[:, None]
        dG = qn * dq + kn * (dr - dc)
        # A token reading itself: no decay in between, so nothing of it reaches the gate.
        dq += same[:, None] * kn
        dk = dr + dc + same[:, None] * qn
        along_q += tl.sum(qn * dq, axis=1)
        along_k += tl.sum(kn * dk, axis=1)
        tl.store(dq_out + f_at, dq.to(dq_out.dtype.element_ty), mask=live[:, None])
        tl.store(dk_out + f_at, dk.to(dk_out.dtype.element_ty), mask=live[:, None])

        tl.debug_barrier()
        raw, g2 = slab_decay(f, x.dt_bias + g * S.K, rate, lower_bound, i, live, strides.f_t, channel, S)
        dg = tl.cumsum(dG, axis=0, reverse=True) + last[None, :]
        df, share = gate_gradient(dg, raw, g2, rate, lower_bound, S.BOUNDED)
        df = tl.where(live[:, None], df, 0.0)
        tl.store(df_out + f_at, df.to(df_out.dtype.element_ty), mask=live[:, None])
        tl.store(into.dt_bias + (chunk * G + g) * S.K + channel, tl.sum(df, axis=0))
        dA_log_sum += tl.sum(tl.sum(tl.where(live[:, None], share, 0.0), axis=1), axis=0)
    tl.store(into.A_log + chunk * G + g, dA_log_sum)

    # Every thread's dq and dk must lie in memory before the rows are read back.
    tl.debug_barrier()
    normalize_gradients(dq_out, q, norm_q, along_q, i, live, strides.q_t, G, key_dim, S, BK)
    normalize_gradients(dk_out, k, norm_k, along_k, i, live, strides.k_t, G, key_dim, S, BK)
