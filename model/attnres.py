"""Attention Residuals: every sub-layer chooses, per token, which earlier outputs it reads.

With sources v_0 (the embedding), v_1, ... and one learned pseudo-query w and key-norm weight g per sub-layer,

    h = sum_i p_i v_i,    p = softmax_i( <w * g, v_i / rms(v_i)> )        (values are not normalised)

replaces the residual stream. In block form the sub-layer outputs inside a block are summed, and the sources
of a sub-layer are b_0 = embedding, the finished block sums b_1 .. b_{n-1}, and the partial sum of its own
block (absent for the block's first sub-layer). After the last block one more (w, g) mixes all block sums.
Full AttnRes is blocks of one sub-layer. The very first sub-layer has a single source, so its mix is the
identity (and its w and g get gradients that are exactly zero, not missing ones).

How a block is computed (phase 1 for all its sub-layers, then merges) stands in kernels/attnres/block.py.
Source: Attention Residuals (arXiv 2603.15031) section 3, algorithm 1; Kimi K3 (arXiv 2607.24653) section 2.2.

Shapes: T tokens, D hidden, S sub-layers of a block, n sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from earlyfusion.kernels.attnres.block import SubLayer
from earlyfusion.kernels.dispatch import resolve
from earlyfusion.model.norm import RMSNorm, at_least_fp32


@dataclass(frozen=True)
class Mix:
    """One place where sources are mixed: the pseudo-query w [D], the key norm that holds g [D], a name for
    reports."""

    name: str
    query_D: nn.Parameter
    norm: RMSNorm

    def folded(self) -> Tensor:
        """w * g [D] in fp32: only the product matters to the weights."""
        # Folded once per block: the kernels then read one vector where the paper has two.
        return at_least_fp32(self.query_D) * at_least_fp32(self.norm.weight)


@dataclass
class MixRecorder:
    """Mean mixing weights of every mix, split by token masks; for reports, never during training.

    masks: name -> bool [T]. After a decoder pass `rows[i]` is (name of the mix, {mask name: weights [n]
    fp32}), where source 0 is the embedding, the next ones the finished blocks; `has_partial[i]` tells that
    the last source is the running sum of the mix's own block. A mask without tokens yields NaN.
    """

    masks: dict[str, Tensor]
    rows: list[tuple[str, dict[str, Tensor]]] = field(default_factory=list)
    has_partial: list[bool] = field(default_factory=list)

    @torch.no_grad()
    def note(self, mix: Mix, sources: Sequence[Tensor], partial_TD: Tensor | None) -> None:
        # The running sum comes last, as the kernels see it; reports tell it apart by `has_partial`.
        every = list(sources) if partial_TD is None else [*sources, partial_TD]
        weights_nT = mixing_weights(every, mix.folded(), mix.norm.eps)
        means = {name: weights_nT[:, mask].mean(dim=1) for name, mask in self.masks.items()}
        self.rows.append((mix.name, means))
        self.has_partial.append(partial_TD is not None)


def mixing_weights(sources: Sequence[Tensor], qw_D: Tensor, eps: float) -> Tensor:
    """Softmax weights p [n, T] of the sources; sums to 1 over the sources. fp32."""
    # Kept apart from the kernels on purpose: a report must not depend on what it reports about.
    logits = []
    for source_TD in sources:
        fp = at_least_fp32(source_TD)
        logits.append((fp @ qw_D) * torch.rsqrt(fp.pow(2).mean(-1) + eps))
    return torch.stack(logits).softmax(0)


def mix_sources(sources: Sequence[Tensor], mix: Mix, recorder: MixRecorder | None = None) -> Tensor:
    """h [T, D] for one query over finished sources."""
    if recorder is not None:
        recorder.note(mix, sources, None)
    # One query over finished sources is phase 1 of a block with a single sub-layer.
    qw_1D = mix.folded().unsqueeze(0)
    o_1TD, _ = resolve("attnres_phase1", qw_1D)(list(sources), qw_1D, mix.norm.eps)
    return o_1TD[0]


def run_block(
    sources: Sequence[Tensor], sublayers: Sequence[tuple[Mix, SubLayer]], recorder: MixRecorder | None = None
) -> tuple[Tensor, ...]:
    """Run one block's sub-layers; returns the sources of the next block: the given ones and the block's sum
    [T, D].

    Go on with the returned sources (see kernels/attnres/block.py). The sum is kept in the dtype of the
    embedding (source 0). Nothing but `sources` is alive at the block's start, so recomputing whole blocks in
    the backward pass needs no saved activation besides the block sums themselves.
    """
    mixes = [mix for mix, _ in sublayers]
    bodies = [sublayer for _, sublayer in sublayers]
    qw_SD = torch.stack([mix.folded() for mix in mixes])

    # A report looks at the sources before they are mixed, where the kernel hands them over.
    def watch(index: int, before: Sequence[Tensor], partial_TD: Tensor | None) -> None:
        assert recorder is not None
        recorder.note(mixes[index], before, partial_TD)

    block = resolve("attnres_block", qw_SD)
    sources, summed_TD = block(
        sources, bodies, qw_SD, mixes[0].norm.eps, watch if recorder is not None else None
    )
    return *sources, summed_TD
