"""Statistics of a difference between two models asked the same questions.

    d_i = treated_i - base_i          one number per question i (a score, or its mean over k samples and
                                      seeds)
    SE paired     sd(d) / sqrt(n)
    SE clustered  sqrt(G / (G - 1) * sum over clusters of (sum of residuals in the cluster)^2) / n, Student t
                  with G - 1 degrees of freedom (CR1; what statsmodels gives for OLS on a constant with
                  cov_type "cluster")
    bootstrap     clusters drawn with replacement, pairs kept together, inside each stratum; percentile
                  interval
    sign flip     the sign of every cluster's sum of d drawn anew: the null hypothesis "base and treated may
                  be swapped"; all 2^G assignments for G <= 16, otherwise `draws` random ones with p = (1 +
                  hits) / (1 + draws)

Source: Miller 2024, "Adding Error Bars to Evals" (arXiv 2411.00640), and Cameron and Miller 2015 for CR1.
Legend: n questions, G clusters, S seeds.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from earlyfusion.eval.statistics.distributions import t_quantile, t_two_sided

Array = NDArray[np.float64]
EXACT_CLUSTERS = 16  # sign assignments are enumerated up to 2^16
_CHUNK = 2**22  # numbers of one block of resampling weights


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


def interval(value: float, se: float, df: float, n: int, confidence: float = 0.95) -> Estimate:
    """Student t interval and p around a value with its standard error."""
    if not se >= 0 or df <= 0:
        return Estimate(value, math.nan, math.nan, math.nan, math.nan, df, n)
    half = t_quantile(0.5 + confidence / 2, df) * se
    if se > 0:
        p = t_two_sided(value / se, df)
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
    `mean_estimate`."""
    x = _vector(values)
    codes, count = codes_of(clusters)
    if len(codes) != len(x):
        raise ValueError(f"{len(x)} values with {len(codes)} cluster labels; give one label for every value")
    sums = np.bincount(codes, weights=x - x.mean(), minlength=count)
    se = math.sqrt(count / (count - 1) * float(sums @ sums)) / len(x) if count > 1 else math.nan
    return interval(float(x.mean()), se, count - 1, len(x), confidence)


def codes_of(labels: Sequence[Hashable]) -> tuple[NDArray[np.int64], int]:
    """(number of each label in order of first appearance, how many labels there are)."""
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(label, len(seen)) for label in labels], dtype=np.int64), len(seen)


def unpaired_se(base: ArrayLike, treated: ArrayLike) -> float:
    """What the SE of the difference would be, had the questions been different ones."""
    a, b = _vector(base), _vector(treated)
    if min(len(a), len(b)) < 2:
        return math.nan
    return math.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))


def correlation(base: ArrayLike, treated: ArrayLike) -> float:
    """Pearson correlation of the two models' scores over questions; nan when one does not vary."""
    a, b = _vector(base), _vector(treated)
    if len(a) < 2 or a.std() == 0 or b.std() == 0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


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
    rng = np.random.default_rng(seed)
    total, size = np.zeros(draws), np.zeros(draws)
    for stratum in range(groups.max() + 1):
        members = np.flatnonzero(groups == stratum)
        share = np.full(len(members), 1 / len(members))
        block = max(1, _CHUNK // len(members))
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
    sums, _, _ = _cluster_sums(_vector(values), clusters, None)
    sums = sums[sums != 0]
    if len(sums) == 0:
        return 1.0
    observed = abs(float(sums.sum())) * (1 - 1e-12)  # equal sums differ in the last bits by order of addition
    if len(sums) <= EXACT_CLUSTERS:
        bits = np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums)) & 1
        return float(np.mean(np.abs((1 - 2 * bits) @ sums) >= observed))
    rng = np.random.default_rng(seed)
    hits, block = 0, max(1, _CHUNK // len(sums))
    for start in range(0, draws, block):
        signs = rng.integers(0, 2, size=(min(block, draws - start), len(sums)), dtype=np.int8) * 2 - 1
        hits += int(np.sum(np.abs(signs @ sums) >= observed))
    return (1 + hits) / (1 + draws)


def _cluster_sums(
    x: Array, clusters: Sequence[Hashable] | None, strata: Sequence[Hashable] | None
) -> tuple[Array, Array, NDArray[np.int64]]:
    """(sum, number of values, stratum) of every cluster; one stratum when a cluster would lie in several."""
    codes, count = codes_of(clusters if clusters is not None else range(len(x)))
    sums = np.bincount(codes, weights=x, minlength=count).astype(np.float64)
    sizes = np.bincount(codes, minlength=count).astype(np.float64)
    groups = np.zeros(count, dtype=np.int64)
    if strata is not None:
        stratum, _ = codes_of(strata)
        groups[codes] = stratum
        if np.any(groups[codes] != stratum):
            groups[:] = 0
    return sums, sizes, groups


def _vector(values: ArrayLike) -> Array:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or len(x) == 0:
        raise ValueError(f"values of shape {x.shape}: expected a list of at least one number")
    return x
