"""Statistics of arms that share starts and problems: differences with a hierarchical bootstrap, Holm over a
family.

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

Sources: Owen 2007 (Annals of Applied Statistics 1); Searle, Casella, McCulloch 1992 chapter 4; Holm 1979.
Legend: P starts, R runs, I problems, B draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from earlyfusion.eval.stats import Estimate, holm, interval

Array = NDArray[np.float64]
DRAWS = 2000
ALPHA = 0.05


@dataclass(frozen=True)
class Delta:
    """A difference of two arms: t interval of `estimate`, and the quantiles of the hierarchical bootstrap."""

    estimate: Estimate
    boot_low: float
    boot_high: float

    @property
    def clear(self) -> bool:
        """Whether both intervals exclude 0."""
        return self.estimate.excludes_zero and (self.boot_low > 0 or self.boot_high < 0)


def compare_arms(
    base: Sequence[Array], treated: Sequence[Array], *, draws: int = DRAWS, seed: int = 0
) -> Delta:
    """Delta of two arms with its uncertainty. base, treated: for every start values [R, I]; R may differ, I
    may not (I = 1 for what is no mean over problems, such as a calibration error).

    Raises ValueError when the arms do not have the same starts and problems.
    """
    starts = len(base)
    sizes = {part.shape[1] for part in (*base, *treated)}
    if not starts or starts != len(treated) or len(sizes) != 1:
        raise ValueError(
            f"{starts} and {len(treated)} starts with {sorted(sizes)} problems: both arms need the same"
        )
    cells_PI = np.stack([b.mean(0) - a.mean(0) for a, b in zip(base, treated)])
    estimate = crossed_mean(cells_PI)
    if starts < 2:
        return Delta(estimate, math.nan, math.nan)
    low, high = np.quantile(bootstrap_means(base, treated, draws, seed), [ALPHA / 2, 1 - ALPHA / 2])
    return Delta(estimate, float(low), float(high))


def crossed_mean(cells_PI: Array) -> Estimate:
    """Mean of a table whose rows and columns are both sampled; nan where there is one row."""
    starts, items = cells_PI.shape
    value = float(cells_PI.mean())
    if starts < 2:
        return interval(value, math.nan, 0, starts * items)
    by_start_P = cells_PI.mean(1)
    of_starts = float(by_start_P.var(ddof=1)) / starts  # = MS_starts / (P I), and so on
    if items == 1:
        return interval(value, _scatter(of_starts), starts - 1, starts)
    by_item_I = cells_PI.mean(0)
    of_items = float(by_item_I.var(ddof=1)) / items
    rest_PI = cells_PI - by_start_P[:, None] - by_item_I[None] + value
    of_rest = float((rest_PI**2).sum()) / ((starts - 1) * (items - 1) * starts * items)
    variance = max(of_starts + of_items - of_rest, of_starts, of_items)
    spread = (
        of_starts**2 / (starts - 1) + of_items**2 / (items - 1) + of_rest**2 / ((starts - 1) * (items - 1))
    )
    df = variance**2 / spread if spread > 0 else starts - 1
    return interval(value, _scatter(variance), min(df, starts * items - 1), starts * items)


def _scatter(variance: float) -> float:
    """Its root; what rounding leaves of no scatter is none."""
    return math.sqrt(variance) if variance > 1e-24 else 0.0


def bootstrap_means(base: Sequence[Array], treated: Sequence[Array], draws: int, seed: int) -> Array:
    """The difference in every draw [B] of the hierarchical bootstrap."""
    starts, items = len(base), base[0].shape[1]
    weights_BI = _item_weights(items, draws, seed)
    rng = np.random.default_rng([seed, 1])
    per_start_PB = np.stack(
        [_arm_means(b, weights_BI, rng) - _arm_means(a, weights_BI, rng) for a, b in zip(base, treated)]
    )
    chosen_BP = rng.multinomial(starts, np.full(starts, 1 / starts), size=draws) / starts
    return (chosen_BP.T * per_start_PB).sum(0)


@lru_cache(maxsize=8)
def _item_weights(items: int, draws: int, seed: int) -> Array:
    """How much every problem counts in every draw, [B, I]: the same draws for all comparisons."""
    return np.random.default_rng(seed).multinomial(items, np.full(items, 1 / items), size=draws) / items


def _arm_means(values_RI: Array, weights_BI: Array, rng: np.random.Generator) -> Array:
    """Mean of every draw [B]: problems by the weights, runs drawn anew."""
    runs = values_RI.shape[0]
    by_run_RB = values_RI @ weights_BI.T
    chosen_BR = rng.multinomial(runs, np.full(runs, 1 / runs), size=weights_BI.shape[0]) / runs
    return (chosen_BR.T * by_run_RB).sum(0)


def seed_deltas(base: Sequence[Array], treated: Sequence[Array]) -> list[list[float]]:
    """Start -> run -> mean difference to the start's base (mean over its runs)."""
    return [[float(run.mean() - a.mean()) for run in b] for a, b in zip(base, treated)]


def adjusted(deltas: Mapping[tuple[str, str], Delta]) -> dict[tuple[str, str], float]:
    """Holm's p values of a family of claims; nan stays nan."""
    keys = list(deltas)
    return dict(zip(keys, holm([deltas[key].estimate.p for key in keys])))


def word(delta: Delta, p_holm: float) -> str:
    """ "gain" or "loss" only where both intervals exclude 0 and the adjusted p value agrees; else what could
    not be shown."""
    if math.isnan(delta.estimate.se):
        return "one start: nothing can be said"
    if not delta.clear or not p_holm <= ALPHA:
        return "no difference shown"
    return "gain" if delta.estimate.value > 0 else "loss"
