"""From answers to advantages: scores of the task, shaping by length, and what the group makes of it.

Legend: N answers of all groups, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from earlyfusion.data.tasks.problem import Task
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.rl.judge import Judge
from earlyfusion.rl.objectives.length import (
    length_rewards,
    overlong_penalty,
    repeat_period,
    toggle_rewards,
)
from earlyfusion.rl.objectives.losses import advantages, informative
from earlyfusion.rl.recipe import RewardSection, RLConfig
from earlyfusion.rl.rewards import OnTop, Range, Rewards, Scored, make_reward
from earlyfusion.rl.rollouts.collect import Collector, Group
from earlyfusion.rl.rollouts.packing import Trajectory

RIGHT = 0.999
"""Scores from this share of their range on count as right answers (length reward, Toggle)."""


@dataclass
class Experience:
    """Groups with what their answers earned. All tensors float32, int64 or bool [N], in the order of the
    answers.

    bounds: first and last + 1 answer of every group. entries, bins: of the prompts. shares: how far a score
    is on the way from the lowest to the highest of the declared range, in [0, 1].
    """

    groups: list[Group]
    bounds: list[tuple[int, int]]
    scored: list[Scored]
    entries_N: Tensor
    bins_N: Tensor
    scores_N: Tensor
    shares_N: Tensor
    right_N: Tensor
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
        isolation = "process"
    return Rewards(
        function,
        isolation=isolation,
        timeout_s=section.timeout_s,
        workers=section.workers,
        memory_mb=section.memory_mb,
        span=Range(section.low, section.high),
    )


def score(rewards: Rewards, groups: Sequence[Group]) -> list[Scored]:
    """The reward's judgement of every answer, in order. One that did not end by itself is not judged: it
    earns the lowest of the declared range, or of its group where that is lower, so that it is never better
    than a wrong answer."""
    # In one call: a reward with workers is asked for all answers at once.
    judged = iter(rewards([(g.problem, t.answer) for g in groups for t in g.trajectories if t.ended]))
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
    answers: list[Trajectory] = []
    bounds: list[tuple[int, int]] = []
    numbers: list[tuple[int, int, int]] = []
    for number, group in enumerate(groups):
        count = len(group.trajectories)
        bounds.append((len(answers), len(answers) + count))
        answers += group.trajectories
        numbers += [(number, group.prompt.entry, group.prompt.bin)] * count

    # One number an answer, in the order of the groups.
    groups_N, entries_N, bins_N = torch.tensor(numbers, dtype=torch.int64).view(-1, 3).unbind(1)
    lengths_N = torch.tensor([float(len(answer.ids)) for answer in answers])
    cut_N = torch.tensor([t.completion.finish_reason == "length" for t in answers], dtype=torch.bool)
    scores_N = torch.tensor([one.value for one in scored], dtype=torch.float32)
    low, high = config.reward.low, config.reward.high
    shares_N = ((scores_N - low) / (high - low)).clamp(0, 1)
    right_N = shares_N >= RIGHT

    # The sign stays: a power of a negative number may be none, or a positive one.
    powers_E = torch.tensor([entry.power for entry in config.tasks])
    rewards_N = scores_N.sign() * scores_N.abs() ** powers_E[entries_N]
    # Toggle replaces a reward, the others add to it: it must come first.
    rewards_N = toggle_rewards(
        config.toggle, rewards_N, lengths_N, bins_N, groups_N, budgets, update, (low, high)
    )
    rewards_N = rewards_N + length_rewards(config.length, lengths_N, right_N, groups_N, update)
    limit = config.rollout.max_new_tokens
    rewards_N = rewards_N - overlong_penalty(config.overlong, lengths_N, cut_N, limit)
    if config.repeat is not None:
        repeats = [repeat_period(config.repeat, answer.ids) is not None for answer in answers]
        rewards_N = rewards_N - config.repeat.penalty * torch.tensor(repeats).float()

    # What a limit cut off says nothing about its beginning: "filter" leaves it out of the loss.
    filtered_N = cut_N if config.overlong.mode == "filter" else torch.zeros_like(cut_N)
    return Experience(
        list(groups),
        bounds,
        list(scored),
        entries_N,
        bins_N,
        scores_N,
        shares_N,
        right_N,
        rewards_N,
        advantages(config.objective, rewards_N, groups_N),
        lengths_N,
        cut_N,
        ~filtered_N,
        informative(rewards_N, groups_N),
    )


def rollout_metrics(
    config: RLConfig,
    runtime: Runtime,
    update: int,
    collector: Collector,
    found: Experience,
    counts: Mapping[str, float],
) -> dict[str, float]:
    """Numbers of an iteration's rollouts, over all processes; every process calls it. counts: more that are
    summed, and told where they are not 0."""
    # By entry of the recipe: scores, rewards, answers that a limit cut off, answers.
    parts = (found.scores_N, found.rewards_N, found.cut_N, torch.ones_like(found.scores_N))
    table_E4 = torch.zeros(len(config.tasks), 4, dtype=torch.float64)
    table_E4.index_add_(0, found.entries_N, torch.stack([part.double() for part in parts], dim=1))
    table_E4 = runtime.sum(table_E4)
    completions = [answer.completion for answer in found.answers]
    lengths, spent = found.lengths_N.tolist(), collector.spent
    sums = runtime.sum_dict(
        {
            "length": sum(lengths),
            "informative": float(found.informative_N.sum()),
            "staleness": sum(update - version for done in completions for version in done.versions),
            "surprise": -sum(logp for done in completions for logp in done.logprobs),
            "tokens": spent["tokens"],
            "carried": len(collector.carried),
            "engine_s": spent["engine_s"],
            "seconds": spent["seconds"],
            **counts,
        }
    )

    record: dict[str, float] = {"answers": float(table_E4[:, 3].sum())}
    answers, written = max(1.0, record["answers"]), max(1.0, sums["length"])
    for column, name in enumerate(("score", "reward", "cut")):
        record[name] = float(table_E4[:, column].sum()) / answers
        for entry, row in zip(config.tasks, table_E4.tolist()):
            if row[3]:
                record[f"{name}/{entry.label}"] = row[column] / row[3]
    record |= {name: sums[name] for name in counts if sums[name]}
    return record | {
        "length": sums["length"] / answers,
        "length_max": float(runtime.max(max(lengths, default=0.0))),
        "informative": sums["informative"] / answers,
        "staleness": sums["staleness"] / written,
        # Mean -log p of what was drawn: the entropy of the sampling distribution, without looking at all of
        # it.
        "entropy": sums["surprise"] / written,
        "carried": sums["carried"],
        "tokens": sums["tokens"],
        "time/rollout_s": spent["seconds"],
        "engine_idle": 1 - sums["engine_s"] / max(sums["seconds"], 1e-9),
        "tokens_per_s": sums["tokens"] / max(spent["seconds"], 1e-9),
    }
