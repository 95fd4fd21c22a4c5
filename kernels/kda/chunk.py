"""Kimi Delta Attention in chunks: the quick torch form, with a hand-written backward.

With K^ = k e^{G}, K~ = k e^{G_C - G}, Q^ = scale q e^{G}, P and T = (I + L)^{-1} as below, S
the state before a chunk and S' the state after it:

    W = T (beta K^),   R = T (beta V) - W S,   O = Q^ S + P R
    S' = M S + K~^T T (beta V),   M = diag(e^{G_C}) - K~^T W

All chunks are worked on together; only the K x K by K x V recursion of the states is sequential, and it runs
level by level over all documents (see the end of this text). Backward, with dO and the gradient dS' of
the state after the chunk:

    Z = P^T dO,  dS = Q^^T dO - W^T Z + M^T dS',  E = T^T (Z + K~ dS'),  dV = beta E
    dP = tril(dO R^T),  dA = -stril(dV R^T),  dQ^ = dO S^T,  dK^ = -dV S^T,  dK~ = R dS'^T
    db = (1 - beta) sum_v E R                  (b are the logits of beta)
    dG = q dq + k (dk_row - dk_column), plus sum_v S' dS' in the last row;  dg_t = sum of dG over t and after

where A holds the decayed products k_i k_j. Saved for the backward: the inputs, P, T, R and the states.
Everything inside is float32 (float64 for float64 inputs), whatever autocast says.

Inside one chunk: pair scores with per-channel decay, decayed queries and keys, and the triangular inverse.

The scores need sum_d q_id k_jd e^{G_id - G_jd} for i >= j, with G the running sum of the log decay. No matrix
product can have the decay split off at a single anchor without one factor growing beyond bounds. Here every
pair (i > j) is met at one level of a binary tree: at level b the chunk falls into segments of 2 b tokens, the
later half holds i and the earlier half j, and the anchor is the edge between them. Both factors then decay
away from the edge,

    I_b(i) = prod of alpha from the edge to i,   Q_b(j) = prod of alpha after j up to the edge,

each a product of numbers in [0, 1]: nothing can overflow for any gate, and row i never sees a gate after i.
The factors of level 2 b are those of level b times the whole decay of the neighbouring segment, so one
exponential per token and channel serves all levels, and at the top I is e^{G} and Q is e^{G_C - G}. A
document start has alpha = 0, which removes exactly the pairs, state reads and state writes that would cross
it.

The inverse of I + L (L strictly lower) is merged bottom-up along the same tree, [[T1, 0], [-T2 L21 T1, T2]]:
block forward substitution, no powers of L, so it is stable for correlated keys.

Definition: kernels/kda/naive.py. Source of the recurrence: Kimi Linear technical report (arXiv 2510.26692),
section 3.

Legend: T tokens, D documents, N chunks, C tokens per chunk, H query/key heads, G value heads, K key dim, V
value dim, B = N * G.

Chunk grids: how the tokens of a packed row are cut into chunks, and in which order chunk states depend on
each other.

Two grids. The *flat* grid lays chunks of C tokens over the whole row without regard to documents; a document
start inside a chunk is a token whose decay is set to zero, which cuts everything before it off. It pads at
most C - 1 tokens in all, however short the documents are. The *aligned* grid begins a new chunk at every
document, so that a document's state before its first and after its last token are chunk states; it is used
when states go in or come out.

The state S of chunk c obeys S_out[c] = M[c] S_in[c] + b[c] with S_in[c] = S_out[c - 1]. A chunk with a
document start has M = 0: its outgoing state does not depend on the incoming one. Chunks therefore fall into
chains, and the scan runs level by level over all chains at once: as many steps as the longest document has
chunks, not as many as the row has.

Legend: T tokens, N chunks, C tokens per chunk, D documents, G value heads, K key dim, V value dim, B = N * G.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.kda.naive import L2_EPS
from earlyfusion.kernels.products import wide_dtype, without_autocast
from earlyfusion.kernels.segments import Inputs, Segments, check_kda


@dataclass(frozen=True)
# Longer chains first, so that the chunks of a level are a prefix of those of the level before: each step
# then works on contiguous memory, without gathering.
class Scan:
    """Chunks ordered by level: all chain heads, then all second chunks, ... with longer chains first in every
    level."""

    levels: tuple[tuple[int, int], ...]  # (first, count) of each level in that order; counts never grow
    order_N: Tensor | None  # chunk at each place of the order, None if the order is 0, 1, 2, ...
    inverse_N: Tensor | None

    def arrange(self, x_N: Tensor) -> Tensor:
        """A copy of ``x_N`` (chunks first) in scan order."""
        return x_N.clone() if self.order_N is None else x_N.index_select(0, self.order_N)

    def restore(self, x_N: Tensor) -> Tensor:
        """Back from scan order to chunk order."""
        return x_N if self.inverse_N is None else x_N.index_select(0, self.inverse_N)


@dataclass(frozen=True)
class Grid:
    """One cut of a packed row into ``num`` chunks of ``chunk`` tokens."""

    chunk: int
    num: int
    total: int  # T, live tokens
    aligned: bool
    rows_T: Tensor | None  # row of every token in the padded row; None: tokens 0..T-1 stand in rows 0..T-1
    dead: Tensor  # rows that hold no token
    severed: Tensor  # rows whose decay is zero: document starts of the flat grid
    reach_NCC: (
        Tensor  # 1 where the gradient of row t's gate collects row i: i >= t, same document, t not severed
    )
    scan: Scan
    head_D: Tensor  # first and last chunk of every document (aligned grid only)
    tail_D: Tensor

    @property
    def padded(self) -> int:
        """Rows of the padded row, N * C."""
        return self.num * self.chunk

    def spread(self, x_T: Tensor) -> Tensor:
        """Tokens [T, ...] into padded rows [N * C, ...]; dead rows are zero. May return ``x_T`` itself."""
        # No copy where the row happens to fill its chunks.
        if self.padded == self.total:
            return x_T
        out = x_T.new_zeros(self.padded, *x_T.shape[1:])
        if self.rows_T is None:
            out[: self.total] = x_T
        else:
            out.index_copy_(0, self.rows_T, x_T)
        return out

    def gather(self, x_R: Tensor) -> Tensor:
        """Padded rows [N * C, ...] back to tokens [T, ...]."""
        if self.rows_T is None:
            return x_R[: self.total]
        return x_R.index_select(0, self.rows_T)

    def chunks(self, x_TGX: Tensor) -> Tensor:
        """Tokens as [N, G, C, X], a view of the padded row (not contiguous)."""
        x_RGX = self.spread(x_TGX)
        return x_RGX.view(self.num, self.chunk, *x_RGX.shape[1:]).transpose(1, 2)

    def batches(self, x_TGX: Tensor) -> Tensor:
        """Tokens as a contiguous [B, C, X]."""
        return self.chunks(x_TGX).contiguous().view(-1, self.chunk, x_TGX.shape[-1])

    def rows(self, x_BCX: Tensor) -> Tensor:
        """Chunks [B, C, X] back to tokens [T, G, X]."""
        x_NCGX = x_BCX.view(self.num, -1, self.chunk, x_BCX.shape[-1]).transpose(1, 2)
        return self.gather(x_NCGX.reshape(self.padded, -1, x_BCX.shape[-1]))


def _scan(heads: Sequence[bool], device: torch.device) -> Scan:
    """Levels of chains; ``heads[c]`` says that chunk c starts one (chunk 0 always does)."""
    chains: list[list[int]] = []
    for chunk, head in enumerate(heads):
        if head:
            chains.append([])
        chains[-1].append(chunk)
    # A stable sort: chunks of equal chains keep their order, and one chain needs no permutation at all.
    chains.sort(key=len, reverse=True)
    order: list[int] = []
    levels: list[tuple[int, int]] = []
    for level in range(len(chains[0])):
        members = [chain[level] for chain in chains if len(chain) > level]
        levels.append((len(order), len(members)))
        order += members
    # None lets arrange and restore leave the tensors where they are.
    if order == sorted(order):
        return Scan(tuple(levels), None, None)
    order_N = torch.tensor(order)
    return Scan(tuple(levels), order_N.to(device), order_N.argsort().to(device))


def _build(segments: Segments, chunk: int, aligned: bool, dtype: torch.dtype, device: torch.device) -> Grid:
    total, starts_D = segments.total, torch.tensor(segments.offsets[:-1])
    lengths_D, ids_T = torch.tensor(segments.lengths), segments.ids().long()
    rows_T, severed = torch.arange(total), starts_D
    if aligned:
        # Aligned: documents are pushed apart until each begins at a chunk.
        counts_D = (lengths_D + chunk - 1) // chunk
        tail_D = counts_D.cumsum(0) - 1
        # Where a document's states go in and come out.
        head_D = tail_D + 1 - counts_D
        rows_T, severed = rows_T + (head_D * chunk - starts_D)[ids_T], starts_D[:0]
        document_R = torch.arange(segments.num).repeat_interleave(counts_D * chunk)
        chains = head_D
    else:
        # Flat: chunks lie over the row, and a document start inside one severs it there.
        head_D = tail_D = starts_D[:0]
        document_R = torch.cat([ids_T, ids_T[-1:].expand(-total % chunk)])
        chains = starts_D // chunk
    num = document_R.shape[0] // chunk
    heads = torch.zeros(num, dtype=torch.bool).index_fill_(0, chains, True)
    # Rows without a token must neither forget nor write: their decay is 1, everything else 0.
    is_dead = torch.ones(num * chunk, dtype=torch.bool).index_fill_(0, rows_T, False)
    # A gate collects the gradients of the tokens after it, as far as its document goes.
    document_NC = document_R.view(num, chunk)
    same_NCC = document_NC[:, :, None] == document_NC[:, None, :]
    reach_NCC = torch.ones(chunk, chunk, dtype=torch.bool).triu() & same_NCC
    reach_NCC.view(num * chunk, chunk)[severed] = False
    return Grid(
        chunk=chunk,
        num=num,
        total=total,
        aligned=aligned,
        rows_T=None if not aligned or num * chunk == total else rows_T.to(device),
        dead=is_dead.nonzero().view(-1).to(device),
        severed=severed.to(device),
        reach_NCC=reach_NCC.to(device=device, dtype=dtype),
        scan=_scan(heads.tolist(), device),
        head_D=head_D.to(device),
        tail_D=tail_D.to(device),
    )


def chunk_grid(
    segments: Segments, chunk: int, aligned: bool, dtype: torch.dtype, device: torch.device
) -> Grid:
    """The grid of a row, built once per (segments, chunk, kind, dtype, device). The row must hold at least
    one token."""
    key = ("kda.grid", chunk, aligned, dtype, str(device))
    return segments.cached(key, lambda: _build(segments, chunk, aligned, dtype, device))


def scan_states(M_NGKK: Tensor, b_NGKV: Tensor, scan: Scan) -> Tensor:
    """States after every chunk: S'[c] = M[c] S'[c - 1] + b[c] along every chain, S' = b at its head."""
    # Only heads: every state is its own chunk's.
    if len(scan.levels) == 1:
        return b_NGKV
    M, S = scan.arrange(M_NGKK), scan.arrange(b_NGKV)
    for (source, _), (first, count) in zip(scan.levels, scan.levels[1:]):
        # The chunks of a level continue the first ones of the level before, in the same order.
        here, before = S[first : first + count].flatten(0, 1), S[source : source + count].flatten(0, 1)
        here.baddbmm_(M[first : first + count].flatten(0, 1), before)
    return scan.restore(S)


def scan_gradients(M_NGKK: Tensor, dS_NGKV: Tensor, scan: Scan) -> Tensor:
    """Gradients of the states after every chunk: D[c] = dS[c] + M[c + 1]^T D[c + 1] along every chain."""
    if len(scan.levels) == 1:
        return dS_NGKV
    M, D = scan.arrange(M_NGKK), scan.arrange(dS_NGKV)
    # The same walk backwards: each chunk hands its gradient to the one before it.
    for (source, _), (first, count) in reversed(list(zip(scan.levels, scan.levels[1:]))):
        M_here, D_here = M[first : first + count].flatten(0, 1), D[first : first + count].flatten(0, 1)
        D[source : source + count].flatten(0, 1).baddbmm_(M_here.transpose(1, 2), D_here)
    return scan.restore(D)


def chunk_states(
    M_BKK: Tensor, b_BKV: Tensor, initial_DGKV: Tensor | None, grid: Grid
) -> tuple[Tensor, Tensor]:
    """(state before, state after) every chunk, [N, G, K, V] each."""
    M = M_BKK.view(grid.num, -1, *M_BKK.shape[1:])
    b = b_BKV.view(grid.num, -1, *b_BKV.shape[1:])
    if initial_DGKV is not None:
        # A given state enters like the state of a chunk before the first.
        initial_DGKV = initial_DGKV.to(b.dtype)
        b = b.index_add(0, grid.head_D, M.index_select(0, grid.head_D) @ initial_DGKV)
    # One allocation for both results: "before" is "after" one chunk later.
    around = b.new_zeros(grid.num + 1, *b.shape[1:])
    around[1:] = scan_states(M, b, grid.scan)
    before, after = around[:-1], around[1:]
    if grid.aligned:
        # Chunk c - 1 of a document's first chunk belongs to another document.
        entering = 0.0 if initial_DGKV is None else initial_DGKV
        before = before.clone()
        before[grid.head_D] = entering
    return before, after


def _halves(x_BCK: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Earlier and later halves of the segments of 2 b rows, two views [B * n, b, K]."""
    batch, chunk, dim = x_BCK.shape
    pairs = x_BCK.view(batch * (chunk // (2 * b)), 2, b, dim)
    return pairs[:, 0], pairs[:, 1]


def _corners(x_BCC: Tensor, b: int) -> Tensor:
    """The blocks (later half, earlier half) of a contiguous [B, C, C], a view [B, n, b, b]."""
    batch, chunk, _ = x_BCC.shape
    # The blocks below the diagonal lie at equal distances: a view instead of a gather.
    strides = (chunk * chunk, 2 * b * (chunk + 1), chunk, 1)
    return x_BCC.as_strided((batch, chunk // (2 * b), b, b), strides, x_BCC.storage_offset() + b * chunk)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Batched matrix product; as a sum of outer products where the inner dimension is tiny (bmm is slow
    there)."""
    # Near the leaves of the tree the inner dimension is 1 or 2, and a batched product is all overhead.
    inner = right.shape[1]
    if inner > 4 or left.device.type != "cpu":
        return torch.bmm(left, right)
    out = left[:, :, :1] * right[:, :1]
    for i in range(1, inner):
        out.addcmul_(left[:, :, i : i + 1], right[:, i : i + 1])
    return out


# What the levels hold is read once, in the opposite order.
class Tree(NamedTuple):
    """Decayed operands of one chunk, and what the backward sweep needs of the levels below the top."""

    q_BCK: Tensor  # q e^{G}
    k_BCK: Tensor  # k e^{G}
    tail_BCK: Tensor  # k e^{G_C - G}
    carry_BK: Tensor  # e^{G_C}
    levels: list[tuple[Tensor, Tensor, Tensor]]  # late [Bn, 2b, K], early, decays


def climb(
    q_BCK: Tensor, k_BCK: Tensor, alpha_BCK: Tensor, beta_BC1: Tensor | None, keep: bool
) -> tuple[Tree, Tensor | None, Tensor | None]:
    """Decayed operands; with ``beta`` also P and T, with ``keep`` also the levels for :func:`descend`.

    Returns (tree, P_BCC, T_BCC): P_ij = q_i . (e^{G_i - G_j} k_j) for i >= j, T = (I + L)^{-1} with
    L_ij = beta_i k_i . (e^{G_i - G_j} k_j) for i > j.
    """
    batch, chunk, dim = k_BCK.shape
    q, k, tail, whole = q_BCK * alpha_BCK, k_BCK * alpha_BCK, k_BCK.clone(), alpha_BCK
    levels: list[tuple[Tensor, Tensor, Tensor]] = []
    # The backward asks for the decayed operands alone: P and T were saved.
    P_BCC = T = None
    if beta_BC1 is not None:
        P_BCC = q.new_zeros(batch, chunk, chunk)
        P_BCC.diagonal(dim1=1, dim2=2).copy_((q_BCK * k_BCK).sum(-1))
        T = q.new_ones(batch * chunk, 1, 1)
    b = 1
    while b < chunk:
        # Every pair of this level has its key in an earlier half and its query in the later one.
        early, late_q, late_k = _halves(tail, b)[0], _halves(q, b)[1], _halves(k, b)[1]
        decays = whole.view(-1, 2, 1, dim)
        # q and k meet the same keys: one product gives both score matrices.
        late = torch.cat([late_q, late_k], dim=1)
        if beta_BC1 is not None and P_BCC is not None and T is not None:
            scores = torch.bmm(late, early.transpose(1, 2))
            _corners(P_BCC, b).copy_(scores[:, :b].view(batch, -1, b, b))
            T = _merge(T, scores[:, b:], _halves(beta_BC1, b)[1])
        # Before they are scaled for the next level.
        if keep:
            levels.append((late, early.clone(), decays))
        # One level up the edge is farther away by a whole half.
        late_q *= decays[:, 0]
        late_k *= decays[:, 0]
        early *= decays[:, 1]
        whole = decays[:, 0] * decays[:, 1]
        b *= 2
    return Tree(q, k, tail, whole.view(batch, dim), levels), P_BCC, T


def _merge(T: Tensor, scores: Tensor, beta: Tensor) -> Tensor:
    """Inverses [2 M, b, b] of neighbouring diagonal blocks into [M, 2 b, 2 b]; L21 = beta * scores."""
    b = T.shape[-1]
    L21 = scores * beta
    # Two neighbours and the block between them.
    T = T.view(-1, 2, b, b)
    merged = T.new_zeros(T.shape[0], 2 * b, 2 * b)
    merged[:, :b, :b] = T[:, 0]
    merged[:, b:, b:] = T[:, 1]
    # A block of one is 1, and its correction the score alone.
    if b == 1:
        torch.neg(L21, out=merged[:, b:, :b])
    else:
        merged[:, b:, :b] = torch.bmm(torch.bmm(T[:, 1], L21), T[:, 0]).neg_()
    return merged


def descend(
    tree: Tree, dP_BCC: Tensor, dA_BCC: Tensor, dq_BCK: Tensor, dk_BCK: Tensor, dtail_BCK: Tensor
) -> None:
    """Gradients of the decayed operands into gradients of q, of k as a row and of k as a column, in place.

    Args:
        tree: made by :func:`climb` with ``keep``.
        dP_BCC, dA_BCC: gradients of the score matrices of q and k; only entries below the diagonal are read.
        dq_BCK, dk_BCK, dtail_BCK: on entry gradients of ``tree.q/k/tail``; on return, up to the factor alpha
        for dq and
            dk (the inclusive decay of a single token), the gradients of q, of k in rows and of k in columns.
    """
    batch, chunk, _ = dq_BCK.shape
    # From the root down: what came through the wider levels is decayed once more at each step.
    b = chunk
    for late, early, decays in reversed(tree.levels):
        b //= 2
        dscores = torch.empty(late.shape[0], 2, b, b, dtype=late.dtype, device=late.device)
        dscores[:, 0].view(batch, -1, b, b).copy_(_corners(dP_BCC, b))
        dscores[:, 1].view(batch, -1, b, b).copy_(_corners(dA_BCC, b))
        dscores = dscores.view(-1, 2 * b, b)
        dlate = _product(dscores, early)
        dearly = _product(dscores.transpose(1, 2), late)
        for target, update, decay in (
            (_halves(dq_BCK, b)[1], dlate[:, :b], decays[:, 0]),
            (_halves(dk_BCK, b)[1], dlate[:, b:], decays[:, 0]),
            (_halves(dtail_BCK, b)[0], dearly, decays[:, 1]),
        ):
            torch.addcmul(update, target, decay, out=target)


# Cheaper to make twice than to keep: five tensors of the size of the inputs, for one pass over them.
class _Operands(NamedTuple):
    """The inputs in chunks, normalised and activated; made again by the backward."""

    q_BCK: Tensor  # scale * q / |q|
    k_BCK: Tensor
    alpha_BCK: Tensor  # 0 at a severed row, 1 at a dead one
    beta_BC1: Tensor
    norm_q_TH1: Tensor  # scale / |q|
    norm_k_TH1: Tensor
    g_TGK: Tensor  # log of alpha, nats


def _normalized(x_THK: Tensor, scale: float, group: int, grid: Grid) -> tuple[Tensor, Tensor]:
    """(scale * x / |x| as [B, C, K], scale / |x| as [T, H, 1])."""
    # The norm is taken per query head, before the value heads of a group share it.
    norm_TH1 = torch.linalg.vecdot(x_THK, x_THK).add_(L2_EPS).rsqrt_().mul_(scale).unsqueeze(-1)
    x_NHCK = grid.chunks(x_THK)
    out = torch.empty(x_NHCK.shape, dtype=x_THK.dtype, device=x_THK.device)
    torch.mul(x_NHCK, grid.chunks(norm_TH1), out=out)
    if group > 1:
        out = out.repeat_interleave(group, dim=1)
    return out.view(-1, *out.shape[2:]), norm_TH1


def _normalize_backward(
    dy_BCK: Tensor, y_BCK: Tensor, norm_TH1: Tensor, scale: float, x: Tensor, group: int, grid: Grid
) -> Tensor:
    """Gradient of the raw q or k: (scale / |x|) (dy - y (y . dy) / scale^2)."""
    along_BC1 = torch.linalg.vecdot(y_BCK, dy_BCK).unsqueeze(-1)
    if group > 1:
        # The value heads of a group share one query: their gradients add up.
        shape = (grid.num, x.shape[1], group, grid.chunk, -1)
        flat = (-1, grid.chunk)
        dy_BCK = dy_BCK.view(shape).sum(2).reshape(*flat, dy_BCK.shape[-1])
        along_BC1 = along_BC1.view(shape).sum(2).reshape(*flat, 1)
        y_BCK = y_BCK.view(shape)[:, :, 0].reshape(*flat, y_BCK.shape[-1])
    dx_BCK = torch.addcmul(dy_BCK, y_BCK, along_BC1, value=-1.0 / scale**2)
    return grid.rows(dx_BCK).mul_(norm_TH1).to(x.dtype)


# ---- the forget gate ----


def _log_decay(x: Inputs, lower_bound: float | None) -> Tensor:
    """g_TGK as in the definition, its sums in place."""
    dtype = wide_dtype(x.f, x.A_log, x.dt_bias)
    rate_G1 = x.A_log.to(dtype).exp().unsqueeze(-1)
    x_TGK = x.f.to(dtype) + x.dt_bias.to(dtype)
    if lower_bound is None:
        return F.softplus(x_TGK).mul_(-rate_G1)
    return x_TGK.mul_(rate_G1).sigmoid_().mul_(lower_bound)


def _log_decay_backward(
    dg_TGK: Tensor, g_TGK: Tensor, x: Inputs, lower_bound: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (df_TGK, dA_log_G, ddt_bias_GK) from dg and the g that `_log_decay` returned.

    The derivative of the bounded gate is taken from its value, L * s * (1 - s) = g * (1 - g / L): it goes to
    exactly 0 where the sigmoid saturates, so a huge exp(A_log) never meets an infinity.
    """
    dtype = g_TGK.dtype
    rate_G1 = x.A_log.to(dtype).exp().unsqueeze(-1)
    x_TGK = x.f.to(dtype) + x.dt_bias.to(dtype)
    if lower_bound is None:
        dA_log_G = (dg_TGK * g_TGK).sum(0).sum(-1)
        df_TGK = x_TGK.sigmoid_().mul_(dg_TGK).mul_(-rate_G1)
    else:
        # From the value, not from the sigmoid again: where it saturates the difference is an exact zero.
        df_TGK = torch.addcmul(g_TGK, g_TGK, g_TGK, value=-1.0 / lower_bound).mul_(dg_TGK).mul_(rate_G1)
        dA_log_G = (df_TGK * x_TGK).sum(0).sum(-1)
    return df_TGK, dA_log_G, df_TGK.sum(0)


def _operands(x: Inputs, lower_bound: float | None, grid: Grid, dtype: torch.dtype) -> _Operands:
    group = x.v.shape[1] // x.q.shape[1]
    q_BCK, norm_q = _normalized(x.q.to(dtype), x.q.shape[2] ** -0.5, group, grid)
    k_BCK, norm_k = _normalized(x.k.to(dtype), 1.0, group, grid)

    g_TGK = _log_decay(x, lower_bound).to(dtype)
    alpha_TGK = g_TGK.exp()
    alpha_RGK = grid.spread(alpha_TGK)
    # A document start forgets everything before it; a row that holds no token forgets nothing.
    alpha_RGK.index_fill_(0, grid.severed, 0.0).index_fill_(0, grid.dead, 1.0)
    alpha_NCGK = alpha_RGK.view(grid.num, grid.chunk, *alpha_RGK.shape[1:])
    alpha_BCK = alpha_NCGK.transpose(1, 2).contiguous().view(-1, grid.chunk, alpha_RGK.shape[-1])
    beta_BC1 = grid.batches(torch.sigmoid(x.b.to(dtype)).unsqueeze(-1))
    return _Operands(q_BCK, k_BCK, alpha_BCK, beta_BC1, norm_q, norm_k, g_TGK)


class _ChunkKDA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, lower_bound: float | None, grid: Grid, initial: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = Inputs(*tensors)
        dtype, value_dim = wide_dtype(x.q, x.v), x.v.shape[2]
        with without_autocast(x.q):
            made = _operands(x, lower_bound, grid, dtype)
            tree, P, T = climb(made.q_BCK, made.k_BCK, made.alpha_BCK, made.beta_BC1, keep=False)
            # With beta there are scores; mypy cannot know.
            assert P is not None and T is not None

            # What every chunk makes of the state that enters it: S' = M S + b.
            vk_BCX = torch.cat([grid.batches(x.v.to(dtype)), tree.k_BCK], dim=-1).mul_(made.beta_BC1)
            RW_BCX = torch.bmm(T, vk_BCX)
            bM_BKX = torch.bmm(tree.tail_BCK.transpose(1, 2), RW_BCX)
            M = bM_BKX[..., value_dim:].neg()
            M.diagonal(dim1=1, dim2=2).add_(tree.carry_BK)
            before, after = chunk_states(M, bM_BKX[..., :value_dim], initial, grid)

            S = before.flatten(0, 1)
            # What the tokens really write: their values less what the incoming state already predicts.
            R = torch.baddbmm(RW_BCX[..., :value_dim], RW_BCX[..., value_dim:], S, alpha=-1.0)
            o = grid.rows(torch.bmm(tree.q_BCK, S).baddbmm_(P, R)).to(x.v.dtype)
            # Empty on the flat grid, where nobody asked for states.
            final = after.index_select(0, grid.tail_D)
        ctx.save_for_backward(initial, P, T, R, before, after, *x)
        ctx.settings = lower_bound, grid
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        initial, P, T, R, before, after, *tensors = ctx.saved_tensors
        x, (lower_bound, grid), dtype = Inputs(*tensors), ctx.settings, R.dtype
        group, scale = x.v.shape[1] // x.q.shape[1], x.q.shape[2] ** -0.5
        with without_autocast(x.q):
            made = _operands(x, lower_bound, grid, dtype)
            tree, _, _ = climb(made.q_BCK, made.k_BCK, made.alpha_BCK, None, keep=True)

            # Through the states: D is the gradient of the state after every chunk.
            do_BCV = grid.batches(do.to(dtype))
            Z = torch.bmm(P.transpose(1, 2), do_BCV)
            D_BKV, dinitial = _state_gradients(tree, T, made.beta_BC1, do_BCV, Z, dfinal, initial, grid)
            E = torch.bmm(T.transpose(1, 2), Z.baddbmm_(tree.tail_BCK, D_BKV))
            db_BC1 = (1.0 - made.beta_BC1) * torch.linalg.vecdot(E, R).unsqueeze(-1)
            minus_dV = E.mul_(made.beta_BC1).neg_()

            # Through the pairs inside the chunks.
            R_t, S_t = R.transpose(1, 2), before.flatten(0, 1).transpose(1, 2)
            dP = torch.bmm(do_BCV, R_t)
            dq, dk = torch.bmm(do_BCV, S_t), torch.bmm(minus_dV, S_t)
            dtail = torch.bmm(R, D_BKV.transpose(1, 2))
            descend(tree, dP, torch.bmm(minus_dV, R_t), dq, dk, dtail)
            dq.mul_(made.alpha_BCK)
            dk.mul_(made.alpha_BCK)

            # The log decay: each token's gate collects what all tokens after it read across it.
            dG_BCK = (dk - dtail).mul_(made.k_BCK).addcmul_(made.q_BCK, dq)
            dG_BCK[:, -1] += torch.linalg.vecdot(after.flatten(0, 1), D_BKV)
            dG_NGCK = dG_BCK.view(grid.num, -1, *dG_BCK.shape[1:])
            dG_NCX = dG_NGCK.transpose(1, 2).reshape(grid.num, grid.chunk, -1)
            dg_NCX = torch.bmm(grid.reach_NCC, dG_NCX)
            dg_TGK = grid.gather(dg_NCX.view(grid.padded, *x.f.shape[1:]))
            # A token that keeps less than the machine epsilon of the state passes its gate no gradient beyond
            # the rounding noise of the running sum, and the factor exp(A_log) of the gate would amplify that
            # noise.
            dg_TGK = dg_TGK.masked_fill(made.g_TGK < math.log(torch.finfo(dtype).eps), 0.0)
            df, dA_log, ddt_bias = _log_decay_backward(dg_TGK, made.g_TGK, x, lower_bound)

            # A token reading itself: no decay in between.
            same_BC1 = dP.diagonal(dim1=1, dim2=2).unsqueeze(-1)
            dq.addcmul_(made.k_BCK, same_BC1)
            dk.add_(dtail).addcmul_(made.q_BCK, same_BC1)
            return (
                None,
                None,
                dinitial,
                _normalize_backward(dq, made.q_BCK, made.norm_q_TH1, scale, x.q, group, grid),
                _normalize_backward(dk, made.k_BCK, made.norm_k_TH1, 1.0, x.k, group, grid),
                grid.rows(minus_dV.neg_()).to(x.v.dtype),
                df.to(x.f.dtype),
                grid.rows(db_BC1).squeeze(-1).to(x.b.dtype),
                dA_log.to(x.A_log.dtype),
                ddt_bias.to(x.dt_bias.dtype),
            )


def _state_gradients(
    tree: Tree,
    T: Tensor,
    beta_BC1: Tensor,
    do_BCV: Tensor,
    Z_BCV: Tensor,
    dfinal_DGKV: Tensor,
    initial_DGKV: Tensor | None,
    grid: Grid,
) -> tuple[Tensor, Tensor | None]:
    """(gradient of the state after every chunk as [B, K, V], gradient of the initial states)."""
    W = torch.bmm(T, tree.k_BCK * beta_BC1)
    M = torch.bmm(tree.tail_BCK.transpose(1, 2), W).neg_()
    M.diagonal(dim1=1, dim2=2).add_(tree.carry_BK)
    local = torch.bmm(tree.q_BCK.transpose(1, 2), do_BCV).baddbmm_(W.transpose(1, 2), Z_BCV, alpha=-1.0)
    # Chunks first again: the recursion runs over them.
    M_NGKK = M.view(grid.num, -1, *M.shape[1:])
    local_NGKV = local.view(grid.num, -1, *local.shape[1:])
    D_NGKV = torch.zeros_like(local_NGKV)
    # What the next chunk reads of the state is its gradient here.
    D_NGKV[:-1] = local_NGKV[1:]
    # The state after a document's last token is an output: its gradient starts there.
    if grid.aligned:
        D_NGKV.index_copy_(0, grid.tail_D, dfinal_DGKV.to(D_NGKV.dtype))
    D_NGKV = scan_gradients(M_NGKK, D_NGKV, grid.scan)
    dinitial = None
    if initial_DGKV is not None:
        M_D, D_D = M_NGKK.index_select(0, grid.head_D), D_NGKV.index_select(0, grid.head_D)
        dinitial = local_NGKV.index_select(0, grid.head_D) + M_D.transpose(2, 3) @ D_D
        dinitial = dinitial.to(initial_DGKV.dtype)
    return D_NGKV.flatten(0, 1), dinitial


def kda(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    f_TGK: Tensor,
    b_TG: Tensor,
    A_log_G: Tensor,
    dt_bias_GK: Tensor,
    segments: Segments,
    *,
    lower_bound: float | None = None,
    initial_state_NGKV: Tensor | None = None,
    output_final_state: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """KDA over packed documents; arguments and results as in :func:`earlyfusion.kernels.kda.naive.kda`.

    Differentiable once, in every tensor. ``chunk`` (a power of two, at least 2, by default chosen from K)
    only changes speed and rounding.

    Raises:
        ValueError: shapes do not fit each other or the segments, or ``chunk`` is not a power of two.
    """
    x = Inputs(q_THK, k_THK, v_TGV, f_TGK, b_TG, A_log_G, dt_bias_GK)
    sizes = check_kda("kda", x, segments.total, lower_bound)
    if chunk is None:
        # Measured fastest on a CPU.
        chunk = 32 if sizes["K"] <= 64 else 64
    # The tree inside a chunk halves it down to single tokens.
    if chunk < 2 or chunk & (chunk - 1):
        raise ValueError(f"kda: chunk={chunk}; expected a power of two, at least 2, or None for the default")
    dtype = wide_dtype(q_THK, v_TGV)
    if segments.total == 0:
        state = v_TGV.new_zeros((0, sizes["G"], sizes["K"], sizes["V"]), dtype=dtype)
        return v_TGV.clone(), state if output_final_state else None

    # States come in or go out at document borders, which then must be chunk borders.
    aligned = output_final_state or initial_state_NGKV is not None

    def run(aligned: bool) -> tuple[Tensor, Tensor]:
        grid = chunk_grid(segments, chunk, aligned, dtype, q_THK.device)
        found: tuple[Tensor, Tensor] = _ChunkKDA.apply(lower_bound, grid, initial_state_NGKV, *x)
        return found

    o_TGV, final_NGKV = run(aligned)
    if not aligned and segments.num > 1 and not o_TGV.detach().sum().isfinite():
        # Zero times NaN is NaN: in a chunk that documents share, one broken token would reach its neighbours
        # through the masked products. The aligned grid gives no chunk to two documents.
        o_TGV, final_NGKV = run(True)
    return o_TGV, final_NGKV if output_final_state else None
