"""Mixture: which source gives the next piece, so that the shares of the tokens come out as the weights say.

Not a draw but an account: the source furthest below its share is next. The realised shares are then off by at most one
piece of text, for any order of lengths, without a random number to save.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from earlyfusion.data.errors import DataError, did_you_mean


class Mixture:
    """Weights of the named sources and the tokens each has given since the weights were last set.

    Raises DataError for an unknown name, a negative weight, or weights that are all zero.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.names = tuple(weights)
        self.weights: dict[str, float] = {}
        self.emitted: dict[str, int] = {}
        self.set_weights(weights)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """New weights from here on; a source not named gets 0. The account starts afresh."""
        for name, weight in weights.items():
            if name not in self.names:
                raise DataError(f"mixture weight for {name!r}: no such source; {did_you_mean(name, self.names)}")
            if not weight >= 0:
                raise DataError(f"mixture weight of {name!r} is {weight}; expected 0 or more")
        if not any(weight > 0 for weight in weights.values()):
            raise DataError("every mixture weight is 0; give at least one source a positive weight")
        self.weights = {name: float(weights.get(name, 0.0)) for name in self.names}
        self.emitted = dict.fromkeys(self.names, 0)

    def shares(self, names: Collection[str]) -> dict[str, float]:
        """Target share of each source among `names`; those with weight 0 are left out."""
        total = sum(self.weights[name] for name in names)
        return {name: self.weights[name] / total for name in self.names if name in names and self.weights[name] > 0}

    def pick(self, available: Collection[str]) -> str | None:
        """The source furthest below its share among those that can still give; None when there is none."""
        shares = self.shares(available)
        if not shares:
            return None
        total = sum(self.emitted[name] for name in shares) + 1
        return max(shares, key=lambda name: shares[name] * total - self.emitted[name])

    def add(self, name: str, tokens: int) -> None:
        """Enter `tokens` given by `name` into the account."""
        self.emitted[name] += tokens

    def state_dict(self) -> dict[str, Any]:
        """Weights and account as JSON types."""
        return {"weights": dict(self.weights), "emitted": dict(self.emitted)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.set_weights(state["weights"])
        self.emitted.update(state["emitted"])
