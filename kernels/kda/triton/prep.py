"""Device code shared by the Triton KDA kernels, and the forward launches over chunks (needs triton).

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

With bfloat16 operands, pairs inside a block of 16 tokens need no tree: their anchor is the block's middle,
the factors of row and column are 2^{G_i - G_middle} and 2^{G_middle - G_j}, and what meets above the diagonal
is thrown away. They stay within 2^{+-126} as a token's decay is at least 2^{BLOCK_CLAMP} = 1.8e-5 there, a
hundredth of what bfloat16 rounds away. The tree then begins above the blocks: two levels of a chunk of 64
instead of six.

Per-token log2 decays are otherwise clamped at CLAMP = -40 (alpha = 1e-12) before the sum, so that one closed
gate does not eat the precision of all later differences.

Legend: T tokens, C tokens per chunk, BK key channels per slab, H query/key heads, G value heads, K key dim, N
chunks.
"""

import triton
import triton.language as tl
from triton.language import constexpr

LOG2E = tl.constexpr(1.4426950408889634)
CLAMP = tl.constexpr(-40.0)
# A token that keeps less than 2^-23 of the state passes its gate no gradient beyond rounding noise, which the
# factor exp(A_log) of the gate would amplify; one whose decay is clamped passes none either.
GRADIENT_FLOOR = tl.constexpr(-23.0)
L2_EPS = tl.constexpr(1e-6)
# Tokens whose pairs meet in one product, and the least log2 decay of each: half a block of them is 2^-126.
BLOCK = tl.constexpr(16)
BLOCK_CLAMP = tl.constexpr(-15.75)


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
def log2_decay(x, rate, lower_bound, BOUNDED: constexpr, LEAST: constexpr = CLAMP):
    """g2 = log2 alpha of x = f + dt_bias, LEAST at least; rate = exp(A_log)."""
    if BOUNDED:
        g2 = lower_bound * LOG2E * tl.sigmoid(x * rate)
    else:
        g2 = -rate * LOG2E * softplus(x)
    # A NaN is to be seen, not to close the gate.
    return tl.maximum(g2, LEAST, propagate_nan=tl.PropagateNan.ALL)


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
    LEAST: constexpr = BLOCK_CLAMP if S.BLOCKS else CLAMP
    g2 = tl.where(live[:, None], log2_decay(x, rate, lower_bound, S.BOUNDED, LEAST), 0.0)
    return x, g2


@triton.jit
def since_rows(sums, Gc, row, i, live, stride, channel):
    """G - G_row of every token, [C, BK]; row [C]: of which token of the chunk."""
    return Gc - load_rows(sums, row, live, stride, channel)


@triton.jit
def anchor(B, length, C: constexpr):
    """[C]: the first token of the later half of every token's segment of level B."""
    return tl.minimum((tl.arange(0, C) & -(2 * B)) | B, length - 1)


@triton.jit
def middle(length, C: constexpr):
    """[C]: the middle of every token's block."""
    return tl.minimum((tl.arange(0, C) & -BLOCK) + BLOCK // 2, length - 1)


@triton.jit
def block_mask(C: constexpr):
    """[C, C]: same block."""
    block = tl.arange(0, C) & -BLOCK
    return block[:, None] == block[None, :]


@triton.jit
def half_mask(B, C: constexpr):
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
    T = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - tl.where(half_mask(1, S.C), L, 0.0)
    for level in range(1, levels):
        Lb = tl.where(half_mask(1 << level, S.C), L, 0.0).to(S.INV)
        Th = T.to(S.INV)
        T -= dot(Th, dot(Lb, Th, S.PREC).to(S.INV), S.PREC)
    return T


@triton.jit
def prep(x, made, decays, chunks, scale, lower_bound, strides, G, key_dim, S: constexpr, BK: constexpr):
    """One chunk of one value head: q^ = s q 2^G, k^ = k 2^G, k~ = k 2^{G_C - G} [T, G, K], carry 2^{G_C} [N,
    G, K], G itself [T, G, K] and the norms of q and k [T, G]. q and k are normalised and the gate activated
    here. key_dim = K is not a constant, or the compiler would unroll the loops it bounds and run out of
    registers."""
    C: constexpr = S.C
    chunk, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, C)
    live = i < tl.load(chunks.length + chunk)
    start = tl.load(chunks.start + chunk).to(tl.int64)
    q = x.q + start * strides.q_t + (g // S.GROUP) * strides.q_h
    k = x.k + start * strides.k_t + (g // S.GROUP) * strides.k_h
    f = x.f + start * strides.f_t + g * strides.f_h
    head = start * G + g  # of this chunk's first row in [T, G, ..]
    q_hat, k_hat, k_tail = made.q_hat + head * S.K, made.k_hat + head * S.K, made.k_tail + head * S.K
    sums = decays.sums + head * S.K

    # First walk: norms need the whole row before any channel can be scaled.
    norm_q = row_norms(q, i, live, strides.q_t, key_dim, C, BK)
    norm_k = row_norms(k, i, live, strides.k_t, key_dim, C, BK)
    tl.store(decays.norm_q + head + i * G, norm_q, mask=live)
    tl.store(decays.norm_k + head + i * G, norm_k, mask=live)
    norm_q *= scale
    rate = tl.exp(tl.load(x.A_log + g).to(tl.float32))
    for d in range(0, key_dim, BK):
        channel = d + tl.arange(0, BK)
        _, g2 = slab_decay(f, x.dt_bias + g * S.K, rate, lower_bound, i, live, strides.f_t, channel, S)
        Gc = tl.cumsum(g2, axis=0)
        total = tl.sum(g2, axis=0)
        qn = load_rows(q, i, live, strides.q_t, channel) * norm_q[:, None]
        kn = load_rows(k, i, live, strides.k_t, channel) * norm_k[:, None]
        at = i[:, None] * (G * S.K) + channel[None, :]
        decay = tl.exp2(Gc)
        tail = kn * tl.exp2(tl.minimum(total[None, :] - Gc, 0.0))
        tl.store(sums + at, Gc, mask=live[:, None])
        tl.store(q_hat + at, (qn * decay).to(S.DOT), mask=live[:, None])
        tl.store(k_hat + at, (kn * decay).to(S.DOT), mask=live[:, None])
        tl.store(k_tail + at, tail.to(S.DOT), mask=live[:, None])
        tl.store(made.carry + (chunk * G + g) * S.K + channel, tl.exp2(total))


@triton.jit
def pair_scores(
    x,
    decays,
    made,
    chunks,
    scale,
    lower_bound,
    strides,
    G,
    key_dim,
    levels,
    S: constexpr,
    BK: constexpr,
):
    """P and T of one chunk of one value head, [T, G, C]; beta is activated here."""
    C: constexpr = S.C
    # Pairs inside a block of 2^4 tokens are met before the tree.
    FIRST: constexpr = 4 if S.BLOCKS else 0
    chunk, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, C)
    length = tl.load(chunks.length + chunk)
    live = i < length
    start = tl.load(chunks.start + chunk).to(tl.int64)
    q = x.q + start * strides.q_t + (g // S.GROUP) * strides.q_h
    k = x.k + start * strides.k_t + (g // S.GROUP) * strides.k_h
    b = x.b + start * strides.b + g
    head = start * G + g  # of this chunk's first row in [T, G, ..]
    sums, row = decays.sums + head * S.K, G * S.K
    norm_q = tl.load(decays.norm_q + head + i * G, mask=live, other=0.0) * scale
    norm_k = tl.load(decays.norm_k + head + i * G, mask=live, other=0.0)
    scores = tl.zeros([C, C], tl.float32)
    same = tl.zeros([C], tl.float32)
    for d in range(0, key_dim, BK):
        channel = d + tl.arange(0, BK)
        qn = load_rows(q, i, live, strides.q_t, channel) * norm_q[:, None]
        kn = load_rows(k, i, live, strides.k_t, channel) * norm_k[:, None]
        Gc = load_rows(sums, i, live, row, channel)
        # A token with itself knows no decay; every other pair is met at one level of the tree.
        same += tl.sum(qn * kn, axis=1)
        if S.BLOCKS:
            since = since_rows(sums, Gc, middle(length, C), i, live, row, channel)
            grow = tl.exp2(since)
            columns = (kn * tl.exp2(-since)).to(S.DOT)
            through_q = dot((qn * grow).to(S.DOT), tl.trans(columns), S.PREC)
            through_k = dot(columns, tl.trans((kn * grow).to(S.DOT)), S.PREC)
            pairs = tl.where(i[:, None] > i[None, :], through_q, through_k)
            scores += tl.where(block_mask(C), pairs, 0.0)
        for level in range(FIRST, levels):
            B = 1 << level
            near = tl.exp2(-tl.abs(since_rows(sums, Gc, anchor(B, length, C), i, live, row, channel)))
            rows = (tl.where(is_late(B, C)[:, None], qn, kn) * near).to(S.DOT)
            columns = (kn * near).to(S.DOT)
            scores += tl.where(half_mask(B, C), dot(rows, tl.trans(columns), S.PREC), 0.0)

    # Below the diagonal stand the scores of q, above it, transposed, those of k.
    beta = tl.sigmoid(tl.load(b + i * strides.b, mask=live, other=0.0).to(tl.float32))
    lower, diagonal = i[:, None] > i[None, :], i[:, None] == i[None, :]
    at = i[:, None] * (G * C) + i[None, :]
    p = tl.where(lower, scores, tl.where(diagonal, same[:, None], 0.0))
    tl.store(made.P + head * C + at, p.to(S.DOT), mask=live[:, None])
    inverse = invert(tl.trans(scores), beta, levels, S)
    tl.store(made.T + head * C + at, inverse.to(S.DOT), mask=live[:, None])
