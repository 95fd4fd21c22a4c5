"""Write docs/config.md, every key of a recipe and every option of a command, from the code: python
docs/reference.py

Types, defaults and meanings are those that `--help` shows: pydantic's fields with the docstrings below them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from earlyfusion.data.sources.base import KINDS
from earlyfusion.pipeline.cli import VERBS
from earlyfusion.pipeline.cli import _command as command
from earlyfusion.pipeline.config.arguments import describe, type_name
from earlyfusion.pipeline.config.schema import RunConfig, model_in
from earlyfusion.pipeline.study.plan import StudyConfig
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.swarm import plans  # noqa: F401  # registers its source

PAGE = Path(__file__).resolve().parent / "config.md"
RECIPES: tuple[tuple[str, type[BaseModel]], ...] = (
    ("Recipes of `pretrain`, `sft` and `plan`", RunConfig),
    ("Recipes of `rl`", RLConfig),
    ("Files of studies", StudyConfig),
)
HEAD = """# Every key and every option

Written by `python docs/reference.py` from the schemas, which `--help` shows too; do not edit it by hand.

A recipe is a TOML file with a table for each section. On the command line a key is `--section.key VALUE`, an
item of a list is addressed by number or name (`--stages.joint.lr 1e-3`), and `null` (in TOML `"null"`) is
None. `<i>` stands for an item of a list: `[[stages]]` in TOML.
"""


def table(head: str, rows: list[tuple[str, str, str, str]]) -> Iterator[str]:
    """A table of (key, type, default, meaning), nothing for no rows."""
    if rows:
        yield from ("", f"| {head} | type | default | meaning |", "|---|---|---|---|")
    for key, kind, default, meaning in rows:
        cells = [f"`{key}`", f"`{kind}`", f"`{default}`" if default else "", meaning]
        # Outside code a page would take <name> for a tag.
        cells[3] = cells[3].replace("<", "\\<")
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def recipe(schema: type[BaseModel], seen: dict[Any, str], title: str) -> Iterator[str]:
    """The sections of a recipe; one that another kind of recipe has too is named and not told again."""
    own = [row for row in describe(schema) if "." not in row[0]]
    yield from table("key", own)
    for name, info in schema.model_fields.items():
        inner, is_list = model_in(info.annotation)
        if inner is None:
            continue
        yield from ("", f"### {f'[[{name}]]' if is_list else f'[{name}]'}")
        if inner in seen:
            yield from ("", f"As in {seen[inner]}.")
            continue
        seen[inner] = f"{title.lower()}, `[{name}]`"
        yield from table("key", [row for row in describe(schema) if row[0].partition(".")[0] == name])
        if name == "data":
            yield from ("", "`options` of a source, by its `kind`:")
            rows = []
            for kind in KINDS.values():
                rows += [(f"{kind.name}: {key}", *rest) for key, *rest in describe(kind.options)]
            yield from table("kind: option", rows)


def commands(verb: Any, name: str) -> Iterator[str]:
    """The options of a command, or of each command in a group."""
    names = verb.list_commands(None) if hasattr(verb, "list_commands") else []
    for inner in names:
        yield from commands(verb.get_command(None, inner), f"{name} {inner}")
    rows = []
    for option in verb.params:
        # What the library adds to every command.
        if option.name == "help" or not hasattr(option, "type_descriptor") or option.hidden:
            continue
        flags = ", ".join((*option.opts, *option.secondary_opts))
        default = option.default
        shown = "" if default is None or default == [] else repr(default)
        if isinstance(default, Path):
            shown = repr(default.as_posix())
        kind = type_name(option.type_descriptor.annotation)
        rows.append((flags, kind, "required" if option.required else shown, " ".join(option.help.split())))
    if not names:
        yield from ("", f"### {name}")
        yield from table("option", rows)


def page() -> str:
    """The whole of docs/config.md."""
    lines, seen = [HEAD.rstrip()], {}
    for title, schema in RECIPES:
        lines += ["", f"## {title}"]
        lines += recipe(schema, seen, title)
    lines += ["", "## Options of commands", "", "The verbs of recipes take these besides the keys above:"]
    shared = [name for name, verb in VERBS.items() if verb.schema]
    lines += commands(command(shared[0], VERBS[shared[0]]), ", ".join(shared))
    for name, verb in VERBS.items():
        if not verb.schema:
            lines += commands(command(name, verb), name)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
