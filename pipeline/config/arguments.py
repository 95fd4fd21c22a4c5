"""The command line of the training verbs: recipes, a few plain options, dotted overrides of every recipe key.

    VERB RECIPE [RECIPE...] [--out DIR] [--steps N] [--init-from DIR] [--resume] [--dry-run] [--section.key
    VALUE]...

`--help` is made from the pydantic schema, so it cannot disagree with it. A run keeps what it was started with
in command.json; `--resume` reads it, so nothing has to be said twice.
"""

from __future__ import annotations

import json
import os
import sys
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from earlyfusion.data.sources.base import KINDS
from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.pipeline.cli import wrapped
from earlyfusion.pipeline.config.compose import compose
from earlyfusion.pipeline.errors import EXIT_OK

FLAGS = {
    "resume": (
        "continue from the newest complete checkpoint in the output folder, with the recipes and overrides of"
        " that run (but for --steps); overrides given now come on top"
    ),
    "dry-run": (
        "check what can be checked, print sizes and stages, then leave (earlyfusion plan prints everything)"
    ),
}
OPTIONS = {
    "out": ("run.out", "DIR", "output folder"),
    "steps": ("run.steps", "N", "stop after N steps of the recipe's schedule"),
    "init-from": ("run.init_from", "DIR", "model directory for a warm start (weights only)"),
    "init": ("run.init_from", "DIR", "the same, shorter"),
}
STARTED = "command.json"
"""File in the output folder: {"recipes": [...], "overrides": [[key, text], ...]} of the run."""
OF_ONE_CALL = ("run.out", "run.steps")
"""Overrides that a resume does not take over."""


@dataclass
class RecipeArguments:
    """What a training verb was asked: recipes in order, overrides as (dotted key, text), and the two
    flags."""

    recipes: list[str] = field(default_factory=list)
    overrides: list[tuple[str, str]] = field(default_factory=list)
    resume: bool = False
    dry_run: bool = False


def parse_arguments(
    argv: Sequence[str], schema: type[BaseModel], *, verb: str, about: str, default_recipe: str | None = None
) -> RecipeArguments:
    """Read the arguments of a training verb; prints help and leaves with 0 on -h/--help.

    Raises UserError for an unknown option, a missing value or no recipe at all. With --resume the recipes
    (where none is named) and the overrides that the run was started with come first.
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
            parsed.overrides.append(
                (OPTIONS[name][0], json.dumps(value) if OPTIONS[name][1] == "DIR" else value)
            )
            continue
        _check_dotted(name, schema, verb)
        if not has_value:
            value = "true" if not rest or rest[0].startswith("--") else rest.pop(0)
        parsed.overrides.append((name, value))
    named = bool(parsed.recipes)
    if not named:
        if default_recipe is None:
            raise UserError(f"no recipe given; try: earlyfusion {verb} nano")
        parsed.recipes.append(default_recipe)
    if parsed.resume:
        _recall(parsed, named)
    return parsed


def _recall(parsed: RecipeArguments, named: bool) -> None:
    """Put what the run in the output folder was started with before what is given now."""
    given = [item for item in parsed.overrides if item[0] in ("run.out", "run.name")]
    run = (compose([] if "run.out" in dict(given) else parsed.recipes, given)).get("run") or {}
    path = Path(run.get("out") or f"runs/{run.get('name', 'run')}") / STARTED
    if not path.is_file():
        return
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        recipes, overrides = (
            list(map(str, stored["recipes"])),
            [(str(k), str(v)) for k, v in stored["overrides"]],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: damaged ({error}); remove it and give the overrides of the run again"
        ) from None
    parsed.recipes = parsed.recipes if named else recipes
    parsed.overrides = overrides + parsed.overrides


def remember(folder: str | Path, parsed: RecipeArguments) -> None:
    """Write command.json: what a resume of the run in `folder` begins with."""
    recipes = [str(Path(name).resolve()) if name.endswith(".toml") else name for name in parsed.recipes]
    overrides = {key: text for key, text in parsed.overrides if key not in OF_ONE_CALL}
    path = Path(folder) / STARTED
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(
        json.dumps({"recipes": recipes, "overrides": list(overrides.items())}), encoding="utf-8"
    )
    os.replace(partial, path)


def launch(
    stage: Callable[[Any, bool], Any],
    config: Any,
    parsed: RecipeArguments,
    show: Callable[[Any], object] | None = None,
    check: Callable[[Any], object] | None = None,
) -> int:
    """Show the plan (--dry-run; by `show`, or that of pretraining), or build the stage and train; the exit
    code.

    What would fail after the set-up, or hours later, is tried first: the output folder, trackers, the
    launcher's settings, and what `check` looks at (evaluation tasks, the reward). Raises UserError or what
    `check` raises.
    """
    from earlyfusion.pipeline.plan import banner, show_brief
    from earlyfusion.pipeline.runtime import check_launcher, tie_to_launcher
    from earlyfusion.pipeline.track import check_trackers

    check_launcher(config.train.mixed_precision)
    check_folder(config.run.directory)
    check_trackers(config.track.trackers, config.track.tensorboard)
    if check is not None:
        check(config)
    if parsed.dry_run:
        (show or show_brief)(config)
        return EXIT_OK
    tie_to_launcher()
    training = stage(config, parsed.resume)
    try:
        if training.runtime.is_main:
            remember(config.run.directory, parsed)
        if (tracker := getattr(training, "tracker", None)) is not None:
            tracker.say(banner(training))
        return training.train()
    finally:
        training.close()


def check_folder(directory: str | Path) -> None:
    """UserError when an output folder cannot be made or written; nothing is made."""
    path = Path(directory)
    while not path.exists() and not path.is_symlink() and path.parent != path:
        path = path.parent
    if not path.is_dir():
        raise UserError(f"--out {directory}: {path} is a file; give a folder")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"--out {directory}: {path} cannot be written; give another folder")


def _check_dotted(name: str, schema: type[BaseModel], verb: str) -> None:
    section = name.partition(".")[0]
    if "." in name and section in schema.model_fields:
        return
    known = [*FLAGS, *OPTIONS, *(f"{key}.<key>" for key in schema.model_fields)]
    if "." in name:
        raise UserError(
            f"--{name}: no section {section!r} in a recipe; {did_you_mean(section, schema.model_fields)}"
        )
    meant = [key for key, *_ in describe(schema) if key.rpartition(".")[2] == name]
    if meant:
        raise UserError(
            f"option --{name} is not known; did you mean {' or '.join(f'--{key}' for key in meant[:3])}?"
        )
    raise UserError(
        f"option --{name} is not known; {did_you_mean(name, known)} (see earlyfusion {verb} --help)"
    )


def help_text(schema: type[BaseModel], *, verb: str, about: str) -> str:
    """Usage, options, and every recipe key with its type, default and meaning."""
    lines = [
        f"usage: earlyfusion {verb} RECIPE [RECIPE...] [options] [--section.key VALUE]...",
        "",
        *about.splitlines(),
        "RECIPE is a shipped name or a path to a TOML file; several compose left to right, later ones win.",
        "",
        "options:",
    ]
    lines += [f"  --{name + ' ' + metavar:<18} {text}" for name, (_, metavar, text) in OPTIONS.items()]
    lines += [f"  --{name:<18} {text}" for name, text in FLAGS.items()]
    lines += ["", "recipe keys (dotted overrides; VALUE is a TOML literal or plain text; null is None;"]
    lines += [
        "lists of tables are addressed by number or name, e.g. --stages.0.steps 20 or --stages.joint.lr"
        " 1e-3):"
    ]
    for key, kind, default, text in describe(schema):
        lines.append(f"  --{key}  {kind}  [{default}]")
        lines += [f"        {text}"] if text else []
        lines += source_options() if key == "data.sources.<i>.options" else []
    return wrapped(lines)


def source_options() -> list[str]:
    """The options of every kind of source with their defaults, for the help."""
    lines = []
    for kind in KINDS.values():
        keys = [f"{name} [{default}]" for name, _, default, _ in describe(kind.options)]
        lines.append(f"          {kind.name}: {', '.join(keys) or 'none'}")
    return lines


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
    origin, args = (
        typing.get_origin(annotation),
        [a for a in typing.get_args(annotation) if a is not type(None)],
    )
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
        return (
            f"{origin.__name__}[{', '.join('...' if arg is Ellipsis else _type_name(arg) for arg in args)}]"
        )
    return getattr(annotation, "__name__", str(annotation))
