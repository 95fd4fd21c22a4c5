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
from typing import Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator
from torch import Tensor

from earlyfusion.kernels.segments import Segments
from earlyfusion.pipeline.config.schema import Section
from earlyfusion.rl.objectives.sequences import only, sequence_sums, spread


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
    """Most updates between making a token and training it; 0 trains only this iteration's, "null" all. Stale
    ones stay in the row as context."""


@torch.no_grad()
def importance_weights(
    config: CorrectionConfig,
    old_logp_T: Tensor,
    sampler_logp_T: Tensor,
    segments: Segments,
    mask_T: Tensor,
) -> tuple[Tensor, Tensor]:
    """Truncated (TIS), masked (MIS) or rejecting importance weights from w = pi_old / mu: the constant factor
    of every token's policy term [T], 0 outside the mask, and how many trained tokens were cut off or set to 0
    (0-d).

    level: w of the token; of the answer, exp(sum log w); or exp(mean log w), which does not grow with its
    length. tis: min(w, high); mis: w inside [low, high], else 0; reject: 1 inside, else 0. max_k3 sets
    answers with a larger mean of w - 1 - log w to 0 besides. Tokens outside the mask take no part in an
    answer's ratio. Token weights are biased for sequences (the state distribution stays mu's); those of whole
    answers are not, but vary more the longer they are. Divide the loss by the same totals as without: nothing
    is normalised by the weights.
    """
    # Log ratios of trained tokens alone; the rest of a row may hold NaN.
    log_T = only(mask_T, old_logp_T) - only(mask_T, sampler_logp_T)
    counts_N = sequence_sums(mask_T.to(log_T.dtype), segments).clamp(min=1)

    # A ratio of the answer stands at every token of it.
    level_T = log_T
    if config.level != "token":
        level_N = sequence_sums(log_T, segments)
        if config.level == "geometric":
            level_N = level_N / counts_N
        level_T = spread(level_N, segments)

    # Compared as logarithms: no product of ratios overflows.
    # (A ratio of a long answer is e to the power of hundreds.)
    top, bottom = math.log(config.high), math.log(config.low) if config.low > 0 else -math.inf
    weight_T, touched_T = level_T.clamp(max=top).exp(), level_T > top
    if config.mode != "tis":
        touched_T = touched_T | (level_T < bottom)
        kept_T = weight_T if config.mode == "mis" else torch.ones_like(weight_T)
        weight_T = only(~touched_T, kept_T)
    if config.max_k3 is not None:
        k3_N = sequence_sums(torch.expm1(log_T) - log_T, segments) / counts_N
        far_T = spread(k3_N > config.max_k3, segments)
        weight_T, touched_T = only(~far_T, weight_T), touched_T | far_T
    return only(mask_T, weight_T), (touched_T & mask_T).sum()


def fresh(config: StaleConfig, versions_T: Tensor, current: int) -> Tensor:
    """bool [T]: the token may be trained at weight version `current`.

    versions_T: integer [T], the version of the weights that made each token. In a partial rollout the
    segments of one answer have different versions; stale ones stay in the row as context for the others.
    """
    if config.max_lag is None:
        return torch.ones_like(versions_T, dtype=torch.bool)
    return current - versions_T <= config.max_lag
