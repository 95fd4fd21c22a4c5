"""Long to short (k1.5 2.4): carry a long-thinking policy's skill over to short answers.

Three of its four ways are here: weights averaged with those of a short model, the shortest right answer of n
for fine-tuning, and preference pairs with their loss (DPO). The fourth is a second phase of RL with `length`
rewards and a lower token limit.

Legend: N responses, B pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.data.errors import DataError
from earlyfusion.rl.objectives.sequences import wide

LONGER = 1.5
"""k1.5: a right answer this many times as long as the shortest one counts as rejected."""


def average_weights(
    states: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None = None
) -> dict[str, Tensor]:
    """Weighted mean of state dicts, for the models of one architecture (long and short: plain mean).

    weights: shares, made to sum to 1; equal if None. Sums run in float32 (float64 for float64), the result
    has the first one's dtypes. Integer and bool tensors must be the same in all. Raises DataError naming the
    first tensor that differs in name, shape or integer value.
    """
    shares = [1.0] * len(states) if weights is None else list(weights)
    if not states or len(shares) != len(states) or sum(shares) <= 0 or min(shares) < 0:
        raise DataError(
            f"weights {shares} for {len(states)} state dicts; give one share of at least 0 for each"
        )
    first, whole = states[0], sum(shares)
    for index, state in enumerate(states[1:], start=1):
        if state.keys() != first.keys():
            odd = sorted(state.keys() ^ first.keys())[0]
            raise DataError(
                f"state dict {index} and the first do not hold the same tensors; {odd!r} is in one only"
            )
    averaged: dict[str, Tensor] = {}
    for name, tensor in first.items():
        others = [state[name] for state in states]
        if any(other.shape != tensor.shape for other in others):
            raise DataError(
                f"{name}: shapes {[tuple(other.shape) for other in others]} differ; same architecture needed"
            )
        if not tensor.is_floating_point():
            if any(not torch.equal(other, tensor) for other in others):
                raise DataError(f"{name}: {tensor.dtype} tensors differ and cannot be averaged")
            averaged[name] = tensor.clone()
            continue
        total = torch.zeros_like(wide(tensor))
        for share, other in zip(shares, others):
            total.add_(wide(other).to(total.device), alpha=share / whole)
        averaged[name] = total.to(tensor.dtype)
    return averaged


def shortest_correct(lengths_N: Tensor, correct_N: Tensor, groups_N: Tensor) -> dict[int, int]:
    """Group id -> index of its shortest right answer (the first of equals); groups without one are left
    out."""
    best: dict[int, int] = {}
    lengths = lengths_N.tolist()
    for index, (prompt, right) in enumerate(zip(groups_N.tolist(), correct_N.bool().tolist())):
        if right and (prompt not in best or lengths[index] < lengths[best[prompt]]):
            best[prompt] = index
    return best


def preference_pairs(
    lengths_N: Tensor, correct_N: Tensor, groups_N: Tensor, longer: float = LONGER
) -> list[tuple[int, int]]:
    """(chosen, rejected) indices: the shortest right answer of a group against each longer wrong one, and
    each right one of at least `longer` times its length. A wrong answer that is not longer makes no pair: it
    would teach length the wrong way round."""
    if longer <= 1:
        raise DataError(
            f"longer={longer}: a rejected right answer must be longer than the chosen one; give more than 1"
        )
    best = shortest_correct(lengths_N, correct_N, groups_N)
    lengths, pairs = lengths_N.tolist(), []
    for index, (prompt, right) in enumerate(zip(groups_N.tolist(), correct_N.bool().tolist())):
        chosen = best.get(prompt)
        if chosen is None or chosen == index:
            continue
        needed = longer * lengths[chosen] if right else 0
        if lengths[index] > lengths[chosen] and lengths[index] >= needed:
            pairs.append((chosen, index))
    return pairs


class PreferenceLoss(NamedTuple):
    """loss: 0-d. margins_B: beta * (log ratio of chosen - of rejected), constants; accuracy: share above 0,
    0-d."""

    loss: Tensor
    margins_B: Tensor
    accuracy: Tensor


def dpo_loss(
    chosen_B: Tensor,
    rejected_B: Tensor,
    ref_chosen_B: Tensor,
    ref_rejected_B: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PreferenceLoss:
    """Mean of -(1 - e) log sigmoid(m) - e log sigmoid(-m), m = beta [(chosen - ref_chosen) - (rejected -
    ref_rejected)].

    All [B], log-probabilities of whole answers (`sequences.sequence_sums`) under policy and reference. e:
    share of pairs believed to be labelled the wrong way round. Derivative by chosen (e = 0): -beta
    sigmoid(-m) / B. Source: 2305.18290 eq. 7. No pairs: loss 0.
    """
    if beta <= 0 or not 0 <= label_smoothing < 0.5:
        raise DataError(
            f"beta={beta}, label_smoothing={label_smoothing}: need beta above 0 and smoothing in [0, 0.5)"
        )
    shapes = {tuple(t.shape) for t in (chosen_B, rejected_B, ref_chosen_B, ref_rejected_B)}
    if len(shapes) != 1:
        raise DataError(
            f"shapes {sorted(shapes)} differ; give one log-probability of each kind for every pair"
        )
    reference_B = wide(ref_chosen_B).detach() - wide(ref_rejected_B).detach()
    margins_B = beta * (wide(chosen_B) - wide(rejected_B) - reference_B)
    losses_B = -(1 - label_smoothing) * F.logsigmoid(margins_B) - label_smoothing * F.logsigmoid(-margins_B)
    count = max(1, margins_B.numel())
    fixed_B = margins_B.detach()
    return PreferenceLoss(losses_B.sum() / count, fixed_B, (fixed_B > 0).sum() / count)
