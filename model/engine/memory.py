"""The engine's memory: a pool of KDA slots and a pool of MLA pages, allocated once.

A *slot* holds what the KDA layers know of one sequence (state and convolution taps of every layer): a fixed
size, whatever its length. A *page* holds the latents of `page_size` consecutive tokens in every MLA layer.
Pages are counted by reference, so that sequences with a common beginning share them; a sequence that must
write into a page it shares takes a copy first. Slot 0 and page 0 are never given out: padding rows of a batch
read and write them. What layers see of it stands in stores.py.

Shapes: S slots, P pages, H heads, K key dim, V value dim, C channels, W width of the convolution, R rank plus
shared key part.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from earlyfusion.kernels.dispatch import pick
from earlyfusion.kernels.precision import accumulate_dtype
from earlyfusion.model.config import ModelConfig
from earlyfusion.model.engine.pending import Pending
from earlyfusion.model.engine.ring_slots import RingSlots
from earlyfusion.model.engine.stores import KdaSlots, MlaPages


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
                if pick("kda_step", like.device) == "triton" and like.dtype != torch.float64:
                    layers.append(RingSlots.new(slots + 1, linear.num_heads, linear.head_dim, width, like))
                    continue
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
