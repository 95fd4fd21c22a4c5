"""The length of answers: rewards for brevity, budgets, token limits, repetitions.

All functions take one number for each of N responses and give new rewards or a mask; none changes its input.

Legend: N responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator
from torch import Tensor

from earlyfusion.data.errors import DataError
from earlyfusion.pipeline.config.schema import Section
from earlyfusion.rl.objectives.sequences import group, wide


class LengthRewardConfig(Section):
    """k1.5: shorter right answers earn more, longer wrong ones less."""

    weight: NonNegativeFloat = 0.0
    """Weight of the length reward."""
    warmup_updates: NonNegativeInt = 0
    """Updates without it at the start."""


class OverlongConfig(Section):
    """What happens to answers that reach the token limit."""

    mode: Literal["none", "filter", "soft", "hard"] = "none"
    """filter: no loss on cut answers; soft: penalty that grows inside the last `buffer_tokens` (DAPO); hard:
    the whole penalty for every cut answer (K2's budget)."""
    max_tokens: PositiveInt | None = None
    """Where the soft penalty is whole, tokens; "null": rollout.max_new_tokens, beyond which no answer goes.
    """
    buffer_tokens: NonNegativeInt = 128
    """Tokens before the limit over which the soft penalty grows."""
    penalty: NonNegativeFloat = 1.0
    """Taken off the reward."""

    @model_validator(mode="after")
    def _check(self) -> OverlongConfig:
        limit = self.max_tokens
        if self.mode == "soft" and limit is not None and not 0 < self.buffer_tokens < limit:
            raise ValueError(
                f"buffer_tokens={self.buffer_tokens}: the soft penalty needs 1 to max_tokens-1={limit - 1}"
            )
        return self

    def within(self, max_new_tokens: int) -> OverlongConfig:
        """The same with its limit known. Raises ValueError for one that no answer reaches."""
        if (self.max_tokens or 0) > max_new_tokens:
            raise ValueError(
                f"overlong.max_tokens {self.max_tokens} is more than rollout.max_new_tokens {max_new_tokens}:"
                " no answer would ever be overlong; leave it out to use that limit"
            )
        if self.mode != "soft":
            return self
        return OverlongConfig(**{**self.model_dump(), "max_tokens": self.max_tokens or max_new_tokens})


class ToggleConfig(Section):
    """K2.5 Toggle: `every` updates with a budget on prompts that are solved, `every` updates without. Budgets
    are those of problems, so it needs rollout.pool."""

    every: NonNegativeInt = 0
    """Updates of one phase (m); 0 turns Toggle off."""
    percentile: float = Field(50.0, ge=0, le=100)
    """The budget of a prompt: this percentile (rho) of the lengths of its right answers."""
    min_accuracy: float = Field(0.8, ge=0, le=1)
    """The budget holds only for groups with at least this mean reward (lambda), as a share of reward.low to
    reward.high."""


class RepeatConfig(Section):
    """When an answer counts as a repetition."""

    min_repeats: int = Field(4, ge=2)
    """Repetitions of the same tokens at its end."""
    max_period: PositiveInt = 32
    """Longest run of tokens that is repeated."""
    min_tokens: PositiveInt = 32
    """Tokens that the repetitions must cover together."""
    penalty: NonNegativeFloat = 1.0
    """Taken off the reward."""


def length_rewards(lengths_N: Tensor, correct_N: Tensor, groups_N: Tensor) -> Tensor:
    """k1.5 2.3.3, in [-0.5, 0.5]: with lam = 0.5 - (length - shortest) / (longest - shortest) over the group,
    a right answer gets lam and a wrong one min(0, lam). 0 for all where the group's lengths are equal."""
    lengths_N = _lengths(lengths_N)
    groups = group(groups_N, lengths_N, correct_N)
    short_N = groups.spread(groups.extreme(lengths_N, "amin"))
    range_N = groups.spread(groups.extreme(lengths_N, "amax")) - short_N
    # The shortest gets 0.5, the longest -0.5; a wrong answer never gains by brevity.
    lam_N = 0.5 - (lengths_N - short_N) / range_N.clamp(min=1)
    lam_N = torch.where(correct_N.bool(), lam_N, lam_N.clamp(max=0))
    return lam_N.masked_fill(range_N == 0, 0.0)


def with_length_rewards(
    config: LengthRewardConfig,
    rewards_N: Tensor,
    lengths_N: Tensor,
    correct_N: Tensor,
    groups_N: Tensor,
    update: int,
) -> Tensor:
    """Rewards plus weight * `length_rewards`; unchanged for the first `warmup_updates` updates (k1.5: off at
    first, then constant, because a penalty from the start slows the learning of the task)."""
    if config.weight == 0 or update < config.warmup_updates:
        return wide(rewards_N)
    return wide(rewards_N) + config.weight * length_rewards(lengths_N, correct_N, groups_N).to(
        rewards_N.device
    )


def budget_phase(config: ToggleConfig, update: int) -> bool:
    """Whether Toggle enforces budgets at this update: phases of `every` updates, the first with budgets."""
    return config.every > 0 and (update // config.every) % 2 == 0


def estimate_budgets(
    config: ToggleConfig, lengths_N: Tensor, correct_N: Tensor, prompts_N: Tensor
) -> dict[int, float]:
    """Budget in tokens of every prompt: the `percentile` of the lengths of its right answers, linear between
    them.

    Made once before training from samples of the start policy. A prompt without a right answer has no entry
    and no budget. The dict goes into the checkpoint as it is.
    """
    lengths_N = _lengths(lengths_N)
    group(prompts_N, lengths_N, correct_N)
    right_N = correct_N.bool()
    budgets: dict[int, float] = {}
    for prompt in torch.unique(prompts_N[right_N]).tolist():
        lengths = lengths_N[right_N & (prompts_N == prompt)].double()
        budgets[int(prompt)] = float(torch.quantile(lengths, config.percentile / 100))
    return budgets


def toggle_rewards(
    config: ToggleConfig,
    rewards_N: Tensor,
    lengths_N: Tensor,
    prompts_N: Tensor,
    groups_N: Tensor,
    budgets: dict[int, float],
    update: int,
    span: tuple[float, float] = (0.0, 1.0),
) -> Tensor:
    """K2.5 Toggle. Budget phase: r if the group's mean reward is below `min_accuracy` or the answer keeps
    within the budget of its prompt, else the lowest reward. Other phase, Toggle off, or no budget known: r.
    span: lowest and highest reward; `min_accuracy` is a share of the way between them."""
    rewards_N = wide(rewards_N)
    if not budget_phase(config, update):
        return rewards_N
    groups = group(groups_N, rewards_N, lengths_N, prompts_N)
    low, high = span
    # The budget holds where the group can solve the problem, not where it still explores.
    mean_N = (groups.spread(groups.sums(rewards_N) / groups.counts()) - low) / (high - low)
    limit_N = torch.tensor([budgets.get(int(prompt), float("inf")) for prompt in prompts_N.tolist()])
    kept_N = (mean_N < config.min_accuracy) | (_lengths(lengths_N) <= limit_N.to(lengths_N.device)).to(
        mean_N.device
    )
    return torch.where(kept_N, rewards_N, torch.full_like(rewards_N, low))


def overlong_rewards(config: OverlongConfig, rewards_N: Tensor, lengths_N: Tensor, cut_N: Tensor) -> Tensor:
    """Rewards after the penalty for length. cut_N: bool, the answer was ended by the token limit.

    soft (DAPO): 0 up to max_tokens - buffer_tokens, then evenly down to -penalty at max_tokens and beyond.
    hard (K2): -penalty for every cut answer. none, filter: unchanged. Raises DataError for soft without
    max_tokens.
    """
    rewards_N = wide(rewards_N)
    if config.mode == "soft":
        if config.max_tokens is None:
            raise DataError(
                "overlong.mode 'soft' without max_tokens; RLConfig fills in rollout.max_new_tokens"
            )
        over_N = _lengths(lengths_N) - (config.max_tokens - config.buffer_tokens)
        return rewards_N - config.penalty * (over_N / config.buffer_tokens).clamp(0, 1).to(rewards_N.device)
    if config.mode == "hard":
        return rewards_N - config.penalty * cut_N.to(rewards_N)
    return rewards_N


def trained_answers(config: OverlongConfig, cut_N: Tensor) -> Tensor:
    """bool [N]: answers that enter the loss; mode "filter" leaves out those cut by the token limit, whose
    reward says nothing about their beginning. Spread it over tokens with `sequences.spread`."""
    return ~cut_N.bool() if config.mode == "filter" else torch.ones_like(cut_N, dtype=torch.bool)


def repeat_period(config: RepeatConfig, ids: Sequence[int]) -> int | None:
    """Length of the run of tokens that the end of `ids` repeats, the shortest one, or None.

    The end repeats with period p when its last max(min_repeats * p, min_tokens) tokens all equal the token p
    before, where there is one among them. Serves to stop an answer early and to penalise it (k1.5). Costs
    max_period * min_repeats comparisons per period at most; looks at the end only.
    """
    longest = max(config.min_repeats * config.max_period, config.min_tokens)
    # Only the end is looked at, so the cost does not grow with the answer.
    end = np.asarray(ids[-longest:], dtype=np.int64)
    for period in range(1, config.max_period + 1):
        span = max(config.min_repeats * period, config.min_tokens)
        if span > len(end):
            return None
        tail = end[-span:]
        if np.array_equal(tail[period:], tail[:-period]):
            return period
    return None


def repeat_rewards(config: RepeatConfig, rewards_N: Tensor, answers: Sequence[Sequence[int]]) -> Tensor:
    """Rewards minus `penalty` for every answer (token ids) that ends in circles."""
    if len(answers) != rewards_N.shape[0]:
        raise DataError(f"{len(answers)} answers for {rewards_N.shape[0]} rewards; give one for each")
    circles = [repeat_period(config, ids) is not None for ids in answers]
    rewards_N = wide(rewards_N)
    return rewards_N - config.penalty * torch.tensor(circles, dtype=torch.bool).to(rewards_N)


def _lengths(lengths_N: Tensor) -> Tensor:
    if lengths_N.numel() and float(lengths_N.min()) < 0:
        raise DataError(f"length {float(lengths_N.min()):g}: lengths are token counts, 0 or more")
    return lengths_N if lengths_N.dtype == torch.float64 else lengths_N.float()
