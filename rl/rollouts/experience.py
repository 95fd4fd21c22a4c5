"""From answers to advantages: scores of the task, shaping by length, and what the group makes of it.

Legend: N answers of all groups, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from earlyfusion.data.tasks.problem import Task
from earlyfusion.rl.judge import Judge
from earlyfusion.rl.objectives.advantages import advantages, informative
from earlyfusion.rl.objectives.length import (
    overlong_rewards,
    repeat_rewards,
    toggle_rewards,
    trained_answers,
    with_length_rewards,
)
from earlyfusion.rl.recipe import RewardSection, RLConfig
from earlyfusion.rl.rewards import OnTop, Range, Rewards, Scored, make_reward
from earlyfusion.rl.rollouts.collect import Group
from earlyfusion.rl.rollouts.packing import Trajectory

RIGHT = 0.999
"""Scores from this share of their range on count as right answers (length reward, Toggle)."""


@dataclass
class Experience:
    """Groups with what their answers earned. All tensors float32 or bool [N], in the order of the answers.

    bounds: first and last + 1 answer of every group.
    """

    groups: list[Group]
    bounds: list[tuple[int, int]]
    scored: list[Scored]
    scores_N: Tensor
    rewards_N: Tensor
    advantages_N: Tensor
    lengths_N: Tensor
    cut_N: Tensor
    trained_N: Tensor
    informative_N: Tensor

    @property
    def answers(self) -> list[Trajectory]:
        """All answers, [N]."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]


def build_rewards(section: RewardSection, tasks: Sequence[Task], seed: int) -> Rewards:
    """The recipe's reward function, contained as it needs. Raises RewardError for one that cannot be set
    up."""
    function, isolation = make_reward(section.name, tasks, seed)
    if section.judge is not None:
        judge = Judge(section.judge.base_url, section.judge.model, timeout_s=section.timeout_s)
        function = judge if section.judge.weight == 1 else OnTop(function, judge, section.judge.weight)
        isolation = "threads"
    memory = section.memory_mb if isolation == "process" else None
    return Rewards(
        function,
        isolation=isolation,
        timeout_s=section.timeout_s,
        workers=section.workers,
        memory_mb=memory,
        span=Range(section.low, section.high),
    )


def score(rewards: Rewards, groups: Sequence[Group]) -> list[Scored]:
    """The reward's judgement of every answer, in order. One that did not end by itself is not judged: it
    earns the lowest of the declared range, or of its group where that is lower, so that it is never better
    than a wrong answer."""
    # Only whole answers are judged.
    items = [(group.problem, t.answer) for group in groups for t in group.trajectories if t.ended]
    judged = iter(rewards(items))
    scored: list[Scored] = []
    for group in groups:
        own = [next(judged) if trajectory.ended else None for trajectory in group.trajectories]
        low = min([rewards.span.low, *(one.value for one in own if one is not None)])
        scored += [Scored(low) if one is None else one for one in own]
    return scored


def experience(
    config: RLConfig,
    groups: Sequence[Group],
    scored: Sequence[Scored],
    update: int,
    budgets: dict[int, float],
) -> Experience:
    """Rewards after shaping, in this order: the entry's power, Toggle, length reward, penalties for overlong
    answers and repetitions; then advantages. budgets: of Toggle, by bin."""
    # One number an answer, in the order of the groups.
    sizes = torch.tensor([len(group.trajectories) for group in groups], dtype=torch.int64)
    ends = sizes.cumsum(0).tolist()
    answers = [trajectory for group in groups for trajectory in group.trajectories]
    lengths_N = torch.tensor([float(len(answer.ids)) for answer in answers])
    cut_N = torch.tensor([t.completion.finish_reason == "length" for t in answers], dtype=torch.bool)
    groups_N = torch.arange(len(groups)).repeat_interleave(sizes)
    bins_N = torch.tensor([group.prompt.bin for group in groups], dtype=torch.int64).repeat_interleave(sizes)
    power_G = torch.tensor([config.tasks[group.prompt.entry].power for group in groups])
    scores_N = torch.tensor([one.value for one in scored], dtype=torch.float32)

    # The sign stays: a power of a negative number may be none, or a positive one.
    rewards_N = scores_N.sign() * scores_N.abs() ** power_G.repeat_interleave(sizes)
    advantages_N, informative_N = rewards_N.clone(), cut_N.clone()
    if answers:
        span = (config.reward.low, config.reward.high)
        right_N = score_shares(config.reward, scores_N) >= RIGHT
        rewards_N = toggle_rewards(
            config.toggle, rewards_N, lengths_N, bins_N, groups_N, budgets, update, span
        )
        rewards_N = with_length_rewards(config.length, rewards_N, lengths_N, right_N, groups_N, update)
        rewards_N = overlong_rewards(config.overlong, rewards_N, lengths_N, cut_N)
        if config.repeat is not None:
            rewards_N = repeat_rewards(config.repeat, rewards_N, [answer.ids for answer in answers])
        advantages_N = advantages(config.objective, rewards_N, groups_N)
        informative_N = informative(rewards_N, groups_N)

    return Experience(
        list(groups),
        list(zip([0, *ends], ends)),
        list(scored),
        scores_N,
        rewards_N,
        advantages_N,
        lengths_N,
        cut_N,
        trained_answers(config.overlong, cut_N),
        informative_N,
    )


def score_shares(section: RewardSection, scores_N: Tensor) -> Tensor:
    """How far each score is on the way from the lowest to the highest of the declared range, in [0, 1]."""
    return ((scores_N - section.low) / (section.high - section.low)).clamp(0, 1)
