"""One way to write a file so that a reader sees the old one or the new one, never half of one.

For every room; imports nothing heavy.

Functions that a user names by their place, "package.module:function".
"""

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from earlyfusion.kernels.errors import UserError

Record = dict[str, Any]
"""A JSON object: a line of a log, a file of facts, a section of a recipe."""


@contextmanager
def replacing(path: str | Path, sync: bool = True) -> Iterator[Path]:
    """A temporary path beside `path`; what the block wrote there takes its place when the block ends well.

    Else the temporary is removed and the old file stays, also on a full disk. Folders above are made. sync:
    the bytes are on the disk before the name is, so that a crash of the machine leaves no empty file; off for
    what can be made again.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The process in the name: two writers of one file do not tear each other's temporary.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if sync:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: str | Path, content: str | bytes, sync: bool = True) -> Path:
    """Write a file whole or not at all; returns its path. Text is UTF-8 with its line ends as they are.

    Half a character (a lone surrogate, which names and JSON may hold) is written as its escape.
    """
    # A lone surrogate would raise in the middle of a run that is otherwise fine.
    raw = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    with replacing(path, sync) as temporary:
        temporary.write_bytes(raw)
    return Path(path)


def write_json(path: str | Path, value: Any, **options: Any) -> Path:
    """Write `value` as strict JSON (see `plain`), whole or not at all; returns the path.

    options: of json.dumps.
    """
    text = json.dumps(plain(value), **{"indent": 1, "ensure_ascii": False, "allow_nan": False, **options})
    return write_atomic(path, text + "\n")


def write_jsonl(path: str | Path, records: Iterable[Any]) -> Path:
    """Write one JSON object a line, whole or not at all; returns the path."""
    return write_atomic(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def plain(value: Any) -> Any:
    """What strict JSON can hold: numbers that are not finite become null, unknown objects their text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines; [] when there is no file.

    Other lines are left out: a kill in the middle of a write tears the last one.
    """
    path = Path(path)
    if not path.is_file():
        return []

    # Split at "\n" alone: a text inside may hold any other line end.
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [record for line in lines if (record := json_object(line)) is not None]


def json_object(line: str | bytes) -> Record | None:
    """The JSON object of a line; None for a line that is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


# ---- functions ----


def module_here(name: str) -> ModuleType:
    """A module by its name; the working directory counts as well. Raises what its import raises."""
    if os.getcwd() not in sys.path:  # the console script, unlike `python -m`, does not look there
        sys.path.append(os.getcwd())
    return importlib.import_module(name)


def function_at(place: str, key: str) -> Callable[..., Any]:
    """The function at `place`; the working directory counts as well. key: the recipe's, for the error.

    Raises UserError for a place that holds none.
    """
    module, _, name = place.partition(":")
    try:
        function = getattr(module_here(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{key} {place!r} cannot be imported ({error}); expected package.module:function"
        ) from None
    if not callable(function):
        raise UserError(f"{key} {place!r} is no function but {type(function).__name__}")
    return function
