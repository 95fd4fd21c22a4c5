"""The guard before the optimizer step: what to do with a loss or gradient norm that is not finite or spikes.

A step is bad when its loss or its gradient norm is not finite, or when its loss (with `grad_norm_sigma` also
its gradient norm) exceeds mean + sigma * deviation over the last `window` good steps (only upwards: a sudden
improvement is no fault). Policies:

    stop      end the run before the update
    skip      drop the update, go on with the next batch
    rollback  go back to the last checkpoint; the caller keeps the data cursor, so that the bad batches are
              passed over

Whatever the policy, more than `max_skips` bad steps among the last `window` steps stop the run, and so does a
rollback beyond `max_rollbacks`. The decision is a maximum over ranks, so all ranks act alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Action = Literal["go", "skip", "rollback", "stop"]
ACTIONS: tuple[Action, ...] = ("go", "skip", "rollback", "stop")

# Before this many good steps (at most) a mean says little; only non-finite values are bad.
MIN_HISTORY = 16
# The deviation counts at least this share of the mean: a very steady run must not stop over a ripple.
DEVIATION_FLOOR = 0.02


@dataclass(frozen=True)
class Verdict:
    """What to do with this step, and why, in words for the log ("" when all is well)."""

    action: Action
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.action == "go"


class Guard:
    """Watches loss and gradient norm.

    Args:
        agree: maximum over ranks of an integer (`Runtime.agree`); the identity with one process.
    """

    def __init__(
        self,
        policy: Literal["stop", "skip", "rollback"] = "skip",
        window: int = 128,
        sigma: float = 8.0,
        grad_norm_sigma: float | None = None,
        max_skips: int = 10,
        max_rollbacks: int = 3,
        agree: Callable[[int], int] = lambda code: code,
    ):
        self.policy, self.window = policy, window
        self.sigmas = {"loss": sigma, "gradient norm": grad_norm_sigma}
        self.max_skips, self.max_rollbacks, self._agree = max_skips, max_rollbacks, agree
        self.bad_steps = self.rollbacks = 0
        self.recent_bad: deque[bool] = deque(maxlen=window)
        self.new_stage()

    def new_stage(self) -> None:
        """Forget the good values: another mixture, or older weights, have another loss. Counters stay."""
        self.history: dict[str, deque[float]] = {name: deque(maxlen=self.window) for name in self.sigmas}

    def check(self, loss: float, grad_norm: float, *, can_roll_back: bool = True) -> Verdict:
        """Judge one step before its update. Every rank calls it once a step.

        can_roll_back: whether a checkpoint exists; without one, rollback means skip.
        """
        # A fault that one rank sees is one of all: whoever decides alone would hang the others.
        values = {"loss": loss, "gradient norm": grad_norm}
        reason = next(filter(None, (self._fault(name, value) for name, value in values.items())), "")
        # Every rank calls it in every step, bad or not: a collective must not depend on a value.
        bad = bool(self._agree(int(bool(reason))))
        self.recent_bad.append(bad)
        if not bad:
            for name, value in values.items():
                self.history[name].append(value)
            return Verdict("go")

        # What the policy makes of it, the strictest choice of all ranks.
        self.bad_steps += 1
        action: Action = self.policy
        if action == "rollback" and not can_roll_back:
            action = "skip"
        too_often = action == "rollback" and self.rollbacks >= self.max_rollbacks
        if sum(self.recent_bad) > self.max_skips or too_often:
            action = "stop"
        action = ACTIONS[self._agree(ACTIONS.index(action))]
        self.rollbacks += action == "rollback"
        reason = reason or "another rank saw a bad step"
        if action == "stop" and self.policy != "stop":
            reason += f" (bad steps lately: {sum(self.recent_bad)}, rollbacks: {self.rollbacks})"
        return Verdict(action, reason)

    def _fault(self, name: str, value: float) -> str:
        history, sigma = self.history[name], self.sigmas[name]
        if not math.isfinite(value):
            return f"{name} is {value}"
        if sigma is None or len(history) < min(MIN_HISTORY, self.window):
            return ""
        # Only upwards: a sudden improvement is no fault.
        mean = math.fsum(history) / len(history)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in history) / len(history))
        limit = mean + sigma * max(deviation, DEVIATION_FLOOR * abs(mean))
        if value <= limit:
            return ""
        return f"{name} {value:.4g} is above {limit:.4g} (mean + {sigma:g} deviations)"

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": {name: list(values) for name, values in self.history.items()},
            "recent_bad": list(self.recent_bad),
            "bad_steps": self.bad_steps,
            "rollbacks": self.rollbacks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, values in state["history"].items():
            self.history[name] = deque(values, self.window)
        self.recent_bad = deque(state["recent_bad"], self.window)
        self.bad_steps, self.rollbacks = state["bad_steps"], state["rollbacks"]
