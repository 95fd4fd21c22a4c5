"""Attention over residual sources (Attention Residuals, arXiv 2603.15031, eqs. 1-6): the definition.

A sub-layer reads a softmax mixture of earlier representations v_i. With the pseudo-query w and the key norm
weight g of that sub-layer folded into one vector qw = w * g,

    s_i = <qw, v_i / sqrt(mean(v_i^2) + eps)>     p = softmax(s)     h = sum_i p_i v_i

Only keys are normalised, values are not; there is no 1/sqrt(D). A zero qw gives the uniform mean.

The block form is split in two phases (Alg. 1): ``phase1`` attends from the S sub-layers of a block over its
finished sources at once and returns a normalised output with its log-sum-exp; ``merge`` adds the block's
running partial sum, which differs from sub-layer to sub-layer. ``merge(*phase1(sources), partial) ==
mix([*sources, partial])``.

Legend: n sources, S sub-layers (queries), T tokens, D hidden.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from earlyfusion.kernels.products import accumulate_dtype, compute_dtype, without_autocast

Rows = tuple[Tensor, ...]


def _scores(v_nTD: Tensor, qw_SD: Tensor, eps: float) -> Tensor:
    # Keys are normed, so that a source cannot win by its size; values are not, so that sizes add up.
    key_nTD = v_nTD * torch.rsqrt(v_nTD.square().mean(dim=-1, keepdim=True) + eps)
    return torch.einsum("sd,ntd->snt", qw_SD, key_nTD)


def phase1(sources: Sequence[Tensor], qw_SD: Tensor, eps: float) -> tuple[Rows, Rows, Rows]:
    """Mix finished sources for S queries at once.

    Args:
        sources: n tensors [T, D].
        qw_SD: folded pseudo-queries.
        eps: of the key norm.
    Returns:
        ``(S mixtures [T, D], S log-sum-exps [T], the n sources)``: the mixtures in the sources' dtype and log
        sum_i exp(s_i), float32 (float64 for float64). Go on with the returned sources: a fused form adds the
        gradient of all later blocks to them inside its own backward kernel.
    """
    dtype = accumulate_dtype(sources[0].dtype)
    with without_autocast(qw_SD):
        v_nTD = torch.stack([source.to(dtype) for source in sources])
        s_SnT = _scores(v_nTD, qw_SD.to(dtype), eps)
        o_STD = torch.einsum("snt,ntd->std", s_SnT.softmax(dim=1), v_nTD)
    return o_STD.to(sources[0].dtype).unbind(), s_SnT.logsumexp(dim=1).unbind(), tuple(sources)


def merge(o1_TD: Tensor, lse1_T: Tensor, partial_TD: Tensor, qw_D: Tensor, eps: float) -> Tensor:
    """Add one more source to a phase-1 result of the same query by online softmax.

    Returns h_TD in the dtype of ``partial_TD``.
    """
    dtype = accumulate_dtype(partial_TD.dtype)
    with without_autocast(qw_D):
        partial = partial_TD.to(dtype)
        s_T = _scores(partial[None], qw_D[None].to(dtype), eps)[0, 0]
        # Online softmax of two entries.
        share_T1 = torch.sigmoid(s_T - lse1_T.to(dtype))[:, None]  # exp(s) / (exp(s) + exp(lse1))
        h_TD = (1 - share_T1) * o1_TD.to(dtype) + share_T1 * partial
    return h_TD.to(partial_TD.dtype)


def mix(sources: Sequence[Tensor], qw_D: Tensor, eps: float) -> Tensor:
    """One-phase mixture h_TD of all sources for one query: the law the two phases must reproduce."""
    return phase1(sources, qw_D[None], eps)[0][0]


def step_with(
    merge: Callable[..., Tensor],
    o1_TD: Tensor,
    lse1_T: Tensor,
    partial_TD: Tensor,
    out_TD: Tensor | None,
    qw_D: Tensor,
    norm_D: Tensor,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """Add a sub-layer's output to the running sum, merge it into the next mixture, normalise that:

        partial' = partial + out     h = merge(o1, lse1, partial')     x = h / sqrt(mean(h^2) + norm_eps) * g

    Args:
        merge: the form of that operation; the other arguments are those of every form of ``step``.
        partial_TD, out_TD: the block's running sum and the newest output; None after a block's first
            sub-layer, whose output is the sum.
        qw_D, norm_D: folded pseudo-query and pre-norm weight g of the next sub-layer.
    Returns:
        ``(partial', x)``: the sum in the dtype of ``partial_TD``, the normed input in the compute dtype.
    """
    # The sum is rounded as it is stored: that is what later readers see.
    wide = accumulate_dtype(partial_TD.dtype)
    summed_TD = partial_TD
    if out_TD is not None:
        summed_TD = (partial_TD.to(wide) + out_TD.to(wide)).to(partial_TD.dtype)
    h_TD = merge(o1_TD, lse1_T, summed_TD, qw_D, eps).to(wide)
    x_TD = h_TD * torch.rsqrt(h_TD.square().mean(dim=-1, keepdim=True) + norm_eps) * norm_D.to(wide)
    return summed_TD, x_TD.to(compute_dtype(partial_TD))


step = partial(step_with, merge)


def block(
    sources: Sequence[Tensor],
    sublayers: Sequence[Callable[[Tensor], Tensor]],
    qw_SD: Tensor,
    eps: float,
    watch: Callable[[int, Sequence[Tensor], Tensor | None], None] | None = None,
) -> tuple[Sequence[Tensor], Tensor]:
    """A block of sub-layers, each on its own mix of the sources and the sum of those before it.

    Returns (the sources to go on with, the sum [T, D] in the dtype of the first source). qw_SD: folded
    pseudo-queries; eps: of the key norms.
    """
    summed: Tensor | None = None
    for index, (sublayer, qw_D) in enumerate(zip(sublayers, qw_SD.unbind())):
        if watch is not None:
            watch(index, sources, summed)
        # The block's own sum is one more source from its second sub-layer on.
        every = sources if summed is None else [*sources, summed]
        out_TD = sublayer(mix(every, qw_D, eps))
        summed = out_TD.to(sources[0].dtype) if summed is None else summed + out_TD
    assert summed is not None
    return sources, summed
