"""Statistics of a difference between two models asked the same questions.

    d_i = treated_i - base_i          one number per question i (a score, or its mean over samples and seeds)
    SE paired     sd(d) / sqrt(n)
    SE clustered  sqrt(G / (G - 1) * sum over clusters of (sum of residuals in the cluster)^2) / n, Student t
                  with G - 1 degrees of freedom (CR1; what statsmodels gives for OLS on a constant with
                  cov_type "cluster")
    sign flip     the sign of every cluster's sum of d drawn anew: the null hypothesis "base and treated may
                  be swapped"; all 2^G assignments for G <= 16, else FLIPS random ones, p = (1 + hits) / (1 +
                  FLIPS); of answers that are right or wrong it is McNemar's exact test
    crossed       of a table of starts x groups of questions, both sampled: Var = (MS_starts + MS_groups -
                  MS_rest) / (rows * columns), two-way random effects, with Satterthwaite's degrees of
                  freedom: about rows - 1 when starts disagree, more when questions do
    power         sqrt(z) SE with z = (z_{1 - alpha / 2} + z_power)^2
    seeds         differences of seed means: Student t (one fixed base), Welch (two sets of seeds)
    Holm          step-down adjusted p values

Distributions are SciPy's. The sign flips of clusters are written here: SciPy's test sorts every draw and
takes ten times as long.

Sources: Miller 2024, "Adding Error Bars to Evals" (arXiv 2411.00640; power: section 5); Cameron and Miller
2015 (CR1); Holm 1979; Searle, Casella, McCulloch 1992 chapter 4 (crossed). Legend: n questions, G clusters.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[np.float64]
FLIPS = 10_000
EXACT_CLUSTERS = 16  # sign assignments are enumerated up to 2^16
ALPHA = 0.05
POWER_FACTOR = float(special.ndtri(1 - ALPHA / 2) + special.ndtri(0.8)) ** 2
"""(z_{1 - alpha / 2} + z_power)^2: 7.849 for 80 % power at 5 % two-sided."""
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

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0 (False for an interval of no width: nothing varied)."""
        return (self.low > 0 or self.high < 0) and self.se > 0


# intervals of a mean


def interval(value: float, se: float, df: float, n: int) -> Estimate:
    """95 % Student t interval and p around a value with its standard error."""
    if not se >= 0 or df <= 0:
        return Estimate(value, math.nan, math.nan, math.nan, math.nan, df, n)

    # Student's t and not 1.96: ten seeds or clusters are far from normal.
    half = float(special.stdtrit(df, 1 - ALPHA / 2)) * se
    p = 1.0 if value == 0 else math.nan  # nothing varies: a t test has nothing to say
    if se > 0:
        p = 2 * float(special.stdtr(df, -abs(value / se)))
    return Estimate(value, se, value - half, value + half, p, df, n)


def mean_estimate(values: ArrayLike) -> Estimate:
    """Mean of independent values, SE = sd / sqrt(n), n - 1 degrees of freedom. Raises ValueError for no
    values."""
    x = np.asarray(values)
    return clustered_estimate(x, range(len(x)))


def clustered_estimate(values: ArrayLike, clusters: Sequence[Any]) -> Estimate:
    """Mean of values that depend on each other inside clusters, one label for every value."""
    x = np.asarray(values)
    # Residuals add up inside a cluster before they are squared: what moves together counts once.
    sums = _cluster_sums(x - x.mean(), clusters)
    count = len(sums)
    se = math.sqrt(count / (count - 1) * float(sums @ sums)) / len(x) if count > 1 else math.nan
    return interval(float(x.mean()), se, count - 1, len(x))


def combined(value: float, a: Estimate, b: Estimate) -> Estimate:
    """A value whose variance is that of two independent parts together: not pooled (Satterthwaite). For new
    questions AND new seeds their variances add (a residual that both share is counted twice: careful). nan
    when either part is."""
    va, vb = a.se**2, b.se**2
    if not va + vb >= 0:
        return interval(value, math.nan, 0, a.n + b.n)
    # Two parts without any scatter: nothing to weigh their degrees of freedom by.
    df = (va + vb) ** 2 / (va**2 / a.df + vb**2 / b.df) if va + vb > 0 else a.df + b.df
    return interval(value, math.sqrt(va + vb), df, a.n + b.n)


def crossed_mean(cells_PI: Array) -> Estimate:
    """Mean of a table whose rows and columns are both sampled; nan where there is one row."""
    starts, n, value = len(cells_PI), cells_PI.size, float(cells_PI.mean())
    if starts < 2:
        return interval(value, math.nan, 0, n)

    # Mean squares of starts, of problems and of what is left, as variances of the mean.
    by_start_P, by_item_I = cells_PI.mean(1) - value, cells_PI.mean(0) - value
    rest_PI = cells_PI - value - by_start_P[:, None] - by_item_I
    parts, spread = [], 0.0
    for residuals in (by_start_P, by_item_I, rest_PI):
        free = math.prod(max(1, size - 1) for size in residuals.shape)
        parts.append(float((residuals**2).sum()) / free / residuals.size)
        spread += parts[-1] ** 2 / free
    # The unbiased sum may fall below its own parts by chance; a claim must not profit.
    variance = max(parts[0] + parts[1] - parts[2], parts[0], parts[1])
    df = variance**2 / spread if spread > 0 else starts - 1
    se = math.sqrt(variance) if variance > 1e-24 else 0.0  # what rounding leaves of no scatter is none
    return interval(value, se, min(df, n - 1), n)


# resampling


def sign_flip_p(values: ArrayLike, clusters: Sequence[Any] | None = None) -> float:
    """Two-sided p of the sign-flip test of mean 0. Clusters whose sum is 0 take no part (flipping changes
    nothing)."""
    # Flipping a cluster flips its sum; nothing else of it matters.
    x = np.asarray(values)
    sums = _cluster_sums(x, range(len(x)) if clusters is None else clusters)
    sums = sums[sums != 0]
    if len(sums) == 0:
        return 1.0

    observed = abs(float(sums.sum())) * (1 - 1e-12)  # equal sums differ in the last bits by order of addition
    if len(sums) <= EXACT_CLUSTERS:
        bits = np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums)) & 1
        return float(np.mean(np.abs((1 - 2 * bits) @ sums) >= observed))

    rng = np.random.default_rng(0)
    hits, block = 0, max(1, _BLOCK // len(sums))
    for start in range(0, FLIPS, block):
        signs = rng.integers(0, 2, size=(min(block, FLIPS - start), len(sums)), dtype=np.int8) * 2 - 1
        hits += int(np.sum(np.abs(signs @ sums) >= observed))
    return (1 + hits) / (1 + FLIPS)


# power, several claims


def smallest_delta(se: float, independent: int) -> float:
    """The true difference shown with 80 % power by a score whose difference has standard error `se`, from
    `independent` questions or clusters.

    se 0 (nothing changed) does not mean that everything would be seen: the share of changed answers is then
    taken at its 95 % upper bound, 3 / independent (rule of three).
    """
    if se == 0:
        # Var(mean d) = (share - delta^2) / n for one binary answer each, solved for delta.
        share = min(1.0, 3 / independent)
        return math.sqrt(POWER_FACTOR * share / (independent + POWER_FACTOR))
    return math.sqrt(POWER_FACTOR) * se


def seen(estimate: Estimate) -> float:
    """The true difference that 80 % of such studies would show: the standard error by Student's t,
    two-sided."""
    if not estimate.se >= 0 or estimate.df <= 0:
        return math.nan
    return (
        float(special.stdtrit(estimate.df, 1 - ALPHA / 2) + special.stdtrit(estimate.df, 0.8)) * estimate.se
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values, in the order given; nan stays nan and does not count as a claim."""
    # The smallest p has to survive all claims, the next one all others, and so on.
    p = np.array(p_values, dtype=np.float64)
    # NumPy sorts nan last, so the claims that count come first.
    order = np.argsort(p, kind="stable")
    left = np.sum(~np.isnan(p)) - np.arange(len(p))
    p[order] = np.minimum(np.maximum.accumulate(left * p[order]), 1.0)
    return p.tolist()


# several seeds


def seed_estimate(base: ArrayLike, treated: ArrayLike) -> Estimate:
    """Difference of two arms from the mean score of each seed (base and treated: one number per seed).

    One base run is a fixed starting point: only the treated seeds vary.
    """
    a, b = np.asarray(base), np.asarray(treated)
    # Welch needs a scatter on both sides; one base run has none.
    if len(a) == 1 or len(b) == 1:
        return mean_estimate(b - a)
    one, other = mean_estimate(a), mean_estimate(b)
    return combined(other.value - one.value, one, other)


def _cluster_sums(x: Array, clusters: Sequence[Any]) -> Array:
    # Labels may be texts; only which of them are equal matters.
    codes = np.unique(np.asarray(clusters), return_inverse=True)[1]
    return np.bincount(codes, weights=x).astype(np.float64)
