"""Mixture: which source gives the next piece, so that the shares of the tokens come out as the weights say.

Not a draw but an account: the source furthest below its share is next. The realised shares are then off by at
most one piece of text, for any order of lengths, without a random number to save. Weights may change with the
step (`Schedule`), and `vision_share` fixes how much of the tokens lies in documents with a picture, whatever
the weights are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from earlyfusion.data.errors import DataError
from earlyfusion.kernels.errors import did_you_mean

VISION, TEXT = "vision", "text"
_BLANK_LIMIT = 256
"""Documents in a row without a picture after which sources that should hold pictures are taken to hold none.
"""


class Mixture:
    """Weights of the named sources and the tokens each has given since the weights were last set.

    Raises DataError for an unknown name, a negative weight, or weights that are all zero.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.names = tuple(weights)
        self.weights: dict[str, float] = {}
        self.emitted: dict[str, int] = {}
        self.owed: dict[str, float] = {}
        """Tokens still due from the time before the weights last moved; negative: given in advance."""
        self.set_weights(weights)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """New weights from here on; a source not named gets 0. The account starts afresh."""
        for name, weight in weights.items():
            if name not in self.names:
                raise DataError(
                    f"mixture weight for {name!r}: no such source; {did_you_mean(name, self.names)}"
                )
            if not weight >= 0:
                raise DataError(f"mixture weight of {name!r} is {weight}; expected 0 or more")
        if not any(weight > 0 for weight in weights.values()):
            raise DataError("every mixture weight is 0; give at least one source a positive weight")
        self.weights = {name: float(weights.get(name, 0.0)) for name in self.names}
        self.emitted = dict.fromkeys(self.names, 0)
        self.owed = dict.fromkeys(self.names, 0.0)

    def move(self, weights: Mapping[str, float]) -> None:
        """New weights of a schedule: what is owed under the old ones is carried over, so a ramp is followed
        exactly."""
        wanted = {name: float(weights.get(name, 0.0)) for name in self.names}
        if wanted == self.weights:
            return
        owed = {name: self._due(name, share) for name, share in self.shares(self.names).items()}
        kept = self.owed
        self.set_weights(weights)
        self.owed = kept | owed

    def shares(self, names: Collection[str]) -> dict[str, float]:
        """Target share of each source among `names`; those with weight 0 are left out."""
        total = sum(self.weights[name] for name in names)
        return {
            name: self.weights[name] / total
            for name in self.names
            if name in names and self.weights[name] > 0
        }

    def _due(self, name: str, share: float, names: Collection[str] | None = None, ahead: int = 0) -> float:
        total = sum(self.emitted[other] for other in (self.names if names is None else names)) + ahead
        return self.owed[name] + (share * total - self.emitted[name])

    def pick(self, available: Collection[str]) -> str | None:
        """The source furthest below its share among those that can still give; None when there is none."""
        shares = self.shares(available)
        if not shares:
            return None
        return max(shares, key=lambda name: self._due(name, shares[name], shares, ahead=1))

    def add(self, name: str, tokens: int) -> None:
        """Enter `tokens` given by `name` into the account."""
        self.emitted[name] += tokens

    def state_dict(self) -> dict[str, Any]:
        """Weights and account as JSON types."""
        return {"weights": dict(self.weights), "emitted": dict(self.emitted), "owed": dict(self.owed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.set_weights(state["weights"])
        self.emitted.update(state["emitted"])
        self.owed.update(state.get("owed", {}))


@dataclass(frozen=True)
class Point:
    """From `step` (of the stage) on: new weights, a new vision share, or both; None leaves the one before in
    force.

    linear: the change is spread evenly over the steps since the point before that named the same thing.
    """

    step: float
    weights: Mapping[str, float] | None = None
    vision_share: float | None = None
    linear: bool = False


class Schedule:
    """Weights and vision share as functions of the step of a stage.

    Args:
        points: in the order of their steps; the first stands at step 0. Without a vision share the weights
        alone
            decide.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        steps = [point.step for point in points]
        if not points or steps[0] != 0 or steps != sorted(steps):
            raise DataError(f"mixture schedule with points at steps {steps}: begin at 0 and go up")
        for point in points:
            if point.vision_share is not None and not 0 <= point.vision_share <= 1:
                raise DataError(f"vision_share {point.vision_share} at step {point.step:g}: expected 0 to 1")
        self.points = tuple(points)
        self._weights = [(p.step, _shares(p.weights), p.linear) for p in points if p.weights is not None]
        self._vision = [
            (p.step, {VISION: p.vision_share}, p.linear) for p in points if p.vision_share is not None
        ]
        for name, track in (("weights", self._weights), ("vision_share", self._vision)):
            if track and track[0][2]:
                raise DataError(
                    f"mixture schedule: the first {name} cannot be a linear ramp; name where it starts"
                )

    @property
    def has_vision_share(self) -> bool:
        """Whether a vision share is in force at any step."""
        return bool(self._vision)

    def weights(self, step: float) -> dict[str, float] | None:
        """Shares of the sources at `step`; None when the schedule names none."""
        return _at(self._weights, step)

    def vision_share(self, step: float) -> float | None:
        """Share of tokens in documents with a picture at `step`; None when the weights alone decide."""
        found = _at(self._vision, step)
        return None if found is None else found[VISION]


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    if not total > 0 or any(weight < 0 for weight in weights.values()):
        raise DataError(f"mixture weights {dict(weights)}: expected 0 or more each, and not all 0")
    return {name: weight / total for name, weight in weights.items()}


def _at(track: Sequence[tuple[float, dict[str, float], bool]], step: float) -> dict[str, float] | None:
    """The value of a track at `step`: the newest point's, or between two points when the next is a linear
    ramp."""
    now = None
    for (start, value, _), following in zip(track, [*track[1:], None]):
        if step < start:
            break
        now = value
        if following is not None and following[2] and start <= step < following[0]:
            u = (step - start) / (following[0] - start)
            names = [*value, *(name for name in following[1] if name not in value)]
            now = {name: (1 - u) * value.get(name, 0.0) + u * following[1].get(name, 0.0) for name in names}
    return now


class Blend:
    """The mixture of a lane: an account by source and, with a vision share, one by kind of document above it.

    A document is vision when it holds a picture: the account goes by what came, not by what the source is
    called. When vision is behind, a source of `vision` gives the next document, else one of the others; the
    weights decide within.
    """

    def __init__(
        self, weights: Mapping[str, float], vision: Collection[str], schedule: Schedule | None = None
    ) -> None:
        self.sources = Mixture(weights)
        self.vision, self.schedule = frozenset(vision), schedule
        self.kinds = Mixture({VISION: 1.0, TEXT: 1.0})
        self._blank = 0
        if schedule is not None:
            for (
                point
            ) in schedule.points:  # unknown names and impossible shares are told before any work is done
                at = schedule.weights(point.step) or dict(self.sources.weights)
                Mixture(dict.fromkeys(self.sources.names, 1.0)).set_weights(at)
                self._check(at, schedule.vision_share(point.step))

    def _check(self, weights: Mapping[str, float], share: float | None) -> None:
        named = {name for name, weight in weights.items() if weight > 0}
        if share is None:
            return
        for kind, wanted, names in (
            (VISION, share, named & self.vision),
            (TEXT, 1 - share, named - self.vision),
        ):
            if wanted and not names:
                raise DataError(
                    f"vision_share = {share:g} asks for {kind} documents, but no {kind} source has a positive"
                    " weight; add one, or say which sources hold pictures with data.sources vision = true or"
                    " false"
                )

    def pick(self, available: Collection[str], step: float) -> str | None:
        """The source of the next piece, meant for `step` of the stage; None when no source can give."""
        if self.schedule is None:
            return self.sources.pick(available)
        weights, share = self.schedule.weights(step), self.schedule.vision_share(step)
        if weights is not None:
            self.sources.move(weights)
        if share is None:
            return self.sources.pick(available)
        self.kinds.move({VISION: share, TEXT: 1 - share})
        live = {name for name in available if self.sources.weights[name] > 0}
        groups = {VISION: live & self.vision, TEXT: live - self.vision}
        kind = self.kinds.pick([kind for kind, names in groups.items() if names])
        return None if kind is None else self.sources.pick(groups[kind])

    def add(self, name: str, tokens: int, has_picture: bool) -> None:
        """Enter a piece into both accounts. Raises DataError when sources of pictures turn out to hold
        none."""
        self.sources.add(name, tokens)
        self.kinds.add(VISION if has_picture else TEXT, tokens)
        if self.schedule is None or name not in self.vision:
            return
        self._blank = 0 if has_picture else self._blank + 1
        if self._blank > _BLANK_LIMIT and self.schedule.has_vision_share:
            raise DataError(
                f"{self._blank} documents in a row from sources of pictures (last: {name!r}) hold none, so"
                " vision_share cannot be reached; set vision = false for sources of text"
            )

    def state_dict(self) -> dict[str, Any]:
        """Both accounts as JSON types; the schedule belongs to the caller, like that of the learning rate."""
        return {"sources": self.sources.state_dict(), "kinds": self.kinds.state_dict(), "blank": self._blank}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.sources.load_state_dict(state["sources"])
        self.kinds.load_state_dict(state["kinds"])
        self._blank = int(state["blank"])
