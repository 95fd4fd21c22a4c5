"""Verifiable tasks as conversations with the Python tool: what reinforcement learning with tools will ask,
then the call of the problem's own program, what it gives, and the answer.

In words (`forms = { twin = 1 }`) these are zero-vision SFT (Kimi K2.5 section 2.2) for questions whose
program depends on what is seen.
"""

from earlyfusion.data.chat.template import Message, ToolCall, chat_sample
from earlyfusion.data.errors import DataError
from earlyfusion.data.programs import run_own
from earlyfusion.data.sample import Sample, Text
from earlyfusion.data.sources.base import source
from earlyfusion.data.sources.problems import Problems, ProblemsOptions
from earlyfusion.data.tool_problems import tool_messages


@source("tool_problems", ProblemsOptions, pictures=True, chat=True)
class ToolProblems(Problems):
    """See the file's head. Raises DataError for tasks whose problems have no program."""

    def made(self, number: int, key: str, heldout: bool) -> Sample:
        problem, form, _ = self._problem(number, heldout)
        if "program" not in problem.meta:
            raise DataError(f"source {self.name}: problems of {problem.task} have no program; take shelf")
        code = problem.meta["program"]
        said = run_own(code, texts=problem.meta["files"])
        messages = [
            *tool_messages(problem, form),
            Message("assistant", (), thinking=problem.thought, calls=(ToolCall("python", {"code": code}),)),
            Message("tool", (Text(said),), tool="python"),
            Message("assistant", (Text(problem.target),)),
        ]
        return chat_sample(messages, source=self.name, key=key)
