"""Attention over residual sources with a closed-form backward (arXiv 2603.15031, algorithm 1).

With x = dh, r_i = rsqrt(mean v_i^2 + eps), s_i = r_i <qw, v_i>, p = softmax(s):

    dp_i = <x, v_i>                       ds_i = p_i (dp_i - sum_j p_j dp_j + dlse)
    dv_i = p_i x + ds_i r_i qw - (ds_i r_i^2 s_i / D) v_i
    dqw  = sum_t sum_i ds_i r_i v_i

so that the gradient of every source is a combination of x, qw and the source itself with scalar coefficients,
and the S queries of a block are accumulated in one pass over the sources. Only the sources and qw are saved.
Rows are worked off in tiles, so the float32 stack of all sources never exists for more than one tile; in
float32 on a CPU, C++ works them off one by one (compiled.py).

Legend: n sources, S sub-layers (queries), T tokens, R tokens of a tile, D hidden.

Attention Residuals for inference on a CPU: few operations, and a token's bits do not depend on the others.

Scores of the finished sources are taken once; each sub-layer adds the score of its partial sum and takes one
softmax over all. Every product is one small matrix per token, every softmax one row per token.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.attnres import compiled, naive
from earlyfusion.kernels.products import accumulate_dtype, without_autocast
from earlyfusion.kernels.rowwise import serves
from earlyfusion.kernels.segments import check_sources

Rows = tuple[Tensor, ...]
"""Of one shape, one for each sub-layer or source: S gradients of [T, D] are cheaper than S of [S, T, D]."""

Watch = Callable[[int, Sequence[Tensor], Tensor | None], None]
"""Called in front of every sub-layer with its place in the block, the sources and the partial sum."""


class SubLayer(NamedTuple):
    """Pre-norm (a module with `weight` and `eps`) and body of a sub-layer, apart from each other so that the
    norm can be taken together with the mix."""

    norm: Any
    body: Callable[[Tensor], Tensor]

    def __call__(self, h_TD: Tensor) -> Tensor:
        return self.body(self.norm(h_TD))


# Found by measuring; a tile stays in the cache for both products.
CPU_TILE = 1024  # rows: n + 2S float32 tiles of width 128 stay in a few MB of cache
GPU_TILE = 16384  # rows: few launches, bounded workspace


def _tiles(tokens: int, device: torch.device) -> Iterator[slice]:
    size = CPU_TILE if device.type == "cpu" else GPU_TILE
    return (slice(start, start + size) for start in range(0, tokens, size))


def _weights(v_RnD: Tensor, qw_SD: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Scores s [R, S, n] and inverse norms r [R, 1, n]."""
    # The norm factor is applied to the scores: a scalar per source instead of a normed copy of it.
    r_R1n = torch.rsqrt(v_RnD.square().mean(dim=-1) + eps)[:, None]
    s_RSn = torch.matmul(v_RnD, qw_SD.T).transpose(1, 2) * r_R1n
    return s_RSn, r_R1n


class _Phase1(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qw_SD: Tensor, eps: float, *sources: Tensor) -> tuple[Tensor, Tensor]:
        tokens, width = sources[0].shape
        dtype = accumulate_dtype(sources[0].dtype)
        o_STD = sources[0].new_empty(qw_SD.shape[0], tokens, width)
        lse_ST = sources[0].new_empty(qw_SD.shape[0], tokens, dtype=dtype)
        with without_autocast(qw_SD):
            qw = qw_SD.to(dtype)
            for rows in _tiles(tokens, qw.device):
                v_RnD = torch.stack([source[rows].to(dtype) for source in sources], dim=1)
                s_RSn, _ = _weights(v_RnD, qw, eps)
                # Tiles of rows: the float32 stack of all sources exists for one of them at a time.
                lse_ST[:, rows] = s_RSn.logsumexp(dim=-1).T
                o_STD[:, rows] = torch.bmm(s_RSn.softmax(dim=-1), v_RnD).transpose(0, 1)
        ctx.save_for_backward(qw_SD, *sources)
        ctx.eps = eps
        return o_STD, lse_ST

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_STD: Tensor, dlse_ST: Tensor) -> tuple[Tensor | None, ...]:
        qw_SD, *sources = ctx.saved_tensors
        tokens, width = sources[0].shape
        dtype = accumulate_dtype(sources[0].dtype)
        dsources = [torch.empty_like(source) for source in sources]
        with without_autocast(qw_SD):
            qw = qw_SD.to(dtype)
            dqw_SD = torch.zeros_like(qw)
            for rows in _tiles(tokens, qw.device):
                v_RnD = torch.stack([source[rows].to(dtype) for source in sources], dim=1)
                x_RSD = do_STD[:, rows].transpose(0, 1).to(dtype).contiguous()
                s_RSn, r_R1n = _weights(v_RnD, qw, ctx.eps)
                p_RSn = s_RSn.softmax(dim=-1)
                dp_RSn = torch.bmm(x_RSD, v_RnD.transpose(1, 2))
                # The softmax takes off what all sources have in common; the log-sum-exp's own gradient
                # joins here.
                delta_RS1 = (p_RSn * dp_RSn).sum(dim=-1, keepdim=True) - dlse_ST[:, rows].T[..., None]
                # Every gradient is a small matrix of coefficients times x, qw or the sources themselves.
                a_RSn = p_RSn * (dp_RSn - delta_RS1) * r_R1n  # ds_i r_i
                c_Rn1 = ((a_RSn * s_RSn).sum(dim=1) * r_R1n[:, 0])[..., None] / width
                dv_RnD = torch.matmul(a_RSn.transpose(1, 2), qw).addcmul_(c_Rn1, v_RnD, value=-1)
                dv_RnD.baddbmm_(p_RSn.transpose(1, 2), x_RSD)
                dqw_SD += a_RSn.transpose(0, 1).flatten(1) @ v_RnD.flatten(0, 1)
                # Each source is written once, in its own dtype.
                for dsource, dv_RD in zip(dsources, dv_RnD.unbind(dim=1)):
                    dsource[rows] = dv_RD
        return dqw_SD.to(qw_SD.dtype), None, *dsources


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, o1_TD: Tensor, lse1_T: Tensor, partial_TD: Tensor, qw_D: Tensor, eps: float
    ) -> Tensor:
        dtype = accumulate_dtype(partial_TD.dtype)
        with without_autocast(qw_D):
            partial = partial_TD.to(dtype)
            s_T, _ = _score(partial, qw_D.to(dtype), eps)
            share_T1 = torch.sigmoid(s_T - lse1_T)[:, None]
            # One pass, and exact at both ends.
            h_TD = torch.lerp(o1_TD.to(dtype), partial, share_T1)
        ctx.save_for_backward(o1_TD, lse1_T, partial_TD, qw_D)
        ctx.eps = eps
        return h_TD.to(partial_TD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_TD: Tensor) -> tuple[Tensor | None, ...]:
        o1_TD, lse1_T, partial_TD, qw_D = ctx.saved_tensors
        dtype = accumulate_dtype(partial_TD.dtype)
        with without_autocast(qw_D):
            x, partial, qw = dh_TD.to(dtype), partial_TD.to(dtype), qw_D.to(dtype)
            s_T, r_T = _score(partial, qw, ctx.eps)
            share_T = torch.sigmoid(s_T - lse1_T)
            # The derivative of the sigmoid times how far apart its two sides are.
            ds_T = share_T * (1 - share_T) * (x * (partial - o1_TD)).sum(dim=-1)
            a_T = ds_T * r_T
            do1_TD = x * (1 - share_T)[:, None]
            dpartial_TD = torch.addcmul(x * share_T[:, None], a_T[:, None], qw)
            dpartial_TD.addcmul_((a_T * r_T * s_T / qw.shape[0])[:, None], partial, value=-1)
            dqw_D = a_T @ partial
        return do1_TD.to(o1_TD.dtype), -ds_T, dpartial_TD.to(partial_TD.dtype), dqw_D.to(qw_D.dtype), None


def _score(v_TD: Tensor, qw_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    r_T = torch.rsqrt(v_TD.square().mean(dim=-1) + eps)
    return (v_TD @ qw_D) * r_T, r_T


def phase1(sources: Sequence[Tensor], qw_SD: Tensor, eps: float) -> tuple[Rows, Rows, Rows]:
    """Mix finished sources for S queries at once; see :func:`earlyfusion.kernels.attnres.naive.phase1`.

    Raises:
        ValueError: no sources, or shapes differ.
    """
    check_sources(sources, qw_SD.shape[-1])
    if serves(qw_SD, *sources):
        made = compiled.Phase1.apply(qw_SD, eps, *sources)
        return made[: len(qw_SD)], made[len(qw_SD) :], tuple(sources)
    o_STD, lse_ST = _Phase1.apply(qw_SD, eps, *sources)
    return o_STD.unbind(), lse_ST.unbind(), tuple(sources)


def merge(o1_TD: Tensor, lse1_T: Tensor, partial_TD: Tensor, qw_D: Tensor, eps: float) -> Tensor:
    """Add the running partial sum to a phase-1 result of the same query; h_TD in the dtype of
    ``partial_TD``."""
    # (The C++ takes sizes as they are told.)
    fits = o1_TD.shape == partial_TD.shape == (len(lse1_T), len(qw_D))
    served = fits and serves(o1_TD, lse1_T, partial_TD, qw_D)
    return (compiled.Merge if served else _Merge).apply(o1_TD, lse1_T, partial_TD, qw_D, eps)


step = partial(naive.step_with, merge)


def block(
    sources: Sequence[Tensor],
    sublayers: Sequence[SubLayer],
    qw_SD: Tensor,
    eps: float,
    watch: Watch | None = None,
) -> tuple[Sequence[Tensor], Tensor]:
    """See :func:`earlyfusion.kernels.attnres.naive.block`: phase 1 mixes the finished sources for all
    sub-layers in one pass, and each merges its row with the block's sum by an online softmax (exact)."""
    mixes, lses, sources = phase1(sources, qw_SD, eps)
    summed: Tensor | None = None
    for index, (sublayer, o_TD, lse_T, qw_D) in enumerate(zip(sublayers, mixes, lses, qw_SD.unbind())):
        if watch is not None:
            watch(index, sources, summed)
        # Phase 1 alone is the mix as long as the block has no sum.
        h_TD = o_TD if summed is None else merge(o_TD, lse_T, summed, qw_D, eps)
        out_TD = sublayer(h_TD)
        summed = out_TD.to(sources[0].dtype) if summed is None else summed + out_TD
    assert summed is not None
    return sources, summed


# ---- inference on a CPU ----


def _scores(sources: Sequence[Tensor], qw_SD: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(sources [T, n, D] in float32 or float64, scores [T, n, S])."""
    wide = accumulate_dtype(sources[0].dtype)
    # Token by token, so that no product's shape depends on how many tokens there are.
    v_TnD = torch.stack([source.to(wide) for source in sources], dim=1)
    r_Tn1 = torch.rsqrt(v_TnD.square().mean(-1, keepdim=True) + eps)
    return v_TnD, torch.bmm(v_TnD, qw_SD.T.expand(v_TnD.shape[0], -1, -1)).mul_(r_Tn1)


def phase1_alone(sources: Sequence[Tensor], qw_SD: Tensor, eps: float) -> tuple[Rows, Rows, Rows]:
    """See :func:`earlyfusion.kernels.attnres.naive.phase1`; no gradient."""
    v_TnD, s_TnS = _scores(sources, qw_SD, eps)
    s_TSn = s_TnS.transpose(1, 2).contiguous()
    o_TSD = torch.bmm(s_TSn.softmax(-1), v_TnD)
    return o_TSD.to(sources[0].dtype).unbind(1), s_TSn.logsumexp(-1).unbind(1), tuple(sources)


def block_alone(
    sources: Sequence[Tensor],
    sublayers: Sequence[SubLayer],
    qw_SD: Tensor,
    eps: float,
    watch: Watch | None = None,
) -> tuple[Sequence[Tensor], Tensor]:
    """See :func:`earlyfusion.kernels.attnres.naive.block`; no gradient."""
    if watch is not None:
        return block(sources, sublayers, qw_SD, eps, watch)
    v_TnD, s_TnS = _scores(sources, qw_SD, eps)
    partial: Tensor | None = None
    for index, sublayer in enumerate(sublayers):
        s_Tn = s_TnS[..., index]
        if partial is None:
            h_TD = torch.bmm(s_Tn.softmax(-1).unsqueeze(1), v_TnD).squeeze(1)
        else:
            fp_TD = partial.to(v_TnD.dtype)
            s_T1 = (fp_TD * qw_SD[index]).sum(-1, keepdim=True)
            s_T1 = s_T1 * torch.rsqrt(fp_TD.square().mean(-1, keepdim=True) + eps)
            # One softmax over sources and sum: cheaper than a merge for a few rows.
            p_TN = torch.cat([s_Tn, s_T1], dim=1).softmax(-1)
            h_TD = torch.bmm(p_TN[:, None, :-1], v_TnD).squeeze(1).addcmul_(p_TN[:, -1:], fp_TD)

        out_TD = sublayer(h_TD.to(sources[0].dtype))
        partial = out_TD.to(sources[0].dtype) if partial is None else partial + out_TD
    assert partial is not None
    return sources, partial
