"""The sandbox as rollouts use it: programs of many answers side by side, what they print made repeatable, all
counted.

Whatever a program does costs its own answer: it ends within its limits (eval/sandbox/host.py) and the model
reads why. What is random about a place, not about a program (names of temporary directories, addresses of
objects), is taken out of its text, so that a run with one seed reads the same text again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from earlyfusion.data.chat.template import Message
from earlyfusion.data.sample import Text
from earlyfusion.eval.sandbox.host import Limits, ProgramResult, Sandbox, SandboxError
from earlyfusion.eval.tool_turns import answer_calls
from earlyfusion.rl.recipe import RolloutSection

Reply = tuple[list[Message], Sequence[ProgramResult | None] | None]
"""A tool message for every call, and the result of its program (None: none was run); None: the sandbox
failed."""
NAMES = (
    "answers",
    "valid",
    "turns",
    "calls",
    "ok",
    "error",
    "timeout",
    "memory",
    "output_limit",
    "forbidden",
    "blocked_import",
    "blocked_file",
    "blocked_network",
    "blocked_process",
    "blocked_other",
    "not_a_program",
    "malformed",
    "over_turns",
    "over_tokens",
    "unavailable",
)
"""What is counted. answers; those with a valid call (valid); messages with calls that were answered (turns);
programs run (calls) by how they ended (ok ... forbidden); refusals by kind, one for each; calls of another
tool or without code (not_a_program); messages whose markup is broken around a call (malformed); calls after
the last turn; tool turns without room; programs that could not be started (unavailable)."""
NETWORK = (
    "socket",
    "_socket",
    "ssl",
    "_ssl",
    "urllib",
    "http",
    "ftplib",
    "smtplib",
    "requests",
    "asyncio",
    "poplib",
)
PROCESS = (
    "os.fork",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "os.kill",
    "subprocess",
    "_posixsubprocess",
    "pty",
    "multiprocessing",
    "_multiprocessing",
    "threading",
    "_thread",
    "concurrent",
    "signal",
)
FILES = ("open", "os.", "shutil", "tempfile", "glob", "pathlib")
_FOLDER = re.compile(r"/[^\s'\"]*/program-[a-z0-9_]{8}\b")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}\b")


def repeatable(text: str) -> str:
    """The text without names of temporary directories and addresses of objects."""
    return _ADDRESS.sub("0x0", _FOLDER.sub(".", text))


def kinds_of(refused: str) -> list[str]:
    """Counters of one refusal of the sandbox ("import socket", "open", "os.fork", ...)."""
    name = refused.removeprefix("import ")
    kinds = ["blocked_import"] if refused.startswith("import ") else []
    if name.split(".")[0] in NETWORK:
        return [*kinds, "blocked_network"]
    if name.startswith(PROCESS):
        return [*kinds, "blocked_process"]
    if name.startswith(FILES):
        return [*kinds, "blocked_file"]
    return kinds or ["blocked_other"]


class ToolDesk:
    """Runs the calls of messages, `rollout.tool_workers` messages at a time.

    Raises SandboxError when no sandbox can be started here, or one of its walls is missing and allow_weaker
    is not set, at once and not in the middle of a run. weaker: what records say of a sandbox with walls
    missing, "" for a whole one.
    """

    def __init__(self, rollout: RolloutSection, allow_weaker: bool = False) -> None:
        limits = Limits(
            wall_s=2 * rollout.tool_timeout_s,
            cpu_s=rollout.tool_timeout_s,
            memory_mb=rollout.tool_memory_mb,
            max_chars=16 * rollout.tool_output_tokens,
        )
        self.sandbox = Sandbox(limits, allow_weaker=allow_weaker)
        self.counts: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(rollout.tool_workers, thread_name_prefix="tool")
        try:
            self.weaker = self.sandbox.check().weaker
        except BaseException:
            self.close()
            raise

    def start(self, message: Message, files: Mapping[str, Any]) -> Future[Reply]:
        """Run the calls of a message; the result never raises."""
        return self._pool.submit(self._run, message, files)

    def _run(self, message: Message, files: Mapping[str, Any]) -> Reply:
        try:
            messages, results = answer_calls(message, self.sandbox, files)
        except (SandboxError, OSError) as error:
            said = (Text(f"the tool is not available: {type(error).__name__}"),)
            return [
                Message("tool", said, tool=call.tool, index=i + 1) for i, call in enumerate(message.calls)
            ], None
        return [replace(one, content=(Text(repeatable(one.text)),)) for one in messages], results

    def count(self, results: Sequence[ProgramResult | None] | None) -> bool:
        """Count what became of the calls of one message; True when a program ran. Called by one thread."""
        self.counts["turns"] += 1
        self.counts["unavailable"] += results is None
        for result in results or ():
            if result is None:
                self.counts["not_a_program"] += 1
                continue
            self.counts["calls"] += 1
            self.counts[result.reason] += 1
            for refused in result.refused:
                self.counts.update(kinds_of(refused))
        return any(result is not None for result in results or ())

    def close(self) -> None:
        """Wait for the programs that run (their limits end them), drop the others, stop the sandbox."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.sandbox.close()
