"""What a decoder remembers between calls: KDA states and convolution taps, MLA latents.

One cache serves N sequences at once. Every decoder call brings new tokens for each of them, packed in the
order of the sequences: any number in a prefill (also a continued one), exactly one each in a decode step.

Layers see a memory only through its methods: `read`, `write` and `joined` of a KDA memory, `append` and
`attend` of an MLA memory. The memories here hold each sequence in a row of its own; those of the engine
(model/engine/cache.py) hold slots and pages.

Shapes: N sequences, H heads, K key dim, V value dim, C convolution channels, W kernel width (of a
convolution) or queries per sequence (of attention), L capacity, T new tokens, R latent rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from earlyfusion.kernels.attention.tiles import attend_in_tiles
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
    """What `Decoder.forward` takes."""

    @property
    def layers(self) -> Any: ...
    def begin(self, segments: Segments, device: torch.device) -> CallPlan: ...
    def commit(self, segments: Segments) -> None: ...


@dataclass
class KdaMemory:
    """State of one KDA layer. state_NHKV fp32; taps_NCW1 the last W-1 inputs of the short convolution."""

    state_NHKV: Tensor | None = None
    taps_NCW1: Tensor | None = None

    def read(self, plan: Plan) -> tuple[Tensor | None, Tensor | None]:
        return self.state_NHKV, self.taps_NCW1

    def write(self, plan: Plan, state_NHKV: Tensor, taps_NCW1: Tensor) -> None:
        self.state_NHKV, self.taps_NCW1 = state_NHKV, taps_NCW1

    def decode(
        self, plan: Plan, qkv: Tensor, f: Tensor, b: Tensor, weight: Tensor, layer: Any
    ) -> Tensor | None:
        return None

    def joined(self, layer: Any) -> tuple[Tensor, Tensor]:
        return layer.joined_weights()

    def reorder(self, index: Tensor) -> None:
        if self.state_NHKV is not None and self.taps_NCW1 is not None:
            self.state_NHKV = self.state_NHKV.index_select(0, index)
            self.taps_NCW1 = self.taps_NCW1.index_select(0, index)


@dataclass
class MlaMemory:
    """Latents of one MLA layer: [N, L, kv_lora_rank + qk_rope_head_dim], normed latent first, shared key part
    last."""

    latents_NLR: Tensor | None = None

    def append(self, new_TR: Tensor, plan: Plan) -> None:
        """Store the new tokens' latents; rows past a sequence's length are unset zeros."""
        shape = (plan.sequences, plan.capacity, new_TR.shape[-1])
        old = self.latents_NLR
        if old is None:
            old = new_TR.new_zeros(shape)
        elif old.shape[1] < plan.capacity:
            grown = old.new_zeros(shape)
            grown[:, : old.shape[1]] = old
            old = grown
        old.view(-1, shape[-1]).index_copy_(0, plan.rows_T, new_TR.to(old.dtype))
        self.latents_NLR = old

    def attend(self, query_THR: Tensor, plan: Plan, rank: int, scale: float) -> Tensor:
        """See `attend_in_tiles`."""
        latents_NLR = self.latents_NLR
        assert latents_NLR is not None
        heads, size = query_THR.shape[1:]
        if plan.single:
            query_NXR = query_THR
        else:
            padded = query_THR.new_zeros(plan.sequences * plan.width, heads, size)
            query_NXR = padded.index_copy(0, plan.slots_T, query_THR).view(plan.sequences, -1, size)

        def keys(start: int, stop: int) -> Tensor:
            part = latents_NLR[:, start:stop]
            return torch.nn.functional.pad(part, (0, 0, 0, stop - start - part.shape[1]))

        last_NX1 = plan.last_NW.repeat_interleave(heads, dim=1).unsqueeze(-1)
        mixed_NXR, _ = attend_in_tiles(query_NXR, last_NX1, plan.capacity, keys, rank, scale)
        return mixed_NXR.view(-1, heads, rank).index_select(0, plan.slots_T)

    def latents(self, plan: Plan) -> Tensor:
        assert self.latents_NLR is not None and plan.reads is not None
        return self.latents_NLR.flatten(0, 1).index_select(0, plan.reads.rows_L)

    def reorder(self, index: Tensor) -> None:
        if self.latents_NLR is not None:
            self.latents_NLR = self.latents_NLR.index_select(0, index)


@dataclass(frozen=True)
class Plan:
    """Where one call's tokens stand; built once per call on the host and shared by all layers.

    rows_T: row of every new token in the flattened [N * capacity] latent buffer. slots_T: its row in a padded
    [N * width] query buffer. last_NW: the last position query w of sequence n may see.
    """

    sequences: int
    capacity: int
    width: int
    single: bool
    fresh: bool
    rows_T: Tensor
    slots_T: Tensor
    last_NW: Tensor
    reads: Reads | None = None


@dataclass
class DecoderCache:
    """Memories of all layers plus the length of every sequence (host integers, so no device sync is needed).

    layers: one KdaMemory or MlaMemory per decoder layer, in order (build with `Decoder.new_cache`).
    """

    layers: list[KdaMemory | MlaMemory]
    lengths: tuple[int, ...]
    capacity: int = 0
    plan: Plan | None = field(default=None, repr=False)

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    def begin(self, segments: Segments, device: torch.device) -> Plan:
        """Plan a call that brings `segments.lengths[n]` new tokens for sequence n.

        Raises ValueError if the number of segments is not the number of cached sequences.
        """
        if segments.num != self.num_sequences:
            raise ValueError(
                f"the cache holds {self.num_sequences} sequences but the call brings {segments.num} segments;"
                " give one segment of new tokens per sequence, in the cache's order (reorder() drops"
                " finished sequences)"
            )
        width = segments.max_length
        longest = max((past + new for past, new in zip(self.lengths, segments.lengths)), default=0)
        if longest > self.capacity:
            # doubling keeps the copies of a long generation linear in its length
            self.capacity = max(longest, 2 * self.capacity) if self.capacity else longest + 64
        past_N = torch.tensor(self.lengths, dtype=torch.long)
        new_N = torch.tensor(segments.lengths, dtype=torch.long)
        sequence_T = torch.repeat_interleave(torch.arange(segments.num), new_N)
        start_N = torch.cumsum(new_N, 0) - new_N
        offset_T = torch.arange(segments.total) - start_N[sequence_T]
        last_NW = past_N[:, None] + torch.arange(width)
        fresh, reads = not any(self.lengths), None
        if width > 1 and not fresh:
            ends = (past_N + new_N).tolist()
            reads = Reads.of(
                [row * self.capacity + torch.arange(end) for row, end in enumerate(ends)], device
            )
        self.plan = Plan(
            sequences=segments.num,
            capacity=self.capacity,
            width=width,
            single=width == 1,
            fresh=fresh,
            rows_T=(sequence_T * self.capacity + past_N[sequence_T] + offset_T).to(device),
            slots_T=(sequence_T * width + offset_T).to(device),
            last_NW=last_NW.to(device),
            reads=reads,
        )
        return self.plan

    def commit(self, segments: Segments) -> None:
        """Count the call's tokens as seen; the decoder calls this once after its last layer."""
        self.lengths = tuple(past + new for past, new in zip(self.lengths, segments.lengths))

    def reorder(self, index: list[int]) -> None:
        """Keep the sequences index[0], index[1], ... in that order: drops finished ones, repeats branching
        ones.

        Raises IndexError for a sequence that is not there.
        """
        wrong = [i for i in index if not 0 <= i < self.num_sequences]
        if wrong:
            raise IndexError(f"reorder({index}): sequences {wrong} are not among 0..{self.num_sequences - 1}")
        self.lengths = tuple(self.lengths[i] for i in index)
        for memory in self.layers:
            tensor = memory.state_NHKV if isinstance(memory, KdaMemory) else memory.latents_NLR
            if tensor is not None:
                memory.reorder(torch.tensor(index, dtype=torch.long, device=tensor.device))
