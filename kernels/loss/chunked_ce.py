"""Weighted next-token cross-entropy and per-token log-probabilities without the logits in memory.

Rows without a loss are left out before the first product. The rest is worked off in chunks: logits of one
chunk, their softmax, and for the loss at once the gradients of h and W for a unit upstream gradient,

    dlogits = w_t (1 + 2 z lse) softmax - w_t onehot      dh = dlogits W      dW = dlogits^T h,

so that the backward pass only scales them. Log-probabilities get their upstream gradient one by one, so their
backward computes the logits of a chunk again. Products run in the compute dtype, softmax statistics and the
sum of dW over chunks in float32 (float64 for float64).

What is done to the logits of a chunk is a pair of functions (:class:`Rows`): here in plain torch, in
``triton_rows`` as kernels.

Legend: T tokens, M rows with a loss, R rows of a chunk, D hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.loss.naive import IGNORE
from earlyfusion.kernels.products import (
    accumulate_dtype,
    compute_dtype,
    product,
    product_over_rows,
    softmax_with_lse,
    wide_mm,
    without_autocast,
)
from earlyfusion.kernels.segments import check_loss, check_temperature

# The logits of a chunk are written once and read twice.
MOST_ROWS = 1024  # of logits computed at once: the workspace is two float32 [rows, V]
CPU_ELEMENTS = 1 << 20  # logits alive at once on a CPU: 4 MB, about a core's cache; larger chunks are slower


class Statistics(NamedTuple):
    """Per row: log-sum-exp, logit of the label, sum_v p_v logit_v (None if not asked for); kept for the
    gradient."""

    lse_R: Tensor
    picked_R: Tensor
    mean_R: Tensor | None
    kept_RV: Tensor


# A pair of functions, so that the chunking exists once for both backends.
class Rows(NamedTuple):
    """statistics(logits_RV, labels_R, with_mean); gradient(kept_RV, lse_R, labels_R, soft_R, hot_R, dtype) ->
    [R, V]

    with dlogits = soft * softmax - hot * onehot in ``dtype``. Both may overwrite what they are given.
    """

    statistics: Callable[[Tensor, Tensor, bool], Statistics]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]


def _statistics(logits_RV: Tensor, labels_R: Tensor, with_mean: bool) -> Statistics:
    p_RV, lse_R = softmax_with_lse(logits_RV)
    mean_R = torch.linalg.vecdot(p_RV, logits_RV) if with_mean else None
    return Statistics(lse_R, logits_RV.gather(1, labels_R[:, None])[:, 0], mean_R, p_RV)


def _gradient(p_RV: Tensor, lse_R: Tensor, labels_R: Tensor, slope_R: Tensor, dtype: torch.dtype) -> Tensor:
    return p_RV.mul_(slope_R[:, None]).scatter_add_(1, labels_R[:, None], -slope_R[:, None]).to(dtype)


TORCH_ROWS = Rows(_statistics, _gradient)


def _split(counted_T: Tensor, vocabulary: int) -> tuple[Tensor, ...]:
    """The counted rows, chunk by chunk."""
    rows_M, chunk = counted_T.nonzero()[:, 0], MOST_ROWS  # the op's one host sync on CUDA
    if not counted_T.is_cuda:
        chunk = min(chunk, max(32, CPU_ELEMENTS // vocabulary))
    # torch would split nothing into one chunk of no rows, and a product of no rows is a launch that not every
    # backend takes.
    return rows_M.split(chunk) if rows_M.numel() else ()


class _Chunks:
    """Chunks of a call's counted rows, and the gradients that they add up to."""

    def __init__(
        self, dtype: torch.dtype, rows: Sequence[Tensor], h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor
    ) -> None:
        self.dtype, self.wide, self.rows = dtype, accumulate_dtype(dtype), rows
        # The weight is cast once, not for every chunk.
        self.h_TD, self.weight_VD, self.labels_T = h_TD, weight_VD.to(dtype), labels_T

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """(rows, their hidden states, their labels, their logits)."""
        for rows_R in self.rows:
            h_RD = self.h_TD.index_select(0, rows_R).to(self.dtype)
            yield rows_R, h_RD, self.labels_T[rows_R], wide_mm(h_RD, self.weight_VD.T)

    def start(self, wants: Sequence[bool]) -> None:
        """Gradients of h and of the weight, None where not wanted; rows that are skipped keep their zeros."""
        self.dh_TD = torch.zeros_like(self.h_TD) if wants[0] else None
        self.dweight_VD = torch.zeros_like(self.weight_VD, dtype=self.wide) if wants[1] else None

    def add(self, rows_R: Tensor, dlogits_RV: Tensor, h_RD: Tensor) -> None:
        if self.dh_TD is not None:
            self.dh_TD[rows_R] = product(dlogits_RV, self.weight_VD).to(self.dh_TD.dtype)
        if self.dweight_VD is None:
            return
        if h_RD.is_cuda and self.dtype != self.wide:  # no rounding between chunks
            # One pass over the sum in place of three.
            total = self.dweight_VD
            torch.addmm(total, dlogits_RV.T, h_RD, out_dtype=self.wide, out=total)
        else:
            self.dweight_VD += product_over_rows(dlogits_RV, h_RD)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        loss_weights_T: Tensor,
        wants: tuple[bool, bool],
        rows: Rows,
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(h_TD, weight_VD)
        counted = _split((labels_T != IGNORE) & (loss_weights_T != 0), len(weight_VD))
        with without_autocast(h_TD):
            chunks = _Chunks(dtype, counted, h_TD, weight_VD, labels_T)
            chunks.start(wants)
            nll_T = h_TD.new_zeros(h_TD.shape[0], dtype=chunks.wide)
            loss = h_TD.new_zeros((), dtype=chunks.wide)
            for rows_R, h_RD, labels_R, logits_RV in chunks:
                w_R = loss_weights_T[rows_R].to(chunks.wide)
                lse_R, picked_R, _, kept_RV = rows.statistics(logits_RV, labels_R, False)
                nll_T[rows_R] = nll_R = lse_R - picked_R
                loss += torch.dot(nll_R, w_R)
                # Gradients are made here for an upstream of one: the loss is linear, so the backward only
                # scales.
                if any(wants):
                    dlogits_RV = rows.gradient(kept_RV, lse_R, labels_R, w_R, chunks.dtype)
                    chunks.add(rows_R, dlogits_RV, h_RD)
        ctx.gradients = chunks.dh_TD, chunks.dweight_VD, weight_VD.dtype
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


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        temperature: float,
        rows: Rows,
    ) -> tuple[Tensor, Tensor]:
        settings = compute_dtype(h_TD, weight_VD), _split(labels_T != IGNORE, len(weight_VD))
        with without_autocast(h_TD):
            chunks = _Chunks(*settings, h_TD, weight_VD, labels_T)
            logp_T, entropy_T = (h_TD.new_zeros(h_TD.shape[0], dtype=chunks.wide) for _ in range(2))
            for rows_R, _, labels_R, logits_RV in chunks:
                lse_R, picked_R, mean_R, _ = rows.statistics(logits_RV.div_(temperature), labels_R, True)
                logp_T[rows_R] = picked_R - lse_R
                assert mean_R is not None
                entropy_T[rows_R] = lse_R - mean_R
        ctx.save_for_backward(h_TD, weight_VD, labels_T)
        ctx.settings, ctx.temperature, ctx.rows = settings, temperature, rows
        ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogp_T: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (h_TD, weight_VD, _), temperature, rows = ctx.saved_tensors, ctx.temperature, ctx.rows
        with without_autocast(h_TD):
            chunks = _Chunks(*ctx.settings, *ctx.saved_tensors)
            chunks.start(ctx.needs_input_grad)
            for rows_R, h_RD, labels_R, logits_RV in chunks:
                # Each token has its own upstream gradient, so the logits are computed again.
                lse_R, _, _, kept_RV = rows.statistics(logits_RV.div_(temperature), labels_R, False)
                slope_R = -dlogp_T[rows_R].to(lse_R.dtype) / temperature
                dlogits_RV = rows.gradient(kept_RV, lse_R, labels_R, slope_R, chunks.dtype)
                chunks.add(rows_R, dlogits_RV, h_RD)
        dweight_VD = chunks.dweight_VD
        if dweight_VD is not None:
            dweight_VD = dweight_VD.to(weight_VD.dtype)
        return chunks.dh_TD, dweight_VD, None, None, None


def linear_cross_entropy(
    h_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    loss_weights_T: Tensor,
    *,
    rows: Rows = TORCH_ROWS,
) -> tuple[Tensor, Tensor]:
    """sum_t w_t nll_t with at most ``MOST_ROWS`` rows of logits alive at a time (fewer on a CPU).

    Args:
        labels_T: int64 vocabulary ids; -100 where there is no loss.
        loss_weights_T: float32, data without a gradient; 0 skips a position.
    Returns:
        ``(weighted_sum, nll_T)``: the float32 (float64 for float64) scalar and the detached per-token losses
        in nats, 0 at skipped positions. Without any counted position the sum is 0, its
        gradients zeros.
    Raises:
        ValueError: shapes or dtypes do not belong together.
    """
    check_loss(h_TD, weight_VD, labels_T, loss_weights_T)
    # Asked outside: inside the function everything looks as if it had no gradient.
    tracked = torch.is_grad_enabled()
    wants = (tracked and h_TD.requires_grad, tracked and weight_VD.requires_grad)
    return _LinearCrossEntropy.apply(h_TD, weight_VD, labels_T, loss_weights_T.detach(), wants, rows)


def token_log_probs(
    h_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    temperature: float = 1.0,
    rows: Rows = TORCH_ROWS,
) -> tuple[Tensor, Tensor]:
    """Log-probability of every label and the entropy of its distribution, in chunks as well.

    See :func:`earlyfusion.kernels.loss.naive.token_log_probs`. The backward pass computes the logits again.
    """
    check_loss(h_TD, weight_VD, labels_T, labels_T)
    check_temperature(temperature)
    return _TokenLogProbs.apply(h_TD, weight_VD, labels_T, temperature, rows)
