"""Pictures encoded on another rank than their own: patches travel out, features home, their gradients back.

    own patches --all-to-all--> patches of the pictures this rank encodes -> tower, projector
    features    --all-to-all--> features of the own pictures, in packed order      (backward: the other way
                round)

A picture's gradient reaches the tower's weights on the rank that encoded it in place of the rank that holds
it. Averaged over ranks, as data parallelism does, both are the same sum: nothing in tower or projector looks
beyond one picture.

The splits of both all-to-alls are known to the host beforehand (`gather_grids`, then vision/balance.py), so
the forward pass has no host sync. The gather is one per optimizer step, before the forward pass; over gloo it
does not touch the device.

Legend: W ranks, P patches, M merged vision tokens, D hidden size of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single

from earlyfusion.vision.balance import Exchange
from earlyfusion.vision.patches import Grid, num_patches, num_tokens


class RanksDisagree(ValueError):
    """Ranks that train one model were given different work or settings; raised on every rank at the same
    place."""


@dataclass(frozen=True)
class Route:
    """What `rank` sends and receives in one micro-batch under `plan`. Every rank of `group` must use its
    route.
    """

    plan: Exchange
    rank: int
    group: Any = None

    @cached_property
    def held(self) -> tuple[Grid, ...]:
        """Grids of the pictures this rank encodes, in the order they arrive; may be empty."""
        return tuple(self.plan.grids[home][i] for home, i in self.plan.held(self.rank))

    @cached_property
    def _order(self) -> list[int]:
        return self.plan.order(self.rank)

    def send_patches(self, patches: Tensor) -> Tensor:
        """Own patches [P, 3, p, p] in packed order -> those of the pictures in `held`, in that order."""
        # Ordered by receiving rank: all-to-all sends stretches, not rows.
        sizes = [num_patches(grid) for grid in self.plan.grids[self.rank]]
        ordered = _in_order(patches, sizes, self._order)
        arriving = [row[self.rank] for row in self.plan.patches]
        return all_to_all(ordered, self.plan.patches[self.rank], arriving, self.group)

    def bring_home(self, features: Tensor) -> Tensor:
        """Features [M, D] of the pictures in `held` -> those of the own pictures in packed order;
        differentiable."""
        leaving = [row[self.rank] for row in self.plan.features]
        home = all_to_all(features, leaving, self.plan.features[self.rank], self.group)
        own, order = self.plan.grids[self.rank], self._order
        sizes = [num_tokens(own[i], self.plan.merge) for i in order]
        # The inverse of the order they were sent in.
        place = sorted(range(len(own)), key=order.__getitem__)  # where picture i stands in what came home
        return _in_order(home, sizes, place)


def _in_order(rows: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Stretches of `rows` of these sizes, put into another order."""
    # The empty beginning keeps the result a tensor of the right shape where there are no pictures.
    pieces = rows.split(sizes)
    return torch.cat([rows[:0], *(pieces[i] for i in order)])


def all_to_all(x: Tensor, leaving: Sequence[int], arriving: Sequence[int], group: Any) -> Tensor:
    """Rows of x, `leaving[r]` of them to rank r one after another -> `arriving[r]` rows from each, in rank
    order; the gradient goes back the same way.

    A collective: every rank of the group calls it, also with nothing to send and nothing to receive.
    """
    # Also with nothing to send: a rank that stayed away would leave the others waiting.
    out = x.new_empty((sum(arriving), *x.shape[1:]))
    return all_to_all_single(out, x.contiguous(), list(arriving), list(leaving), group or dist.group.WORLD)


def complaint(batches: Sequence[Any], merge: tuple[int, int]) -> str:
    """The first thing wrong with these micro-batches, "" where all is well."""
    for k, batch in enumerate(batches):
        # A wrong batch would make the other ranks wait for rows that never come, so all are told first.
        patches = sum(num_patches(grid) for grid in batch.grids)
        tokens = sum(num_tokens(grid, merge) for grid in batch.grids)
        if len(batch.patches) != patches:
            return f"micro-batch {k}: {len(batch.patches)} patches, but its grids hold {patches}"
        if len(batch.media_positions) != tokens:
            positions = len(batch.media_positions)
            return f"micro-batch {k}: {positions} <|media_pad|> positions, but its grids give {tokens}"
    return ""


def gather_grids(
    own: Sequence[Sequence[Grid]], group: Any, settings: str = "", wrong: str = ""
) -> list[list[list[Grid]]]:
    """Grids of every rank: result[r][k] are those of micro-batch k of rank r; `own[k]` those of this rank.

    settings: anything that must be equal on all ranks. wrong: `complaint`. Raises RanksDisagree, on all ranks
    alike, for other settings or numbers of micro-batches and for any complaint.
    """
    # One small gather carries grids, settings and complaints: whoever disagrees, all raise alike.
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (list(map(list, own)), settings, wrong), group=group)
    for rank, (grids, known, found) in enumerate(everyone):
        if found:
            raise RanksDisagree(f"rank {rank}, {found}")
        what = ""
        if len(grids) != len(everyone[0][0]):
            what = "micro-batches in this step"
        elif known != everyone[0][1]:
            what = "settings"
        if what:
            raise RanksDisagree(
                f"rank {rank} has other {what} than rank 0: start all ranks with the same recipe and version"
            )
    return [grids for grids, _, _ in everyone]
