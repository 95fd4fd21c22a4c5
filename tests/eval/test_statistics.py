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
    d = rng.normal(0.1, 1, 231)
    clusters = rng.integers(0, 37, 231)
    one = np.ones((231, 1))
    plain, clustered = stats.mean_estimate(d), stats.clustered_estimate(d, clusters.tolist())
    ols = sm.OLS(d, one).fit()
    robust = sm.OLS(d, one).fit(cov_type="cluster", cov_kwds={"groups": clusters}, use_t=True)
    for mine, theirs in ((plain, ols), (clustered, robust)):
        assert mine.se == pytest.approx(theirs.bse[0], rel=CLOSED)
        assert mine.p == pytest.approx(theirs.pvalues[0], rel=1e-7)
        assert (mine.low, mine.high) == pytest.approx(tuple(theirs.conf_int()[0]), rel=1e-7)
    assert clustered.df == len(set(clusters)) - 1


def test_singleton_clusters_are_the_paired_error_and_names_do_not_matter():
    d = np.random.default_rng(3).normal(size=50)
    assert stats.clustered_estimate(d, list(range(50))).se == pytest.approx(
        stats.mean_estimate(d).se, rel=CLOSED
    )
    labels = [f"c{i // 3}" for i in range(50)]
    order = np.random.default_rng(4).permutation(50)
    shuffled = stats.clustered_estimate(d[order], [labels[i] for i in order])
    assert shuffled.se == pytest.approx(stats.clustered_estimate(d, labels).se, rel=CLOSED)


def test_the_published_table_of_pairs_holds():
    """SE of the paired difference from discordance and delta: the identity behind the power formula."""
    rng = np.random.default_rng(0)
    a = rng.integers(0, 2, 4000).astype(float)
    b = np.where(rng.random(4000) < 0.2, 1 - a, a)
    d = b - a
    D, delta = np.mean(a != b), d.mean()
    assert stats.mean_estimate(d).se == pytest.approx(math.sqrt((D - delta**2) / 3999), rel=CLOSED)


def _covers(low, high, truth):
    return low <= truth <= high


@pytest.mark.parametrize("clustered", [False, True], ids=["independent", "clustered"])
def test_intervals_cover_the_truth_95_percent_of_the_time(clustered):
    """1,000 draws: Student and bootstrap intervals of a paired binary difference, with and without
    clusters."""
    rng = np.random.default_rng(11)
    hits, boot = 0, 0
    for draw in range(DRAWS):
        if clustered:
            sizes = rng.integers(1, 9, 60)
            labels = np.repeat(np.arange(60), sizes)
            effect = np.repeat(rng.normal(0, 0.6, 60), sizes)
            d = 0.15 + effect + rng.normal(0, 1, len(labels))
            truth = 0.15
        else:
            labels = np.arange(220)
            d = rng.choice([-1.0, 0.0, 1.0], p=[0.10, 0.75, 0.15], size=220)
            truth = 0.05
        estimate = stats.clustered_estimate(d, labels.tolist())
        hits += _covers(estimate.low, estimate.high, truth)
        low, high, _ = stats.bootstrap_interval(d, clusters=labels.tolist(), draws=400, seed=draw)
        boot += _covers(low, high, truth)
    assert COVERAGE[0] <= hits / DRAWS <= COVERAGE[1], hits
    assert COVERAGE[0] <= boot / DRAWS <= COVERAGE[1], boot


def test_ignoring_clusters_would_not_cover():
    """The simulation above can tell: the unclustered interval misses far more often when clusters move
    together."""
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(300):
        d = np.repeat(rng.normal(0, 1, 40), 6) + rng.normal(0, 0.5, 240)
        estimate = stats.mean_estimate(d)
        hits += _covers(estimate.low, estimate.high, 0)
    assert hits / 300 < 0.75


def test_both_sign_flip_forms_reject_five_percent_under_the_null():
    rng = np.random.default_rng(8)
    rejected = {False: 0, True: 0}
    for draw in range(DRAWS):
        labels = np.repeat(np.arange(30), 4)
        d = np.repeat(rng.normal(0, 1, 30), 4) + rng.normal(0, 1, 120)
        rejected[True] += stats.sign_flip_p(d, clusters=labels.tolist(), draws=399, seed=draw) <= 0.05
        rejected[False] += stats.sign_flip_p(rng.normal(0, 1, 40), draws=399, seed=draw) <= 0.05
    for count in rejected.values():
        assert 1 - COVERAGE[1] <= count / DRAWS <= 1 - COVERAGE[0], rejected


def test_sign_flips_of_binary_answers_are_mcnemars_exact_test():
    for won, lost in ((0, 0), (1, 0), (7, 3), (9, 2), (2, 11)):
        d = np.array([1.0] * won + [-1.0] * lost + [0.0] * 20)
        assert stats.sign_flip_p(d) == pytest.approx(_mcnemar(won, lost), rel=CLOSED)
    many = np.array([1.0] * 60 + [-1.0] * 38)
    sampled = stats.sign_flip_p(many, draws=20_000)
    assert sampled == pytest.approx(_mcnemar(60, 38), abs=0.005)  # Monte Carlo error of 20,000


def _mcnemar(won, lost):
    n = won + lost + 3
    return stats.mcnemar([0] * won + [1] * (n - won), [1] * (n - lost) + [0] * lost).p_exact


def test_exact_sign_flips_equal_enumeration():
    d = np.random.default_rng(2).normal(0.4, 1, 9)
    every = [abs(sum(s * x for s, x in zip(signs, d))) for signs in itertools.product((1, -1), repeat=9)]
    assert stats.sign_flip_p(d) == pytest.approx(np.mean(np.array(every) >= abs(d.sum()) - 1e-12))


def test_bootstrap_matches_its_closed_form_and_keeps_strata():
    d = np.random.default_rng(1).normal(0.2, 1, 400)
    low, high, means = stats.bootstrap_interval(d, draws=4000)
    assert means.std() == pytest.approx(d.std() / 20, rel=0.05)  # sd of 4,000 draws: 1.1 %
    assert (low, high) == pytest.approx(
        (d.mean() - 1.96 * d.std() / 20, d.mean() + 1.96 * d.std() / 20), abs=0.01
    )
    between = np.repeat([0.0, 10.0], 200)  # all variance between strata: nothing to resample
    _, _, fixed = stats.bootstrap_interval(between, strata=["a"] * 200 + ["b"] * 200, draws=200)
    assert np.allclose(fixed, 5.0)
    _, _, crossing = stats.bootstrap_interval(
        between, strata=["a"] * 200 + ["b"] * 200, clusters=list(range(200)) * 2, draws=200
    )
    assert np.allclose(crossing, 5.0)  # a cluster over both strata: pairs stay together


def test_mcnemar_equals_statsmodels():
    tables = pytest.importorskip("statsmodels.stats.contingency_tables")
    rng = np.random.default_rng(6)
    for _ in range(4):
        a, b = rng.integers(0, 2, 150), rng.integers(0, 2, 150)
        table = [[np.sum((a == i) & (b == j)) for j in (1, 0)] for i in (1, 0)]
        mine = stats.mcnemar(a, b)
        assert mine.p_exact == pytest.approx(tables.mcnemar(table, exact=True).pvalue, rel=1e-8)
        assert mine.p_chi2 == pytest.approx(
            tables.mcnemar(table, exact=False, correction=True).pvalue, rel=1e-8
        )
        assert mine.discordance == np.mean(a != b)
    assert stats.mcnemar([0.5, 1], [1, 0]) is None


def test_holm_equals_statsmodels_and_leaves_nan_out():
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    rng = np.random.default_rng(7)
    for n in (1, 2, 14, 57):
        p = rng.random(n) ** 3
        assert stats.holm(p.tolist()) == pytest.approx(
            multitest.multipletests(p, method="holm")[1].tolist(), rel=CLOSED
        )
    with_nan = stats.holm([0.01, math.nan, 0.04])
    assert math.isnan(with_nan[1]) and with_nan[::2] == pytest.approx([0.02, 0.04])
    assert stats.holm([]) == []


def test_required_questions_equal_the_published_numbers():
    """Two points at 80 % power, 5 % two-sided, by discordance."""
    for discordance, n in ((0.05, 973), (0.10, 1954), (0.15, 2935), (0.20, 3917), (0.30, 5879)):
        assert stats.smallest_delta(n, discordance) == pytest.approx(0.02, rel=2e-3)
    assert stats.power_factor() == pytest.approx(7.849, abs=1e-3)
    for n, discordance, points in (
        (12_032, 0.05, 0.57),
        (12_032, 0.30, 1.40),
        (198, 0.05, 4.5),
        (198, 0.30, 10.9),
    ):
        assert 100 * stats.smallest_delta(n, discordance) == pytest.approx(
            points, rel=0.03
        )  # the table leaves delta^2 out


def test_power_formula_holds_in_simulation():
    rng = np.random.default_rng(9)
    for n, discordance, delta in ((865, 0.10, 0.03), (935, 0.30, 0.05)):
        assert stats.smallest_delta(n, discordance) == pytest.approx(delta, rel=0.001)
        won, lost = (discordance + delta) / 2, (discordance - delta) / 2
        table = rng.multinomial(n, [won, lost, 1 - discordance], size=4000)
        mean = (table[:, 0] - table[:, 1]) / n
        se = np.sqrt(((table[:, 0] + table[:, 1]) / n - mean**2) / n)
        power = np.mean(np.abs(mean / se) > 1.959964)
        assert power == pytest.approx(0.80, abs=0.025)  # three standard errors of 4,000 draws


def test_seed_intervals_equal_scipy():
    a, b = [0.31, 0.35, 0.30, 0.36], [0.37, 0.33, 0.40]
    theirs = scipy.ttest_ind(b, a, equal_var=False)
    mine = stats.seed_estimate(a, b)
    assert (mine.p, mine.df) == pytest.approx((theirs.pvalue, theirs.df), rel=1e-8)
    assert (mine.low, mine.high) == pytest.approx(tuple(theirs.confidence_interval()), rel=1e-7)
    same = stats.seed_estimate(a[:3], b, paired=True)
    assert same.p == pytest.approx(scipy.ttest_rel(b, a[:3]).pvalue, rel=1e-8)
    fixed = stats.seed_estimate([0.3], b)
    assert fixed.p == pytest.approx(scipy.ttest_1samp(np.array(b) - 0.3, 0).pvalue, rel=1e-8)
    assert math.isnan(stats.seed_estimate([0.3], [0.4]).se)
    with pytest.raises(ValueError, match="equally many"):
        stats.seed_estimate(a, b, paired=True)


def test_interval_for_new_questions_and_new_seeds_covers():
    """Crossed questions and seeds: the joint interval is a little wide, never short."""
    rng = np.random.default_rng(10)
    hits = alone = 0
    for _ in range(DRAWS):
        d = 0.2 + rng.normal(0, 1, (150, 1)) + rng.normal(0, 0.08, (1, 5)) + rng.normal(0, 1, (150, 5))
        questions, seeds = stats.mean_estimate(d.mean(1)), stats.mean_estimate(d.mean(0))
        both = stats.questions_and_seeds(questions, seeds)
        hits += _covers(both.low, both.high, 0.2)
        alone += _covers(seeds.low, seeds.high, 0.2)
    assert COVERAGE[0] <= hits / DRAWS <= 0.995
    assert alone / DRAWS < 0.9  # seeds alone ignore that the questions are a sample


def test_sampling_share_of_the_variance():
    rng = np.random.default_rng(12)
    p = rng.random(3000)
    samples = [rng.random(8) < value for value in p]
    expected = np.mean(p * (1 - p)) / 8 / 3000
    assert stats.sampling_variance(samples) == pytest.approx(expected, rel=0.06)
    assert math.isnan(stats.sampling_variance([[1.0], [0.0]]))


def test_degenerate_inputs_say_so():
    flat = stats.mean_estimate([0.0, 0.0, 0.0])
    assert flat.se == 0 and flat.p == 1.0 and not flat.excludes_zero
    assert math.isnan(stats.mean_estimate([0.5]).low)
    assert math.isnan(stats.clustered_estimate([1.0, 2.0], ["a", "a"]).se)
    for bad in ([], [[1.0]]):
        with pytest.raises(ValueError, match="shape"):
            stats.mean_estimate(bad)
    with pytest.raises(ValueError, match="draws"):
        stats.bootstrap_interval([1.0], draws=10)
    assert stats.sign_flip_p([0.0, 0.0]) == 1.0
