"""Joined weights for inference: projections of one normed input as one product, with the norm's weight
multiplied in.

A norm is then its `unit` alone, x / sqrt(sum(x^2) + size eps), with sqrt(size) in the weights, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from earlyfusion.kernels.products import add_product_, product
from earlyfusion.model.norm import RMSNorm


def unit(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x^2) + size eps) over the last dimension."""
    return x * torch.linalg.vecdot(x, x).add_(x.shape[-1] * eps).rsqrt_().unsqueeze(-1)


def norm_weight(norm: RMSNorm) -> Tensor:
    """What `unit` leaves of an RMS norm: its weight times sqrt(size)."""
    return norm.weight.detach() * norm.weight.shape[0] ** 0.5


def joined(norm_D: Tensor, *weights: Tensor) -> Tensor:
    """[D, sum of rows]: projections of one normed input, stacked and transposed, the norm's weight multiplied
    in."""
    return torch.cat([weight.detach() for weight in weights]).mul_(norm_D).T


class Scratch:
    """One buffer that the widest products of all sub-layers are written to, in turn.

    A fresh result of some MiB is mapped, faulted in and unmapped every time, which costs more than the
    product. A result is good until the next call, by another sub-layer.
    """

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x weight."""
        size = x.shape[0] * weight.shape[1]
        if self.buffer is None or self.buffer.numel() < size or self.buffer.dtype != x.dtype:
            self.buffer = x.new_empty(size)
        return product(x, weight, out=self.buffer[:size].view(x.shape[0], weight.shape[1]))


def add_product(x: Tensor, weight: Tensor, into: Tensor | None) -> Tensor:
    """x weight, added to `into` in place if there is one."""
    return product(x, weight) if into is None else add_product_(into, x, weight)
