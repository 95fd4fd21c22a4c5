"""Slices over several rails, by what each has been measured to take; a rail that fails or stalls loses its
slices to the others.

    sprayer = Sprayer([FileRail(address, MEMORY), TcpRail(address), ...])
    report = sprayer.send(version, slices, buffer)      # returns when every slice is in its place

A rail takes the next slice when it is free. It leaves it to the others where they would be through with all
that is left before it were done with this one (rates are means over the last slices); every PROBE-th time it
takes it nevertheless, so that a rail that has recovered is found. A slice that takes longer than LATE times
what it should, and PATIENCE_S at least, is given to another rail as well: writing it twice does no harm. A
rail that is late is asked nothing more until it answers. One that failed pauses, twice as long every time
until a slice gets through.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from earlyfusion.kernels.errors import one_line
from earlyfusion.rl.weightsync.layout import Slice, SyncError
from earlyfusion.rl.weightsync.wire import Rail

LATE, PATIENCE_S = 4.0, 0.02
PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
PROBE = 64
SMOOTHING = 0.3
"""Weight of the newest measurement of a rail's rate."""
LOOK_S = 0.004
"""Seconds between two looks at what is late."""


@dataclass
class Lane:
    """A rail and what is known of it. rate: bytes a second, 0 before the first slice; pause: seconds of the
    last one; until: when it ends; busy: it is at a slice, perhaps of an earlier version; declined: slices
    that it left to others; slices, sent: what it brought, and its bytes; fault: the last one."""

    rail: Rail
    rate: float = 0.0
    pause: float = 0.0
    until: float = 0.0
    busy: bool = False
    declined: int = 0
    slices: int = 0
    sent: int = 0
    fault: str = ""

    def measured(self, size: int, seconds: float) -> None:
        """A slice arrived."""
        rate = size / max(seconds, 1e-6)
        self.rate = rate if not self.rate else (1 - SMOOTHING) * self.rate + SMOOTHING * rate
        self.slices, self.sent = self.slices + 1, self.sent + size
        self.pause = self.until = 0.0

    def failed(self, why: str, now: float) -> None:
        """It pauses, longer each time."""
        self.fault = why
        self.pause = min(2 * self.pause or PAUSE_S, LONGEST_PAUSE_S)
        self.until = now + self.pause


@dataclass(frozen=True)
class Sent:
    """What sending took. healing: for every slice that was given to another rail, seconds from when its own
    rail took it until another one had it; lanes: by rail."""

    seconds: float
    size: int
    healing: list[float]
    lanes: dict[str, Lane]


class Sprayer:
    """See the module. One `send` at a time; what is known of the rails is kept between them."""

    def __init__(self, rails: Sequence[Rail], timeout_s: float = 60.0) -> None:
        if len({rail.name for rail in rails}) != len(rails) or not rails:
            raise ValueError("rails need names that differ, and there must be one")
        self.lanes = [Lane(rail) for rail in rails]
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._left: deque[Slice] = deque()
        self._done: set[Slice] = set()
        self._under_way: dict[tuple[Slice, int], tuple[float, float]] = {}
        self._lost: dict[Slice, float] = {}
        self._healing: list[float] = []

    def send(self, version: int, slices: Sequence[Slice], buffer: memoryview) -> Sent:
        """Bring all slices to the receiver. Raises SyncError where no rail gets through in time."""
        begun = time.monotonic()
        with self._changed:
            self._left, self._done = deque(slices), set()
            self._under_way, self._lost, self._healing = {}, {}, []
        wanted, over = set(slices), threading.Event()
        workers = [
            threading.Thread(target=self._work, args=(i, version, buffer, over), daemon=True)
            for i in range(len(self.lanes))
        ]
        for worker in workers:
            worker.start()
        try:
            with self._changed:
                while len(self._done) < len(wanted):
                    self._changed.wait(LOOK_S)
                    now = time.monotonic()
                    self._find_late(now)
                    if now - begun > self.timeout_s:
                        told = [f"{one.rail.name}: {one.fault}" for one in self.lanes if one.fault]
                        missing = len(wanted) - len(self._done)
                        raise SyncError(
                            f"{missing:,} of {len(wanted):,} slices in {self.timeout_s:g} s;"
                            f" {'; '.join(told)}"
                        )
        finally:
            over.set()
            with self._changed:
                self._changed.notify_all()
        # Nobody waits for a rail that hangs: what it still brings is there already, and is left as it is.
        size = sum(one.size for one in wanted)
        return Sent(time.monotonic() - begun, size, self._healing, {one.rail.name: one for one in self.lanes})

    def _work(self, number: int, version: int, buffer: memoryview, over: threading.Event) -> None:
        """A rail's own thread, for one `send`."""
        lane = self.lanes[number]
        while not over.is_set():
            with self._changed:
                taken = self._next(number)
                if taken is None:
                    self._changed.wait(LOOK_S)
                    continue
                now = time.monotonic()
                lane.busy = True
                self._under_way[taken, number] = (now, self._due(lane, taken, now))
                if taken in self._lost:
                    self._healing.append(now - self._lost.pop(taken))
            why = ""
            try:
                lane.rail.put(version, taken, buffer[taken.offset : taken.offset + taken.size])
            except (OSError, SyncError) as error:
                why = one_line(error, 120) or type(error).__name__
            with self._changed:
                ended, lane.busy = time.monotonic(), False
                if over.is_set():
                    return
                begun, _ = self._under_way.pop((taken, number))
                if why:
                    lane.failed(why, ended)
                    self._again(taken, begun)
                else:
                    # A late one says what it is worth as well.
                    lane.measured(taken.size, ended - begun)
                    self._done.add(taken)
                self._changed.notify_all()

    def _next(self, number: int) -> Slice | None:
        """The slice that a rail takes now, if any."""
        lane, now = self.lanes[number], time.monotonic()
        while self._left and self._left[0] in self._done:
            self._left.popleft()
        # It may still hang in a slice of an earlier version.
        if not self._left or lane.busy or now < lane.until:
            return None
        first = self._left[0]
        others = sum(one.rate for one in self.lanes if one is not lane and now >= one.until)
        waiting = sum(one.size for one in self._left)
        if lane.rate and others and first.size / lane.rate > waiting / others:
            lane.declined += 1
            if lane.declined % PROBE:
                return None
        return self._left.popleft()

    def _due(self, lane: Lane, taken: Slice, now: float) -> float:
        """When a slice is late."""
        expected = taken.size / lane.rate if lane.rate else 0.0
        return now + max(PATIENCE_S, LATE * expected)

    def _again(self, one: Slice, begun: float) -> None:
        if one not in self._done and one not in self._left:
            self._left.appendleft(one)
            self._lost.setdefault(one, begun)

    def _find_late(self, now: float) -> None:
        """Give what is late to others."""
        for (one, number), (begun, due) in list(self._under_way.items()):
            if now > due and one not in self._done:
                self._under_way[one, number] = (begun, float("inf"))
                self.lanes[number].failed(f"late after {now - begun:.3f} s", now)
                self._again(one, begun)
                self._changed.notify_all()
