"""Device code of the chunk scan, forward and in reverse, and of its segment-parallel parts (needs triton).

With q^, k^, k~, carry, P, T of kernels/kda/triton/prep.py, per chunk and value head, state S [K, V] in
float32:

    R = T (beta (V - k^ S)),   O = q^ S + P R,   S' = carry S + k~^T R                      (forward)
    E = T^T (P^T dO + k~ dS'),   dS = q^^T dO + carry dS' - k^^T (beta E)                    (reverse)

Neither W = T beta k^ nor U = T beta V is ever formed. The reverse needs nothing of the forward scan, so in a
backward pass both run as two halves of one launch.

A *run* is a stretch of chunks scanned one after the other: a document, or one segment of it. For segments the
map from the incoming to the outgoing state is affine, S' = M S + c, so :func:`transition` scans V + K columns
from S = [0 | I] (with V = 0 in the last K) and :func:`combine` chains the segments.

Legend: T tokens, C tokens per chunk, G value heads, K key dim, V value dim, BV value columns per program, N
chunks, J runs.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from earlyfusion.kernels.kda.triton.prep import dot, dot_wide


@triton.jit
def load_state(state, place, v, S: constexpr, BV: constexpr):
    """float32 [K, BV] of a [.., K, V] tensor at row ``place``; zeros where there is none."""
    d = tl.arange(0, S.K)
    if state is None:
        K: constexpr = S.K
        return tl.zeros([K, BV], tl.float32)
    else:
        at = state + place * S.K * S.V + d[:, None] * S.V + v[None, :]
        return tl.load(at, mask=(v < S.V)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_state(state, place, v, values, S: constexpr, EXACT: constexpr):
    """Columns v of row ``place``; EXACT: of a [.., K, V + K] tensor."""
    WIDE: constexpr = S.V + S.K if EXACT else S.V
    d = tl.arange(0, S.K)
    tl.store(state + place * S.K * WIDE + d[:, None] * WIDE + v[None, :], values, mask=(v < WIDE)[None, :])


@triton.jit
def identity(v, S: constexpr):
    """[0 | I]: what the last K of V + K columns start from."""
    return tl.where(tl.arange(0, S.K)[:, None] == (v - S.V)[None, :], 1.0, 0.0)


@triton.jit
def beta_of(b, g, t, live, strides):
    return tl.sigmoid(tl.load(b + g + t * strides.b, mask=live, other=0.0).to(tl.float32))


@triton.jit
def scan_forward(
    made,
    scores,
    v,
    b,
    initial,
    o,
    kept,
    final,
    runs,
    strides,
    G,
    column,
    S: constexpr,
    BV: constexpr,
    EXACT: constexpr,
):
    """Columns ``column * BV ..`` of one run and head. Writes o, the final state, and with ``kept`` S before
    each chunk and R; what is None is not written.

    EXACT keeps the state and the residual in float32 inside the products, and lets columns beyond V carry the
    identity.
    """
    run, g = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start, end = tl.load(runs.start + run).to(tl.int64), tl.load(runs.end + run).to(tl.int64)
    chunk = tl.load(runs.first_chunk + run).to(tl.int64)
    i, d = tl.arange(0, S.C), tl.arange(0, S.K)
    c = column * BV + tl.arange(0, BV)
    inside = c < S.V
    # A transition is applied to states of any size: its rounding would be multiplied.
    if EXACT:
        state = identity(c, S)
    else:
        state = load_state(initial, run * G + g, c, S, BV)

    for first in range(start, end, S.C):
        live = first + i < end
        # Of each token in [T, G, ..]; made anew in every step to spare registers.
        row = ((first + i) * G + g)[:, None]
        key_at, pair_at, value_at = row * S.K + d[None, :], row * S.C + i[None, :], row * S.V + c[None, :]
        here = live[:, None] & inside[None, :]
        kh = tl.load(made.k_hat + key_at, mask=live[:, None], other=0.0)
        x_at = v + g * strides.v_h + ((first + i)[:, None] * strides.v_t + c[None, :])
        x = tl.load(x_at, mask=here, other=0.0).to(tl.float32)
        beta = beta_of(b, g, first + i, live, strides)
        if kept is not None:
            at = kept.states + (chunk * G + g) * S.K * S.V + (d[:, None] * S.V + c[None, :])
            tl.store(at, state.to(S.DOT), mask=inside[None, :])

        x = beta[:, None] * (x - dot_wide(kh, state, EXACT, S.DOT, S.PREC))
        t = tl.load(scores.T + pair_at, mask=live[:, None], other=0.0)
        R = dot_wide(t, x, EXACT, S.DOT, S.PREC)
        if kept is not None:
            tl.store(kept.residual + value_at, R.to(S.DOT), mask=here)
        if o is not None:
            qh = tl.load(made.q_hat + key_at, mask=live[:, None], other=0.0)
            p = tl.load(scores.P + pair_at, mask=live[:, None], other=0.0)
            out = dot(qh, state.to(S.DOT), S.PREC) + dot(p, R.to(S.DOT), S.PREC)
            tl.store(o + value_at, out.to(o.dtype.element_ty), mask=here)

        kt = tl.load(made.k_tail + key_at, mask=live[:, None], other=0.0)
        keep = tl.load(made.carry + (chunk * G + g) * S.K + d)
        state = state * keep[:, None] + dot_wide(tl.trans(kt), R, EXACT, S.DOT, S.PREC)
        chunk += 1
    if final is not None:
        store_state(final, run * G + g, c, state, S, EXACT)


@triton.jit
def scan_reverse(
    made,
    scores,
    b,
    do,
    dfinal,
    kept,
    dinitial,
    runs,
    strides,
    G,
    column,
    S: constexpr,
    BV: constexpr,
    EXACT: constexpr,
):
    """Gradients of the state, last chunk first. ``kept`` receives dS' of every chunk and E; EXACT as in the
    forward."""
    run, g = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start, end = tl.load(runs.start + run).to(tl.int64), tl.load(runs.end + run).to(tl.int64)
    i, d = tl.arange(0, S.C), tl.arange(0, S.K)
    c = column * BV + tl.arange(0, BV)
    inside = c < S.V
    count = (end - start + S.C - 1) // S.C
    chunk = tl.load(runs.first_chunk + run).to(tl.int64) + count - 1
    if EXACT:
        D = identity(c, S)
    else:
        D = load_state(dfinal, run * G + g, c, S, BV)

    for step in range(0, count):
        first = start + (count - 1 - step) * S.C
        live = first + i < end
        # Of each token in [T, G, ..]; made anew in every step to spare registers.
        row = ((first + i) * G + g)[:, None]
        key_at, pair_at, value_at = row * S.K + d[None, :], row * S.C + i[None, :], row * S.V + c[None, :]
        here = live[:, None] & inside[None, :]
        dod = tl.load(do + value_at, mask=here, other=0.0).to(S.DOT)
        if kept is not None:
            at = kept.dstates + (chunk * G + g) * S.K * S.V + (d[:, None] * S.V + c[None, :])
            tl.store(at, D.to(S.DOT), mask=inside[None, :])

        p = tl.load(scores.P + pair_at, mask=live[:, None], other=0.0)
        kt = tl.load(made.k_tail + key_at, mask=live[:, None], other=0.0)
        dR = dot(tl.trans(p), dod, S.PREC) + dot_wide(kt, D, EXACT, S.DOT, S.PREC)
        t = tl.load(scores.T + pair_at, mask=live[:, None], other=0.0)
        e = dot_wide(tl.trans(t), dR, EXACT, S.DOT, S.PREC)
        if kept is not None:
            tl.store(kept.E + value_at, e.to(S.DOT), mask=here)

        beta = beta_of(b, g, first + i, live, strides)
        qh = tl.load(made.q_hat + key_at, mask=live[:, None], other=0.0)
        kh = tl.load(made.k_hat + key_at, mask=live[:, None], other=0.0)
        keep = tl.load(made.carry + (chunk * G + g) * S.K + d)
        D = D * keep[:, None] + dot(tl.trans(qh), dod, S.PREC)
        D -= dot_wide(tl.trans(kh), e * beta[:, None], EXACT, S.DOT, S.PREC)
        chunk -= 1
    if dinitial is not None:
        store_state(dinitial, run * G + g, c, D, S, EXACT)


@triton.jit
def forward_scan(made, scores, v, b, initial, o, final, runs, strides, G, S: constexpr, BV: constexpr):
    """Last launch of the forward: outputs and final states. Grid (V / BV, J, G)."""
    column = tl.program_id(0)
    scan_forward(made, scores, v, b, initial, o, None, final, runs, strides, G, column, S, BV, False)


@triton.jit
def dual_scan(
    made,
    scores,
    v,
    b,
    initial,
    do,
    dfinal,
    kept,
    dinitial,
    runs,
    strides,
    G,
    S: constexpr,
    BV: constexpr,
):
    """Both scans of the backward in one launch. Grid (2 V / BV, J, G): first half forward, second half
    reverse."""
    column, columns = tl.program_id(0), S.V // BV
    if column < columns:
        scan_forward(made, scores, v, b, initial, None, kept, None, runs, strides, G, column, S, BV, False)
    else:
        column -= columns
        scan_reverse(made, scores, b, do, dfinal, kept, dinitial, runs, strides, G, column, S, BV, False)


@triton.jit
def transition(made, scores, v, b, out, runs, strides, G, S: constexpr, BV: constexpr, REVERSE: constexpr):
    """[c | M] of every run, float32 [J, G, K, V + K]; REVERSE: of the gradients, with v standing for dO.

    Grid ((V + K) / BV, J, G).
    """
    column = tl.program_id(0)
    if REVERSE:
        scan_reverse(made, scores, b, v, None, None, out, runs, strides, G, column, S, BV, True)
    else:
        scan_forward(made, scores, v, b, None, None, None, out, runs, strides, G, column, S, BV, True)


@triton.jit
def combine(
    moves,
    edge,
    entry,
    document_run,
    G,
    S: constexpr,
    BV: constexpr,
    BK: constexpr,
    REVERSE: constexpr,
):
    """State with which every run of a document begins (REVERSE: the gradient with which it ends), float32 [J,
    G, K, V].

    ``moves`` are the [c | M] of :func:`transition`; ``edge`` [documents, G, K, V] the initial states (final
    gradients), if there are any. Grid (V / BV, documents, G). The state passes through memory between runs, a
    slab of BK rows at a time.
    """
    document, g = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first = tl.load(document_run + document).to(tl.int64)
    last = tl.load(document_run + document + 1).to(tl.int64)
    WIDE: constexpr = S.V + S.K
    d, slab = tl.arange(0, S.K), tl.arange(0, BK)
    c = tl.program_id(0) * BV + tl.arange(0, BV)
    inside = (c < S.V)[None, :]
    state = load_state(edge, document * G + g, c, S, BV)
    for step in range(0, last - first):
        run = first + step
        if REVERSE:
            run = last - 1 - step
        here = entry + (run * G + g) * S.K * S.V
        tl.store(here + d[:, None] * S.V + c[None, :], state, mask=inside)
        tl.debug_barrier()
        move = moves + (run * G + g) * S.K * WIDE
        state = tl.load(move + d[:, None] * WIDE + c[None, :], mask=inside, other=0.0)
        for k in range(0, S.K, BK):
            M = tl.load(move + d[:, None] * WIDE + S.V + k + slab[None, :])
            before = tl.load(here + (k + slab)[:, None] * S.V + c[None, :], mask=inside, other=0.0)
            state += dot(M, before, S.PREC)
