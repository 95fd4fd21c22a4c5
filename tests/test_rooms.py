"""The house stays small enough to live in, and one engineer can find the way.

Weight is counted in tokens (names, operators, numbers, strings): unlike lines they do not shrink when code is
squeezed, nor grow when it is given air. Comments and docstrings cost nothing.
"""

import ast
import io
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ["kernels", "vision", "model", "data", "eval", "pipeline", "rl"]
MAX_PRODUCT_TOKENS, MAX_TEST_TOKENS = 494_300, 385_300
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_KERNEL_LINES, LOOP_LINES = 500, 60, 97, 250
LINES_A_COMMENT = 25
WIDEST_FAMILY = 2
COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources(*rooms: str) -> list[Path]:
    return [path for room in rooms or ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def bare_strings(tree: ast.AST) -> list[ast.Expr]:
    """Docstrings of modules, classes, functions and attributes."""
    found = [
        node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    return [node for node in found if isinstance(node.value.value, str)]


def weight(paths: list[Path]) -> int:
    total = 0
    for path in paths:
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        total += sum(token.type in COUNTED for token in tokens) - len(bare_strings(tree_of(path)))
    return total


def code_lines(path: Path) -> int:
    lines = path.read_text().splitlines()
    if path.suffix == ".py":
        for node in bare_strings(tree_of(path)):
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


def own_imports(tree: ast.AST) -> list[tuple[ast.AST, str]]:
    """(node, module) of every import of this package, wherever it stands: also under TYPE_CHECKING."""
    found: list[tuple[ast.AST, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("earlyfusion"):
            found += [(node, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names if alias.name.startswith("earlyfusion")]
    return found


def test_the_house_weighs_no_more_than_it_may():
    assert weight(sources()) <= MAX_PRODUCT_TOKENS
    assert weight(sources("tests")) <= MAX_TEST_TOKENS


def test_files_are_small():
    cpp = [path for suffix in ("cpp", "h") for path in (ROOT / "kernels").rglob(f"*.{suffix}")]
    assert cpp
    large = {name_of(path): n for path in sources() + cpp if (n := code_lines(path)) > MAX_FILE_LINES}
    assert not large, f"cut these files: {large}"


def test_functions_are_small():
    large = []
    for path in sources():
        lines = path.read_text().splitlines()
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, FUNCTIONS):
                continue
            length, limit = (
                function_length(node, lines),
                MAX_KERNEL_LINES if is_kernel(node) else MAX_FUNCTION_LINES,
            )
            if length > limit:
                large.append(f"{name_of(path)}:{node.lineno} {node.name} has {length} lines")
    assert not large, "\n".join(large)


def test_the_loop_fits_on_a_few_screens():
    assert code_lines(ROOT / "pipeline" / "pretrain.py") <= LOOP_LINES


def test_code_says_why():
    """One comment in so many lines, on average over the product."""
    lines = [line.strip() for path in sources() for line in path.read_text().splitlines()]
    comments = sum(line.startswith("#") for line in lines)
    assert len(lines) <= LINES_A_COMMENT * comments, f"{comments} comments in {len(lines)} lines"


def test_the_formatter_has_no_exceptions():
    assert not [
        name_of(path) for path in sources() + sources("tests") if "fmt: " + "skip" in path.read_text()
    ]


def test_own_modules_are_imported_at_the_top():
    """An import inside a function is for an optional library, never to hide a circle."""
    hidden = set()
    for path in sources():
        for function in ast.walk(tree_of(path)):
            if isinstance(function, FUNCTIONS):
                hidden |= {
                    f"{name_of(path)}:{node.lineno} {module}" for node, module in own_imports(function)
                }
    assert not hidden, "\n".join(sorted(hidden))


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in edges[node]:
            if other not in order:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == order[node]:
            cut = stack.index(node)
            if len(stack) - cut > 1:
                found.append(sorted(stack[cut:]))
            del stack[cut:]

    for node in edges:
        if node not in order:
            visit(node)
    return found


def test_no_imports_run_in_a_circle():
    """Of any kind: at the top, under TYPE_CHECKING or inside a function."""
    modules = {
        "earlyfusion." + ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources()
    }
    edges: dict[str, set[str]] = {}
    for module, path in modules.items():
        targets = [target for _, target in own_imports(tree_of(path))]
        named = {target if target in modules else target.rpartition(".")[0] for target in targets}
        edges[module] = (named & modules.keys()) - {module}
    assert not circles(edges)


def test_the_check_sees_a_circle():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_a_prefix_is_a_folder():
    families = defaultdict(list)
    for path in sources():
        if "_" in path.stem and path.stem != "__init__":
            families[path.parent / path.stem.split("_")[0]].append(path.name)
    wide = {name_of(prefix): names for prefix, names in families.items() if len(names) > WIDEST_FAMILY}
    assert not wide


WORD = re.compile(r"[A-Za-z_]\w+")


def mentions(tree: ast.AST, within: tuple[str, ...] = ()) -> list[str]:
    """Names that code uses, but for a definition's own: loads, attributes, keywords, words in strings."""
    found: list[str] = []
    docs = {id(node.value) for node in bare_strings(tree)}

    def walk(node: ast.AST, inside: tuple[str, ...]) -> None:
        words: list[str] = []
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            words = [node.id]
        elif isinstance(node, ast.Attribute):
            words = [node.attr]
        elif isinstance(node, ast.keyword) and node.arg:
            words = [node.arg]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            words = WORD.findall(node.value)
        found.extend(word for word in words if word not in inside)
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            # A decorator registers what it stands on.
            found.extend([node.name] if node.decorator_list else [])
            inside = (*inside, node.name)
        for child in ast.iter_child_nodes(node):
            walk(child, inside)

    walk(tree, within)
    return found


def public_names(path: Path, own_classes: set[str]) -> list[tuple[int, str]]:
    """Functions, classes and methods without an underscore, but for those that a foreign base class calls."""
    foreign: set[ast.AST] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).split("[")[0] for base in node.bases}
            foreign |= set(node.body) if bases - own_classes else set()
    named = [node for node in ast.walk(tree_of(path)) if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
    return [
        (node.lineno, node.name) for node in named if node not in foreign and not node.name.startswith("_")
    ]


def test_every_public_name_is_reached():
    """From a verb, another function, a recipe or a document; what only tests call is dead."""
    used = {word for path in sources() for word in mentions(tree_of(path))}
    documents = [
        ROOT / "README.md",
        ROOT / "pyproject.toml",
        ROOT / "Makefile",
        *(ROOT / "docs").glob("*.md"),
    ]
    documents += [path for room in ROOMS for path in (ROOT / room).rglob("*.toml")]
    used |= {word for path in documents if path.name != "log.md" for word in WORD.findall(path.read_text())}
    classes = {
        node.name for p in sources() for node in ast.walk(tree_of(p)) if isinstance(node, ast.ClassDef)
    }
    dead = []
    for path in sources():
        for line, name in public_names(path, classes):
            # transformers calls what travels with an export.
            if name not in used and "portable" not in path.parts:
                dead.append(f"{name_of(path)}:{line} {name}")
    assert not dead, "\n".join(dead)
