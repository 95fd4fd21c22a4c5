"""Draw the rooms, what stands in them and what they import, from the code: python docs/architecture.py

A room is a box with its folders and files written inside; an arrow goes from a room to each one that it
imports, as wide as the number of imports. Writes docs/architecture.svg.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "vision", "model", "data", "eval", "pipeline", "rl")
COLOURS = ("#4c72b0", "#55a868", "#c44e52", "#8172b2", "#937860", "#da8bc3", "#64b5cd")


def imports() -> Counter[tuple[str, str]]:
    """(room, room it imports) -> how many import statements."""
    found: Counter[tuple[str, str]] = Counter()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                module = node.module if isinstance(node, ast.ImportFrom) else None
                parts = (module or "").split(".")
                if parts[0] == "earlyfusion" and len(parts) > 1 and parts[1] != room:
                    found[room, parts[1]] += 1
    return found


def contents(room: str) -> str:
    """The room's folders and, behind a bar, its files, wrapped to the width of a box."""
    here = ROOT / room
    folders = sorted(path.parent.name for path in here.glob("*/__init__.py"))
    files = sorted(path.stem for path in here.glob("*.py") if path.stem != "__init__")
    lines, line = [], ""
    for word in [f"{name}/" for name in folders if name != "package"] + files:
        if len(line) + len(word) > 84:
            lines.append(line)
            line = ""
        line += word + "  "
    return "\n".join([*lines, line])


def draw(target: Path) -> None:
    """The picture, deterministic for a given tree."""
    pyplot.rcParams.update(
        {"svg.hashsalt": "earlyfusion", "svg.fonttype": "none", "font.family": "monospace"}
    )
    figure, axes = pyplot.subplots(figsize=(11, 8.5))
    heights = {}
    top = 0.0
    for room, colour in zip(ROOMS, COLOURS):
        text = contents(room)
        height = 0.9 + 0.34 * (text.count("\n") + 1)
        axes.add_patch(pyplot.Rectangle((0, top), 10, height, facecolor=colour, alpha=0.16, edgecolor=colour))
        axes.text(0.15, top + height - 0.5, room, fontsize=12, weight="bold", color=colour)
        axes.text(1.75, top + height - 0.3, text, fontsize=7, va="top", color="#333333")
        heights[room] = top + height / 2
        top += height + 0.35

    # Arrows go down only: that is the law of the floors.
    for (source, target_room), count in sorted(imports().items()):
        distance = ROOMS.index(source) - ROOMS.index(target_room)
        style = {
            "arrowstyle": "-|>",
            "color": COLOURS[ROOMS.index(source)],
            "lw": 0.5 + count / 40,
            "alpha": 0.7,
        }
        style["connectionstyle"] = f"arc3,rad=-{0.12 + 0.09 * distance}"
        axes.annotate("", (10, heights[target_room]), (10, heights[source]), arrowprops=style)
    axes.set_xlim(-0.1, 13)
    axes.set_ylim(-0.2, top)
    axes.axis("off")
    figure.savefig(target, metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    draw(ROOT / "docs" / "architecture.svg")
