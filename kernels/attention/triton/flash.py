"""Flash attention inside the documents of a packed row, for head dims that torch's kernels pad or refuse.

A head dim is cut into at most two power-of-two tiles: 192 = 128 + 64 and 72 = 64 + 16 take 0 and 11 % more
lanes than they need, where padding to a power of two takes 33 and 78 %. Keys and values have their own dims
(MLA: 192 and 128), nothing is padded in memory. The host knows the
document lengths, so the table of query tiles is built without looking at the device and cached with the
packed row.

Forward: online softmax in base 2, the log-sum-exp is returned; the queries may be the newest tokens of
documents whose earlier keys were computed before (`attention_append`). Backward: one kernel per key tile for
dK and dV (walking over its queries), one per query tile for dQ; P is recomputed, nothing is
atomic.

Legend: T tokens, H heads, D key dim, V value dim, BM query rows, BN keys of a tile.

The largest attention logit per head without asking the host; the rule stands in varlen.py.

The gate is read on the device: programs whose rows cannot hold a head's maximum, and all of them while no
head exceeds tau, leave before they load a query. So where nothing is clipped a layer costs a few small
launches over the log-sum-exps, and the host goes on. Every program writes one partial maximum: no atomics.

Legend: T tokens, H heads, D key dim, P query tiles, BM query rows, BN keys of a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language import constexpr

from earlyfusion.kernels.attention import varlen
from earlyfusion.kernels.launch import constant, hardware, on_device, power_of_two
from earlyfusion.kernels.products import compute_dtype
from earlyfusion.kernels.segments import (
    FLOATS,
    Segments,
    check_append,
    check_attention,
    check_shapes,
    check_tensors,
)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


# Named tuples travel into the kernels as they are: constants together, strides together.
class Dim(NamedTuple):
    """A head dim and its two tiles: powers of two of at least 16, the second 0 where one suffices."""

    ALL: int
    A: int
    B: int


class Sizes(NamedTuple):
    """Constants of a call, which its kernels are compiled for."""

    H: int
    CAUSAL: bool
    K: Any  # Dim, as a `constant`
    V: Any
    BM: int
    BN: int


class Strides(NamedTuple):
    """Elements from token to token and from head to head."""

    q_t: int
    q_h: int
    k_t: int
    k_h: int
    v_t: int
    v_h: int


class Tiles(NamedTuple):
    """First row, begin and end of the document's keys for every tile, int32; shift: how far the document's
    queries stand from their own keys."""

    first: Tensor
    begin: Tensor
    end: Tensor
    shift: Tensor


class Saved(NamedTuple):
    """What the kernels of the backward read."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    lse: Tensor
    delta: Tensor


# ---- device code: operands come as two halves, (a, b); b is not used where one tile suffices ----


@triton.jit
def dot(a, b, acc):
    """acc + a b; float32 operands in three tensor core passes."""
    if a.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def load(base, row, stride, ok, FIRST: constexpr, TILE: constexpr, DIM: constexpr):
    """Rows x TILE channels from FIRST on, zero from DIM on."""
    col = FIRST + tl.arange(0, TILE)
    at = base + row[:, None] * stride + col[None, :]
    return tl.load(at, mask=ok[:, None] & (col < DIM)[None, :], other=0.0)


@triton.jit
def load_halves(base, row, stride, ok, X: constexpr):
    a = load(base, row, stride, ok, 0, X.A, X.ALL)
    # Something must stand here for the compiler; where B is 0 nobody reads it.
    b = a
    if X.B > 0:
        b = load(base, row, stride, ok, X.A, X.B, X.ALL)
    return a, b


@triton.jit
def zeros(ROWS: constexpr, COLUMNS: constexpr):
    return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def zero_halves(ROWS: constexpr, X: constexpr):
    return zeros(ROWS, X.A), zeros(ROWS, X.B if X.B > 0 else 16)


@triton.jit
def store(base, row, stride, ok, x, FIRST: constexpr, TILE: constexpr, DIM: constexpr):
    col = FIRST + tl.arange(0, TILE)
    keep = ok[:, None] & (col < DIM)[None, :]
    tl.store(base + row[:, None] * stride + col[None, :], x.to(base.dtype.element_ty), mask=keep)


@triton.jit
def store_halves(base, row, stride, ok, x, X: constexpr):
    store(base, row, stride, ok, x[0], 0, X.A, X.ALL)
    if X.B > 0:
        store(base, row, stride, ok, x[1], X.A, X.B, X.ALL)


@triton.jit
def inner(x, y, X: constexpr):
    """x y^T over both halves."""
    # The accumulator of the first half goes into the second product.
    acc = dot(x[0], tl.trans(y[0]), zeros(x[0].shape[0], y[0].shape[0]))
    if X.B > 0:
        acc = dot(x[1], tl.trans(y[1]), acc)
    return acc


@triton.jit
def add_product(acc, p, x, X: constexpr):
    """acc + p x, half by half."""
    a, b = dot(p, x[0], acc[0]), acc[1]
    if X.B > 0:
        b = dot(p, x[1], acc[1])
    return a, b


@triton.jit
def scores(q, k, key, stride, ok, S: constexpr):
    """Queries times the keys of a tile, [BM, BN], unscaled and unmasked."""
    # Keys are loaded half by half next to their product: fewer of them live at once.
    s = dot(q[0], tl.trans(load(k, key, stride, ok, 0, S.K.A, S.K.ALL)), zeros(S.BM, S.BN))
    if S.K.B > 0:
        s = dot(q[1], tl.trans(load(k, key, stride, ok, S.K.A, S.K.B, S.K.ALL)), s)
    return s


@triton.jit
def tile_of(tiles):
    """First row, begin and end of this program's tile."""
    tile = tl.program_id(0)
    first, begin = tl.load(tiles.first + tile).to(tl.int64), tl.load(tiles.begin + tile).to(tl.int64)
    return first, begin, tl.load(tiles.end + tile).to(tl.int64)


@triton.jit
def forward_keys(q, k, v, strides, place, end, begin, stop, m, l, acc, scale2, S: constexpr, MASK: constexpr):
    """Maximum, sum and output of the softmax, brought forward over the keys begin .. stop."""
    for n in range(begin, stop, S.BN):
        key = n + tl.arange(0, S.BN).to(tl.int64)
        ok = key < end
        s = scores(q, k, key, strides.k_t, ok, S) * scale2
        if MASK:
            visible = ok[None, :]
            if S.CAUSAL:
                visible = visible & (key[None, :] <= place[:, None])
            s = tl.where(visible, s, float("-inf"))
        # Online softmax: what was summed so far shrinks when a larger logit turns up.
        new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(m - new)
        l = l * shrink + tl.sum(p, axis=1)
        m = new
        v_a = load(v, key, strides.v_t, ok, 0, S.V.A, S.V.ALL)
        p = p.to(v_a.dtype)
        a, b = dot(p, v_a, acc[0] * shrink[:, None]), acc[1]
        if S.V.B > 0:
            b = dot(p, load(v, key, strides.v_t, ok, S.V.A, S.V.B, S.V.ALL), acc[1] * shrink[:, None])
        acc = a, b
    return m, l, acc


@triton.jit
def flash_forward(q, k, v, o, lse, tiles, scale, strides, S: constexpr):
    """o [T, H, V] and lse [T, H]. Grid (query tiles, H)."""
    head = tl.program_id(1).to(tl.int64)
    first, begin, end = tile_of(tiles)
    row = first + tl.arange(0, S.BM)
    # Appended queries: row counts the new tokens, place their keys.
    first += tl.load(tiles.shift + tl.program_id(0)).to(tl.int64)
    place = first + tl.arange(0, S.BM)  # of the queries among the keys
    ok = place < end
    k, v = k + head * strides.k_h, v + head * strides.v_h
    # Queries stay in registers for the whole walk.
    queries = load_halves(q + head * strides.q_h, row, strides.q_t, ok, S.K)
    BM: constexpr = S.BM
    m, l = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    acc = zero_halves(S.BM, S.V)

    # Keys that every row of the tile sees need no mask; the rest does.
    scale2 = scale * LOG2E
    stop = tl.minimum(first + S.BM, end) if S.CAUSAL else end
    seen = tl.minimum(first + 1, end) - begin if S.CAUSAL else end - begin
    whole = begin + seen // S.BN * S.BN
    m, l, acc = forward_keys(queries, k, v, strides, place, end, begin, whole, m, l, acc, scale2, S, False)
    m, l, acc = forward_keys(queries, k, v, strides, place, end, whole, stop, m, l, acc, scale2, S, True)
    out = acc[0] / l[:, None], acc[1] / l[:, None]
    store_halves(o + head * S.V.ALL, row, S.H * S.V.ALL, ok, out, S.V)
    tl.store(lse + row * S.H + head, (m + tl.log2(l)) * LN2, mask=ok)


@triton.jit
def row_dots(o, do, delta, rows, V: constexpr, VP: constexpr, BR: constexpr):
    """delta = <o, do> of every (token, head)."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    ok = row < rows
    left, right = load(o, row, V, ok, 0, VP, V), load(do, row, V, ok, 0, VP, V)
    tl.store(delta + row, tl.sum(left.to(tl.float32) * right.to(tl.float32), axis=1), mask=ok)


@triton.jit
def query_rows(x, head, row, ok, strides, S: constexpr):
    """(q, dO, lse, delta) of rows of one head."""
    q = load_halves(x.q + head * strides.q_h, row, strides.q_t, ok, S.K)
    do = load_halves(x.do + head * S.V.ALL, row, S.H * S.V.ALL, ok, S.V)
    # P is recomputed from the log-sum-exp, so nothing of size [T, T] was ever kept.
    lse = tl.load(x.lse + row * S.H + head, mask=ok, other=0.0)
    return q, do, lse, tl.load(x.delta + row * S.H + head, mask=ok, other=0.0)


@triton.jit
def key_rows(x, head, key, ok, strides, S: constexpr):
    """(k, v) of rows of one head."""
    k = load_halves(x.k + head * strides.k_h, key, strides.k_t, ok, S.K)
    v = load_halves(x.v + head * strides.v_h, key, strides.v_t, ok, S.V)
    return k, v


@triton.jit
def flash_backward_keys(x, dk, dv, tiles, scale, strides, S: constexpr):
    """dk [T, G, D] and dv [T, G, V]. Grid (key tiles, G)."""
    head = tl.program_id(1).to(tl.int64)
    first, begin, end = tile_of(tiles)
    key = first + tl.arange(0, S.BN)
    ok_n = key < end
    k, v = key_rows(x, head, key, ok_n, strides, S)
    dk_sum, dv_sum = zero_halves(S.BN, S.K), zero_halves(S.BN, S.V)
    # Causal: queries before the tile's first key see none of it.
    for start in range(first if S.CAUSAL else begin, end, S.BM):
        row = start + tl.arange(0, S.BM)
        ok_m = row < end
        q, do, lse, delta = query_rows(x, head, row, ok_m, strides, S)
        visible = ok_n[:, None] & ok_m[None, :]
        if S.CAUSAL:
            visible = visible & (key[:, None] <= row[None, :])
        s = inner(k, q, S.K)
        p = tl.where(visible, tl.exp2(s * (scale * LOG2E) - (lse * LOG2E)[None, :]), 0.0)
        dv_sum = add_product(dv_sum, p.to(q[0].dtype), do, S.V)
        # dO V^T - delta: how much better a key's value is than the mixture.
        ds = (p * (inner(v, do, S.V) - delta[None, :])).to(q[0].dtype)
        dk_sum = add_product(dk_sum, ds, q, S.K)
    dk_sum = dk_sum[0] * scale, dk_sum[1] * scale
    store_halves(dk + head * S.K.ALL, key, S.H * S.K.ALL, ok_n, dk_sum, S.K)
    store_halves(dv + head * S.V.ALL, key, S.H * S.V.ALL, ok_n, dv_sum, S.V)


@triton.jit
def flash_backward_queries(x, dq, tiles, scale, strides, S: constexpr):
    """dq [T, H, D]. Grid (query tiles, H)."""
    head = tl.program_id(1).to(tl.int64)
    first, begin, end = tile_of(tiles)
    row = first + tl.arange(0, S.BM)
    ok_m = row < end
    q, do, lse, delta = query_rows(x, head, row, ok_m, strides, S)
    dq_sum = zero_halves(S.BM, S.K)
    for n in range(begin, tl.minimum(first + S.BM, end) if S.CAUSAL else end, S.BN):
        key = n + tl.arange(0, S.BN)
        ok_n = key < end
        k, v = key_rows(x, head, key, ok_n, strides, S)
        s, dp = inner(q, k, S.K), inner(do, v, S.V)
        visible = ok_n[None, :] & ok_m[:, None]
        if S.CAUSAL:
            visible = visible & (key[None, :] <= row[:, None])
        p = tl.where(visible, tl.exp2(s * (scale * LOG2E) - (lse * LOG2E)[:, None]), 0.0)
        ds = (p * (dp - delta[:, None])).to(q[0].dtype)
        dq_sum = add_product(dq_sum, ds, k, S.K)
    dq_sum = dq_sum[0] * scale, dq_sum[1] * scale
    store_halves(dq + head * S.K.ALL, row, S.H * S.K.ALL, ok_m, dq_sum, S.K)


# ---- host ----


def split_dim(width: int) -> Dim:
    """A head dim in tiles without waste."""
    # Tensor cores take no fewer than 16.
    large = max(16, 1 << (width.bit_length() - 1))
    return Dim(width, large, max(16, power_of_two(width - large)) if width > large else 0)


def launch_sizes(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, longest: int, backward: bool = False
) -> tuple[Sizes, Strides, dict[str, int]]:
    """Tiles that fit into registers without spilling on the architecture, strides, and the launch options.

    longest: tokens of the longest document."""
    heads, key_dim, value_dim, arch = q.shape[1], q.shape[2], v.shape[2], hardware(q.device).arch
    stages = 2
    if q.dtype == torch.float32:
        rows, keys, warps = 32, 32, 4
    elif arch < 90 and backward:  # operands live in registers there, where 192 columns leave room for 16 keys
        rows, keys, warps = 32, 16 if max(key_dim, value_dim) > 128 else 32, 4
    elif arch < 90:
        rows, keys, warps = 64, 32, 8 if max(key_dim, value_dim) > 128 else 4
    elif backward:
        rows, keys, warps = 64, 64, 8
    else:
        rows, keys, warps = 128, 64, 8
        # As many as shared memory holds.
        stages = 3 if key_dim + value_dim <= 320 else 2
    # Short documents: tiles larger than the longest would idle.
    short = max(16, power_of_two(longest))
    rows, keys = min(rows, short), min(keys, short)
    K, V = (constant(split_dim(width), flash_forward) for width in (key_dim, value_dim))
    sizes = Sizes(heads, causal, K, V, rows, keys)
    strides = Strides(*[stride for x in (q, k, v) for stride in x.stride()[:2]])
    return sizes, strides, {"num_warps": warps if rows > 32 else 4, "num_stages": stages}


def query_tiles(
    segments: Segments, rows: int, device: torch.device, key_segments: Segments | None = None
) -> Tiles:
    """Tiles of so many rows, longest documents first; cached. key_segments: those of all tokens, where the
    queries are the newest of them."""
    keys = key_segments or segments

    def build() -> Tiles:
        table = []
        documents = zip(segments.offsets, segments.lengths, keys.offsets, keys.lengths)
        # Longest first, so that the last programs to start are short ones.
        for first, new, begin, length in sorted(documents, key=lambda document: -document[3]):
            end = begin + length
            # The newest token of the queries is the newest of the keys.
            shift = end - (first + new)
            table += [(row, begin, end, shift) for row in range(first, first + new, rows)]
        return Tiles(*torch.tensor(table, dtype=torch.int32).T.contiguous().to(device))

    return segments.cached(("attention.tiles", rows, keys.lengths, str(device)), build)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, keys: Segments | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(o, lse). keys: those of all tokens, where the queries are the newest of them."""
    sizes, strides, options = launch_sizes(q, k, v, causal, (keys or segments).max_length)
    tiles = query_tiles(segments, sizes.BM, q.device, keys)
    o = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    with on_device(q):
        flash_forward[(tiles.first.shape[0], sizes.H)](
            q, k, v, o, lse, tiles, scale, strides, S=sizes, **options
        )
    return o, lse


class FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        o, lse = _forward(q, k, v, segments, None, causal, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.settings = segments, causal, scale
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        segments, causal, scale = ctx.settings
        x = Saved(q, k, v, do.to(o.dtype).contiguous(), lse, torch.empty_like(lse))
        dq, dk, dv = (torch.empty(part.shape, dtype=part.dtype, device=q.device) for part in (q, k, v))
        sizes, strides, options = launch_sizes(q, k, v, causal, segments.max_length, backward=True)
        # The same table at another tile height: which rows a tile covers does not say what is in them.
        by_key = query_tiles(segments, sizes.BN, q.device)
        by_query = query_tiles(segments, sizes.BM, q.device)
        rows, width = lse.numel(), v.shape[2]
        last = scale, strides
        with on_device(q):
            row_dots[(triton.cdiv(rows, 16),)](
                o, x.do, x.delta, rows, V=width, VP=max(16, power_of_two(width)), BR=16
            )
            flash_backward_keys[(by_key.first.shape[0], sizes.H)](
                x, dk, dv, by_key, *last, S=sizes, **options
            )
            flash_backward_queries[(by_query.first.shape[0], sizes.H)](
                x, dq, by_query, *last, S=sizes, **options
            )
        return dq, dk, dv, None, None, None


def prefers_torch(q_THD: Tensor, k_THD: Tensor, v_THV: Tensor) -> bool:
    """Whether torch's variable-length kernel runs this: no gradient is asked for (its backward adds up with
    atomics, so two runs would differ), half precision, equal dims of a multiple of 8, which it does not pad.
    """
    # Without a gradient there are no atomics either.
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q_THD, k_THD, v_THV))
    return not trains and q_THD.shape[-1] == v_THV.shape[-1] and varlen.varlen_available(q_THD, v_THV)


def operands(**tensors: Tensor) -> list[Tensor]:
    """The tensors in the dtype they are multiplied in, channels side by side.

    Raises:
        ValueError: naming the argument of a wrong dtype, device or head dim.
    """
    first, *_ = tensors.values()
    check_tensors("attention", first, FLOATS, "any", **tensors)
    for name, tensor in tensors.items():
        if tensor.shape[2] > 256:
            raise ValueError(
                f"attention: {name} has head dim {tensor.shape[2]}; the kernels take at most 256"
            )
    dtype = compute_dtype(*tensors.values())
    # Under autocast the operands are what F.linear would have made of them.
    wide = [tensor.to(dtype) for tensor in tensors.values()]
    return [x if x.stride(2) == 1 else x.contiguous() for x in wide]


def attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THV: Tensor,
    segments: Segments,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Softmax attention, documents isolated; see :func:`earlyfusion.kernels.attention.naive.attention`.

    torch's own variable-length kernel where it fits exactly and no gradient is asked for (`prefers_torch`),
    else the kernels of this file. An empty row goes to plain torch. Any strides with contiguous channels are
    read in place.

    Raises:
        ValueError: head counts, dims, dtypes or devices do not fit, the row does not match ``segments``, or a
            head dim is over 256.
    """
    check_attention(q_THD, k_THD, v_THV, segments)
    q, k, v = operands(q_THD=q_THD, k_THD=k_THD, v_THV=v_THV)
    if segments.total == 0 or prefers_torch(q, k, v):
        return varlen.attention(q, k, v, segments, causal=causal, scale=scale)
    return FlashAttention.apply(q, k, v, segments, causal, scale)


@torch.no_grad()
def attention_append(
    q_THD: Tensor, k_LHD: Tensor, v_LHV: Tensor, segments: Segments, key_segments: Segments, *, scale: float
) -> Tensor:
    """See :func:`earlyfusion.kernels.attention.naive.attention_append`; there is no backward pass.

    Raises:
        ValueError: as there, or a dtype, device or head dim (over 256) that the kernel does not take.
    """
    check_append(q_THD, k_LHD, v_LHV, segments, key_segments)
    q, k, v = operands(q_THD=q_THD, k_LHD=k_LHD, v_LHV=v_LHV)
    if segments.total == 0:
        return q.new_empty(0, q.shape[1], v.shape[2])
    return _forward(q, k, v, segments, key_segments, True, scale)[0]


# ---- the largest logit without asking the host ----


@triton.jit
def largest_logits(
    q, k, lse, bound_H, floor_H, best_PH, tiles, scale, tau, strides, S: tl.constexpr, HP: tl.constexpr
):
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, begin, end = tile_of(tiles)
    heads = tl.arange(0, HP)
    bounds = tl.load(bound_H + heads, mask=heads < S.H, other=float("-inf"))
    row = first + tl.arange(0, S.BM)
    sums = tl.load(lse + row * S.H + head, mask=row < end, other=float("-inf"))
    # A row can hold the maximum only if its log-sum-exp reaches the floor; and nobody needs it below tau.
    wanted = (sums >= tl.load(floor_H + head)) & (tl.max((bounds > tau).to(tl.int32), axis=0) > 0)
    queries = load_halves(q + head * strides.q_h, row, strides.q_t, wanted, S.K)
    k += head * strides.k_h
    BM: tl.constexpr = S.BM
    best = tl.full([BM], float("-inf"), tl.float32)

    # A tile of which no row is wanted walks over no key.
    stop = tl.minimum(first + BM, end) if S.CAUSAL else end
    stop = tl.where(tl.max(wanted.to(tl.int32), axis=0) > 0, stop, begin)
    for n in range(begin, stop, S.BN):
        key = n + tl.arange(0, S.BN).to(tl.int64)
        ok = key < end
        s = scores(queries, k, key, strides.k_t, ok, S) * scale
        visible = ok[None, :] & wanted[:, None]
        if S.CAUSAL:
            visible = visible & (key[None, :] <= row[:, None])
        best = tl.maximum(best, tl.max(tl.where(visible, s, float("-inf")), axis=1))
    tl.store(best_PH + tile.to(tl.int64) * S.H + head, tl.max(best, axis=0))


@torch.no_grad()
def max_logit(
    q_THD: Tensor,
    k_THD: Tensor,
    lse_TH: Tensor,
    segments: Segments,
    *,
    causal: bool,
    scale: float,
    tau: float,
) -> Tensor:
    """As :func:`earlyfusion.kernels.attention.varlen.max_logit`, without its host sync.

    An empty row goes to that form.

    Raises:
        ValueError: the row does not match ``segments``, the log-sum-exp is not float32 [T, H], or a head dim
            is over 256.
    """
    check_shapes("max_logit", {"T": segments.total}, q_THD=q_THD, k_THD=k_THD, lse_TH=lse_TH)
    q, k = operands(q_THD=q_THD, k_THD=k_THD)
    if segments.total == 0:
        return varlen.max_logit(q, k, lse_TH, segments, causal=causal, scale=scale, tau=tau)
    check_tensors("max_logit", q, (torch.float32,), "any", lse_TH=lse_TH)
    # From here on nothing asks the host.
    lse_TH = lse_TH.contiguous()
    bound_H, floor_H = lse_TH.amax(dim=0), varlen.floors(lse_TH, segments, causal)
    sizes, strides, options = launch_sizes(q, k, k, causal, segments.max_length)
    tiles = query_tiles(segments, sizes.BM, q.device)
    best_PH = lse_TH.new_empty(tiles.first.shape[0], sizes.H)
    padded = power_of_two(sizes.H)
    with on_device(q):
        largest_logits[best_PH.shape](
            q, k, lse_TH, bound_H, floor_H, best_PH, tiles, scale, tau, strides, S=sizes, HP=padded, **options
        )
    # Below tau the bound is the answer: QK-Clip only compares.
    return torch.where((bound_H > tau).any(), best_PH.amax(dim=0), bound_H)
