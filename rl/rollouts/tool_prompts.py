"""Problems as conversations with the Python tool: what the model is told and shown, and what its programs
find.

The form is that of the sources `chat_scenes` and `zero_vision` (data/sources/zero_vision.py), so a model
comes here from SFT on those: the picture, or its description, and the question; programs open the picture by
its name.
"""

from __future__ import annotations

import io

from PIL import Image as PILImage

from earlyfusion.data.chat.template import Message
from earlyfusion.data.sample import Image, Segment, Text
from earlyfusion.data.sources.zero_vision import SYSTEM
from earlyfusion.data.tasks.problem import Form, Problem
from earlyfusion.data.tasks.rendering import render_text
from earlyfusion.data.tool_tasks import FILE

PLAIN_SYSTEM = "Answer with the tool python(code)."
"""The system message where there is no picture at all."""


def tool_messages(problem: Problem, form: Form) -> list[Message]:
    """System message and question. Raises TaskError for an unknown form."""
    problem.check_form(form)
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
    """What programs find under the name FILE: what the model sees, or the scene that it is told in words."""
    return render_text(problem.description) if form == "rendered" else problem.picture


def tool_files(problem: Problem, form: Form) -> dict[str, bytes]:
    """The files in the directory of every program: PNG by name."""
    picture = tool_picture(problem, form)
    if picture is None:
        return {}
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return {FILE: buffer.getvalue()}
