"""Vision work spread over ranks: what a picture costs, who should encode it, and how uneven a split is.

Attention makes the cost of a picture of n patches a*n + b*n^2, so that equal patches are not equal work:
16,384 patches cost 3.3 times as much in one picture as in 64 (vision-tower FLOPs, MoonViT). Everything here
is a pure function of numbers every rank knows, so all ranks come to the same plan without a message.
`model/exchange.py` carries it out.

Legend: N pictures (or clips), W ranks, n patches of one picture.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import Grid, num_patches, num_tokens

Table: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class VisionCost:
    """Forward FLOPs of the tower: `per_patch` * n + `per_pair` * n^2 for each picture (a multiply-add is
    two)."""

    per_patch: float
    per_pair: float

    @classmethod
    def from_config(cls, config: VisionConfig) -> VisionCost:
        """a = 2 (patch embedding + L (4 C Q + 2 C F)), b = 4 Q L, with C hidden, Q qkv width, F mlp, L
        layers."""
        width, qkv, layers = config.hidden_size, config.qkv_width, config.num_hidden_layers
        block = 4 * width * qkv + 2 * width * config.intermediate_size
        embed = width * config.in_channels * config.patch_size**2
        return cls(2.0 * (embed + layers * block), 4.0 * qkv * layers)

    def of(self, grids: Sequence[Grid]) -> float:
        """FLOPs of pictures of these (t, h, w) grids, in patches."""
        counts = [num_patches(grid) for grid in grids]
        return self.per_patch * sum(counts) + self.per_pair * sum(count * count for count in counts)


def assign(
    costs: Sequence[float],
    ranks: int,
    home: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    room: int | None = None,
) -> list[int]:
    """The rank of every item, longest processing time first: the costliest goes to the least loaded rank, and
    so on.

    The largest load is at most 4/3 - 1/(3 ranks) of the best possible (Graham 1969). `home[i]`, the rank that
    holds item i, takes it where loads are equal. Ranks may come out empty: with fewer items than ranks they
    must. With `sizes` and `room` a rank takes items of at most `room` together; an item that fits nowhere
    goes to the least loaded rank all the same, so the caller looks.

    Raises ValueError for a negative cost, no rank, or a home that is no rank.
    """
    if ranks < 1 or any(cost < 0 for cost in costs):
        raise ValueError(
            f"assign: {ranks} ranks and costs {list(costs)[:4]}: expected at least 1 rank and costs >= 0"
        )
    if home is not None and (len(home) != len(costs) or any(not 0 <= rank < ranks for rank in home)):
        raise ValueError(
            f"assign: home names {len(home)} ranks for {len(costs)} items; expected one of 0..{ranks - 1}"
            " each"
        )
    load, held = [0.0] * ranks, [0] * ranks
    heap = [
        (0.0, rank) for rank in range(ranks)
    ]  # an entry whose load is no longer the rank's is passed over
    chosen = [0] * len(costs)

    def fits(rank: int, item: int) -> bool:
        return sizes is None or room is None or held[rank] + sizes[item] <= room

    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        full: list[tuple[float, int]] = []
        while heap and (heap[0][0] != load[heap[0][1]] or not fits(heap[0][1], item)):
            entry = heapq.heappop(heap)
            if entry[0] == load[entry[1]]:
                full.append(entry)
        rank = (heap or full)[0][1]
        if home is not None and load[home[item]] == load[rank] and fits(home[item], item):
            rank = home[item]
        for entry in full:
            heapq.heappush(heap, entry)
        chosen[item] = rank
        load[rank] += costs[item]
        held[rank] += 0 if sizes is None else sizes[item]
        heapq.heappush(heap, (load[rank], rank))
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
    mean = sum(work) / max(1, len(work))
    return max(work) / mean if mean > 0 else 1.0


@dataclass(frozen=True)
class Exchange:
    """Who encodes which picture of a micro-batch, for the ranks that hold them.

    grids[r][i]: (t, h, w) of picture i of rank r. owner[r][i]: rank that encodes it.
    """

    grids: tuple[tuple[Grid, ...], ...]
    owner: Table
    merge: tuple[int, int]
    work: tuple[float, ...]
    """FLOPs of every rank under this plan."""
    before: float
    """Largest over mean FLOPs where the pictures lie."""
    after: float
    """The same under this plan."""

    @cached_property
    def patches(self) -> Table:
        """[r][o]: patches that r sends to o."""
        return self._counted([[num_patches(grid) for grid in row] for row in self.grids])

    @cached_property
    def features(self) -> Table:
        """[r][o]: merged vision tokens that o sends back to r. (Gradients go the ways of both tables
        backwards.)"""
        return self._counted([[num_tokens(grid, self.merge) for grid in row] for row in self.grids])

    def _counted(self, sizes: Sequence[Sequence[int]]) -> Table:
        rows = []
        for owners, counts in zip(self.owner, sizes, strict=True):
            row = [0] * len(self.grids)
            for rank, count in zip(owners, counts, strict=True):
                row[rank] += count
            rows.append(tuple(row))
        return tuple(rows)

    @property
    def moves(self) -> bool:
        """Whether any picture is encoded away from home."""
        return any(rank != r for r, row in enumerate(self.owner) for rank in row)

    def order(self, rank: int) -> list[int]:
        """Pictures of `rank` in the order to send them: by receiving rank, own order within."""
        return sorted(range(len(self.owner[rank])), key=lambda i: (self.owner[rank][i], i))

    def held(self, owner: int) -> list[tuple[int, int]]:
        """(home rank, picture) of everything `owner` encodes, in the order it arrives; may be empty."""
        return [(r, i) for r, row in enumerate(self.owner) for i, rank in enumerate(row) if rank == owner]


def exchange(
    grids: Sequence[Sequence[Grid]],
    cost: VisionCost,
    merge: tuple[int, int] = (2, 2),
    max_patches: int | None = None,
) -> Exchange:
    """The plan for one micro-batch from the grids of all ranks (`grids[r]`: those of rank r, possibly none).

    max_patches: most patches of one rank, whose activations must fit its memory. Where no plan keeps to it,
    or none is better than the pictures' own places, they stay at home.
    """
    ranks = len(grids)
    items = [(r, grid) for r, row in enumerate(grids) for grid in row]
    costs, home = [cost.of([grid]) for _, grid in items], [r for r, _ in items]
    sizes = [num_patches(grid) for _, grid in items]
    chosen = _kept_at_home(assign(costs, ranks, home, sizes, max_patches), home, sizes, ranks)
    full = max_patches is not None and max(loads(sizes, chosen, ranks), default=0) > max_patches
    if full or max(loads(costs, chosen, ranks)) >= max(loads(costs, home, ranks)):
        chosen = home
    taken = iter(chosen)
    work = loads(costs, chosen, ranks)
    return Exchange(
        grids=tuple(tuple(row) for row in grids),
        owner=tuple(tuple(next(taken) for _ in row) for row in grids),
        merge=merge,
        work=tuple(work),
        before=imbalance(loads(costs, home, ranks)),
        after=imbalance(work),
    )


def _kept_at_home(chosen: Sequence[int], home: Sequence[int], sizes: Sequence[int], ranks: int) -> list[int]:
    """The same shares under other rank numbers: which rank takes a share does not matter to the loads, but a
    share lies partly on one rank or another already. Shares go, in the order of the patches saved, to the
    rank that saves most."""
    stays: dict[tuple[int, int], int] = {}
    for share, rank, size in zip(chosen, home, sizes, strict=True):
        stays[share, rank] = stays.get((share, rank), 0) + size
    place: dict[int, int] = {}
    used: set[int] = set()
    for share, rank in sorted(stays, key=lambda pair: (-stays[pair], pair)):
        if share not in place and rank not in used:
            place[share] = rank
            used.add(rank)
    free = (rank for rank in range(ranks) if rank not in used)
    place |= {share: next(free) for share in range(ranks) if share not in place}
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
    ranks = len(grids)
    parts = tuple(exchange(part, cost, merge, max_patches) for part in zip(*grids, strict=True))
    home = [sum(cost.of(part) for part in rank) for rank in grids]
    mean = sum(home) / max(1, ranks)
    slowest = sum(max(part.work) for part in parts)
    return StepPlan(parts, before=imbalance(home), after=slowest / mean if mean > 0 else 1.0)
