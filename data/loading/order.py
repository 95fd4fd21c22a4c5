"""Which document comes next: a mixture of sources, and an order inside each that is computed and not stored.

Shuffle: a random-access permutation of any length, and the hash that holds samples out.

Mixture: not a draw but an account, the source furthest below its share is next. The realised shares are
then off by at most one piece of text, for any order of lengths, without a random number to save. Weights may
change with the step (`Schedule`), and `vision_share` fixes how much of the tokens lies in documents with a
picture, whatever the weights are.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from earlyfusion.data.errors import DataError
from earlyfusion.kernels.files import Record

_MASK = (1 << 64) - 1


def digest64(*parts: object) -> int:
    """64 bits of SHA-256 over the parts; the same on every machine and in every process."""
    # A separator that no name holds, so that ("ab", "c") is not ("a", "bc").
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def held_out(key: str, fraction: float) -> bool:
    """Whether the sample `key` belongs to the held-out `fraction`: by its hash, so that it never changes
    sides."""
    return digest64("held-out", key) < fraction * 2.0**64


def _mix(value: int, key: int) -> int:
    """Finaliser of splitmix64: every input bit reaches every output bit."""
    value = (value + key) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Permutation:
    """A random permutation of range(size) that is computed per position and takes no memory.

    Six rounds of a balanced Feistel network over the next even number of bits, walked until the value falls
    in range (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """

    def __init__(self, size: int, *key: object) -> None:
        if size < 1:
            raise ValueError(f"Permutation: size {size}, expected at least 1")
        self.size = size
        # Both halves of equal width: the domain is at most four times the size.
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        seed = digest64("permutation", size, *key)
        self._keys = [_mix(seed, (i + 1) * 0x9E3779B97F4A7C15) for i in range(6)]

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} of a permutation of {self.size}")
        mask = (1 << self._half) - 1
        value = position
        # Cycle walking: values out of range are mapped again until one falls in; twice on average.
        while True:
            left, right = value >> self._half, value & mask
            for key in self._keys:
                left, right = right, left ^ (_mix(right, key) & mask)
            value = left << self._half | right
            if value < self.size:
                return value


# ---- mixture


VISION, TEXT = "vision", "text"
Shares = Mapping[str, float]
_BLANK_LIMIT = 256
"""Documents in a row without a picture after which sources that should hold pictures are taken to hold none.
"""


class Mixture:
    """Weights of the named sources and the tokens each has given since the weights were last set."""

    def __init__(self, weights: Shares) -> None:
        # Tokens are counted, not documents: a long document is a large share.
        self.weights = dict(weights)
        self.emitted = dict.fromkeys(weights, 0)
        self.owed = dict.fromkeys(weights, 0.0)
        """Tokens still due from the time before the weights last moved; negative: given in advance."""

    def move(self, weights: Shares) -> None:
        """New weights of a schedule, 0 for a source not named: what is owed under the old ones is carried
        over, so a ramp is followed exactly."""
        # Called for every piece; nothing happens while the weights stand still.
        weights = {name: weights.get(name, 0.0) for name in self.weights}
        if weights != self.weights:
            # What a source is short of under the old weights it will get under the new ones.
            self.owed.update(self._due(self.weights))
            self.weights = weights
            self.emitted = dict.fromkeys(weights, 0)

    def _due(self, names: Collection[str], ahead: int = 0) -> dict[str, float]:
        """Tokens that each of `names` with a weight is short of, when they alone give.

        ahead: tokens about to come, so that shares count from the start."""
        # In the order of the recipe, never of a set: the last bit of a sum decides between equals.
        able = [name for name in self.weights if name in names and self.weights[name] > 0]
        weights = sum(self.weights[name] for name in able)
        total = sum(self.emitted[name] for name in able) + ahead
        due = {}
        for name in able:
            due[name] = self.owed[name] + (self.weights[name] / weights * total - self.emitted[name])
        return due

    def pick(self, available: Collection[str]) -> str | None:
        """The source furthest below its share among those that can still give; None when there is none."""
        due = self._due(available, ahead=1)
        return max(due, key=due.__getitem__, default=None)

    def state_dict(self) -> Record:
        """Weights and account as JSON types."""
        # The weights, too: those in force are part of where the account stands.
        return {name: dict(table) for name, table in vars(self).items()}

    def load_state_dict(self, state: Record) -> None:
        """Continue where `state_dict` was taken."""
        for name, table in state.items():
            setattr(self, name, dict(table))


@dataclass(frozen=True)
class Point:
    """From `step` (of the stage) on: new weights, a new vision share, or both; None leaves the one before in
    force.

    linear: the change is spread evenly over the steps since the point before that named the same thing.
    """

    step: float
    weights: Shares | None = None
    vision_share: float | None = None
    linear: bool = False


class Schedule:
    """Shares of the sources, and of vision and text, as functions of the step of a stage.

    Args:
        points: in the order of their steps; the first stands at step 0 and names where every ramp begins
            (the recipe's schema sees to it). Without a vision share the weights alone decide.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self.steps = [point.step for point in points]
        self._sources: list[tuple[Point, Shares]] = []
        self._kinds: list[tuple[Point, Shares]] = []
        for point in points:
            if point.weights is not None:
                # Shares rather than weights: a ramp from 1:1 to 30:10 is one of shares.
                total = sum(point.weights.values())
                self._sources.append((point, {name: w / total for name, w in point.weights.items()}))
            if point.vision_share is not None:
                kinds = {VISION: point.vision_share, TEXT: 1 - point.vision_share}
                self._kinds.append((point, kinds))

    def at(self, step: float) -> tuple[Shares | None, Shares | None]:
        """(share of every source, share of documents with and without a picture) at `step`; None for what the
        schedule does not name."""
        return _at(self._sources, step), _at(self._kinds, step)


def _at(track: Sequence[tuple[Point, Shares]], step: float) -> Shares | None:
    """The newest point's value, or one between two points where the next ends a linear ramp."""
    now, since = None, 0.0
    for point, value in track:
        if point.step <= step:
            now, since = value, point.step
        elif point.linear and now is not None:
            # Between two points: names of either side fade in or out.
            u = (step - since) / (point.step - since)
            names = [*now, *(name for name in value if name not in now)]
            return {name: (1 - u) * now.get(name, 0.0) + u * value.get(name, 0.0) for name in names}
        else:
            break
    return now


class Blend:
    """The mixture of a lane: an account by source and, with a vision share, one by kind of document above it.

    A document is vision when it holds a picture: the account goes by what came, not by what the source is
    called. When vision is behind, a source of `vision` gives the next document, else one of the others; the
    weights decide within.

    Raises DataError for a vision share that no source can give, before any work is done.
    """

    def __init__(self, weights: Shares, vision: Collection[str], schedule: Schedule | None = None) -> None:
        self.sources = Mixture(weights)
        self.kinds = Mixture({VISION: 1.0, TEXT: 1.0})
        self.vision, self.schedule = set(vision), schedule
        self.blank, self.steers = 0, False
        # Asked here, so that an impossible share is refused before the run and not in the middle of it.
        for step in schedule.steps if schedule else ():
            shares, kinds = self._shares(step)
            self.steers = self.steers or kinds is not None
            groups = self._groups(shares or weights, weights)
            for kind, share in (kinds or {}).items():
                if share and not groups[kind]:
                    raise DataError(
                        f"vision_share asks for {share:.0%} of {kind} documents, but no {kind} source has"
                        " a positive weight; add one, or say which sources hold pictures with data.sources"
                        " vision = true or false"
                    )

    def _shares(self, step: float) -> tuple[Shares | None, Shares | None]:
        return self.schedule.at(step) if self.schedule else (None, None)

    def _groups(self, weights: Shares, available: Collection[str]) -> dict[str, set[str]]:
        """Those of `available` with a weight, by what they should hold."""
        live = {name for name in available if weights.get(name, 0.0) > 0}
        return {VISION: live & self.vision, TEXT: live - self.vision}

    def pick(self, available: Collection[str], step: float) -> str | None:
        """The source of the next piece, meant for `step` of the stage; None when no source can give."""
        shares, kinds = self._shares(step)
        if shares is not None:
            self.sources.move(shares)
        if kinds is not None:
            # First the kind of document that is behind, then the source within the kind.
            self.kinds.move(kinds)
            groups = self._groups(self.sources.weights, available)
            kind = self.kinds.pick([kind for kind, names in groups.items() if names])
            available = groups[kind] if kind else ()
        return self.sources.pick(available)

    def add(self, name: str, tokens: int, has_picture: bool) -> None:
        """Enter a piece into both accounts. Raises DataError when sources of pictures turn out to hold
        none."""
        self.sources.emitted[name] += tokens
        self.kinds.emitted[VISION if has_picture else TEXT] += tokens
        if name not in self.vision:
            return
        # Without an end to it, such sources would be asked for ever and text never come.
        self.blank = 0 if has_picture else self.blank + 1
        if self.blank > _BLANK_LIMIT and self.steers:
            raise DataError(
                f"{self.blank} documents in a row from sources of pictures (last: {name!r}) hold none, so"
                " vision_share cannot be reached; set vision = false for sources of text"
            )

    def state_dict(self) -> Record:
        """Both accounts as JSON types; the schedule belongs to the caller, like that of the learning rate."""
        return {"sources": self.sources.state_dict(), "kinds": self.kinds.state_dict(), "blank": self.blank}

    def load_state_dict(self, state: Record) -> None:
        """Continue where `state_dict` was taken."""
        self.sources.load_state_dict(state["sources"])
        self.kinds.load_state_dict(state["kinds"])
        self.blank = state["blank"]


class Numbered:
    """Samples of many files numbered through, by arithmetic alone: a million are as quick as ten."""

    def __init__(self, counts: Iterable[int]) -> None:
        # With a zero in front, so that the first file needs no case of its own.
        self._ends = np.cumsum(np.asarray([0, *counts], dtype=np.int64))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, number: int) -> tuple[int, int]:
        """(file, position in it) of a number; raises IndexError."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        file = int(np.searchsorted(self._ends, number, side="right")) - 1
        return file, number - int(self._ends[file])
