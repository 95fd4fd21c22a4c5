"""Rooms stay small enough to read: files under 500 lines, functions under 60 (docstrings not counted)."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ["kernels", "vision", "model", "data", "eval", "pipeline", "rl"]
MAX_FILE_LINES, MAX_FUNCTION_LINES, LOOP_LINES = 500, 60, 250


def sources():
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def function_length(node: ast.AST) -> int:
    body = node.body
    doc = ast.get_docstring(node, clean=False)
    doc_lines = body[0].end_lineno - body[0].lineno + 1 if doc is not None else 0
    return node.end_lineno - node.lineno + 1 - doc_lines


def test_files_are_small():
    cpp = [path for suffix in ("cpp", "h") for path in (ROOT / "kernels").rglob(f"*.{suffix}")]
    assert cpp
    large = {
        str(p.relative_to(ROOT)): n for p in sources() + cpp if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert not large, f"cut these files: {large}"


def test_functions_are_small():
    large = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and function_length(node) > MAX_FUNCTION_LINES:
                large.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {function_length(node)} lines")
    assert not large, "\n".join(large)


def test_the_loop_fits_on_a_few_screens():
    assert len((ROOT / "pipeline" / "pretrain.py").read_text().splitlines()) <= LOOP_LINES
