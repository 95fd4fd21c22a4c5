"""From rewards to advantages: how much better an answer is than the others to the same prompt.

No value network: a step that is wrong and later repaired should not be punished (Kimi k1.5 2.3.2).

Legend: N responses, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from earlyfusion.data.errors import DataError
from earlyfusion.rl.objectives.losses import ObjectiveConfig
from earlyfusion.rl.objectives.sequences import Groups, group, wide

STD_EPS = 1e-6  # rewards differ by far more, or not at all: groups of equal rewards are set to 0 before


def advantages(config: ObjectiveConfig, rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """A_N = r - baseline of its group, over the group's standard deviation if the objective says so.

    Baselines: mean (all answers), leave_one_out (the others), log_mean_exp (tau log mean exp(r / tau), the
    exact tau log Z of k1.5; it tends to the mean for large tau), none. The deviation is that of a sample (n -
    1). A group of equal rewards, and so a group of one, has advantage exactly 0, except with baseline "none".
    rewards_N: any float dtype; the result is float32 or float64. Raises DataError for rewards that are not
    finite.
    """
    rewards_N = wide(rewards_N.detach())
    if not bool(torch.isfinite(rewards_N).all()):
        bad = (~torch.isfinite(rewards_N)).nonzero().flatten().tolist()
        raise DataError(f"rewards of responses {bad[:5]} are not finite; score a failed check as 0")
    # A group whose answers all earn the same says nothing about any of them.
    groups = group(groups_N, rewards_N)
    centred_N = rewards_N - _baseline(config, rewards_N, groups)
    if config.baseline != "none":
        centred_N = centred_N.masked_fill(~groups.spread(_varied(rewards_N, groups)), 0.0)
    if not config.divide_by_std:
        return centred_N
    return centred_N / (groups.spread(_deviation(rewards_N, groups)) + STD_EPS)


def _baseline(config: ObjectiveConfig, rewards_N: Tensor, groups: Groups) -> Tensor:
    counts_G = groups.counts().to(rewards_N)
    if config.baseline == "none":
        return torch.zeros_like(rewards_N)
    if config.baseline == "leave_one_out":
        others_N = groups.spread(groups.sums(rewards_N)) - rewards_N
        return others_N / (groups.spread(counts_G) - 1).clamp(min=1)
    if config.baseline == "log_mean_exp":
        # Taken off before the exponential, so that it cannot overflow.
        top_G = groups.extreme(rewards_N, "amax")
        mean_G = groups.sums(((rewards_N - groups.spread(top_G)) / config.tau).exp()) / counts_G
        return groups.spread(top_G + config.tau * mean_G.log())
    return groups.spread(groups.sums(rewards_N) / counts_G)


def _deviation(rewards_N: Tensor, groups: Groups) -> Tensor:
    counts_G = groups.counts().to(rewards_N)
    centred_N = rewards_N - groups.spread(groups.sums(rewards_N) / counts_G)
    return (groups.sums(centred_N.square()) / (counts_G - 1).clamp(min=1)).sqrt()


def _varied(rewards_N: Tensor, groups: Groups) -> Tensor:
    return groups.extreme(rewards_N, "amax") > groups.extreme(rewards_N, "amin")


def informative(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """bool [N]: the response belongs to a group whose rewards differ. Equal rewards teach nothing; DAPO's
    dynamic sampling leaves such groups out and draws other prompts in their place."""
    groups = group(groups_N, rewards_N)
    return groups.spread(_varied(rewards_N, groups))
