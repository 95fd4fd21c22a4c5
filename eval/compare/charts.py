"""The drawings of a comparison, as inline SVG text: forest plots, bootstrap histogram, wins and losses,
seeds, power."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from earlyfusion.eval.compare.text import Unit, chart_label
from earlyfusion.eval.stats import power_curve

INK, MUTED, GRID, BLUE, GREEN, RED, SAND = (
    "#1d2433",
    "#6b7487",
    "#e4e8ef",
    "#2f6fde",
    "#1f8a5f",
    "#c0392b",
    "#c9a227",
)


def _svg(figure: Figure, description: str) -> str:
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "earlyfusion"}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(
        "<svg ", f'<svg role="img" aria-label="{html.escape(description)}" ', 1
    )


def _axes(figure: Figure, xlabel: str, ylabel: str = "") -> Axes:
    axes = figure.add_subplot()
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(which="both", colors=MUTED, labelsize=8, length=0)
    axes.set_xlabel(chart_label(xlabel), color=MUTED, fontsize=8)
    axes.set_ylabel(ylabel, color=MUTED, fontsize=8)
    axes.set_axisbelow(True)
    return axes


def forest(rows: Sequence[dict[str, Any]], unit: Unit, description: str) -> str:
    """One line a row: its delta with the 95 % interval, the published change where there is one.

    A row has label, value, low, high; optional published (number), control (interval dict) and
    smallest_delta.
    """
    figure = Figure(figsize=(7.2, 0.34 * len(rows) + 1.0), layout="constrained")
    axes = _axes(figure, f"treated - base, {unit.name}")
    labelled: set[str] = set()

    def once(label: str) -> str:
        """A label for the legend the first time, none after."""
        if label in labelled:
            return "_"
        labelled.add(label)
        return label

    for place, row in enumerate(rows):
        y = len(rows) - 1 - place
        clear = row["low"] > 0 or row["high"] < 0
        colour = (GREEN if row["value"] > 0 else RED) if clear else MUTED
        if row.get("smallest_delta"):
            seen = unit.scaled(row["smallest_delta"])
            axes.barh(y, 2 * seen, left=-seen, height=0.62, color=GRID, label=once("below 80 % power"))
        axes.plot([unit.scaled(row["low"]), unit.scaled(row["high"])], [y, y], color=colour, linewidth=2.2)
        axes.plot(unit.scaled(row["value"]), y, "o", color=colour, markersize=5.5)
        if row.get("control"):
            c = row["control"]
            axes.plot(
                [unit.scaled(c["low"]), unit.scaled(c["high"])], [y - 0.24] * 2, color=SAND, linewidth=1.4
            )
            axes.plot(
                unit.scaled(c["value"]),
                y - 0.24,
                "s",
                color=SAND,
                markersize=3.5,
                label=once("control - base"),
            )
        if row.get("published") is not None:
            axes.plot(
                unit.scaled(row["published"]), y, "|", color=BLUE, markersize=15, label=once("K2.5 report")
            )
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(
        range(len(rows)), [chart_label(row["label"]) for row in rows][::-1], fontsize=8, color=INK
    )
    axes.set_ylim(-0.7, len(rows) - 0.3)
    if labelled:
        axes.legend(frameon=False, fontsize=7, labelcolor=INK, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _svg(figure, description)


def histogram(bootstrap: dict[str, Any], value: float, unit: Unit, description: str) -> str:
    """The bootstrap's means with the percentile interval."""
    edges = np.asarray(bootstrap["edges"]) * (100 if unit.points else 1)
    figure = Figure(figsize=(3.5, 2.1), layout="constrained")
    axes = _axes(figure, f"bootstrap delta, {unit.name}")
    axes.bar(edges[:-1], bootstrap["counts"], width=np.diff(edges), align="edge", color=BLUE, alpha=0.55)
    axes.axvspan(unit.scaled(bootstrap["low"]), unit.scaled(bootstrap["high"]), color=GRID, zorder=0)
    axes.axvline(unit.scaled(value), color=INK, linewidth=1.2)
    axes.axvline(0, color=RED, linewidth=0.9, dashes=(3, 2))
    axes.set_yticks([])
    return _svg(figure, description)


def wins_and_losses(table: dict[str, Any], description: str) -> str:
    """Questions only one of the two has right."""
    figure = Figure(figsize=(3.5, 2.1), layout="constrained")
    axes = _axes(figure, "questions")
    values = [table["lost"], table["won"]]
    bars = axes.barh([0, 1], values, color=[RED, GREEN], height=0.55)
    axes.bar_label(bars, fontsize=8, color=INK, padding=3)
    axes.set_yticks([0, 1], ["only base right", "only treated right"], fontsize=8, color=INK)
    axes.set_xlim(0, max(*values, 1) * 1.18)
    return _svg(figure, description)


def seeds_strip(seeds: dict[str, Any], unit: Unit, description: str) -> str:
    """The score of every seed, the means of both arms."""
    figure = Figure(figsize=(3.5, 2.1), layout="constrained")
    axes = _axes(figure, f"score of a seed, {unit.name}")
    for y, (arm, colour) in enumerate((("base", MUTED), ("treated", BLUE))):
        values = [unit.scaled(value) for value in seeds[arm]]
        axes.plot(values, [y] * len(values), "o", color=colour, alpha=0.65, markersize=6)
        axes.plot([float(np.mean(values))] * 2, [y - 0.25, y + 0.25], color=colour, linewidth=2)
    axes.set_yticks([0, 1], ["base", "treated"], fontsize=8, color=INK)
    axes.set_ylim(-0.6, 1.6)
    return _svg(figure, description)


def power(discordance: float, n: int, unit: Unit, description: str) -> str:
    """Smallest true delta that n questions show with 80 % power at this discordance, with this test's n
    marked."""
    ns = np.unique(np.geomspace(max(10, n / 20), n * 20, 60).astype(int))
    figure = Figure(figsize=(3.5, 2.1), layout="constrained")
    axes = _axes(figure, f"questions (discordance {100 * discordance:.1f} %)", f"visible from, {unit.name}")
    axes.plot(ns, [unit.scaled(v) for v in power_curve(discordance, ns.tolist())], color=BLUE, linewidth=1.8)
    here = float(power_curve(discordance, [n])[0])
    axes.plot(n, unit.scaled(here), "o", color=INK, markersize=5)
    axes.annotate(
        f"{unit.scaled(here):.2f} at n = {n:,}",
        (n, unit.scaled(here)),
        fontsize=8,
        color=INK,
        xytext=(6, 6),
        textcoords="offset points",
    )
    axes.set_xscale("log")
    axes.tick_params(which="both", length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    return _svg(figure, description)
