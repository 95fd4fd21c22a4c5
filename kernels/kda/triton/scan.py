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

from earlyfusion.kernels.kda.triton.prep import dot, dot_wide


@triton.jit
def load_state(state, place, K: tl.constexpr, V: tl.constexpr, v, EXISTS: tl.constexpr, BV: tl.constexpr):
    """float32 [K, BV] of a [.., K, V] tensor at row ``place``, or zeros."""
    d = tl.arange(0, K)
    if EXISTS:
        at = state + place * K * V + d[:, None] * V + v[None, :]
        return tl.load(at, mask=(v < V)[None, :], other=0.0).to(tl.float32)
    return tl.zeros([K, BV], tl.float32)


@triton.jit
def scan_forward(
    q_hat,
    k_hat,
    k_tail,
    carry,
    P,
    T,
    v,
    b,
    initial,
    o,
    states,
    residual,
    final,
    run_start,
    run_end,
    run_chunk,
    stride_vt,
    stride_vh,
    stride_b,
    G,
    run,
    g,
    column,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    OUTPUT: tl.constexpr,
    KEEP: tl.constexpr,
    EXACT: tl.constexpr,
    DOT: tl.constexpr,
    PREC: tl.constexpr,
):
    """Columns ``column * BV ..`` of one run and head. OUTPUT writes o; KEEP writes S before each chunk and R.

    EXACT keeps the state and the residual in float32 inside the products, and lets columns beyond V carry the
    identity.
    """
    start, end = tl.load(run_start + run).to(tl.int64), tl.load(run_end + run).to(tl.int64)
    chunk = tl.load(run_chunk + run).to(tl.int64)
    i, d = tl.arange(0, C), tl.arange(0, K)
    c = column * BV + tl.arange(0, BV)
    inside = c < V
    if EXACT:
        S = tl.where(d[:, None] == (c - V)[None, :], 1.0, 0.0)
    else:
        S = load_state(initial, run * G + g, K, V, c, HAS_INITIAL, BV)
    for first in range(start, end, C):
        live = first + i < end
        row = ((first + i) * G + g)[
            :, None
        ]  # of each token in [T, G, ..]; made anew in every step to spare registers
        key_at, pair_at, value_at = row * K + d[None, :], row * C + i[None, :], row * V + c[None, :]
        here = live[:, None] & inside[None, :]
        kh = tl.load(k_hat + key_at, mask=live[:, None], other=0.0)
        x = tl.load(
            v + g * stride_vh + ((first + i)[:, None] * stride_vt + c[None, :]), mask=here, other=0.0
        ).to(tl.float32)
        beta = tl.sigmoid(tl.load(b + g + (first + i) * stride_b, mask=live, other=0.0).to(tl.float32))
        if KEEP:
            at = states + (chunk * G + g) * K * V + (d[:, None] * V + c[None, :])
            tl.store(at, S.to(DOT), mask=inside[None, :])
        x = beta[:, None] * (x - dot_wide(kh, S, EXACT, DOT, PREC))
        t = tl.load(T + pair_at, mask=live[:, None], other=0.0)
        R = dot_wide(t, x, EXACT, DOT, PREC)
        if KEEP:
            tl.store(residual + value_at, R.to(DOT), mask=here)
        if OUTPUT:
            qh = tl.load(q_hat + key_at, mask=live[:, None], other=0.0)
            p = tl.load(P + pair_at, mask=live[:, None], other=0.0)
            out = dot(qh, S.to(DOT), PREC) + dot(p, R.to(DOT), PREC)
            tl.store(o + value_at, out.to(o.dtype.element_ty), mask=here)
        kt = tl.load(k_tail + key_at, mask=live[:, None], other=0.0)
        keep = tl.load(carry + (chunk * G + g) * K + d)
        S = S * keep[:, None] + dot_wide(tl.trans(kt), R, EXACT, DOT, PREC)
        chunk += 1
    if HAS_FINAL:
        if EXACT:
            WIDE: tl.constexpr = V + K
            tl.store(
                final + (run * G + g) * K * WIDE + d[:, None] * WIDE + c[None, :], S, mask=(c < WIDE)[None, :]
            )
        else:
            tl.store(final + (run * G + g) * K * V + d[:, None] * V + c[None, :], S, mask=inside[None, :])


@triton.jit
def scan_reverse(
    q_hat,
    k_hat,
    k_tail,
    carry,
    P,
    T,
    b,
    do,
    dfinal,
    dstates,
    E,
    dinitial,
    run_start,
    run_end,
    run_chunk,
    stride_b,
    G,
    run,
    g,
    column,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    HAS_DFINAL: tl.constexpr,
    HAS_DINITIAL: tl.constexpr,
    KEEP: tl.constexpr,
    EXACT: tl.constexpr,
    DOT: tl.constexpr,
    PREC: tl.constexpr,
):
    """Gradients of the state, last chunk first. KEEP writes dS' of every chunk and E; EXACT as in the
    forward."""
    start, end = tl.load(run_start + run).to(tl.int64), tl.load(run_end + run).to(tl.int64)
    i, d = tl.arange(0, C), tl.arange(0, K)
    c = column * BV + tl.arange(0, BV)
    inside = c < V
    count = (end - start + C - 1) // C
    chunk = tl.load(run_chunk + run).to(tl.int64) + count - 1
    if EXACT:
        D = tl.where(d[:, None] == (c - V)[None, :], 1.0, 0.0)
    else:
        D = load_state(dfinal, run * G + g, K, V, c, HAS_DFINAL, BV)
    for step in range(0, count):
        first = start + (count - 1 - step) * C
        live = first + i < end
        row = ((first + i) * G + g)[
            :, None
        ]  # of each token in [T, G, ..]; made anew in every step to spare registers
        key_at, pair_at, value_at = row * K + d[None, :], row * C + i[None, :], row * V + c[None, :]
        here = live[:, None] & inside[None, :]
        dod = tl.load(do + value_at, mask=here, other=0.0).to(DOT)
        if KEEP:
            at = dstates + (chunk * G + g) * K * V + (d[:, None] * V + c[None, :])
            tl.store(at, D.to(DOT), mask=inside[None, :])
        p = tl.load(P + pair_at, mask=live[:, None], other=0.0)
        kt = tl.load(k_tail + key_at, mask=live[:, None], other=0.0)
        dR = dot(tl.trans(p), dod, PREC) + dot_wide(kt, D, EXACT, DOT, PREC)
        t = tl.load(T + pair_at, mask=live[:, None], other=0.0)
        e = dot_wide(tl.trans(t), dR, EXACT, DOT, PREC)
        if KEEP:
            tl.store(E + value_at, e.to(DOT), mask=here)
        beta = tl.sigmoid(tl.load(b + g + (first + i) * stride_b, mask=live, other=0.0).to(tl.float32))
        qh = tl.load(q_hat + key_at, mask=live[:, None], other=0.0)
        kh = tl.load(k_hat + key_at, mask=live[:, None], other=0.0)
        keep = tl.load(carry + (chunk * G + g) * K + d)
        D = D * keep[:, None] + dot(tl.trans(qh), dod, PREC)
        D -= dot_wide(tl.trans(kh), e * beta[:, None], EXACT, DOT, PREC)
        chunk -= 1
    if HAS_DINITIAL:
        if EXACT:
            WIDE: tl.constexpr = V + K
            tl.store(
                dinitial + (run * G + g) * K * WIDE + d[:, None] * WIDE + c[None, :],
                D,
                mask=(c < WIDE)[None, :],
            )
        else:
            tl.store(dinitial + (run * G + g) * K * V + d[:, None] * V + c[None, :], D, mask=inside[None, :])


@triton.jit
def forward_scan(
    q_hat,
    k_hat,
    k_tail,
    carry,
    P,
    T,
    v,
    b,
    initial,
    o,
    final,
    run_start,
    run_end,
    run_chunk,
    stride_vt,
    stride_vh,
    stride_b,
    G,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    DOT: tl.constexpr,
    PREC: tl.constexpr,
):
    """Second launch of the forward: outputs and final states. Grid (V / BV, J, G)."""
    run, g = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    scan_forward(
        q_hat,
        k_hat,
        k_tail,
        carry,
        P,
        T,
        v,
        b,
        initial,
        o,
        o,
        o,
        final,
        run_start,
        run_end,
        run_chunk,
        stride_vt,
        stride_vh,
        stride_b,
        G,
        run,
        g,
        tl.program_id(0),
        K,
        V,
        BV,
        C,
        HAS_INITIAL,
        HAS_FINAL,
        True,
        False,
        False,
        DOT,
        PREC,
    )


@triton.jit
def dual_scan(
    q_hat,
    k_hat,
    k_tail,
    carry,
    P,
    T,
    v,
    b,
    initial,
    do,
    dfinal,
    states,
    residual,
    dstates,
    E,
    dinitial,
    run_start,
    run_end,
    run_chunk,
    stride_vt,
    stride_vh,
    stride_b,
    G,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_DFINAL: tl.constexpr,
    HAS_DINITIAL: tl.constexpr,
    DOT: tl.constexpr,
    PREC: tl.constexpr,
):
    """Both scans of the backward in one launch. Grid (2 COLUMNS, J, G): first half forward, second half
    reverse."""
    run, g = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    if tl.program_id(0) < COLUMNS:
        scan_forward(
            q_hat,
            k_hat,
            k_tail,
            carry,
            P,
            T,
            v,
            b,
            initial,
            states,
            states,
            residual,
            states,
            run_start,
            run_end,
            run_chunk,
            stride_vt,
            stride_vh,
            stride_b,
            G,
            run,
            g,
            tl.program_id(0),
            K,
            V,
            BV,
            C,
            HAS_INITIAL,
            False,
            False,
            True,
            False,
            DOT,
            PREC,
        )
    else:
        scan_reverse(
            q_hat,
            k_hat,
            k_tail,
            carry,
            P,
            T,
            b,
            do,
            dfinal,
            dstates,
            E,
            dinitial,
            run_start,
            run_end,
            run_chunk,
            stride_b,
            G,
            run,
            g,
            tl.program_id(0) - COLUMNS,
            K,
            V,
            BV,
            C,
            HAS_DFINAL,
            HAS_DINITIAL,
            True,
            False,
            DOT,
            PREC,
        )


@triton.jit
def transition(
    q_hat,
    k_hat,
    k_tail,
    carry,
    P,
    T,
    v,
    b,
    out,
    run_start,
    run_end,
    run_chunk,
    stride_vt,
    stride_vh,
    stride_b,
    G,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    REVERSE: tl.constexpr,
    DOT: tl.constexpr,
    PREC: tl.constexpr,
):
    """[c | M] of every run, float32 [J, G, K, V + K]; REVERSE: of the gradients, with v standing for dO.

    Grid ((V + K) / BV, J, G).
    """
    run, g = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    if REVERSE:
        scan_reverse(
            q_hat,
            k_hat,
            k_tail,
            carry,
            P,
            T,
            b,
            v,
            v,
            v,
            v,
            out,
            run_start,
            run_end,
            run_chunk,
            stride_b,
            G,
            run,
            g,
            tl.program_id(0),
            K,
            V,
            BV,
            C,
            False,
            True,
            False,
            True,
            DOT,
            PREC,
        )
    else:
        scan_forward(
            q_hat,
            k_hat,
            k_tail,
            carry,
            P,
            T,
            v,
            b,
            out,
            out,
            out,
            out,
            out,
            run_start,
            run_end,
            run_chunk,
            stride_vt,
            stride_vh,
            stride_b,
            G,
            run,
            g,
            tl.program_id(0),
            K,
            V,
            BV,
            C,
            False,
            True,
            False,
            False,
            True,
            DOT,
            PREC,
        )


@triton.jit
def combine(
    moves,
    edge,
    entry,
    document_run,
    G,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    HAS_EDGE: tl.constexpr,
    REVERSE: tl.constexpr,
    PREC: tl.constexpr,
):
    """State with which every run of a document begins (REVERSE: the gradient with which it ends), float32 [J,
    G, K, V].

    ``moves`` are the [c | M] of :func:`transition`; ``edge`` [documents, G, K, V] the initial states (final
    gradients). Grid (V / BV, documents, G). The state passes through memory between runs, a slab of BK rows
    at a time.
    """
    document, g = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first, last = (
        tl.load(document_run + document).to(tl.int64),
        tl.load(document_run + document + 1).to(tl.int64),
    )
    WIDE: tl.constexpr = V + K
    d, slab = tl.arange(0, K), tl.arange(0, BK)
    c = tl.program_id(0) * BV + tl.arange(0, BV)
    inside = (c < V)[None, :]
    S = load_state(edge, document * G + g, K, V, c, HAS_EDGE, BV)
    for step in range(0, last - first):
        run = first + step
        if REVERSE:
            run = last - 1 - step
        here = entry + (run * G + g) * K * V
        tl.store(here + d[:, None] * V + c[None, :], S, mask=inside)
        tl.debug_barrier()
        move = moves + (run * G + g) * K * WIDE
        S = tl.load(move + d[:, None] * WIDE + c[None, :], mask=inside, other=0.0)
        for k in range(0, K, BK):
            M = tl.load(move + d[:, None] * WIDE + V + k + slab[None, :])
            before = tl.load(here + (k + slab)[:, None] * V + c[None, :], mask=inside, other=0.0)
            S += dot(M, before, PREC)
