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

from earlyfusion.data.errors import DataError
from earlyfusion.pipeline.config.schema import Section

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
    if update >= config.updates:
        return config.end
    share = max(0, update) / config.updates
    return config.start + (config.end - config.start) * share


def success_rates(solved_P: Tensor, tried_P: Tensor) -> Tensor:
    """(solved + prior/2) / (tried + prior), float64 in (0, 1): a prompt that was never tried stands at one
    half.

    solved_P may be a sum of rewards in [0, 1]. Raises DataError where it is negative or exceeds the trials.
    """
    solved, tried = solved_P.double(), tried_P.double()
    if solved.shape != tried.shape or bool(((solved < 0) | (solved > tried)).any()):
        raise DataError(
            "solved counts must lie between 0 and the trials of the same prompt, one for each prompt"
        )
    return (solved + PRIOR_TRIALS / 2) / (tried + PRIOR_TRIALS)


def allowed(config: CurriculumConfig, difficulty_P: Tensor, update: int) -> Tensor:
    """bool [P]: prompts that the curriculum offers at this update. difficulty_P in [0, 1]: for easy_to_hard
    the task's own, which a prompt has before it was ever tried; for hard_after_warmup 1 - success rate.

    hard_after_warmup (k1.5): all, then from `warmup_updates` on those of at least `hard_from`. easy_to_hard:
    those of at most a difficulty that grows evenly from `start_difficulty` to 1. Never nobody: where no
    prompt fits, all are offered.
    """
    every = torch.ones_like(difficulty_P, dtype=torch.bool)
    chosen = every
    if config.mode == "hard_after_warmup" and update >= config.warmup_updates:
        chosen = difficulty_P >= config.hard_from
    elif config.mode == "easy_to_hard" and update < config.warmup_updates:
        share = max(0, update) / config.warmup_updates
        chosen = difficulty_P <= config.start_difficulty + (1 - config.start_difficulty) * share
    return chosen if bool(chosen.any()) else every


def prompt_weights(
    config: CurriculumConfig,
    solved_P: Tensor,
    tried_P: Tensor,
    update: int,
    difficulty_P: Tensor | None = None,
) -> Tensor:
    """Probability of every prompt to be drawn, float64 [P], sum 1.

    Curriculum: 0 for prompts that are not allowed. prioritised (k1.5): in proportion to 1 - success rate, but
    at least `floor`. difficulty_P: 1 - success rate if None.
    """
    if solved_P.numel() == 0:
        raise DataError("no prompts to draw from")
    rates_P = success_rates(solved_P, tried_P)
    difficulty_P = 1 - rates_P if difficulty_P is None else difficulty_P.double()
    if difficulty_P.shape != rates_P.shape:
        raise DataError(
            f"{difficulty_P.numel()} difficulties for {rates_P.numel()} prompts; give one for each"
        )
    # What is never solved weighs most, what always is the floor.
    weights_P = (1 - rates_P).clamp(min=config.floor) if config.prioritised else torch.ones_like(rates_P)
    weights_P = weights_P * allowed(config, difficulty_P, update)
    total = weights_P.sum()
    return weights_P / total if float(total) > 0 else torch.full_like(weights_P, 1 / weights_P.numel())


def draw(weights_P: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """`count` prompts by weight, in the order drawn: without repetition while there are unused prompts of
    positive weight, then over again. Bit for bit the same for the same generator state."""
    available = int((weights_P > 0).sum())
    if not available:
        raise DataError("no prompt has a positive weight")
    # Everything once before anything twice.
    drawn: list[int] = []
    while len(drawn) < count:
        size = min(available, count - len(drawn))
        drawn += torch.multinomial(weights_P.double(), size, replacement=False, generator=generator).tolist()
    return drawn
