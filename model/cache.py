"""What a decoder remembers between calls, and who holds it: KDA states and convolution taps by slot, MLA
latents by page, the engine's pools of both, and its prefix cache.

A *slot* holds what the KDA layers know of one sequence (state and taps of every layer): a fixed size,
whatever its length. A *page* holds the latents of `page_size` consecutive tokens in every MLA layer. An
engine allocates both once.

A call brings new tokens for N sequences, packed in the order of the sequences: any number each in a prefill
(also a continued one), exactly one each in a decode step.

Pages are counted by reference, so that sequences with a common beginning share them; a sequence that must
write into a page it shares takes a copy first. Slot 0 and page 0 are never given out: padding rows of a batch
read and write them.

A KDA state cannot be cut back to an earlier position, so a beginning of text is only known where its state
was copied: at sparse boundaries of a prompt (`PrefixCache.borders`) and where an answer ended, the next
turn's beginning. Such a checkpoint is a slot that nobody writes plus shared references to the MLA pages up
to there; a hit *copies* the slot and shares the pages. A checkpoint is whole or gone: its slot and pages are
dropped together, least recently used first. Cf. Kimi K3 (arXiv 2607.24653) section 5.4.1.

Shapes: S slots, P pages, N sequences, H heads, K = V head dim, C channels, W width of the convolution or
queries per sequence, R rank plus shared key part (in a ring: its rows), T new tokens, L tokens of all
sequences.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from earlyfusion.kernels.attention.tiles import attend_in_tiles, pages_of
from earlyfusion.kernels.dispatch import has_kernel, resolve
from earlyfusion.kernels.kda.decode import DecodeCache, conv_step, decode
from earlyfusion.kernels.products import accumulate_dtype
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.config import ModelConfig


@dataclass(frozen=True)
class CachePlan:
    """Where one call's tokens stand.

    fresh: no sequence has a past. slots_N: the sequences' slots. rows_T: latent row (page * page_size +
    offset) of every new token. pages_NP: pages of every sequence in order. last_NW: last position query w may
    see. places_T: place of every new token in the padded [N * W] queries; None in a decode step. live: in a
    decode step, sequences that are real; the padding rows after them attend to nothing and get zeros. past:
    of chunks after a past, where a kernel wants all keys packed: lengths with the new tokens included, and
    the latent rows [L].
    """

    fresh: bool
    slots_N: Tensor
    rows_T: Tensor
    pages_NP: Tensor
    last_NW: Tensor
    places_T: Tensor | None = None
    live: int | None = None
    past: tuple[Segments, Tensor] | None = None


class KdaSlots:
    """Memory of one KDA layer over all slots: state [S, H, K, V] fp32, taps [S, W - 1, C]."""

    joined: tuple[Tensor, Tensor] | None = None
    """The layer's `joined_weights()`, remembered: a decode step has no time to put them together."""

    def __init__(self, state_SHKV: Tensor, taps_SRC: Tensor) -> None:
        self.state_SHKV, self.taps_SRC = state_SHKV, taps_SRC

    def _taps_at(self, slots_N: Tensor, length_N: Tensor) -> tuple[Tensor, ...]:
        """Index of the taps of slots that hold so many tokens."""
        return (slots_N,)

    def load(self, slots_N: Tensor, length_N: Tensor) -> tuple[Tensor, Tensor]:
        """(state [N, H, K, V], taps [N, C, W - 1]) of slots that hold `length_N` tokens."""
        # Copies, not views: the layer may compute in place while other slots are written.
        state_NHKV = self.state_SHKV.index_select(0, slots_N).contiguous()
        return state_NHKV, self.taps_SRC[self._taps_at(slots_N, length_N)].transpose(1, 2)

    def store(self, slots_N: Tensor, length_N: Tensor, state_NHKV: Tensor, taps_NCW1: Tensor) -> None:
        """The reverse of `load`: the slots hold `length_N` tokens from now on."""
        self.state_SHKV.index_copy_(0, slots_N, state_NHKV.to(self.state_SHKV))
        self.taps_SRC[self._taps_at(slots_N, length_N)] = taps_NCW1.transpose(1, 2).to(self.taps_SRC)

    def write(self, plan: CachePlan, state_NHKV: Tensor, taps_NCW1: Tensor) -> None:
        """State and taps after the call's tokens."""
        self.store(plan.slots_N, plan.last_NW[:, -1] + 1, state_NHKV, taps_NCW1)

    def step(
        self, layer: Any, plan: CachePlan, qkv: Tensor, f: Tensor, beta: Tensor, weight: Tensor
    ) -> Tensor:
        """One token of every sequence from the layer's projections (before the convolution, whose weight is
        given): heads' outputs [N, H, V]."""
        state, taps = self.load(plan.slots_N, plan.last_NW[:, 0])
        # The convolution sees the projections before their activation, so its taps hold those.
        qkv, taps = conv_step(qkv, weight, taps)
        q, k, v = (part.unflatten(1, (layer.num_heads, -1)) for part in qkv.chunk(3, dim=-1))
        gate = layer.gate(f, beta)
        o_NHV, state = resolve("kda_step", qkv)(q, k, v, *gate, state, lower_bound=layer.lower_bound)
        self.write(plan, state, taps)
        return o_NHV

    def tensors(self) -> tuple[Tensor, ...]:
        """All that a slot holds, slots first."""
        return self.state_SHKV, self.taps_SRC


class RingSlots(KdaSlots):
    """The same in the layout of the decode kernel: state V first, inputs of the convolution in a ring per
    slot.

    The kernel advances a slot in place, with convolution, gate and output in one launch
    (kernels/kda/decode.py). The token at position p stands in row p mod R of the ring, so to read or set taps
    one must know how many tokens the slot holds.
    """

    def __init__(self, cache: DecodeCache, width: int) -> None:
        # The base class sees K before V; only the strides tell that memory has it the other way round.
        super().__init__(cache.state_SGVK.transpose(2, 3), cache.x_SRC)
        self.cache = cache
        self.back = torch.arange(width - 1, 0, -1, device=cache.x_SRC.device)  # how far back every tap looks

    def _taps_at(self, slots_N: Tensor, length_N: Tensor) -> tuple[Tensor, ...]:
        # Rows before the first token are still empty, as taps before a beginning should be.
        return slots_N[:, None], (length_N[:, None] - self.back) % self.taps_SRC.shape[1]

    def step(
        self, layer: Any, plan: CachePlan, qkv: Tensor, f: Tensor, beta: Tensor, weight: Tensor
    ) -> Tensor:
        """One token of every sequence through the kernel; zeros for padding rows (slot 0)."""
        # Kernels take what they are given by pointer and stride: every input dense, padding marked by -1.
        heads = (layer.num_heads, layer.head_dim)
        return decode(
            qkv.contiguous(),
            f.unflatten(1, heads).contiguous(),
            beta.contiguous(),
            weight.contiguous(),
            layer.A_log,
            layer.dt_bias.view(heads),
            self.cache,
            plan.slots_N.masked_fill(plan.slots_N == 0, -1),
            plan.last_NW[:, 0].contiguous(),
            lower_bound=layer.lower_bound,
        )


class MlaPages:
    """Memory of one MLA layer over all pages: latents [P * page_size, R], normed latent first, shared key
    part last."""

    def __init__(self, latents_XR: Tensor, page_size: int) -> None:
        self.latents_XR, self.pages_PSR = latents_XR, latents_XR.unflatten(0, (-1, page_size))

    def append(self, new_TR: Tensor, plan: CachePlan) -> None:
        self.latents_XR.index_copy_(0, plan.rows_T, new_TR.to(self.latents_XR.dtype))

    def attend(self, query_THR: Tensor, plan: CachePlan, rank: int, scale: float) -> Tensor:
        """Softmax attention of absorbed queries over all latents of their sequence up to their own token; the
        mixed latents [T, H, rank], whose values are the first `rank` channels. Single tokens by `mla_decode`,
        chunks in the same tiles of keys."""
        heads = query_THR.shape[1]
        if plan.places_T is None:
            # Padding rows would attend to page 0 and cost as much as real ones.
            live = slice(0, plan.live)
            mixed_NHR = resolve("mla_decode", query_THR)(
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
        # All heads of a query share its last key, so they go side by side as queries of one sequence.
        last_NX1 = plan.last_NW.repeat_interleave(heads, dim=1).unsqueeze(-1)
        length = plan.pages_NP.shape[1] * self.pages_PSR.shape[1]
        keys = pages_of(self.pages_PSR, plan.pages_NP)
        mixed_NXR = attend_in_tiles(query_NXR, last_NX1, length, keys, rank, scale)
        return mixed_NXR.view(-1, heads, rank).index_select(0, plan.places_T)


AnyMemory = TypeVar("AnyMemory", KdaSlots, MlaPages)


@dataclass(frozen=True)
class Past(Generic[AnyMemory]):
    """What a layer is given beside the new tokens: its memory, and where the call's tokens stand in it."""

    memory: AnyMemory
    plan: CachePlan


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
