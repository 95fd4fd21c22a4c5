"""Vision work spread over ranks: what a picture costs, who should encode it, and how it travels there.

Attention makes the cost of a picture of n patches a*n + b*n^2, so that equal patches are not equal work:
16,384 patches cost 3.3 times as much in one picture as in 64 (vision-tower FLOPs, MoonViT). The plan is a
pure function of numbers every rank knows, so all ranks come to the same one without a message:

    own patches --all-to-all--> patches of the pictures this rank encodes -> tower, projector
    features    --all-to-all--> features of the own pictures, in packed order      (backward: the other way
                round)

A picture's gradient reaches the tower's weights on the rank that encoded it in place of the rank that holds
it. Averaged over ranks, as data parallelism does, both are the same sum: nothing in tower or projector looks
beyond one picture. The splits of both all-to-alls are known to the host beforehand (`gather_grids`, one per
optimizer step, then `plan_step`), so the forward pass has no host sync.

Legend: W ranks, n patches of one picture, P patches, M merged vision tokens, D hidden size of the decoder.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single

from earlyfusion.kernels.errors import UserError
from earlyfusion.vision.patches import Grid, Share, VisionCost, by_token, num_patches, num_tokens


def assign(
    costs: Sequence[float], ranks: int, sizes: Sequence[int] | None = None, limit: float = float("inf")
) -> list[int]:
    """The rank of every item, longest processing time first: the costliest goes to the least loaded rank, and
    so on.

    The largest load is at most 4/3 - 1/(3 ranks) of the best possible (Graham 1969). Ranks may come out
    empty: with fewer items than ranks they must. With `sizes` a rank takes items of at most `limit` together;
    an item that fits nowhere goes to the least loaded rank all the same, so the caller looks.
    """
    # Ties fall to the smaller rank and the earlier item, so that all ranks plan the same.
    heap = [(0.0, rank) for rank in range(ranks)]
    chosen, held = [0] * len(costs), [0] * ranks
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        size = 0 if sizes is None else sizes[item]
        # Ranks without room are put aside for this item only; a smaller one may still fit.
        full = []
        while heap and held[heap[0][1]] + size > limit:
            full.append(heapq.heappop(heap))
        load, rank = heapq.heappop(heap) if heap else full.pop(0)
        for entry in full:
            heapq.heappush(heap, entry)
        heapq.heappush(heap, (load + costs[item], rank))
        chosen[item] = rank
        held[rank] += size
    return chosen


def loads(costs: Sequence[float], owner: Sequence[int], ranks: int) -> list[float]:
    """Cost on every rank under `owner`."""
    total = [0.0] * ranks
    for cost, rank in zip(costs, owner, strict=True):
        total[rank] += cost
    return total


def imbalance(work: Sequence[float]) -> float:
    """Largest over mean load, 1 at best; 1 as well when there is no work at all. A step takes as long as its
    slowest rank."""
    total = sum(work)
    return max(work) * len(work) / total if total > 0 else 1.0


@dataclass(frozen=True)
class Exchange:
    """Who encodes which picture of a micro-batch, for the ranks that hold them.

    grids[r][i]: (t, h, w) of picture i of rank r, or shares of a picture, one behind the other. owner[r][i]:
    rank that encodes it. work: FLOPs of every rank under this plan.
    """

    grids: tuple[tuple[Grid | Share, ...], ...]
    owner: tuple[tuple[int, ...], ...]
    merge: tuple[int, int]
    work: tuple[float, ...]

    @cached_property
    def patches(self) -> list[list[int]]:
        """[r][o]: patches that r sends to o."""
        return self._counted([[self.patches_of(grid) for grid in row] for row in self.grids])

    @cached_property
    def features(self) -> list[list[int]]:
        """[r][o]: merged vision tokens that o sends back to r. (Gradients go the ways of both tables
        backwards.)"""
        return self._counted([[self.tokens_of(grid) for grid in row] for row in self.grids])

    def patches_of(self, grid: Grid | Share) -> int:
        """Patches of a picture or of a share of one."""
        return grid.patches(self.merge) if isinstance(grid, Share) else num_patches(grid)

    def tokens_of(self, grid: Grid | Share) -> int:
        """Features of a picture or of a share of one."""
        return len(grid.tokens(self.merge)) if isinstance(grid, Share) else num_tokens(grid, self.merge)

    def _counted(self, sizes: Sequence[Sequence[int]]) -> list[list[int]]:
        rows = []
        for owners, counts in zip(self.owner, sizes):
            row = [0] * len(self.grids)
            for rank, count in zip(owners, counts):
                row[rank] += count
            rows.append(row)
        return rows

    @property
    def moves(self) -> bool:
        """Whether any picture is encoded away from home."""
        return any(rank != r for r, row in enumerate(self.owner) for rank in row)

    def order(self, rank: int) -> list[int]:
        """Pictures of `rank` in the order to send them: by receiving rank, own order within."""
        # sorted() is stable: own order within a receiving rank comes for free.
        owners = self.owner[rank]
        return sorted(range(len(owners)), key=owners.__getitem__)

    def held(self, owner: int) -> list[tuple[int, int]]:
        """(home rank, picture) of everything `owner` encodes, in the order it arrives; may be empty."""
        return [(r, i) for r, row in enumerate(self.owner) for i, rank in enumerate(row) if rank == owner]


def exchange(
    grids: Sequence[Sequence[Grid]],
    cost: VisionCost,
    merge: tuple[int, int] = (2, 2),
    max_patches: int | None = None,
    shared: bool = False,
) -> Exchange:
    """The plan for one micro-batch from the grids of all ranks (`grids[r]`: those of rank r, possibly none).

    max_patches: most patches of one rank, whose activations must fit its memory. Where no plan keeps to it,
    or none is better than the pictures' own places, they stay at home. shared: a picture that costs more than
    an even share of all is encoded by all ranks together.
    """
    if shared:
        return _with_shares(grids, cost, merge, max_patches)
    ranks, limit = len(grids), float("inf") if max_patches is None else max_patches
    home = [r for r, row in enumerate(grids) for _ in row]
    items = [grid for row in grids for grid in row]
    costs, sizes = [cost.of([grid]) for grid in items], [num_patches(grid) for grid in items]
    # Which rank takes which share is free: the one that has most of it already sends least.
    chosen = _near_home(assign(costs, ranks, sizes, limit), home, sizes, ranks)
    # A plan that does not fit memory, or helps nobody, is worse than none: pictures stay.
    too_much = max(loads(sizes, chosen, ranks)) > limit
    if too_much or max(loads(costs, chosen, ranks)) >= max(loads(costs, home, ranks)):
        chosen = home

    taken = iter(chosen)
    return Exchange(
        grids=tuple(tuple(row) for row in grids),
        owner=tuple(tuple(next(taken) for _ in row) for row in grids),
        merge=merge,
        work=tuple(loads(costs, chosen, ranks)),
    )


# A rank's share of a picture, in patches, below which the exchanges in every block of the tower cost more
# than the others' help is worth.
LEAST_SHARE = 256


def _with_shares(
    grids: Sequence[Sequence[Grid]], cost: VisionCost, merge: tuple[int, int], max_patches: int | None
) -> Exchange:
    """The same plan for all pictures but those that no dealing could make even: the k-th share of each is
    rank k's."""
    ranks = len(grids)
    even = sum(cost.of(row) for row in grids) / ranks

    def large(grid: Grid) -> bool:
        return cost.of([grid]) > even and num_patches(grid) >= ranks * LEAST_SHARE

    rest = exchange([[grid for grid in row if not large(grid)] for row in grids], cost, merge, max_patches)
    each = sum(cost.of([grid]) for row in grids for grid in row if large(grid)) / ranks
    rows, owners = [], []
    for row, dealt in zip(grids, rest.owner):
        # Every picture in its place, a large one as its shares.
        taken = iter(dealt)
        placed: list[tuple[Grid | Share, int]] = []
        for grid in row:
            if large(grid):
                placed += [(Share(grid, rank, ranks), rank) for rank in range(ranks)]
            else:
                placed.append((grid, next(taken)))
        rows.append(tuple(item for item, _ in placed))
        owners.append(tuple(rank for _, rank in placed))
    return Exchange(tuple(rows), tuple(owners), merge, tuple(work + each for work in rest.work))


def _near_home(chosen: Sequence[int], home: Sequence[int], sizes: Sequence[int], ranks: int) -> list[int]:
    """The same shares under other rank numbers: which rank takes a share does not matter to the loads, but a
    share lies partly on one rank or another already. Shares go, in the order of the patches saved, to the
    rank that saves most."""
    # Patches of each share that lie on each rank already.
    stays: Counter[tuple[int, int]] = Counter()
    for share, rank, size in zip(chosen, home, sizes):
        stays[share, rank] += size
    place: dict[int, int] = {}
    # A dictionary keeps the ranks' order, which a set would not promise.
    free = dict.fromkeys(range(ranks))
    for share, rank in sorted(stays, key=lambda pair: (-stays[pair], pair)):
        if share not in place and rank in free:
            place[share] = rank
            del free[rank]
    for share in set(chosen) - set(place):
        place[share] = free.popitem()[0]
    return [place[share] for share in chosen]


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step: a plan for every micro-batch, and what it would gain.

    before: largest over mean FLOPs of a rank over the whole step, pictures where they lie (ranks run through
    their micro-batches on their own). after: the same with an exchange, where all ranks meet in each
    micro-batch.
    """

    parts: tuple[Exchange, ...]
    before: float
    after: float

    def pays(self, above: float) -> bool:
        """Whether to exchange: the step is uneven by more than `above`, pictures would move, and it gets
        better."""
        return self.before > above and self.after < self.before and any(part.moves for part in self.parts)


def plan_step(
    grids: Sequence[Sequence[Sequence[Grid]]],
    cost: VisionCost,
    merge: tuple[int, int] = (2, 2),
    max_patches: int | None = None,
) -> StepPlan:
    """The plan of a step from grids[r][k], the pictures of micro-batch k of rank r. Every rank has as many
    micro-batches."""
    parts = tuple(exchange(part, cost, merge, max_patches) for part in zip(*grids, strict=True))
    home = [sum(cost.of(part) for part in rank) for rank in grids]
    # With an exchange all ranks meet in every micro-batch: each costs its slowest.
    slowest = sum(max(part.work) for part in parts)
    mean = sum(home) / len(home)
    return StepPlan(parts, before=imbalance(home), after=slowest / mean if mean > 0 else 1.0)


# ---- carrying it out


@dataclass(frozen=True)
class Route:
    """What `rank` sends and receives in one micro-batch under `plan`. Every rank of `group` must use its
    route.
    """

    plan: Exchange
    rank: int
    group: Any = None

    @property
    def held(self) -> tuple[Grid | Share, ...]:
        """Grids of the pictures this rank encodes, in the order they arrive, or its shares of them; may be
        empty."""
        return tuple(self.plan.grids[home][i] for home, i in self.plan.held(self.rank))

    def send_patches(self, patches: Tensor) -> Tensor:
        """Own patches [P, 3, p, p] in packed order -> those of the pictures in `held`, in that order, of
        shares token by token."""
        # Ordered by receiving rank: all-to-all sends stretches, not rows.
        own = self.plan.grids[self.rank]
        sizes = [self.plan.patches_of(grid) for grid in own]
        ordered = _in_order(self._by_token(patches), sizes, self.plan.order(self.rank))
        arriving = [row[self.rank] for row in self.plan.patches]
        return all_to_all(ordered, self.plan.patches[self.rank], arriving, self.group)

    def _by_token(self, patches: Tensor) -> Tensor:
        """Patches with those of shared pictures token by token."""
        own = self.plan.grids[self.rank]
        if not any(isinstance(grid, Share) for grid in own):
            return patches
        order, start = [], 0
        for grid in own:
            if not isinstance(grid, Share):
                order.append(np.arange(start, start + num_patches(grid)))
            elif grid.rank == 0:
                order.append(start + by_token(grid.grid, self.plan.merge))
            start += self.plan.patches_of(grid)
        return patches.index_select(0, torch.from_numpy(np.concatenate(order)).to(patches.device))

    def bring_home(self, features: Tensor) -> Tensor:
        """Features [M, D] of the pictures in `held` -> those of the own pictures in packed order;
        differentiable."""
        leaving = [row[self.rank] for row in self.plan.features]
        home = all_to_all(features, leaving, self.plan.features[self.rank], self.group)
        own, order = self.plan.grids[self.rank], self.plan.order(self.rank)
        sizes = [self.plan.tokens_of(own[i]) for i in order]
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
    order; the gradient goes back the same way."""
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

    settings: anything that must be equal on all ranks. wrong: `complaint`. Raises UserError, on all ranks
    alike, for other settings or numbers of micro-batches and for any complaint.
    """
    # One small gather carries grids, settings and complaints: whoever disagrees, all raise alike.
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (list(map(list, own)), settings, wrong), group=group)
    for rank, (grids, known, found) in enumerate(everyone):
        what = f"rank {rank}, {found}" if found else ""
        if len(grids) != len(everyone[0][0]):
            what = f"rank {rank} has other micro-batches in this step than rank 0"
        elif known != everyone[0][1]:
            what = f"rank {rank} has other settings than rank 0"
        if what:
            raise UserError(f"exchange of pictures: {what}: start all ranks with the same recipe and version")
    return [grids for grids, _, _ in everyone]
