"""Chunk grids: how the tokens of a packed row are cut into chunks, and in which order chunk states depend on
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

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from earlyfusion.kernels.segments import Segments


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
