"""The arguments of a verb that takes recipes: recipes, plain options, dotted overrides of every key.

    VERB RECIPE [RECIPE...] [--out DIR] [--steps N] [--init-from DIR] [--resume] [--dry-run] [--section.key
    VALUE]...

The recipe keys of the help are made from the pydantic schema, so they cannot disagree with it. A run keeps
what it was started with in command.json; `--resume` reads it, so nothing has to be said twice.
"""

import json
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import typer
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined
from typer.core import TyperCommand

from earlyfusion.data.options import Options, verb
from earlyfusion.data.sources.base import KINDS
from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.kernels.files import write_json
from earlyfusion.model.config import ModelConfig
from earlyfusion.pipeline.config.compose import compose
from earlyfusion.pipeline.config.schema import READ_BEFORE, model_in
from earlyfusion.vision.config import VisionConfig

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
"""Of every command (click's context settings)."""
STARTED = "command.json"
"""File in the output folder: recipes and overrides as JSON."""
OF_ONE_CALL = ("run.out", "run.steps")
"""Overrides that a resume does not take over."""
Override = tuple[str, str]


class RecipeArguments(BaseModel):
    """What a verb was asked: recipes in order, overrides as (dotted key, text), and the two flags, which
    command.json does not hold."""

    recipes: list[str]
    overrides: list[Override]
    resume: bool = False
    dry_run: bool = False
    options: Any = None
    """RecipeOptions, or the verb's own"""


class RecipeOptions(Options):
    """What a verb of recipes takes besides the recipe keys; None: as the recipe says."""

    positional: ClassVar[tuple[str, ...]] = ("recipes",)

    recipes: list[str] = []
    """a shipped name or a path to a TOML file; several compose left to right, later ones win"""
    out: str | None = None
    """output folder (run.out)"""
    steps: int | None = None
    """stop after N steps of the recipe's schedule (run.steps)"""
    init_from: str | None = None
    """model directory for a warm start, weights only (run.init_from)"""
    resume: bool = False
    """continue from the newest complete checkpoint in the output folder, with the recipes and overrides of
    that run (but for --steps); overrides given now come on top"""
    dry_run: bool = False
    """check what can be checked, print sizes and stages, then leave (earlyfusion plan prints everything)"""


def recipe_command(
    name: str,
    about: str,
    schema: type[BaseModel],
    run: Callable[[RecipeArguments], int | None],
    default: str | None = None,
    options: type[RecipeOptions] = RecipeOptions,
) -> TyperCommand:
    """The command of a verb that takes recipes of `schema`; it calls `run`. default: the recipe where none is
    named; options: what the verb takes besides recipe keys.

    With --resume the recipes (where none is named) and the overrides of the run come first.
    """

    # What the command finds among the words before it reads the rest; read by `called`.
    given: list[Override] = []

    def called(options: RecipeOptions) -> int | None:
        if not options.recipes and default is None:
            raise UserError(f"no recipe given; try: earlyfusion {name} nano")
        parsed = RecipeArguments(
            recipes=options.recipes or [str(default)],
            overrides=[],
            resume=options.resume,
            dry_run=options.dry_run,
            options=options,
        )

        # As JSON: a folder is text even when its name reads like a number.
        for key, value in options.model_dump(include={"out", "steps", "init_from"}).items():
            if value is not None:
                parsed.overrides.append((f"run.{key}", json.dumps(value)))
        parsed.overrides += given
        if options.resume:
            recall(parsed, named=bool(options.recipes))
        return run(parsed)

    called.__annotations__["options"] = options

    # The dotted keys are no options of typer's: the command takes them out before it reads the rest.
    class Command(RecipeCommand):
        keys_of, overrides = schema, given

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=Command, help=about, context_settings=SETTINGS)(verb(called))
    return typing.cast(TyperCommand, typer.main.get_command(app))


class RecipeCommand(TyperCommand):
    """A command that also takes `--section.key VALUE` for every key of `keys_of`, as its help lists them."""

    keys_of: ClassVar[type[BaseModel]]
    overrides: ClassVar[list[Override]]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words, self.overrides[:] = split_overrides(args)
        sections = self.keys_of.model_fields
        for key, _ in self.overrides:
            section = key.partition(".")[0]
            if section not in sections:
                near = did_you_mean(section, sections)
                raise UserError(f"--{key}: no section {section!r} in a recipe; {near}")

        # A recipe key that lacks its section: --lr.
        known = {option for parameter in self.params for option in parameter.opts}
        # Before the library complains: it knows nothing of the keys behind the dots.
        for word in words:
            option = word.partition("=")[0]
            ends = f".{option.removeprefix('--')}"
            meant = [f"--{key}" for key, *_ in describe(self.keys_of) if key.endswith(ends)]
            if option.startswith("--") and option not in known and meant:
                raise UserError(f"option {option} is not known; did you mean {' or '.join(meant[:3])}?")
        return super().parse_args(ctx, words)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for key, kind, default, text in describe(self.keys_of):
            rows.append((f"--{key}", f"{kind} [{default}] {text}"))
            if key == "data.sources.<i>.options":
                for source in KINDS.values():
                    keys = [f"{name} [{default}]" for name, _, default, _ in describe(source.options)]
                    rows.append((f"  {source.name}:", ", ".join(keys) or "none"))
        # Behind the options, as it is far longer.
        with formatter.section("recipe keys"):
            formatter.write_text(
                "A value is a TOML literal or plain text, null is None; an item of a list is addressed by"
                " number or name: --stages.joint.lr 1e-3"
            )
            formatter.write_dl(rows, col_max=26)


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[Override]]:
    """(the other words, overrides): `--section.key VALUE`, `--section.key=VALUE`, or alone for true."""
    rest, others, overrides = list(words), [], []
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            others.append(word)
            continue
        if not has_value:
            # A flag alone means true; -1 is a value.
            alone = not rest or rest[0].startswith("--")
            value = "true" if alone else rest.pop(0)
        overrides.append((name, value))
    return others, overrides


def recall(parsed: RecipeArguments, named: bool) -> None:
    """Put what the run in the output folder was started with before what is given now."""
    # The folder is known before the recipe is: only its name can be asked for here.
    given = [item for item in parsed.overrides if item[0] in ("run.out", "run.name")]
    run = compose([] if "run.out" in dict(given) else parsed.recipes, given).get("run") or {}
    path = Path(run.get("out") or f"runs/{run.get('name', 'run')}") / STARTED
    if not path.is_file():
        return
    try:
        stored = RecipeArguments.model_validate_json(path.read_bytes())
    except ValidationError as error:
        text = f"{path}: damaged ({error.errors()[0]['msg']})"
        raise UserError(f"{text}; remove it and give the overrides of the run again") from None
    # A recipe on the line is another wish than the run's own.
    if not named:
        parsed.recipes = stored.recipes
    parsed.overrides = stored.overrides + parsed.overrides


def remember(folder: str | Path, parsed: RecipeArguments) -> None:
    """Write command.json: what a resume of the run in `folder` begins with."""
    # A path is kept from the root: a resume may start elsewhere.
    recipes = [str(Path(name).resolve()) if name.endswith(".toml") else name for name in parsed.recipes]
    overrides = {key: text for key, text in parsed.overrides if key not in OF_ONE_CALL}
    write_json(Path(folder) / STARTED, {"recipes": recipes, "overrides": list(overrides.items())})


def describe(schema: type[BaseModel], path: str = "") -> list[tuple[str, str, str, str]]:
    """(dotted key, type, default, meaning) of every leaf key of a schema, in order."""
    rows = []
    for name, info in schema.model_fields.items():
        key = f"{path}.{name}" if path else name
        inner, is_list = model_in(info.annotation)
        # A section is told by its keys, a list of sections by those of one item.
        if inner is not None:
            # By the type too: a chat recipe's or a reward's `model` has no size of its own.
            if inner in (ModelConfig, VisionConfig):
                rows += [(f"{key}.{extra}", *about) for extra, about in READ_BEFORE[name].items()]
            rows += describe(inner, f"{key}.<i>" if is_list else key)
            continue

        default = info.get_default(call_default_factory=True, validated_data={})
        # As it would be typed.
        shown = "null" if default is None else repr(default)
        if default is PydanticUndefined:
            shown = "required"
        rows.append((key, type_name(info.annotation), shown, " ".join((info.description or "").split())))
    return rows


def type_name(annotation: Any) -> str:
    """int, float | null, stop|skip|rollback, list[str]."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is typing.Annotated:
        return type_name(args[0])
    if origin is typing.Literal:
        return "|".join(str(arg) for arg in args)
    names = ["..." if arg is Ellipsis else type_name(arg) for arg in args]
    if origin in (typing.Union, types.UnionType):
        return " | ".join(names)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(names)}]"
    return getattr(annotation, "__name__", str(annotation))
