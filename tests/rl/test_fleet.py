"""Scheduler, fleet and simulator: who is next and where, equal tokens whatever is divided, moved and lost,
and the simulation of events beside one that takes every step."""

import random
from collections import Counter

import numpy as np
import pytest
from engine_cases import by_sample, drawn, engine_of, equal_bits, model, pictured, tokens

from earlyfusion.model.engine.requests import Request, RequestError, SamplingParams
from earlyfusion.rl.fleet.fleet import Fleet, FleetError, Local
from earlyfusion.rl.fleet.schedule import ENOUGH, POLICIES, WEAK, Job, Room, Scheduler, Together
from earlyfusion.rl.fleet.simulate import Found, StepTime, heavy_tailed, simulate

# ---- the scheduler


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_no_engine_gets_more_than_it_holds_and_everybody_gets_there(policy, seed):
    rng = random.Random(seed)
    rooms = [Room(rng.randint(2, 5), rng.randint(300, 600), page=8) for _ in range(3)]
    scheduler = Scheduler(rooms, policy, chunk=20)
    jobs = []
    for group in range(10):
        for index in range(4):
            jobs.append(Job((group, index), group, 30, 200, length=rng.randint(1, 200)))
            scheduler.add(jobs[-1])
    running: dict[Job, int] = {}
    homes: dict[int, set[int]] = {}
    ended = []
    while len(ended) < len(jobs):
        for job, number, given in scheduler.starts():
            assert job not in running and 0 < given <= (200 if policy == "request" else 20)
            running[job] = given
            homes.setdefault(job.group, set()).add(number)
        for number, room in enumerate(rooms):
            here = [job for job in running if job.room == number]
            assert room.running == len(here) <= room.slots
            assert sum(room.rounded(job.prompt + job.written + running[job]) for job in here) <= room.tokens
        job = rng.choice(list(running))
        written = min(job.length, job.written + running.pop(job))
        scheduler.returned(job, written, written == job.length)
        ended += [job] if written == job.length else []
    assert len(set(map(id, ended))) == len(jobs) and not scheduler.waiting
    # Nothing is kept of groups that are through.
    assert not (scheduler.groups or scheduler.homes or scheduler.longest or scheduler.together.known)
    assert all(room.running == room.held == 0 for room in rooms)
    if policy == "request":
        assert all(len(where) == 1 for where in homes.values())


def order_of(scheduler, steps):
    found = []
    for _ in range(steps):
        ((job, _, given),) = list(scheduler.starts())
        found.append(job.name)
        scheduler.returned(job, min(job.length, job.written + given), job.written + given >= job.length)
    return found


def test_probes_go_first_and_then_the_groups_that_became_long():
    scheduler = Scheduler([Room(1, 10_000)], "context", chunk=10)
    for group, lengths in (("a", (10, 10)), ("b", (30, 30)), ("c", (20, 20))):
        for index, length in enumerate(lengths):
            scheduler.add(Job(f"{group}{index}", group, 5, 100, length))
    # The first of each group, the shortest of these first, until all have ended; then by what those became.
    assert order_of(scheduler, 6) == ["a0", "b0", "c0", "b0", "c0", "b0"]
    assert order_of(scheduler, 6) == ["b1", "b1", "b1", "c1", "c1", "a1"]


def test_siblings_are_not_asked_where_their_lengths_say_nothing():
    rng = random.Random(0)
    scheduler = Scheduler([Room(1, 10_000)], "context", chunk=1000)
    for group in range(40):
        for index in range(2):
            scheduler.add(Job((group, index), group, 5, 1000, rng.randint(1, 1000)))
    while scheduler.together.count < ENOUGH:
        order_of(scheduler, 1)
    found = scheduler.together.correlation()
    assert found is not None and found < WEAK and scheduler.weak
    waiting = sorted(scheduler.waiting.values(), key=lambda job: job.order)
    assert order_of(scheduler, 5) == [job.name for job in waiting[:5]]


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_the_measured_correlation_is_that_of_an_analysis_of_variance(correlation):
    lengths = heavy_tailed(300, 6, 200, 100_000, correlation, seed=3)
    together = Together()
    for number, group in enumerate(lengths):
        for length in group:
            together.learn(number, length)
    logs = np.log(np.array(lengths, dtype=float))
    own = logs.mean(1)
    between = 6 * ((own - logs.mean()) ** 2).sum() / 299
    within = ((logs - own[:, None]) ** 2).sum() / (300 * 5)
    expected = max(0.0, (between - within) / (between + 5 * within))
    assert together.correlation() == pytest.approx(expected, abs=1e-9)
    # Standard error of an intraclass correlation of 300 groups of six: below .03.
    assert expected == pytest.approx(correlation, abs=0.09)


def test_what_can_never_be_held_is_refused():
    with pytest.raises(ValueError, match=r"10 \+ 100 tokens, the smallest engine holds 100"):
        Scheduler([Room(4, 100)], "divided", 10).add(Job("a", "g", 10, 100))
    with pytest.raises(ValueError, match="expected one of request"):
        Scheduler([Room(4, 100)], "first", 10)


# ---- the simulator


def every_step(lengths, engines, room, policy, chunk, cost, prompt, limit):
    """The same rollout, one step at a time."""
    scheduler = Scheduler([Room(room.slots, room.tokens) for _ in range(engines)], policy, chunk)
    for number, group in enumerate(lengths):
        for index, length in enumerate(group):
            scheduler.add(Job((number, index), number, prompt, limit, length))
    clocks, running, ends, now = [0.0] * engines, [{} for _ in range(engines)], [], 0.0
    while True:
        for job, number, given in scheduler.starts():
            clocks[number] = (
                max(clocks[number], now) + cost.read * prompt * (not job.kept) + cost.move * job.kept
            )
            running[number][job] = min(job.length, job.written + given)
            job.kept = True
        alive = [i for i in range(engines) if running[i]]
        if not alive:
            return now, ends
        ahead = {}
        for i in alive:
            held = sum(job.prompt + job.written for job in running[i])
            ahead[i] = clocks[i] + cost.first + cost.row * len(running[i]) + cost.held * held
        number = min(alive, key=lambda i: ahead[i])
        clocks[number] = now = ahead[number]
        for job, until in list(running[number].items()):
            job.written += 1
            if job.written == until:
                del running[number][job]
                scheduler.returned(job, job.written, job.written == job.length)
                ends += [now] if job.written == job.length else []


@pytest.mark.parametrize("policy", POLICIES)
def test_jumping_to_the_next_event_is_taking_every_step(policy):
    cost, room = StepTime(0.010, 0.001, 1e-5, read=1e-4, move=2e-3), Room(5, 900)
    for seed in range(4):
        lengths = heavy_tailed(8, 4, 40, 150, 0.7, seed)
        found = simulate(lengths, 3, room, policy, 25, cost, prompt=10, limit=150)
        seconds, ends = every_step(lengths, 3, room, policy, 25, cost, 10, 150)
        # Who arrives in the middle of a step waits for its end in one, and joins the next in the other.
        assert found.seconds == pytest.approx(seconds, rel=0.02)
        assert np.sort(found.ends) == pytest.approx(np.sort(ends), rel=0.06, abs=0.03)
        assert found.tokens == sum(map(sum, lengths)) and len(found.ends) == 32


def test_a_full_cache_takes_answers_out_and_loses_none():
    lengths = heavy_tailed(6, 4, 100, 200, 0.5, 0)
    cost = StepTime(0.01, 0.001, read=1e-3)
    found = simulate(lengths, 2, Room(16, 600), "request", 50, cost, prompt=10, limit=200, preempt=True)
    roomy = simulate(lengths, 2, Room(16, 60_000), "request", 50, cost, prompt=10, limit=200, preempt=True)
    assert found.preempted > 0 == roomy.preempted and found.seconds > roomy.seconds
    assert len(found.ends) == 24
    # What comes back finds room to grow in. Where the room of who is there was counted as it was when they
    # began, each of these 160 answers was taken out 30 times and more.
    for seed in range(3):
        lengths = heavy_tailed(20, 8, 100, 200, 0.5, seed)
        found = simulate(lengths, 2, Room(16, 600), "request", 50, cost, prompt=10, limit=200, preempt=True)
        assert 0 < found.preempted < 3 * 160


def test_steps_are_fitted_and_never_below_nothing():
    law = StepTime(0.002, 0.0004, 3e-7)
    table = [(rows, held, law.steps(1, rows, held)) for rows in (1, 4, 9) for held in (100, 5000, 70_000)]
    fitted = StepTime.fit(table)
    assert [fitted.first, fitted.row, fitted.held] == pytest.approx([law.first, law.row, law.held], rel=1e-6)
    shrinking = StepTime.fit([(1, 10, 0.01), (2, 10, 0.011), (1, 1000, 0.009), (2, 1000, 0.010)])
    assert shrinking.held == 0 and shrinking.row > 0


def test_dividing_helps_where_lengths_are_uneven_and_order_where_siblings_agree():
    """The shape of Seer's findings: a clear gain, most of the oracle's, more so where lengths go together."""
    cost, room = StepTime(0.001, 0.0002), Room(16, 16 * 600)
    gain: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for seed in range(4):
        lengths = heavy_tailed(48, 8, 100, 1000, 0.8, seed)
        found: dict[str, Found] = {}
        for policy in POLICIES:
            found[policy] = simulate(lengths, 4, room, policy, 64, cost, prompt=32, limit=1000)
        for policy, one in found.items():
            gain[policy].append(found["request"].seconds / one.seconds)
    mean = {policy: sum(each) / len(each) for policy, each in gain.items()}
    assert (
        mean["divided"] > 1.1
        and mean["context"] >= 0.97 * mean["divided"]
        and mean["oracle"] >= 0.99 * mean["context"]
    )


# ---- the fleet


def given(count: int = 5, **options) -> list[Request]:
    """Groups of three, stop ids in the way of some, a picture."""
    params = drawn(30, n=3, stop_ids=(30, 40, 50), **options)
    found = [Request(f"r{i}", tokens(5 + 9 * i, 2), params, capture_routing=i == 1) for i in range(count)]
    return [*found, Request("picture", pictured(1), params)]


def fleet_of(net, policy="context", chunk=7, engines=3, **options) -> Fleet:
    engines = [engine_of(net, **{"max_slots": 4, **options}) for _ in range(engines)]
    return Fleet([Local(engine) for engine in engines], policy, chunk)


@pytest.mark.parametrize("policy", POLICIES)
def test_parts_and_moves_change_no_bit(policy):
    net = model(0)
    base = engine_of(net, max_slots=18).generate(given())
    fleet = fleet_of(net, policy)
    found = fleet.generate(given())
    equal_bits(by_sample(base), by_sample(found))
    for one, other in zip(base, found):
        assert (one.finish_reason, one.text, one.prompt_tokens) == (
            other.finish_reason,
            other.text,
            other.prompt_tokens,
        )
        assert one.routing is None or (one.routing == other.routing).all()
    stats = fleet.stats()
    assert stats["parts"] >= 18 / 3 and (stats["moves"] > 0) == (policy != "request")
    for instance in fleet.instances:
        assert instance.engine.stats()["free_slots"] == 4 and not instance.engine.has_work


def test_tokens_are_told_once_and_requests_can_be_paused_and_ended():
    net = model(0)
    base = by_sample(engine_of(net, max_slots=18).generate(given()))
    fleet, told = fleet_of(net), Counter()
    handles = {request.id: fleet.submit(request) for request in given()}
    with pytest.raises(RequestError, match="is in use"):
        fleet.submit(given()[0])
    # What no engine takes is told once and forgotten.
    fleet.submit(Request("empty", tokens(0), drawn(8, n=2)))
    with pytest.raises(RequestError, match="has no tokens"):
        fleet.step()
    assert "empty" not in fleet.requests
    for step in range(400):
        for event in fleet.step():
            told[event.request_id, event.index] += len(event.tokens)
            if event.completion is not None and event.completion.finish_reason != "cancelled":
                assert told[event.request_id, event.index] == len(event.completion.ids)
        if step == 12:
            # Out, and in again elsewhere: another fleet, another way to divide.
            paused = fleet.pause("r2")
            assert {sample.index for sample in paused.samples} | {done.index for done in paused.finished} == {
                0,
                1,
                2,
            }
            other = fleet_of(net, "divided", chunk=5, engines=2)
            moved = other.resume(paused)
            while other.has_work:
                other.step()
            equal_bits({("r2", i): base["r2", i] for i in range(3)}, by_sample(moved.completions))
            fleet.end_sample("r3", 1)
            assert fleet.cancel("r4") and not fleet.cancel("nobody")
        if not fleet.has_work:
            break
    ended = handles["r3"].completions[1]
    assert ended.finish_reason == "cancelled" and ended.ids == base["r3", 1].ids[: len(ended.ids)]
    assert {done.finish_reason for done in handles["r4"].completions} & {"cancelled"} and handles["r4"].done
    equal_bits(
        {key: done for key, done in base.items() if key[0] in ("r0", "r1", "picture")},
        by_sample(done for name in ("r0", "r1", "picture") for done in handles[name].completions),
    )


class Killed(OSError):
    """An engine that is gone."""


class Flaky(Local):
    """Goes away at any call, before or after it was done; `rng` decides."""

    def __init__(self, engine, rng: random.Random, odds: float) -> None:
        super().__init__(engine)
        self.rng, self.odds, self.alive = rng, odds, True

    def _maybe(self) -> None:
        self.alive = self.alive and self.rng.random() >= self.odds
        if not self.alive:
            raise Killed("killed")

    def start(self, part):
        self._maybe()
        super().start(part)

    def step(self):
        self._maybe()
        events = super().step()
        self._maybe()
        return events

    def pause(self, request_id):
        self._maybe()
        return super().pause(request_id)


def test_a_thousand_lost_engines_lose_no_answer_and_count_none_twice():
    """Engines are killed at any moment and others come for them; every answer is the one of an undisturbed
    run, every token is told once."""
    net, rng = model(0), random.Random(0)
    params = SamplingParams(12, temperature=1.0, n=4, logprobs=True, ignore_eos=True)
    asked = [Request(f"q{i}", tokens(6 + i % 5, i), params) for i in range(8)]
    base = by_sample(engine_of(net, max_slots=32, max_pages=400).generate(asked))
    engines = [engine_of(net, max_slots=4, max_pages=40) for _ in range(3)]

    def another(number: int) -> Flaky:
        """An engine that knows nothing: made anew, it would take most of the test's time."""
        for name in list(engines[number].scheduler.states):
            engines[number].pause(name)
        engines[number].scheduler.events = []
        return Flaky(engines[number], rng, 0.15)

    faults = 0
    while faults < 1000:
        fleet = Fleet([another(number) for number in range(3)], rng.choice(POLICIES), chunk=4)
        handles = [fleet.submit(request) for request in asked]
        told: Counter = Counter()
        ends: Counter = Counter()
        paused = None
        while fleet.has_work:
            for event in fleet.step():
                told[event.request_id, event.index] += len(event.tokens)
                ends[event.request_id, event.index] += event.completion is not None
            if rng.random() < 0.05 and fleet.requests and paused is None:
                name = rng.choice(list(fleet.requests))
                paused = fleet.pause(name)
                handles = [handle for handle in handles if handle.id != name]
                handles.append(fleet.resume(paused))
            for number in list(fleet.lost):
                faults += 1
                fleet.join(number, another(number))
        equal_bits(base, by_sample(done for handle in handles for done in handle.completions))
        assert all(count == 1 for count in ends.values()) and len(ends) == 32
        # What a lost engine had told beyond its last export is told again after a pause, and only then.
        again = paused.request.id if paused is not None else ""
        assert all(told[key] == 12 or (key[0] == again and told[key] > 12) for key in base)
    assert faults >= 1000


class Slow(Local):
    """Takes a step every fifth time it is asked."""

    asked = 0

    def step(self):
        self.asked += 1
        return super().step() if self.asked % 5 == 0 else []


def test_a_slow_engine_gets_fewer_answers():
    net, turns = model(0), [0]
    engines = [engine_of(net, max_slots=8) for _ in range(2)]
    fleet = Fleet([Local(engines[0]), Slow(engines[1])], "divided", chunk=8, clock=lambda: float(turns[0]))
    params = SamplingParams(64, temperature=1.0, n=4, ignore_eos=True)
    for number in range(12):
        fleet.submit(Request(f"q{number}", tokens(8, number), params))
    running = []
    while fleet.has_work:
        fleet.step()
        turns[0] += 1
        # While answers wait, and some parts have ended on both.
        if fleet.waiting and turns[0] > 100:
            running.append([room.running for room in fleet.scheduler.rooms])
    # At a fifth of the pace: one or two of the eight places.
    assert fleet.scheduler.rooms[1].speed < 0.3 and len(running) > 50
    assert max(slow for _, slow in running) <= 2
    assert sum(quick for quick, _ in running) > 5 * len(running)


def test_an_answer_is_ended_where_its_engine_has_gone_meanwhile():
    class Gone(Local):
        closed = False

        def end_sample(self, request_id, index):
            raise Killed("killed")

        def close(self):
            self.closed = True

    net = model(0)
    fleet = Fleet([Gone(engine_of(net)), Local(engine_of(net))], "divided", 4)
    params = SamplingParams(30, temperature=1.0, n=2, ignore_eos=True)
    handle = fleet.submit(Request("q", tokens(8, 1), params))
    fleet.step()
    index = next(job.index for jobs in fleet.parts.values() for job in jobs if job.room == 0)
    fleet.end_sample("q", index)
    assert fleet.instances[0].closed and list(fleet.lost) == [0]
    while fleet.has_work:
        fleet.step()
    assert {done.index: done.finish_reason for done in handle.completions} == {
        index: "cancelled",
        1 - index: "length",
    }


def test_without_an_engine_the_fleet_says_why():
    fleet = Fleet([Flaky(engine_of(model(0)), random.Random(0), 1.0)], "divided", 8)
    fleet.submit(given()[0])
    with pytest.raises(FleetError, match="no engine is left; the last one: killed"):
        for _ in range(2):
            fleet.step()


def test_lengths_are_those_that_were_asked_for():
    lengths = heavy_tailed(400, 8, 100, 1000, 0.8, 0)
    flat = [length for group in lengths for length in group]
    assert max(flat) <= 1000 and min(flat) >= 1
    # Cutting at the limit takes some off a mean of 100; four standard errors of 400 groups are 20.
    assert 80 < sum(flat) / len(flat) < 120
    (one, other), _ = heavy_tailed(2, 2, 50, 90, 1.0, 1)
    assert one == other
