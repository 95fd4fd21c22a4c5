"""The drawings of a transfer study as inline SVG text: intervals with one dot for every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from earlyfusion.pipeline.report.charts import COLOURS, GRID, INK, MUTED, new_axes, new_figure, to_svg

GOOD, BAD = "#1f8a5f", "#c0392b"


def dots(rows: Sequence[Mapping[str, Any]], description: str, xlabel: str) -> str:
    """One line for each row: its runs as dots coloured by start, the mean and the 95 % interval.

    A row has name, value, low, high, clear and per_seed (start -> run -> difference), all in points.
    """
    figure = new_figure(8.6, 0.42 * len(rows) + 1.0)
    axes = new_axes(figure, xlabel=xlabel, ylabel="")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.grid(axis="y", visible=False)
    for place, row in enumerate(rows):
        y = len(rows) - 1 - place
        for start, runs in enumerate(row["per_seed"]):
            spread = np.linspace(-0.22, 0.22, len(runs)) if len(runs) > 1 else [0.0]
            colour = COLOURS[start % len(COLOURS)]
            axes.scatter(
                runs, [y + d for d in spread], s=13, color=colour, alpha=0.75, linewidths=0, zorder=2
            )
        colour = (GOOD if row["value"] > 0 else BAD) if row["clear"] else INK
        if np.isfinite(row["low"]):
            axes.plot(
                [row["low"], row["high"]],
                [y, y],
                color=colour,
                linewidth=2.4,
                zorder=3,
                solid_capstyle="round",
            )
        axes.plot([row["value"]], [y], marker="D", markersize=5.5, color=colour, zorder=4)
    axes.axvline(0, color=MUTED, linewidth=1.0)
    axes.set_yticks(range(len(rows)), [row["name"] for row in reversed(rows)], fontsize=8, color=INK)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    return to_svg(figure, description)
