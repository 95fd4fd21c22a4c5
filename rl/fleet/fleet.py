"""Several engines as one: it takes requests as an engine does, writes every answer in parts, and moves what
is unfinished to where there is room.

    fleet = Fleet([Local(engine) for engine in engines], policy="context", chunk=128)
    handle = fleet.submit(Request(...))
    while fleet.has_work:
        for event in fleet.step(): ...

A part ends with the answer's state exported: it may go on anywhere. What is drawn depends on request, number
and position alone, so neither parts nor moves change a token. An engine that is gone is closed; its answers
go on elsewhere from their last export and write the same tokens again, which are not told twice. Another is
begun in its place, which joins with the next weights.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from earlyfusion.kernels.errors import UserError, one_line
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import (
    Completion,
    EngineFull,
    Event,
    Handle,
    PausedRequest,
    PausedSample,
    Request,
    RequestError,
)
from earlyfusion.model.engine.scheduler import WRITTEN
from earlyfusion.rl.fleet.schedule import Job, PolicyName, Room, Scheduler

PACED = 4
"""Tokens of a part from which on its pace says something."""
WAIT_S = 0.05
"""Seconds that a step waits for engines in other processes."""
RESTARTS = 3
"""How often an engine is begun anew where none has ended a part: what kills all is not mended by another."""


class FleetError(UserError):
    """No engine is left; the message says how the last one went."""


class PartRefused(RequestError):
    """An engine does not take a part, and no other would: its prompt cannot be served."""

    def __init__(self, part: str, why: str) -> None:
        super().__init__(why)
        self.part = part


class Instance(Protocol):
    """An engine of a fleet. All may raise OSError: it is gone. news: set when something has arrived from
    another process, one for all of its kind; None: its work is done in `step`."""

    @property
    def news(self) -> threading.Event | None: ...

    @property
    def room(self) -> Room: ...

    def start(self, part: PausedRequest) -> None: ...

    def step(self) -> list[Event]: ...

    # What is left of it (None: it has ended), and what became known before.
    def pause(self, request_id: str) -> tuple[PausedRequest | None, list[Event]]: ...

    def end_sample(self, request_id: str, index: int) -> None: ...

    # New weights to several of its kind; by their places: why one did not take them.
    @staticmethod
    def publish(instances: Any, weights: Mapping[str, Tensor], version: int) -> dict[int, str]: ...

    # Another in the place of this one, which is gone; None: not there yet, ask again.
    def successor(self) -> Instance | None: ...

    def close(self) -> None: ...


class Local:
    """An engine in this process."""

    news: threading.Event | None = None

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        pools, slots = engine.pools, engine.scheduler.max_slots
        self.room = Room(slots, pools.num_pages * pools.page_size, pools.page_size)

    def start(self, part: PausedRequest) -> None:
        """Take a part. Raises PartRefused."""
        try:
            self.engine.resume(part)
        except RequestError as error:
            raise PartRefused(part.request.id, str(error)) from None

    def step(self) -> list[Event]:
        """One step, if there is something to do."""
        return self.engine.step() if self.engine.has_work else []

    def pause(self, request_id: str) -> tuple[PausedRequest | None, list[Event]]:
        """See Instance."""
        paused = self.engine.pause(request_id) if request_id in self.engine.scheduler.states else None
        events, self.engine.scheduler.events = self.engine.scheduler.events, []
        return paused, events

    def end_sample(self, request_id: str, index: int) -> None:
        """See Engine.end_sample."""
        self.engine.end_sample(request_id, index)

    @staticmethod
    def publish(instances: Sequence[Local], weights: Mapping[str, Tensor], version: int) -> dict[int, str]:
        """See Instance."""
        for one in instances:
            one.engine.load_weights(weights, version)
        return {}

    def successor(self) -> None:
        """It goes with this process."""

    def close(self) -> None:
        """Nothing to do."""


@dataclass(eq=False)
class Answer(Job):
    """A sample of a request. state: as it was exported last; told: tokens that were reported; part: id of the
    part that runs, or ""."""

    request: Request = field(kw_only=True)
    index: int = field(kw_only=True)
    state: PausedSample = field(kw_only=True)
    cached: int = 0
    told: int = 0
    seen: int = 0
    begun: float = 0.0
    part: str = ""
    place: int = 0


def fresh(index: int) -> PausedSample:
    """A sample of which nothing is written."""
    return PausedSample(index, [], [], [], [], length=0)


class Fleet:
    """See the module. The methods are those of `Engine`; text comes with an answer's end alone.

    version: of the weights. lost: why engines are gone, by their number.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        policy: PolicyName = "context",
        chunk: int = 256,
        max_waiting: int = 1024,
        tokenizer: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.instances, self.max_waiting, self.version = list(instances), max_waiting, 0
        self.tokenizer, self.clock = tokenizer, clock
        self.pace: dict[int, float] = {}
        self.scheduler = Scheduler([each.room for each in instances], policy, chunk)
        self.requests: dict[str, list[Answer]] = {}
        self.handles: dict[str, Handle] = {}
        self.parts: dict[str, list[Answer]] = {}
        self.events: list[Event] = []
        self.lost: dict[int, str] = {}
        self.restarts: Counter[int] = Counter()
        self.told: list[str] = []  # what happened to engines, for whoever trains
        self.counts: Counter[str] = Counter()

    # ---- requests

    def submit(self, request: Request, after: PausedSample | None = None) -> Handle:
        """Take a request, perhaps one that goes on after a sample. Raises RequestError, EngineFull as
        Engine."""
        # A request that begins is one of which nothing is written: one way in for all.
        samples = [fresh(index) for index in range(request.params.n)]
        cached = 0
        if after is not None:
            samples[0] = replace(fresh(0), length=after.length, state=after.state, routing=after.routing)
            cached = after.length
        return self.resume(PausedRequest(request, samples, [], self.version, cached))

    def resume(self, paused: PausedRequest) -> Handle:
        """Go on with a request that was paused."""
        request, prompt = paused.request, len(paused.request.prompt.ids)
        if len(self.scheduler.waiting) >= self.max_waiting:
            raise EngineFull(self.max_waiting)
        if request.id in self.requests:
            raise RequestError(f"request id {request.id!r} is in use; give every unfinished request its own")
        handle = Handle(request.id, request.params.n, list(paused.finished))
        if handle.done:
            return handle
        answers = []
        for sample in paused.samples:
            name, limit = (request.id, sample.index), request.params.max_new_tokens
            answer = Answer(
                name, request.id, prompt, limit, request=request, index=sample.index, state=sample
            )
            answer.written = answer.told = answer.seen = len(sample.ids)
            answer.cached = paused.cached_tokens
            answers.append(answer)
        self.requests[request.id], self.handles[request.id] = answers, handle
        try:
            for answer in answers:
                self.scheduler.add(answer)
        except ValueError as error:
            self._forget(request.id)
            raise RequestError(f"request {error}") from None
        return handle

    def pause(self, request_id: str) -> PausedRequest:
        """Take an unfinished request out. Raises RequestError for one that is not here."""
        answers = self.requests.get(request_id)
        if answers is None:
            raise RequestError(f"request {request_id!r} is not unfinished here")
        handle = self.handles[request_id]
        for part in {answer.part for answer in answers if answer.part}:
            if part in self.parts:  # an engine that went meanwhile took all of its parts with it
                self._stop(part)
        samples = [replace(a.state, index=a.index) for a in answers if not a.ended]
        if request_id in self.requests:  # its last answers may have ended on the way
            self._forget(request_id)
        return PausedRequest(
            answers[0].request, samples, list(handle.completions), self.version, answers[0].cached
        )

    def _stop(self, part: str) -> None:
        """Take a part out of its engine, with what it has written."""
        number = self.parts[part][0].room or 0
        try:
            paused, events = self.instances[number].pause(part)
        except OSError as error:
            self._gone(number, error)
            return
        for event in events:
            self._take(event)
        found = {} if paused is None else {sample.index: sample for sample in paused.samples}
        for job in self.parts.pop(part, ()):
            if job.part == part:
                job.state, job.part = found[job.place], ""
                self.scheduler.returned(job, len(job.state.ids), ended=False)

    def _forget(self, request_id: str) -> None:
        answers = self.requests.pop(request_id)
        self.handles.pop(request_id)
        self.scheduler.forget(answers)

    def cancel(self, request_id: str) -> bool:
        """End a request; its unfinished answers complete as "cancelled". False: unknown."""
        answers = list(self.requests.get(request_id, ()))
        for answer in answers:
            self.end_sample(request_id, answer.index)
        return bool(answers)

    def end_sample(self, request_id: str, index: int) -> None:
        """End one answer with what it has, in the next step's events."""
        for answer in self.requests.get(request_id, ()):
            if answer.index != index or answer.ended:
                continue
            number = answer.room or 0
            try:
                if answer.part:
                    self.instances[number].end_sample(answer.part, answer.place)
            except OSError as error:
                self._gone(number, error)
            # Nobody writes it, perhaps since a moment.
            if not answer.part:
                written = {name: getattr(answer.state, name) for name in WRITTEN}
                done = Completion(
                    request_id,
                    index,
                    **written,
                    text="",
                    finish_reason="cancelled",
                    prompt_tokens=answer.prompt,
                    cached_tokens=answer.cached,
                    routing=answer.state.routing,
                )
                self.scheduler.forget([answer])
                answer.ended = True
                self._complete(answer, done, (), None)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or report something."""
        return bool(self.requests or self.events)

    @property
    def waiting(self) -> int:
        """Answers that no engine has."""
        return len(self.scheduler.waiting)

    # ---- a step

    def step(self) -> list[Event]:
        """Start what may begin, let every engine take a step, and tell what became known. Raises FleetError
        where no engine is left."""
        if len(self.lost) == len(self.instances):
            raise FleetError(f"no engine is left; the last one: {list(self.lost.values())[-1]}")
        self.start()
        for number in range(len(self.instances)):
            self.turn(number)
        if not self.events:
            self._wait()
        events, self.events = self.events, []
        return events

    def _wait(self) -> None:
        """Until a process says something, where all engines are in others."""
        alive = [one for number, one in enumerate(self.instances) if number not in self.lost]
        bells = [one.news for one in alive if one.news is not None]
        if bells and len(bells) == len(alive):
            bells[0].wait(WAIT_S)
            # Whoever rings from here on is heard: what has arrived is looked at before the next wait.
            bells[0].clear()

    def turn(self, number: int) -> None:
        """One engine's step."""
        if number not in self.lost:
            try:
                for event in self.instances[number].step():
                    self._take(event)
            except OSError as error:
                self._gone(number, error)
            except PartRefused as error:
                self._refused(error)

    def start(self) -> None:
        """Give engines what they have room for."""
        # Those of one request that have not begun, on one engine: it reads their prompt once.
        together: dict[tuple[int, str, int], list[Answer]] = {}
        for job, number, tokens in self.scheduler.starts():
            assert isinstance(job, Answer)
            key = job.request.id if not job.written and not job.state.state else str(job.name)
            together.setdefault((number, key, tokens), []).append(job)
        refused: list[PartRefused] = []
        for (number, _, tokens), jobs in together.items():
            if number in self.lost:  # since a moment
                self.scheduler.lost(number, jobs)
                continue
            try:
                self.instances[number].start(self._part(jobs, tokens))
            except OSError as error:
                self._gone(number, error)
            except PartRefused as error:
                refused.append(error)
        # The others have been started: what the scheduler gave out must not be lost.
        for one in refused:
            self._refused(one)

    def _refused(self, error: PartRefused) -> None:
        """Forget the whole request, and say so, once."""
        jobs = self.parts.get(error.part)
        if jobs is None:
            return
        request_id = jobs[0].request.id
        for job in self.requests[request_id]:
            self.parts.pop(job.part, None)
        self._forget(request_id)
        raise error

    def _part(self, jobs: list[Answer], tokens: int) -> PausedRequest:
        first, request = jobs[0], jobs[0].request
        self.counts["parts"] += 1
        name = f"{request.id}#{self.counts['parts']}"
        for place, job in enumerate(jobs):
            job.part, job.place, job.seen, job.begun = name, place, job.written, self.clock()
        # Noise is the request's and the sample's, whatever the part is called.
        numbers = request.numbers or range(request.params.n)
        whole = replace(
            request,
            id=name,
            noise=request.noise or request.id,
            numbers=[numbers[job.index] for job in jobs],
            params=replace(request.params, n=len(jobs), max_new_tokens=first.written + tokens),
            keep_state=request.keep_state or "cut",
        )
        self.parts[name] = list(jobs)
        samples = [replace(job.state, index=job.place) for job in jobs]
        return PausedRequest(whole, samples, [], self.version, first.cached)

    def _take(self, event: Event) -> None:
        # Of a request that was refused elsewhere nothing is wanted any more.
        if event.request_id not in self.parts:
            return
        job, done, left = self.parts[event.request_id][event.index], event.completion, event.left
        # After a loss the same tokens come again.
        job.seen += len(event.tokens)
        known = len(event.tokens) - max(0, job.seen - job.told)
        tokens, job.told = event.tokens[known:], max(job.told, job.seen)
        if done is None:
            if tokens:
                self.events.append(Event(job.request.id, job.index, tokens, ""))
            return
        self._measure(job, len(done.ids))
        self.restarts.pop(job.room or 0, None)
        # The part's limit is not the answer's.
        more = done.finish_reason == "length" and len(done.ids) < job.limit
        if more and left is not None:
            job.state, job.cached = left, done.cached_tokens
        part, job.part = job.part, ""
        self.scheduler.returned(job, len(done.ids), ended=not more)
        if all(each.part != part for each in self.parts[part]):
            del self.parts[part]
        if not more:
            kept = job.request.keep_state and done.finish_reason != "cancelled"
            self._complete(
                job, done, tokens, replace(left, index=job.index) if kept and left is not None else None
            )
        elif tokens:
            self.events.append(Event(job.request.id, job.index, tokens, ""))

    def _measure(self, job: Answer, written: int) -> None:
        """Tokens a second of an answer's part: what the engine's pace is known by."""
        number, new = job.room or 0, written - job.written
        pace = new / max(self.clock() - job.begun, 1e-9)
        if new >= PACED:
            self.pace[number] = 0.8 * self.pace.get(number, pace) + 0.2 * pace
            best = max(self.pace.values())
            for each, known in self.pace.items():
                self.scheduler.rooms[each].speed = known / best

    def _complete(
        self, job: Answer, done: Completion, tokens: tuple[Any, ...], left: PausedSample | None
    ) -> None:
        handle = self.handles[job.request.id]
        done = replace(done, request_id=job.request.id, index=job.index)
        insort(handle.completions, done, key=lambda each: each.index)
        self.counts[f"finished_{done.finish_reason}"] += 1
        self.events.append(Event(job.request.id, job.index, tokens, "", done, left))
        if handle.done:
            self.requests.pop(job.request.id)
            self.handles.pop(job.request.id)

    def _gone(self, number: int, error: OSError) -> None:
        """An engine that does not answer is not asked again."""
        if number in self.lost:
            return
        self.lost[number] = one_line(error, 120) or type(error).__name__
        # It may hang and not be dead: its process and its files go with it.
        with suppress(OSError):
            self.instances[number].close()
        # Every part that ran there; siblings of a part may have ended before.
        jobs = []
        for name, answers in list(self.parts.items()):
            if any(job.part == name and job.room == number for job in answers):
                jobs += [job for job in answers if job.part == name]
                del self.parts[name]
        for job in jobs:
            job.part = ""
        self.scheduler.lost(number, jobs)
        self.counts["lost"] += 1
        self.told.append(f"engine {number} is gone: {self.lost[number]}")
        # It loads while the others go on.
        self._succeed(number)

    def _succeed(self, number: int) -> None:
        """Begin an engine in the place of one that is gone, or take it in where it has come up."""
        if self.restarts[number] >= RESTARTS:
            return
        try:
            found = self.instances[number].successor()
        except OSError as error:
            self.restarts[number] += 1
            self.told.append(f"engine {number}: none in its place: {one_line(error, 120)}")
            return
        if found is not None:
            self.restarts[number] += 1
            self.join(number, found)
            self.told.append(f"engine {number} is there again")

    def join(self, number: int, instance: Instance) -> None:
        """An engine in the place of one that is gone. Its weights are the caller's business."""
        if number not in self.lost:
            raise ValueError(f"engine {number} is not gone; gone are {sorted(self.lost)}")
        self.instances[number] = instance
        del self.lost[number]
        self.pace.pop(number, None)
        self.scheduler.joined(number, instance.room)

    # ---- weights, and the end

    def load_weights(self, state_dict: Mapping[str, Tensor], version: int) -> None:
        """New weights for all engines; tokens from here on carry their version."""
        self.version = version
        for number in list(self.lost):
            self._succeed(number)
        alive = [number for number in range(len(self.instances)) if number not in self.lost]
        # All of a kind at once: one copy of the weights serves every process.
        for kind in {type(self.instances[number]) for number in alive}:
            numbers = [number for number in alive if type(self.instances[number]) is kind]
            failed = kind.publish([self.instances[number] for number in numbers], state_dict, version)
            for place, why in failed.items():
                self._gone(numbers[place], ConnectionError(why))

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """As Engine.generate."""
        handles = []
        for request in requests:
            while len(self.scheduler.waiting) >= self.max_waiting:
                self.step()
            handles.append(self.submit(replace(request, pieces=False)))
        while self.has_work:
            self.step()
        return [completion for handle in handles for completion in handle.completions]

    def stats(self) -> Counter[str]:
        """Counters since the start."""
        stats = Counter(self.counts)
        stats.update(
            moves=self.scheduler.moves, waiting=len(self.scheduler.waiting), engines=len(self.instances)
        )
        return stats

    def close(self) -> None:
        """End all engines."""
        for instance in self.instances:
            instance.close()
