"""Recipes: TOML files composed left to right, dotted overrides last, checked by pydantic, hashed, compared,
printed.

Merge rules: tables merge key by key; scalars and lists of the right side replace the left; the lists `stages`
and `data.sources` merge item by item by their `name`. A recipe that says `extends = "nano"` (a shipped name
or a path) is laid over that recipe first. "null" in TOML (which has no null) means None.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.pipeline.config.schema import RunConfig
from earlyfusion.pipeline.config.toml_text import to_toml

RECIPES = Path(__file__).parents[1] / "recipes"
RL_RECIPES = Path(__file__).parents[2] / "rl" / "recipes"
"""Shipped recipes: of the training stages, and of reinforcement learning (rl/recipe.py)."""
LISTS_BY_NAME = ("stages", "data.sources")
"""Dotted paths of lists whose items merge by their `name`."""

MOST_BYTES = 4 << 20
"""Most bytes of a recipe: TOML is parsed in Python, at about a MB a second."""

FREE_ON_RESUME = (
    "run.name",
    "run.out",
    "run.steps",
    "run.init_from",
    "checkpoint",
    "track",
    "eval",
    "parallel",
    "data.prefetch",
    "data.prefetch_steps",
    "data.workers",
    "data.stall_s",
    "data.max_bad",
    "data.max_bad_share",
    "log",
)
"""Keys (or sections) that do not change the numbers of a run, so a resume may change them."""


@dataclass(frozen=True)
class Change:
    """One difference between two resolved recipes; `missing` stands where a side has no such key."""

    key: str
    old: Any
    new: Any
    missing = "(absent)"

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def recipe_names(folder: Path = RECIPES) -> list[str]:
    """Names of the recipes that ship with the package, in one folder of them."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def read_recipe(name_or_path: str | Path) -> dict[str, Any]:
    """One recipe as a plain dict: a path when it ends in .toml or holds a separator, else a shipped name."""
    given = str(name_or_path)
    path = Path(given)
    if not (given.endswith(".toml") or path.parent != Path(".")):
        found = [
            folder / f"{given}.toml"
            for folder in (RECIPES, RL_RECIPES)
            if (folder / f"{given}.toml").is_file()
        ]
        if not found:
            known = [*recipe_names(), *recipe_names(RL_RECIPES)]
            raise UserError(f"recipe {given!r} is not shipped here; {did_you_mean(given, known)}")
        path = found[0]
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"recipe {given}: is no file; give a shipped name or a TOML file")
        if path.stat().st_size > MOST_BYTES:
            raise UserError(
                f"recipe {given}: {path.stat().st_size} bytes, more than {MOST_BYTES}: not a recipe"
            )
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"recipe {given}: cannot be read ({error.strerror}); give a shipped name or a TOML file"
        ) from None
    except RecursionError:
        raise UserError(f"recipe {path}: not valid TOML: nested too deep") from None
    except (
        ValueError
    ) as error:  # TOMLDecodeError, UnicodeDecodeError, numbers of thousands of digits, odd names
        raise UserError(f"recipe {path}: not valid TOML: {error}") from None


def merge(left: Mapping[str, Any], right: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """`right` laid over `left` by the rules of this module; neither is changed."""
    merged = dict(left)
    for key, value in right.items():
        where = f"{path}.{key}" if path else key
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(old, value, where)
        elif where in LISTS_BY_NAME and isinstance(old, list) and isinstance(value, list):
            merged[key] = _merge_named(old, value, where)
        else:
            merged[key] = value
    return merged


def _merge_named(left: list[Any], right: list[Any], where: str) -> list[Any]:
    merged = list(left)
    index = {item.get("name"): i for i, item in enumerate(merged) if isinstance(item, Mapping)}
    for item in right:
        at = index.get(item.get("name")) if isinstance(item, Mapping) and "name" in item else None
        if at is None:
            merged.append(item)
        else:
            merged[at] = merge(merged[at], item, where)
    return merged


def parse_literal(text: str) -> Any:
    """A command-line value as a TOML literal (1e-3, true, [1, 2], {a = 1}); anything else is the string
    itself."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if set(parsed) == {"value"} else text


def override(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `dotted` (stages.0.steps, stages.joint.steps, optim.lr) in place; tables on the way are created."""
    node: Any = tree
    parts = dotted.split(".")
    for depth, part in enumerate(parts[:-1]):
        if isinstance(node, list):
            node = node[_list_index(node, part, ".".join(parts[:depth]))]
        else:
            node = node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise UserError(f"--{dotted}: {'.'.join(parts[: depth + 1])} is the value {node!r}, not a table")
    if isinstance(node, list):
        node[_list_index(node, parts[-1], ".".join(parts[:-1]))] = value
    else:
        node[parts[-1]] = value


def _list_index(items: list[Any], part: str, where: str) -> int:
    if part.lstrip("-").isdigit():
        index = int(part)
        if -len(items) <= index < len(items):
            return index
        raise UserError(f"--{where}.{part}: {where} has {len(items)} items, numbered from 0")
    names = [str(item["name"]) for item in items if isinstance(item, dict) and "name" in item]
    if part in names:
        return names.index(part)
    raise UserError(f"--{where}.{part}: nothing in {where} has that name; {did_you_mean(part, names)}")


def _extended(recipe: str | Path | Mapping[str, Any], seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """A recipe laid over the one it extends, and so on; UserError for a circle."""
    own = dict(recipe if isinstance(recipe, Mapping) else read_recipe(recipe))
    base = own.pop("extends", None)
    if base is None:
        return own
    if str(base) in seen:
        raise UserError(
            f"recipe {base!r} extends itself ({' -> '.join((*seen, str(base)))}); remove one `extends`"
        )
    return merge(_extended(str(base), (*seen, str(base))), own)


def compose(
    recipes: Sequence[str | Path | Mapping[str, Any]], overrides: Iterable[tuple[str, Any]] = ()
) -> dict[str, Any]:
    """The merged, not yet checked recipe. String override values are read as TOML literals."""
    tree: dict[str, Any] = {}
    for recipe in recipes:
        tree = merge(tree, _extended(recipe))
    tree = json.loads(json.dumps(tree, default=str))
    for dotted, value in overrides:
        override(tree, dotted, parse_literal(value) if isinstance(value, str) else value)
    return _null_to_none(tree)


def load_config(
    recipes: Sequence[str | Path | Mapping[str, Any]], overrides: Iterable[tuple[str, Any]] = ()
) -> RunConfig:
    """Recipes and overrides as a checked RunConfig; raises UserError, one line, for everything a user can get
    wrong."""
    config: RunConfig = validate(compose(recipes, overrides))
    return config


def validate(tree: Mapping[str, Any], schema: Any = RunConfig) -> Any:
    """A plain dict as the config of a training verb (`schema`); pydantic's report becomes one UserError
    line."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise UserError(explain(error, schema, tree)) from None


def explain(error: ValidationError, model: type[BaseModel], tree: Mapping[str, Any] | None = None) -> str:
    """One line for a pydantic report: each bad key, what was given, what was expected, the nearest known key.

    tree: the recipe, by which stages and sources are called by their names.
    """
    lines = []
    for item in error.errors():
        loc = [part for part in item["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
        key = ".".join(str(part) for part in _named(loc, tree)) or "recipe"
        if item["type"] == "extra_forbidden":
            where = ".".join(str(part) for part in loc[:-1]) or "the recipe's top level"
            lines.append(
                f"unknown key {loc[-1]!r} in {where};"
                f" {did_you_mean(str(loc[-1]), _fields_at(model, loc[:-1]))}"
            )
        elif item["type"] == "missing":
            hint = (
                "; lay the recipe over a whole one, such as nano (both on the line, nano first)"
                if len(loc) == 1
                else ""
            )
            lines.append(f"{key} is missing and has no default{hint}")
        else:
            text = item["msg"].removeprefix("Value error, ")
            given = item.get("input")
            shown = (
                ""
                if isinstance(given, Mapping | list) or isinstance(given, BaseModel)
                else f" (given {given!r})"
            )
            lines.append(f"{key}: {text}{shown}" if loc else f"{text}{shown}")
    return "recipe: " + "; ".join(dict.fromkeys(lines))


def _named(loc: Sequence[Any], tree: Any) -> list[Any]:
    """A place in a recipe with the names of list items where they have one: stages.joint.steps."""
    named = []
    for part in loc:
        try:
            tree = tree[part]
        except (LookupError, TypeError):
            tree = None
        own = tree.get("name") if isinstance(tree, Mapping) and isinstance(part, int) else None
        named.append(own or part)
    return named


def _fields_at(model: type[BaseModel], loc: Sequence[Any]) -> list[str]:
    """Field names of the model that lies at `loc` below `model`."""
    here: list[type[BaseModel]] = [model]
    for part in loc:
        if isinstance(part, int):
            continue
        below = [
            child
            for m in here
            if part in m.model_fields
            for child in _models_in(m.model_fields[part].annotation)
        ]
        here = below or here
    return [name for m in here for name in m.model_fields]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for arg in typing.get_args(annotation) for model in _models_in(arg)]


def _null_to_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _null_to_none(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_null_to_none(item) for item in value]
    return None if value == "null" else value


def dump(config: BaseModel) -> dict[str, Any]:
    """The resolved recipe as plain JSON types."""
    return config.model_dump(mode="json")


def render(config: BaseModel) -> str:
    """The resolved recipe as TOML text; `load_config` of it gives an equal RunConfig."""
    return to_toml(dump(config))


def recipe_hash(config: BaseModel) -> str:
    """16 hexadecimal digits over every key that changes the numbers of a run."""
    flat = {key: value for key, value in _flatten(dump(config)) if not _free(key)}
    return hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:16]


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every key whose value differs between two resolved recipes (see `dump`), in key order."""
    left, right = dict(_flatten(old)), dict(_flatten(new))
    keys = sorted(left.keys() | right.keys())
    pairs = [(key, left.get(key, Change.missing), right.get(key, Change.missing)) for key in keys]
    return [Change(key, a, b) for key, a, b in pairs if a != b]


def refused_on_resume(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The changes that make a resume another run. Free: FREE_ON_RESUME, data to skip, and a longer last
    stage."""
    last = f"stages.{len(new.get('stages', [])) - 1}.steps"
    return [
        change
        for change in diff(old, new)
        if not _free(change.key)
        and not _same_place(change)
        and not re.fullmatch(r"stages\.\d+\.skip", change.key)
        and not (change.key == last and isinstance(change.old, int) and change.new > change.old)
    ]


def explain_refusal(changes: Sequence[Change]) -> str:
    """What `refused_on_resume` found and what to do, in one line; at most six changes are named."""
    shown = "; ".join(map(str, changes[:6])) + (f"; and {len(changes) - 6} more" if len(changes) > 6 else "")
    told = f"the recipe changed ({shown}); put these back"
    if any(Change.missing in (change.old, change.new) for change in changes):
        told += (
            " (a key you did not touch is another version's of earlyfusion: go on with the one that saved it)"
        )
    return told


def _same_place(change: Change) -> bool:
    """Whether a path is only written in another way: recipe.toml of a run holds it from the root."""
    named = change.key.endswith(".path") and isinstance(change.old, str) and isinstance(change.new, str)
    return named and Path(change.old).absolute() == Path(change.new).absolute()


def _free(key: str) -> bool:
    return any(key == free or key.startswith(free + ".") for free in FREE_ON_RESUME)


def _flatten(value: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        items = enumerate(value)
    else:
        yield path, value
        return
    for key, item in items:
        yield from _flatten(item, f"{path}.{key}" if path else str(key))
