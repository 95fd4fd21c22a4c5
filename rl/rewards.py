"""Rewards as a trainer runs them: any function of (problem, response), contained, bounded and counted.

    with Rewards(TaskReward(tasks)) as rewards:
        scored = rewards([(problem, text), ...])  # one Scored each, in order; never raises for one answer
        rewards.report()                          # {"ok": 63, "timeout": 1, ..., "by_task": {"maze": 0.41}}

A reward may be any finite number. One that raises, hangs, dies or returns no number costs its own answer (the
lowest of the declared range, 0 by default) and a count, never the run; one outside the declared range stands,
and is counted. Three ways to run a function:
    inline    in this thread: for rewards known to return (the tasks of data/tasks)
    threads   side by side with a deadline: for rewards that wait for a server (rl/judge.py)
    process   in worker processes that are killed at the deadline and started anew: for everything else;
              `memory_mb` bounds what a worker may allocate beyond its imports (Linux)
"""

from __future__ import annotations

import math
import multiprocessing
import pickle
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeAlias

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.tasks.problem import Problem, Task
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.kernels.places import function_at

RewardFunction: TypeAlias = Callable[[Problem, str], float]
Isolation: TypeAlias = Literal["inline", "threads", "process"]
Item: TypeAlias = tuple[Problem, str]
ISOLATIONS = ("inline", "threads", "process")
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
        return float(digest64("random reward", self.seed, problem.key, response) & 1)


class OnTop:
    """A second opinion on verified answers: (1 - weight) * base + weight * extra where base > 0, else
    base."""

    def __init__(self, base: RewardFunction, extra: RewardFunction, weight: float = 0.2) -> None:
        if not 0 <= weight <= 1:
            raise RewardError(f"OnTop: weight {weight}; expected 0 to 1")
        self.base, self.extra, self.weight = base, extra, weight

    def __call__(self, problem: Problem, response: str) -> float:
        base = self.base(problem, response)
        return (1 - self.weight) * base + self.weight * self.extra(problem, response) if base > 0 else base


def make_reward(name: str, tasks: Sequence[Task], seed: int = 0) -> tuple[RewardFunction, Isolation]:
    """(function, how to run it) of "task", "random" or "package.module:function". Raises RewardError for
    others."""
    if name == "task":
        return TaskReward(tasks), "inline"
    if name == "random":
        return RandomReward(seed), "inline"
    if ":" not in name:
        raise RewardError(
            f"reward {name!r}; {did_you_mean(name, ('task', 'random'))}, or package.module:function"
        )
    function = function_at(name, "reward.name")
    return function, "process"


@dataclass(frozen=True)
class Range:
    """What rewards are expected to be. low: what an answer earns that could not be scored."""

    low: float = 0.0
    high: float = 1.0

    def share(self, value: float) -> float:
        """How far a reward is on the way from the lowest to the highest; 1 is a right answer."""
        return (value - self.low) / (self.high - self.low)


def judged(value: Any, span: Range) -> Scored:
    """A returned value as Scored: every finite number as it is ("outside" beyond the range), all else
    "invalid"."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return Scored(span.low, "invalid", f"returned {type(value).__name__}, expected a number")
    if not math.isfinite(number):
        return Scored(span.low, "invalid", f"returned {number}")
    if not span.low <= number <= span.high:
        return Scored(
            number,
            "outside",
            f"returned {number:g}; reward.low and reward.high say {span.low:g} to {span.high:g}",
        )
    return Scored(number)


def attempt(function: RewardFunction, item: Item, span: Range) -> Scored:
    """Call the function; an exception becomes a Scored (also SystemExit, which would end the run)."""
    try:
        return judged(function(*item), span)
    except (Exception, SystemExit) as error:
        return Scored(span.low, "error", " ".join(f"{type(error).__name__}: {error}".split())[:300])


class Rewards:
    """See the file's head.

    function: any callable of (problem, response). isolation: how it runs. timeout_s: deadline of one call
    (threads and process). workers: calls in flight. span: the range that rewards are declared to have.
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
        if isolation not in ISOLATIONS:
            raise RewardError(f"isolation {isolation!r}; {did_you_mean(str(isolation), ISOLATIONS)}")
        if not timeout_s > 0 or workers < 1:
            raise RewardError(f"timeout_s {timeout_s}, workers {workers}: expected > 0 and >= 1")
        self.function, self.isolation, self.timeout_s = function, isolation, timeout_s
        self.workers, self.span = workers, span
        self.counts: Counter[str] = Counter()
        self.last_failures: list[str] = []
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._seconds = 0.0
        self._processes = (
            [_Worker(function, timeout_s, span, memory_mb) for _ in range(workers)]
            if isolation == "process"
            else []
        )

    def __call__(self, items: Sequence[Item]) -> list[Scored]:
        """The rewards of the answers, in order."""
        begun = time.perf_counter()
        run = {"inline": self._inline, "threads": self._threads, "process": self._process}[self.isolation]
        scored = run(items)
        self._seconds += time.perf_counter() - begun
        for (problem, _), one in zip(items, scored):
            self.counts[one.status] += 1
            total = self._sums[problem.task]
            total[0], total[1] = total[0] + one.value, total[1] + 1
            if one.status != "ok":
                self.last_failures = [*self.last_failures[-19:], f"{problem.key}: {one.status}: {one.detail}"]
        return scored

    def report(self) -> dict[str, Any]:
        """Counts by status, mean reward by task, seconds spent, the last failures; since the object was
        made."""
        means = {task: total / number for task, (total, number) in sorted(self._sums.items())}
        counts = {status: self.counts[status] for status in STATUSES}
        return {
            **counts,
            "by_task": means,
            "seconds": self._seconds,
            "last_failures": list(self.last_failures),
        }

    def _inline(self, items: Sequence[Item]) -> list[Scored]:
        return [attempt(self.function, item, self.span) for item in items]

    def _threads(self, items: Sequence[Item]) -> list[Scored]:
        """A daemon thread for each call; one past its deadline is left behind and its result ignored."""
        found: dict[int, Scored] = {}
        done: queue.Queue[tuple[int, Scored]] = queue.Queue()
        waiting, running = list(range(len(items)))[::-1], dict[int, float]()

        def call(index: int) -> None:
            done.put((index, attempt(self.function, items[index], self.span)))

        while waiting or running:
            while waiting and len(running) < self.workers:
                index = waiting.pop()
                running[index] = time.monotonic() + self.timeout_s
                threading.Thread(target=call, args=(index,), daemon=True).start()
            try:
                index, scored = done.get(timeout=max(0.0, min(running.values()) - time.monotonic()))
                if running.pop(index, None) is not None:
                    found[index] = scored
            except queue.Empty:
                now = time.monotonic()
                for index in [index for index, deadline in running.items() if deadline <= now]:
                    del running[index]
                    found[index] = Scored(self.span.low, "timeout", f"no reward within {self.timeout_s:g} s")
        return [found[index] for index in range(len(items))]

    def _process(self, items: Sequence[Item]) -> list[Scored]:
        free: queue.Queue[_Worker] = queue.Queue()
        for worker in self._processes:
            free.put(worker)

        def score(item: Item) -> Scored:
            worker = free.get()
            try:
                return worker.score(item)
            finally:
                free.put(worker)

        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(score, items))

    def close(self) -> None:
        """End the worker processes."""
        for worker in self._processes:
            worker.stop()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """One process that scores one answer at a time; started when needed, killed at a deadline."""

    def __init__(
        self, function: RewardFunction, timeout_s: float, span: Range, memory_mb: int | None
    ) -> None:
        try:
            self._function = pickle.dumps(function)
        except Exception as error:
            raise RewardError(
                f"isolation process needs a reward that another process can import: {error}"
            ) from None
        self._timeout_s, self._span, self._memory_mb = timeout_s, span, memory_mb
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, self._function, self._span, self._memory_mb)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self._process, self._pipe = process, ours
        if not ours.poll(START_S):
            self.stop()
            raise RewardError(f"the reward's worker process was not ready within {START_S:g} s")
        try:
            problem = ours.recv()
        except (EOFError, OSError):
            problem = "it died while importing"
        if problem is not None:
            self.stop()
            raise RewardError(f"the reward cannot be loaded in a worker process: {problem}")
        return ours

    def score(self, item: Item) -> Scored:
        """The reward of one answer; the process is gone afterwards if it hung or died."""
        pipe = self._pipe if self._pipe is not None else self._start()
        try:
            pipe.send(item)
            if not pipe.poll(self._timeout_s):
                self.stop()
                return Scored(self._span.low, "timeout", f"no reward within {self._timeout_s:g} s")
            return pipe.recv()
        except (EOFError, OSError):
            code = self.stop()
            return Scored(self._span.low, "died", f"the reward's process ended with code {code}")

    def stop(self) -> int | None:
        """Kill the process; its exit code, None if there was none."""
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        if process is None:
            return None
        process.join(0.2)
        if process.is_alive():
            process.kill()
            process.join(5)
        return process.exitcode


def _serve(pipe: Connection, pickled: bytes, span: Range, memory_mb: int | None) -> None:
    """The worker's loop: None once ready (or why not), then one Scored for each item."""
    try:
        function = pickle.loads(pickled)
        if memory_mb is not None:
            _limit_memory(memory_mb)
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send(None)
    while True:
        try:
            item = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        pipe.send(attempt(function, item, span))


def _limit_memory(megabytes: int) -> None:
    """Address space of what is mapped now and `megabytes` more; nothing on systems without /proc."""
    import resource
    from pathlib import Path

    status = Path("/proc/self/statm")
    if status.exists():
        mapped = int(status.read_text().split()[0]) * resource.getpagesize()
        limit = mapped + megabytes * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
