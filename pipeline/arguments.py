"""The command line of the training verbs: recipes, a few plain options, dotted overrides of every recipe key.

    VERB RECIPE [RECIPE...] [--out DIR] [--steps N] [--init-from DIR] [--resume] [--dry-run] [--section.key VALUE]...

`--help` is made from the pydantic schema, so it cannot disagree with it.
"""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from earlyfusion.pipeline.errors import EXIT_OK, UserError, did_you_mean

FLAGS = {
    "resume": "continue from the newest complete checkpoint in the output folder",
    "dry-run": "print the resolved recipe, sizes, FLOPs, routing and stages, then leave",
}
OPTIONS = {
    "out": ("run.out", "DIR", "output folder"),
    "steps": ("run.steps", "N", "stop after N steps of the recipe's schedule"),
    "init-from": ("run.init_from", "DIR", "model directory for a warm start (weights only)"),
    "init": ("run.init_from", "DIR", "the same, shorter"),
}


@dataclass
class RecipeArguments:
    """What a training verb was asked: recipes in order, overrides as (dotted key, text), and the two flags."""

    recipes: list[str] = field(default_factory=list)
    overrides: list[tuple[str, str]] = field(default_factory=list)
    resume: bool = False
    dry_run: bool = False


def parse_arguments(
    argv: Sequence[str], schema: type[BaseModel], *, verb: str, about: str, default_recipe: str | None = None
) -> RecipeArguments:
    """Read the arguments of a training verb; prints help and leaves with 0 on -h/--help.

    Raises UserError for an unknown option, a missing value or no recipe at all.
    """
    parsed = RecipeArguments()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            print(help_text(schema, verb=verb, about=about))
            sys.exit(0)
        if not word.startswith("--"):
            if word.startswith("-"):
                raise UserError(f"option {word!r} is not known; see earlyfusion {verb} --help")
            parsed.recipes.append(word)
            continue
        name, has_value, value = word[2:].partition("=")
        if name in FLAGS:
            if has_value:
                raise UserError(f"--{name} takes no value (given {value!r})")
            setattr(parsed, name.replace("-", "_"), True)
            continue
        if name in OPTIONS:
            if not has_value and (not rest or rest[0].startswith("--")):
                raise UserError(f"--{name} needs a value: --{name} {OPTIONS[name][1]}")
            value = value if has_value else rest.pop(0)
            # A folder is text even when its name reads like a number.
            parsed.overrides.append((OPTIONS[name][0], json.dumps(value) if OPTIONS[name][1] == "DIR" else value))
            continue
        _check_dotted(name, schema, verb)
        if not has_value:
            value = "true" if not rest or rest[0].startswith("--") else rest.pop(0)
        parsed.overrides.append((name, value))
    if not parsed.recipes:
        if default_recipe is None:
            raise UserError(f"no recipe given; try: earlyfusion {verb} nano")
        parsed.recipes.append(default_recipe)
    return parsed


def launch(
    stage: Callable[[Any, bool], Any],
    config: Any,
    parsed: RecipeArguments,
    show: Callable[[Any], object] | None = None,
) -> int:
    """Show the plan (--dry-run; by `show`, or that of pretraining), or build the stage and train; the exit code."""
    if parsed.dry_run:
        from earlyfusion.pipeline.plan import show_plan

        (show or show_plan)(config)
        return EXIT_OK
    training = stage(config, parsed.resume)
    try:
        return training.train()
    finally:
        training.close()


def _check_dotted(name: str, schema: type[BaseModel], verb: str) -> None:
    section = name.partition(".")[0]
    if "." in name and section in schema.model_fields:
        return
    known = [*FLAGS, *OPTIONS, *(f"{key}.<key>" for key in schema.model_fields)]
    if "." in name:
        raise UserError(f"--{name}: no section {section!r} in a recipe; {did_you_mean(section, schema.model_fields)}")
    raise UserError(f"option --{name} is not known; {did_you_mean(name, known)} (see earlyfusion {verb} --help)")


def help_text(schema: type[BaseModel], *, verb: str, about: str) -> str:
    """Usage, options, and every recipe key with its type, default and meaning."""
    lines = [
        f"usage: earlyfusion {verb} RECIPE [RECIPE...] [options] [--section.key VALUE]...",
        "",
        about,
        "RECIPE is a shipped name or a path to a TOML file; several compose left to right, later ones win.",
        "",
        "options:",
    ]
    lines += [f"  --{name + ' ' + metavar:<18} {text}" for name, (_, metavar, text) in OPTIONS.items()]
    lines += [f"  --{name:<18} {text}" for name, text in FLAGS.items()]
    lines += ["", "recipe keys (dotted overrides; VALUE is a TOML literal or plain text; null is None;"]
    lines += ["lists of tables are addressed by number or name, e.g. --stages.0.steps 20 or --stages.joint.lr 1e-3):"]
    for key, kind, default, text in describe(schema):
        lines.append(f"  --{key}  {kind}  [{default}]" + (f"\n        {text}" if text else ""))
    return "\n".join(lines)


def describe(schema: type[BaseModel], path: str = "") -> list[tuple[str, str, str, str]]:
    """(dotted key, type, default, meaning) of every leaf key of a schema, in order."""
    rows = []
    for name, info in schema.model_fields.items():
        key = f"{path}.{name}" if path else name
        inner, is_list = _inner_model(info.annotation)
        if inner is not None:
            rows += describe(inner, f"{key}.<i>" if is_list else key)
            continue
        if info.default_factory is not None:
            default: Any = info.get_default(call_default_factory=True, validated_data={})
        else:
            default = info.default
        shown = "required" if default is PydanticUndefined else "null" if default is None else repr(default)
        rows.append((key, _type_name(info.annotation), shown, " ".join((info.description or "").split())))
    return rows


def _inner_model(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model that a field holds (directly, optionally, or in a list), and whether it is a list."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return (annotation, False) if issubclass(annotation, BaseModel) else (None, False)
    origin, args = typing.get_origin(annotation), [a for a in typing.get_args(annotation) if a is not type(None)]
    if origin is list and args:
        return _inner_model(args[0])[0], True
    if origin in (typing.Union, types.UnionType) and len(args) == 1:
        return _inner_model(args[0])
    return None, False


def _type_name(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(args[0])
    if origin is typing.Literal:
        return "|".join(str(arg) for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(arg) for arg in args)
    if origin is not None:
        return f"{origin.__name__}[{', '.join('...' if arg is Ellipsis else _type_name(arg) for arg in args)}]"
    return getattr(annotation, "__name__", str(annotation))
