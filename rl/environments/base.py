"""What an environment is: gymnasium over messages with text and pictures.

    class Guess(Environment):
        def reset(self, problem):                 # the messages that begin the conversation
            self.number = problem.meta["seed"] % 10
            return [Message("user", (Text("I think of a number from 0 to 9."),))]

        def step(self, message):                  # of the assistant -> messages, reward or None, done
            right = message.text.strip() == str(self.number)
            return [Message("user", (Text("right" if right else "wrong"),))], float(right), right

A recipe names it by `environment = "package.module:Guess"`, with its keywords as `environment_options`. Both
methods may be coroutines, which then run at once for any number of conversations, beside the engine; plain
ones run in a thread each. Every answer has an instance of its own. The answers to one prompt share what the
first `reset` of its problem says, so `reset` is a function of the problem (problem.meta["seed"] of the task
"episode").

What is paid is the sum of the rewards of all steps; where no step pays, the recipe's reward functions judge
the last message. A step that raises or takes too long costs its own answer. `close`, if there is one, is
called at the end.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from earlyfusion.data.chat.template import Message
from earlyfusion.data.errors import DataError
from earlyfusion.data.sample import Image, Segment, Text
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.kernels.aside import aside
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.kernels.files import function_at


class EnvironmentFault(DataError):
    """An environment cannot be set up as asked; the message is one line."""


@dataclass(frozen=True)
class Step:
    """What a message of the assistant led to. counts: what metrics add up, by name."""

    messages: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)


class Environment:
    """See the module. A class with `reset` and `step` need not inherit from this one."""

    answers: bool = False
    """Whether the assistant has the last word, as with tools; else the environment ends the conversation."""
    least_turns: int = 1
    """Replies without which it makes no sense; a recipe that gives fewer is refused."""

    def reset(self, problem: Problem) -> Any:
        """Begin with a problem; returns messages, the last of them not the assistant's."""
        raise NotImplementedError

    def step(self, message: Message) -> Any:
        """Take the assistant's message; returns a Step, or (messages, reward or None, done)."""
        raise NotImplementedError

    def answer(self, text: str) -> str:
        """What the reward sees of the assistant's last word; it must not raise."""
        return text

    def close(self) -> Any:
        """Give back what the instance holds."""


Factory = Callable[..., Environment]
ENVIRONMENTS: dict[str, Factory] = {}
"""Every registered environment by its name."""


def environment(name: str) -> Callable[[Factory], Factory]:
    """Register the decorated class as the environment `name`."""

    def register(factory: Factory) -> Factory:
        ENVIRONMENTS[name] = factory
        return factory

    return register


def known_environment(name: str) -> str:
    """The name of an environment. Raises EnvironmentFault for one that is neither registered nor a place."""
    if name not in ENVIRONMENTS and ":" not in name:
        told = did_you_mean(name, ENVIRONMENTS)
        raise EnvironmentFault(f"environment {name!r}; {told}, or package.module:Class")
    return name


def factory_of(name: str) -> Factory:
    """The class of a registered name or a place. Raises EnvironmentFault."""
    known_environment(name)
    return ENVIRONMENTS.get(name) or function_at(name, "environment")


def make_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """A new instance. Raises EnvironmentFault for options it does not take."""
    factory = factory_of(name)
    # Only what the arguments do not fit, not what the constructor raises.
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise EnvironmentFault(f"environment {name!r} with options {sorted(options)}: {error}") from None
    return factory(**options)


def message_of(value: Any, role: str = "user") -> Message:
    """A message as it is, or text and pictures as a message of `role`: "text", a picture, or a list of
    both."""
    if isinstance(value, Message):
        return value
    parts: list[Segment] = []
    for part in value if isinstance(value, list | tuple) else [value]:
        if isinstance(part, str):
            parts.append(Text(part, 0.0))
        else:
            parts.append(part if isinstance(part, Text | Image) else Image(part))
    return Message(role, tuple(parts))


def content_of(message: Message) -> tuple[str, str, list[bytes]]:
    """What two messages that say the same have in common: role, text, pixels."""
    pixels = [part.open().tobytes() for part in message.content if isinstance(part, Image)]
    return message.role, message.text, pixels


def step_of(value: Any) -> Step:
    """What `step` returned as a Step. Raises DataError for anything else."""
    if isinstance(value, Step):
        if not value.messages and not value.done:
            raise DataError("step returned no message, but the conversation is not done")
        return value
    if not isinstance(value, tuple) or len(value) != 3:
        told = f"{type(value).__name__}{f' of {len(value)}' if isinstance(value, tuple) else ''}"
        raise DataError(f"step returned {told}; expected (messages, reward or None, done)")
    messages, reward, done = value
    listed = messages if isinstance(messages, list | tuple) else [messages]
    number = None if reward is None else float(reward)
    if number is not None and not abs(number) < float("inf"):
        raise DataError(f"step returned the reward {reward}; expected a finite number or None")
    return step_of(Step([message_of(one) for one in listed], number, bool(done)))


class Loop:
    """Runs environments beside the engine: coroutines on one event loop, plain methods in a thread each.

    A thread that hangs is left to itself: it holds nothing that another conversation waits for.
    """

    def __init__(self) -> None:
        # A deque, for it is filled and emptied by several threads.
        self._new: deque[tuple[Coroutine[Any, Any, Any], Future[Any]]] = deque()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="environments")
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Any], timeout_s: float | None) -> Future[Any]:
        """A coroutine that runs on the loop after the next `flush`; TimeoutError after `timeout_s`
        seconds."""
        future: Future[Any] = Future()
        self._new.append((asyncio.wait_for(work, timeout_s), future))
        return future

    def flush(self) -> None:
        """Start what was submitted. All of it at once: every wake of the loop's thread holds up this one."""
        begun = [self._new.popleft() for _ in range(len(self._new))]

        def start() -> None:
            for work, future in begun:
                task = self._loop.create_task(work)
                task.add_done_callback(partial(_copy, future))

        if begun:
            self._loop.call_soon_threadsafe(start)

    async def run(self, method: Callable[..., Any], *given: Any) -> Any:
        """What a method returns: a coroutine here, anything else in a thread of its own."""
        if inspect.iscoroutinefunction(method):
            found: Coroutine[Any, Any, Any] = method(*given)
            return await found
        return await aside(method, *given)

    def close(self) -> None:
        """Stop the loop; what does not end within a second is dropped, and generators within fifteen."""

        self.flush()

        async def drain() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            # Closings get a moment, then everything is told to stop.
            for _ in range(2):
                if left:
                    _, left = await asyncio.wait(left, timeout=1.0)
                for one in left:
                    one.cancel()
            # What an environment keeps for its loop (a browser) ends with it.
            await asyncio.wait([self._loop.create_task(self._loop.shutdown_asyncgens())], timeout=15)

        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(drain(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)


def _copy(future: Future[Any], task: asyncio.Task[Any]) -> None:
    """What became of a task, for whoever waits outside of the loop."""
    if task.cancelled():
        future.cancel()
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())
