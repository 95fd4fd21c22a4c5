"""What a decoder remembers between calls, as its layers see it: KDA states and convolution taps, MLA latents.

A call brings new tokens for N sequences, packed in the order of the sequences: any number each in a prefill
(also a continued one), exactly one each in a decode step. Layers see a memory only through the methods below;
the memories themselves, slots and pages, stand in model/engine/cache.py.

Shapes: N sequences, H heads, K key dim, V value dim, C convolution channels, W kernel width of the
convolution, T new tokens, R latent rank plus shared key part, L tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from earlyfusion.kernels.dispatch import has_kernel
from earlyfusion.kernels.segments import Segments


@dataclass(frozen=True)
class Reads:
    """All tokens of a call's sequences, for a kernel that wants their keys packed. segments: lengths, the new
    tokens included. rows_L: rows of their latents in the flattened memory."""

    segments: Segments
    rows_L: Tensor

    @classmethod
    def of(cls, rows: Sequence[Tensor], device: torch.device) -> Reads | None:
        """From the latent rows of every sequence; None where no kernel takes them (`MlaStore.attend` is the
        way)."""
        if not has_kernel("attention_append", device):
            return None
        return cls(Segments(tuple(len(each) for each in rows)), torch.cat(list(rows)).to(device))


class CallPlan(Protocol):
    """What layers ask of a plan. single: one new token per sequence. fresh: no sequence has a past. reads: of
    several new tokens after a past, where a kernel takes them."""

    @property
    def single(self) -> bool: ...
    @property
    def fresh(self) -> bool: ...
    @property
    def reads(self) -> Reads | None: ...


class KdaStore(Protocol):
    """The memory of one KDA layer."""

    def read(self, plan: Any) -> tuple[Tensor | None, Tensor | None]:
        """(state_NHKV, taps_NCW1) of the call's sequences; None for a start from nothing."""
        ...

    def write(self, plan: Any, state_NHKV: Tensor, taps_NCW1: Tensor) -> None: ...

    def decode(
        self, plan: Any, qkv: Tensor, f: Tensor, b: Tensor, weight: Tensor, layer: Any
    ) -> Tensor | None:
        """One token of every sequence by a kernel that works on the memory in place, from the layer's
        projections (before the convolution, whose weight is given): heads' outputs [N, H, V]. None: use
        `read` and `write`."""
        ...

    def joined(self, layer: Any) -> tuple[Tensor, Tensor]:
        """The layer's `joined_weights()`, perhaps remembered."""
        ...


class MlaStore(Protocol):
    """The memory of one MLA layer."""

    def append(self, new_TR: Tensor, plan: Any) -> None:
        """Store the new tokens' latents (normed latent first, shared key part last)."""
        ...

    def attend(self, query_THR: Tensor, plan: Any, rank: int, scale: float) -> Tensor:
        """Softmax attention of absorbed queries over all latents of their sequence up to their own token; the
        mixed latents [T, H, rank], whose values are the first `rank` channels."""
        ...

    def latents(self, plan: Any) -> Tensor:
        """All latents of the call's sequences, packed as `plan.reads` says."""
        ...


class Cache(Protocol):
    """What `Decoder.forward` takes: a memory for every layer, and where the call's tokens stand in them."""

    @property
    def layers(self) -> Sequence[Any]: ...
    @property
    def plan(self) -> Any: ...
