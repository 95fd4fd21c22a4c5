"""The turn of the tool: an assistant's calls of `python` run in the sandbox and answered with tool messages.

    parsed = parse_assistant(ids, tokenizer)
    messages += [parsed.message, *answer_calls(parsed.message, sandbox, {"image.png": picture})]

The same pictures that the model sees are files in the directory of its programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from earlyfusion.data.chat.template import Message
from earlyfusion.data.sample import Image, Text
from earlyfusion.eval.sandbox.host import ProgramResult, Sandbox

TOOL = "python"
MAX_CALLS = 8
"""Calls of one message that are run; the others are told so."""


def picture_files(messages: Sequence[Message]) -> dict[str, Any]:
    """The pictures of a conversation by the names they have for programs: image.png, image2.png, ..."""
    # In the order in which the model sees them, which is how it will count them.
    pictures = [part.open() for message in messages for part in message.content if isinstance(part, Image)]
    return {f"image{i + 1 if i else ''}.png": picture for i, picture in enumerate(pictures)}


def answer_calls(
    message: Message, sandbox: Sandbox, files: Mapping[str, Any]
) -> tuple[list[Message], list[ProgramResult | None]]:
    """One tool message for every call, in order, with the result of its program (None: there was none to
    run).

    A call of another tool, or without a string `code`, is answered with one line that says what was expected.
    """
    answers: list[Message] = []
    results: list[ProgramResult | None] = []
    for number, call in enumerate(message.calls):
        # Whatever the model asked for is answered with one line, so that the talk can go on.
        code = call.arguments.get("code")
        result = None
        if call.tool != TOOL:
            text = f"no tool {call.tool!r}; there is {TOOL}(code)"
        elif not isinstance(code, str):
            text = f"{TOOL} needs one argument: code, a string"
        elif number >= MAX_CALLS:
            text = f"not run: at most {MAX_CALLS} calls in one message"
        else:
            result = sandbox.run(code, files)
            text = result.text

        answers.append(Message("tool", (Text(text),), tool=call.tool, index=number + 1))
        results.append(result)
    return answers, results
