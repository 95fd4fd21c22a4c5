"""Device code shared by the Triton KDA kernels, and the token-parallel first launch (needs triton).

Everything about decay happens here. G is the running sum, inside a chunk, of the log2 decay g2 = log2(alpha)
of each key channel, and the pair scores need sum_d a_id b_jd 2^{G_id - G_jd} for i >= j. Every pair i > j is
met at exactly one level of a binary tree over the chunk: at level b the chunk falls into segments of 2 b
tokens, the later half holds i, the earlier half j, and the anchor is the first token of the later half. Then

    2^{G_i - G_j} = x_i x_j,   x = 2^{-|G - G_anchor|},

one factor per token, never above 1 whatever the gate, and nothing of row i sees a gate after i. One product
serves both score matrices: with rows u = (late: q x, early: k x) and columns k x, entry (late i, early j) is
P_ij and entry (early j, late i) is the same pair's k_i . k_j, so P gathers below the diagonal and L
(transposed) above it.

The triangular inverse T = (I + L)^{-1} is merged along the same tree, T <- T - T L_b T with L_b the entries
of level b: block forward substitution, no powers of L.

Where the gate is bounded by about -5 (a factor 2^{-7.2} a token), pairs inside a block of 16 tokens need no
tree to be scored: their anchor is the block's first token, and 2^{G_anchor - G_j} stays below 2^{108}. The
tree then begins above the blocks: four products of 64 x 64 instead of six.

Per-token log2 decays are clamped at CLAMP = -40 (alpha = 1e-12) before the sum, so that one closed gate does
not eat the precision of all later differences.

Legend: T tokens, C tokens per chunk, BK key channels per slab, H query/key heads, G value heads, K key dim, N
chunks.

Device code of the last backward launch: all gradients of one chunk of one value head (needs triton).

With dO, S, R of the forward and dS', E of the reverse scan (kernels/kda/triton/scan.py), in units of the
normalised q, k:

    dP = tril(dO R^T),   dA = -stril(beta E R^T),   dV = beta E,   db = (1 - beta) sum_v E R
    dq = s 2^G (dO S^T),   r = -2^G (beta E S^T),   c = 2^{G_C - G} (R dS'^T)          (through the states)
    dq += s dP' k,   r += dA' k,   c += s dP'^T q + dA'^T k                            (inside the chunk, ' =
                     with decay)
    dg_t = sum_{i >= t} (q dq + k (r - c))_i + sum_v S' dS',   dk = r + c

c is what k sends as a column, r as a row. sum_v S' dS' is taken as 2^{G_C} sum_v S dS' + sum_t k c, so S' is
not read. At each level of the tree above, with u = (late: s q x, early: k x),

    x (dP + dP^T)_level u = (late: dq, early: the P part of c),   x (dA + dA^T)_level (k x) = (late: r, early:
    c).

The gradients of the gate activation, of beta's sigmoid and of the two norms are taken here as well. dA_log
and dt_bias leave as one partial sum per chunk, added up in a fixed order by the host: no atomics.

Legend: T tokens, C tokens per chunk, BK key channels and BV value columns per slab, G value heads, N chunks.
"""

import triton
import triton.language as tl
from triton.language import constexpr

LOG2E = tl.constexpr(1.4426950408889634)
CLAMP = tl.constexpr(-40.0)
# A token that keeps less than 2^-23 of the state passes its gate no gradient beyond rounding noise, which the
# factor exp(A_log) of the gate would amplify.
GRADIENT_FLOOR = tl.constexpr(-23.0)
L2_EPS = tl.constexpr(1e-6)
# Tokens whose pairs meet in one product where the bound of the gate keeps 2^{|G - G_first|} a float32.
BLOCK = tl.constexpr(16)


@triton.jit
def dot(a, b, PREC: constexpr):
    """float32 a @ b. PREC matters for float32 operands only."""
    return tl.dot(a, b, input_precision=PREC, out_dtype=tl.float32)


@triton.jit
def dot_wide(a, x, EXACT: constexpr, DOT: constexpr, PREC: constexpr):
    """float32 a @ x for an operand ``a`` that is exact in DOT. EXACT: x keeps float32 precision, as three DOT
    pieces for 16 bit DOT (cheaper than splitting both operands); otherwise x is rounded to DOT."""
    # A float32 number is the sum of three 16-bit ones: three products with one exact side.
    high = x.to(DOT)
    y = dot(a, high, PREC)
    if EXACT and DOT != tl.float32:
        rest = x - high.to(tl.float32)
        middle = rest.to(DOT)
        y += dot(a, middle, PREC) + dot(a, (rest - middle.to(tl.float32)).to(DOT), PREC)
    return y


@triton.jit
def softplus(x):
    """log(1 + e^x), to 2e-7 relative also where it is tiny (slow decay)."""
    y = tl.exp(-tl.abs(x))
    # log(1 + y) / y on [0, 1]: Chebyshev's polynomial of degree 8, which is off by 3.4e-8; neither a
    # logarithm nor a division, and no 1 + y that would round y away.
    series = 5.126102361828089e-03
    series = series * y - 2.9074065387248993e-02
    series = series * y + 7.75160863995552e-02
    series = series * y - 1.3602247834205627e-01
    series = series * y + 1.9076880812644958e-01
    series = series * y - 2.483539879322052e-01
    series = series * y + 3.331812024116516e-01
    series = series * y - 4.999944567680359e-01
    series = series * y + 9.999999403953552e-01
    return tl.maximum(x, 0.0) + y * series


@triton.jit
def log2_decay(x, rate, lower_bound, BOUNDED: constexpr):
    """g2 = log2 alpha of x = f + dt_bias, clamped; rate = exp(A_log)."""
    if BOUNDED:
        g2 = lower_bound * LOG2E * tl.sigmoid(x * rate)
    else:
        g2 = -rate * LOG2E * softplus(x)
    return tl.maximum(
        g2, CLAMP, propagate_nan=tl.PropagateNan.ALL
    )  # a NaN is to be seen, not to close the gate


@triton.jit
def load_rows(base, i, live, stride, channel):
    """float32 tile [C, channels] of a [T, ..] tensor with unit channel stride, ``base`` at its first row;
    zero where not live. Offsets inside a chunk are 32 bit, the chunk's own place in the tensor 64 bit."""
    at = base + (i[:, None] * stride + channel[None, :])
    return tl.load(at, mask=live[:, None], other=0.0).to(tl.float32)


@triton.jit
def slab_decay(f, dt_bias, rate, lower_bound, i, live, stride_f, channel, S: constexpr):
    """(x = f + dt_bias, g2) of one slab [C, BK]; rows that are not live do not decay."""
    x = load_rows(f, i, live, stride_f, channel)
    x += tl.load(dt_bias + channel).to(tl.float32)[None, :]
    g2 = tl.where(live[:, None], log2_decay(x, rate, lower_bound, S.BOUNDED), 0.0)
    return x, g2


@triton.jit
def anchored(Gc, B, C: constexpr, BK: constexpr):
    """x = 2^{-|G - G_anchor|} of level B, [C, BK]; in (0, 1]."""
    anchor = (tl.arange(0, C) & -(2 * B)) | B
    return tl.exp2(-tl.abs(Gc - tl.gather(Gc, tl.broadcast_to(anchor[:, None], (C, BK)), axis=0)))


@triton.jit
def from_block_start(Gc, C: constexpr, BK: constexpr):
    """2^{G - G_first} and 2^{G_first - G} of every token of a block of BLOCK, [C, BK]; nothing after a token
    counts."""
    first = tl.broadcast_to((tl.arange(0, C) & -BLOCK)[:, None], (C, BK))
    since = Gc - tl.gather(Gc, first, axis=0)
    return tl.exp2(since), tl.exp2(-since)


@triton.jit
def block_mask(C: constexpr):
    """[C, C]: same block."""
    block = tl.arange(0, C) & -BLOCK
    return block[:, None] == block[None, :]


@triton.jit
def level_mask(B, C: constexpr):
    """[C, C]: same segment of 2 B tokens, different halves."""
    half = tl.arange(0, C) & -B  # first token of the half
    return half[:, None] == (half ^ B)[None, :]


@triton.jit
def is_late(B, C: constexpr):
    """[C]: token stands in the later half of its segment."""
    return (tl.arange(0, C) & B) != 0


@triton.jit
def row_norms(base, i, live, stride, key_dim, C: constexpr, BK: constexpr):
    """1 / sqrt(sum of squares + eps) of each row, [C]."""
    squares = tl.zeros([C], tl.float32)
    for d in range(0, key_dim, BK):
        x = load_rows(base, i, live, stride, d + tl.arange(0, BK))
        squares += tl.sum(x * x, axis=1)
    return tl.rsqrt(squares + L2_EPS)


@triton.jit
def invert(scores, beta, levels, S: constexpr):
    """T = (I + L)^{-1} with L_ij = beta_i scores_ij below the diagonal; entries at or above it are not
    read."""
    i = tl.arange(0, S.C)
    L = tl.where(i[:, None] > i[None, :], scores * beta[:, None], 0.0)
    T = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - tl.where(level_mask(1, S.C), L, 0.0)
    for level in range(1, levels):
        Lb = tl.where(level_mask(1 << level, S.C), L, 0.0).to(S.INV)
        Th = T.to(S.INV)
        T -= dot(Th, dot(Lb, Th, S.PREC).to(S.INV), S.PREC)
    return T


@triton.jit
def prep(x, made, chunks, scale, lower_bound, strides, G, key_dim, levels, S: constexpr, BK: constexpr):
    """One chunk of one value head: q^ = s q 2^G, k^ = k 2^G, k~ = k 2^{G_C - G} [T, G, K], carry 2^{G_C} [N,
    G, K], P and T [T, G, C]. q and k are normalised, beta and the gate activated here. key_dim = K and levels
    = log2 C are not constants, or the compiler would unroll the loops they bound and run out of registers."""
    C: constexpr = S.C
    # Pairs inside a block of 2^4 tokens are met before the tree.
    FIRST: constexpr = 4 if S.BLOCKS else 0
    chunk, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, C)
    live = i < tl.load(chunks.length + chunk)
    start = tl.load(chunks.start + chunk).to(tl.int64)
    q = x.q + start * strides.q_t + (g // S.GROUP) * strides.q_h
    k = x.k + start * strides.k_t + (g // S.GROUP) * strides.k_h
    f = x.f + start * strides.f_t + g * strides.f_h
    b = x.b + start * strides.b + g
    head = start * G + g  # of this chunk's first row in [T, G, ..]

    # First walk: norms need the whole row before any channel can be scaled.
    norm_q = row_norms(q, i, live, strides.q_t, key_dim, C, BK) * scale
    norm_k = row_norms(k, i, live, strides.k_t, key_dim, C, BK)
    rate = tl.exp(tl.load(x.A_log + g).to(tl.float32))
    scores = tl.zeros([C, C], tl.float32)
    same = tl.zeros([C], tl.float32)
    for d in range(0, key_dim, BK):
        channel = d + tl.arange(0, BK)
        qn = load_rows(q, i, live, strides.q_t, channel) * norm_q[:, None]
        kn = load_rows(k, i, live, strides.k_t, channel) * norm_k[:, None]
        _, g2 = slab_decay(f, x.dt_bias + g * S.K, rate, lower_bound, i, live, strides.f_t, channel, S)
        Gc = tl.cumsum(g2, axis=0)
        total = tl.sum(tl.where((i == C - 1)[:, None], Gc, 0.0), axis=0)

        at = i[:, None] * (G * S.K) + channel[None, :]
        decay = tl.exp2(Gc)
        tail = kn * tl.exp2(tl.minimum(total[None, :] - Gc, 0.0))
        tl.store(made.q_hat + head * S.K + at, (qn * decay).to(S.DOT), mask=live[:, None])
        tl.store(made.k_hat + head * S.K + at, (kn * decay).to(S.DOT), mask=live[:, None])
        tl.store(made.k_tail + head * S.K + at, tail.to(S.DOT), mask=live[:, None])
        tl.store(made.carry + (chunk * G + g) * S.K + channel, tl.exp2(total))

        # A token with itself knows no decay; every other pair is met at one level of the tree.
        same += tl.sum(qn * kn, axis=1)
        if S.BLOCKS:
            shrunk, grown = from_block_start(Gc, C, BK)
            columns = (kn * grown).to(S.DOT)
            through_q = dot((qn * shrunk).to(S.DOT), tl.trans(columns), S.PREC)
            through_k = dot(columns, tl.trans((kn * shrunk).to(S.DOT)), S.PREC)
            pairs = tl.where(i[:, None] > i[None, :], through_q, through_k)
            scores += tl.where(block_mask(C), pairs, 0.0)
        for level in range(FIRST, levels):
            B = 1 << level
            near = anchored(Gc, B, C, BK)
            rows = (tl.where(is_late(B, C)[:, None], qn, kn) * near).to(S.DOT)
            columns = (kn * near).to(S.DOT)
            scores += tl.where(level_mask(B, C), dot(rows, tl.trans(columns), S.PREC), 0.0)

    # Below the diagonal stand the scores of q, above it, transposed, those of k.
    beta = tl.sigmoid(tl.load(b + i * strides.b, mask=live, other=0.0).to(tl.float32))
    lower, diagonal = i[:, None] > i[None, :], i[:, None] == i[None, :]
    at = head * C + i[:, None] * (G * C) + i[None, :]
    p = tl.where(lower, scores, tl.where(diagonal, same[:, None], 0.0))
    tl.store(made.P + at, p.to(S.DOT), mask=live[:, None])
    inverse = invert(tl.trans(scores), beta, levels, S)
    tl.store(made.T + at, inverse.to(S.DOT), mask=live[:, None])


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
