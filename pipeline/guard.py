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
        self.policy, self.window, self.sigma, self.grad_norm_sigma = policy, window, sigma, grad_norm_sigma
        self.max_skips, self.max_rollbacks, self._agree = max_skips, max_rollbacks, agree
        self.loss: deque[float] = deque(maxlen=window)
        self.grad_norm: deque[float] = deque(maxlen=window)
        self.recent_bad: deque[bool] = deque(maxlen=window)
        self.bad_steps = 0
        self.rollbacks = 0

    def check(self, loss: float, grad_norm: float, *, can_roll_back: bool = True) -> Verdict:
        """Judge one step before its update. Every rank calls it once a step.

        can_roll_back: whether a checkpoint exists; without one, rollback means skip.
        """
        # A fault that one rank sees is one of all: whoever decides alone would hang the others.
        reason = self._fault("loss", loss, self.loss, self.sigma)
        reason = reason or self._fault("gradient norm", grad_norm, self.grad_norm, self.grad_norm_sigma)
        bad = bool(self._agree(int(bool(reason))))
        self.recent_bad.append(bad)
        if not bad:
            self.loss.append(loss)
            self.grad_norm.append(grad_norm)
            return Verdict("go")
        # What the policy makes of it, the strictest choice of all ranks.
        self.bad_steps += 1
        reason = reason or "another rank saw a bad step"
        code = self._agree(ACTIONS.index(self._choose(can_roll_back)))
        action = ACTIONS[code]
        if action == "rollback":
            self.rollbacks += 1
        if action == "stop" and self.policy != "stop":
            reason += f" (bad steps lately: {sum(self.recent_bad)}, rollbacks: {self.rollbacks})"
        return Verdict(action, reason)

    def _choose(self, can_roll_back: bool) -> Action:
        if self.policy == "stop" or sum(self.recent_bad) > self.max_skips:
            return "stop"
        if self.policy == "rollback" and can_roll_back:
            return "rollback" if self.rollbacks < self.max_rollbacks else "stop"
        return "skip"

    def _fault(self, name: str, value: float, history: deque[float], sigma: float | None) -> str:
        if not math.isfinite(value):
            return f"{name} is {value}"
        if sigma is None or len(history) < min(MIN_HISTORY, self.window):
            return ""
        # Only upwards: a sudden improvement is no fault.
        limit = self.limit(history, sigma)
        return (
            f"{name} {value:.4g} is above {limit:.4g} (mean + {sigma:g} deviations)" if value > limit else ""
        )

    def limit(self, history: deque[float], sigma: float) -> float:
        """mean + sigma * max(deviation, floor) of a window of good values."""
        mean = math.fsum(history) / len(history)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in history) / len(history))
        return mean + sigma * max(deviation, DEVIATION_FLOOR * abs(mean))

    def new_stage(self) -> None:
        """Forget the windows: another mixture has another loss. Counters stay."""
        self.loss.clear()
        self.grad_norm.clear()

    def after_rollback(self) -> None:
        """Forget the windows; keep the counters, which bound the number of rollbacks."""
        self.new_stage()

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss": list(self.loss),
            "grad_norm": list(self.grad_norm),
            "recent_bad": list(self.recent_bad),
            "bad_steps": self.bad_steps,
            "rollbacks": self.rollbacks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("loss", "grad_norm", "recent_bad"):
            history = getattr(self, name)
            history.clear()
            history.extend(state[name])
        self.bad_steps, self.rollbacks = state["bad_steps"], state["rollbacks"]
