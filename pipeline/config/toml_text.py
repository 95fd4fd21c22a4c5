"""A small TOML writer (the standard library only reads TOML). Holds what a recipe holds: tables, lists,
scalars."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(tree: Mapping[str, Any]) -> str:
    """TOML text whose parse equals `tree`, with None written as the string "null"."""
    lines: list[str] = []
    _table(tree, [], lines)
    return "\n".join(lines).strip() + "\n"


def _table(table: Mapping[str, Any], path: list[str], lines: list[str]) -> None:
    later: list[tuple[str, Any]] = []
    for key, value in table.items():
        if (isinstance(value, Mapping) and value) or _is_table_list(value):
            later.append((key, value))
        else:
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, value in later:
        below = [*path, key]
        name = ".".join(_key(part) for part in below)
        for item in value if isinstance(value, list) else [value]:
            lines.extend(["", f"[[{name}]]" if isinstance(value, list) else f"[{name}]"])
            _table(item, below, lines)


def _is_table_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key)


def _value(value: Any) -> str:
    if value is None:
        return '"null"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if math.isnan(value) or math.isinf(value):
            return str(value)
        text = repr(value)
        return text if any(mark in text for mark in ".e") else text + ".0"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    raise TypeError(f"TOML cannot hold a {type(value).__name__}: {value!r}")
