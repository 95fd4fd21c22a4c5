"""The floors of the house: a file names only modules of its own room or of lower floors, as an import or in a
string."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ["kernels", "vision", "model", "data", "eval", "pipeline", "rl"]
DATA_MAY_USE_OF_VISION = {"patches", "config", "balance"}
FORBIDDEN_NAMES = set(
    "queue signal token select copy types random code io platform logging profile trace utils util".split()
    + ["helpers"]
)
TOP = ROOT / "pipeline" / "package"  # installed as earlyfusion itself: it stands above all floors
SOURCES = [path for room in FLOORS for path in sorted((ROOT / room).rglob("*.py"))]


def imported_modules(path: Path) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # What travels with an export is no part of the package where it runs.
            assert node.level == 0 or path.parent.name == "portable", (
                f"{path}:{node.lineno}: relative import; write it out as earlyfusion.<room>..."
            )
            found.append((node.lineno, node.module or ""))
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def named_in_strings(tree: ast.Module) -> list[tuple[int, str]]:
    """Rooms that strings name: "earlyfusion.room...", root / "room"; docstrings are free."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found += [(node.lineno, room) for room in re.findall(r"\bearlyfusion\.(\w+)", node.value)]
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Div)
            and isinstance(node.right, ast.Constant)
        ):
            found.append((node.lineno, str(node.right.value)))
    return found


def violations(path: Path) -> list[str]:
    room = path.relative_to(ROOT).parts[0]
    wrong = []
    if path.parent != TOP:
        for line, target in named_in_strings(ast.parse(path.read_text())):
            if target in FLOORS and FLOORS.index(target) > FLOORS.index(room):
                wrong.append(f"{path}:{line}: {room} may not name {target} (a higher floor)")
    for line, module in imported_modules(path):
        parts = module.split(".")
        if parts[0] in FLOORS:
            wrong.append(f"{path}:{line}: import {module}: write earlyfusion.{module}")
        if parts[0] != "earlyfusion" or len(parts) < 2:
            continue
        target = parts[1]
        if FLOORS.index(target) > FLOORS.index(room):
            wrong.append(f"{path}:{line}: {room} may not import {module} (a higher floor)")
        if (
            room == "data"
            and target == "vision"
            and len(parts) > 2
            and parts[2] not in DATA_MAY_USE_OF_VISION
        ):
            wrong.append(
                f"{path}:{line}: data may use only vision.patches, .config and .balance, not {module}"
            )
        if room == "data" and target == "model":
            wrong.append(f"{path}:{line}: data may not import {module}")
        if room == "eval" and target in ("pipeline", "rl"):
            wrong.append(f"{path}:{line}: eval may not import {module}")
    return wrong


@pytest.mark.parametrize("room", FLOORS)
def test_rooms_import_only_from_lower_floors(room):
    wrong = [v for path in SOURCES if path.relative_to(ROOT).parts[0] == room for v in violations(path)]
    assert not wrong, "\n".join(wrong)


def test_the_check_sees_a_forbidden_import(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    bad = tmp_path / "kernels" / "x.py"
    bad.parent.mkdir()
    bad.write_text("from earlyfusion.model.mixers import KimiDeltaAttention\nimport data\n")
    assert len(violations(bad)) == 3  # the module, the name in it, and the bare room


def test_the_check_sees_a_name_in_a_string(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    bad = tmp_path / "data" / "x.py"
    bad.parent.mkdir()
    bad.write_text(
        '"""Read by earlyfusion.rl."""\nA = "earlyfusion.rl.train:run"\nB = f"earlyfusion.eval.{A}"\n'
        'C = root / "rl" / "recipes"\nD = root / "kernels"\nE = "earlyfusion.vision.config"\n'
    )
    assert [text.split(":")[1] for text in violations(bad)] == ["2", "3", "4"]


def test_kernels_package_is_import_free():
    """transformers imports a package called `kernels` while probing for its own; ours must do nothing
    then."""
    tree = ast.parse((ROOT / "kernels" / "__init__.py").read_text())
    assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in tree.body)


def test_no_file_shadows_the_standard_library():
    assert not [str(p) for p in SOURCES if p.stem in FORBIDDEN_NAMES]


def test_every_package_is_listed_in_pyproject():
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    present = {"earlyfusion." + ".".join(p.parent.relative_to(ROOT).parts) for p in SOURCES}
    itself = "earlyfusion." + settings["package-dir"]["earlyfusion"].replace("/", ".")
    assert present - {itself} == set(settings["packages"]) - {"earlyfusion"} and itself in present
