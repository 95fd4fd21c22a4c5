"""Schedules and the choice of prompts."""

import pytest
import torch

from earlyfusion.data.errors import DataError
from earlyfusion.rl.rollouts.curriculum import (
    CurriculumConfig,
    TemperatureConfig,
    allowed,
    draw,
    prompt_weights,
    success_rates,
    temperature,
)

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
    for solved, tried in (([2], [1]), ([-1], [3]), ([1], [1, 2])):
        with pytest.raises(DataError, match="solved counts"):
            success_rates(torch.tensor(solved), torch.tensor(tried))


def test_k15_curriculum_is_uniform_then_hard_only():
    cfg = CurriculumConfig(mode="hard_after_warmup", warmup_updates=24, hard_from=0.5)
    difficulty = torch.tensor([0.1, 0.5, 0.9])
    assert allowed(cfg, difficulty, 23).tolist() == [True, True, True]
    assert allowed(cfg, difficulty, 24).tolist() == [False, True, True]
    assert allowed(cfg, difficulty * 0.1, 30).all()  # nothing is hard any more: offer everything


def test_easy_to_hard_opens_evenly_and_never_closes():
    cfg = CurriculumConfig(mode="easy_to_hard", warmup_updates=10, start_difficulty=0.2)
    difficulty = torch.linspace(0, 1, 101)
    open_at = [int(allowed(cfg, difficulty, u).sum()) for u in range(12)]
    assert (
        open_at == sorted(open_at) and open_at[0] == 21 and abs(open_at[5] - 61) <= 1 and open_at[10] == 101
    )


def test_priority_is_proportional_to_failure_with_a_floor():
    solved, tried = MANY * torch.tensor([0, 50, 90, 1000]), MANY * torch.tensor([100, 100, 100, 1000])
    cfg = CurriculumConfig(prioritised=True, floor=0.05)
    weights = prompt_weights(cfg, solved, tried, 0)
    assert (weights / weights[0]).tolist() == pytest.approx([1, 0.5, 0.1, 0.05])
    assert float(weights.sum()) == pytest.approx(1)
    uniform = prompt_weights(CurriculumConfig(), solved, tried, 0)
    assert uniform.tolist() == pytest.approx([0.25] * 4)


def test_curriculum_and_priority_multiply_and_solved_prompts_still_give_a_distribution():
    cfg = CurriculumConfig(mode="hard_after_warmup", prioritised=True, floor=0.0)
    got = prompt_weights(cfg, MANY * torch.tensor([10, 4, 0]), MANY * torch.tensor([10, 10, 10]), 0)
    assert got.tolist() == pytest.approx([0, 0.6 / 1.6, 1 / 1.6])
    by_task = prompt_weights(cfg, torch.tensor([5, 5]), torch.tensor([10, 10]), 0, torch.tensor([0.9, 0.1]))
    assert by_task.tolist() == pytest.approx([1, 0])
    exact = CurriculumConfig(prioritised=True, floor=0.0)
    assert prompt_weights(exact, torch.tensor([3, 3]), torch.tensor([3, 3]), 0).tolist() == pytest.approx(
        [0.5, 0.5]
    )


def test_draws_follow_the_weights_repeat_by_seed_and_avoid_repetition():
    weights = torch.tensor([0.6, 0.3, 0.1, 0.0])
    seed = lambda n: torch.Generator().manual_seed(n)
    assert draw(weights, 3, seed(1)) == draw(weights, 3, seed(1))
    assert sorted(draw(weights, 3, seed(2))) == [0, 1, 2]
    seven = draw(weights, 7, seed(3))
    assert sorted(seven[:3]) == sorted(seven[3:6]) == [0, 1, 2] and len(seven) == 7
    g = seed(4)
    first = torch.bincount(torch.tensor([draw(weights, 1, g)[0] for _ in range(4000)]), minlength=4) / 4000
    assert (first - weights).abs().max() < 0.03  # four standard errors of a share of .5
    with pytest.raises(DataError, match="positive weight"):
        draw(torch.zeros(3), 1, g)


def test_bad_prompt_tables_are_refused():
    with pytest.raises(DataError, match="no prompts"):
        prompt_weights(CurriculumConfig(), torch.zeros(0), torch.zeros(0), 0)
    with pytest.raises(DataError, match="difficulties"):
        prompt_weights(CurriculumConfig(), torch.zeros(2), torch.zeros(2), 0, torch.zeros(3))
