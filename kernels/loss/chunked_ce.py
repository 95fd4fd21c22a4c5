"""Weighted next-token cross-entropy without the logits in memory.

Rows without a loss are left out before the first product. The rest is worked off in chunks: logits of one chunk, their
softmax, and at once the gradients of h and W for a unit upstream gradient,

    dlogits = w_t (softmax - onehot)      dh = dlogits W      dW = dlogits^T h,

so that the backward pass only scales them. Products run in the compute dtype, softmax statistics and the sum of dW
over chunks in float32 (float64 for float64).

Legend: T tokens, M rows with a loss, R rows of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.loss.naive import IGNORE, check_loss
from earlyfusion.kernels.precision import accumulate_dtype, compute_dtype, softmax_with_lse, wide_mm, without_autocast

CPU_ELEMENTS = 1 << 20  # logits alive at once on a CPU: 4 MB, about a core's cache; larger chunks are slower


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        loss_weights_T: Tensor,
        chunk: int,
        wants: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(h_TD, weight_VD)
        wide = accumulate_dtype(dtype)
        with without_autocast(h_TD):
            rows_M = ((labels_T != IGNORE) & (loss_weights_T != 0)).nonzero()[:, 0]  # the op's one host sync on CUDA
            weight = weight_VD.to(dtype)
            nll_T = h_TD.new_zeros(h_TD.shape[0], dtype=wide)
            loss = h_TD.new_zeros((), dtype=wide)
            dh_TD = torch.zeros_like(h_TD) if wants[0] else None
            dweight_VD = torch.zeros_like(weight, dtype=wide) if wants[1] else None
            for rows_R in rows_M.split(chunk):
                h_RD, labels_R, w_R = (
                    h_TD.index_select(0, rows_R).to(dtype),
                    labels_T[rows_R],
                    loss_weights_T[rows_R].to(wide),
                )
                logits_RV = wide_mm(h_RD, weight.T)
                dlogits_RV, lse_R = softmax_with_lse(logits_RV)
                nll_R = lse_R - logits_RV.gather(1, labels_R[:, None])[:, 0]
                nll_T[rows_R] = nll_R
                loss += torch.dot(nll_R, w_R)
                if not any(wants):
                    continue
                dlogits_RV.scatter_add_(1, labels_R[:, None], torch.full_like(lse_R, -1.0)[:, None])
                dlogits_RV = dlogits_RV.mul_(w_R[:, None]).to(dtype)
                if dh_TD is not None:
                    dh_TD[rows_R] = (dlogits_RV @ weight).to(h_TD.dtype)
                if dweight_VD is not None:
                    dweight_VD += dlogits_RV.T @ h_RD
        ctx.gradients = dh_TD, dweight_VD, weight_VD.dtype
        ctx.mark_non_differentiable(nll_T)
        return loss, nll_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dh_TD, dweight_VD, weight_dtype = ctx.gradients
        if dh_TD is not None:
            dh_TD = dh_TD * dloss.to(dh_TD.dtype)
        if dweight_VD is not None:
            dweight_VD = (dweight_VD * dloss).to(weight_dtype)
        return dh_TD, dweight_VD, None, None, None, None


def linear_cross_entropy(
    h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, loss_weights_T: Tensor, *, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """sum_t w_t * nll_t with at most ``chunk`` rows of logits alive at a time.

    Args:
        labels_T: int64 vocabulary ids; -100 where there is no loss.
        loss_weights_T: float32, data without a gradient; 0 skips a position.
        chunk: most rows of logits computed at once (fewer on a CPU); workspace is two float32 [chunk, V].
    Returns:
        ``(weighted_sum, nll_T)``: the float32 (float64 for float64) scalar and the detached per-token losses in nats,
        0 at skipped positions. Without any counted position the sum is 0 and its gradients are zeros.
    Raises:
        ValueError: shapes do not belong together, or ``chunk`` is smaller than 1.
    """
    check_loss(h_TD, weight_VD, labels_T, loss_weights_T)
    if chunk < 1:
        raise ValueError(f"linear_cross_entropy: chunk is {chunk}; expected at least 1 row")
    if h_TD.device.type == "cpu":
        chunk = min(chunk, max(32, CPU_ELEMENTS // weight_VD.shape[0]))
    tracked = torch.is_grad_enabled()
    wants = (tracked and h_TD.requires_grad, tracked and weight_VD.requires_grad)
    return _LinearCrossEntropy.apply(h_TD, weight_VD, labels_T, loss_weights_T.detach(), chunk, wants)
