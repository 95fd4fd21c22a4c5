"""Rewards as a trainer runs them: any function of (problem, response), contained, bounded and counted.

    with Rewards(TaskReward(tasks)) as rewards:
        scored = rewards([(problem, text), ...])  # one Scored each, in order; never raises for one answer
        rewards.counts                            # {"ok": 63, "timeout": 1}

A reward may be any finite number. One that raises, hangs, dies or returns no number costs its own answer (the
lowest of the declared range, 0 by default) and a count, never the run; one outside the declared range stands,
and is counted. Rewards that are known to return (the tasks of data/tasks) run in this thread; everything else
(your own function, a judge) in worker processes that are killed at a deadline and started anew, with bounded
memory (Linux).
"""

from __future__ import annotations

import math
import multiprocessing
import pickle
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.tasks.problem import Problem, Task
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.kernels.files import function_at

RewardFunction = Callable[[Problem, str], float]
Isolation = Literal["inline", "process"]
Item = tuple[Problem, str]
# From well to worst; metrics.jsonl counts all but the first.
STATUSES = ("ok", "outside", "invalid", "error", "timeout", "died")
START_S = 120.0
"""Most a worker process may take to import its reward."""


class RewardError(DataError):
    """A reward cannot be set up as asked; the message is one line."""


@dataclass(frozen=True)
class Scored:
    """The reward of one answer. status: one of STATUSES; detail: what went wrong, in one line."""

    value: float
    status: str = "ok"
    detail: str = ""


class TaskReward:
    """The reward of each problem's own task. Raises KeyError (a counted error) for a problem of another
    task."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = {task.name: task for task in tasks}

    def __call__(self, problem: Problem, response: str) -> float:
        return self.tasks[problem.task].reward(problem, response)


class RandomReward:
    """0 or 1 with equal chance, whatever was said: the control arm of a study. Depends on (seed, problem,
    response)."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def __call__(self, problem: Problem, response: str) -> float:
        # A function of what was said: equal answers earn the same, so their group teaches nothing.
        return float(digest64("random reward", self.seed, problem.key, response) & 1)


class OnTop:
    """A second opinion on verified answers: (1 - weight) * base + weight * extra where base > 0, else
    base."""

    def __init__(self, base: RewardFunction, extra: RewardFunction, weight: float) -> None:
        self.base, self.extra, self.weight = base, extra, weight

    def __call__(self, problem: Problem, response: str) -> float:
        # The verified answer decides first: a judge alone must not be able to pay a wrong one.
        base = self.base(problem, response)
        return (1 - self.weight) * base + self.weight * self.extra(problem, response) if base > 0 else base


def make_reward(name: str, tasks: Sequence[Task], seed: int = 0) -> tuple[RewardFunction, Isolation]:
    """(function, how to run it) of "task", "random" or "package.module:function". Raises RewardError for
    others."""
    if name == "task":
        return TaskReward(tasks), "inline" if all(task.quick for task in tasks) else "process"
    if name == "random":
        return RandomReward(seed), "inline"
    if ":" not in name:
        raise RewardError(
            f"reward {name!r}; {did_you_mean(name, ('task', 'random'))}, or package.module:function"
        )
    # Whatever is not ours may hang, and a thread cannot be stopped.
    return function_at(name, "reward.name"), "process"


@dataclass(frozen=True)
class Range:
    """What rewards are expected to be. low: what an answer earns that could not be scored."""

    low: float = 0.0
    high: float = 1.0

    def share(self, value: float) -> float:
        """How far a reward is on the way from the lowest to the highest; 1 is a right answer."""
        return (value - self.low) / (self.high - self.low)


def attempt(function: RewardFunction, item: Item, span: Range) -> Scored:
    """Call the function: a finite number as it is ("outside" beyond the range), all else is "invalid", and an
    exception "error" (also SystemExit, which would end the run)."""
    try:
        value = function(*item)
    except (Exception, SystemExit) as error:
        return Scored(span.low, "error", " ".join(f"{type(error).__name__}: {error}".split())[:300])
    # float() of a user's object is a call of the user's code.
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return Scored(span.low, "invalid", f"returned {type(value).__name__}, expected a number")
    if not math.isfinite(number):
        return Scored(span.low, "invalid", f"returned {number}")
    if not span.low <= number <= span.high:
        return Scored(number, "outside", f"returned {number:g}, expected {span.low:g} to {span.high:g}")
    return Scored(number)


class Rewards:
    """See the file's head.

    function: any callable of (problem, response). isolation: where it runs; of a process: timeout_s, the
    deadline of one call; workers, calls in flight; memory_mb, what a worker may allocate beyond its imports
    (None: no bound). span: the range that rewards are declared to have. Raises RewardError for a function
    that another process cannot import.
    """

    def __init__(
        self,
        function: RewardFunction,
        *,
        isolation: Isolation = "inline",
        timeout_s: float = 10.0,
        workers: int = 2,
        span: Range = Range(),
        memory_mb: int | None = None,
    ) -> None:
        self.function, self.span = function, span
        self.counts: Counter[str] = Counter()
        self.workers: list[_Worker] = []
        if isolation == "process":
            try:
                # Told here and not at the first answer: a lambda cannot be imported by another process.
                pickled = pickle.dumps(function)
            except Exception as error:
                raise RewardError(f"a reward must be one that another process can import: {error}") from None
            self.workers = [_Worker(timeout_s, (pickled, span, memory_mb)) for _ in range(workers)]

    def __call__(self, items: Sequence[Item]) -> list[Scored]:
        """The rewards of the answers, in order."""
        if self.workers:
            scored = self._by_workers(items)
        else:
            scored = [attempt(self.function, item, self.span) for item in items]
        self.counts.update(one.status for one in scored)
        return scored

    def _by_workers(self, items: Sequence[Item]) -> list[Scored]:
        free: queue.Queue[_Worker] = queue.Queue()
        for worker in self.workers:
            free.put(worker)

        def score(item: Item) -> Scored:
            worker = free.get()
            try:
                return worker.score(item)
            finally:
                free.put(worker)

        # Threads only wait for the processes; `map` keeps the order of the answers.
        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(score, items))

    def close(self) -> None:
        """End the worker processes."""
        for worker in self.workers:
            worker.stop()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """One process that scores one answer at a time; started when needed, killed at a deadline. given: the
    function, the range and the memory of `_serve`."""

    def __init__(self, timeout_s: float, given: tuple[bytes, Range, int | None]) -> None:
        self._timeout_s, self._given = timeout_s, given
        self._running: tuple[BaseProcess, Connection] | None = None

    def _start(self) -> Connection:
        # Spawned, not forked: a fork would hold copies of the device's and the other threads' states.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, *self._given), daemon=True)
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

    def score(self, item: Item) -> Scored:
        """The reward of one answer; the process is gone afterwards if it hung or died."""
        pipe = self._start() if self._running is None else self._running[1]
        low = self._given[1].low
        try:
            pipe.send(item)
            if pipe.poll(self._timeout_s):
                return pipe.recv()
            self.stop()
            return Scored(low, "timeout", f"no reward within {self._timeout_s:g} s")
        except (EOFError, OSError):
            return Scored(low, "died", f"the reward's process ended with code {self.stop()}")

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


def _serve(pipe: Connection, pickled: bytes, span: Range, memory_mb: int | None) -> None:
    """The worker's loop: "" once ready (or why not), then one Scored for each item. memory_mb: address space
    beyond what is mapped after the imports; unbounded on systems without /proc."""
    import resource

    status = Path("/proc/self/statm")
    try:
        function = pickle.loads(pickled)
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
            item = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        pipe.send(attempt(function, item, span))
