"""Encoded documents -> PackedBatch: exactly `tokens` positions, documents side by side, filler at the end.

Legend: T positions of one micro-batch, P patches, p patch side in pixels, M media pads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from earlyfusion.data.loading.encode import Encoded
from earlyfusion.kernels.segments import Segments
from earlyfusion.vision.patches import Grid

IGNORED = -100
"""Label of a position that is not trained."""
EXACT = 2048
"""Positions that are filled by an exact subset sum."""


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

    @property
    def fill(self) -> float:
        """Share of the positions that hold data."""
        return self.num_tokens / max(1, self.ids.shape[0])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        names = ("ids", "labels", "loss_weights", "patches", "media_positions", "source_ids", "has_image")
        return replace(
            self, **{name: getattr(self, name).to(device, non_blocking=non_blocking) for name in names}
        )


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
    used = sum(len(document) for document in documents)
    if used > tokens:
        raise ValueError(
            f"assemble: {len(documents)} documents of {used} tokens do not fit in {tokens} positions"
        )
    ids = torch.full((tokens,), pad_id, dtype=torch.int64)
    labels = torch.full((tokens,), IGNORED, dtype=torch.int64)
    weights = torch.zeros(tokens, dtype=torch.float32)
    source_ids = torch.full((tokens,), -1, dtype=torch.int32)
    has_image = torch.zeros(tokens, dtype=torch.bool)
    index = {name: i for i, name in enumerate(sources)}
    media, lengths, at = [], [], 0
    for document in documents:
        stop = at + len(document)
        ids[at:stop] = document.ids
        weights[at : stop - 1] = document.loss_weights[1:] * (factors or {}).get(document.source, 1.0)
        labels[at : stop - 1] = torch.where(document.loss_weights[1:] > 0, document.ids[1:], IGNORED)
        source_ids[at:stop] = index[document.source]
        if document.grids:
            has_image[at:stop] = True
            media.append(document.media_positions + at)
        lengths.append(len(document))
        at = stop
    patches = [document.patches for document in documents if document.patches is not None]
    return PackedBatch(
        ids=ids,
        labels=labels,
        loss_weights=weights,
        segments=Segments.from_lengths(lengths + _filler(tokens - used, length or tokens)),
        patches=torch.cat(patches)
        if patches
        else torch.empty(0, 3, patch_size, patch_size, dtype=torch.uint8),
        grids=[grid for document in documents for grid in document.grids],
        media_positions=torch.cat(media) if media else torch.empty(0, dtype=torch.int64),
        source_ids=source_ids,
        sources=list(sources),
        has_image=has_image,
        keys=[f"{document.source}:{document.key}" for document in documents],
        num_filler=tokens - used,
        num_loss_weight=float(weights.sum()),
    )


def _filler(count: int, length: int) -> list[int]:
    whole, rest = divmod(count, length)
    return [length] * whole + ([rest] if rest else [])


class Sized(Protocol):
    """What the packer needs to know of a document."""

    def __len__(self) -> int: ...

    @property
    def num_patches(self) -> int: ...


def choose(
    pool: Sequence[Sized],
    tokens: int,
    max_patches: int,
    *,
    costs: Sequence[float] | None = None,
    max_cost: float = math.inf,
    aim: float | None = None,
    candidates: int = 96,
) -> list[int]:
    """Indices of the pool documents that share the next micro-batch, oldest first: a knapsack of three
    budgets.

    The oldest documents that fit are taken down to a rest of at most 2,048 positions (and at most half), so
    nothing waits for ever; the rest is an exact subset sum over the next `candidates` documents (a bit set in
    a Python integer: bit s says that s tokens can be reached). Where that selection breaks a budget,
    documents with pictures come longest first as far as they fit, and the exact sum goes over those without.

    costs: vision FLOPs of every document (balance.VisionCost), at most `max_cost` together. aim: cost the
    micro-batch should come to; rich and poor documents then take turns, oldest first in each, so that
    micro-batches of equal aim cost about the same.
    """
    spent = costs or [0.0] * len(pool)
    lengths = [len(document) for document in pool]
    chosen: list[int] = []
    room, patches, cost = tokens, max_patches, max_cost
    rest: list[int] = []
    order = range(len(pool)) if aim is None or not pool else _steer(lengths, spent, aim / tokens)
    for i in order:
        fits = lengths[i] <= room and pool[i].num_patches <= patches and spent[i] <= cost
        if room > min(tokens // 2, EXACT) and fits:
            chosen.append(i)
            room, patches, cost = room - lengths[i], patches - pool[i].num_patches, cost - spent[i]
        else:
            rest.append(i)
    rest = [i for i in rest if lengths[i] <= room and pool[i].num_patches <= patches and spent[i] <= cost]
    rest = rest[:candidates]
    extra = [rest[i] for i in _subset_sum([lengths[i] for i in rest], room)]
    if sum(pool[i].num_patches for i in extra) > patches or sum(spent[i] for i in extra) > cost:
        extra = _within(rest, pool, spent, (room, patches, cost))
    return sorted(chosen + extra)


def _steer(lengths: Sequence[int], costs: Sequence[float], per_token: float) -> list[int]:
    """All documents, the oldest first, in an order in which the first s tokens cost about per_token * s.

    Those with pictures and those without each keep their order.
    """
    order, used, spent = [0], lengths[0], costs[0]
    rich = [i for i in range(len(lengths) - 1, 0, -1) if costs[i] > 0]
    poor = [i for i in range(len(lengths) - 1, 0, -1) if not costs[i] > 0]
    while rich or poor:
        # whichever leaves the cost nearer to the line; a long text comes when pictures are half of it ahead
        tails = [tail for tail in (rich, poor) if tail]
        miss = [abs(spent + costs[tail[-1]] - per_token * (used + lengths[tail[-1]])) for tail in tails]
        order.append(tails[miss.index(min(miss))].pop())
        used, spent = used + lengths[order[-1]], spent + costs[order[-1]]
    return order


def _subset_sum(lengths: Sequence[int], room: int) -> list[int]:
    """Positions whose lengths sum as near to `room` as possible without going over; early ones are
    preferred."""
    mask = (1 << (room + 1)) - 1
    reach = [1]
    for length in lengths:
        reach.append((reach[-1] | (reach[-1] << length)) & mask)
        if reach[-1] >> room:
            break
    total = reach[-1].bit_length() - 1
    taken = []
    for i in range(len(reach) - 2, -1, -1):
        if not reach[i] >> total & 1:
            taken.append(i)
            total -= lengths[i]
    return taken[::-1]


def _within(
    rest: Sequence[int], pool: Sequence[Sized], costs: Sequence[float], left: tuple[int, int, float]
) -> list[int]:
    """Documents with pictures, longest first, as far as (tokens, patches, cost) of `left` allow; then exact
    over text."""
    room, patches, cost = left
    taken = []
    for i in sorted((i for i in rest if pool[i].num_patches), key=lambda i: (-len(pool[i]), i)):
        if len(pool[i]) <= room and pool[i].num_patches <= patches and costs[i] <= cost:
            taken.append(i)
            room, patches, cost = room - len(pool[i]), patches - pool[i].num_patches, cost - costs[i]
    text = [i for i in rest if not pool[i].num_patches]
    return taken + [text[i] for i in _subset_sum([len(pool[i]) for i in text], room)]


def pack_all(
    documents: Iterable[Encoded],
    *,
    tokens: int,
    max_patches: int,
    pad_id: int,
    sources: Sequence[str],
    patch_size: int,
    length: int | None = None,
    lookahead: int = 4,
) -> Iterator[PackedBatch]:
    """Pack a finite stream of documents (each at most `tokens` long, within `max_patches`): every one exactly
    once."""
    pool: list[Encoded] = []
    stream = iter(documents)
    done = False
    while pool or not done:
        while not done and sum(map(len, pool)) < lookahead * tokens:
            document = next(stream, None)
            if document is None:
                done = True
            else:
                pool.append(document)
        if not pool:
            return
        chosen = choose(pool, tokens, max_patches)
        if not chosen:
            raise ValueError(
                f"pack_all: {pool[0].key} of {len(pool[0])} tokens fits no batch of {tokens} positions"
            )
        batch = [pool[i] for i in chosen]
        pool = [document for i, document in enumerate(pool) if i not in set(chosen)]
        yield assemble(
            batch, tokens=tokens, pad_id=pad_id, sources=sources, patch_size=patch_size, length=length
        )
