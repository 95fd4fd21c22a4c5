"""The engine's memory: slots and pages (model/cache.py), allocated once, who holds them, and the prefix
cache.

Pages are counted by reference, so that sequences with a common beginning share them; a sequence that must
write into a page it shares takes a copy first. Slot 0 and page 0 are never given out: padding rows of a batch
read and write them.

A KDA state cannot be cut back to an earlier position, so a beginning of text is only known where its state
was copied: at sparse boundaries of a prompt (`PrefixCache.borders`) and where an answer ended, the next
turn's beginning. Such a checkpoint is a slot that nobody writes plus shared references to the MLA pages up
to there; a hit *copies* the slot and shares the pages. A checkpoint is whole or gone: its slot and pages are
dropped together, least recently used first. Cf. Kimi K3 (arXiv 2607.24653) section 5.4.1.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from earlyfusion.kernels.dispatch import has_kernel
from earlyfusion.kernels.kda.decode import DecodeCache
from earlyfusion.kernels.products import accumulate_dtype
from earlyfusion.model.cache import KdaSlots, MlaPages, RingSlots
from earlyfusion.model.config import ModelConfig


class Pools:
    """Slots and pages of one engine, and who holds them. Build with `Pools.allocate`.

    free_slots, free_pages: given out smallest first. references: page -> holders.
    """

    def __init__(self, layers: list[KdaSlots | MlaPages], page_size: int, slots: int, pages: int) -> None:
        self.layers, self.page_size, self.num_slots, self.num_pages = layers, page_size, slots, pages
        self.free_slots, self.free_pages = list(range(slots, 0, -1)), list(range(pages, 0, -1))
        # Counted, not owned: a common beginning is held by every sequence that begins with it.
        self.references: Counter[int] = Counter()
        # All that slots hold, and all that pages hold: slots or pages first.
        self.by_slot: list[Tensor] = []
        self.by_page: list[Tensor] = []
        for layer in layers:
            if isinstance(layer, KdaSlots):
                self.by_slot += layer.tensors()
            else:
                self.by_page.append(layer.pages_PSR)

    @classmethod
    def allocate(cls, config: ModelConfig, slots: int, pages: int, page_size: int, like: Tensor) -> Pools:
        """Pools for `slots` sequences and `pages` pages (one more of each for padding) on the device of
        `like`, in its dtype (the state in fp32 or fp64)."""
        linear = config.linear_attn_config
        heads, dim, width = linear.num_heads, linear.head_dim, linear.short_conv_kernel_size
        layers: list[KdaSlots | MlaPages] = []
        for kind in config.plan():
            if kind == "mla":
                rows, size = (pages + 1) * page_size, config.kv_lora_rank + config.qk_rope_head_dim
                layers.append(MlaPages(like.new_zeros(rows, size), page_size))
            elif has_kernel("kda", like) and like.dtype != torch.float64:
                ring = DecodeCache.new(
                    slots + 1, heads, heads, dim, dim, width=width, dtype=like.dtype, device=like.device
                )
                layers.append(RingSlots(ring, width))
            else:
                # The state sums over the whole text: half precision would lose it.
                state = like.new_zeros(slots + 1, heads, dim, dim, dtype=accumulate_dtype(like.dtype))
                layers.append(KdaSlots(state, like.new_zeros(slots + 1, width - 1, 3 * heads * dim)))
        return cls(layers, page_size, slots, pages)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def rows(self, pages: Sequence[int], length: int) -> Tensor:
        """Latent rows of positions 0 .. length - 1."""
        within = torch.arange(self.page_size)
        return (torch.tensor(pages, dtype=torch.long)[:, None] * self.page_size + within).flatten()[:length]

    # ---- slots

    def take_slot(self, far: bool = False) -> int:
        """An empty slot; the caller has checked `free_slots`. far: from the other end, away from running
        sequences."""
        slot = self.free_slots.pop(0 if far else -1)
        for tensor in self.by_slot:
            tensor[slot] = 0
        return slot

    def free_slot(self, slot: int) -> None:
        # the smallest lies last and is taken first: running slots stay together
        insort(self.free_slots, slot, key=lambda each: -each)

    def copy_slot(self, source: int, targets: Sequence[int]) -> None:
        """Give the target slots the state of the source."""
        for tensor in self.by_slot:
            # One copy per tensor, however many samples a group has; by an index on the device, which nobody
            # waits for.
            targets_N = torch.tensor(targets).to(tensor.device, non_blocking=True)
            tensor[targets_N] = tensor[source].clone()

    # ---- pages

    def take_page(self) -> int:
        """A page that nobody holds, zeroed: a masked key must be finite, even after a model that made NaN."""
        page = self.free_pages.pop()
        self.references[page] = 1
        for tensor in self.by_page:
            tensor[page] = 0
        return page

    def share(self, pages: Iterable[int]) -> None:
        self.references.update(pages)

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.references[page] -= 1
            if not self.references[page]:
                del self.references[page]
                self.free_pages.append(page)

    def own_page(self, page: int) -> int:
        """The page itself if this holder is its only one, else a copy (copy-on-write)."""
        if self.references[page] == 1:
            return page
        copy = self.take_page()
        for tensor in self.by_page:
            tensor[copy] = tensor[page]
        self.release([page])
        return copy

    # ---- states that leave and come back

    def _places(self, slot: int, pages: Sequence[int], length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Slot [1], length [1] and latent rows of positions 0 .. length - 1, on the device."""
        device = [*self.by_slot, *self.by_page][0].device
        slot_1, length_1 = torch.tensor([[slot], [length]]).to(device)
        return slot_1, length_1, self.rows(pages, length).to(device)

    def export(self, slot: int, pages: Sequence[int], length: int) -> dict[str, Tensor]:
        """State of one sequence as host tensors, by layer: `kda.{i}.state`, `kda.{i}.taps`,
        `mla.{i}.latents`."""
        slot_1, length_1, rows = self._places(slot, pages, length)
        found = {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, KdaSlots):
                state_1HKV, taps_1CW = layer.load(slot_1, length_1)
                found[f"kda.{index}.state"] = state_1HKV[0].cpu()
                found[f"kda.{index}.taps"] = taps_1CW[0].T.cpu().contiguous()
            else:
                found[f"mla.{index}.latents"] = layer.latents_XR.index_select(0, rows).cpu()
        return found

    def check(self, saved: dict[str, Tensor], length: int) -> None:
        """Raises ValueError if `saved` is not the state of a sequence of `length` tokens of this model."""
        # The padding slot has the shapes that a state of this model must have.
        for name, tensor in self.export(0, [0] * self.pages_for(length), length).items():
            found = saved.get(name)
            if found is None or found.shape != tensor.shape:
                got = "nothing" if found is None else tuple(found.shape)
                raise ValueError(
                    f"saved state {name}: got {got}, this model needs {tuple(tensor.shape)}; it comes from"
                    " another model; submit the request anew to read its text with this one"
                )

    def restore(self, saved: dict[str, Tensor], slot: int, pages: Sequence[int], length: int) -> None:
        """The reverse of `export`, into a slot and pages that the caller holds; `saved` has been checked."""
        slot_1, length_1, rows = self._places(slot, pages, length)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, KdaSlots):
                state_HKV, taps_WC = saved[f"kda.{index}.state"], saved[f"kda.{index}.taps"]
                layer.store(slot_1, length_1, state_HKV[None], taps_WC.T[None])
            else:
                layer.latents_XR.index_copy_(0, rows, saved[f"mla.{index}.latents"].to(layer.latents_XR))


@dataclass(frozen=True)
class Checkpoint:
    """State after `length` tokens. `pages` hold them, the last one perhaps in part."""

    length: int
    slot: int
    pages: tuple[int, ...]


class PrefixCache:
    """At most `limit` checkpoints in slots of the pools, by the ids they cover. 0: none.

    Raises ValueError if `every` is not a multiple of the page size: only whole pages are shared while they
    are filled.
    """

    def __init__(self, pools: Pools, limit: int, every: int) -> None:
        if limit and (every < 1 or every % pools.page_size):
            raise ValueError(f"checkpoint_every={every} must be a multiple of page_size={pools.page_size}")
        self.pools, self.limit, self.every, self.evictions = pools, limit, every, 0
        self.entries: OrderedDict[bytes, Checkpoint] = OrderedDict()

    @property
    def pages(self) -> set[int]:
        """Pages that some checkpoint refers to."""
        return set().union(*(entry.pages for entry in self.entries.values()))

    def borders(self, prompt: int) -> list[int]:
        """Where reading a prompt of so many tokens stops for a checkpoint: sparse positions, and the last
        whole page."""
        if not self.limit:
            return []
        # The last page boundary before the end: at least one token must be left to read.
        last = (prompt - 1) // self.pools.page_size * self.pools.page_size
        return sorted({*range(self.every, prompt, self.every), last} - {0})

    def find(self, key_ids: np.ndarray, lengths: range) -> Checkpoint | None:
        """The longest known beginning of one of these lengths, now the most recently used."""
        best = None
        for known, entry in self.entries.items():
            longer = best is None or entry.length > self.entries[best].length
            if longer and entry.length in lengths and known == key_ids[: entry.length].tobytes():
                best = known
        if best is None:
            return None
        self.entries.move_to_end(best)
        return self.entries[best]

    def insert(self, key_ids: np.ndarray, length: int, slot: int, pages: list[int]) -> None:
        """Remember the state in `slot` as that of the first `length` ids."""
        if not self.limit or length == 0:
            return
        known = key_ids[:length].tobytes()
        # Known already: it only becomes the most recently used.
        if known in self.entries:
            self.entries.move_to_end(known)
            return
        if len(self.entries) >= self.limit:
            self.evict_one()

        # The slot is copied, the pages are shared.
        own = self.pools.take_slot(far=True)
        self.pools.copy_slot(slot, [own])
        held = tuple(pages[: self.pools.pages_for(length)])
        self.pools.share(held)
        self.entries[known] = Checkpoint(length, own, held)

    def evict_one(self) -> None:
        """Drop the least recently used checkpoint."""
        _, entry = self.entries.popitem(last=False)
        self.pools.release(entry.pages)
        self.pools.free_slot(entry.slot)
        self.evictions += 1

    def clear(self) -> None:
        """Drop everything; the weights have changed."""
        while self.entries:
            self.evict_one()
