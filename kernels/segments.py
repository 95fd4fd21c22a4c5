"""Packing metadata: where the documents (or images) of one packed row begin and end.

A packed row is a tensor whose first axis holds T tokens of N documents, one after the other. Every kernel
takes such tensors and one :class:`Segments`. The lengths are Python integers known on the host before
anything is launched, so no kernel has to copy a device tensor back to find out how much work there is, and
every plan derived from them (cumulative lengths, chunk grids, masks, sort orders) is built once per packed
row and shared by all layers.

Legend: T tokens, N documents.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

Plan = TypeVar("Plan")
Device = torch.device | str


@dataclass(frozen=True)
class Segments:
    """Lengths (tokens) of the documents of one packed row, with a cache for everything derived from them.

    Two instances are equal when their lengths are equal. The cache is neither compared, copied nor pickled,
    so an instance may cross a process boundary cheaply.

    Raises:
        ValueError: a length is smaller than 1. Leave empty documents out instead.
        TypeError: a length is not an integer.
    """

    lengths: tuple[int, ...]
    _cache: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A tensor here would be a host sync in every kernel that asks.
        for index, length in enumerate(self.lengths):
            # bool is an int to Python, and a mask given for lengths would pass.
            if not isinstance(length, int) or isinstance(length, bool):
                raise TypeError(
                    f"Segments: document {index} has length {length!r} of type {type(length).__name__};"
                    " lengths are Python ints. Use Segments.from_lengths to convert."
                )
            if length < 1:
                raise ValueError(
                    f"Segments: document {index} has length {length}; every length must be at least 1. "
                    "Drop empty documents before packing."
                )

    def __reduce__(self) -> tuple[type[Segments], tuple[tuple[int, ...]]]:
        return (type(self), (self.lengths,))

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | Tensor) -> Segments:
        """Build from any sequence of integers (list, tuple, numpy or torch integers)."""
        values = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        return cls(tuple(int(value) for value in values))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First token of every document, then T: N + 1 Python ints."""
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def total(self) -> int:
        """T, the number of tokens of the row."""
        return self.offsets[-1]

    @property
    def num(self) -> int:
        """N, the number of documents."""
        return len(self.lengths)

    @property
    def max_length(self) -> int:
        """Tokens of the longest document; 0 for an empty row."""
        return max(self.lengths, default=0)

    def cached(self, key: Hashable, build: Callable[[], Plan]) -> Plan:
        """The value stored under ``key``, made by ``build()`` on first use.

        A key names its owner and everything the value depends on besides the lengths, for instance
        ``("kda.grid", chunk, str(device))``. Tensors are made outside inference mode: a plan first built by
        an evaluation must remain usable in a later training step.
        """
        if key not in self._cache:
            with torch.inference_mode(False):
                self._cache[key] = build()
        return self._cache[key]

    def cu_seqlens(self, device: Device = "cpu") -> Tensor:
        """Cumulative lengths, int32 [N + 1]."""
        return self.cached(
            ("cu_seqlens", str(device)), lambda: torch.tensor(self.offsets, dtype=torch.int32, device=device)
        )

    def ids(self, device: Device = "cpu") -> Tensor:
        """Document index of every token, int32 [T]."""

        def build() -> Tensor:
            # Made on the host, then copied once: a repeat on the device would have to know its size.
            lengths = torch.tensor(self.lengths, dtype=torch.int64)
            index = torch.arange(self.num, dtype=torch.int32)
            return torch.repeat_interleave(index, lengths).to(device)

        return self.cached(("ids", str(device)), build)

    def position(self, device: Device = "cpu") -> Tensor:
        """Position of every token inside its own document, int32 [T], counted from 0."""

        def build() -> Tensor:
            starts = torch.tensor(self.offsets[:-1], dtype=torch.int32)
            lengths = torch.tensor(self.lengths, dtype=torch.int64)
            return (
                torch.arange(self.total, dtype=torch.int32) - torch.repeat_interleave(starts, lengths)
            ).to(device)

        return self.cached(("position", str(device)), build)
