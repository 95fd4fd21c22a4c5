"""The engine's memory: a pool of KDA slots and a pool of MLA pages, allocated once.

A *slot* holds what the KDA layers know of one sequence (state and convolution taps of every layer): a fixed size,
whatever its length. A *page* holds the latents of `page_size` consecutive tokens in every MLA layer. Pages are counted
by reference, so that sequences with a common beginning share them; a sequence that must write into a page it shares
takes a copy first. Slot 0 and page 0 are never given out: padding rows of a batch read and write them.

The keys of absorbed attention are walked in tiles whose borders depend on the position alone, with an online softmax:
a row's result does not depend on how long its neighbours in the batch are (keys that a row may not see add exactly
zero), and the working space stays bounded however long the context is.

Shapes: S slots, P pages, N sequences, H heads, K key dim, V value dim, C channels, W width of the convolution or
queries per sequence, R rank plus shared key part, L latents read, T new tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from earlyfusion.kernels.precision import accumulate_dtype
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.cache import attend_in_tiles
from earlyfusion.model.config import ModelConfig


@dataclass(frozen=True)
class PooledPlan:
    """Where one call's tokens stand. slots_N: the sequences' slots. rows_T: latent row (page * page_size + offset) of
    every new token. pages_NP: pages of every sequence in order, as many as `tiles` wants positions. last_NW: last
    position query w may see. places_T: place of every new token in the padded [N * W] queries (None for single tokens)."""

    single: bool
    fresh: bool
    slots_N: Tensor
    rows_T: Tensor
    pages_NP: Tensor
    last_NW: Tensor
    places_T: Tensor | None
    slot_range: tuple[int, int] | None = None
    """(first, end) when the slots of real sequences are consecutive: then states are worked on where they lie."""
    live: int | None = None
    """Single tokens: sequences that are real; the padding rows after them attend to nothing and get zeros."""
    seen: int = 0
    """Keys that every query of the call may see, as far as the host knows."""
    windows: Windows | None = None
    ends: PooledPlan | None = None
    """Of chunks: the plan of the tokens at which prompts end, as single tokens."""

    @property
    def fills_range(self) -> bool:
        """Whether the call's rows are exactly those of `slot_range`."""
        return self.slot_range is not None and self.slot_range[1] - self.slot_range[0] == self.slots_N.shape[0]


class Windows:
    """Latents of the running sequences laid out row by row, so that a step need not gather them from their pages.

    Made when first asked for, written along with the pages, good for one batch: the engine makes a new one when the
    sequences change. Long contexts go without (`most` bytes per layer).
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
        if plan.fills_range:
            rows = slice(*plan.slot_range)
            return self.state_SHKV[rows], self.taps_SWC[rows].transpose(1, 2)
        return self.state_SHKV.index_select(0, plan.slots_N), self.taps_SWC[plan.slots_N].transpose(1, 2)

    def write(self, plan: PooledPlan, state_NHKV: Tensor, taps_NCW1: Tensor) -> None:
        taps_NWC = taps_NCW1.transpose(1, 2).to(self.taps_SWC.dtype)
        if plan.fills_range:
            rows = slice(*plan.slot_range)
            self.state_SHKV[rows] = state_NHKV
            self.taps_SWC[rows] = taps_NWC
        else:
            self.state_SHKV.index_copy_(0, plan.slots_N, state_NHKV)
            self.taps_SWC.index_copy_(0, plan.slots_N, taps_NWC)

    def open(self, plan: PooledPlan) -> tuple[Tensor, Tensor]:
        """(state, taps [N, W - 1, C]) of the live sequences of a step, to be advanced in place and given to `close`."""
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

    def joined(self, layer: Any) -> tuple[Tensor, Tensor]:
        if self._joined is None:
            self._joined = layer.joined_weights()
        return self._joined

    def refresh(self, layer: Any) -> None:
        """Read the layer's weights again, into the same storage (a captured graph may point at it)."""
        if self._joined is not None:
            for old, new in zip(self._joined, layer.joined_weights()):
                old.copy_(new)

    def tensors(self) -> tuple[Tensor, Tensor]:
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

    def attend(self, query_THR: Tensor, plan: PooledPlan, rank: int, scale: float) -> Tensor:
        """Online softmax over tiles of keys, statistics in fp32; see the head of the file."""
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
        out = attend_in_tiles(query_NXR, last_NX1, length, keys, rank, scale, plan.seen).view(-1, heads, rank)
        if plan.places_T is not None:
            return out.index_select(0, plan.places_T)
        padding = query_THR.shape[0] - count
        return out if not padding else torch.cat([out, out.new_zeros(padding, heads, rank)])


@dataclass
class PooledCache:
    """The pools as `Decoder.forward` wants a cache: a fixed plan, lengths kept by the engine."""

    layers: Sequence[KdaSlots | MlaPages]
    plan: PooledPlan

    def begin(self, segments: Segments, device: torch.device) -> PooledPlan:
        return self.plan

    def commit(self, segments: Segments) -> None:
        return None


@dataclass
class Pools:
    """Slots and pages of one engine, and who holds them. Build with `Pools.allocate`.

    free_slots, free_pages: given out smallest first. references: page -> holders. reserved: pages promised to admitted
    requests and not yet taken; an admitted request never fails for memory.
    """

    layers: list[KdaSlots | MlaPages]
    page_size: int
    num_slots: int
    num_pages: int
    free_slots: list[int] = field(default_factory=list)
    free_pages: list[int] = field(default_factory=list)
    references: Counter[int] = field(default_factory=Counter)
    reserved: int = 0

    @classmethod
    def allocate(cls, config: ModelConfig, slots: int, pages: int, page_size: int, like: Tensor) -> Pools:
        """Pools for `slots` sequences and `pages` pages (one more of each for padding) on the device of `like`, in its
        dtype (the state in fp32 or fp64)."""
        linear = config.linear_attn_config
        channels, width = 3 * linear.num_heads * linear.head_dim, linear.short_conv_kernel_size
        size = config.kv_lora_rank + config.qk_rope_head_dim
        layers: list[KdaSlots | MlaPages] = []
        for kind in config.plan():
            if kind == "kda":
                shape = (slots + 1, linear.num_heads, linear.head_dim, linear.head_dim)
                state = like.new_zeros(shape, dtype=accumulate_dtype(like.dtype))
                layers.append(KdaSlots(state, like.new_zeros(slots + 1, width - 1, channels)))
            else:
                layers.append(MlaPages(like.new_zeros((pages + 1) * page_size, size), page_size))
        free_slots, free_pages = list(range(slots, 0, -1)), list(range(pages, 0, -1))
        return cls(layers, page_size, slots, pages, free_slots, free_pages)

    def _kda(self) -> Iterator[KdaSlots]:
        return (layer for layer in self.layers if isinstance(layer, KdaSlots))

    def _mla(self) -> Iterator[MlaPages]:
        return (layer for layer in self.layers if isinstance(layer, MlaPages))

    @property
    def unreserved_pages(self) -> int:
        return len(self.free_pages) - self.reserved

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take_slot(self, far: bool = False) -> int:
        """An empty slot; the caller has checked `free_slots`. far: from the other end, away from running sequences."""
        slot = self.free_slots.pop(0 if far else -1)
        for tensor in (t for layer in self._kda() for t in layer.tensors()):
            tensor[slot].zero_()
        return slot

    def free_slot(self, slot: int) -> None:
        self.free_slots.append(slot)
        self.free_slots.sort(reverse=True)  # smallest first: running slots stay together

    def copy_slot(self, source: int, targets: Sequence[int]) -> None:
        """Give the target slots the state of the source."""
        for tensor in (t for layer in self._kda() for t in layer.tensors()):
            tensor[torch.tensor(targets, device=tensor.device)] = tensor[source].clone()

    def take_page(self) -> int:
        """A page out of the reservation, zeroed: a masked key must be finite."""
        page = self.free_pages.pop()
        self.reserved -= 1
        self.references[page] = 1
        for layer in self._mla():
            layer.latents_XR[page * self.page_size : (page + 1) * self.page_size].zero_()
        return page

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.references[page] -= 1
            if not self.references[page]:
                del self.references[page]
                self.free_pages.append(page)

    def own_page(self, page: int) -> int:
        """The page itself if this holder is its only one, else a copy (copy-on-write), taken out of the reservation."""
        if self.references[page] == 1:
            return page
        copy = self.take_page()
        size = self.page_size
        for layer in self._mla():
            rows = layer.latents_XR
            rows[copy * size : (copy + 1) * size] = rows[page * size : (page + 1) * size]
        self.release([page])
        return copy

    def rows(self, pages: Sequence[int], length: int) -> Tensor:
        """Latent rows of positions 0 .. length - 1."""
        within = torch.arange(self.page_size)
        return (torch.tensor(pages, dtype=torch.long)[:, None] * self.page_size + within).flatten()[:length]

    def export(self, slot: int, pages: Sequence[int], length: int) -> dict[str, Tensor]:
        """State of one sequence as host tensors, by layer: `kda.{i}.state`, `kda.{i}.taps`, `mla.{i}.latents`."""
        found = {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, KdaSlots):
                found[f"kda.{index}.state"] = layer.state_SHKV[slot].cpu().clone()
                found[f"kda.{index}.taps"] = layer.taps_SWC[slot].cpu().clone()
            else:
                rows = self.rows(pages, length).to(layer.latents_XR.device)
                found[f"mla.{index}.latents"] = layer.latents_XR.index_select(0, rows).cpu()
        return found

    def _places(self, slot: int, length: int) -> Iterator[tuple[str, MlaPages | None, Tensor]]:
        """(name, page memory or None, where it goes or a tensor of that shape) of every tensor that `export` makes."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, KdaSlots):
                yield f"kda.{index}.state", None, layer.state_SHKV[slot]
                yield f"kda.{index}.taps", None, layer.taps_SWC[slot]
            else:
                yield (
                    f"mla.{index}.latents",
                    layer,
                    layer.latents_XR.new_empty(1).expand(length, layer.latents_XR.shape[1]),
                )

    def check(self, saved: dict[str, Tensor], length: int) -> None:
        """Raises ValueError if `saved` is not the state of a sequence of `length` tokens of this model."""
        for name, _, place in self._places(0, length):
            if name not in saved or saved[name].shape != place.shape:
                got = tuple(saved[name].shape) if name in saved else "nothing"
                raise ValueError(
                    f"saved state {name}: got {got}, this model needs {tuple(place.shape)}; it comes from another model. "
                    "Resume with keep_state=False to read the text again"
                )

    def restore(self, saved: dict[str, Tensor], slot: int, pages: Sequence[int], length: int) -> None:
        """The reverse of `export`, into a slot and pages that the caller holds; `saved` has been checked."""
        for name, layer, place in self._places(slot, length):
            if layer is None:
                place.copy_(saved[name])
            else:
                rows = self.rows(pages, length).to(layer.latents_XR.device)
                layer.latents_XR.index_copy_(0, rows, saved[name].to(layer.latents_XR))
