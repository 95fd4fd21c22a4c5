"""Tools of your own: typed functions that the assistant calls by name.

    environment = "functions"
    environment_options = { functions = ["my_tools:search", "my_tools:add"] }

    def add(a: int, b: int = 1) -> int:
        "Add two numbers."
        return a + b

The declarations that the model reads in the system message are made of the name, the first paragraph of the
docstring and the annotations; the arguments of a call are checked against them before the function sees them
(by pydantic). What it returns is shown as text, pictures as pictures. A function may be a coroutine. An
exception is told to the model in one line; functions run in this process, so take `isolated = true` for code
that may hang or die.
"""

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from PIL import Image as PILImage
from pydantic import ValidationError, validate_call

from earlyfusion.data.chat.declare import declaration
from earlyfusion.data.chat.template import Message, ToolCall, tools_message
from earlyfusion.data.sample import Image, Text
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.kernels.errors import did_you_mean, one_line
from earlyfusion.kernels.files import function_at, plain
from earlyfusion.rl.environments.base import Environment, EnvironmentFault, Step, environment, message_of

MAX_CALLS = 8
"""Calls of one message that are run; the others are told so."""


@environment("functions")
class Functions(Environment):
    """See the module. functions: places of functions, "package.module:function". Raises EnvironmentFault,
    UserError for what cannot be imported."""

    answers = True

    def __init__(self, functions: Sequence[str]) -> None:
        found = [function_at(place, "functions") for place in functions]
        self.declared = [declaration(function) for function in found]
        self.functions = {one["function"]["name"]: f for one, f in zip(self.declared, found)}
        if len(self.functions) != len(found) or not found:
            raise EnvironmentFault(f"functions {list(functions)}: give at least one, of different names")

    def reset(self, problem: Problem) -> list[Message]:
        """The declarations, then the question."""
        return [tools_message(self.declared), *problem.chat()]

    async def step(self, message: Message) -> Step:
        """One tool message for every call, all calls at once."""
        counts: Counter[str] = Counter()
        said = await asyncio.gather(*(self._call(i, call, counts) for i, call in enumerate(message.calls)))
        return Step(list(said), counts=counts)

    async def _call(self, number: int, call: ToolCall, counts: Counter[str]) -> Message:
        function = self.functions.get(call.tool)
        if function is None:
            counts["not_a_program"] += 1
            shown: Any = f"no tool {call.tool!r}; {did_you_mean(call.tool, self.functions)}"
        elif number >= MAX_CALLS:
            counts["not_a_program"] += 1
            shown = f"not run: at most {MAX_CALLS} calls in one message"
        else:
            counts["calls"] += 1
            try:
                checked = validate_call(function)
                shown = checked(**call.arguments)
                if inspect.isawaitable(shown):
                    shown = await shown
                counts["ok"] += 1
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"])) or call.tool
                counts["error"] += 1
                shown = f"{call.tool}: {where}: {first['msg']}"
            except Exception as error:
                counts["error"] += 1
                shown = one_line(f"{type(error).__name__}: {error}", 300)
        content = message_of(_shown(shown), "tool").content
        return Message("tool", content, tool=call.tool, index=number + 1)


def _shown(value: Any) -> Any:
    """What a tool returned as text and pictures."""
    if isinstance(value, str | PILImage.Image | Image | Text):
        return value
    if isinstance(value, list) and any(isinstance(part, PILImage.Image) for part in value):
        return value
    return json.dumps(plain(value), ensure_ascii=False)
