"""Starts crossed with problems: against closed forms, and against planted truths."""

import math

import numpy as np
import pytest
from scipy import stats

from earlyfusion.eval.stats import crossed_mean, interval, mean_estimate, seen


def planted(rng, *, starts=5, runs=3, items=60, gain=0.0, by_start=0.03, by_run=0.03, by_item=0.0, noise=0.3):
    """Differences [starts, items] with known variance components, runs averaged."""
    item = rng.normal(0, by_item, items)
    made = []
    for _ in range(starts):
        run = gain + rng.normal(0, by_start) + rng.normal(0, by_run, (runs, 1))
        made.append((run + item + rng.normal(0, noise, (runs, items))).mean(0))
    return np.stack(made)


def test_where_only_starts_or_only_problems_vary_it_is_their_t_interval():
    values = np.random.default_rng(0).normal(0.1, 0.05, 6)
    exact = mean_estimate(values)
    ours = crossed_mean(np.tile(values[:, None], (1, 4)))
    for name in ("value", "se", "df", "low", "high", "p"):
        assert getattr(ours, name) == pytest.approx(getattr(exact, name)), name
    problems = crossed_mean(np.tile(values, (5, 1)))
    assert (problems.value, problems.se, problems.df) == pytest.approx((exact.value, exact.se, 5))


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
        found = crossed_mean(planted(rng, gain=truth, by_item=by_item))
        hits += found.low <= truth <= found.high
        alarms += crossed_mean(planted(rng, by_item=by_item)).excludes_zero
    assert 184 <= hits <= 199 and alarms <= 16


def test_one_start_and_no_change_at_all_claim_nothing():
    one = crossed_mean(planted(np.random.default_rng(0), starts=1, gain=0.3))
    assert one.value > 0.1 and math.isnan(one.se) and math.isnan(seen(one))
    same = crossed_mean(np.zeros((3, 5)))
    assert same.value == same.se == 0 and not same.excludes_zero


def test_the_smallest_difference_that_would_be_seen_is_seen_in_four_of_five():
    """Simulated, five seeds of sd 0.3."""
    rng = np.random.default_rng(0)
    least = seen(interval(0.0, 0.3 / math.sqrt(5), 4, 5))
    drawn = rng.normal(least, 0.3, size=(4000, 5))
    shown = stats.ttest_1samp(drawn, 0.0, axis=1).pvalue < 0.05
    assert shown.mean() == pytest.approx(0.8, abs=0.04)
