"""A problem as a conversation with the Python tool: its messages, and what programs find in their folder."""

import io

from PIL import Image as PILImage

from earlyfusion.data.chat.template import Message
from earlyfusion.data.sample import Image, Segment, Text
from earlyfusion.data.synth.panels import render_text
from earlyfusion.data.tasks.problem import Form, Problem
from earlyfusion.data.tool_tasks import FILE, SYSTEM

PLAIN_SYSTEM = "Answer with the tool python(code)."
"""The system message of a prompt with tools that has no picture at all."""


def tool_messages(problem: Problem, form: Form) -> list[Message]:
    """System message and question of a prompt with tools.

    The form is that of the sources `chat_scenes` and `zero_vision`, so a model comes here from SFT on those.
    """
    # What the program finds is no picture: it must be looked at.
    if files := problem.meta.get("files"):
        system = f"{PLAIN_SYSTEM} It finds {' and '.join(files)}."
        return [Message("system", (Text(system, 0.0),)), *problem.chat(form)]
    # A scene told in words still has a picture for the program, which may not look at it alone.
    if problem.messages:
        return [Message("system", (Text(SYSTEM if problem.image else PLAIN_SYSTEM, 0.0),)), *problem.messages]
    picture = tool_picture(problem, form)
    shown: list[Segment] = []
    if picture is not None and form != "twin":
        shown = [Image(picture)]
    elif problem.description:
        named = f"The picture {FILE}:\n" if picture is not None else ""
        shown = [Text(f"{named}{problem.description}\n", 0.0)]
    system = PLAIN_SYSTEM if picture is None else SYSTEM
    return [Message("system", (Text(system, 0.0),)), Message("user", (*shown, Text(problem.question, 0.0)))]


def tool_picture(problem: Problem, form: Form) -> PILImage.Image | None:
    """What programs find under the name FILE: the picture as it is shown, or the scene described in words."""
    return render_text(problem.description) if form == "rendered" else problem.image


def tool_files(problem: Problem, form: Form) -> dict[str, bytes]:
    """The files in the directory of every program by name: those of the problem, else its picture as PNG."""
    if "files" in problem.meta:
        return {name: text.encode() for name, text in problem.meta["files"].items()}
    picture = tool_picture(problem, form)
    if picture is None:
        return {}
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return {FILE: buffer.getvalue()}
