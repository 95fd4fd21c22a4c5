"""A rollout as a simulation of events: engines whose steps take as long as a model of them says, under the
scheduler that real engines have (schedule.py).

    cost = StepTime.fit(measured)                           # (answers, tokens held, seconds) of steps
    lengths = heavy_tailed(groups=100, size=8, mean=400, limit=2_000, correlation=0.8, seed=0)
    found = simulate(lengths, 4, Room(32, 40_000), "context", chunk=128, cost=cost)
    found.seconds, found.tail, found.tokens_per_s, found.idle

Between two events (a part or an answer ends, a cache is full) every engine's batch is fixed, so all steps up
to the next event are one. Engines that hold whole answers either reserve the longest that each may become, as
ours do, or (preempt) let answers grow until the cache is full and take the youngest out, whose tokens are
read again, as vLLM does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from earlyfusion.rl.fleet.schedule import Job, PolicyName, Room, Scheduler

TAIL = 0.1
"""The last share of the answers, whose time is the tail."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step that gives `rows` answers a token each while the cache holds `tokens`: first + row *
    rows + held * tokens. read: seconds a token of a prompt; move: seconds to take an answer's state out and
    put it back."""

    first: float
    row: float
    held: float = 0.0
    read: float = 0.0
    move: float = 0.0

    @classmethod
    def fit(
        cls, measured: Sequence[tuple[int, int, float]], read: float = 0.0, move: float = 0.0
    ) -> StepTime:
        """From (answers, tokens held, seconds), least squares of relative errors; no part is below 0."""
        table = np.array(measured, dtype=float)
        design = np.column_stack([np.ones(len(table)), table[:, :2]])
        # Divided by what was measured: an error of a tenth counts alike in short and long steps.
        kept = [0, 1, 2]
        while True:
            found = np.zeros(3)
            found[kept], *_ = np.linalg.lstsq(design[:, kept] / table[:, 2:], np.ones(len(table)), rcond=None)
            if (found >= 0).all():
                first, row, held = found.tolist()
                return cls(first, row, held, read, move)
            kept.remove(int(found.argmin()))

    def steps(self, count: int, rows: int, tokens: int) -> float:
        """Seconds of `count` steps; every one adds a token an answer."""
        once = self.first + self.row * rows + self.held * tokens
        return count * once + self.held * rows * count * (count - 1) / 2


def heavy_tailed(
    groups: int, size: int, mean: float, limit: int, correlation: float, seed: int, sigma: float = 0.9
) -> list[list[int]]:
    """Lengths of answers, by group: log-normal, cut at the limit. correlation: of the logarithms within a
    group."""
    rng = random.Random(seed)
    middle = math.log(mean) - sigma**2 / 2
    found = []
    for _ in range(groups):
        # What a group has in common, and what every answer has for itself.
        own = rng.gauss(0, 1)
        logs = [
            middle + sigma * (correlation**0.5 * own + (1 - correlation) ** 0.5 * rng.gauss(0, 1))
            for _ in range(size)
        ]
        found.append([min(limit, max(1, round(math.exp(log)))) for log in logs])
    return found


@dataclass
class Found:
    """What a rollout took. seconds; tail: seconds after all but TAIL of the answers were there; idle: mean
    share of the time in which an engine had nothing to write; preempted, moved: answers, each time."""

    seconds: float
    tail: float
    tokens: int
    idle: float
    preempted: int
    moved: int
    ends: list[float] = field(repr=False)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def found_of(ends: Sequence[float], tokens: int, busy: Sequence[float], preempted: int, moved: int) -> Found:
    """The figures of a rollout whose answers ended at these seconds."""
    ordered = sorted(ends)
    last = ordered[-1]
    most = ordered[math.ceil(len(ordered) * (1 - TAIL)) - 1]
    return Found(last, last - most, tokens, 1 - sum(busy) / len(busy) / last, preempted, moved, ordered)


class Simulated:
    """An engine: the parts that it writes, and until when. clock: seconds at which its last step ended;
    tokens: what its cache holds."""

    def __init__(self, cost: StepTime, room: Room, preempt: bool) -> None:
        self.cost, self.room, self.preempt = cost, room, preempt
        self.clock = self.busy = 0.0
        self.tokens = 0
        self.until: dict[Job, int] = {}
        self._count: int | None = None

    def put(self, job: Job, until: int, seconds: float) -> None:
        """The answer is written here from now on; `seconds` go by before that."""
        self.until[job] = until
        self.tokens += job.prompt + job.written
        self.clock += seconds
        self.busy += seconds
        self._count = None

    def drop(self, job: Job) -> None:
        """The reverse."""
        del self.until[job]
        self.tokens -= job.prompt + job.written
        self._count = None

    def count(self) -> int:
        """Steps to its next event."""
        if self._count is None:
            self._count = min(until - job.written for job, until in self.until.items())
            if self.preempt:
                self._count = min(self._count, max(1, (self.room.tokens - self.tokens) // len(self.until)))
        return self._count

    def next_event(self) -> float:
        """When it is."""
        if not self.until:
            return math.inf
        return self.clock + self.cost.steps(self.count(), len(self.until), self.tokens)

    def advance(self, count: int) -> None:
        """So many steps."""
        if count:
            seconds = self.cost.steps(count, len(self.until), self.tokens)
            self.clock += seconds
            self.busy += seconds
            self.tokens += count * len(self.until)
            self._count = None
            for job in self.until:
                job.written += count

    def advance_to(self, now: float) -> None:
        """The steps that end by then, and the one that is under way: who comes waits for it."""
        if not self.until:
            self.clock = max(self.clock, now)
            return
        # Time is no straight line over steps where the cache grows.
        low, high = 0, self.count()
        while low < high:
            middle = (low + high) // 2
            if self.clock + self.cost.steps(middle, len(self.until), self.tokens) < now:
                low = middle + 1
            else:
                high = middle
        self.advance(low)


def simulate(
    lengths: Sequence[Sequence[int]],
    engines: int,
    room: Room,
    policy: PolicyName,
    chunk: int,
    cost: StepTime,
    *,
    prompt: int = 64,
    limit: int | None = None,
    preempt: bool = False,
) -> Found:
    """All answers, from their first token to the last one's end. limit: the most that anybody expects of an
    answer (None: the longest there is). preempt: see the module; only with whole answers."""
    rooms = [Room(room.slots, room.tokens, room.page) for _ in range(engines)]
    scheduler = Scheduler(rooms, policy, chunk, grow=preempt)
    limit = limit or max(map(max, lengths))
    for number, group in enumerate(lengths):
        for index, length in enumerate(group):
            scheduler.add(Job((number, index), number, prompt, limit, length))
    sites = [Simulated(cost, one, preempt) for one in rooms]
    ends: list[float] = []
    now, preempted = 0.0, 0
    while True:
        for job, number, tokens in scheduler.starts():
            site = sites[number]
            site.advance_to(now)
            # An answer that begins, or whose state was thrown away, is read first.
            spent = cost.move if job.kept else cost.read * (job.prompt + job.written)
            site.put(job, min(job.written + tokens, job.length), spent)
            job.kept = True
        site = min(sites, key=Simulated.next_event)
        if not site.until:  # all are done
            break
        site.advance(site.count())
        now = site.clock
        if preempt:
            # Answers that reserve nothing hold what they have become, and nobody comes in beside them.
            for job in site.until:
                job.held = job.prompt + job.written
            rooms[sites.index(site)].held = site.tokens
        for job in [job for job, until in site.until.items() if job.written == until]:
            site.drop(job)
            ended = job.written == job.length
            scheduler.returned(job, job.written, ended)
            if ended:
                ends.append(now)
        # The youngest goes: it has the least to read again.
        while preempt and site.until and site.tokens + len(site.until) > room.tokens:
            job = next(reversed(site.until))
            site.drop(job)
            job.kept = False
            preempted += 1
            scheduler.returned(job, job.written, ended=False, first=True)
    return found_of(ends, sum(map(sum, lengths)), [site.busy for site in sites], preempted, scheduler.moves)
