"""Statistics of a difference between two models asked the same questions.

    d_i = treated_i - base_i          one number per question i (a score, or its mean over samples and seeds)
    SE paired     sd(d) / sqrt(n)
    SE clustered  sqrt(G / (G - 1) * sum over clusters of (sum of residuals in the cluster)^2) / n, Student t
                  with G - 1 degrees of freedom (CR1; what statsmodels gives for OLS on a constant with
                  cov_type "cluster")
    bootstrap     clusters drawn with replacement, pairs kept together, inside each stratum; percentile
    interval sign flip     the sign of every cluster's sum of d drawn anew: the null hypothesis "base and
                  treated may be swapped"; all 2^G assignments for G <= 16, else `draws` random ones, p = (1 +
                  hits) / (1 + draws)
    McNemar       questions won and lost: exact binomial of won in won + lost tosses; chi-square
                  (|won - lost| - 1)^2 / (won + lost)
    power         Var(mean d) = (D - delta^2) / n for one binary answer each, D = (won + lost) / n the
                  discordance; solved for delta: sqrt(z D / (n + z)) with z = (z_{1 - alpha / 2} + z_power)^2
    seeds         differences of seed means: Student t (paired or one fixed base), Welch (two sets of seeds)
    Holm          step-down adjusted p values

Distributions are SciPy's. The clustered, stratified bootstrap and the sign flips of clusters are written
here: SciPy resamples single values.

Sources: Miller 2024, "Adding Error Bars to Evals" (arXiv 2411.00640; power: section 5); Cameron and Miller
2015 (CR1); Holm 1979. Legend: n questions, G clusters.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[np.float64]
EXACT_CLUSTERS = 16  # sign assignments are enumerated up to 2^16
POWER, ALPHA = 0.8, 0.05
_BLOCK = 2**22  # numbers of one block of resampling weights


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error, Student t interval and two-sided p against 0; nan where n or G is too
    small."""

    value: float
    se: float
    low: float
    high: float
    p: float
    df: float
    n: int

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return asdict(self)

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0 (False for an interval of no width: nothing varied)."""
        return (self.low > 0 or self.high < 0) and self.se > 0


# intervals of a mean


def t_quantile(p: float, df: float) -> float:
    """t with P(T <= t) = p of Student's t; df = infinity is the normal distribution, nan for df <= 0."""
    return float(special.stdtrit(df, p)) if df > 0 else math.nan


def interval(value: float, se: float, df: float, n: int, confidence: float = 0.95) -> Estimate:
    """Student t interval and p around a value with its standard error."""
    if not se >= 0 or df <= 0:
        return Estimate(value, math.nan, math.nan, math.nan, math.nan, df, n)

    half = t_quantile(0.5 + confidence / 2, df) * se
    if se > 0:
        p = 2 * float(special.stdtr(df, -abs(value / se)))
    else:
        p = 1.0 if value == 0 else math.nan  # nothing varies: a t test has nothing to say
    return Estimate(value, se, value - half, value + half, p, df, n)


def mean_estimate(values: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Mean of independent values, SE = sd / sqrt(n), n - 1 degrees of freedom. Raises ValueError for no
    values."""
    x = _vector(values)
    se = float(x.std(ddof=1)) / math.sqrt(len(x)) if len(x) > 1 else math.nan
    return interval(float(x.mean()), se, len(x) - 1, len(x), confidence)


def clustered_estimate(values: ArrayLike, clusters: Sequence[Hashable], confidence: float = 0.95) -> Estimate:
    """Mean of values that depend on each other inside clusters. With one value a cluster it equals
    `mean_estimate`. Raises ValueError for a number of labels other than that of the values."""
    x = _vector(values)
    codes, count = _codes(clusters)
    if len(codes) != len(x):
        raise ValueError(f"{len(x)} values with {len(codes)} cluster labels; give one label for every value")

    # Residuals add up inside a cluster before they are squared: what moves together counts once.
    sums = np.bincount(codes, weights=x - x.mean(), minlength=count)
    se = math.sqrt(count / (count - 1) * float(sums @ sums)) / len(x) if count > 1 else math.nan
    return interval(float(x.mean()), se, count - 1, len(x), confidence)


def unpaired_se(base: ArrayLike, treated: ArrayLike) -> float:
    """What the SE of the difference would be, had the questions been different ones; nan for fewer than
    two."""
    return welch(base, treated).se


def correlation(base: ArrayLike, treated: ArrayLike) -> float:
    """Pearson correlation of the two models' scores over questions; nan when one does not vary."""
    a, b = _vector(base), _vector(treated)
    if len(a) < 2 or a.std() == 0 or b.std() == 0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


# resampling


def bootstrap_interval(
    values: ArrayLike,
    *,
    clusters: Sequence[Hashable] | None = None,
    strata: Sequence[Hashable] | None = None,
    draws: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float, Array]:
    """(low, high, means of all draws) of the percentile bootstrap of the mean.

    Clusters are drawn inside each stratum when every cluster lies in one stratum, else among all. Raises
    ValueError for fewer than 100 draws.
    """
    if draws < 100:
        raise ValueError(f"draws={draws}: a percentile interval needs at least 100, better 2,000")
    sums, counts, groups = _cluster_sums(_vector(values), clusters, strata)

    # How often each cluster of a stratum is drawn is multinomial: no cluster is copied.
    rng = np.random.default_rng(seed)
    total, size = np.zeros(draws), np.zeros(draws)
    for stratum in range(groups.max() + 1):
        members = np.flatnonzero(groups == stratum)
        share = np.full(len(members), 1 / len(members))
        block = max(1, _BLOCK // len(members))
        for start in range(0, draws, block):
            weights = rng.multinomial(len(members), share, size=min(block, draws - start))
            total[start : start + len(weights)] += weights @ sums[members]
            size[start : start + len(weights)] += weights @ counts[members]

    means = total / size
    if len(sums) > 1:  # a resampled spread is too small by this factor (Hesterberg 2015, "narrowness bias")
        centre = sums.sum() / counts.sum()
        means = centre + (means - centre) * math.sqrt(len(sums) / (len(sums) - 1))
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high), means


def sign_flip_p(
    values: ArrayLike, *, clusters: Sequence[Hashable] | None = None, draws: int = 10_000, seed: int = 0
) -> float:
    """Two-sided p of the sign-flip test of mean 0. Clusters whose sum is 0 take no part (flipping changes
    nothing)."""
    # Flipping a cluster flips its sum; nothing else of it matters.
    sums, _, _ = _cluster_sums(_vector(values), clusters, None)
    sums = sums[sums != 0]
    if len(sums) == 0:
        return 1.0

    observed = abs(float(sums.sum())) * (1 - 1e-12)  # equal sums differ in the last bits by order of addition
    if len(sums) <= EXACT_CLUSTERS:
        bits = np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums)) & 1
        return float(np.mean(np.abs((1 - 2 * bits) @ sums) >= observed))

    rng = np.random.default_rng(seed)
    hits, block = 0, max(1, _BLOCK // len(sums))
    for start in range(0, draws, block):
        signs = rng.integers(0, 2, size=(min(block, draws - start), len(sums)), dtype=np.int8) * 2 - 1
        hits += int(np.sum(np.abs(signs @ sums) >= observed))
    return (1 + hits) / (1 + draws)


# tables of two binary scores, power, several claims


@dataclass(frozen=True)
class McNemar:
    """Questions only the treated model has right (won), only the base (lost), and the two p values."""

    won: int
    lost: int
    n: int
    p_exact: float
    chi2: float
    p_chi2: float

    @property
    def discordance(self) -> float:
        """Share of questions on which exactly one of the two is right."""
        return (self.won + self.lost) / self.n

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {**asdict(self), "discordance": self.discordance}


def mcnemar(base: ArrayLike, treated: ArrayLike) -> McNemar | None:
    """McNemar's test of two lists of 0 and 1; None when a score is neither (a mean over samples, an ANLS)."""
    a, b = _vector(base), _vector(treated)
    if not np.isin([a, b], (0.0, 1.0)).all():
        return None

    # Questions that both have right or both wrong say nothing of the difference.
    won, lost = int(np.sum(b > a)), int(np.sum(b < a))
    exact = min(1.0, 2 * float(special.bdtr(min(won, lost), won + lost, 0.5)))
    chi2 = (abs(won - lost) - 1) ** 2 / (won + lost) if won + lost else 0.0
    return McNemar(won, lost, len(a), exact, chi2, float(special.chdtrc(1, chi2)))


def power_factor(power: float = POWER, alpha: float = ALPHA) -> float:
    """(z_{1 - alpha / 2} + z_power)^2; 7.849 for 80 % power at 5 % two-sided."""
    return float(special.ndtri(1 - alpha / 2) + special.ndtri(power)) ** 2


def smallest_delta(n: int, discordance: float) -> float:
    """The true difference of binary scores that n questions at this discordance show with 80 % power."""
    factor = power_factor()
    return math.sqrt(factor * discordance / (n + factor))


def smallest_delta_of_se(se: float, independent: int) -> float:
    """The same for any score whose difference has standard error `se`, from `independent` questions or
    clusters.

    se 0 (nothing changed) does not mean that everything would be seen: the discordance is then taken at its
    95 % upper bound, 3 / independent (rule of three).
    """
    if se == 0:
        return smallest_delta(independent, min(1.0, 3 / independent))
    return math.sqrt(power_factor()) * se


def power_curve(discordance: float, ns: Sequence[int]) -> Array:
    """`smallest_delta` at every n, for drawing."""
    return np.array([smallest_delta(n, discordance) for n in ns])


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values, in the order given; nan stays nan and does not count as a claim."""
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    adjusted, running = [math.nan] * len(p_values), 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


# several seeds


def sampling_variance(samples: Sequence[ArrayLike]) -> float:
    """Variance of the mean over n questions that comes from sampling k answers each: mean of s_i^2 / k_i,
    over n.

    nan when a question was asked only once.
    """
    groups = [np.asarray(x, dtype=np.float64) for x in samples]
    if min(map(len, groups), default=0) < 2:
        return math.nan
    return float(np.mean([x.var(ddof=1) / len(x) for x in groups])) / len(groups)


def welch(base: ArrayLike, treated: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Difference of the means of two independent samples; Welch-Satterthwaite degrees of freedom."""
    a, b = _vector(base), _vector(treated)
    value, n = float(b.mean() - a.mean()), len(a) + len(b)
    if min(len(a), len(b)) < 2:
        return interval(value, math.nan, 0, n, confidence)

    # Two samples of unequal scatter: their variances are not pooled.
    va, vb = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    df = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1)) if va + vb > 0 else n - 2
    return interval(value, math.sqrt(va + vb), float(df), n, confidence)


def seed_estimate(base: ArrayLike, treated: ArrayLike, *, paired: bool = False) -> Estimate:
    """Difference of two arms from the mean score of each seed (base and treated: one number per seed).

    paired: run i of both arms began from the same seed. One base run is a fixed starting point: only the
    treated seeds vary. Raises ValueError for paired arms of different length.
    """
    a, b = _vector(base), _vector(treated)
    if paired and len(a) != len(b):
        raise ValueError(
            f"paired seeds: {len(a)} base runs and {len(b)} treated runs; give equally many, in order"
        )
    if paired or len(a) == 1 or len(b) == 1:
        return mean_estimate(b - a)
    return welch(a, b)


def questions_and_seeds(questions: Estimate, seeds: Estimate, confidence: float = 0.95) -> Estimate:
    """The difference for new questions AND new seeds: variances add (a residual that both share is counted
    twice: careful), degrees of freedom after Satterthwaite. nan when either part is."""
    vq, vs = questions.se**2, seeds.se**2
    if not vq + vs > 0:
        return interval(questions.value, math.nan, 0, questions.n, confidence)
    df = (vq + vs) ** 2 / (vq**2 / questions.df + vs**2 / seeds.df)
    return interval(questions.value, math.sqrt(vq + vs), df, questions.n, confidence)


# parts


def _codes(labels: Sequence[Hashable]) -> tuple[NDArray[np.int64], int]:
    """(number of each label in order of first appearance, how many labels there are)."""
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(label, len(seen)) for label in labels], dtype=np.int64), len(seen)


def _cluster_sums(
    x: Array, clusters: Sequence[Hashable] | None, strata: Sequence[Hashable] | None
) -> tuple[Array, Array, NDArray[np.int64]]:
    """(sum, number of values, stratum) of every cluster; one stratum when a cluster would lie in several."""
    codes, count = _codes(clusters if clusters is not None else range(len(x)))
    sums = np.bincount(codes, weights=x, minlength=count).astype(np.float64)
    sizes = np.bincount(codes, minlength=count).astype(np.float64)

    # A cluster that lies in several strata cannot be drawn inside one.
    groups = np.zeros(count, dtype=np.int64)
    if strata is not None:
        stratum, _ = _codes(strata)
        groups[codes] = stratum
        if np.any(groups[codes] != stratum):
            groups[:] = 0
    return sums, sizes, groups


def _vector(values: ArrayLike) -> Array:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or len(x) == 0:
        raise ValueError(f"values of shape {x.shape}: expected a list of at least one number")
    return x
