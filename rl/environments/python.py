"""The tool python(code): calls of the assistant run in the sandbox, with the picture as a file."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from threading import BoundedSemaphore

from earlyfusion.data.chat.template import Message
from earlyfusion.data.sample import Text
from earlyfusion.data.tasks.problem import Form, Problem
from earlyfusion.data.tool_problems import tool_files, tool_messages
from earlyfusion.eval.sandbox.host import Limits, ProgramResult, Sandbox, SandboxError
from earlyfusion.eval.tool_talks import answer_calls
from earlyfusion.rl.environments.base import Environment, Step, environment

MEMORY_MB = 256.0
"""Memory of a program beyond that of an idle interpreter."""
WORKERS = 2
"""Programs that run at a time, by one process."""
_FOLDER = re.compile(r"/[^\s'\"]*/program-[a-z0-9_]{8}\b")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}\b")


def repeatable(text: str) -> str:
    """The text without what is random about a place, not about a program: names of temporary directories,
    addresses of objects. A run with one seed then reads the same text again."""
    # What differs from run to run would otherwise reach the model's context.
    return _ADDRESS.sub("0x0", _FOLDER.sub(".", text))


class Programs:
    """The one sandbox of a process, and its walls.

    Raises SandboxError when no sandbox can be started here, or one of its walls is missing and allow_weaker
    is not set, at once and not in the middle of a run. weaker: what records say of a sandbox with walls
    missing, "" for a whole one.
    """

    def __init__(self, timeout_s: float, output_tokens: int, allow_weaker: bool) -> None:
        # The clock, which a busy machine slows, gets twice the CPU time.
        # Sixteen characters a token is more than any tokenizer needs; the rest would be cut anyway.
        limits = Limits(
            wall_s=2 * timeout_s, cpu_s=timeout_s, memory_mb=MEMORY_MB, max_chars=16 * output_tokens
        )
        self.sandbox = Sandbox(limits, allow_weaker=allow_weaker)
        self.room = BoundedSemaphore(WORKERS)
        try:
            self.weaker = self.sandbox.check().weaker
        except BaseException:
            self.sandbox.close()
            raise

    def close(self) -> None:
        """Stop the sandbox."""
        self.sandbox.close()


@environment("python")
class PythonTool(Environment):
    """See the module. form: how the problem is shown; programs: the sandbox that all answers share (None
    where only the prompt is wanted)."""

    answers = True

    def __init__(self, form: Form = "picture", programs: Programs | None = None) -> None:
        self.form, self.programs = form, programs
        self.files: dict[str, bytes] = {}

    def reset(self, problem: Problem) -> list[Message]:
        """System message and question; the files of the programs are laid ready."""
        if self.programs is not None:
            self.files = tool_files(problem, self.form)
        return tool_messages(problem, self.form)

    def step(self, message: Message) -> Step:
        """One tool message for every call; counts of what became of the programs."""
        assert self.programs is not None  # a prompt alone is never answered
        try:
            with self.programs.room:
                messages, results = answer_calls(message, self.programs.sandbox, self.files)
        except (SandboxError, OSError) as error:
            # The name of the error alone: its text may hold paths of this machine.
            failure = (Text(f"the tool is not available: {type(error).__name__}"),)
            calls = enumerate(message.calls, start=1)
            told = [Message("tool", failure, tool=call.tool, index=index) for index, call in calls]
            return Step(told, counts={"unavailable": 1})
        said = [replace(one, content=(Text(repeatable(one.text)),)) for one in messages]
        return Step(said, counts=counted(results))


def counted(results: Sequence[ProgramResult | None]) -> Counter[str]:
    """What became of the calls of one message."""
    counts: Counter[str] = Counter()
    for result in results:
        if result is None:
            counts["not_a_program"] += 1
            continue
        counts.update(["calls", result.reason])
        counts["blocked"] += len(result.refused)
    return counts
