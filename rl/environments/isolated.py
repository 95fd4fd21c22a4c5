"""An environment in a process of its own: one that hangs, dies or fills the memory costs its own answer.

A process for each conversation, forked from a server that has imported what is needed once (`isolated = true`
of an entry). Its deadline ends the process with whatever it does.
"""

import asyncio
import inspect
import multiprocessing
from collections.abc import Mapping
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from earlyfusion.data.chat.template import Message
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.rl.environments.base import Environment, make_environment, message_of, step_of


@cache
def ready() -> Any:
    """What starts processes for conversations. Its server is started once and has imported what they need
    when this returns: that takes seconds, and is no part of anybody's deadline."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["earlyfusion.rl.environments"])
    first = context.Process(target=int, daemon=True)
    first.start()
    first.join()
    return context


class Isolated(Environment):
    """The environment `place` with its options, elsewhere."""

    def __init__(self, place: str, options: Mapping[str, Any]) -> None:
        self.place, self.options = place, dict(options)
        self._pipe: Connection | None = None
        self._process: Any = None

    def reset(self, problem: Problem) -> list[Message]:
        """Start the process, and the conversation in it."""
        context = ready()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.place, self.options), daemon=True)
        self._process.start()
        # Else the pipe would stay open here, and a dead process would not be noticed.
        theirs.close()
        found: list[Message] = self._ask("reset", problem)
        return found

    def step(self, message: Message) -> Any:
        """The step in the process. Raises RuntimeError for what went wrong there."""
        return self._ask("step", message)

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()

    def _ask(self, method: str, given: Any) -> Any:
        assert self._pipe is not None  # begun before it is asked
        try:
            self._pipe.send((method, given))
            fault, value = self._pipe.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"the process of {self.place} ended") from None
        if fault:
            raise RuntimeError(fault)
        return value


def _serve(pipe: Connection, place: str, options: Mapping[str, Any]) -> None:
    """The process: (method, argument) in, (what went wrong or "", result) out."""
    made: Environment | None = None
    loop = asyncio.new_event_loop()
    while True:
        try:
            method, given = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            # Here, so that what it raises is told.
            made = make_environment(place, options) if made is None else made
            value = getattr(made, method)(given)
            value = loop.run_until_complete(value) if inspect.isawaitable(value) else value
            value = [message_of(one) for one in value] if method == "reset" else step_of(value)
            pipe.send(("", value))
        except BaseException as error:
            pipe.send((f"{type(error).__name__}: {error}", None))
