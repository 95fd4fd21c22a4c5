"""Attention Residuals for inference on a CPU: few operations, and a token's bits do not depend on the others.

Scores of the finished sources are taken once; each sub-layer adds the score of its partial sum and takes one
softmax over all. Every product is one small matrix per token, every softmax one row per token.

Shapes: T tokens, D hidden, S sub-layers of the block, n sources.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from earlyfusion.kernels.attnres import two_phase
from earlyfusion.kernels.attnres.two_phase import Rows, SubLayer, Watch
from earlyfusion.kernels.precision import accumulate_dtype


def _scores(sources: Sequence[Tensor], qw_SD: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(sources [T, n, D] in float32 or float64, scores [T, n, S])."""
    wide = accumulate_dtype(sources[0].dtype)
    # Token by token, so that no product's shape depends on how many tokens there are.
    v_TnD = torch.stack([source.to(wide) for source in sources], dim=1)
    r_Tn1 = torch.rsqrt(v_TnD.square().mean(-1, keepdim=True) + eps)
    return v_TnD, torch.bmm(v_TnD, qw_SD.T.expand(v_TnD.shape[0], -1, -1)).mul_(r_Tn1)


def phase1(sources: Sequence[Tensor], qw_SD: Tensor, eps: float) -> tuple[Rows, Rows, Rows]:
    """See :func:`earlyfusion.kernels.attnres.naive.phase1`; no gradient."""
    v_TnD, s_TnS = _scores(sources, qw_SD, eps)
    s_TSn = s_TnS.transpose(1, 2).contiguous()
    o_TSD = torch.bmm(s_TSn.softmax(-1), v_TnD)
    return o_TSD.to(sources[0].dtype).unbind(1), s_TSn.logsumexp(-1).unbind(1), tuple(sources)


def block(
    sources: Sequence[Tensor],
    sublayers: Sequence[SubLayer],
    qw_SD: Tensor,
    eps: float,
    watch: Watch | None = None,
) -> tuple[Sequence[Tensor], Tensor]:
    """See :func:`earlyfusion.kernels.attnres.naive.block`; no gradient."""
    if watch is not None:
        return two_phase.block(sources, sublayers, qw_SD, eps, watch)
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
