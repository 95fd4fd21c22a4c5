"""Encoded documents -> PackedBatch: exactly `tokens` positions, documents side by side, filler at the end.

Legend: T positions of one micro-batch, P patches, p patch side in pixels, M media pads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from earlyfusion.data.encode import Encoded
from earlyfusion.kernels.segments import Segments
from earlyfusion.vision.patches import Grid

IGNORED = -100
"""Label of a position that is not trained."""


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
    def num_media_tokens(self) -> int:
        """M."""
        return self.media_positions.shape[0]

    @property
    def fill(self) -> float:
        """Share of the positions that hold data."""
        return self.num_tokens / max(1, self.ids.shape[0])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        names = ("ids", "labels", "loss_weights", "patches", "media_positions", "source_ids", "has_image")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=non_blocking) for name in names})


def assemble(
    documents: Sequence[Encoded],
    *,
    tokens: int,
    pad_id: int,
    sources: Sequence[str],
    patch_size: int,
    length: int | None = None,
) -> PackedBatch:
    """Put documents side by side in `tokens` positions and fill the rest with [PAD] documents of at most `length`.

    Raises ValueError when the documents do not fit.
    """
    used = sum(len(document) for document in documents)
    if used > tokens:
        raise ValueError(f"assemble: {len(documents)} documents of {used} tokens do not fit in {tokens} positions")
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
        weights[at : stop - 1] = document.loss_weights[1:]
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
        patches=torch.cat(patches) if patches else torch.empty(0, 3, patch_size, patch_size, dtype=torch.uint8),
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


def choose(pool: Sequence[Sized], tokens: int, max_patches: int, *, candidates: int = 96) -> list[int]:
    """Indices of the pool documents that share the next micro-batch, oldest first.

    The oldest documents that fit take the first half, so nothing waits for ever; the other half is an exact subset sum
    over the next `candidates` documents (a bit set in a Python integer: bit s says that s tokens can be reached). Where
    that selection breaks the patch budget, longest-first best fit takes its place.
    """
    chosen: list[int] = []
    room, patches = tokens, max_patches
    rest = []
    for i, document in enumerate(pool):
        if room > tokens // 2 and len(document) <= room and document.num_patches <= patches:
            chosen.append(i)
            room -= len(document)
            patches -= document.num_patches
        else:
            rest.append(i)
    rest = [i for i in rest if len(pool[i]) <= room and pool[i].num_patches <= patches][:candidates]
    extra = _subset_sum([len(pool[i]) for i in rest], room)
    if sum(pool[rest[i]].num_patches for i in extra) > patches:
        extra = _best_fit(rest, pool, room, patches)
    return sorted(chosen + [rest[i] for i in extra])


def _subset_sum(lengths: Sequence[int], room: int) -> list[int]:
    """Positions whose lengths sum as near to `room` as possible without going over; early ones are preferred."""
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


def _best_fit(rest: Sequence[int], pool: Sequence[Sized], room: int, patches: int) -> list[int]:
    taken = []
    for i in sorted(range(len(rest)), key=lambda i: (-len(pool[rest[i]]), i)):
        document = pool[rest[i]]
        if len(document) <= room and document.num_patches <= patches:
            taken.append(i)
            room -= len(document)
            patches -= document.num_patches
    return taken


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
    """Pack a finite stream of documents (each at most `tokens` long, within `max_patches`): every one exactly once."""
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
            raise ValueError(f"pack_all: {pool[0].key} of {len(pool[0])} tokens fits no batch of {tokens} positions")
        batch = [pool[i] for i in chosen]
        pool = [document for i, document in enumerate(pool) if i not in set(chosen)]
        yield assemble(batch, tokens=tokens, pad_id=pad_id, sources=sources, patch_size=patch_size, length=length)
