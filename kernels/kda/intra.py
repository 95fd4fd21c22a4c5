"""Inside one chunk: pair scores with per-channel decay, decayed queries and keys, and the triangular inverse.

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

Legend: B chunks times heads, C tokens per chunk, K key dim, b half-segment length, n segments per chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


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


@dataclass
# What the levels hold is read once, in the opposite order.
class Tree:
    """Decayed operands of one chunk, and what the backward sweep needs of the levels below the top."""

    q_BCK: Tensor  # q e^{G}
    k_BCK: Tensor  # k e^{G}
    tail_BCK: Tensor  # k e^{G_C - G}
    carry_BK: Tensor  # e^{G_C}
    levels: list[tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=list
    )  # late [Bn, 2b, K], early, decays


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
