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
    # Clusters are drawn whole: where all have the same mean there is nothing to resample.
    _, _, paired = stats.bootstrap_interval([0.0, 10.0] * 200, np.repeat(range(200), 2), draws=200)
    assert np.allclose(paired, 5.0)


def clustered(rng):
    sizes = rng.integers(1, 9, 60)
    labels = np.repeat(np.arange(60), sizes)
    return 0.15 + np.repeat(rng.normal(0, 0.6, 60), sizes) + rng.normal(0, 1, len(labels)), labels, 0.15


def independent(rng):
    return rng.choice([-1.0, 0.0, 1.0], p=[0.10, 0.75, 0.15], size=220), np.arange(220), 0.05


@pytest.mark.parametrize("world", [independent, clustered])
def test_intervals_cover_the_truth_95_percent_of_the_time(world):
    """1,000 draws: Student and bootstrap intervals of a paired difference, with and without clusters; those
    that ignore clusters miss far more often."""
    rng = np.random.default_rng(11)
    hits = {"t": 0, "bootstrap": 0, "unclustered": 0}
    for draw in range(DRAWS):
        d, labels, truth = world(rng)
        estimate, plain = stats.clustered_estimate(d, labels), stats.mean_estimate(d)
        low, high, _ = stats.bootstrap_interval(d, labels, draws=400, seed=draw)
        spans = ((estimate.low, estimate.high), (low, high), (plain.low, plain.high))
        for name, span in zip(hits, spans):
            hits[name] += span[0] <= truth <= span[1]
    assert all(COVERAGE[0] <= hits[name] / DRAWS <= COVERAGE[1] for name in ("t", "bootstrap")), hits
    assert world is independent or hits["unclustered"] / DRAWS < 0.85


def table_of(won, lost):
    n = won + lost + 3
    return stats.mcnemar([0] * won + [1] * (n - won), [1] * (n - lost) + [0] * lost)


def test_sign_flips_of_binary_answers_are_mcnemars_exact_test_and_enumeration():
    for won, lost in ((0, 0), (1, 0), (7, 3), (9, 2), (2, 11)):
        d = np.array([1.0] * won + [-1.0] * lost + [0.0] * 20)
        assert stats.sign_flip_p(d) == pytest.approx(table_of(won, lost)["p_exact"], rel=CLOSED)
    sampled = stats.sign_flip_p(np.array([1.0] * 60 + [-1.0] * 38), draws=20_000)
    assert sampled == pytest.approx(table_of(60, 38)["p_exact"], abs=0.005)  # Monte Carlo error of 20,000
    d = np.random.default_rng(2).normal(0.4, 1, 9)
    every = np.abs(np.array(list(itertools.product((1, -1), repeat=9))) @ d)
    assert stats.sign_flip_p(d) == pytest.approx(np.mean(every >= abs(d.sum()) - 1e-12))
    # A cluster is flipped as a whole, so its copies add nothing.
    assert stats.sign_flip_p(np.repeat(d, 4), np.repeat(range(9), 4)) == stats.sign_flip_p(d)


def test_mcnemar_and_holm_equal_statsmodels():
    tables = pytest.importorskip("statsmodels.stats.contingency_tables")
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    rng = np.random.default_rng(6)
    for n in (1, 2, 14, 57):
        a, b = rng.integers(0, 2, (2, 150))
        table, mine = np.histogram2d(a, b, 2)[0], stats.mcnemar(a, b)
        for name, exact in (("p_exact", True), ("p_chi2", False)):
            theirs = tables.mcnemar(table, exact=exact, correction=True).pvalue
            assert mine[name] == pytest.approx(theirs, rel=1e-8)
        p = rng.random(n) ** 3
        theirs = multitest.multipletests(p, method="holm")[1].tolist()
        assert stats.holm(p.tolist()) == pytest.approx(theirs, rel=CLOSED)
    assert stats.mcnemar([0.5, 1], [1, 0]) is None and stats.holm([]) == []
    with_nan = stats.holm([0.01, math.nan, 0.04])
    assert math.isnan(with_nan[1]) and with_nan[::2] == pytest.approx([0.02, 0.04])


def test_required_questions_equal_the_published_numbers():
    """Two points at 80 % power, 5 % two-sided, by discordance."""
    for discordance, n in ((0.05, 973), (0.10, 1954), (0.15, 2935), (0.20, 3917), (0.30, 5879)):
        assert stats.smallest_delta(n, discordance) == pytest.approx(0.02, rel=2e-3)
    for n, discordance, points in ((12_032, 0.05, 0.57), (12_032, 0.30, 1.40), (198, 0.05, 4.5)):
        # the table leaves delta^2 out
        assert 100 * stats.smallest_delta(n, discordance) == pytest.approx(points, rel=0.03)


def test_seed_intervals_equal_scipy():
    a, b = [0.31, 0.35, 0.30, 0.36], [0.37, 0.33, 0.40]
    pairs = [(stats.seed_estimate(a, b), scipy.ttest_ind(b, a, equal_var=False))]
    pairs += [(stats.seed_estimate(a[:3], b, paired=True), scipy.ttest_rel(b, a[:3]))]
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
        both = stats.questions_and_seeds(questions, seeds)
        hits += both.low <= 0.2 <= both.high
        alone += seeds.low <= 0.2 <= seeds.high
    assert COVERAGE[0] <= hits / DRAWS <= 0.995 and alone / DRAWS < 0.9


def test_degenerate_inputs_say_so():
    flat = stats.mean_estimate([0.0, 0.0, 0.0])
    assert flat.se == 0 and flat.p == 1.0 and not flat.excludes_zero
    assert math.isnan(stats.mean_estimate([0.5]).low)
    assert math.isnan(stats.clustered_estimate([1.0, 2.0], ["a", "a"]).se)
    assert stats.sign_flip_p([0.0, 0.0]) == 1.0
