"""Advantages: what is taken off a reward, and what equal rewards are worth."""

import pytest
import torch

from earlyfusion.rl.objectives.losses import ObjectiveConfig, advantages, informative

EXACT = 1e-12  # float64
GROUPS = torch.tensor([7, 3, 7, 3, 7, -1, 3, 7])  # any ids, not side by side; -1 is alone


def rewards(seed):
    return torch.rand(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", [0, 1])
def test_each_baseline_equals_its_formula(seed):
    r = rewards(seed)
    tau = 0.4
    for baseline in ("mean", "leave_one_out", "log_mean_exp", "none"):
        A = advantages(ObjectiveConfig(name="k1.5", tau=tau, baseline=baseline), r, GROUPS)
        for i, one in enumerate(GROUPS.tolist()):
            mine = r[GROUPS == one]
            if len(mine) == 1 and baseline != "none":
                assert float(A[i]) == 0
                continue
            expected = {
                "mean": mine.mean(),
                "leave_one_out": (mine.sum() - r[i]) / max(1, len(mine) - 1),
                "log_mean_exp": tau * (mine / tau).exp().mean().log(),
                "none": torch.tensor(0.0),
            }[baseline]
            assert float(A[i]) == pytest.approx(float(r[i] - expected), abs=EXACT)


def test_std_division_gives_unit_deviation_and_moonshot_does_not_divide():
    r = rewards(4)
    A = advantages(ObjectiveConfig(name="grpo"), r, GROUPS)
    assert float(A[GROUPS == 7].std()) == pytest.approx(1, abs=1e-4)
    for name in ("k1.5", "k2", "k2.5", "k3"):
        assert not ObjectiveConfig(name=name).divide_by_std
    half, whole = (advantages(ObjectiveConfig(name="k2.5"), scale * r, GROUPS) for scale in (0.5, 1.0))
    torch.testing.assert_close(2 * half, whole)


@pytest.mark.parametrize("name", ["k2.5", "grpo", "gspo"])
def test_equal_rewards_are_exactly_zero_whatever_their_rounding(name):
    for value in (0.1, 1 / 3, 0.7):
        A = advantages(ObjectiveConfig(name=name), torch.full((7,), value), torch.zeros(7, dtype=torch.long))
        assert not A.any()


def test_dynamic_sampling_keeps_groups_whose_rewards_differ():
    r = torch.tensor([0.0, 1, 0, 1, 0, 1, 1, 0])
    assert informative(r, GROUPS).tolist() == [False] * 8
    r[0] = 1.0
    assert informative(r, GROUPS).tolist() == (GROUPS == 7).tolist()
