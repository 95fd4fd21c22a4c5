"""What a comparison can see, several seeds, several claims: McNemar, power, seed intervals, Holm.

    McNemar     n01 questions won, n10 lost: exact binomial of n01 in n01 + n10 tosses; chi-square
                (|n01 - n10| - 1)^2 / (n01 + n10)
    power       Var(mean d) = (D - delta^2) / n for one binary answer each, D = (n01 + n10) / n the
                discordance, so n = (z_a + z_b)^2 (D - delta^2) / delta^2 and, solved for delta, sqrt((z_a +
                z_b)^2 D / (n + (z_a + z_b)^2))
    seeds       differences of seed means: Student t (paired or one fixed base), Welch (two sets of seeds)
    Holm        step-down adjusted p values (Holm 1979)

Source of the power formula: Miller 2024 (arXiv 2411.00640) section 5, for paired binary answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from earlyfusion.eval.statistics.distributions import binomial_two_sided_half, chi2_1_sf, normal_quantile
from earlyfusion.eval.statistics.paired import Array, Estimate, interval, mean_estimate


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
    a, b = np.asarray(base, dtype=np.float64), np.asarray(treated, dtype=np.float64)
    if not (np.isin(a, (0.0, 1.0)).all() and np.isin(b, (0.0, 1.0)).all()):
        return None
    won, lost = int(np.sum(b > a)), int(np.sum(b < a))
    chi2 = (abs(won - lost) - 1) ** 2 / (won + lost) if won + lost else 0.0
    return McNemar(won, lost, len(a), binomial_two_sided_half(won, won + lost), chi2, chi2_1_sf(chi2))


def power_factor(power: float = 0.8, alpha: float = 0.05) -> float:
    """(z_{1 - alpha / 2} + z_power)^2; 7.849 for 80 % power at 5 % two-sided."""
    return (normal_quantile(1 - alpha / 2) + normal_quantile(power)) ** 2


def smallest_delta(n: int, discordance: float, *, power: float = 0.8, alpha: float = 0.05) -> float:
    """The true difference of binary scores that n questions at this discordance show with this power."""
    factor = power_factor(power, alpha)
    return math.sqrt(factor * discordance / (n + factor))


def smallest_delta_of_se(se: float, independent: int, *, power: float = 0.8, alpha: float = 0.05) -> float:
    """The same for any score whose difference has standard error `se`, from `independent` questions or
    clusters.

    se 0 (nothing changed) does not mean that everything would be seen: the discordance is then taken at its
    95 % upper bound, 3 / independent (rule of three).
    """
    if se == 0:
        return smallest_delta(independent, min(1.0, 3 / independent), power=power, alpha=alpha)
    return math.sqrt(power_factor(power, alpha)) * se


def sampling_variance(samples: Sequence[ArrayLike]) -> float:
    """Variance of the mean over questions that comes from sampling k answers each: mean of s_i^2 / k_i, over
    n.

    nan when no question was asked twice.
    """
    parts = [float(np.var(x, ddof=1)) / len(x) for x in map(np.asarray, samples) if len(x) > 1]
    return float(np.mean(parts)) / len(samples) if len(parts) == len(samples) and parts else math.nan


def welch(base: ArrayLike, treated: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Difference of the means of two independent sets of seeds; Welch-Satterthwaite degrees of freedom."""
    a, b = np.asarray(base, dtype=np.float64), np.asarray(treated, dtype=np.float64)
    value, n = float(b.mean() - a.mean()), len(a) + len(b)
    if min(len(a), len(b)) < 2:
        return interval(value, math.nan, 0, n, confidence)
    va, vb = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    df = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1)) if va + vb > 0 else n - 2
    return interval(value, math.sqrt(va + vb), float(df), n, confidence)


def seed_estimate(
    base: ArrayLike, treated: ArrayLike, *, paired: bool = False, confidence: float = 0.95
) -> Estimate:
    """Difference of two arms from the mean score of each seed (base and treated: one number per seed).

    paired: run i of both arms began from the same seed. One base run is a fixed starting point: only the
    treated seeds vary. Raises ValueError for paired arms of different length.
    """
    a, b = np.asarray(base, dtype=np.float64), np.asarray(treated, dtype=np.float64)
    if paired:
        if len(a) != len(b):
            raise ValueError(
                f"paired seeds: {len(a)} base runs and {len(b)} treated runs; give equally many, in order"
            )
        return mean_estimate(b - a, confidence)
    if len(a) == 1 or len(b) == 1:
        varying = b - a[0] if len(a) == 1 else b[0] - a
        return mean_estimate(varying, confidence)
    return welch(a, b, confidence)


def questions_and_seeds(questions: Estimate, seeds: Estimate, confidence: float = 0.95) -> Estimate:
    """The difference for new questions AND new seeds: variances add (the shared residual is counted twice:
    careful).

    Degrees of freedom after Satterthwaite. nan when either part is.
    """
    vq, vs = questions.se**2, seeds.se**2
    if not vq + vs > 0:
        return interval(questions.value, math.nan, 0, questions.n, confidence)
    df = (vq + vs) ** 2 / (vq**2 / questions.df + vs**2 / seeds.df)
    return interval(questions.value, math.sqrt(vq + vs), df, questions.n, confidence)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values, in the order given; nan stays nan and does not count as a claim."""
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    adjusted, running = [math.nan] * len(p_values), 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def power_curve(discordance: float, ns: Sequence[int]) -> Array:
    """`smallest_delta` at every n, for drawing."""
    return np.array([smallest_delta(n, discordance) for n in ns])
