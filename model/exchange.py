"""Pictures encoded on another rank than their own: patches travel out, features home, their gradients back.

    own patches --all-to-all--> patches of the pictures this rank encodes -> tower, projector
    features    --all-to-all--> features of the own pictures, in packed order      (backward: the other way
                round)

A picture's gradient reaches the tower's weights on the rank that encoded it in place of the rank that holds
it. Averaged over ranks, as data parallelism does, both are the same sum: nothing in tower or projector looks
beyond one picture.

The splits of both all-to-alls are known to the host beforehand (`gather_grids`, then vision/balance.py), so
the forward pass has no host sync. The gather is one per optimizer step, before the forward pass; over gloo it
does not touch the device, over nccl it waits for it once.

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

from earlyfusion.vision.balance import Exchange
from earlyfusion.vision.patches import Grid, num_patches, num_tokens

COMPLAINTS = {1: "patches, but its grids hold", 2: "<|media_pad|> positions, but its grids give"}


class RanksDisagree(ValueError):
    """Ranks that train one model were given different work or settings; raised on every rank at the same
    place."""


@dataclass(frozen=True)
class Route:
    """What `rank` sends and receives in one micro-batch under `plan`. Every rank of `group` must use its
    route.

    direct: the group's backend has all_to_all_single (`supports_all_to_all`); else sends and receives in
    pairs.
    """

    plan: Exchange
    rank: int
    group: Any = None
    direct: bool = True

    @cached_property
    def held(self) -> tuple[Grid, ...]:
        """Grids of the pictures this rank encodes, in the order they arrive; may be empty."""
        return tuple(self.plan.grids[home][i] for home, i in self.plan.held(self.rank))

    @cached_property
    def _order(self) -> list[int]:
        return self.plan.order(self.rank)

    def send_patches(self, patches: Tensor) -> Tensor:
        """Own patches [P, 3, p, p] in packed order -> those of the pictures in `held`, in that order."""
        sizes = [num_patches(grid) for grid in self.plan.grids[self.rank]]
        ordered = _in_order(patches, sizes, self._order)
        arriving = [row[self.rank] for row in self.plan.patches]
        return all_to_all(ordered, self.plan.patches[self.rank], arriving, self.group, self.direct)

    def bring_home(self, features: Tensor) -> Tensor:
        """Features [M, D] of the pictures in `held` -> those of the own pictures in packed order;
        differentiable."""
        leaving = tuple(row[self.rank] for row in self.plan.features)
        home = _AllToAll.apply(features, leaving, self.plan.features[self.rank], self.group, self.direct)
        merge, own = self.plan.merge, self.plan.grids[self.rank]
        sizes = [num_tokens(own[i], merge) for i in self._order]
        place = sorted(
            range(len(own)), key=self._order.__getitem__
        )  # where picture i stands in what came home
        return _in_order(home, sizes, place)


def _in_order(rows: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Stretches of `rows` of these sizes, put into another order."""
    if list(order) == list(range(len(order))):
        return rows
    pieces = rows.split(list(sizes))
    return torch.cat([pieces[i] for i in order])


class _AllToAll(torch.autograd.Function):
    """Rows to ranks by `leaving`, rows from ranks by `arriving`; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaving: Any, arriving: Any, group: Any, direct: bool) -> Tensor:
        ctx.way = (arriving, leaving, group, direct)
        return all_to_all(x, leaving, arriving, group, direct)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return all_to_all(gradients[0], *ctx.way), None, None, None, None


def all_to_all(
    x: Tensor, leaving: Sequence[int], arriving: Sequence[int], group: Any, direct: bool = True
) -> Tensor:
    """Rows of x, `leaving[r]` of them to rank r one after another -> `arriving[r]` rows from each, in rank
    order.

    A collective: every rank of the group calls it, also with nothing to send and nothing to receive.
    """
    x = x.contiguous()
    out = x.new_empty((sum(arriving), *x.shape[1:]))
    if direct:
        dist.all_to_all_single(out, x, list(arriving), list(leaving), group=group)
        return out
    here = dist.get_rank(group)
    sent, received = x.split(list(leaving)), out.split(list(arriving))
    received[here].copy_(sent[here])
    calls = []
    for peer in range(len(leaving)):
        place = peer if group is None else dist.get_global_rank(group, peer)
        if peer != here and leaving[peer]:
            calls.append(dist.P2POp(dist.isend, sent[peer], place, group))
        if peer != here and arriving[peer]:
            calls.append(dist.P2POp(dist.irecv, received[peer], place, group))
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()
    return out


def supports_all_to_all(group: Any, device: torch.device) -> bool:
    """Whether the group's backend has all_to_all_single; every rank calls it, and all get the same answer."""
    ones = [1] * dist.get_world_size(group)
    x = torch.zeros(len(ones), dtype=torch.uint8, device=device)
    try:
        dist.all_to_all_single(torch.empty_like(x), x, ones, ones, group=group)
    except (RuntimeError, NotImplementedError):  # "Backend ... does not support alltoall_base"
        return False
    return True


def complaint(batches: Sequence[Any], merge: tuple[int, int]) -> tuple[int, int, int, int]:
    """The first thing wrong with these micro-batches: (kind, micro-batch, given, expected), zeros where all
    is well."""
    for k, batch in enumerate(batches):
        wanted = sum(num_patches(grid) for grid in batch.grids)
        if batch.patches.shape[0] != wanted:
            return 1, k, batch.patches.shape[0], wanted
        wanted = sum(num_tokens(grid, merge) for grid in batch.grids)
        if batch.media_positions.shape[0] != wanted:
            return 2, k, batch.media_positions.shape[0], wanted
    return 0, 0, 0, 0


def gather_grids(
    own: Sequence[Sequence[Grid]],
    group: Any,
    device: torch.device,
    digest: int = 0,
    wrong: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> list[list[list[Grid]]]:
    """Grids of every rank: result[r][k] are those of micro-batch k of rank r; `own[k]` those of this rank.

    Two small collectives of int64 (the counts, then (k, t, h, w) of each picture, padded), one where no rank
    has a picture. device: where the group's backend wants tensors. digest: anything that must be equal on all
    ranks. wrong: `complaint`. Raises RanksDisagree, on all ranks alike, for other digests or numbers of
    micro-batches and for any complaint.
    """
    rows = [(k, *grid) for k, grids in enumerate(own) for grid in grids]
    heads = _gather([len(own), digest, len(rows), *wrong], group, device)
    for rank, (_, _, _, kind, k, given, expected) in enumerate(heads):
        if kind:
            raise RanksDisagree(f"rank {rank}, micro-batch {k}: {given} {COMPLAINTS[kind]} {expected}")
    for what, column in (("micro-batches in this step", 0), ("settings", 1)):
        others = [rank for rank, head in enumerate(heads) if head[column] != heads[0][column]]
        if others:
            raise RanksDisagree(
                f"rank {others[0]} has other {what} than rank 0 ({len(others)} of {len(heads)} ranks differ):"
                " start all ranks with the same recipe and version"
            )
    counts = [head[2] for head in heads]
    result: list[list[list[Grid]]] = [[[] for _ in own] for _ in heads]
    if not max(counts):
        return result
    flat = [number for row in rows for number in row]
    for rank, numbers in enumerate(_gather(flat + [0] * (4 * max(counts) - len(flat)), group, device)):
        for at in range(0, 4 * counts[rank], 4):
            k, t, h, w = numbers[at : at + 4]
            result[rank][k].append((t, h, w))
    return result


def _gather(numbers: Sequence[int], group: Any, device: torch.device) -> list[list[int]]:
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return torch.stack(parts).tolist()
