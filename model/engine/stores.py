"""What layers see of the engine's memory: KDA slots and MLA pages, and the plan of a call that tells where
its tokens stand.

The keys of absorbed attention are walked in tiles whose borders depend on the position alone, with an online
softmax: a row's result does not depend on how long its neighbours in the batch are (keys that a row may not
see add exactly zero), and the working space stays bounded however long the context is. Where the Triton
backend is chosen, single tokens go through `mla_decode` over the pages in place, and the layer itself attends
chunks over `latents`.

Shapes: S slots, P pages, N sequences, H heads, K key dim, V value dim, C channels, W width of the convolution
or queries per sequence, R rank plus shared key part, L latents read, T new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from earlyfusion.kernels.dispatch import pick, resolve
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.cache import Reads, attend_in_tiles


@dataclass(frozen=True)
class PooledPlan:
    """Where one call's tokens stand. slots_N: the sequences' slots. rows_T: latent row (page * page_size +
    offset) of every new token. pages_NP: pages of every sequence in order, as many as `tiles` wants
    positions. last_NW: last position query w may see. places_T: place of every new token in the padded [N *
    W] queries (None for single tokens)."""

    single: bool
    fresh: bool
    slots_N: Tensor
    rows_T: Tensor
    pages_NP: Tensor
    last_NW: Tensor
    places_T: Tensor | None
    slot_range: tuple[int, int] | None = None
    """(first, end) when the slots of real sequences are consecutive: then states are worked on where they
    lie."""
    live: int | None = None
    """Single tokens: sequences that are real; the padding rows after them attend to nothing and get zeros."""
    seen: int = 0
    """Keys that every query of the call may see, as far as the host knows."""
    reach: int | None = None
    """One past the last key that any query of the call may see, as far as the host knows."""
    windows: Windows | None = None
    ends: PooledPlan | None = None
    """Of chunks: the plan of the tokens at which prompts end, as single tokens."""
    reads: Reads | None = None
    """Of chunks after a past: where all latents of their sequences lie."""

    @property
    def fills_range(self) -> bool:
        """Whether the call's rows are exactly those of `slot_range`."""
        return (
            self.slot_range is not None and self.slot_range[1] - self.slot_range[0] == self.slots_N.shape[0]
        )


class Windows:
    """Latents of the running sequences laid out row by row, so that a step need not gather them from their
    pages.

    Made when first asked for, written along with the pages, good for one batch: the engine makes a new one
    when the sequences change. Long contexts go without (`most` bytes per layer).
    """

    def __init__(self, most: int = 32 << 20) -> None:
        self.most = most
        self.tensors: dict[int, Tensor] = {}

    def keys(self, memory: MlaPages, plan: PooledPlan, count: int) -> Tensor | None:
        """[count, L, R] with all latents of the plan's sequences, or None if that is too much."""
        length, size = plan.pages_NP.shape[1] * memory.page_size, memory.latents_XR.shape[1]
        if count * length * size * memory.latents_XR.element_size() > self.most:
            return None
        found = self.tensors.get(id(memory))
        if found is None or found.shape[1] != length:
            pages = memory.latents_XR.view(-1, memory.page_size * size)
            found = pages.index_select(0, plan.pages_NP[:count].reshape(-1)).view(count, length, size)
            self.tensors[id(memory)] = found
        return found

    def append(self, memory: MlaPages, plan: PooledPlan, new_BR: Tensor) -> None:
        """The new tokens' latents, after they have been written to the pages."""
        window = self.tensors.get(id(memory))
        if window is not None and window.shape[1] == plan.pages_NP.shape[1] * memory.page_size:
            count, length = window.shape[:2]
            rows = torch.arange(0, count * length, length).add_(plan.last_NW[:count, 0])
            window.view(count * length, -1).index_copy_(0, rows, new_BR[:count])


class KdaSlots:
    """Memory of one KDA layer over all slots: state [S, H, K, V] fp32, taps [S, W - 1, C]."""

    def __init__(self, state_SHKV: Tensor, taps_SWC: Tensor) -> None:
        self.state_SHKV, self.taps_SWC = state_SHKV, taps_SWC
        self._joined: tuple[Tensor, Tensor] | None = None

    def read(self, plan: PooledPlan) -> tuple[Tensor | None, Tensor | None]:
        if plan.fresh:
            return None, None
        if plan.slot_range is not None and plan.fills_range:
            rows = slice(*plan.slot_range)
            return self.state_SHKV[rows], self.taps_SWC[rows].transpose(1, 2)
        return self.state_SHKV.index_select(0, plan.slots_N), self.taps_SWC[plan.slots_N].transpose(1, 2)

    def write(self, plan: PooledPlan, state_NHKV: Tensor, taps_NCW1: Tensor) -> None:
        taps_NWC = taps_NCW1.transpose(1, 2).to(self.taps_SWC.dtype)
        if plan.slot_range is not None and plan.fills_range:
            rows = slice(*plan.slot_range)
            self.state_SHKV[rows] = state_NHKV
            self.taps_SWC[rows] = taps_NWC
        else:
            self.state_SHKV.index_copy_(0, plan.slots_N, state_NHKV)
            self.taps_SWC.index_copy_(0, plan.slots_N, taps_NWC)

    def open(self, plan: PooledPlan) -> tuple[Tensor, Tensor]:
        """(state, taps [N, W - 1, C]) of the live sequences of a step, to be advanced in place and given to
        `close`."""
        if plan.slot_range is not None:
            rows = slice(*plan.slot_range)
            return self.state_SHKV[rows], self.taps_SWC[rows]
        slots = plan.slots_N[: plan.live]
        return self.state_SHKV.index_select(0, slots), self.taps_SWC.index_select(0, slots)

    def close(self, plan: PooledPlan, state_NHKV: Tensor, taps_NWC: Tensor) -> None:
        if plan.slot_range is None:
            slots = plan.slots_N[: plan.live]
            self.state_SHKV.index_copy_(0, slots, state_NHKV)
            self.taps_SWC.index_copy_(0, slots, taps_NWC)

    def decode(
        self, plan: PooledPlan, qkv: Tensor, f: Tensor, b: Tensor, weight: Tensor, layer: Any
    ) -> Tensor | None:
        """None: `read`, the layer's own step and `write` do it."""
        return None

    def taken(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """(state [H, K, V], taps [W - 1, C]) of a slot that holds `length` tokens."""
        return self.state_SHKV[slot], self.taps_SWC[slot]

    def put(self, slot: int, length: int, state_HKV: Tensor, taps_WC: Tensor) -> None:
        """The reverse of `taken`."""
        self.state_SHKV[slot].copy_(state_HKV)
        self.taps_SWC[slot].copy_(taps_WC)

    def joined(self, layer: Any) -> tuple[Tensor, Tensor]:
        if self._joined is None:
            self._joined = layer.joined_weights()
        return self._joined

    def refresh(self, layer: Any) -> None:
        """Read the layer's weights again, into the same storage (a captured graph may point at it)."""
        if self._joined is not None:
            with torch.inference_mode():  # made in a step of the engine, they may be inference tensors
                for old, new in zip(self._joined, layer.joined_weights()):
                    old.copy_(new)

    def tensors(self) -> tuple[Tensor, ...]:
        """All that a slot holds, slots first."""
        return self.state_SHKV, self.taps_SWC


class MlaPages:
    """Memory of one MLA layer over all pages: latents [P * page_size, R]."""

    def __init__(self, latents_XR: Tensor, page_size: int) -> None:
        self.latents_XR, self.page_size = latents_XR, page_size

    def append(self, new_TR: Tensor, plan: PooledPlan) -> None:
        new_TR = new_TR.to(self.latents_XR.dtype)
        self.latents_XR.index_copy_(0, plan.rows_T, new_TR)
        if plan.windows is not None:
            plan.windows.append(self, plan, new_TR)

    def latents(self, plan: PooledPlan) -> Tensor:
        assert plan.reads is not None
        return self.latents_XR.index_select(0, plan.reads.rows_L)

    def attend(self, query_THR: Tensor, plan: PooledPlan, rank: int, scale: float) -> Tensor:
        """Online softmax over tiles of keys, statistics in fp32; see the head of the file."""
        if plan.single and pick("mla_decode", query_THR.device) == "triton":
            return self._attend_in_place(query_THR, plan, rank, scale)
        heads, size = query_THR.shape[1:]
        width = plan.last_NW.shape[1]
        count = plan.last_NW.shape[0] if plan.live is None else plan.live
        if plan.places_T is None:
            query = query_THR[:count]
        else:
            query = query_THR.new_zeros(count * width, heads, size).index_copy_(0, plan.places_T, query_THR)
        query_NXR = query.view(count, width * heads, size)
        last_NX1 = plan.last_NW[:count].repeat_interleave(heads, dim=1).unsqueeze(-1)
        page = self.page_size
        latents_PY = self.latents_XR.view(-1, page * size)

        window = None if plan.windows is None else plan.windows.keys(self, plan, count)

        def keys(start: int, stop: int) -> Tensor:
            if window is not None:
                return window[:, start:stop]
            index = plan.pages_NP[:count, start // page : stop // page].reshape(-1)
            return latents_PY.index_select(0, index).view(count, stop - start, size)

        length = plan.pages_NP.shape[1] * page
        reach = plan.reach if window is not None else None
        out = attend_in_tiles(query_NXR, last_NX1, length, keys, rank, scale, plan.seen, reach).view(
            -1, heads, rank
        )
        if plan.places_T is not None:
            return out.index_select(0, plan.places_T)
        padding = query_THR.shape[0] - count
        return out if not padding else torch.cat([out, out.new_zeros(padding, heads, rank)])

    def _attend_in_place(self, query_THR: Tensor, plan: PooledPlan, rank: int, scale: float) -> Tensor:
        """By the kernel; padding rows look at the first row of page 0."""
        pages_PSR = self.latents_XR.view(-1, self.page_size, self.latents_XR.shape[1])
        lengths_N = plan.last_NW[:, 0] + 1
        mla_decode = resolve("mla_decode", query_THR.device)
        return mla_decode(
            query_THR.contiguous(), pages_PSR, plan.pages_NP.contiguous(), lengths_N, rank, scale
        )[0]


@dataclass
class PooledCache:
    """The pools as `Decoder.forward` wants a cache: a fixed plan, lengths kept by the engine."""

    layers: Sequence[KdaSlots | MlaPages]
    plan: PooledPlan

    def begin(self, segments: Segments, device: torch.device) -> PooledPlan:
        return self.plan

    def commit(self, segments: Segments) -> None:
        return None
