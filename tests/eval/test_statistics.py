"""The delta statistics against SciPy, statsmodels, enumeration and simulation."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats as scipy

from earlyfusion.eval import stats

DRAWS = 1000
COVERAGE = (0.93, 0.97)  # 95 % plus and minus three standard errors of a share over 1,000 draws
CLOSED = 1e-9  # both sides in double precision


@pytest.mark.parametrize("seed", [0, 1])
def test_paired_and_clustered_errors_equal_statsmodels(seed):
    sm = pytest.importorskip("statsmodels.api")
    rng = np.random.default_rng(seed)
    d, clusters, one = rng.normal(0.1, 1, 231), rng.integers(0, 37, 231), np.ones((231, 1))
    robust = {"cov_type": "cluster", "cov_kwds": {"groups": clusters}, "use_t": True}
    pairs = [(stats.mean_estimate(d), {}), (stats.clustered_estimate(d, clusters), robust)]
    for mine, form in pairs:
        theirs = sm.OLS(d, one).fit(**form)
        assert mine.se == pytest.approx(theirs.bse[0], rel=CLOSED)
        assert mine.p == pytest.approx(theirs.pvalues[0], rel=1e-7)
        assert (mine.low, mine.high) == pytest.approx(tuple(theirs.conf_int()[0]), rel=1e-7)
    order = rng.permutation(231)
    shuffled = stats.clustered_estimate(d[order], [f"c{clusters[i]}" for i in order])
    assert (shuffled.se, shuffled.df) == pytest.approx((pairs[1][0].se, 36), rel=CLOSED)


def clustered(rng):
    sizes = rng.integers(1, 9, 60)
    labels = np.repeat(np.arange(60), sizes)
    return 0.15 + np.repeat(rng.normal(0, 0.6, 60), sizes) + rng.normal(0, 1, len(labels)), labels, 0.15


def independent(rng):
    return rng.choice([-1.0, 0.0, 1.0], p=[0.10, 0.75, 0.15], size=220), np.arange(220), 0.05


@pytest.mark.parametrize("world", [independent, clustered])
def test_intervals_cover_the_truth_95_percent_of_the_time(world):
    """1,000 draws of a paired difference, with and without clusters; intervals that ignore clusters miss far
    more often."""
    rng = np.random.default_rng(11)
    hits = unclustered = 0
    for _ in range(DRAWS):
        d, labels, truth = world(rng)
        estimate, plain = stats.clustered_estimate(d, labels), stats.mean_estimate(d)
        hits += estimate.low <= truth <= estimate.high
        unclustered += plain.low <= truth <= plain.high
    assert COVERAGE[0] <= hits / DRAWS <= COVERAGE[1]
    assert world is independent or unclustered / DRAWS < 0.85


def test_sign_flips_of_binary_answers_are_mcnemars_exact_test_and_enumeration():
    for won, lost, error in ((1, 0, CLOSED), (7, 3, CLOSED), (2, 11, CLOSED), (60, 38, 0.007)):
        d = np.array([1.0] * won + [-1.0] * lost + [0.0] * 20)  # the last is Monte Carlo's, of 10,000 draws
        assert stats.sign_flip_p(d) == pytest.approx(scipy.binomtest(won, won + lost).pvalue, abs=error)
    d = np.random.default_rng(2).normal(0.4, 1, 9)
    every = np.abs(np.array(list(itertools.product((1, -1), repeat=9))) @ d)
    assert stats.sign_flip_p(d) == pytest.approx(np.mean(every >= abs(d.sum()) - 1e-12))
    # A cluster is flipped as a whole, so its copies add nothing.
    assert stats.sign_flip_p(np.repeat(d, 4), np.repeat(range(9), 4)) == stats.sign_flip_p(d)


def test_holm_equals_statsmodels():
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    rng = np.random.default_rng(6)
    for n in (1, 2, 14, 57):
        p = rng.random(n) ** 3
        theirs = multitest.multipletests(p, method="holm")[1].tolist()
        assert stats.holm(p.tolist()) == pytest.approx(theirs, rel=CLOSED)
    with_nan = stats.holm([0.01, math.nan, 0.04])
    assert math.isnan(with_nan[1]) and with_nan[::2] == pytest.approx([0.02, 0.04])


def test_required_questions_equal_the_published_numbers():
    """Two points at 80 % power, 5 % two-sided, by discordance; the rule of three where nothing changed."""
    for discordance, n in ((0.05, 973), (0.10, 1954), (0.15, 2935), (0.20, 3917), (0.30, 5879)):
        se = math.sqrt((discordance - 0.02**2) / n)
        assert stats.smallest_delta(se, n) == pytest.approx(0.02, rel=2e-3)
    assert stats.smallest_delta(0.0, 60) == pytest.approx(math.sqrt(7.849 * 0.05 / (60 + 7.849)), rel=1e-3)


def test_seed_intervals_equal_scipy():
    a, b = [0.31, 0.35, 0.30, 0.36], [0.37, 0.33, 0.40]
    pairs = [(stats.seed_estimate(a, b), scipy.ttest_ind(b, a, equal_var=False))]
    pairs += [(stats.seed_estimate([0.3], b), scipy.ttest_1samp(b, 0.3))]
    for mine, theirs in pairs:
        assert (mine.p, mine.df) == pytest.approx((theirs.pvalue, theirs.df), rel=1e-8)
    assert math.isnan(stats.seed_estimate([0.3], [0.4]).se)


def test_interval_for_new_questions_and_new_seeds_covers():
    """Crossed questions and seeds: the joint interval is a little wide, never short; seeds alone ignore that
    the questions are a sample."""
    rng = np.random.default_rng(10)
    hits = alone = 0
    for _ in range(DRAWS):
        d = 0.2 + rng.normal(0, 1, (150, 1)) + rng.normal(0, 0.08, (1, 5)) + rng.normal(0, 1, (150, 5))
        questions, seeds = stats.mean_estimate(d.mean(1)), stats.mean_estimate(d.mean(0))
        both = stats.combined(questions.value, questions, seeds)
        hits += both.low <= 0.2 <= both.high
        alone += seeds.low <= 0.2 <= seeds.high
    assert COVERAGE[0] <= hits / DRAWS <= 0.995 and alone / DRAWS < 0.9


def test_degenerate_inputs_say_so():
    flat = stats.mean_estimate([0.0, 0.0, 0.0])
    assert flat.se == 0 and flat.p == 1.0 and not flat.excludes_zero
    assert math.isnan(stats.mean_estimate([0.5]).low)
    assert math.isnan(stats.clustered_estimate([1.0, 2.0], ["a", "a"]).se)
    assert stats.sign_flip_p([0.0, 0.0]) == 1.0
