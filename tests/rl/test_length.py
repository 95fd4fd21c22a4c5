"""Length rewards, Toggle, token limits and repeats, by their definitions and by what they must never do."""

import itertools

import pytest
import torch

from earlyfusion.data.errors import DataError
from earlyfusion.rl.objectives.length import (
    LengthRewardConfig,
    OverlongConfig,
    RepeatConfig,
    ToggleConfig,
    budget_phase,
    estimate_budgets,
    length_rewards,
    overlong_rewards,
    repeat_period,
    repeat_rewards,
    toggle_rewards,
    trained_answers,
    with_length_rewards,
)


def test_k15_length_reward_by_the_formula():
    lengths = torch.tensor([10, 20, 30, 50, 10, 50])
    right = torch.tensor([1, 1, 1, 1, 0, 0]).bool()
    got = length_rewards(lengths, right, torch.zeros(6, dtype=torch.long))
    assert got.tolist() == [0.5, 0.25, 0.0, -0.5, 0.0, -0.5]


def test_equal_lengths_and_single_answers_earn_nothing():
    got = length_rewards(torch.tensor([9, 9, 4]), torch.tensor([True, False, True]), torch.tensor([0, 0, 1]))
    assert got.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_length_reward_is_bounded_falls_with_length_and_sees_only_its_group(seed):
    g = torch.Generator().manual_seed(seed)
    lengths, groups = torch.randint(1, 400, (40,), generator=g), torch.randint(0, 5, (40,), generator=g)
    right = torch.rand(40, generator=g) > 0.5
    got = length_rewards(lengths, right, groups)
    assert got.abs().max() <= 0.5 and (got[~right] <= 0).all()
    for i, j in itertools.combinations(range(40), 2):
        if groups[i] == groups[j] and right[i] == right[j] and lengths[i] < lengths[j]:
            assert got[i] >= got[j]
    alone = groups == 2
    assert torch.equal(length_rewards(lengths[alone], right[alone], groups[alone]), got[alone])


def test_length_reward_starts_after_its_warm_up():
    args = (torch.tensor([1.0, 1.0]), torch.tensor([2, 4]), torch.tensor([True, True]), torch.zeros(2).long())
    cfg = LengthRewardConfig(weight=0.2, warmup_updates=3)
    assert [with_length_rewards(cfg, *args, update)[0].item() for update in range(5)] == pytest.approx(
        [1, 1, 1, 1.1, 1.1]
    )
    assert torch.equal(with_length_rewards(LengthRewardConfig(), *args, 9), args[0])


def test_toggle_alternates_every_m_updates():
    assert [budget_phase(ToggleConfig(every=2), u) for u in range(8)] == [True, True, False, False] * 2
    assert not any(budget_phase(ToggleConfig(), u) for u in range(8))


@pytest.mark.parametrize("percentile,expected", [(0, 10), (50, 20), (75, 25), (100, 30)])
def test_budget_is_the_percentile_of_right_lengths(percentile, expected):
    lengths = torch.tensor([10, 20, 30, 500, 7, 8])
    right, prompts = torch.tensor([1, 1, 1, 0, 0, 1]).bool(), torch.tensor([4, 4, 4, 4, 5, 6])
    budgets = estimate_budgets(ToggleConfig(every=1, percentile=percentile), lengths, right, prompts)
    assert budgets == {4: expected, 6: 8.0}  # prompt 5 was never solved


def test_toggle_takes_the_reward_of_long_answers_only_where_the_prompt_is_solved():
    cfg = ToggleConfig(every=1, min_accuracy=0.6)
    rewards = torch.tensor([1.0, 1, 1, 0, 1, 0, 0, 0, 1.0, 1.0])
    lengths = torch.tensor([10, 30, 31, 5, 99, 5, 5, 5, 99, 99])
    prompts = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    budgets = {0: 30.0, 1: 30.0}  # group 0: mean .75; group 1: .25; group 2 has no budget
    on = toggle_rewards(cfg, rewards, lengths, prompts, prompts, budgets, update=0)
    assert on.tolist() == [1, 1, 0, 0, 1, 0, 0, 0, 1, 1]
    assert torch.equal(toggle_rewards(cfg, rewards, lengths, prompts, prompts, budgets, update=1), rewards)
    # The same rewards on a scale of -1 to 0: an answer over its budget earns the lowest, which is not 0.
    moved = toggle_rewards(cfg, rewards - 1, lengths, prompts, prompts, budgets, 0, span=(-1.0, 0.0))
    assert torch.equal(moved, on - 1)
    assert rewards.tolist() == [1, 1, 1, 0, 1, 0, 0, 0, 1, 1]


def test_overlong_modes():
    lengths, cut = torch.tensor([50, 80, 90, 100, 120]), torch.tensor([0, 0, 0, 1, 1]).bool()
    limits = {"max_tokens": 100, "buffer_tokens": 20}
    run = lambda mode: overlong_rewards(
        OverlongConfig(mode=mode, **limits), torch.ones(5), lengths, cut
    ).tolist()
    assert run("soft") == pytest.approx([1, 1, 0.5, 0, 0])
    assert run("hard") == [1, 1, 1, 0, 0]
    assert run("none") == run("filter") == [1] * 5
    assert torch.equal(trained_answers(OverlongConfig(mode="filter"), cut), ~cut)
    assert trained_answers(OverlongConfig(mode="soft", **limits), cut).all()


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


def test_repeats_earlier_in_the_answer_or_too_short_do_not_count():
    cfg = RepeatConfig(min_repeats=4, max_period=8, min_tokens=12)
    assert repeat_period(cfg, [1, 2, 3] * 4) == 3
    assert repeat_period(cfg, [1, 2, 3] * 4 + [9]) is None
    assert (
        repeat_period(cfg, [5] * 11) is None and repeat_period(cfg, [5] * 12) == 1
    )  # 0.00000 is an answer, a page is not
    assert repeat_period(cfg, list(range(9)) * 6) is None  # period 9 is longer than asked for
    assert repeat_period(cfg, []) is None


def test_repeats_cost_the_penalty():
    cfg = RepeatConfig(min_tokens=4, penalty=0.5)
    got = repeat_rewards(cfg, torch.tensor([1.0, 1.0, 0.0]), [[1] * 9, [1, 2, 3, 4, 5], [7, 8] * 9])
    assert got.tolist() == [0.5, 1.0, -0.5]
    with pytest.raises(DataError, match="2 answers for 3 rewards"):
        repeat_rewards(cfg, torch.zeros(3), [[1], [2]])


def test_bad_lengths_are_refused():
    with pytest.raises(DataError, match="length -1"):
        length_rewards(torch.tensor([-1, 2]), torch.tensor([True, True]), torch.zeros(2).long())
    with pytest.raises(DataError, match="one number"):
        length_rewards(torch.tensor([1, 2]), torch.tensor([True]), torch.zeros(2).long())
