"""The options of a verb as one model: its fields are the options, the docstrings below them their help.

    class ServeOptions(Options):
        port: int = Field(8000, ge=0)

    @verb
    def serve(options: ServeOptions) -> int: ...

The help of the verb is the docstring of its module.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, get_type_hints

import typer
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from earlyfusion.kernels.errors import UserError


class Options(BaseModel):
    """Options of one verb. Fields named by `positional` take what is no option; a serialization_alias is what
    an option is called where that is not the field's name."""

    positional: ClassVar[tuple[str, ...]] = ("words",)
    model_config = ConfigDict(use_attribute_docstrings=True, extra="forbid", validate_default=True)


class SamplingOptions(Options):
    """What `generate` and `chat` share: a model, pictures, how to sample."""

    model: str
    """model directory (config.json, model.safetensors), or embedded:NAME"""
    image: list[str] = []
    """picture for the (first) message; may be given again"""
    max_new_tokens: PositiveInt = 64
    """longest answer, in tokens"""
    temperature: float = 0.0
    """0 takes the likeliest token"""
    top_p: float = 1.0
    """sample from the likeliest mass P"""
    seed: int = 0
    """seed of the sampling"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""


def verb(run: Callable[[Any], int | None]) -> Callable[..., int | None]:
    """`run(options)` as a function with a typed argument for each option, as pipeline/cli.py takes it.

    Its help is the docstring of its module. What it is called with is validated by the model, and refused
    with a UserError in one line.
    """
    model: type[Options] = get_type_hints(run)["options"]

    def command(**values: Any) -> int | None:
        try:
            options = model(**values)
        # The first mistake is enough: the next is told when this one is mended.
        except ValidationError as error:
            wrong = error.errors()[0]
            name = str(wrong["loc"][0]).rstrip("_").replace("_", "-")
            raise UserError(f"--{name} {wrong['input']!r}: {wrong['msg']}") from None
        return run(options)

    parameters = []
    for name, entry in model.model_fields.items():
        # Without a default the library asks for it.
        default = inspect.Parameter.empty if entry.is_required() else entry.default
        flag = f"--{entry.serialization_alias or name.rstrip('_').replace('_', '-')}"
        if entry.annotation == (bool | None):  # three answers: yes, no, and as things are
            flag += f"/--no-{flag.removeprefix('--')}"
        taken: Any = typer.Option(flag, help=entry.description)
        if name in model.positional:
            taken = typer.Argument(hidden=not entry.description, help=entry.description)
        annotation: Any = Annotated[entry.annotation, taken]  # type: ignore[name-defined]
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))

    # typer reads a function's signature: this one is the model's.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = sys.modules[run.__module__].__doc__
    return command
