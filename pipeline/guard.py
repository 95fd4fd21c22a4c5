"""The guard before the optimizer step: what to do with a loss or gradient norm that is not finite or spikes.

A step is bad when its loss or its gradient norm is not finite, or when its loss exceeds mean + SIGMA *
deviation over the last WINDOW good steps (only upwards: a sudden improvement is no fault). Policies:

    stop      end the run before the update
    skip      drop the update, go on with the next batch
    rollback  go back to the last checkpoint; the caller keeps the data cursor, so that the bad batches are
              passed over

Whatever the policy, more than MAX_SKIPS bad steps among the last WINDOW steps stop the run, and so does a
rollback beyond MAX_ROLLBACKS. The decision is a maximum over ranks, so all ranks act alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WINDOW, SIGMA = 128, 8.0
MAX_SKIPS, MAX_ROLLBACKS = 10, 3
# Before this many good steps a mean says little; only non-finite values are bad.
MIN_HISTORY = 16
# The deviation counts at least this share of the mean: a very steady run must not stop over a ripple.
DEVIATION_FLOOR = 0.02
ACTIONS = ("go", "skip", "rollback", "stop")


@dataclass(frozen=True)
class Verdict:
    """What to do with this step (one of ACTIONS), and why, in words for the log ("" when all is well)."""

    action: str
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.action == "go"


class Guard:
    """Watches loss and gradient norm.

    policy: stop, skip or rollback. agree: maximum over ranks of an integer (`Runtime.agree`); the identity
    with one process.
    """

    def __init__(self, policy: str = "skip", agree: Callable[[int], int] = int) -> None:
        self.policy, self.agree = policy, agree
        self.rollbacks = 0
        self.recent_bad: deque[bool] = deque(maxlen=WINDOW)
        self.new_stage()

    def new_stage(self) -> None:
        """Forget the good values: another mixture, or older weights, have another loss. Counters stay."""
        self.history: deque[float] = deque(maxlen=WINDOW)

    def check(self, loss: float, grad_norm: float, *, can_roll_back: bool = True) -> Verdict:
        """Judge one step before its update. Every rank calls it once a step.

        can_roll_back: whether a checkpoint exists; without one, rollback means skip.
        """
        # Every rank calls it in every step, bad or not: a collective must not depend on a value. And a fault
        # that one rank sees is one of all: whoever decides alone would hang the others.
        reason = self._fault(loss, grad_norm)
        bad = bool(self.agree(int(reason != "")))
        self.recent_bad.append(bad)
        if not bad:
            self.history.append(loss)
            return Verdict("go")

        # What the policy makes of it, the strictest choice of all ranks.
        action = self.policy
        if action == "rollback" and not can_roll_back:
            action = "skip"
        too_often = action == "rollback" and self.rollbacks >= MAX_ROLLBACKS
        if sum(self.recent_bad) > MAX_SKIPS or too_often:
            action = "stop"
        action = ACTIONS[self.agree(ACTIONS.index(action))]
        self.rollbacks += action == "rollback"
        reason = reason or "another rank saw a bad step"
        if action == "stop" and self.policy != "stop":
            reason += f" (bad steps lately: {sum(self.recent_bad)}, rollbacks: {self.rollbacks})"
        return Verdict(action, reason)

    def _fault(self, loss: float, grad_norm: float) -> str:
        # A finite norm is no danger whatever its size: gradients are clipped, and a jump in learning raises
        # it for many steps, in which skipping would never end.
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                return f"{name} is {value}"
        history = self.history
        if len(history) < MIN_HISTORY:
            return ""
        mean = math.fsum(history) / len(history)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in history) / len(history))
        limit = mean + SIGMA * max(deviation, DEVIATION_FLOOR * abs(mean))
        if loss <= limit:
            return ""
        return f"loss {loss:.4g} is above {limit:.4g} (mean + {SIGMA:g} deviations)"

    def state_dict(self) -> dict[str, Any]:
        lists = {"history": list(self.history), "recent_bad": list(self.recent_bad)}
        return lists | {"rollbacks": self.rollbacks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = deque(state["history"], WINDOW)
        self.recent_bad = deque(state["recent_bad"], WINDOW)
        self.rollbacks = state["rollbacks"]
