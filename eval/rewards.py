"""Rewards as a trainer runs them: any functions of an answer or of its whole group, weighed, contained,
bounded and counted.

    with Rewards(TaskReward(tasks)) as rewards:
        scored = rewards([(problem, text), ...])  # one Scored each, in order; never raises for one answer
        rewards.counts                            # {"ok": 63, "timeout": 1}

A function says by the names of its arguments what it wants to see; two of other names are (problem,
response):

    problem       the Problem: question, answer, picture, messages, category, meta
    response      the text of the answer
    messages      the conversation, from the prompt to the answer, tools and environments included
    ids           the generated tokens
    reward        what the environment paid, None without one that pays
    counts        what the environment counted over the answer, by name
    group         the Responses to one prompt that ended by themselves; then a list of numbers is returned

    def brief(problem, response): return 1.0 if len(response) < 40 else 0.0
    async def asked(response, messages): ...
    def longest(group): return [float(len(one.text) == max(len(o.text) for o in group)) for one in group]

A reward may be any finite number; that of several functions is their weighted sum. One that raises, hangs,
dies or returns no number costs its own answer (a function of the group: its group; the lowest of the declared
range, 0 by default) and a count, never the run; one outside the declared range stands, and is counted.
Rewards that are known to return (most tasks of data/tasks) run in this thread; everything else (your own
function, a judge) in worker processes that are killed at a deadline and started anew, with bounded memory
(Linux). Coroutines of one group run at a time.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import multiprocessing
import pickle
import queue
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from earlyfusion.data.chat.template import Message
from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.tasks.problem import Problem, Task
from earlyfusion.kernels.errors import did_you_mean, one_line
from earlyfusion.kernels.files import function_at

RewardFunction = Callable[..., Any]
Isolation = Literal["inline", "process"]
# From well to worst; metrics.jsonl counts all but the first.
STATUSES = ("ok", "outside", "invalid", "error", "timeout", "died")
SEEN = ("problem", "response", "messages", "ids", "reward", "counts", "group")
"""What a function may ask for."""
START_S = 120.0
"""Most a worker process may take to import its reward."""
GRACE_S = 1.0
"""What a group's deadline is later than those of its answers, which tell which of them was late."""


class RewardError(DataError):
    """A reward cannot be set up as asked; the message is one line."""


@dataclass(frozen=True)
class Response:
    """One answer as reward functions see it."""

    problem: Problem
    text: str
    messages: tuple[Message, ...] = ()
    ids: tuple[int, ...] = ()
    reward: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Scored:
    """The reward of one answer. status: one of STATUSES; detail: what went wrong, in one line; parts: what
    each function gave, before its weight."""

    value: float
    status: str = "ok"
    detail: str = ""
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Weighed:
    """A reward function, its name in metrics, and its weight in the sum."""

    function: RewardFunction
    name: str = "reward"
    weight: float = 1.0


class TaskReward:
    """The reward of each problem's own task, or of its environment. Raises KeyError (a counted error) for a
    problem of another task."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = {task.name: task for task in tasks}

    def __call__(self, problem: Problem, response: str, reward: float | None = None) -> float:
        # An environment that pays knows better than the last message.
        return self.tasks[problem.task].reward(problem, response) if reward is None else reward


class RandomReward:
    """0 or 1 with equal chance, whatever was said: the control arm of a study. Depends on (seed, problem,
    response)."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def __call__(self, problem: Problem, response: str) -> float:
        # A function of what was said: equal answers earn the same, so their group teaches nothing.
        return float(digest64("random reward", self.seed, problem.key, response) & 1)


class OnTop:
    """A second opinion on verified answers: (1 - weight) * base + weight * extra where base > 0, else base.
    extra: a function of the group."""

    def __init__(self, base: RewardFunction, extra: RewardFunction, weight: float) -> None:
        self.base, self.extra, self.weight = base, extra, weight

    def __call__(self, group: Sequence[Response]) -> list[Any]:
        # The verified answer decides first: a judge alone must not be able to pay a wrong one.
        values: list[Any] = [self.base(one.problem, one.text) for one in group]
        paid = [i for i, base in enumerate(values) if base > 0]
        for i, extra in zip(paid, self.extra([group[i] for i in paid])):
            # What went wrong with one answer is that answer's.
            values[i] = extra
            if not isinstance(extra, Exception):
                values[i] = (1 - self.weight) * self.base(
                    group[i].problem, group[i].text
                ) + self.weight * extra
        return values


def make_reward(
    names: str | Sequence[str], tasks: Sequence[Task], seed: int = 0, weights: Sequence[float] = ()
) -> tuple[list[Weighed], Isolation]:
    """(functions, how to run them) of "task", "random" and "package.module:function". Raises RewardError for
    others, and for functions that ask for something else than SEEN."""
    given = [names] if isinstance(names, str) else list(names)
    functions: list[Weighed] = []
    quick = True
    for name, weight in zip(given, list(weights) or [1.0] * len(given)):
        function: RewardFunction
        if name == "task":
            function = TaskReward(tasks)
            quick = quick and all(task.quick for task in tasks)
        elif name == "random":
            function = RandomReward(seed)
        elif ":" in name:
            # Whatever is not ours may hang, and a thread cannot be stopped.
            function, quick = function_at(name, "reward.name"), False
        else:
            told = did_you_mean(name, ("task", "random"))
            raise RewardError(f"reward {name!r}; {told}, or package.module:function")
        asked_for(function)
        functions.append(Weighed(function, name.rpartition(":")[2], weight))
    return functions, "inline" if quick else "process"


def asked_for(function: RewardFunction) -> tuple[str, ...]:
    """The names of SEEN that a function wants, in the order of its arguments. Raises RewardError."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return "problem", "response"
    needed = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if needed and set(needed) <= set(SEEN):
        return tuple(needed)
    required = [
        one for one in parameters if one.default is one.empty and one.kind == one.POSITIONAL_OR_KEYWORD
    ]
    if len(required) == 2 or (len(required) < 2 <= len(needed)):
        return "problem", "response"
    name = getattr(function, "__name__", type(function).__name__)
    raise RewardError(
        f"the reward {name} takes ({', '.join(needed)}); a reward takes problem and response, or any of"
        f" {', '.join(SEEN)}"
    )


def is_coroutine(function: RewardFunction) -> bool:
    """Whether a call of it is awaited: `async def`, also as the `__call__` of an object."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@dataclass(frozen=True)
class Range:
    """What rewards are expected to be. low: what an answer earns that could not be scored."""

    low: float = 0.0
    high: float = 1.0

    def share(self, value: float) -> float:
        """How far a reward is on the way from the lowest to the highest; 1 is a right answer."""
        return (value - self.low) / (self.high - self.low)


# ---- one group


def number_of(value: Any) -> Scored:
    """What a function returned as a number, or what is wrong with it."""
    if isinstance(value, BaseException):
        return Scored(0.0, "error", one_line(f"{type(value).__name__}: {value}", 300))
    # float() of a user's object is a call of the user's code.
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return Scored(0.0, "invalid", f"returned {type(value).__name__}, expected a number")
    return Scored(number) if math.isfinite(number) else Scored(0.0, "invalid", f"returned {number}")


def values_of(function: RewardFunction, group: Sequence[Response], timeout_s: float) -> list[Scored]:
    """What one function gives for every answer of a group. An exception is that answer's (also SystemExit,
    which would end the run), of a function of the group the group's."""
    names = asked_for(function)

    def call(one: Response) -> Any:
        seen = {"response": one.text, "group": list(group)}
        return function(*(seen[name] if name in seen else getattr(one, name) for name in names))

    async def all_at_once() -> list[Any]:
        calls = [asyncio.wait_for(call(one), timeout_s) for one in group]
        return await asyncio.gather(*calls, return_exceptions=True)

    try:
        if is_coroutine(function):
            found = asyncio.run(all_at_once())
            late = Scored(0.0, "timeout", f"no reward within {timeout_s:g} s")
            return [late if isinstance(value, TimeoutError) else number_of(value) for value in found]
        if "group" in names:
            found = list(call(group[0])) if group else []
            if len(found) != len(group):
                raise ValueError(f"{len(found)} rewards for a group of {len(group)} answers")
            return [number_of(value) for value in found]
    except (Exception, SystemExit) as error:
        return [number_of(error)] * len(group)
    scored = []
    for one in group:
        try:
            scored.append(number_of(call(one)))
        except (Exception, SystemExit) as error:
            scored.append(number_of(error))
    return scored


def score_group(
    functions: Sequence[Weighed], group: Sequence[Response], span: Range, timeout_s: float
) -> list[Scored]:
    """The weighted sum for every answer; the lowest of the range where any function failed."""
    columns = [values_of(one.function, group, timeout_s) for one in functions]
    found = []
    for row in zip(*columns):
        worst = max(row, key=lambda one: STATUSES.index(one.status))
        if worst.status != "ok":
            found.append(Scored(span.low, worst.status, worst.detail))
            continue
        value = sum(one.weight * part.value for one, part in zip(functions, row))
        parts = {one.name: part.value for one, part in zip(functions, row)}
        if span.low <= value <= span.high:
            found.append(Scored(value, parts=parts))
        else:
            told = f"returned {value:g}, expected {span.low:g} to {span.high:g}"
            found.append(Scored(value, "outside", told, parts))
    return found


class Rewards:
    """See the file's head.

    functions: one callable, or several with their weights. isolation: where they run; of a process:
    timeout_s, the deadline of one call; workers, calls in flight; memory_mb, what a worker may allocate
    beyond its imports (None: no bound). span: the range that rewards are declared to have. Raises RewardError
    for a function that another process cannot import.
    """

    def __init__(
        self,
        functions: RewardFunction | Sequence[Weighed],
        *,
        isolation: Isolation = "inline",
        timeout_s: float = 10.0,
        workers: int = 2,
        span: Range = Range(),
        memory_mb: int | None = None,
    ) -> None:
        self.functions = [Weighed(functions)] if callable(functions) else list(functions)
        self.span, self.timeout_s, self.share = span, timeout_s, 1.0
        """share: of the weights of all functions but the first; a recipe that anneals them lowers it."""
        self.asked = {name for one in self.functions for name in asked_for(one.function)}
        """What some function asks for."""
        self.counts: Counter[str] = Counter()
        self.workers: list[_Worker] = []
        self._free: queue.Queue[_Worker] = queue.Queue()
        if isolation == "process":
            try:
                # Told here and not at the first answer: a lambda cannot be imported by another process.
                pickled = pickle.dumps(self.functions)
            except Exception as error:
                raise RewardError(f"a reward must be one that another process can import: {error}") from None
            self.workers = [_Worker(timeout_s, (pickled, span, memory_mb)) for _ in range(workers)]
        for worker in self.workers:
            self._free.put(worker)

    @property
    def whole_groups(self) -> bool:
        """Whether the answers of a group are scored together: some function asks for it, or runs them at
        once."""
        return "group" in self.asked or any(is_coroutine(one.function) for one in self.functions)

    def __call__(
        self, answers: Sequence[Response | tuple[Problem, str]], sizes: Sequence[int] | None = None
    ) -> list[Scored]:
        """The rewards of the answers, in order. sizes: of their groups, one after the other; each by itself
        if not given."""
        return self.settled(self.judged(answers, sizes))

    def judged(
        self, answers: Sequence[Response | tuple[Problem, str]], sizes: Sequence[int] | None = None
    ) -> list[Scored]:
        """As a call, neither counted nor annealed; several threads may ask at once where there are
        workers."""
        given = [one if isinstance(one, Response) else Response(*one) for one in answers]
        if sizes is None or not self.whole_groups:
            sizes = [1] * len(given)
        rest = iter(given)
        groups = [[next(rest) for _ in range(size)] for size in sizes]
        if self.workers:
            scored = self._by_workers(groups)
        else:
            scored = [score_group(self.functions, group, self.span, self.timeout_s) for group in groups]
        return [one for group in scored for one in group]

    def settled(self, found: list[Scored]) -> list[Scored]:
        """What was judged as it counts now: each status counted, the share of further functions taken."""
        self.counts.update(one.status for one in found)
        return found if self.share == 1 else [*map(self._annealed, found)]

    def _annealed(self, one: Scored) -> Scored:
        # What could not be scored has no parts, and keeps the lowest of the range.
        rest = sum(other.weight * one.parts[other.name] for other in self.functions[1:] if one.parts)
        return replace(one, value=one.value - (1 - self.share) * rest)

    def _by_workers(self, groups: Sequence[Sequence[Response]]) -> list[list[Scored]]:
        def score(group: Sequence[Response]) -> list[Scored]:
            worker = self._free.get()
            try:
                return worker.score(group)
            finally:
                self._free.put(worker)

        # Threads only wait for the processes; `map` keeps the order of the answers.
        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(score, groups))

    def close(self) -> None:
        """End the worker processes."""
        for worker in self.workers:
            worker.stop()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """One process that scores one group at a time; started when needed, killed at a deadline. given: the
    functions, the range and the memory of `_serve`."""

    def __init__(self, timeout_s: float, given: tuple[bytes, Range, int | None]) -> None:
        self._timeout_s, self._given = timeout_s, given
        self._running: tuple[BaseProcess, Connection] | None = None

    def _start(self) -> Connection:
        # Spawned, not forked: a fork would hold copies of the device's and the other threads' states.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._timeout_s, *self._given), daemon=True)
        process.start()
        # Else the pipe would stay open in this process, and a dead worker would not be noticed.
        theirs.close()
        self._running = process, ours
        problem = f"not ready within {START_S:g} s"
        try:
            if ours.poll(START_S):
                problem = ours.recv()
        except (EOFError, OSError):
            problem = "it died while importing"
        if problem:
            self.stop()
            raise RewardError(f"the reward cannot be loaded in a worker process: {problem}")
        return ours

    def score(self, group: Sequence[Response]) -> list[Scored]:
        """The rewards of one group; the process is gone afterwards if it hung or died."""
        pipe = self._start() if self._running is None else self._running[1]
        # One call for every answer: the deadline is that of all of them. (Coroutines have their own inside.)
        low, limit = self._given[1].low, self._timeout_s * max(1, len(group))
        try:
            pipe.send(group)
            if pipe.poll(limit + GRACE_S * (len(group) > 1)):
                return pipe.recv()
            self.stop()
            failure = Scored(low, "timeout", f"no reward within {limit:g} s")
        except (EOFError, OSError):
            failure = Scored(low, "died", f"the reward's process ended with code {self.stop()}")
        return [failure] * len(group)

    def stop(self) -> int | None:
        """Kill the process; its exit code, None if there was none."""
        if self._running is None:
            return None
        (process, pipe), self._running = self._running, None
        pipe.close()
        # A worker that waits for work ends by itself when its pipe closes.
        process.join(0.2)
        process.kill()
        process.join(5)
        return process.exitcode


def _serve(pipe: Connection, timeout_s: float, pickled: bytes, span: Range, memory_mb: int | None) -> None:
    """The worker's loop: "" once ready (or why not), then the Scored of each group. memory_mb: address space
    beyond what is mapped after the imports; unbounded on systems without /proc."""
    import resource

    status = Path("/proc/self/statm")
    try:
        functions = pickle.loads(pickled)
        if memory_mb is not None and status.exists():
            # Address space, which torch alone has gigabytes of: what counts is what comes on top.
            mapped = int(status.read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_mb * 2**20,) * 2)
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    # Imports are over: from here on a deadline is that of the reward alone.
    pipe.send("")
    while True:
        try:
            group = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        pipe.send(score_group(functions, group, span, timeout_s))
