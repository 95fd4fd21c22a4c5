"""Statistics of arms that share starts and problems: differences with a hierarchical bootstrap.

    x[p, r, i]   the value of problem i, of run r from start p; the start itself is an arm with one run (r =
                 0)
    c[p, i]      mean over r of treated[p, r, i] - mean over r of base[p, r, i];  delta = mean of c

Starts and problems are crossed (all models answer the same problems) and both are samples of what could have
been, so
    Var(delta) = (MS_starts + MS_problems - MS_rest) / (P I)          two-way random effects, unbiased
with Satterthwaite's degrees of freedom: about P - 1 when starts disagree, more when problems do. The scatter
of the runs is in MS_starts. `low`, `high` and p are Student's t.

Beside it stands the hierarchical bootstrap: starts with replacement, runs with replacement inside each,
problems with replacement, pairs kept together; quantiles of the draws. It counts the scatter of runs and
single answers more than once (Owen 2007, "The pigeonhole bootstrap") but is too narrow in the tails for a
handful of starts (5 starts: t is 2.78, not 1.96); so a claim needs both intervals, and Holm's p value.

With one start there is no telling what another start would do: all intervals are nan, and nothing may be
claimed.

Sources: Owen 2007 (Annals of Applied Statistics 1); Searle, Casella, McCulloch 1992 chapter 4.
Legend: P starts, R runs, I problems, B draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from earlyfusion.eval.stats import ALPHA, Estimate, interval

Array = NDArray[np.float64]
DRAWS = 2000


def compare_arms(
    base: Sequence[Array], treated: Sequence[Array], *, draws: int = DRAWS, seed: int = 0
) -> dict[str, float]:
    """Delta of two arms with its uncertainty: the t interval's `value`, `se`, `low`, `high`, `p`, `df` and
    `n`, and `boot_low`, `boot_high`. base, treated: for every start values [R, I]; R may differ, I may not (I
    = 1 for what is no mean over problems, such as a calibration error).

    Raises ValueError when the arms do not have the same starts and problems.
    """
    cells_PI = np.stack([b.mean(0) - a.mean(0) for a, b in zip(base, treated, strict=True)])
    # One start has no spread: nothing may be claimed.
    low = high = math.nan
    if len(base) > 1:
        low, high = np.quantile(bootstrap_means(base, treated, draws, seed), [ALPHA / 2, 1 - ALPHA / 2])
    return {**crossed_mean(cells_PI).to_dict(), "boot_low": float(low), "boot_high": float(high)}


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


def bootstrap_means(base: Sequence[Array], treated: Sequence[Array], draws: int, seed: int) -> Array:
    """The difference in every draw [B] of the hierarchical bootstrap."""
    rng, starts, items = np.random.default_rng(seed), len(base), base[0].shape[1]

    def chosen(count: int) -> Array:
        """How much each of `count` counts in every draw, [B, count]."""
        return rng.multinomial(count, np.full(count, 1 / count), size=draws) / count

    # Problems are the same in all models: one choice a draw for everybody.
    problems_BI, means = chosen(items), []
    for a_RI, b_RI in zip(base, treated):
        both = []
        for values_RI in (a_RI, b_RI):
            both.append((chosen(len(values_RI)) * (problems_BI @ values_RI.T)).sum(1))
        means.append(both[1] - both[0])
    return (chosen(starts) * np.stack(means, 1)).sum(1)


def word(row: Mapping[str, Any], p_holm: float) -> str:
    """ "gain" or "loss" only where both intervals exclude 0 and the adjusted p value agrees; else what could
    not be shown."""
    if math.isnan(row["se"]):
        return "one start: nothing can be said"
    # An interval of no width means that nothing varied, not that all is known.
    above = row["se"] > 0 and min(row["low"], row["boot_low"]) > 0
    below = row["se"] > 0 and max(row["high"], row["boot_high"]) < 0
    if not p_holm <= ALPHA or not (above or below):
        return "no difference shown"
    return "gain" if above else "loss"
