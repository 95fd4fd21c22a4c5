"""Rooms stay small enough to read. Counted are lines of code: air, comments and docstrings cost nothing."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ["kernels", "vision", "model", "data", "eval", "pipeline", "rl"]
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_KERNEL_LINES, LOOP_LINES = 610, 97, 97, 250


def sources():
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def code_lines(path: Path) -> int:
    lines = path.read_text().splitlines()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse("\n".join(lines))):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return sum(bool(line.strip()) and not line.lstrip().startswith(("#", "//")) for line in lines)


def function_length(node: ast.AST, lines: list[str]) -> int:
    """Lines of the body without its docstring, without blank lines and comments; the signature is a table."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    span = lines[body[0].lineno - 1 : node.end_lineno] if body else []
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in span)


def is_kernel(node: ast.AST) -> bool:
    """Triton code: one program, its loads and stores named one a line; cutting it would hide its order."""
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_files_are_small():
    cpp = [path for suffix in ("cpp", "h") for path in (ROOT / "kernels").rglob(f"*.{suffix}")]
    assert cpp
    large = {str(p.relative_to(ROOT)): n for p in sources() + cpp if (n := code_lines(p)) > MAX_FILE_LINES}
    assert not large, f"cut these files: {large}"


def test_functions_are_small():
    large = []
    for path in sources():
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            length, limit = (
                function_length(node, lines),
                MAX_KERNEL_LINES if is_kernel(node) else MAX_FUNCTION_LINES,
            )
            if length > limit:
                large.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines")
    assert not large, "\n".join(large)


def test_the_loop_fits_on_a_few_screens():
    assert code_lines(ROOT / "pipeline" / "pretrain.py") <= LOOP_LINES
