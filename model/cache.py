"""What a decoder remembers between calls: KDA states and convolution taps by slot, MLA latents by page.

A *slot* holds what the KDA layers know of one sequence (state and taps of every layer): a fixed size,
whatever its length. A *page* holds the latents of `page_size` consecutive tokens in every MLA layer. Who
owns which of them is the engine's affair (model/engine/cache.py).

A call brings new tokens for N sequences, packed in the order of the sequences: any number each in a prefill
(also a continued one), exactly one each in a decode step.

Shapes: S slots, P pages, N sequences, H heads, K = V head dim, C channels, W width of the convolution or
queries per sequence, R rank plus shared key part (in a ring: its rows), T new tokens, L tokens of all
sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from earlyfusion.kernels.attention.tiles import attend_in_tiles, pages_of
from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.kda.decode import DecodeCache, conv_step, decode
from earlyfusion.kernels.segments import Segments


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
