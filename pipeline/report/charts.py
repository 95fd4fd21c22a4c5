"""The drawings of a page as inline SVG, made with matplotlib and no display; report.mplstyle holds the looks.

Templates call each as `lines(title, data, ...)`: it stands below its title; nothing to draw gives nothing.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from earlyfusion.pipeline.progress import is_finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("report.mplstyle")
INK, MUTED, GRID, GOOD, BAD = "#1d2433", "#6b7487", "#e4e8ef", "#1f8a5f", "#c0392b"
SMOOTHED_TO = 50  # means over a fiftieth of a curve: few enough to see the trend in the noise
MAX_POINTS = 500  # of one curve: more than the pixels of a chart's width, and the file stays small
WIDE = (6.4, 2.9)
LABEL_CHARS = 80

Series = tuple[Sequence[float], Sequence[float]]  # steps, values


def drawing(draw: Callable[..., Axes | None]) -> Callable[..., Markup]:
    """A function that draws data into a figure (and gives the axes that has the legend, None for nothing to
    draw) as templates call it.

    size: of the figure in inches. xlabel, ylabel: of every panel's axes; the rest is the function's own.
    """

    @wraps(draw)
    def drawn(
        title: str,
        data: Any,
        *,
        size: tuple[float, float] = WIDE,
        xlabel: str = "step",
        ylabel: str = "",
        **looks: Any,
    ) -> Markup:
        # matplotlib takes half a second to import: not before something is drawn.
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        buffer = io.StringIO()
        with rc_context(fname=STYLE):
            figure = Figure(figsize=size, layout="constrained")
            axes = draw(figure, data, **looks)
            if axes is None:
                return Markup()
            axes.set(xlabel=label(xlabel), ylabel=label(ylabel))
            handles, labels = axes.get_legend_handles_labels()
            named = dict(zip(labels, handles))  # each name once
            if len(named) > 1:
                axes.legend(named.values(), named, bbox_to_anchor=(1.0, 0.5))
            FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})

        # The title is also what a screen reader says of the drawing.
        svg = Markup(buffer.getvalue().partition("<svg ")[2])
        form = '<div><h3>{0}</h3><svg role="img" aria-label="{0}" {1}</div>'
        return Markup(form).format(title, svg)

    return drawn


@drawing
def lines(
    figure: Figure,
    series: Mapping[str, Series],
    *,
    log: str = "",
    levels: Mapping[str, Any] | None = None,
    marks: Sequence[float] = (),
    smoothing: bool = False,
    dots: bool = False,
) -> Axes | None:
    """Curves over optimizer steps. log: the axes in logarithms, "y" or "x". `levels` are named horizontal
    reference lines, `marks` vertical ones (events). With `smoothing` a long raw curve is drawn pale and means
    of its neighbours on top. dots: all values marked."""
    axes, empty = figure.add_subplot(), True
    for index, (name, (steps, values)) in enumerate(series.items()):
        # What is no number has no place, and a logarithmic axis none for what is not above 0.
        kept = [(x, y) for x, y in zip(steps, values) if is_finite(y) and (y > 0 or "y" not in log)]
        # A series without a point keeps its colour for other charts.
        if not kept:
            continue
        empty = False
        points = MAX_POINTS
        if smoothing and len(kept) > 2 * SMOOTHED_TO:
            axes.plot(*thin(kept), color=f"C{index}", alpha=0.22, linewidth=0.8)
            points = SMOOTHED_TO
        # A line of one point would not be seen.
        marker = "o" if dots or len(kept) == 1 else None
        axes.plot(*thin(kept, points), color=f"C{index}", label=label(name), marker=marker)
    if empty:
        return None

    for style, (name, level) in zip(("--", ":", "-."), (levels or {}).items()):
        if is_finite(level):
            shown = f"{label(name)} {level:.3g}"
            axes.axhline(level, color=MUTED, linewidth=1.1, linestyle=style, label=shown)
    for mark in marks:
        axes.axvline(mark, color=BAD, linewidth=0.8, alpha=0.7)

    # Logarithms last: the limits that decide on the labels are those of the whole drawing.
    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        # Less than a decade: the powers of ten alone would leave the axis without numbers.
        low, high = axes.get_ylim()
        axes.yaxis.set_minor_formatter("{x:g}" if high < 10 * low else "")
    return axes


@drawing
def spans(figure: Figure, rows: dict[str, Mapping[str, Any]], *, scale: float = 1.0) -> Axes | None:
    """One line a row: its value with the 95 % interval, coloured where that excludes 0.

    A row has value, low, high (None: no interval), all shown times `scale`; optional per_seed (values of each
    start, one colour a start), smallest_delta (half the width of what would not be seen), published (a value
    of others) and control_delta (the numbers of a row beside).
    """
    if not rows:
        return None
    # The height grows with the rows.
    figure.set_size_inches(7.8, 0.38 * len(rows) + 1.0)
    axes = figure.add_subplot()
    axes.grid(visible=False)
    for y, row in enumerate(reversed(rows.values())):
        # One dot a run, spread a little so that equal runs are seen.
        for start, values in enumerate(row.get("per_seed", ())):
            offsets = np.linspace(-0.2, 0.2, len(values)) if len(values) > 1 else np.zeros(1)
            axes.scatter(scale * np.array(values), y + offsets, s=13, color=f"C{start}", alpha=0.75, zorder=2)
        if unseen := row.get("smallest_delta"):
            width = 2 * scale * unseen
            axes.barh(y, width, left=-width / 2, height=0.62, color=GRID, label="below 80 % power")
        if published := row.get("published"):
            axes.plot(scale * published, y, "|", color="C0", markersize=15, label="K2.5 report")

        # The row's own numbers, and a little below them those of its control.
        for name, at, numbers in (("", y, row), ("control - base", y - 0.24, row.get("control_delta"))):
            if numbers:
                estimate = np.array([numbers[key] for key in ("value", "low", "high")], dtype=float)
                value, low, high = scale * estimate
                colour = MUTED
                if low > 0 or high < 0:
                    colour = GOOD if low > 0 else BAD
                colour = "C4" if name else colour
                error = [[value - low], [high - value]]
                axes.errorbar(value, at, xerr=error, fmt="D", markersize=5, color=colour, label=name)

    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [label(name) for name in reversed(rows)], color=INK)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    return axes


def thin(points: Sequence[tuple[float, float]], most: int = MAX_POINTS) -> tuple[Any, Any]:
    """(xs, ys) of at most `most` points: means over equal runs of neighbours, so noise shrinks and no spike
    is invented."""
    # Runs of equal length: the mean of the means is the mean.
    starts = np.arange(0, len(points), max(1, math.ceil(len(points) / most)))
    sums = np.add.reduceat(np.array(points, dtype=float), starts)
    xs, ys = (sums / np.diff([*starts, len(points)])[:, None]).T
    return xs, ys


def label(text: object) -> str:
    """A name as matplotlib may draw it: nothing that SVG or UTF-8 cannot hold."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text)[:LABEL_CHARS])
