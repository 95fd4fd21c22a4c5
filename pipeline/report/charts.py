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
SMOOTHED_OVER = 50  # a moving average spans a fiftieth of its curve: the lag does not show
MAX_POINTS = 500  # of one curve: more than the pixels of a chart's width, and the file stays small
WIDE = (6.4, 2.9)
LABEL_CHARS = 80

Series = tuple[Sequence[float], Sequence[float]]  # steps, values


def drawing(draw: Callable[..., Axes]) -> Callable[..., Markup]:
    """A function that draws data into a figure (and gives the axes that has the legend) as templates call it.

    size: of the figure in inches. xlabel, ylabel: of every panel's axes; the rest is the function's own.
    """

    @wraps(draw)
    def drawn(
        title: str,
        data: Any,
        *,
        size: tuple[float, float] = WIDE,
        xlabel: str,
        ylabel: str = "",
        **looks: Any,
    ) -> Markup:
        if not data:
            return Markup()
        # matplotlib takes half a second to import: not before something is drawn.
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        buffer = io.StringIO()
        with rc_context(fname=STYLE):
            figure = Figure(figsize=size, layout="constrained")
            axes = draw(figure, data, **looks)
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


def finite(series: Mapping[str, Series], log: str = "") -> dict[str, Series]:
    """The curves without what is no number, or cannot stand on a logarithmic axis."""
    found: dict[str, Series] = {}
    for name, (xs, ys) in series.items():
        kept = [(x, y) for x, y in zip(xs, ys) if is_finite(y) and (y > 0 or "y" not in log)]
        found[name] = ([x for x, _ in kept], [y for _, y in kept])
    return found


def lines(
    title: str, series: Mapping[str, Series], *, log: str = "", xlabel: str = "step", **looks: Any
) -> Markup:
    """Curves over optimizer steps; nothing where no series has a point. log: the axes in logarithms, "y", "x"
    or "xy". What else may be said stands in `curves`."""
    kept = finite(series, log)
    if not any(steps for steps, _ in kept.values()):
        return Markup()
    return curves(title, kept, log=log, xlabel=xlabel, **looks)


@drawing
def curves(
    figure: Figure,
    series: Mapping[str, Series],
    *,
    levels: Mapping[str, Any] | None = None,
    marks: Sequence[float] = (),
    smoothing: bool = False,
    log: str = "",
    dots: bool = False,
) -> Axes:
    """`levels` are named horizontal reference lines, `marks` vertical ones (events). With `smoothing` a long
    raw curve is drawn pale and its moving average, over a fiftieth of it, on top. dots: all values marked."""
    axes = figure.add_subplot()
    for index, (name, (steps, values)) in enumerate(series.items()):
        # A series without a point keeps its colour for other charts.
        if not steps:
            continue
        # A short curve is its own average.
        if smoothing and len(steps) > 2 * SMOOTHED_OVER:
            axes.plot(*thin(steps, values), color=f"C{index}", alpha=0.22, linewidth=0.8)
            values = smooth(values, 1 - SMOOTHED_OVER / len(steps))
        # A line of one point would not be seen.
        marker = "o" if dots or len(steps) == 1 else None
        axes.plot(*thin(steps, values), color=f"C{index}", label=label(name), marker=marker)

    for dashes, (name, level) in zip(((4, 3), (1, 2), (6, 2, 1, 2)), (levels or {}).items()):
        if is_finite(level):
            shown = f"{label(name)} {level:.3g}"
            axes.axhline(level, color=MUTED, linewidth=1.1, dashes=dashes, label=shown)
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
def heat_map(
    figure: Figure,
    matrices: Mapping[str, Sequence[Sequence[float | None]]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    colours: str = "Blues",
    high: float = 1.0,
    cell: float = 0.46,
) -> Axes:
    """One map per entry, side by side, sharing rows, columns and the scale from 0 to `high`. None = no such
    cell.

    cell: inches of a column; values stand in cells that are wide enough.
    """
    # A kind of token that was not measured has no panel.
    shown = {title: matrix for title, matrix in matrices.items() if matrix}
    figure.set_size_inches(
        max(2.6, cell * len(columns) + 1.0) * len(shown) + 0.6, max(1.6, 0.28 * len(rows) + 0.9)
    )
    names = [label(name) for name in columns]
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (title, matrix) in zip(panels, shown.items()):
        values = np.array(matrix, dtype=float)  # None becomes nan, which stays blank
        image = axes.imshow(values, cmap=colours, vmin=0.0, vmax=high, aspect="auto", interpolation="nearest")
        axes.set_title(label(title))
        axes.set_xticks(range(len(names)), names, fontsize=7, rotation=45 if max(map(len, names)) > 3 else 0)
        axes.set_yticks(range(len(rows)), map(label, rows), fontsize=7)
        axes.grid(visible=False)
        for (row, column), value in np.ndenumerate(values):
            if cell > 0.2 and math.isfinite(value):
                # The scales of these maps are dark above 0.6 of their range.
                ink = INK if image.norm(value) < 0.6 else "white"
                text = f"{value:.2f}".lstrip("0") if value < 1 else f"{value:.1f}"
                axes.text(column, row, text, ha="center", va="center", fontsize=6, color=ink)

    # All panels share one scale, so that they share its bar.
    figure.colorbar(image, ax=list(panels), fraction=0.03, pad=0.02).outline.set_visible(False)
    return panels[0]


@drawing
def spans(figure: Figure, rows: Sequence[Mapping[str, Any]], *, zero: bool = True) -> Axes:
    """One line a row: its value with the 95 % interval, coloured where that excludes 0.

    A row has label, value, low, high (None: no interval); optional dots (group -> values, one colour a
    group), band
    (half the width of what would not be seen), mark (name -> value) and beside (name -> another row's
    numbers).
    """
    # The height grows with the rows.
    figure.set_size_inches(7.8, 0.38 * len(rows) + 1.0)
    axes = figure.add_subplot()
    axes.grid(visible=False)
    for y, row in enumerate(reversed(rows)):
        # One dot a run, spread a little so that equal runs are seen.
        for group, values in enumerate(row.get("dots", ())):
            offsets = np.linspace(-0.2, 0.2, len(values)) if len(values) > 1 else np.zeros(1)
            axes.scatter(values, y + offsets, s=13, color=f"C{group}", alpha=0.75, linewidths=0, zorder=2)
        if band := row.get("band"):
            axes.barh(y, 2 * band, left=-band, height=0.62, color=GRID, label="below 80 % power")
        span(axes, y, row, tone(row) if zero else INK)
        for name, other in row.get("beside", {}).items():
            span(axes, y - 0.24, other, "C4", name)
        for name, value in row.get("mark", {}).items():
            axes.plot(value, y, "|", color="C0", markersize=15, label=name)

    if zero:
        axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [label(row["label"]) for row in reversed(rows)], color=INK)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    return axes


def span(axes: Axes, y: float, row: Mapping[str, Any], colour: str, name: str = "") -> None:
    """A value with its interval, where it has one."""
    if is_finite(row["low"]) and is_finite(row["high"]):
        axes.plot([row["low"], row["high"]], [y, y], color=colour, linewidth=2.2, solid_capstyle="round")
    axes.plot(row["value"], y, "D", markersize=5, color=colour, label=name)


def tone(row: Mapping[str, Any]) -> str:
    """Colour of a gain, a loss, or of what an interval does not tell from 0."""
    if not is_finite(row["low"]) or row["low"] <= 0 <= row["high"]:
        return MUTED
    return GOOD if row["value"] > 0 else BAD


@drawing
def histogram(
    figure: Figure,
    counts: Sequence[float],
    *,
    edges: Sequence[float],
    band: Sequence[float],
    marks: Sequence[float],
) -> Axes:
    """Counts between `edges`, with a shaded band and vertical marks."""
    axes = figure.add_subplot()
    axes.bar(edges[:-1], counts, width=np.diff(edges), align="edge", alpha=0.55)
    axes.axvspan(*band, color=GRID, zorder=0)
    for mark in marks:
        axes.axvline(mark, color=INK if mark else BAD, linewidth=1.0)
    axes.set_yticks([])
    return axes


def thin(xs: Sequence[float], ys: Sequence[float]) -> Series:
    """At most MAX_POINTS points: means over equal runs of neighbours, so noise shrinks and no spike is
    invented."""
    # Runs of equal length: the mean of the means is the mean.
    starts = np.arange(0, len(xs), max(1, math.ceil(len(xs) / MAX_POINTS)))
    counts = np.diff([*starts, len(xs)])
    return (np.add.reduceat(xs, starts) / counts).tolist(), (np.add.reduceat(ys, starts) / counts).tolist()


def smooth(ys: Sequence[float], factor: float = 0.9) -> list[float]:
    """Bias-corrected moving average: the first value is the first observation, not a decayed zero."""
    out, average, weight = [], 0.0, 0.0
    for y in ys:
        average, weight = factor * average + (1 - factor) * y, factor * weight + (1 - factor)
        out.append(average / weight)
    return out


def label(text: object) -> str:
    """A name as matplotlib may draw it: no mathematics between dollars, nothing that SVG or UTF-8 cannot
    hold."""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text)[:LABEL_CHARS])
    return shown.replace("$", r"\$")
