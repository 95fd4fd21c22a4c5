"""How a comparison writes its numbers, in the terminal and in the report alike."""

from __future__ import annotations

import math
from typing import Any


class Unit:
    """Scores from 0 to 1 are shown in points (hundredths), everything else as it is."""

    def __init__(self, result: dict[str, Any]) -> None:
        scores = [entry[arm]["score"] for entry in result["tasks"] for arm in ("base", "treated")]
        self.points = result["metric"] == "score" and all(-1 <= score <= 1 for score in scores)
        self.name = "points" if self.points else result["metric"]

    def scaled(self, value: float) -> float:
        """The number to show."""
        return 100 * value if self.points else value

    def __call__(self, value: float | None, sign: bool = False) -> str:
        if value is None or math.isnan(value):
            return "-"
        digits = 2 if self.points else 4
        return f"{self.scaled(value):+.{digits}f}" if sign else f"{self.scaled(value):.{digits}f}"

    def range(self, interval: dict[str, Any]) -> str:
        """ "[-0.31, +1.20]"; words where nothing changed, because an interval of no width would claim too
        much."""
        if interval.get("se") == 0:
            return "[none changed]"
        return f"[{self(interval['low'], True)}, {self(interval['high'], True)}]"


def chart_label(text: object, limit: int = 80) -> str:
    """A name as matplotlib may draw it: no mathematics between dollars, nothing that SVG or UTF-8 cannot
    hold."""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text)[:limit])
    return shown.replace("$", r"\$")


def p_text(p: float | None) -> str:
    """A p value with what it can resolve."""
    if p is None or math.isnan(p):
        return "-"
    return "<.001" if p < 0.001 else f"{p:.3f}"
