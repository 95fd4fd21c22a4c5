"""From rewards to advantages: how much better an answer is than the others to the same prompt.

No value network: a step that is wrong and later repaired should not be punished (Kimi k1.5 2.3.2).

Legend: N responses, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from earlyfusion.rl.objectives.losses import ObjectiveConfig
from earlyfusion.rl.objectives.sequences import group

STD_EPS = 1e-6  # rewards differ by far more, or not at all: groups of equal rewards are set to 0 before


def advantages(config: ObjectiveConfig, rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """A_N = r - baseline of its group, over the group's standard deviation if the objective says so.

    Baselines: mean (all answers), leave_one_out (the others), log_mean_exp (tau log mean exp(r / tau), the
    exact tau log Z of k1.5; it tends to the mean for large tau), none. The deviation is that of a sample (n -
    1). A group of equal rewards, and so a group of one, has advantage exactly 0, except with baseline "none".
    """
    groups = group(groups_N)
    count_N = groups.spread(groups.sums(torch.ones_like(rewards_N)))
    mean_N = groups.spread(groups.means(rewards_N))
    if config.baseline == "none":
        centred_N = rewards_N
    elif config.baseline == "mean":
        centred_N = rewards_N - mean_N
    elif config.baseline == "leave_one_out":
        others_N = groups.spread(groups.sums(rewards_N)) - rewards_N
        centred_N = rewards_N - others_N / (count_N - 1).clamp(min=1)
    else:
        # The largest is taken off before the exponential, so that it cannot overflow.
        top_N = groups.spread(groups.extreme(rewards_N, "amax"))
        mean_G = groups.means(((rewards_N - top_N) / config.tau).exp())
        centred_N = rewards_N - (top_N + config.tau * groups.spread(mean_G.log()))

    # A group whose answers all earn the same says nothing about any of them, whatever their mean rounds to.
    if config.baseline != "none":
        centred_N = centred_N.masked_fill(~informative(rewards_N, groups_N), 0.0)
    if not config.divide_by_std:
        return centred_N
    squares_N = groups.spread(groups.sums((rewards_N - mean_N).square()))
    return centred_N / ((squares_N / (count_N - 1).clamp(min=1)).sqrt() + STD_EPS)


def informative(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """bool [N]: the response belongs to a group whose rewards differ. Equal rewards teach nothing; DAPO's
    dynamic sampling leaves such groups out and draws other prompts in their place."""
    groups = group(groups_N)
    return groups.spread(groups.extreme(rewards_N, "amax") > groups.extreme(rewards_N, "amin"))
