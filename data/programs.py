"""Programs as a tool turn of a conversation: how a result is written, and the running of programs we wrote
ourselves.

A program runs as a notebook cell: what it prints, then the value of its last expression. Programs that a
model wrote go to eval/sandbox/host.py, never here.
"""

import ast
import builtins
import functools
import io
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

from PIL import Image as PILImage

NO_OUTPUT = "(no output)"


def tool_text(stdout: str, value: str, error: str = "") -> str:
    """The content of a tool turn: printed text, value of the last expression, error; NO_OUTPUT when there is
    none."""
    return "\n".join(part for part in (stdout.rstrip("\n"), value, error) if part) or NO_OUTPUT


def run_own(
    code: str,
    pictures: Mapping[str, PILImage.Image] = MappingProxyType({}),
    texts: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The tool text of a program from our own generators, run in this process; `Image.open` finds `pictures`
    by name, `open` finds `texts`.

    Raises whatever the program raises: generated programs are correct, and a test runs them in the sandbox as
    well.
    """
    # The one name that generated programs open files by; nothing touches the disk.
    opened = SimpleNamespace(Image=SimpleNamespace(open=lambda name: pictures[name].copy()))

    def importer(name: str, *rest: Any) -> Any:
        return opened if name == "PIL" else builtins.__import__(name, *rest)

    # Output is caught by a print of its own: sys.stdout belongs to every thread of the process.
    printed, value = io.StringIO(), None
    own = {"__import__": importer, "print": functools.partial(print, file=printed)}
    own["open"] = lambda name: io.StringIO(texts[name])
    namespace: dict[str, Any] = {"__builtins__": {**vars(builtins), **own}}
    tree = ast.parse(code)
    # As in a notebook: the last line is a value, not a statement.
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<program>", "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<program>", "eval"), namespace)
    return tool_text(printed.getvalue(), "" if value is None else repr(value))
