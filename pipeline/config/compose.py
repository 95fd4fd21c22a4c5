"""Recipes: TOML files composed left to right, dotted overrides last, checked by pydantic, hashed, compared,
printed.

Merge rules: tables merge key by key; scalars and lists of the right side replace the left; the lists `stages`
and `data.sources` merge item by item by their `name`. A recipe that says `extends = "nano"` (a shipped name
or a path) is laid over that recipe first. "null" in TOML (which has no null) means None. A [model] with
`preset` or `scale` begins afresh with a shape (pipeline/config/size.py); its other keys lie over it. So does
one with `from`, which also brings the tower and the tokenizer of the checkpoint that it names."""

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from pydantic import BaseModel, ValidationError

from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.kernels.files import Record, function_at
from earlyfusion.pipeline.config.schema import READ_BEFORE, RunConfig, model_in
from earlyfusion.pipeline.config.size import SIZE_KEYS, sized

RECIPES = Path(__file__).parents[1] / "recipes"
SHIPPED = [RECIPES]
"""Folders of shipped recipes; a higher floor adds its own where its schema stands (rl/recipe.py)."""
LISTS_BY_NAME = ("stages", "data.sources")
"""Dotted paths of lists whose items merge by their `name`."""
MOST_BYTES = 4 << 20
"""Most bytes of a recipe: TOML is parsed in Python, at about a MB a second."""

FREE_ON_RESUME = re.compile(
    r"(run\.(name|out|steps|init_from|model_from)|checkpoint|track|eval|parallel|log"
    r"|data\.(prefetch|prefetch_steps|workers|max_bad_share))(\.|$)"
)
"""Keys and sections that do not change the numbers of a run, so a resume may change them."""
ABSENT = "(absent)"
"""Stands in a Change where a side has no such key."""

Recipe = str | Path | Record


class Change(NamedTuple):
    """One difference between two resolved recipes."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def recipe_names(folder: Path = RECIPES) -> list[str]:
    """Names of the recipes that ship with the package, in one folder of them."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def read_recipe(name_or_path: str | Path) -> Record:
    """One recipe as a plain dict: a path when it ends in .toml or holds a separator, else a shipped name."""
    given, path = str(name_or_path), Path(name_or_path)
    # A name alone is a shipped recipe, never a file of that name in the folder where one happens to stand.
    if not given.endswith(".toml") and path.parent == Path("."):
        shipped = {name: folder for folder in SHIPPED for name in recipe_names(folder)}
        if given not in shipped:
            raise UserError(f"recipe {given!r} is not shipped here; {did_you_mean(given, shipped)}")
        path = shipped[given] / f"{given}.toml"

    return read_toml(path, "recipe")


def read_toml(path: Path, what: str) -> Record:
    """A TOML file that a user names; UserError for one that cannot be read. what: its word in errors."""
    hint = "give a shipped name or a TOML file"
    try:
        # A pipe or a device would be read without end.
        if path.exists() and not path.is_file():
            raise UserError(f"{what} {path}: is no file; {hint}")
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{what} {path}: more than {MOST_BYTES} bytes: not a {what}")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{what} {path}: cannot be read ({error.strerror}); {hint}") from None
    # No TOML, nested too deep, no UTF-8, numbers of thousands of digits, odd names.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} {path}: not valid TOML: {error}") from None


def presets() -> dict[str, Record]:
    """The [model] tables that `model.preset` names: those of shipped recipes that have a shape of their
    own."""
    found = {name: read_recipe(name) for name in recipe_names()}
    whole = {name: own["model"] for name, own in found.items() if "model" in own and "extends" not in own}
    return {name: shape for name, shape in whole.items() if "preset" not in shape}


def _begun(below: Record, own: Record) -> Record:
    """The [model] that `own`, which holds preset or scale, stands for: its shape, its other keys over it."""
    if "preset" in own:
        shapes = presets()
        if own["preset"] not in shapes:
            near = did_you_mean(str(own["preset"]), shapes)
            raise UserError(f"model.preset {own['preset']!r} is no shipped size; {near}")
        # The size of the vocabulary and its ids come from the tokenizer.
        below = {
            key: value
            for key, value in shapes[own["preset"]].items()
            if key != "vocab_size" and not key.endswith("_token_id")
        }
    if "from" in own and len(SIZE_KEYS.keys() & own.keys()) > 1:
        raise UserError("model.from brings a shape of its own; remove model.preset and model.scale")
    if not below and "scale" in own:
        raise UserError(f"model.scale {own['scale']}: there is no [model] to scale; add model.preset")
    if "from" in own:
        return merge(below, {key: value for key, value in own.items() if key not in SIZE_KEYS})
    return merge(sized(below, own), {key: value for key, value in own.items() if key not in SIZE_KEYS})


def merge(left: Record, right: Record, path: str = "") -> Record:
    """`right` laid over `left` by the rules of this module; neither is changed."""
    if not path and "from" in (right.get("model") or {}):
        left = _beginning(left, str(right["model"]["from"]))
    merged = dict(left)
    for key, value in right.items():
        where = f"{path}.{key}" if path else key
        old = merged.get(key)
        if where == "model" and isinstance(value, dict) and SIZE_KEYS.keys() & value.keys():
            value = _begun(old if isinstance(old, dict) else {}, value)
        elif isinstance(old, dict) and isinstance(value, dict):
            value = merge(old, value, where)
        # Other lists are replaced: joined ones could never get shorter.
        elif where in LISTS_BY_NAME and isinstance(old, list) and isinstance(value, list):
            items, names = list(old), _names(old)
            for item, name in zip(value, _names(value)):
                if name is not None and name in names:
                    place = names.index(name)
                    items[place] = merge(items[place], item)
                else:
                    items.append(item)
            value = items
        merged[key] = value
    return merged


def _beginning(below: Record, folder: str) -> Record:
    """A recipe with the shape, the tower and the tokenizer of a checkpoint in place of its own."""
    # A checkpoint is read by torch, which help and plain recipes must not wait for.
    parts_of = function_at("earlyfusion.pipeline.model_from:parts_of", "model.from")
    return {**below, **parts_of(folder), "run": {**below.get("run", {}), "model_from": folder}}


def _names(items: Any) -> list[Any]:
    """The `name` of every item of a list; None where it has none."""
    return [item.get("name") if isinstance(item, Mapping) else None for item in items]


def parse_literal(text: str) -> Any:
    """A command-line value as a TOML literal (1e-3, true, [1, 2], {a = 1}); anything else is a string."""
    # The same literals as in a recipe, so that one rule holds for both.
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line end in the text could bring further keys.
    return parsed["value"] if set(parsed) == {"value"} else text


def override(tree: Record, dotted: str, value: Any) -> None:
    """Set `dotted` (stages.0.steps, stages.joint.steps, optim.lr) in place; tables on the way are created."""
    node: Any = tree
    *above, last = dotted.split(".")
    for depth, part in enumerate(above):
        where = ".".join(above[:depth])
        node = node[_place(node, part, where)] if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise UserError(f"--{dotted}: {where and where + '.'}{part} is the value {node!r}, not a table")
    node[_place(node, last, ".".join(above)) if isinstance(node, list) else last] = value


def _place(items: list[Any], part: str, where: str) -> int:
    """The index that a part of a dotted key means in a list: a number, or the name of an item."""
    names = _names(items)
    # Names first: an item may be called "0".
    if part in names:
        return names.index(part)
    if not part.lstrip("-").isdigit():
        known = [str(name) for name in names if name is not None]
        raise UserError(f"--{where}.{part}: nothing in {where} has that name; {did_you_mean(part, known)}")
    if not -len(items) <= int(part) < len(items):
        raise UserError(f"--{where}.{part}: {where} has {len(items)} items, numbered from 0")
    return int(part)


def _extended(recipe: Recipe, above: tuple[str, ...] = ()) -> Record:
    """A recipe laid over the one it extends, and so on; UserError for a circle."""
    own = dict(recipe if isinstance(recipe, Mapping) else read_recipe(recipe))
    base = own.pop("extends", None)
    if base is None:
        return own
    # The way down is kept, so that a circle is told and not walked.
    chain = (*above, str(base))
    if str(base) in above:
        raise UserError(f"recipe {base!r} extends itself ({' -> '.join(chain)}); remove one `extends`")
    return merge(_extended(str(base), chain), own)


def compose(recipes: Sequence[Recipe], overrides: Iterable[tuple[str, Any]] = ()) -> Record:
    """The merged, not yet checked recipe. String override values are read as TOML literals."""
    tree: Record = {}
    for recipe in recipes:
        tree = merge(tree, _extended(recipe))
    # Plain JSON types, and nothing shared with what was given.
    tree = json.loads(json.dumps(tree, default=str))
    # Overrides come last: the command line is the last word.
    given = [(key, parse_literal(text) if isinstance(text, str) else text) for key, text in overrides]
    # Those of [model] are one layer where one of them gives its size: their order says nothing.
    layer: Record = {}
    size = {key.removeprefix("model.") for key, _ in given if key.startswith("model.")} & SIZE_KEYS.keys()
    # A checkpoint brings a tower and a tokenizer, too.
    begun = ("model.", "vision.", "tokenizer.") if "from" in size else ("model.",)
    for dotted, value in given:
        override(layer if size and dotted.startswith(begun) else tree, dotted, value)
    tree = merge(tree, layer)
    return _with(tree, "null", None)


def _with(value: Any, old: Any, new: Any) -> Any:
    """A tree in which every leaf `old` is `new`."""
    if isinstance(value, dict):
        return {key: _with(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [_with(item, old, new) for item in value]
    return new if value is old or (isinstance(value, str) and value == old) else value


def load_config(recipes: Sequence[Recipe], overrides: Iterable[tuple[str, Any]] = ()) -> RunConfig:
    """Recipes and overrides as a checked RunConfig; raises UserError, one line, for everything a user can get
    wrong."""
    config: RunConfig = validate(compose(recipes, overrides))
    return config


def validate(tree: Record, schema: Any = RunConfig) -> Any:
    """A plain dict as the config of a training verb (`schema`); pydantic's report becomes one line."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        # All mistakes at once: nobody wants to find them one run after the other.
        lines = [_explain(item, schema, tree) for item in error.errors()]
        raise UserError("recipe: " + "; ".join(dict.fromkeys(lines))) from None


def _explain(item: Any, schema: type[BaseModel], tree: Any) -> str:
    """One mistake of pydantic's report: the key, what was given, what was expected, the nearest known key.

    tree: the recipe, by which stages and sources are called by their names.
    """
    place = [part for part in item["loc"] if not str(part).startswith("function-")]
    key = ".".join(str(part) for part in _named(place, tree)) or "recipe"
    if item["type"] == "extra_forbidden":
        # The keys that are known beside the last part.
        for part in place[:-1]:
            field = schema.model_fields.get(part) if isinstance(part, str) else None
            schema = (model_in(field.annotation)[0] if field else None) or schema
        where = ".".join(str(part) for part in place[:-1]) or "the recipe's top level"
        before = READ_BEFORE.get(".".join(str(part) for part in place[:-1]), {})
        near = did_you_mean(str(place[-1]), [*schema.model_fields, *before])
        return f"unknown key {place[-1]!r} in {where}; {near}"
    if item["type"] == "missing":
        hint = "; lay the recipe over a whole one, such as nano (both on the line, nano first)"
        return f"{key} is missing and has no default{hint if len(place) == 1 else ''}"

    # What was given is shown unless it is a whole table.
    text = item["msg"].removeprefix("Value error, ")
    if not isinstance(item.get("input"), Mapping | list | BaseModel):
        text += f" (given {item.get('input')!r})"
    return f"{key}: {text}" if place else text


def _named(place: Sequence[Any], tree: Any) -> Iterator[Any]:
    """A place in a recipe with the names of list items where they have one: stages.joint.steps."""
    for part in place:
        try:
            # A place may be missing in what was given: then it has no name either.
            tree = tree[part]
        except (LookupError, TypeError):
            tree = None
        own = tree.get("name") if isinstance(tree, Mapping) and isinstance(part, int) else None
        yield own or part


def dump(config: BaseModel) -> Record:
    """The resolved recipe as plain JSON types."""
    return config.model_dump(mode="json")


def render(config: BaseModel) -> str:
    """The resolved recipe as TOML text; `load_config` of it gives an equal RunConfig."""
    return to_toml(dump(config))


def to_toml(tree: Record) -> str:
    """TOML text of plain types, with None written as "null"."""
    return tomli_w.dumps(_with(tree, None, "null"))


def recipe_hash(config: BaseModel) -> str:
    """16 hexadecimal digits over every key that changes the numbers of a run."""
    # Where results go and how data is fetched change no number.
    flat = {key: value for key, value in flatten(dump(config)) if not FREE_ON_RESUME.match(key)}
    return hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:16]


def diff(old: Record, new: Record) -> list[Change]:
    """Every key whose value differs between two resolved recipes (see `dump`), in key order."""
    left, right = dict(flatten(old)), dict(flatten(new))
    changes = [Change(k, left.get(k, ABSENT), right.get(k, ABSENT)) for k in sorted(left.keys() | right)]
    return [change for change in changes if change.old != change.new]


def refused_on_resume(old: Record, new: Record) -> list[Change]:
    """The changes that make a resume another run. Free: FREE_ON_RESUME, data to skip, a longer last stage."""
    last = f"stages.{len(new.get('stages', [])) - 1}.steps"
    refused = []
    for change in diff(old, new):
        free = bool(FREE_ON_RESUME.match(change.key) or re.fullmatch(r"stages\.\d+\.skip", change.key))
        if change.key == last and isinstance(change.old, int):
            free = change.new > change.old
        # A path that is only written in another way: recipe.toml of a run holds it from the root.
        elif change.key.endswith(".path") and isinstance(change.old, str) and isinstance(change.new, str):
            free = Path(change.old).absolute() == Path(change.new).absolute()
        if not free:
            refused.append(change)
    return refused


def explain_refusal(changes: Sequence[Change]) -> str:
    """What `refused_on_resume` found and what to do, in one line; at most six changes are named."""
    # Six are enough to see what was meant.
    shown = [str(change) for change in changes[:6]]
    if len(changes) > 6:
        shown.append(f"and {len(changes) - 6} more")
    text = f"the recipe changed ({'; '.join(shown)}); put these back"
    if any(ABSENT in change for change in changes):
        text += (
            " (a key you did not touch is another version's of earlyfusion: go on with the one that saved it)"
        )
    return text


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; a list without tables is a leaf."""
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, item in value.items():
        yield from flatten(item, f"{path}.{key}" if path else str(key))
