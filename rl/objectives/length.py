"""The length of answers: rewards for brevity, budgets, token limits, repetitions.

All functions take one number for each of N responses and give new rewards or a mask; none changes its input.

Legend: N responses.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor

from earlyfusion.pipeline.config.schema import Section
from earlyfusion.rl.objectives.losses import group


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


def length_rewards(
    config: LengthRewardConfig, lengths_N: Tensor, correct_N: Tensor, groups_N: Tensor, update: int
) -> Tensor:
    """k1.5 2.3.3: `weight` times a number in [-0.5, 0.5]: with lam = 0.5 - (length - shortest) / (longest -
    shortest) over the group, a right answer gets lam and a wrong one min(0, lam). 0 for all where the group's
    lengths are equal, and for the first `warmup_updates` updates (off at first, then constant, because a
    penalty from the start slows the learning of the task)."""
    if config.weight == 0 or update < config.warmup_updates:
        return torch.zeros_like(lengths_N)
    groups = group(groups_N)
    short_N = groups.spread(groups.extreme(lengths_N, "amin"))
    range_N = groups.spread(groups.extreme(lengths_N, "amax")) - short_N

    # The shortest gets 0.5, the longest -0.5; a wrong answer never gains by brevity.
    lam_N = 0.5 - (lengths_N - short_N) / range_N.clamp(min=1)
    lam_N = torch.where(correct_N, lam_N, lam_N.clamp(max=0))
    return config.weight * lam_N.masked_fill(range_N == 0, 0.0)


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
    # From right answers alone: a wrong one may be short for the wrong reason.
    budgets = {}
    for prompt in prompts_N[correct_N].unique().tolist():
        lengths = lengths_N[correct_N & (prompts_N == prompt)].double()
        budgets[prompt] = float(torch.quantile(lengths, config.percentile / 100))
    return budgets


def toggle_rewards(
    config: ToggleConfig,
    rewards_N: Tensor,
    lengths_N: Tensor,
    prompts_N: Tensor,
    groups_N: Tensor,
    budgets: dict[int, float],
    update: int,
    span: tuple[float, float],
) -> Tensor:
    """K2.5 Toggle. Budget phase: r if the group's mean reward is below `min_accuracy` or the answer keeps
    within the budget of its prompt, else the lowest reward. Other phase, Toggle off, or no budget known: r.
    span: lowest and highest reward; `min_accuracy` is a share of the way between them."""
    if not budget_phase(config, update):
        return rewards_N
    # The budget holds where the group can solve the problem, not where it still explores.
    # Mean reward of the group as a share of the declared range.
    groups, (low, high) = group(groups_N), span
    solved_N = (groups.spread(groups.means(rewards_N)) - low) / (high - low) >= config.min_accuracy
    limit_N = torch.tensor([budgets.get(prompt, math.inf) for prompt in prompts_N.tolist()])
    return rewards_N.masked_fill(solved_N & (lengths_N > limit_N), low)


def overlong_penalty(config: OverlongConfig, lengths_N: Tensor, cut_N: Tensor, limits_N: Tensor) -> Tensor:
    """What answers lose by their length, [N]. cut_N: bool, the answer was ended by the token limit. limits_N:
    most tokens of each.

    soft (DAPO): 0 up to buffer_tokens before max_tokens (or the answer's own limit, where that is less), then
    evenly up to `penalty` there and beyond. hard (K2): `penalty` for every cut answer. none, filter: 0.
    """
    if config.mode == "soft":
        # DAPO: a slope in place of a cliff, so that an answer learns that it grows too long.
        most_N = limits_N if config.max_tokens is None else limits_N.clamp(max=float(config.max_tokens))
        over_N = lengths_N - (most_N - config.buffer_tokens)
        return config.penalty * (over_N / config.buffer_tokens).clamp(0, 1)
    if config.mode == "hard":
        return config.penalty * cut_N.float()
    return torch.zeros_like(lengths_N)


def repeat_period(config: RepeatConfig, ids: Sequence[int]) -> int | None:
    """Length of the run of tokens that the end of `ids` repeats, the shortest one, or None.

    The end repeats with period p when its last max(min_repeats * p, min_tokens) tokens all equal the token p
    before, where there is one among them. Serves to stop an answer early and to penalise it (k1.5).
    """
    for period in range(1, config.max_period + 1):
        # Only the end is looked at, so the cost does not grow with the answer.
        span = max(config.min_repeats * period, config.min_tokens)
        tail = ids[-span:]
        if len(tail) == span and tail[period:] == tail[:-period]:
            return period
    return None
