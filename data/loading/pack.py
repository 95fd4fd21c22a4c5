"""Encoded documents -> PackedBatch: exactly `tokens` positions, documents side by side, filler at the end.

Legend: T positions of one micro-batch, P patches, p patch side in pixels, M media pads.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from earlyfusion.data.loading.encode import Encoded
from earlyfusion.kernels.segments import Segments
from earlyfusion.vision.patches import Grid

IGNORED = -100
"""Label of a position that is not trained."""
EXACT = 2048
"""Positions that are filled by an exact subset sum."""
CANDIDATES = 96
"""Documents that the exact sum chooses from."""
LOOKAHEAD = 4
"""Micro-batches of documents that a finite stream is packed from."""


@dataclass
class PackedBatch:
    """One micro-batch.

    Filler is [PAD] in documents of its own at the end, with `source_ids` -1 and no labels.
    """

    ids: Tensor
    """int64 [T]"""
    labels: Tensor
    """int64 [T]: the id to predict at t, already shifted inside its document; -100 = no loss"""
    loss_weights: Tensor
    """float32 [T], aligned with labels; 0 where the label is -100"""
    segments: Segments
    """document lengths, filler included"""
    patches: Tensor
    """uint8 [P, 3, p, p]"""
    grids: list[Grid]
    """(frames, rows, columns) of every media item, in order"""
    media_positions: Tensor
    """int64 [M]: position in ids of every <|media_pad|>, in feature order"""
    source_ids: Tensor
    """int32 [T]: index into sources, -1 for filler"""
    sources: list[str]
    has_image: Tensor
    """bool [T]: the token's document holds an image or video"""
    keys: list[str] = field(default_factory=list)
    """source and key of every document, filler left out"""
    num_filler: int = 0
    """positions of filler"""
    num_loss_weight: float = 0.0
    """sum of loss_weights, known on the host"""

    @property
    def num_tokens(self) -> int:
        """Positions that hold data: T without filler."""
        return self.ids.shape[0] - self.num_filler

    @property
    def num_patches(self) -> int:
        """P."""
        return self.patches.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        # Every tensor it has, so that a new field is not forgotten here.
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device, non_blocking=non_blocking)
        return replace(self, **moved)


def assemble(
    documents: Sequence[Encoded],
    *,
    tokens: int,
    pad_id: int,
    sources: Sequence[str],
    patch_size: int,
    length: int | None = None,
    factors: Mapping[str, float] | None = None,
) -> PackedBatch:
    """Put documents side by side in `tokens` positions and fill the rest with [PAD] documents of at most
    `length`.

    factors: of the loss weights, by source.

    Raises ValueError when the documents do not fit.
    """
    # One concatenation a column: a loop over slices took as long as decoding.
    lengths = [len(document) for document in documents]
    filler = tokens - sum(lengths)
    if filler < 0:
        raise ValueError(
            f"assemble: {len(documents)} documents of {sum(lengths)} tokens do not fit in {tokens} positions"
        )
    starts = [0, *accumulate(lengths)]
    counts = torch.tensor([*lengths, filler])
    index, factors = list(sources), factors or {}

    # Weight t is that of predicting token t + 1; a document's first token is predicted by nobody.
    ids_T = torch.cat([*(document.ids for document in documents), torch.full((filler,), pad_id)])
    learned_T = torch.cat([*(document.loss_weights for document in documents), torch.zeros(filler)])
    learned_T[starts[:-1]] = 0
    learned_T = learned_T.roll(-1)
    factor = torch.tensor([*(factors.get(document.source, 1.0) for document in documents), 0.0])
    weights_T = learned_T * factor.repeat_interleave(counts)

    source = torch.tensor([*(index.index(document.source) for document in documents), -1], dtype=torch.int32)
    has_image = torch.tensor([*(bool(document.grids) for document in documents), False])
    # Empty ones in front, since there may be none at all.
    patches = [torch.empty(0, 3, patch_size, patch_size, dtype=torch.uint8)]
    patches += [document.patches for document in documents if document.patches is not None]
    media = [torch.empty(0, dtype=torch.int64)]
    media += [document.media_positions + start for document, start in zip(documents, starts)]
    # Filler is in documents of its own, none longer than a real one: kernels plan by the longest.
    whole, rest = divmod(filler, length or tokens)
    return PackedBatch(
        ids=ids_T,
        labels=torch.where(learned_T > 0, ids_T.roll(-1), IGNORED),
        loss_weights=weights_T,
        segments=Segments.from_lengths(lengths + [length or tokens] * whole + [rest] * (rest > 0)),
        patches=torch.cat(patches),
        grids=[grid for document in documents for grid in document.grids],
        media_positions=torch.cat(media),
        source_ids=source.repeat_interleave(counts),
        sources=index,
        has_image=has_image.repeat_interleave(counts),
        keys=[f"{document.source}:{document.key}" for document in documents],
        num_filler=filler,
        num_loss_weight=float(weights_T.sum()),
    )


class Size(NamedTuple):
    """What the packer needs to know of a document, or what is left of the budgets."""

    tokens: int
    patches: int = 0
    cost: float = 0.0
    """Vision FLOPs (balance.VisionCost)."""

    def fits(self, left: Size) -> bool:
        """Whether nothing of it is more than is left."""
        return all(map(operator.le, self, left))

    def less(self, taken: Size) -> Size:
        """What is left when `taken` is taken away."""
        return Size(*map(operator.sub, self, taken))


def choose(sizes: Sequence[Size], budget: Size, aim: float | None = None) -> list[int]:
    """Indices of the documents, oldest first, that share the next micro-batch: a knapsack of three budgets.

    The oldest documents that fit are taken down to a rest of at most 2,048 positions (and at most half), so
    nothing waits for ever; the rest is an exact subset sum over the next 96 documents (a bit set in a Python
    integer: bit s says that s tokens can be reached). Where that selection breaks a budget, documents with
    pictures come longest first as far as they fit, and the exact sum goes over those without.

    aim: cost the micro-batch should come to; rich and poor documents then take turns, oldest first in each,
    so that micro-batches of equal aim cost about the same.
    """
    # Oldest first, so that nothing waits for ever.
    order: Sequence[int] = range(len(sizes))
    if aim is not None and sizes:
        order = _steer(sizes, aim / budget.tokens)
    left, chosen, rest = budget, [], []
    for i in order:
        if left.tokens > min(budget.tokens // 2, EXACT) and sizes[i].fits(left):
            chosen.append(i)
            left = left.less(sizes[i])
        else:
            rest.append(i)

    # An exact sum over all of a large pool would take as long as a training step.
    rest = [i for i in rest if sizes[i].fits(left)][:CANDIDATES]
    extra = _subset_sum(sizes, rest, left.tokens)
    if not Size(0, sum(sizes[i].patches for i in extra), sum(sizes[i].cost for i in extra)).fits(left):
        # Pictures first, since text alone can fill whatever they leave.
        extra = []
        for i in sorted(rest, key=lambda i: (-sizes[i].tokens, i)):
            if sizes[i].patches and sizes[i].fits(left):
                extra.append(i)
                left = left.less(sizes[i])
        extra += _subset_sum(sizes, [i for i in rest if not sizes[i].patches], left.tokens)
    return sorted(chosen + extra)


def _steer(sizes: Sequence[Size], per_token: float) -> list[int]:
    """All documents, the oldest first, in an order in which the first s tokens cost about per_token * s.

    Those with pictures and those without each keep their order.
    """
    # The oldest document comes first whatever it costs.
    order, used, spent = [0], sizes[0].tokens, sizes[0].cost
    newest_first = range(len(sizes) - 1, 0, -1)
    rich = [i for i in newest_first if sizes[i].cost > 0]
    poor = [i for i in newest_first if not sizes[i].cost > 0]

    def miss(tail: list[int]) -> float:
        size = sizes[tail[-1]]
        return abs(spent + size.cost - per_token * (used + size.tokens))

    while rich or poor:
        # Whichever leaves the cost nearer to the line; a long text comes when pictures are half of it ahead.
        tail = min((tail for tail in (rich, poor) if tail), key=miss)
        order.append(tail.pop())
        used, spent = used + sizes[order[-1]].tokens, spent + sizes[order[-1]].cost
    return order


def _subset_sum(sizes: Sequence[Size], candidates: Sequence[int], room: int) -> list[int]:
    """The candidates whose tokens sum as near to `room` as possible without going over, whatever else they
    need; early ones are preferred."""
    # One integer holds every sum that can be reached; a shift adds a length to all of them.
    mask = (1 << (room + 1)) - 1
    reach = [1]
    for i in candidates:
        reach.append((reach[-1] | (reach[-1] << sizes[i].tokens)) & mask)
        if reach[-1] >> room:
            break

    # Backwards: a length was taken where the sum cannot be reached without it.
    total = reach[-1].bit_length() - 1
    taken = []
    for before, i in reversed(list(zip(reach[:-1], candidates))):
        if not before >> total & 1:
            taken.append(i)
            total -= sizes[i].tokens
    return taken[::-1]


def pack_all(
    documents: Iterable[Encoded],
    *,
    tokens: int,
    max_patches: int,
    pad_id: int,
    sources: Sequence[str],
    patch_size: int,
    length: int | None = None,
) -> Iterator[PackedBatch]:
    """Pack a finite stream of documents (each at most `tokens` long, within `max_patches`): every one exactly
    once."""
    stream, pool = iter(documents), list[Encoded]()
    while True:
        for document in stream:
            pool.append(document)
            if sum(map(len, pool)) >= LOOKAHEAD * tokens:
                break
        if not pool:
            return
        # Evaluation has no ranks to balance: costs do not count.
        sizes = [Size(len(document), document.num_patches) for document in pool]
        chosen = choose(sizes, Size(tokens, max_patches))
        if not chosen:
            raise ValueError(
                f"pack_all: {pool[0].key} of {len(pool[0])} tokens fits no batch of {tokens} positions"
            )
        batch = [pool.pop(i) for i in reversed(chosen)][::-1]
        yield assemble(
            batch, tokens=tokens, pad_id=pad_id, sources=sources, patch_size=patch_size, length=length
        )
