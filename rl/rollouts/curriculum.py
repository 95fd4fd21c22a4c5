"""Which prompts are drawn, and the temperature of sampling.

A prompt is described by how often it was tried and solved; from that come a difficulty and a weight. All
schedules are functions of the update's number, so a resumed run needs no more than that number, the tallies
and the generator.

Legend: P prompts.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat
from torch import Tensor

from earlyfusion.pipeline.config.schema import Section

# Without it a prompt that failed once would count as unsolvable.
PRIOR_TRIALS = 2.0
"""Imagined trials, half of them successes, before a prompt was tried."""
MEMORY_ANSWERS = 100.0
"""Answers to a prompt (with rollout.pool = 0: of a task entry) after which older ones count 1/e: the policy
changes."""


class TemperatureConfig(Section):
    """Sampling temperature: high first, to explore; lower later."""

    start: PositiveFloat = 1.0
    """Temperature of the first update."""
    end: PositiveFloat = 1.0
    """Temperature from `updates` on."""
    updates: NonNegativeInt = 0
    """Updates from start to end."""


class CurriculumConfig(Section):
    """Which prompts are drawn, and how often."""

    mode: Literal["uniform", "hard_after_warmup", "easy_to_hard"] = "uniform"
    """hard_after_warmup: all prompts alike, then only those that are seldom solved (k1.5); easy_to_hard: the
    hardest allowed level of the tasks grows evenly from `start_difficulty` to 1."""
    warmup_updates: NonNegativeInt = 0
    """Updates until only hard prompts are left, or until all are allowed."""
    hard_from: float = Field(0.5, ge=0, le=1)
    """Failure rate from which a prompt is hard."""
    start_difficulty: float = Field(0.3, ge=0, le=1)
    """Hardest level at the start of easy_to_hard, as a share of the task's highest."""
    prioritised: bool = False
    """Draw prompts in proportion to 1 - success rate."""
    floor: float = Field(0.05, ge=0, le=1)
    """Smallest weight of a prompt that is allowed, so that no skill is forgotten unseen."""


def temperature(config: TemperatureConfig, update: int) -> float:
    """Sampling temperature of an update: `start` at 0, `end` from `updates` on. K2 starts high and cools
    down."""
    # Also for updates = 0, where there is nothing to interpolate.
    if update >= config.updates:
        return config.end
    share = max(0, update) / config.updates
    return config.start + (config.end - config.start) * share


def success_rates(solved_P: Tensor, tried_P: Tensor) -> Tensor:
    """(solved + prior/2) / (tried + prior), float64 in (0, 1): a prompt that was never tried stands at one
    half. solved_P may be a sum of rewards in [0, 1]."""
    return (solved_P.double() + PRIOR_TRIALS / 2) / (tried_P.double() + PRIOR_TRIALS)


def prompt_weights(
    config: CurriculumConfig, solved_P: Tensor, tried_P: Tensor, levels_P: Tensor, update: int
) -> Tensor:
    """Weight of every prompt in the draw, float64 [P]. levels_P in [0, 1]: the task's own difficulty, which a
    prompt has before it was ever tried.

    hard_after_warmup (k1.5): all, then from `warmup_updates` on those whose failure rate is at least
    `hard_from`. easy_to_hard: those of at most a level that grows evenly from `start_difficulty` to 1. Where
    no prompt fits, all are offered. prioritised (k1.5): in proportion to the failure rate, but at least
    `floor`.
    """
    failures_P = 1 - success_rates(solved_P, tried_P)
    offered_P = torch.ones_like(failures_P, dtype=torch.bool)
    if config.mode == "hard_after_warmup" and update >= config.warmup_updates:
        offered_P = failures_P >= config.hard_from
    elif config.mode == "easy_to_hard" and update < config.warmup_updates:
        share = update / config.warmup_updates
        offered_P = levels_P <= config.start_difficulty + (1 - config.start_difficulty) * share
    # Rather everything than nothing: a run must not stop because it has become too good.
    if not offered_P.any():
        offered_P = ~offered_P
    if config.prioritised:
        return failures_P.clamp(min=config.floor) * offered_P
    return offered_P.double()


def draw(weights_P: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """`count` prompts by weight, in the order drawn: without repetition while there are unused prompts of
    positive weight, then over again. Bit for bit the same for the same generator state."""
    # multinomial without replacement refuses to draw more than have a weight.
    available = int((weights_P > 0).sum())
    drawn: list[int] = []
    # Everything once before anything twice.
    while len(drawn) < count:
        size = min(available, count - len(drawn))
        drawn += torch.multinomial(weights_P, size, replacement=False, generator=generator).tolist()
    return drawn


def spread_evenly(weights_P: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """`count` prompts in proportion to their weights, in mixed order: each gets the whole part of its due,
    chance decides on the rest. An iteration then shows every task as often as it should, with no luck of the
    draw between them."""
    due_P = weights_P / weights_P.sum() * count
    whole_P = (due_P + 1e-9).floor()  # a due of 2.9999999 is 3
    rest_P = (due_P - whole_P).clamp(min=0)
    bins = torch.arange(weights_P.numel()).repeat_interleave(whole_P.long()).tolist()
    if len(bins) < count:
        if float(rest_P.sum()) == 0:
            rest_P = weights_P
        bins += draw(rest_P, count - len(bins), generator)
    order = torch.randperm(len(bins), generator=generator).tolist()
    return [bins[i] for i in order]
