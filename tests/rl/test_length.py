"""Length rewards, Toggle, token limits and repeats, by their definitions and by what they must never do."""

import pytest
import torch

from earlyfusion.rl.objectives.length import (
    LengthRewardConfig,
    OverlongConfig,
    RepeatConfig,
    ToggleConfig,
    estimate_budgets,
    length_rewards,
    overlong_penalty,
    repeat_period,
    toggle_rewards,
)


def by_length(lengths, right, groups, update=0, **options):
    config = LengthRewardConfig(**{"weight": 1.0, **options})
    given = torch.as_tensor(lengths).float(), torch.as_tensor(right).bool(), torch.as_tensor(groups)
    return length_rewards(config, *given, update)


def test_k15_length_reward_by_the_formula():
    got = by_length([10, 20, 30, 50, 10, 50], [1, 1, 1, 1, 0, 0], [0] * 6)
    assert got.tolist() == [0.5, 0.25, 0.0, -0.5, 0.0, -0.5]
    assert by_length([9, 9, 4], [1, 0, 1], [0, 0, 1]).tolist() == [0.0, 0.0, 0.0]  # equal lengths, one answer
    started = [by_length([2, 4], [1, 1], [0, 0], u, weight=0.2, warmup_updates=3)[0].item() for u in range(5)]
    assert started == pytest.approx([0, 0, 0, 0.1, 0.1])


@pytest.mark.parametrize("percentile,expected", [(0, 10), (50, 20), (75, 25), (100, 30)])
def test_budget_is_the_percentile_of_right_lengths(percentile, expected):
    lengths = torch.tensor([10.0, 20, 30, 500, 7, 8])
    right, prompts = torch.tensor([1, 1, 1, 0, 0, 1]).bool(), torch.tensor([4, 4, 4, 4, 5, 6])
    budgets = estimate_budgets(ToggleConfig(every=1, percentile=percentile), lengths, right, prompts)
    assert budgets == {4: expected, 6: 8.0}  # prompt 5 was never solved


def test_toggle_takes_the_reward_of_long_answers_only_where_the_prompt_is_solved():
    cfg = ToggleConfig(every=1, min_accuracy=0.6)
    rewards = torch.tensor([1.0, 1, 1, 0, 1, 0, 0, 0, 1.0, 1.0])
    lengths = torch.tensor([10, 30, 31, 5, 99, 5, 5, 5, 99, 99])
    prompts = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    budgets = {0: 30.0, 1: 30.0}  # group 0: mean .75; group 1: .25; group 2 has no budget
    given = rewards, lengths, prompts, prompts, budgets
    on = toggle_rewards(cfg, *given, update=0, span=(0.0, 1.0))
    assert on.tolist() == [1, 1, 0, 0, 1, 0, 0, 0, 1, 1]
    assert torch.equal(toggle_rewards(cfg, *given, update=1, span=(0.0, 1.0)), rewards)
    # The same rewards on a scale of -1 to 0: an answer over its budget earns the lowest, which is not 0.
    moved = toggle_rewards(cfg, rewards - 1, *given[1:], update=0, span=(-1.0, 0.0))
    assert torch.equal(moved, on - 1)


def test_overlong_modes():
    lengths, cut = torch.tensor([50.0, 80, 90, 100, 120]), torch.tensor([0, 0, 0, 1, 1]).bool()
    for mode, max_tokens, lost in (
        ("soft", 100, [0, 0, 0.5, 1, 1]),
        ("soft", None, [0, 0, 0, 0, 1]),
        ("hard", None, [0, 0, 0, 1, 1]),
        ("none", None, [0] * 5),
        ("filter", None, [0] * 5),
    ):
        config = OverlongConfig(mode=mode, max_tokens=max_tokens, buffer_tokens=20)
        assert overlong_penalty(config, lengths, cut, torch.full((5,), 120.0)).tolist() == pytest.approx(lost)
    # An answer whose problem allows fewer tokens is overlong sooner.
    config = OverlongConfig(mode="soft", buffer_tokens=20)
    found = overlong_penalty(config, lengths, cut, torch.tensor([60.0, 80, 120, 120, 120]))
    assert found.tolist() == pytest.approx([0.5, 1, 0, 0, 1])


def naive_period(cfg, ids):
    """The last `span` tokens are the first `period` of them over and over."""
    for period in range(1, cfg.max_period + 1):
        span = max(cfg.min_repeats * period, cfg.min_tokens)
        if span <= len(ids):
            tail = ids[len(ids) - span :]
            if tail == [tail[i % period] for i in range(span)]:
                return period
    return None


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_repeats_are_found_as_the_naive_search_finds_them(seed):
    g = torch.Generator().manual_seed(seed)
    found = 0
    for _ in range(300):
        rand = lambda low, high: int(torch.randint(low, high, (1,), generator=g))
        cfg = RepeatConfig(min_repeats=rand(2, 5), max_period=rand(1, 9), min_tokens=rand(1, 20))
        words = torch.randint(0, 3, (rand(0, 12),), generator=g).tolist()
        unit = torch.randint(0, 3, (rand(1, 10),), generator=g).tolist()
        ids = words + unit * rand(1, 6) + unit[: rand(0, 3)]
        assert repeat_period(cfg, ids) == naive_period(cfg, ids)
        found += naive_period(cfg, ids) is not None
    assert 30 < found < 270
