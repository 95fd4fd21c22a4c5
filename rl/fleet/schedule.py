"""Which answer is written where, and how far, before somebody looks again: one scheduler for engines that run
(fleet.py) and for engines that are simulated (simulate.py).

    scheduler = Scheduler([Room(slots=32, tokens=40_000)] * 4, "context", chunk=128)
    scheduler.add(Job("a", group="question 1", prompt=64, limit=2_000))
    for job, room, tokens in scheduler.starts(): ...    # write so many more tokens there
    scheduler.returned(job, written=128, ended=False)

Answers wait in one buffer for all engines. A *whole* answer stays where its group was put until it is done
and holds room for the longest that it may become. A *divided* one gets a chunk of tokens at a time, holds
room for that alone, and goes on wherever there is most room (Seer, arXiv 2511.14617, section 3.2). Who is
next:

    request     whole answers, groups dealt to the engines in turn, first come first served (what most
                trainers do)
    divided     chunks, first come first served
    context     chunks; the first answer of every group before all others, the shortest of these first; then
                those believed to be longest, by the longest finished answer of their group (section 3.3)
    oracle      chunks, the longest first, by lengths that nobody knows beforehand: a bound

Answers of a group help to foresee each other only as far as their lengths go together. The correlation is
measured among what has finished; below WEAK `context` goes on as `divided`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

PolicyName = Literal["request", "divided", "context", "oracle"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
WEAK = 0.3
"""Correlation of lengths below which siblings are not asked."""
ENOUGH = 24
"""Finished answers, of groups with several, before a correlation is believed."""
SLOW = 0.5
"""Share of the best engine's pace below which one gets fewer answers."""
HIGH = 0.95
"""Share of an engine's room up to which new answers begin there: those under way go first into the rest."""


@dataclass(eq=False)
class Job:
    """An answer on its way. prompt, limit: tokens of its prompt, and the most it may get. room: number of the
    engine that writes it. length: what it will be, for the oracle alone. kept: its state lies somewhere."""

    name: Hashable
    group: Hashable
    prompt: int
    limit: int
    length: int = 0
    written: int = 0
    room: int | None = None
    held: int = 0
    order: int = 0
    probe: bool = False
    kept: bool = False
    ended: bool = False


@dataclass
class Room:
    """What an engine has: places for answers, and tokens that its cache holds, in pages of `page`. speed: its
    pace as a share of the best one's; closed: it takes nothing."""

    slots: int
    tokens: int
    page: int = 1
    speed: float = 1.0
    running: int = 0
    held: int = 0
    closed: bool = False

    def rounded(self, tokens: int) -> int:
        """What an answer of so many tokens holds; one page more where its prompt's last is shared."""
        return tokens if self.page == 1 else (-(-tokens // self.page) + 1) * self.page

    def takes(self, tokens: int, begun: bool) -> bool:
        # Who writes at a fraction of the others' pace gets that fraction of answers.
        slots = self.slots if self.speed >= SLOW else max(1, round(self.slots * self.speed))
        # An empty engine takes whatever fits, or a long answer would wait for ever.
        share = 1.0 if begun or not self.running else HIGH
        return not self.closed and self.running < slots and self.held + tokens <= share * self.tokens


class Together:
    """How far lengths of one group go together: the share of the variance of log-lengths that lies between
    groups (intraclass correlation), over groups with two finished answers at least."""

    def __init__(self) -> None:
        self.known: dict[Hashable, tuple[int, float, float]] = {}  # count, sum, sum of squares of a group
        self.groups = self.count = self.count2 = 0
        self.sum = self.squares = self.own = 0.0  # own: sums squared over counts

    def learn(self, group: Hashable, length: int) -> None:
        """An answer has ended."""
        before = self.known.get(group, (0, 0.0, 0.0))
        log = math.log(max(1, length))
        after = (before[0] + 1, before[1] + log, before[2] + log * log)
        self.known[group] = after
        for (count, total, squares), sign in ((before, -1), (after, 1)):
            if count > 1:
                self.groups += sign
                self.count += sign * count
                self.count2 += sign * count * count
                self.sum += sign * total
                self.squares += sign * squares
                self.own += sign * total * total / count

    def forget(self, group: Hashable) -> None:
        """Nothing more comes of a group; what it said stays."""
        self.known.pop(group, None)

    def correlation(self) -> float | None:
        """None: too few are known."""
        if self.count < ENOUGH or self.groups < 3:
            return None
        # Mean squares of a one-way analysis of variance; size is the groups' where they differ.
        within = (self.squares - self.own) / (self.count - self.groups)
        between = (self.own - self.sum**2 / self.count) / (self.groups - 1)
        size = (self.count - self.count2 / self.count) / (self.groups - 1)
        total = between + (size - 1) * within
        return max(0.0, (between - within) / total) if total > 0 else 1.0


class Scheduler:
    """See the module. chunk: tokens of a part, a whole answer's limit where the policy is `request`. grow:
    whole answers hold only what they have, and whoever drives the engines takes some out where they grow too
    large."""

    def __init__(self, rooms: Sequence[Room], policy: PolicyName, chunk: int, grow: bool = False) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r}: expected one of {', '.join(POLICIES)}")
        if chunk < 1 or not rooms:
            raise ValueError(f"chunk {chunk}, {len(rooms)} engines: at least 1 of each")
        self.rooms, self.policy, self.chunk, self.grow = list(rooms), policy, chunk, grow
        self.waiting: dict[int, Job] = {}
        # Sorted by who is next, with entries that count no more.
        self.lines: list[list[tuple[tuple[float, ...], int]]] = [[] for _ in rooms]
        self.groups: dict[Hashable, list[Job]] = {}
        self.homes: dict[Hashable, int] = {}
        self.longest: dict[Hashable, int] = {}
        self.together = Together()
        self.weak = False
        self.moves = self.parts = self.orders = self.dealt = 0  # orders: how often anybody began to wait

    def add(self, job: Job) -> None:
        """An answer that waits. Raises ValueError for one that no engine could ever hold."""
        whole = self.rooms[0].rounded(job.prompt + job.limit)
        if whole > min(room.tokens for room in self.rooms):
            raise ValueError(
                f"{job.name}: {job.prompt} + {job.limit} tokens, the smallest engine holds"
                f" {min(room.tokens for room in self.rooms):,}"
            )
        group = self.groups.setdefault(job.group, [])
        job.probe = not group
        group.append(job)
        # Dealt when first met, and again where that engine is gone.
        if job.group not in self.homes:
            self._deal(job.group)
        self._wait(job)

    def _deal(self, group: Hashable) -> None:
        alive = [i for i, room in enumerate(self.rooms) if not room.closed] or [0]
        self.homes[group] = alive[self.dealt % len(alive)]
        self.dealt += 1

    def _wait(self, job: Job, first: bool = False) -> None:
        self.orders += 1
        job.order = -self.orders if first else self.orders
        self.waiting[id(job)] = job
        self._line_up(job)

    def _line_up(self, job: Job) -> None:
        """Where the job stands now; where it stood before counts no more."""
        heapq.heappush(self.lines[self._line(job)], (self._before(job), id(job)))

    def _line(self, job: Job) -> int:
        # Whole answers wait for the engine of their group, all others in one line.
        return self.homes[job.group] if self.policy == "request" else 0

    def _first(self, line: int) -> Job | None:
        """Who is next."""
        # An entry counts while it says what would be said now.
        entries = self.lines[line]
        while entries:
            before, key = entries[0]
            job = self.waiting.get(key)
            if job is not None and self._before(job) == before and self._line(job) == line:
                return job
            heapq.heappop(entries)
        return None

    def _part(self, job: Job) -> int:
        left = job.limit - job.written
        return left if self.policy == "request" else min(self.chunk, left)

    def _before(self, job: Job) -> tuple[float, ...]:
        """Sorts what waits; the smallest goes first."""
        if self.policy == "oracle":
            return (job.written - job.length, job.order)
        if self.policy == "context" and not self.weak:
            if job.probe:
                return (0, job.written, job.order)
            # Until a sibling has finished, an answer may become the longest there is.
            believed = max(self.longest.get(job.group, job.limit), job.written)
            return (1, -believed, job.order)
        return (job.order,)

    def starts(self) -> Iterator[tuple[Job, int, int]]:
        """What begins or goes on now: the answer, the engine's number, and tokens. Nobody overtakes: what
        waits longest, or is believed to take longest, gets the next room."""
        for line in range(len(self.lines)):
            while (job := self._first(line)) is not None:
                tokens = self._part(job)
                need = self.rooms[0].rounded(job.prompt + job.written + (1 if self.grow else tokens))
                room = self._room_for(job, need)
                if room is None:
                    break
                self.moves += job.room is not None and job.room != room
                self.parts += 1
                job.room, job.held = room, need
                self.rooms[room].running += 1
                self.rooms[room].held += need
                del self.waiting[id(job)]
                yield job, room, tokens

    def _room_for(self, job: Job, need: int) -> int | None:
        if self.policy == "request":
            home = self.homes[job.group]
            # Where answers grow, some room is left for that, or who comes is at once taken out again.
            return home if self.rooms[home].takes(need, begun=not self.grow) else None
        free = [i for i, room in enumerate(self.rooms) if room.takes(need, bool(job.written))]
        # Most room for tokens; where that is equal, where the answer has been.
        best = max(free, key=lambda i: (self._share_left(i), i == job.room), default=None)
        # An answer does not move for a little.
        if (
            best is not None
            and job.room in free
            and self._share_left(job.room) > self._share_left(best) - 0.1
        ):
            return job.room
        return best

    def _share_left(self, number: int | None) -> float:
        room = self.rooms[number or 0]
        return min(1 - room.held / room.tokens, 1 - room.running / room.slots)

    def returned(self, job: Job, written: int, ended: bool, first: bool = False) -> None:
        """A part is over: so many tokens in all. first: it waits before all others."""
        room = self.rooms[job.room or 0]
        room.running -= 1
        room.held -= job.held
        job.held, job.written = 0, written
        if ended or written >= job.limit:
            job.ended = True
            self._learn(job)
        else:
            self._wait(job, first)

    def _learn(self, job: Job) -> None:
        """An answer has ended: what that says of its siblings, and of all."""
        # Their places in the line change only where the longest does.
        before, weak = self.longest.get(job.group), self.weak
        self.longest[job.group] = max(before or 0, job.written)
        self.together.learn(job.group, job.written)
        if self.policy == "context":
            found = self.together.correlation()
            self.weak = found is not None and found < WEAK
        siblings = self.groups.get(job.group, [])
        if self.weak != weak:
            siblings = list(self.waiting.values())
        elif self.longest[job.group] == before:
            siblings = []
        for each in siblings:
            if id(each) in self.waiting:
                self._line_up(each)
        if all(each.ended for each in self.groups.get(job.group, ())):
            self._through(job.group)

    def _through(self, group: Hashable) -> None:
        """Nobody of the group is left: a long run has many groups."""
        for known in (self.groups, self.homes, self.longest):
            known.pop(group, None)
        self.together.forget(group)

    def forget(self, jobs: Sequence[Job]) -> None:
        """They are not waited for any more, wherever they are."""
        for job in jobs:
            self.waiting.pop(id(job), None)
            if job.held:
                self.rooms[job.room or 0].running -= 1
                self.rooms[job.room or 0].held -= job.held
                job.held = 0
            rest = [each for each in self.groups.get(job.group, ()) if each is not job]
            if rest:
                self.groups[job.group] = rest
            else:
                self._through(job.group)

    def lost(self, number: int, jobs: Sequence[Job]) -> None:
        """An engine is gone; what it wrote since the last export is written again elsewhere."""
        room = self.rooms[number]
        room.closed, room.running, room.held = True, 0, 0
        for group, home in list(self.homes.items()):
            if home == number:
                self._deal(group)
        for job in self.waiting.values():
            self._line_up(job)
        for job in jobs:
            job.held, job.room = 0, None
            self._wait(job)

    def joined(self, number: int, room: Room) -> None:
        """An empty engine in the place of one that is gone."""
        self.rooms[number] = room
