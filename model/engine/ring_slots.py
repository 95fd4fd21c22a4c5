"""KDA slots for the Triton decode kernel: state V first, inputs of the convolution in a ring per slot.

The kernel advances a slot in place, with convolution, gate and output in one launch (kernels/kda/decode.py).
The token at position p stands in row p mod R of the ring, so to read or set taps one must know how many
tokens the slot holds.

Shapes: S slots, N sequences, H heads, K = V head dim, C channels, W width of the convolution, R rows of a
ring.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from earlyfusion.kernels.kda.decode import DecodeCache, decode
from earlyfusion.model.engine.stores import KdaSlots, PooledPlan


class RingSlots(KdaSlots):
    """Memory of one KDA layer over all slots, in the layout of the kernel. Build with `new`."""

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
        o_N1HV = decode(
            qkv.contiguous().unsqueeze(1),
            f.reshape(rows, 1, heads, dim).contiguous(),
            b.reshape(rows, 1, heads).contiguous(),
            weight.contiguous(),
            layer.A_log,
            layer.dt_bias.view(heads, dim),
            self.cache,
            slots_N,
            position_N,
            position_N,
            lower_bound=layer.lower_bound,
        )
        return o_N1HV.squeeze(1)

    def taken(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        rows = self._rings(torch.tensor([length], device=self.back.device))[0]
        return self.state_SHKV[slot], self.cache.x_SRC[slot, rows]

    def put(self, slot: int, length: int, state_HKV: Tensor, taps_WC: Tensor) -> None:
        self.state_SHKV[slot].copy_(state_HKV)
        rows = self._rings(torch.tensor([length], device=self.back.device))[0]
        self.cache.x_SRC[slot, rows] = taps_WC.to(self.cache.x_SRC)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.cache.state_SGVK, self.cache.x_SRC, self.cache.f_SRGK, self.cache.b_SRG
