"""The control for sharpening: the untouched model at the temperature that gives it the treated model's
entropy.

Reinforcement learning lowers entropy, and a lower entropy alone raises p(correct) wherever the likeliest
answer is more often right than it is likely. So p(correct) of a treated model is compared with the untouched
model's at equal mean entropy (`Measured.entropy`, over the tokens of its own greedy answers). Greedy answers
do not depend on the temperature.

Source: ../shared/reference/rl.md section 5 (measuring vision-RL -> text transfer).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from earlyfusion.data.errors import DataError
from earlyfusion.rl.measure.run import Asked
from earlyfusion.rl.records import Measured

COOLEST, HOTTEST = 1 / 64, 64.0
STEPS = 40
CLOSE = 1e-4
"""Nats between the entropy reached and the one wanted."""


@dataclass(frozen=True)
class Matched:
    """The model at `temperature`, whose mean entropy is `entropy`. reached: within CLOSE of the one asked for
    (a model cannot be made less certain than uniform, nor more certain than greedy)."""

    temperature: float
    entropy: float
    reached: bool
    measured: list[Measured]

    @property
    def p_target(self) -> float:
        """Mean probability of the target at this temperature."""
        return sum(one.p_target for one in self.measured) / len(self.measured)


def match_entropy(asked: Asked, target_entropy: float) -> Matched:
    """Bisection on the logarithm of the temperature (the entropy of softmax(z / T) never falls with T).

    Raises DataError for an entropy that is negative or not finite.
    """
    if not 0 <= target_entropy < math.inf:
        raise DataError(f"target entropy {target_entropy}: expected nats, at least 0")
    low, high = math.log(COOLEST), math.log(HOTTEST)
    middle = 0.0  # temperature 1 first: an untouched model then keeps its own
    for _ in range(STEPS):
        entropy = asked.entropy(math.exp(middle))
        if abs(entropy - target_entropy) <= CLOSE:
            break
        low, high = (middle, high) if entropy < target_entropy else (low, middle)
        middle = (low + high) / 2
    measured = asked.measured(math.exp(middle))
    entropy = sum(one.entropy for one in measured) / len(measured)
    return Matched(math.exp(middle), entropy, abs(entropy - target_entropy) <= 2 * CLOSE, measured)
