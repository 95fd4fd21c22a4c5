"""Distributed Muon: a matrix whose rows are cut between ranks is orthogonalised whole, by one of them.

    every rank: momentum and update of its own rows  --all-to-all-->  owners: Newton-Schulz of whole matrices
                                                     --all-to-all-->  every rank: its rows of the result

Owners follow from the names alone: longest processing time first on the FLOPs of Newton-Schulz, so that
nobody has to tell anybody. Rows travel in the dtype that Newton-Schulz multiplies in, in buckets; while one
is worked on, the one behind comes and the one before goes home. Whole experts and whole heads never come
here: they are updated where they lie.

Sources: Kimi K3 (arXiv 2607.24653) fetches from the holders of a matrix, as here; Moonlight (2502.16982)
gathers on all. Shapes: R rows of a weight, C columns.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from earlyfusion.pipeline.optim.routing import BlockSpec, is_sharded
from earlyfusion.vision.balance import assign

BUCKET_BYTES = 64 << 20
"""Rows of one bucket that a rank sends, about."""
Orthogonalise = Callable[[Tensor, BlockSpec], Tensor]


@dataclass(frozen=True)
class Cut:
    """A matrix [R, C] in rows over the ranks of `group`; update: this rank's rows of it, in."""

    name: str
    param: Any
    spec: BlockSpec
    update: Tensor

    @property
    def group(self) -> dist.ProcessGroup:
        return shard_group(self.param)

    def rows(self) -> list[int]:
        """Rows on every rank of the group."""
        return rows_of(self.param.shape[0], self.group.size())

    def flops(self) -> float:
        """Of one Newton-Schulz iteration over its blocks: what owners are balanced by."""
        columns, total = self.param.shape[-1], 0.0
        for size in self.spec[2:]:
            low, high = sorted((self.spec[1] * size, columns))
            total += self.spec[0] * (4.0 * low * low * high + 2.0 * low**3)
        return total


def shard_dim(param: Any) -> int:
    """The mesh dimension that a parameter is cut along."""
    return next(i for i, placement in enumerate(param.placements) if not placement.is_replicate())


def shard_group(param: Any) -> dist.ProcessGroup:
    """The ranks that hold the rows of a parameter between them."""
    return param.device_mesh.get_group(shard_dim(param))


def rows_of(rows: int, ranks: int) -> list[int]:
    """Rows of every rank, as FSDP2 cuts them: equal stretches, the last ones shorter or empty."""
    step = -(-rows // ranks)
    return [max(0, min(step, rows - rank * step)) for rank in range(ranks)]


def is_cut(param: Tensor, spec: BlockSpec) -> bool:
    """Whether a Muon block of the parameter lies on more than one rank."""
    if not is_sharded(param) or param.ndim != 2 or all(p.is_replicate() for p in param.placements):
        return False
    unit = spec[1] * sum(spec[2:])
    return any(count % unit for count in rows_of(param.shape[0], shard_group(param).size()))


def agreed(params: Sequence[Any]) -> list[bool]:
    """Which of these have a gradient on any rank that holds a part of them."""
    known_P = torch.tensor([float(param.grad is not None) for param in params])
    known_P = known_P.to(params[0].device)
    dist.all_reduce(known_P, op=dist.ReduceOp.MAX, group=shard_group(params[0]))
    return [bool(known) for known in known_P.tolist()]


def owners(cuts: Sequence[Cut]) -> list[int]:
    """The rank of the group that orthogonalises each matrix."""
    return assign([cut.flops() for cut in cuts], cuts[0].group.size()) if cuts else []


def exchanged(cuts: Sequence[Cut], orthogonalise: Orthogonalise) -> Iterator[tuple[Cut, Tensor]]:
    """(matrix, this rank's rows of the orthogonalised update) of every one; all of one group, in the same
    order on all of its ranks, which must all call this.

    orthogonalise: whole update [R, C] and its blocks -> the same shape.
    """
    owner = owners(cuts)
    arriving: Bucket | None = None
    leaving: Bucket | None = None
    for indices in [*buckets(cuts), None, None]:
        # While the rows that have come are worked on, the next ones are on their way, and the ones before
        # them on their way home.
        coming = None
        if indices is not None:
            coming = Bucket([cuts[i] for i in indices], [owner[i] for i in indices])
        if arriving is not None:
            arriving.work(orthogonalise)
        if leaving is not None:
            yield from leaving.home()
        arriving, leaving = coming, arriving


def buckets(cuts: Sequence[Cut]) -> list[list[int]]:
    """Indices of the matrices that travel together."""
    filled = 0.0
    found: list[list[int]] = [[]]
    for index, cut in enumerate(cuts):
        if filled >= BUCKET_BYTES:
            filled = 0.0
            found.append([])
        found[-1].append(index)
        # The same on all ranks, whatever rows they hold.
        filled += cut.param.numel() / cut.group.size() * cut.update.element_size()
    return [bucket for bucket in found if bucket]


class Bucket:
    """Matrices on their way to their owners, and back."""

    def __init__(self, cuts: Sequence[Cut], owner: Sequence[int]) -> None:
        self.group = cuts[0].group
        rank, ranks = dist.get_rank(self.group), self.group.size()
        # By owner, in the order of the names.
        self.order = sorted(range(len(cuts)), key=lambda i: (owner[i], i))
        self.cuts = [cuts[i] for i in self.order]
        self.owned = [cut for i, cut in zip(self.order, self.cuts) if owner[i] == rank]
        self.leaving, self.arriving = [0] * ranks, [0] * ranks
        for i, cut in zip(self.order, self.cuts):
            self.leaving[owner[i]] += cut.update.numel()
        for cut in self.owned:
            for sender, rows in enumerate(cut.rows()):
                self.arriving[sender] += rows * cut.param.shape[1]

        self.sent = torch.cat([cut.update.reshape(-1) for cut in self.cuts])
        self.received = self.sent.new_empty(sum(self.arriving))
        self.handle = self._all_to_all(self.received, self.sent, self.arriving, self.leaving)

    def _all_to_all(self, out: Tensor, given: Tensor, arriving: list[int], leaving: list[int]):
        return dist.all_to_all_single(out, given, arriving, leaving, group=self.group, async_op=True)

    def work(self, orthogonalise: Orthogonalise) -> None:
        """Orthogonalise what has come, and send it back to where its rows lie."""
        self.handle.wait()
        # From every sender its rows of all owned matrices: put together to whole ones.
        stretches = []
        for sender, part in enumerate(self.received.split(self.arriving)):
            stretches.append(part.split([cut.rows()[sender] * cut.param.shape[1] for cut in self.owned]))
        pieces = []
        for cut, parts in zip(self.owned, zip(*stretches)):
            ortho_RC = orthogonalise(torch.cat(parts).view(cut.param.shape), cut.spec)
            pieces.append(ortho_RC.split(cut.rows()))

        # The same ways back, into what was sent, of which nobody needs the old values.
        ranks = range(len(self.arriving))
        self.received = torch.cat(
            [self.received[:0], *(own[rank].reshape(-1) for rank in ranks for own in pieces)]
        )
        self.handle = self._all_to_all(self.sent, self.received, self.leaving, self.arriving)

    def home(self) -> Iterator[tuple[Cut, Tensor]]:
        """Every matrix with this rank's rows of the result."""
        self.handle.wait()
        for cut, part in zip(self.cuts, self.sent.split([cut.update.numel() for cut in self.cuts])):
            yield cut, part.view(cut.update.shape)
