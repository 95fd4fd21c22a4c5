"""From answers to advantages: scores of the task, shaping by length, and what the group makes of it.

Legend: N answers of all groups, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from earlyfusion.data.sample import Text
from earlyfusion.data.tasks.problem import Task
from earlyfusion.data.tasks.rendering import render_text
from earlyfusion.pipeline.runtime import Runtime
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
from earlyfusion.rl.records import AnswerRecord, GroupRecord
from earlyfusion.rl.rewards import OnTop, Range, Rewards, Scored, make_reward
from earlyfusion.rl.rollouts.collect import Asked
from earlyfusion.rl.rollouts.prompts import prompt_segments

RIGHT = 0.999
"""Scores from this share of their range on count as right answers (length reward, Toggle)."""


@dataclass
class Experience:
    """Groups with what their answers earned. All tensors float32 or bool [N], in the order of the answers."""

    groups: list[Asked]
    scored: list[Scored]
    scores_N: Tensor
    rewards_N: Tensor
    advantages_N: Tensor
    groups_N: Tensor
    lengths_N: Tensor
    cut_N: Tensor
    trained_N: Tensor
    informative_N: Tensor
    bounds: list[tuple[int, int]] = field(default_factory=list)
    """First and last + 1 answer of every group."""

    @property
    def answers(self) -> int:
        """N."""
        return len(self.scored)


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


def score(rewards: Rewards, groups: Sequence[Asked]) -> list[Scored]:
    """The reward's judgement of every answer, in order. One that did not end by itself is not judged: it
    earns the lowest of the declared range, or of its group where that is lower, so that it is never better
    than a wrong answer."""
    judged = iter(rewards([(g.problem, t.answer) for g in groups for t in g.trajectories if t.ended]))
    scored: list[Scored] = []
    for group in groups:
        own = [next(judged) if t.ended else None for t in group.trajectories]
        low = min([rewards.span.low, *(one.value for one in own if one is not None)])
        scored += [Scored(low) if one is None else one for one in own]
    return scored


def experience(
    config: RLConfig,
    groups: Sequence[Asked],
    scored: Sequence[Scored],
    update: int,
    budgets: dict[int, float],
) -> Experience:
    """Rewards after shaping, in this order: the entry's power, Toggle, length reward, penalties for overlong
    and circling answers; then advantages. budgets: of Toggle, by bin."""
    answers = [t for g in groups for t in g.trajectories]
    scores_N = torch.tensor([one.value for one in scored], dtype=torch.float32)
    lengths_N = torch.tensor([float(len(t.ids)) for t in answers])
    cut_N = torch.tensor([t.completion.finish_reason == "length" for t in answers], dtype=torch.bool)
    groups_N = torch.tensor([i for i, g in enumerate(groups) for _ in g.trajectories], dtype=torch.int64)
    bins_N = torch.tensor([g.ask.bin for g in groups for _ in g.trajectories], dtype=torch.int64)
    power_N = torch.tensor([config.tasks[g.ask.entry].power for g in groups for _ in g.trajectories])
    # The sign stays: a power of a negative number may be none, or a positive one.
    rewards_N = scores_N.sign() * scores_N.abs() ** power_N if answers else scores_N
    if answers:
        span = (config.reward.low, config.reward.high)
        rewards_N = toggle_rewards(
            config.toggle, rewards_N, lengths_N, bins_N, groups_N, budgets, update, span
        )
        right_N = shares(config.reward, scores_N) >= RIGHT
        rewards_N = with_length_rewards(config.length, rewards_N, lengths_N, right_N, groups_N, update)
        rewards_N = overlong_rewards(config.overlong, rewards_N, lengths_N, cut_N)
        if config.repeat is not None:
            rewards_N = repeat_rewards(config.repeat, rewards_N, [t.ids for t in answers])
        advantages_N = advantages(config.objective, rewards_N, groups_N)
        informative_N = informative(rewards_N, groups_N)
    else:
        advantages_N, informative_N = rewards_N.clone(), cut_N.clone()
    bounds, start = [], 0
    for group in groups:
        bounds.append((start, start + len(group.trajectories)))
        start = bounds[-1][1]
    return Experience(
        list(groups),
        list(scored),
        scores_N,
        rewards_N,
        advantages_N,
        groups_N,
        lengths_N,
        cut_N,
        trained_answers(config.overlong, cut_N),
        informative_N,
        bounds,
    )


def shares(section: RewardSection, scores_N: Tensor) -> Tensor:
    """How far each score is on the way from the lowest to the highest of the declared range, in [0, 1]."""
    return ((scores_N - section.low) / (section.high - section.low)).clamp(0, 1)


def records(
    config: RLConfig, seen: Experience, update: int, limit: int, runtime: Runtime
) -> list[GroupRecord]:
    """`limit` groups of all processes, as they are logged and shown: of every entry in turn, the worst, the
    best, the next worst, ... Every process calls it and gets the same."""
    own = [
        (group.ask.entry, float(seen.scores_N[slice(*bounds)].mean()))
        for group, bounds in zip(seen.groups, seen.bounds)
    ]
    shares = runtime.gather(own)
    first = sum(map(len, shares[: runtime.rank]))
    every = [one for share in shares for one in share]
    chosen: list[int] = []
    lines = [_extremes(every, entry) for entry in range(len(config.tasks))]
    while any(lines) and len(chosen) < limit:
        chosen += [line.pop(0) for line in lines if line]
    mine = [g for g in chosen[:limit] if first <= g < first + len(own)]
    made = runtime.gather({g: _record(config, seen, update, g - first) for g in mine})
    told = {g: record for share in made for g, record in share.items()}
    return [told[g] for g in chosen[:limit]]


def _extremes(groups: Sequence[tuple[int, float]], entry: int) -> list[int]:
    """Groups (entry, mean score) of an entry, by number: lowest score, highest, second lowest, ..."""
    own = [g for g, group in enumerate(groups) if group[0] == entry]
    own.sort(key=lambda g: groups[g][1])
    return [own[i // 2] if i % 2 == 0 else own[-1 - i // 2] for i in range(len(own))]


def _record(config: RLConfig, seen: Experience, update: int, g: int) -> GroupRecord:
    group, (start, end) = seen.groups[g], seen.bounds[g]
    entry, problem = config.tasks[group.ask.entry], group.problem
    said = [segment.text for segment in prompt_segments(problem, entry) if isinstance(segment, Text)]
    answers = [
        AnswerRecord(
            text=trajectory.text,
            tokens=len(trajectory.ids),
            score=float(seen.scores_N[n]),
            reward=float(seen.rewards_N[n]),
            advantage=float(seen.advantages_N[n]),
            logprob=sum(trajectory.completion.logprobs),
            finish=trajectory.completion.finish_reason,
            status=seen.scored[n].status,
        )
        for n, trajectory in zip(range(start, end), group.trajectories)
    ]
    shown = None
    if entry.form == "picture":
        shown = problem.picture
    elif entry.form == "rendered":
        shown = render_text(problem.description)
    return GroupRecord(
        update,
        entry.name,
        entry.form,
        problem.key,
        entry.difficulty,
        "".join(said),
        problem.target,
        answers,
        shown,
    )
