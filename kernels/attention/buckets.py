"""How the documents of a packed row are batched: a few padded rectangles instead of many small products.

Documents of equal length share a bucket; only short ones are padded, at the end, to share one with slightly longer
ones (padding costs more than it saves from about fifty tokens on: the products are then large enough). Building a plan needs only host lengths; it is made once per packed row and device and shared
by all layers (``Segments.cached``).

Legend: T tokens, B documents of a bucket, L their padded length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from earlyfusion.kernels.segments import Segments

SLACK = 48**2  # L^2 work of padding that costs less than issuing one more bucket


@dataclass(frozen=True)
class Bucket:
    """B documents padded to L tokens.

    ``rows`` are their tokens in the packed row and ``slots`` the places of those tokens in the flattened [B * L]
    rectangle. When the documents are adjacent and equally long, ``rows`` is a slice, ``slots`` is None and the
    rectangle is a view.
    """

    documents: int
    length: int
    rows: Tensor | slice
    slots: Tensor | None
    lengths_B: Tensor

    def pad(self, x: Tensor) -> Tensor:
        """[T, ...] -> [B, L, ...], zeros after the end of every document."""
        shape = (self.documents, self.length, *x.shape[1:])
        if self.slots is None:
            return x[self.rows].reshape(shape)
        padded = x.new_zeros(self.documents * self.length, *x.shape[1:])
        return padded.index_copy_(0, self.slots, x[self.rows]).view(shape)

    def unpad_into(self, out: Tensor, x: Tensor) -> None:
        """Write the real tokens of [B, L, ...] to their places in ``out`` [T, ...]."""
        flat = x.reshape(self.documents * self.length, *x.shape[2:])
        out[self.rows] = (flat if self.slots is None else flat[self.slots]).to(out.dtype)

    def key_bias(self, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [B, L]: 0 for tokens, -inf for padding; None if nothing is padded."""
        if self.slots is None or self.slots.shape[0] == self.documents * self.length:
            return None
        device = self.lengths_B.device
        padding_BL = torch.arange(self.length, device=device) >= self.lengths_B[:, None]
        return torch.zeros(padding_BL.shape, dtype=dtype, device=device).masked_fill_(padding_BL, float("-inf"))


def group_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of documents per bucket, longest first, so that padding wastes at most SLACK per bucket."""
    groups: list[list[int]] = []
    useful = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        work = lengths[index] ** 2
        longest = lengths[groups[-1][0]] ** 2 if groups else 0
        if groups and (len(groups[-1]) + 1) * longest <= useful + work + SLACK:
            groups[-1].append(index)
            useful += work
        else:
            groups.append([index])
            useful = work
    return groups


def _bucket(segments: Segments, group: list[int], device: torch.device) -> Bucket:
    group = sorted(group)
    lengths, starts = [segments.lengths[i] for i in group], [segments.offsets[i] for i in group]
    length, total = max(lengths), sum(lengths)
    lengths_B = torch.tensor(lengths)
    if min(lengths) == length and starts == list(range(starts[0], starts[0] + total, length)):
        return Bucket(len(group), length, slice(starts[0], starts[0] + total), None, lengths_B.to(device))
    within = torch.cat([torch.arange(n) for n in lengths])
    rows = torch.repeat_interleave(torch.tensor(starts), lengths_B) + within
    slots = torch.repeat_interleave(torch.arange(len(group)) * length, lengths_B) + within
    return Bucket(len(group), length, rows.to(device), slots.to(device), lengths_B.to(device))


def buckets(segments: Segments, device: torch.device) -> tuple[Bucket, ...]:
    """The cached plan of this packed row on this device; empty for an empty row."""

    def build() -> tuple[Bucket, ...]:
        return tuple(_bucket(segments, group, device) for group in group_lengths(segments.lengths))

    return segments.cached(("attention.buckets", str(device)), build)
