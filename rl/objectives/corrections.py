"""Tokens that another policy made: weights for the engine's gap to the trainer, and masks for stale tokens.

With mu the policy that sampled (the engine), pi_old the trainer's policy at the start of the iteration and pi
the one being trained, pi / mu = (pi_old / mu) * (pi / pi_old): the engine's gap times the staleness. An
objective either takes mu for pi_old (K2.5 does, and then there is nothing to weigh), or is corrected by a
weight from pi_old / mu. The weight is a constant for the gradient; otherwise the estimator would
differentiate its own correction.

Legend: T packed tokens, N responses.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator
from torch import Tensor

from earlyfusion.data.errors import DataError
from earlyfusion.kernels.segments import Segments, check_packed
from earlyfusion.pipeline.config.schema import Section
from earlyfusion.rl.objectives.sequences import only, sequence_sums, spread, token_mask, wide


class CorrectionConfig(Section):
    """Importance weights for the gap between the engine that sampled and the trainer's own old policy."""

    mode: Literal["none", "tis", "mis", "reject"] = "none"
    """tis: weight cut off at `high`; mis: weight inside [low, high], else 0; reject: 1 inside, else 0."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of a token, of the whole answer (product), or its geometric mean over the answer."""
    low: NonNegativeFloat = 0.0
    """Smallest ratio that is kept (mis, reject)."""
    high: PositiveFloat = 2.0
    """Largest ratio."""
    max_k3: PositiveFloat | None = None
    """Also leave out answers whose mean k3 divergence is above this; "null" for no limit."""

    @model_validator(mode="after")
    def _check(self) -> CorrectionConfig:
        if not self.low <= 1 <= self.high:
            raise ValueError(
                f"low={self.low}, high={self.high}: equal policies have ratio 1, which must lie between"
            )
        return self


class StaleConfig(Section):
    """Which tokens of a partial rollout are still trained, by the age of the weights that made them."""

    max_lag: NonNegativeInt | None = None
    """Most updates between making a token and training it; 0 trains only this iteration's, "null" all."""
    scope: Literal["token", "sequence"] = "token"
    """Leave out the stale tokens, or every answer that holds one."""


class Correction(NamedTuple):
    """weight_T: constant factor of every token's policy term, 0 outside the mask. Sums over the trained
    tokens, 0-d: tokens, touched (weight cut off or set to 0), k3 (divergence of pi_old from mu, nats)."""

    weight_T: Tensor
    tokens: Tensor
    touched: Tensor
    k3: Tensor


@torch.no_grad()
def importance_weights(
    config: CorrectionConfig,
    old_logp_T: Tensor,
    sampler_logp_T: Tensor,
    segments: Segments,
    mask_T: Tensor | None = None,
) -> Correction:
    """Truncated (TIS), masked (MIS) or rejecting importance weights from w = pi_old / mu.

    level: w of the token; of the answer, exp(sum log w); or exp(mean log w), which does not grow with its
    length. tis: min(w, high); mis: w inside [low, high], else 0; reject: 1 inside, else 0; none: 1. max_k3
    sets answers with a larger mean of w - 1 - log w to 0 besides. Tokens outside the mask take no part in an
    answer's ratio. Token weights are biased for sequences (the state distribution stays mu's); those of whole
    answers are not, but vary more the longer they are. Divide the loss by the same totals as without: nothing
    is normalised by the weights.
    """
    check_packed("old_logp_T", old_logp_T, segments)
    check_packed("sampler_logp_T", sampler_logp_T, segments)
    mask_T = token_mask(mask_T, segments, old_logp_T.device)
    # Log ratios of trained tokens alone; the rest of a row may hold NaN.
    log_T = only(mask_T, wide(old_logp_T)) - only(mask_T, wide(sampler_logp_T).to(old_logp_T.device))
    k3_T = only(mask_T, torch.expm1(log_T) - log_T)
    counts_N = sequence_sums(mask_T.to(log_T.dtype), segments)
    # A ratio of the answer stands at every token of it.
    level_T = log_T
    if config.level != "token":
        sums_N = sequence_sums(log_T, segments)
        level_T = spread(sums_N if config.level == "sequence" else sums_N / counts_N.clamp(min=1), segments)
    weight_T, touched_T = _weigh(config, level_T)
    if config.max_k3 is not None:
        far_T = spread(sequence_sums(k3_T, segments) / counts_N.clamp(min=1), segments) > config.max_k3
        weight_T, touched_T = weight_T.masked_fill(far_T, 0.0), touched_T | far_T
    weight_T = only(mask_T, weight_T)
    return Correction(weight_T, mask_T.sum(), (touched_T & mask_T).sum(), k3_T.sum())


def _weigh(config: CorrectionConfig, log_T: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and whether it was cut, from log w; compared as logarithms, so no product of ratios
    overflows."""
    if config.mode == "none":
        return torch.ones_like(log_T), torch.zeros_like(log_T, dtype=torch.bool)
    top, bottom = math.log(config.high), math.log(config.low) if config.low > 0 else -math.inf
    if config.mode == "tis":
        return log_T.clamp(max=top).exp(), log_T > top
    # Compared as logarithms: no product of ratios overflows.
    inside_T = (log_T >= bottom) & (log_T <= top)
    kept_T = log_T.clamp(max=top).exp() if config.mode == "mis" else torch.ones_like(log_T)
    return torch.where(inside_T, kept_T, torch.zeros_like(log_T)), ~inside_T


def fresh(config: StaleConfig, versions_T: Tensor, current: int, segments: Segments) -> Tensor:
    """bool [T]: the token may be trained at weight version `current`.

    versions_T: integer [T], the version of the weights that made each token. In a partial rollout the
    segments of one answer have different versions: scope "token" leaves the stale ones out (they stay as
    context), scope "sequence" the answers that hold one. Raises DataError for a token from the future.
    """
    check_packed("versions_T", versions_T, segments)
    if versions_T.numel() and int(versions_T.max()) > current:
        raise DataError(
            f"a token has weight version {int(versions_T.max())}, later than the current version {current}"
        )
    if config.max_lag is None:
        return torch.ones_like(versions_T, dtype=torch.bool)
    fresh_T = current - versions_T <= config.max_lag
    if config.scope == "token":
        return fresh_T
    return spread(sequence_sums((~fresh_T).float(), segments) == 0, segments)
