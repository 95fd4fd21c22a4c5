"""Normal, Student t and binomial tails in plain Python: what the delta statistics need, without SciPy.

Sources: Abramowitz and Stegun 26.5 and 26.7 (incomplete beta, Student t); the continued fraction of the
incomplete beta function is evaluated by the modified Lentz method. Relative errors stay below 1e-9 (tests
compare with SciPy).
"""

from __future__ import annotations

import math
from statistics import NormalDist

_NORMAL = NormalDist()
_TINY = 1e-300


def normal_quantile(p: float) -> float:
    """z with P(Z <= z) = p, 0 < p < 1."""
    return _NORMAL.inv_cdf(p)


def normal_sf(z: float) -> float:
    """P(Z > z), exact far into the tail."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def beta_cdf(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function I_x(a, b); 0 <= x <= 1, a and b positive."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _beta_fraction(x, a, b) / a
    return 1.0 - math.exp(log_front) * _beta_fraction(1 - x, b, a) / b


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of I_x(a, b), quick for x < (a + 1) / (a + b + 2)."""
    c, d = 1.0, 1.0 / _away(1.0 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for step in (even, odd):
            d = 1.0 / _away(1.0 + step * d)
            c = _away(1.0 + step / c)
            value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return value


def _away(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def t_two_sided(t: float, df: float) -> float:
    """P(|T| > |t|) of Student's t with `df` degrees of freedom; df = infinity is the normal distribution."""
    if math.isnan(t) or df <= 0:
        return math.nan
    if math.isinf(t):
        return 0.0
    if math.isinf(df):
        return 2 * normal_sf(abs(t))
    return beta_cdf(df / (df + t * t), df / 2, 0.5)


def t_quantile(p: float, df: float) -> float:
    """t with P(T <= t) = p, for 0 < p < 1; df = infinity is the normal distribution. nan for df <= 0."""
    if df <= 0:
        return math.nan
    if math.isinf(df):
        return normal_quantile(p)
    if p == 0.5:
        return 0.0
    tail = 2 * min(p, 1 - p)
    low, high = 0.0, 1.0
    while t_two_sided(high, df) > tail:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_two_sided(middle, df) > tail else (low, middle)
    return math.copysign((low + high) / 2, p - 0.5)


def chi2_1_sf(x: float) -> float:
    """P(chi-square with one degree of freedom > x)."""
    return math.erfc(math.sqrt(max(x, 0.0) / 2))


def binomial_two_sided_half(k: int, n: int) -> float:
    """Exact two-sided p of k successes in n fair tosses: min(1, 2 P(X <= min(k, n - k))), in whole numbers.

    Raises ValueError unless 0 <= k <= n.
    """
    if not 0 <= k <= n:
        raise ValueError(f"k={k} successes in n={n} tosses: expected 0 <= k <= n")
    ways, total = 1, 0
    for i in range(min(k, n - k) + 1):
        total += ways
        ways = ways * (n - i) // (i + 1)
    numerator, denominator = 2 * total, 1 << n
    return 1.0 if numerator >= denominator else numerator / denominator
