"""Two operations that cover everything around a sub-layer under Attention Residuals, in plain torch.

``open_block`` is phase 1 with its results one by one and the sources handed on, so that a fused form can add
the gradient of later blocks in place; ``step`` is what stands between two sub-layers of a block:

    partial' = partial + out      h = merge(o1, lse1, partial')      x = h / sqrt(mean(h^2) + norm_eps) * g

Here they are compositions of the separate operations: the definition on top of the naive forms, and a torch
form on top of the closed-form ones. The Triton form reads and writes every tensor once.

Legend: n sources, S sub-layers (queries), T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from earlyfusion.kernels.attnres import naive, two_phase
from earlyfusion.kernels.precision import accumulate_dtype, compute_dtype

Opened = tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]


def _open(form: ModuleType, sources: Sequence[Tensor], qw_SD: Tensor, eps: float) -> Opened:
    # One by one: three gradients of [T, D] are cheaper than one of [S, T, D] that is mostly zero.
    o_STD, lse_ST = form.phase1(sources, qw_SD, eps)
    return o_STD.unbind(), lse_ST.unbind(), tuple(sources)


def open_block_naive(sources: Sequence[Tensor], qw_SD: Tensor, eps: float) -> Opened:
    """The definition of :func:`open_block`."""
    return _open(naive, sources, qw_SD, eps)


def open_block(sources: Sequence[Tensor], qw_SD: Tensor, eps: float) -> Opened:
    """Phase 1 of a block: ``(S mixtures [T, D], S log-sum-exps [T], the n sources again)``.

    Go on with the returned sources instead of the given ones. Raises ValueError as ``phase1`` does.
    """
    return _open(two_phase, sources, qw_SD, eps)


def _step(
    form: ModuleType,
    o1_TD: Tensor,
    lse1_T: Tensor,
    partial_TD: Tensor,
    out_TD: Tensor | None,
    qw_D: Tensor,
    norm_D: Tensor,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    # The sum is rounded as it is stored: that is what later readers see.
    wide = accumulate_dtype(partial_TD.dtype)
    summed_TD = partial_TD if out_TD is None else (partial_TD.to(wide) + out_TD.to(wide)).to(partial_TD.dtype)
    h_TD = form.merge(o1_TD, lse1_T, summed_TD, qw_D, eps).to(wide)
    x_TD = h_TD * torch.rsqrt(h_TD.square().mean(dim=-1, keepdim=True) + norm_eps) * norm_D.to(wide)
    return summed_TD, x_TD.to(compute_dtype(partial_TD))


def step_naive(
    o1_TD: Tensor,
    lse1_T: Tensor,
    partial_TD: Tensor,
    out_TD: Tensor | None,
    qw_D: Tensor,
    norm_D: Tensor,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """The definition of :func:`step`."""
    return _step(naive, o1_TD, lse1_T, partial_TD, out_TD, qw_D, norm_D, eps, norm_eps)


def step(
    o1_TD: Tensor,
    lse1_T: Tensor,
    partial_TD: Tensor,
    out_TD: Tensor | None,
    qw_D: Tensor,
    norm_D: Tensor,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """Add a sub-layer's output to the running sum, merge it into the next mixture, normalise for the next
    sub-layer.

    Args:
        partial_TD, out_TD: the block's running sum and the newest output; None after a block's first
        sub-layer, whose
            output is the sum.
        qw_D, norm_D: folded pseudo-query and pre-norm weight of the next sub-layer.
    Returns:
        ``(partial', x)``: the sum in the dtype of ``partial_TD``, the normed input in the compute dtype.
    """
    return _step(two_phase, o1_TD, lse1_T, partial_TD, out_TD, qw_D, norm_D, eps, norm_eps)
