"""One block of sub-layers under Attention Residuals: who mixes, merges and norms between two of them.

Phase 1 mixes the finished sources for all sub-layers of the block in one pass; each sub-layer then merges its
row with the block's partial sum by an online softmax (exact). The definition is `run_block` of
kernels/attnres/naive.py.

Shapes: T tokens, D hidden, S sub-layers of the block, n sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from earlyfusion.kernels.dispatch import resolve

Watch = Callable[[int, Sequence[Tensor], Tensor | None], None]
"""Called in front of every sub-layer with its place in the block, the sources and the partial sum."""


class SubLayer(NamedTuple):
    """Pre-norm (a module with `weight` and `eps`) and body of a sub-layer, apart from each other so that the
    norm can be taken together with the mix."""

    norm: Any
    body: Callable[[Tensor], Tensor]

    def __call__(self, h_TD: Tensor) -> Tensor:
        return self.body(self.norm(h_TD))


def run_block(
    sources: Sequence[Tensor],
    sublayers: Sequence[SubLayer],
    qw_SD: Tensor,
    eps: float,
    watch: Watch | None = None,
) -> tuple[Sequence[Tensor], Tensor]:
    """See :func:`earlyfusion.kernels.attnres.naive.run_block`.

    Go on with the returned sources: a fused phase 1 hands them through itself, and so adds the gradient of
    all later blocks inside its own backward kernel. qw_SD: folded pseudo-queries; eps: of the key norms.
    """
    o_STD, lse_ST, sources = resolve("attnres_open", qw_SD.device)(list(sources), qw_SD, eps)
    merge = resolve("attnres_merge", qw_SD.device)
    partial: Tensor | None = None
    for index, (sublayer, o_TD, lse_T, qw_D) in enumerate(zip(sublayers, o_STD, lse_ST, qw_SD.unbind())):
        # A probe wants to see the mix: then the steps are taken one by one.
        if watch is not None:
            watch(index, sources, partial)
        # Phase 1 alone is the mix as long as the block has no sum.
        h_TD = o_TD if partial is None else merge(o_TD, lse_T, partial, qw_D, eps)
        out_TD = sublayer(h_TD)
        partial = out_TD.to(sources[0].dtype) if partial is None else partial + out_TD
    assert partial is not None
    return sources, partial


def run_fused(
    sources: Sequence[Tensor],
    sublayers: Sequence[SubLayer],
    qw_SD: Tensor,
    eps: float,
    watch: Watch | None = None,
) -> tuple[Sequence[Tensor], Tensor]:
    """The same with one kernel between two sub-layers: running sum, merge and pre-norm are one operation."""
    if watch is not None:
        return run_block(sources, sublayers, qw_SD, eps, watch)
    o_STD, lse_ST, sources = resolve("attnres_open", qw_SD.device)(list(sources), qw_SD, eps)
    step = resolve("attnres_step", qw_SD.device)
    # The first sub-layer has no sum to add to: its mix needs no merge.
    summed_TD = sublayers[0](o_STD[0]).to(sources[0].dtype).contiguous()

    # The newest output is added to the sum by the kernel in front of the next sub-layer, the last one here.
    newest_TD: Tensor | None = None
    for sublayer, o_TD, lse_T, qw_D in list(zip(sublayers, o_STD, lse_ST, qw_SD.unbind()))[1:]:
        norm = sublayer.norm
        summed_TD, x_TD = step(o_TD, lse_T, summed_TD, newest_TD, qw_D, norm.weight, eps, norm.eps)
        newest_TD = sublayer.body(x_TD).contiguous()
    return sources, summed_TD if newest_TD is None else summed_TD + newest_TD
