"""Attention Residuals: every sub-layer chooses, per token, which earlier outputs it reads.

With sources v_0 (the embedding), v_1, ... and one learned pseudo-query w and key-norm weight g per sub-layer,

    h = sum_i p_i v_i,    p = softmax_i( <w * g, v_i / rms(v_i)> )        (values are not normalised)

replaces the residual stream. In block form the sub-layer outputs inside a block are summed, and the sources
of a sub-layer are b_0 = embedding, the finished block sums b_1 .. b_{n-1}, and the partial sum of its own
block (absent for the block's first sub-layer). After the last block one more (w, g) mixes all block sums.
Full AttnRes is blocks of one sub-layer. The very first sub-layer has a single source, so its mix is the
identity (and its w and g get gradients that are exactly zero, not missing ones).

Schedule: phase 1 mixes the finished sources for all sub-layers of a block in one pass; each sub-layer then
merges its row with the partial sum by an online softmax (exact). Where there is a kernel for it, running sum,
merge and the sub-layer's pre-norm are one operation; elsewhere they run one by one. Source: Attention
Residuals (arXiv 2603.15031) section 3, algorithm 1; Kimi K3 (arXiv 2607.24653) section 2.2.

Shapes: T tokens, D hidden, S sub-layers of a block, n sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from earlyfusion.kernels.dispatch import pick, resolve
from earlyfusion.model.norm import RMSNorm, at_least_fp32


@dataclass(frozen=True)
class SubLayer:
    """Pre-norm and body of a sub-layer, apart from each other so that the norm can be taken together with the
    mix."""

    norm: RMSNorm
    body: Callable[[Tensor], Tensor]

    def __call__(self, h_TD: Tensor) -> Tensor:
        return self.body(self.norm(h_TD))


@dataclass(frozen=True)
class Mix:
    """One place where sources are mixed: the pseudo-query w [D], the key norm that holds g [D], a name for
    reports."""

    name: str
    query_D: nn.Parameter
    norm: RMSNorm

    def folded(self) -> Tensor:
        """w * g [D] in fp32: only the product matters to the weights."""
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
        every = list(sources) if partial_TD is None else [*sources, partial_TD]
        weights_nT = mixing_weights(every, mix.folded(), mix.norm.eps)
        means = {name: weights_nT[:, mask].mean(dim=1) for name, mask in self.masks.items()}
        self.rows.append((mix.name, means))
        self.has_partial.append(partial_TD is not None)


def mixing_weights(sources: Sequence[Tensor], qw_D: Tensor, eps: float) -> Tensor:
    """Softmax weights p [n, T] of the sources; sums to 1 over the sources. fp32."""
    logits = []
    for source_TD in sources:
        fp = at_least_fp32(source_TD)
        logits.append((fp @ qw_D) * torch.rsqrt(fp.pow(2).mean(-1) + eps))
    return torch.stack(logits).softmax(0)


def mix_sources(sources: Sequence[Tensor], mix: Mix, recorder: MixRecorder | None = None) -> Tensor:
    """h [T, D] for one query over finished sources."""
    if recorder is not None:
        recorder.note(mix, sources, None)
    if (
        recorder is None
        and not torch.is_grad_enabled()
        and sources[0].is_cpu
        and pick("attnres_merge", "cpu") == "torch"
    ):
        return _run_block_alone(sources, [(mix, lambda h_TD: h_TD)], mix.folded().unsqueeze(0))
    o_1TD, _ = resolve("attnres_phase1", sources[0].device)(
        list(sources), mix.folded().unsqueeze(0), mix.norm.eps
    )
    return o_1TD[0]


def run_block(
    sources: Sequence[Tensor], sublayers: Sequence[tuple[Mix, SubLayer]], recorder: MixRecorder | None = None
) -> tuple[Tensor, ...]:
    """Run one block's sub-layers; returns the sources of the next block: the given ones and the block's sum
    [T, D].

    Go on with the returned sources: a fused phase 1 hands them through itself, and so adds the gradient of
    all later blocks inside its own backward kernel. The sum is kept in the dtype of the embedding (source 0).
    Nothing but `sources` is alive at the block's start, so recomputing whole blocks in the backward pass
    needs no saved activation besides the block sums themselves.
    """
    eps = sublayers[0][0].norm.eps
    qw_SD = torch.stack([mix.folded() for mix, _ in sublayers])
    if (
        recorder is None
        and not torch.is_grad_enabled()
        and qw_SD.is_cpu
        and pick("attnres_merge", "cpu") == "torch"
    ):
        return *sources, _run_block_alone(sources, sublayers, qw_SD)
    o_STD, lse_ST, sources = resolve("attnres_open", qw_SD.device)(list(sources), qw_SD, eps)
    if recorder is None and pick("attnres_step", qw_SD.device) == "triton":
        return *sources, _fused_steps(sources[0].dtype, sublayers, o_STD, lse_ST, qw_SD)
    merge = resolve("attnres_merge", qw_SD.device)
    partial: Tensor | None = None
    for (mix, sublayer), o_TD, lse_T, qw_D in zip(sublayers, o_STD, lse_ST, qw_SD.unbind()):
        if recorder is not None:
            recorder.note(mix, sources, partial)
        h_TD = o_TD if partial is None else merge(o_TD, lse_T, partial, qw_D, eps)
        out_TD = sublayer(h_TD)
        partial = out_TD.to(sources[0].dtype) if partial is None else partial + out_TD
    assert partial is not None
    return *sources, partial


def _fused_steps(
    dtype: torch.dtype,
    sublayers: Sequence[tuple[Mix, SubLayer]],
    o_STD: Sequence[Tensor],
    lse_ST: Sequence[Tensor],
    qw_SD: Tensor,
) -> Tensor:
    """The sub-layers of an opened block with one kernel between two of them; returns the sum of their
    outputs.

    The newest output is added to the sum by the kernel in front of the next sub-layer, that of the last one
    here.
    """
    step = resolve("attnres_step", qw_SD.device)
    eps = sublayers[0][0].norm.eps
    summed_TD = sublayers[0][1](o_STD[0]).to(dtype).contiguous()
    newest_TD: Tensor | None = None
    for (_, sublayer), o_TD, lse_T, qw_D in list(zip(sublayers, o_STD, lse_ST, qw_SD.unbind()))[1:]:
        norm = sublayer.norm
        summed_TD, x_TD = step(o_TD, lse_T, summed_TD, newest_TD, qw_D, norm.weight, eps, norm.eps)
        newest_TD = sublayer.body(x_TD).contiguous()
    return summed_TD if newest_TD is None else summed_TD + newest_TD


def _run_block_alone(
    sources: Sequence[Tensor], sublayers: Sequence[tuple[Mix, Callable[[Tensor], Tensor]]], qw_SD: Tensor
) -> Tensor:
    """The sum of `run_block` for inference on a CPU: fewer operations, and a token's bits do not depend on
    the other tokens.

    Scores of the finished sources are taken once; each sub-layer adds the score of its partial sum and takes
    one softmax over all. Every product is one small matrix per token, every softmax one row per token.
    """
    eps = sublayers[0][0].norm.eps
    v_TnD = torch.stack([at_least_fp32(source) for source in sources], dim=1)
    r_Tn1 = torch.rsqrt(v_TnD.square().mean(-1, keepdim=True) + eps)
    tokens, width = v_TnD.shape[0], v_TnD.shape[2]
    s_TnS = torch.bmm(v_TnD, qw_SD.T.expand(tokens, width, -1)).mul_(r_Tn1)
    partial: Tensor | None = None
    for index, (_, sublayer) in enumerate(sublayers):
        s_Tn = s_TnS[..., index]
        if partial is None:
            h_TD = torch.bmm(s_Tn.softmax(-1).unsqueeze(1), v_TnD).squeeze(1)
        else:
            fp_TD = at_least_fp32(partial)
            s_T1 = (fp_TD * qw_SD[index]).sum(-1, keepdim=True)
            s_T1 = s_T1 * torch.rsqrt(fp_TD.square().mean(-1, keepdim=True) + eps)
            p_TN = torch.cat([s_Tn, s_T1], dim=1).softmax(-1)
            h_TD = torch.bmm(p_TN[:, None, :-1], v_TnD).squeeze(1).addcmul_(p_TN[:, -1:], fp_TD)
        out_TD = sublayer(h_TD.to(sources[0].dtype))
        partial = out_TD.to(sources[0].dtype) if partial is None else partial + out_TD
    assert partial is not None
    return partial
