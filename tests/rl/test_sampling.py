"""Schedules and the choice of prompts."""

import pytest
import torch

from earlyfusion.rl.recipe import CurriculumConfig, TemperatureConfig, temperature
from earlyfusion.rl.rollouts.prompts import draw, prompt_weights, success_rates

MANY = 10**12
"""Trials beside which the imagined ones are nothing."""


def test_temperature_falls_from_start_to_end():
    cfg = TemperatureConfig(start=1.2, end=0.6, updates=10)
    path = [temperature(cfg, u) for u in range(15)]
    assert path[0] == pytest.approx(1.2) and path[5] == pytest.approx(0.9) and path[10:] == [0.6] * 5
    assert path == sorted(path, reverse=True)
    assert temperature(TemperatureConfig(end=0.7), 0) == 0.7


def test_success_rate_starts_at_one_half_and_tends_to_the_truth():
    rates = success_rates(torch.tensor([0, 0, 900, 4]), torch.tensor([0, 1000, 1000, 4]))
    assert rates.tolist() == pytest.approx([0.5, 0.001, 0.9, 5 / 6], abs=1e-3)


def weights(config, failures=None, levels=None, update=0):
    """Shares of prompts that failed in these shares of many trials, or have these levels."""
    count = len(failures if failures is not None else levels)
    failures = torch.zeros(count) if failures is None else torch.as_tensor(failures)
    levels = torch.zeros(count) if levels is None else torch.as_tensor(levels)
    got = prompt_weights(config, MANY * (1 - failures), torch.full((count,), MANY), levels, update)
    return (got / got.sum()).tolist()


def test_k15_curriculum_is_uniform_then_hard_only():
    cfg = CurriculumConfig(mode="hard_after_warmup", warmup_updates=24, hard_from=0.5)
    assert weights(cfg, [0.1, 0.6, 0.9], update=23) == pytest.approx([1 / 3] * 3)
    assert weights(cfg, [0.1, 0.6, 0.9], update=24) == pytest.approx([0, 0.5, 0.5])
    assert weights(cfg, [0.01, 0.06, 0.09], update=30) == pytest.approx(
        [1 / 3] * 3
    )  # nothing is hard any more


def test_easy_to_hard_opens_evenly_and_never_closes():
    cfg = CurriculumConfig(mode="easy_to_hard", warmup_updates=10, start_difficulty=0.2)
    levels = torch.linspace(0, 1, 101)
    open_at = [sum(share > 0 for share in weights(cfg, None, levels, update)) for update in range(12)]
    assert open_at == sorted(open_at) and open_at[0] == 21
    assert abs(open_at[5] - 61) <= 1 and open_at[10] == 101


def test_priority_is_proportional_to_failure_with_a_floor():
    cfg = CurriculumConfig(prioritised=True, floor=0.05)
    got = weights(cfg, [1, 0.5, 0.1, 0])
    assert [share / got[0] for share in got] == pytest.approx([1, 0.5, 0.1, 0.05], rel=1e-5)
    assert weights(CurriculumConfig(), [1, 0.5, 0.1, 0]) == pytest.approx([0.25] * 4)
    hard = CurriculumConfig(mode="hard_after_warmup", prioritised=True, floor=0.0)
    assert weights(hard, [0.0, 0.6, 1.0]) == pytest.approx([0, 0.6 / 1.6, 1 / 1.6], rel=1e-5)


def test_draws_follow_the_weights_repeat_by_seed_and_avoid_repetition():
    shares = torch.tensor([0.6, 0.3, 0.1, 0.0])
    seed = lambda n: torch.Generator().manual_seed(n)
    assert draw(shares, 3, seed(1)) == draw(shares, 3, seed(1))
    assert sorted(draw(shares, 3, seed(2))) == [0, 1, 2]
    seven = draw(shares, 7, seed(3))
    assert sorted(seven[:3]) == sorted(seven[3:6]) == [0, 1, 2] and len(seven) == 7
    g = seed(4)
    first = torch.bincount(torch.tensor([draw(shares, 1, g)[0] for _ in range(4000)]), minlength=4) / 4000
    assert (first - shares).abs().max() < 0.03  # four standard errors of a share of .5
