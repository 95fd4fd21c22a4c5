"""Policy losses: the Moonshot line and its peers as members of one family.

    A_N = advantages(config, rewards_N, groups_N)
    out = policy_loss(config, logp_T, old_logp_T, A_N, segments, mask_T=trained_T)
    (out.loss + ptx_loss(...)).backward()

With l = log pi(token) - log pi_old(token), rho = e^l, n the trained tokens of an answer, L = sum l over the
answer, S answers and M trained tokens in the batch, what is minimised and its derivative by log pi of a
token:

    k1.5        mean over answers of  -A L + (tau/2) L^2                     -(A - tau L) / S
    k2          mean over answers of  (A - tau L)^2                          2 tau times that of k1.5
    k2.5, k3    1/M sum  -[alpha <= l <= beta] rho A + tau l^2               -([inside] rho A - 2 tau l) / M
    grpo        mean over answers of 1/n sum -min(rho A, clip(rho) A)        -[active] rho A / (n S)
    dr_grpo     the same, n replaced by a constant for all answers
    dapo        1/M sum, other bounds
    gspo        mean over answers of -min(s A, clip(s) A), s = e^{L/n}       -[active] s A / (n S)
    cispo       1/M sum  -constant(clip(rho)) A log pi                       -clip(rho) A / M

The window of K2.5 is a mask of the gradient, not a clamp of the ratio: it does not ask for the advantage's
sign (PPO masks one side for each sign), and the squared term acts on every token, masked or not, so that a
token outside is pulled back. `pi_old` is whoever sampled: for K2.5 the engine itself.

Legend: T packed tokens, N responses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from earlyfusion.data.errors import DataError
from earlyfusion.kernels.segments import Segments, check_packed
from earlyfusion.rl.config import ObjectiveConfig
from earlyfusion.rl.objectives.sequences import Totals, only, sequence_sums, spread, token_mask, totals, wide

MAX_LOG_RATIO = (
    20.0  # e^20 = 5e8: beyond it a ratio no longer moves, which keeps products with 0 from becoming NaN
)


class PolicyLoss(NamedTuple):
    """loss: 0-d, to be minimised. The rest are constants, sums over the trained tokens (0-d), to be divided
    by `tokens` after adding up pieces and ranks: outside (tokens whose policy gradient is masked or clipped,
    or whose weight is), k3 (divergence rho - 1 - l of the old policy from the new, nats), log_ratio;
    log_ratio_max is the largest |l|."""

    loss: Tensor
    tokens: Tensor
    outside: Tensor
    k3: Tensor
    log_ratio: Tensor
    log_ratio_max: Tensor


def policy_loss(
    config: ObjectiveConfig,
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantages_N: Tensor,
    segments: Segments,
    *,
    mask_T: Tensor | None = None,
    weight_T: Tensor | None = None,
    ref_logp_T: Tensor | None = None,
    batch: Totals | None = None,
) -> PolicyLoss:
    """The loss of `config` on N responses packed in T tokens.

    logp_T: log-probabilities under the policy being trained (differentiable); old_logp_T under the one the
    objective calls old; ref_logp_T under a reference, for kl_coef. mask_T: tokens that are trained (all if
    None); the others, which may hold NaN, neither count nor get a gradient. weight_T: constants of
    `corrections.importance_weights` on the policy term; squared and KL terms keep all tokens. k1.5, K2 and
    GSPO have one term for each answer and use the mean weight over it. batch: totals of the whole batch when
    this is a piece of it. No trained token: loss 0, gradient 0.

    float32 inside, float64 if given. Raises ValueError for tensors that do not fit the segments, DataError
    without the reference that kl_coef needs.
    """
    for name, values in (("logp_T", logp_T), ("old_logp_T", old_logp_T), ("weight_T", weight_T)):
        if values is not None:
            check_packed(name, values, segments)
    mask_T = token_mask(mask_T, segments, logp_T.device)
    logp_T, old_T = only(mask_T, wide(logp_T)), only(mask_T, wide(old_logp_T.detach()).to(logp_T.device))
    log_T = logp_T - old_T
    advantages_N = wide(advantages_N.detach()).to(logp_T.device)
    if advantages_N.shape != (segments.num,):
        raise ValueError(
            f"{tuple(advantages_N.shape)} advantages for {segments.num} responses; give one for each"
        )
    weight_T = torch.ones_like(old_T) if weight_T is None else wide(weight_T.detach()).to(old_T.device)
    weight_T = only(mask_T, weight_T)
    batch = totals(mask_T, segments) if batch is None else batch
    batch = Totals(*(total.to(log_T) for total in batch))
    counts_N = sequence_sums(mask_T.to(log_T.dtype), segments)
    if config.ratio == "token":
        terms_T, outside_T = _token_terms(config, logp_T, log_T, only(mask_T, spread(advantages_N, segments)))
        terms_T = weight_T * terms_T + config.tau * log_T.square()
        loss = _reduce(config.normaliser, terms_T, counts_N, segments, batch, config.constant_tokens)
    else:
        weight_N = sequence_sums(weight_T, segments) / counts_N.clamp(min=1)
        terms_N, outside_N = _answer_terms(config, sequence_sums(log_T, segments), advantages_N, counts_N)
        loss = (weight_N * terms_N).sum() / batch.sequences.clamp(min=1)
        outside_T = spread(outside_N, segments)
    if config.kl_coef:
        style = "sequence_means" if config.ratio != "token" else config.normaliser
        kl_T = _reference_kl(logp_T, ref_logp_T, mask_T, segments)
        loss = loss + config.kl_coef * _reduce(style, kl_T, counts_N, segments, batch, config.constant_tokens)
    return _with_sums(loss, log_T.detach(), mask_T, outside_T)


def _with_sums(loss: Tensor, log_T: Tensor, mask_T: Tensor, outside_T: Tensor) -> PolicyLoss:
    k3 = (torch.expm1(log_T.clamp(max=MAX_LOG_RATIO)) - log_T).sum()
    largest = torch.cat([log_T.abs(), log_T.new_zeros(1)]).amax()
    return PolicyLoss(loss, mask_T.sum(), (outside_T & mask_T).sum(), k3, log_T.sum(), largest)


def _token_terms(
    config: ObjectiveConfig, logp_T: Tensor, log_T: Tensor, A_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Policy term of every token and whether it is outside the trust region."""
    if config.term == "window":
        inside_T = (log_T.detach() >= config.log_low) & (log_T.detach() <= config.log_high)
        # The ratio is taken of the inside only: a masked token may be so far out that e^l is not finite.
        return -only(inside_T, only(inside_T, log_T).exp() * A_T), ~inside_T
    ratio_T = log_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if config.term == "weight":
        fixed_T = ratio_T.detach()
        return -fixed_T.clamp(config.weight_low, config.weight_high) * A_T * logp_T, (
            (fixed_T < config.weight_low) | (fixed_T > config.weight_high)
        )
    return _clipped(config, ratio_T, A_T)


def _clipped(config: ObjectiveConfig, ratio: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """PPO: -min(rho A, clip(rho) A); with clip_negative, rho is first cut off there where A < 0
    (INTELLECT-2)."""
    bound = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    fixed = ratio.detach()
    outside = ((A > 0) & (fixed > 1 + config.clip_high)) | ((A < 0) & (fixed < 1 - config.clip_low))
    if config.clip_negative is not None:
        outside = outside | ((A < 0) & (fixed > config.clip_negative))
        ratio = torch.where(A < 0, ratio.clamp(max=config.clip_negative), ratio)
    return -torch.minimum(ratio * A, bound * A), outside


def _answer_terms(
    config: ObjectiveConfig, sum_N: Tensor, A_N: Tensor, counts_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Term of every answer from L = sum of its log ratios; answers without a trained token have none."""
    real_N = counts_N > 0
    A_N = only(real_N, A_N)
    none_N = torch.zeros_like(real_N)
    if config.term == "linear":
        return -A_N * sum_N + 0.5 * config.tau * sum_N.square(), none_N
    if config.term == "squared":
        return (A_N - config.tau * sum_N).square(), none_N
    mean_N = sum_N / counts_N.clamp(min=1)
    terms_N, outside_N = _clipped(config, mean_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), A_N)
    return terms_N, outside_N


def _reference_kl(logp_T: Tensor, ref_logp_T: Tensor | None, mask_T: Tensor, segments: Segments) -> Tensor:
    """k3 estimator e^d - 1 - d of KL(pi || ref), d = log ref - log pi: never negative, gradient 1 - e^d by
    log pi."""
    if ref_logp_T is None:
        raise DataError(
            "kl_coef is above 0 but no reference log-probabilities were given; pass ref_logp_T or set it 0"
        )
    check_packed("ref_logp_T", ref_logp_T, segments)
    d_T = only(mask_T, wide(ref_logp_T.detach()).to(logp_T.device)) - logp_T
    return torch.expm1(d_T.clamp(max=MAX_LOG_RATIO)) - d_T


def _reduce(
    normaliser: str,
    terms_T: Tensor,
    counts_N: Tensor,
    segments: Segments,
    batch: Totals,
    constant: int | None,
) -> Tensor:
    """Terms of the trained tokens (0 elsewhere) to one number."""
    if normaliser == "tokens":
        return terms_T.sum() / batch.tokens.clamp(min=1)
    if normaliser == "constant":
        return terms_T.sum() / (batch.sequences.clamp(min=1) * (constant or 1))
    return (sequence_sums(terms_T, segments) / counts_N.clamp(min=1)).sum() / batch.sequences.clamp(min=1)


def ptx_loss(
    logp_T: Tensor, loss_weights_T: Tensor, coef: float, *, total_weight: Tensor | None = None
) -> Tensor:
    """coef * -sum w log pi / sum w on curated data (K2), divided by its own weights: more or longer rollouts
    in the batch do not dilute it. total_weight: sum of w over all pieces and ranks, if this is a piece. No
    weight: 0."""
    if logp_T.shape != loss_weights_T.shape:
        raise ValueError(
            f"{tuple(logp_T.shape)} log-probabilities for {tuple(loss_weights_T.shape)} loss weights"
        )
    weights_T = loss_weights_T.to(logp_T.device, wide(logp_T).dtype)
    whole = weights_T.sum() if total_weight is None else total_weight.to(weights_T)
    summed = (weights_T * only(weights_T != 0, wide(logp_T))).sum()
    return -coef * summed / torch.where(whole > 0, whole, torch.ones_like(whole))
