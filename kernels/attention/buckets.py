"""How the documents of a packed row are batched: a few padded rectangles instead of many small products.

Documents of equal length share a bucket; only short ones are padded, at the end, to share one with slightly
longer ones (with longer ones padding costs more than it saves: their products are large enough on their own).
Building a plan needs only host lengths; it is made once per packed row and device and shared by all layers
(``Segments.cached``).

Legend: T tokens, B documents of a bucket, L their padded length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from earlyfusion.kernels.segments import Segments

# A launch costs about as much as the square of so many tokens.
SLACK = 32**2  # L^2 work of padding that costs less than issuing one more bucket


@dataclass(frozen=True)
class Bucket:
    """B documents padded to L tokens.

    ``rows`` are their tokens in the packed row and ``slots`` the places of those tokens in the flattened [B *
    L] rectangle. When the documents are adjacent and unpadded, ``span`` is their part of the row and the
    rectangle a view.
    """

    documents: int
    length: int
    rows: Tensor
    slots: Tensor
    span: slice | None
    lengths_B: Tensor

    def pad(self, x: Tensor) -> Tensor:
        """[T, ...] -> [B, L, ...], zeros after the end of every document."""
        shape = (self.documents, self.length, *x.shape[1:])
        # Documents of one length next to each other, as pictures of one size are: no copy at all.
        if self.span is not None:
            return x[self.span].reshape(shape)
        # Zeros, not garbage: padded keys get -inf, but 0 times NaN is NaN.
        padded = x.new_zeros(self.documents * self.length, *x.shape[1:])
        return padded.index_copy_(0, self.slots, x.index_select(0, self.rows)).view(shape)

    def unpad_into(self, out: Tensor, x: Tensor) -> None:
        """Write the real tokens of [B, L, ...] to their places in ``out`` [T, ...]."""
        flat = x.reshape(self.documents * self.length, *x.shape[2:])
        if self.span is not None:
            out[self.span] = flat
        else:
            out.index_copy_(0, self.rows, flat.index_select(0, self.slots).to(out.dtype))

    def key_bias(self, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [B, L]: 0 for tokens, -inf for padding; None if nothing is padded."""
        if self.slots.shape[0] == self.documents * self.length:
            return None
        device = self.lengths_B.device
        # Under a causal mask nobody asks for this: padding stands behind every token.
        padding_BL = torch.arange(self.length, device=device) >= self.lengths_B[:, None]
        return torch.zeros(padding_BL.shape, dtype=dtype, device=device).masked_fill_(
            padding_BL, float("-inf")
        )


def padded_length(length: int, multiple: int) -> int:
    """``length`` rounded up to a multiple."""
    return -(-length // multiple) * multiple


def group_lengths(lengths: Sequence[int], multiple: int, slack: int = SLACK) -> list[list[int]]:
    """Indices of documents per bucket, longest first, so that padding wastes at most ``slack`` per bucket.

    Rounding up to ``multiple`` is not counted as waste.
    """
    groups: list[list[int]] = []
    useful = longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # Work of a document is the square of its length.
        work = padded_length(lengths[index], multiple) ** 2
        if groups and (len(groups[-1]) + 1) * longest <= useful + work + slack:
            groups[-1].append(index)
            useful += work
        else:
            groups.append([index])
            useful = longest = work
    return groups


def _bucket(segments: Segments, group: list[int], multiple: int, device: torch.device) -> Bucket:
    group = sorted(group)
    lengths, starts = [segments.lengths[i] for i in group], [segments.offsets[i] for i in group]
    length, total = padded_length(max(lengths), multiple), sum(lengths)
    lengths_B = torch.tensor(lengths)
    # Positions inside each document, then their places in the row and in the rectangle.
    within = torch.cat([torch.arange(n) for n in lengths])
    rows = torch.repeat_interleave(torch.tensor(starts), lengths_B) + within
    slots = torch.repeat_interleave(torch.arange(len(group)) * length, lengths_B) + within
    # Equal and next to each other: the rectangle is a view of the row.
    adjacent = min(lengths) == length and starts == list(range(starts[0], starts[0] + total, length))
    span = slice(starts[0], starts[0] + total) if adjacent else None
    return Bucket(len(group), length, rows.to(device), slots.to(device), span, lengths_B.to(device))


def buckets(segments: Segments, device: torch.device, multiple: int = 1) -> tuple[Bucket, ...]:
    """The cached plan of this packed row on this device, lengths rounded up to ``multiple``; empty for an
    empty row.

    Without gradients on a CPU no document is padded to its neighbours' length: what it gets is then the same
    bits whatever shares its row (a longer sum is split otherwise).
    """
    # Part of the key: a plan made for training must not serve an evaluation.
    slack = SLACK if torch.is_grad_enabled() or device.type != "cpu" else 0

    def build() -> tuple[Bucket, ...]:
        groups = group_lengths(segments.lengths, multiple, slack)
        return tuple(_bucket(segments, group, multiple, device) for group in groups)

    return segments.cached(("attention.buckets", multiple, slack, str(device)), build)
