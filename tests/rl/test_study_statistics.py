"""The statistics of the transfer study: against closed forms, and against planted truths."""

import math

import numpy as np
import pytest

from earlyfusion.eval.stats import mean_estimate
from earlyfusion.rl.study.analysis import compare_arms, crossed_mean, word


def planted(rng, *, starts=5, runs=3, items=60, gain=0.0, by_start=0.03, by_run=0.03, by_item=0.0, noise=0.3):
    """(base, treated): deltas with known variance components; the base is 0."""
    item, treated = rng.normal(0, by_item, items), []
    for _ in range(starts):
        run = gain + rng.normal(0, by_start) + rng.normal(0, by_run, (runs, 1))
        treated.append(run + item + rng.normal(0, noise, (runs, items)))
    return [np.zeros((1, items))] * starts, treated


def test_where_only_starts_or_only_problems_vary_it_is_their_t_interval():
    values = np.random.default_rng(0).normal(0.1, 0.05, 6)
    exact, base = mean_estimate(values), [np.zeros((1, 4))] * 6
    treated = [np.full((1, 4), value) for value in values]
    ours = vars(compare_arms(base, treated))
    for name in ("value", "se", "df", "low", "high", "p"):
        assert ours[name] == pytest.approx(getattr(exact, name)), name
    problems = crossed_mean(np.tile(values, (5, 1)))
    assert (problems.value, problems.se, problems.df) == pytest.approx((exact.value, exact.se, 5))
    assert word(ours, ours["p"]) == "gain" and word(ours, 0.06) == "no difference shown", "Holm decides"


@pytest.mark.parametrize("seed", [0, 1])
def test_the_variance_is_that_of_new_starts_and_new_problems(seed):
    """Mean of the estimated variances against the variance of the estimates, over 3,000 worlds."""
    rng = np.random.default_rng(seed)
    values, variances = [], []
    for _ in range(3000):
        table = rng.normal(0, 0.2, (5, 1)) + rng.normal(0, 0.5, (1, 12)) + rng.normal(0, 0.6, (5, 12))
        found = crossed_mean(table)
        values.append(found.value)
        variances.append(found.se**2)
    assert np.mean(variances) == pytest.approx(np.var(values), rel=0.08)  # the floor lifts it a little


@pytest.mark.parametrize("by_item", [0.0, 0.3])
def test_intervals_cover_the_truth(by_item):
    """200 worlds with 5 starts, 3 runs, 60 problems: the 95 % interval holds the truth in 92 % to 99.5 %."""
    rng = np.random.default_rng(2)
    truth, hits, alarms = 0.05, 0, 0
    for _ in range(200):
        found = vars(compare_arms(*planted(rng, gain=truth, by_item=by_item)))
        hits += found["low"] <= truth <= found["high"]
        null = vars(compare_arms(*planted(rng, by_item=by_item)))
        alarms += word(null, null["p"]) != "no difference shown"
    assert 184 <= hits <= 199 and alarms <= 16


def test_one_start_and_no_change_at_all_claim_nothing():
    one = vars(compare_arms(*planted(np.random.default_rng(0), starts=1, gain=0.3)))
    assert one["value"] > 0.1 and math.isnan(one["se"])
    assert word(one, one["p"]) == "one start: nothing can be said"
    same = vars(compare_arms([np.ones((1, 5))] * 3, [np.ones((2, 5))] * 3))
    assert same["value"] == same["se"] == 0 and word(same, same["p"]) == "no difference shown"


def test_arms_must_share_starts_and_problems_but_runs_may_be_missing():
    with pytest.raises(ValueError):
        compare_arms([np.zeros((1, 3))], [np.zeros((1, 3))] * 2)
    with pytest.raises(ValueError):
        compare_arms([np.zeros((1, 3))] * 2, [np.zeros((1, 3)), np.zeros((1, 4))])
    base = [np.array([[0.0, 1.0]]), np.array([[1.0, 1.0]])]
    treated = [np.array([[1.0, 1.0], [0.0, 0.0]]), np.array([[1.0, 0.0]])]
    assert compare_arms(base, treated).value == pytest.approx(-0.25)
