"""Sums over the responses of a packed row, and over the groups of samples that answer one prompt.

All losses here see the generated tokens of N responses packed one after the other
(`kernels.segments.Segments`), with a mask of the tokens that are trained. Sums over a response use a
segmented reduction, so they do not depend on what stands beside it in the row and repeat bit for bit on a
GPU. Values of tokens outside the mask are replaced, never multiplied by zero: padding may hold NaN.

Legend: T packed tokens, N responses, G groups (prompts).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from earlyfusion.kernels.segments import Segments, check_shapes


class Groups(NamedTuple):
    """index_N: group of every response, 0..num-1, in the order of the ids that were given."""

    index_N: Tensor
    num: int

    def sums(self, values_N: Tensor) -> Tensor:
        """Sum of every group, [G]."""
        return values_N.new_zeros(self.num).index_add_(0, self.index_N, values_N)

    def means(self, values_N: Tensor) -> Tensor:
        """Mean of every group, [G]."""
        return self.sums(values_N) / self.sums(torch.ones_like(values_N))

    def extreme(self, values_N: Tensor, which: str) -> Tensor:
        """Smallest ("amin") or largest ("amax") value of every group, [G]."""
        zeros_G = values_N.new_zeros(self.num)
        return zeros_G.scatter_reduce(0, self.index_N, values_N, which, include_self=False)

    def spread(self, values_G: Tensor) -> Tensor:
        """The value of its group for every response, [N]."""
        return values_G[self.index_N]


def group(groups_N: Tensor) -> Groups:
    """Number the groups. groups_N: any integers, one a response; equal ids need not stand together."""
    # Bins and problems have ids with gaps; sums need numbers without.
    ids_G, index_N = torch.unique(groups_N, return_inverse=True)
    return Groups(index_N, ids_G.numel())


def wide(values: Tensor) -> Tensor:
    """float32 of anything narrower; float64 stays."""
    return values if values.dtype == torch.float64 else values.float()


def only(mask_T: Tensor, values_T: Tensor) -> Tensor:
    """`values_T` where the mask holds, 0 elsewhere; no gradient and no NaN comes from the rest."""
    return torch.where(mask_T, values_T, values_T.new_zeros(()))


def sequence_sums(values_T: Tensor, segments: Segments) -> Tensor:
    """Sum over the tokens of every response, [N]; differentiable. Raises ValueError where they do not fit."""
    check_shapes("sequence_sums", {"T": segments.total}, values_T=values_T)
    if segments.num == 0:
        return values_T.new_zeros(0)
    device = values_T.device
    # Kept with the segments: one row is summed many times.
    lengths_N = segments.cached(
        ("rl.lengths", str(device)), lambda: torch.tensor(segments.lengths, dtype=torch.int64, device=device)
    )
    # In float64, one token after the other: in float32 the rounding of a hundred thousand small log ratios
    # would show in their ratio.
    return torch.segment_reduce(values_T.double(), "sum", lengths=lengths_N, unsafe=True).to(values_T.dtype)


def spread(values_N: Tensor, segments: Segments) -> Tensor:
    """The value of its response for every token, [T]; meant for constants (no gradient is asked of it)."""
    return values_N.detach().index_select(0, segments.ids(values_N.device).long())


class Totals(NamedTuple):
    """What a batch is divided by, 0-d float64: trained tokens, and responses with at least one of them.

    A batch may be worked off in pieces, on several ranks: add up the totals of all pieces first (over
    ranks by an all-reduce), hand them to every piece, and the pieces' losses and gradients sum to those of
    the whole batch.
    """

    tokens: Tensor
    sequences: Tensor


def totals(mask_T: Tensor, segments: Segments) -> Totals:
    """Totals of one packed row; responses without a trained token (padding) do not count."""
    counts_N = sequence_sums(mask_T.double(), segments)
    return Totals(counts_N.sum(), (counts_N > 0).sum().double())
