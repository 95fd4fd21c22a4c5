"""The engine's memory: a pool of KDA slots and a pool of MLA pages, allocated once; and where a call's tokens
stand in them.

A *slot* holds what the KDA layers know of one sequence (state and convolution taps of every layer): a fixed
size, whatever its length. A *page* holds the latents of `page_size` consecutive tokens in every MLA layer.
Pages are counted by reference, so that sequences with a common beginning share them; a sequence that must
write into a page it shares takes a copy first. Slot 0 and page 0 are never given out: padding rows of a batch
read and write them.

Shapes: S slots, P pages, N sequences, H heads, K = V head dim, C channels, W width of the convolution or
queries per sequence, R rank plus shared key part (in a ring: its rows), T new tokens.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from earlyfusion.kernels.attention.tiles import attend_in_tiles, pages_of
from earlyfusion.kernels.dispatch import has_kernel, resolve
from earlyfusion.kernels.kda.decode import DecodeCache, decode
from earlyfusion.kernels.precision import accumulate_dtype
from earlyfusion.model.cache import Reads
from earlyfusion.model.config import ModelConfig


@dataclass(frozen=True)
class PooledPlan:
    """Where one call's tokens stand.

    single: one new token per sequence. fresh: no sequence has a past. slots_N: the sequences' slots. rows_T:
    latent row (page * page_size + offset) of every new token. pages_NP: pages of every sequence in order.
    last_NW: last position query w may see. places_T: place of every new token in the padded [N * W] queries
    (None for single tokens). live: single tokens, sequences that are real; the padding rows after them attend
    to nothing and get zeros. reads: of chunks after a past, where all latents of their sequences lie.
    """

    single: bool
    fresh: bool
    slots_N: Tensor
    rows_T: Tensor
    pages_NP: Tensor
    last_NW: Tensor
    places_T: Tensor | None = None
    live: int | None = None
    reads: Reads | None = None


class KdaSlots:
    """Memory of one KDA layer over all slots: state [S, H, K, V] fp32, taps [S, W - 1, C]."""

    def __init__(self, state_SHKV: Tensor, taps_SWC: Tensor) -> None:
        self.state_SHKV, self.taps_SWC = state_SHKV, taps_SWC
        self._joined: tuple[Tensor, Tensor] | None = None

    def read(self, plan: PooledPlan) -> tuple[Tensor | None, Tensor | None]:
        if plan.fresh:
            return None, None
        return self.state_SHKV.index_select(0, plan.slots_N), self.taps_SWC[plan.slots_N].transpose(1, 2)

    def write(self, plan: PooledPlan, state_NHKV: Tensor, taps_NCW1: Tensor) -> None:
        taps_NWC = taps_NCW1.transpose(1, 2).to(self.taps_SWC.dtype)
        self.state_SHKV.index_copy_(0, plan.slots_N, state_NHKV)
        self.taps_SWC.index_copy_(0, plan.slots_N, taps_NWC)

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


class RingSlots(KdaSlots):
    """The same in the layout of the decode kernel: state V first, inputs of the convolution in a ring per
    slot. Build with `new`.

    The kernel advances a slot in place, with convolution, gate and output in one launch
    (kernels/kda/decode.py). The token at position p stands in row p mod R of the ring, so to read or set taps
    one must know how many tokens the slot holds.
    """

    def __init__(self, cache: DecodeCache, width: int) -> None:
        self.cache = cache
        self.back = torch.arange(width - 1, 0, -1, device=cache.x_SRC.device)  # how far back every tap looks
        super().__init__(cache.state_SGVK.transpose(2, 3), cache.x_SRC[:, : width - 1])

    @classmethod
    def new(cls, slots: int, heads: int, dim: int, width: int, like: Tensor) -> RingSlots:
        """Empty slots on the device and in the dtype of `like` (states in fp32)."""
        cache = DecodeCache.new(
            slots, heads, heads, dim, dim, width=width, dtype=like.dtype, device=like.device
        )
        return cls(cache, width)

    def _rings(self, length_N: Tensor) -> Tensor:
        """Rows of the taps of slots that hold so many tokens. Rows before the first token are still empty."""
        return (length_N[:, None] - self.back) % self.cache.x_SRC.shape[1]

    def read(self, plan: PooledPlan) -> tuple[Tensor | None, Tensor | None]:
        if plan.fresh:
            return None, None
        state_NHKV = self.state_SHKV.index_select(0, plan.slots_N).contiguous()
        taps_NWC = self.cache.x_SRC[plan.slots_N[:, None], self._rings(plan.last_NW[:, 0])]
        return state_NHKV, taps_NWC.transpose(1, 2)

    def write(self, plan: PooledPlan, state_NHKV: Tensor, taps_NCW1: Tensor) -> None:
        self.cache.state_SGVK.index_copy_(0, plan.slots_N, state_NHKV.transpose(2, 3).contiguous())
        rings_NW = self._rings(plan.last_NW[:, -1] + 1)
        self.cache.x_SRC[plan.slots_N[:, None], rings_NW] = taps_NCW1.transpose(1, 2).to(
            self.cache.x_SRC.dtype
        )

    def decode(
        self, plan: PooledPlan, qkv: Tensor, f: Tensor, b: Tensor, weight: Tensor, layer: Any
    ) -> Tensor | None:
        """One token of every sequence through the kernel; zeros for padding rows (slot 0)."""
        _, heads, dim, _ = self.cache.state_SGVK.shape
        rows, position_N = qkv.shape[0], plan.last_NW[:, 0].contiguous()
        slots_N = plan.slots_N.masked_fill(plan.slots_N == 0, -1)
        return decode(
            qkv.contiguous(),
            f.reshape(rows, heads, dim).contiguous(),
            b.contiguous(),
            weight.contiguous(),
            layer.A_log,
            layer.dt_bias.view(heads, dim),
            self.cache,
            slots_N,
            position_N,
            lower_bound=layer.lower_bound,
        )

    def taken(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        rows = self._rings(torch.tensor([length], device=self.back.device))[0]
        return self.state_SHKV[slot], self.cache.x_SRC[slot, rows]

    def put(self, slot: int, length: int, state_HKV: Tensor, taps_WC: Tensor) -> None:
        self.state_SHKV[slot].copy_(state_HKV)
        rows = self._rings(torch.tensor([length], device=self.back.device))[0]
        self.cache.x_SRC[slot, rows] = taps_WC.to(self.cache.x_SRC)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.cache.state_SGVK, self.cache.x_SRC


class MlaPages:
    """Memory of one MLA layer over all pages: latents [P * page_size, R]."""

    def __init__(self, latents_XR: Tensor, page_size: int) -> None:
        self.latents_XR, self.page_size = latents_XR, page_size

    @property
    def pages_PSR(self) -> Tensor:
        return self.latents_XR.view(-1, self.page_size, self.latents_XR.shape[1])

    def append(self, new_TR: Tensor, plan: PooledPlan) -> None:
        self.latents_XR.index_copy_(0, plan.rows_T, new_TR.to(self.latents_XR.dtype))

    def latents(self, plan: PooledPlan) -> Tensor:
        assert plan.reads is not None
        return self.latents_XR.index_select(0, plan.reads.rows_L)

    def attend(self, query_THR: Tensor, plan: PooledPlan, rank: int, scale: float) -> Tensor:
        """Absorbed attention over the pages: single tokens by `mla_decode`, chunks in the same tiles."""
        heads = query_THR.shape[1]
        if plan.places_T is None:
            live = slice(0, plan.live)
            mixed_NHR, _ = resolve("mla_decode", query_THR)(
                query_THR[live].contiguous(),
                self.pages_PSR,
                plan.pages_NP[live].contiguous(),
                plan.last_NW[live, 0] + 1,
                rank,
                scale,
            )
            padding = query_THR.shape[0] - mixed_NHR.shape[0]
            return torch.nn.functional.pad(mixed_NHR, (0, 0, 0, 0, 0, padding))

        # Every sequence's queries side by side, those of a shorter chunk filled up.
        sequences, width = plan.last_NW.shape
        query = query_THR.new_zeros(sequences * width, *query_THR.shape[1:])
        query_NXR = query.index_copy_(0, plan.places_T, query_THR).view(sequences, width * heads, -1)
        last_NX1 = plan.last_NW.repeat_interleave(heads, dim=1).unsqueeze(-1)
        length, keys = plan.pages_NP.shape[1] * self.page_size, pages_of(self.pages_PSR, plan.pages_NP)
        mixed_NXR, _ = attend_in_tiles(query_NXR, last_NX1, length, keys, rank, scale)
        return mixed_NXR.view(-1, heads, rank).index_select(0, plan.places_T)


@dataclass
class PooledCache:
    """The pools as `Decoder.forward` wants a cache; the engine keeps the lengths."""

    layers: Sequence[KdaSlots | MlaPages]
    plan: PooledPlan


class Pending:
    """Copies (target -> source) of rows of memory and rows to be cleared, done together.

    Forking sixteen samples, or writing into pages they share, asks for many small copies: on a GPU each would
    be launches of its own in every layer. Noted here, they become one gather and one scatter per tensor. What
    is noted happens as if it had been done at once, in order, as long as `settle` comes before anything else
    reads or writes the rows.
    """

    def __init__(self) -> None:
        self.copies: dict[int, int] = {}
        self.cleared: set[int] = set()

    def clear(self, row: int) -> None:
        """The row will hold zeros."""
        self.copies.pop(row, None)
        self.cleared.add(row)

    def copy(self, source: int, target: int) -> None:
        """The target will hold what the source holds now, that is with everything noted before."""
        if source in self.cleared:
            self.clear(target)
        else:
            self.cleared.discard(target)
            self.copies[target] = self.copies.get(source, source)

    def settle(self, tensors: Iterable[Tensor]) -> None:
        """Do it in every tensor, whose first axis are the rows, and forget it."""
        if not self.copies and not self.cleared:
            return
        every = list(tensors)
        if every:
            device = every[0].device
            rows = torch.tensor([*self.copies, *self.copies.values(), *self.cleared], dtype=torch.long).to(
                device
            )
            targets, sources, cleared = rows.split([len(self.copies), len(self.copies), len(self.cleared)])
            for tensor in every:
                if self.copies:
                    tensor.index_copy_(0, targets, tensor.index_select(0, sources))
                if self.cleared:
                    tensor.index_fill_(0, cleared, 0)
        self.copies.clear()
        self.cleared.clear()


@dataclass
class Pools:
    """Slots and pages of one engine, and who holds them. Build with `Pools.allocate`.

    free_slots, free_pages: given out smallest first. references: page -> holders. reserved: pages promised to
    admitted requests and not yet taken; an admitted request never fails for memory. Slots and pages are
    cleared and copied when `settle` is called, which the runner does before every forward pass.
    """

    layers: list[KdaSlots | MlaPages]
    page_size: int
    num_slots: int
    num_pages: int
    free_slots: list[int] = field(default_factory=list)
    free_pages: list[int] = field(default_factory=list)
    references: Counter[int] = field(default_factory=Counter)
    reserved: int = 0
    slot_work: Pending = field(default_factory=Pending)
    page_work: Pending = field(default_factory=Pending)

    @classmethod
    def allocate(cls, config: ModelConfig, slots: int, pages: int, page_size: int, like: Tensor) -> Pools:
        """Pools for `slots` sequences and `pages` pages (one more of each for padding) on the device of
        `like`, in its dtype (the state in fp32 or fp64)."""
        linear = config.linear_attn_config
        channels, width = 3 * linear.num_heads * linear.head_dim, linear.short_conv_kernel_size
        size = config.kv_lora_rank + config.qk_rope_head_dim
        layers: list[KdaSlots | MlaPages] = []
        for kind in config.plan():
            if kind == "kda":
                if has_kernel("kda", like) and like.dtype != torch.float64:
                    layers.append(RingSlots.new(slots + 1, linear.num_heads, linear.head_dim, width, like))
                    continue
                shape = (slots + 1, linear.num_heads, linear.head_dim, linear.head_dim)
                state = like.new_zeros(shape, dtype=accumulate_dtype(like.dtype))
                layers.append(KdaSlots(state, like.new_zeros(slots + 1, width - 1, channels)))
            else:
                layers.append(MlaPages(like.new_zeros((pages + 1) * page_size, size), page_size))

        # Slot 0 and page 0 are padding's own.
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
        """An empty slot; the caller has checked `free_slots`. far: from the other end, away from running
        sequences."""
        slot = self.free_slots.pop(0 if far else -1)
        self.slot_work.clear(slot)
        return slot

    def free_slot(self, slot: int) -> None:
        # the smallest lies last and is taken first: running slots stay together
        insort(self.free_slots, slot, key=lambda each: -each)

    def copy_slot(self, source: int, targets: Sequence[int]) -> None:
        """Give the target slots the state of the source."""
        for target in targets:
            self.slot_work.copy(source, target)

    def settle(self) -> None:
        """Clear and copy what has been taken and copied since the last call."""
        self.slot_work.settle(tensor for layer in self._kda() for tensor in layer.tensors())
        self.page_work.settle(layer.latents_XR.unflatten(0, (-1, self.page_size)) for layer in self._mla())

    def take_page(self) -> int:
        """A page out of the reservation, zeroed: a masked key must be finite."""
        page = self.free_pages.pop()
        self.reserved -= 1
        self.references[page] = 1
        self.page_work.clear(page)
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
        """The page itself if this holder is its only one, else a copy (copy-on-write), taken out of the
        reservation."""
        if self.references[page] == 1:
            return page
        copy = self.take_page()
        self.page_work.copy(page, copy)
        self.release([page])
        return copy

    def rows(self, pages: Sequence[int], length: int) -> Tensor:
        """Latent rows of positions 0 .. length - 1."""
        within = torch.arange(self.page_size)
        return (torch.tensor(pages, dtype=torch.long)[:, None] * self.page_size + within).flatten()[:length]

    def export(self, slot: int, pages: Sequence[int], length: int) -> dict[str, Tensor]:
        """State of one sequence as host tensors, by layer: `kda.{i}.state`, `kda.{i}.taps`,
        `mla.{i}.latents`."""
        self.settle()
        found = {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, KdaSlots):
                state_HKV, taps_WC = layer.taken(slot, length)
                found[f"kda.{index}.state"] = state_HKV.cpu().clone(memory_format=torch.contiguous_format)
                found[f"kda.{index}.taps"] = taps_WC.cpu().clone()
            else:
                rows = self.rows(pages, length).to(layer.latents_XR.device)
                found[f"mla.{index}.latents"] = layer.latents_XR.index_select(0, rows).cpu()
        return found

    def check(self, saved: dict[str, Tensor], length: int) -> None:
        """Raises ValueError if `saved` is not the state of a sequence of `length` tokens of this model."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, KdaSlots):
                state_HKV, taps_WC = layer.taken(0, 0)
                wanted = {f"kda.{index}.state": state_HKV.shape, f"kda.{index}.taps": taps_WC.shape}
            else:
                wanted = {f"mla.{index}.latents": torch.Size((length, layer.latents_XR.shape[1]))}
            for name, shape in wanted.items():
                if name not in saved or saved[name].shape != shape:
                    got = tuple(saved[name].shape) if name in saved else "nothing"
                    raise ValueError(
                        f"saved state {name}: got {got}, this model needs {tuple(shape)}; it comes from"
                        " another model. Resume with keep_state=False to read the text again"
                    )

    def restore(self, saved: dict[str, Tensor], slot: int, pages: Sequence[int], length: int) -> None:
        """The reverse of `export`, into a slot and pages that the caller holds; `saved` has been checked."""
        self.settle()
        for index, layer in enumerate(self.layers):
            if isinstance(layer, KdaSlots):
                layer.put(slot, length, saved[f"kda.{index}.state"], saved[f"kda.{index}.taps"])
            else:
                rows = self.rows(pages, length).to(layer.latents_XR.device)
                layer.latents_XR.index_copy_(0, rows, saved[f"mla.{index}.latents"].to(layer.latents_XR))
