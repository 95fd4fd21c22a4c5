"""A typed function as a tool that a model reads of: its name, what it does, its arguments."""

import inspect
from collections.abc import Callable
from typing import Any

from pydantic import ConfigDict, PydanticUserError, create_model

from earlyfusion.data.errors import DataError
from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import Record


def declaration(function: Callable[..., Any]) -> Record:
    """A function as a tool in the OpenAI form. Raises DataError for an argument without a usable
    annotation."""
    name = getattr(function, "__name__", type(function).__name__)
    fields: Record = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.annotation is parameter.empty or parameter.kind not in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            raise DataError(f"tool {name}: argument {parameter.name!r} needs a plain type, such as str")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (parameter.annotation, default)
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except PydanticUserError as error:
        raise DataError(f"tool {name}: {one_line(error, 200)}") from None
    schema: Record = model.model_json_schema()
    schema.pop("title", None)
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
    text = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
    about = {"name": name, "description": text, "parameters": schema}
    return {"type": "function", "function": about}
