"""The drawings of a page as inline SVG, made with matplotlib and no display.

Colours come from one colour-blind safe list, in a fixed order, so that a modality or source keeps its colour.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from earlyfusion.pipeline.progress import is_finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, GOOD, BAD = "#1d2433", "#6b7487", "#e4e8ef", "#1f8a5f", "#c0392b"
COLOURS = tuple("#2f6fde #d9603b #2a9d6e #8b5cc7 #c9a227 #3aa6c2 #c2447d #7a8450 #5b6b8c #a0522d".split())
SMOOTHED_OVER = 50  # a moving average spans a fiftieth of its curve: the lag does not show
MAX_POINTS = 500  # of one curve: more than the pixels of a chart's width, and the file stays small
WIDE, SMALL = (6.4, 2.9), (4.8, 2.3)
LABEL_CHARS = 80

Series = tuple[Sequence[float], Sequence[float]]  # steps, values


def lines(
    series: Mapping[str, Series],
    *,
    description: str,
    ylabel: str,
    xlabel: str = "step",
    levels: Mapping[str, Any] | None = None,
    marks: Sequence[float] = (),
    smoothing: bool = False,
    log: str = "",
    dots: bool = False,
    size: tuple[float, float] = WIDE,
) -> Markup:
    """Curves over optimizer steps. `levels` are named horizontal reference lines, `marks` vertical ones
    (events).

    Nothing is drawn where no series has a point; one without keeps its colour for other charts. With
    `smoothing` a long raw curve is drawn pale and its moving average, over a fiftieth of it, on top. log: the
    axes in logarithms, "y", "x" or "xy". dots: every value is marked. What is no number is left out.
    """
    # An empty frame says less than none.
    if not any(steps for steps, _ in series.values()):
        return Markup()
    figure, axes = _new(size, xlabel, ylabel)
    for colour, (label, (xs, ys)) in zip(COLOURS * (len(series) // len(COLOURS) + 1), series.items()):
        kept = [(x, y) for x, y in zip(xs, ys) if is_finite(y) and (y > 0 or "y" not in log)]
        if not kept:
            continue
        steps, values = [x for x, _ in kept], [y for _, y in kept]
        # A short curve is its own average.
        if smoothing and len(kept) > 2 * SMOOTHED_OVER:
            axes.plot(*thin(steps, values), color=colour, alpha=0.22, linewidth=0.8)
            values = smooth(values, 1 - SMOOTHED_OVER / len(kept))
        # A line of one point would not be seen.
        marker = "o" if dots or len(kept) == 1 else None
        axes.plot(
            *thin(steps, values),
            color=colour,
            linewidth=1.8,
            label=_label(label),
            marker=marker,
            markersize=3.5,
        )

    for dashes, (name, level) in zip(((4, 3), (1, 2), (6, 2, 1, 2)), (levels or {}).items()):
        if is_finite(level):
            axes.axhline(
                level, color=MUTED, linewidth=1.1, dashes=dashes, label=f"{_label(name)} {level:.3g}"
            )
    for mark in marks:
        axes.axvline(mark, color=BAD, linewidth=0.8, alpha=0.7)

    # Logarithms last: the limits that decide on the labels are those of the whole drawing.
    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        # Less than a decade: the powers of ten alone would leave the axis without numbers.
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if high < 10 * low else "")
    return _svg(figure, axes, description, len(series) + len(levels or {}) > 1)


def heat_map(
    matrices: Mapping[str, Sequence[Sequence[float | None]]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    description: str,
    ylabel: str,
    xlabel: str,
    colours: str = "Blues",
    high: float = 1.0,
    cell: float = 0.46,
) -> Markup:
    """One map per entry, side by side, sharing rows, columns and the scale from 0 to `high`. None = no such
    cell.

    cell: inches of a column; values stand in cells that are wide enough.
    """
    # A kind of token that was not measured has no panel.
    matrices = {title: matrix for title, matrix in matrices.items() if matrix}
    if not matrices:
        return Markup()
    width = max(2.6, cell * len(columns) + 1.0) * len(matrices) + 0.6
    figure = _figure((width, max(1.6, 0.28 * len(rows) + 0.9)))
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    names = [_label(name) for name in columns]
    for axes, (title, matrix) in zip(panels, matrices.items()):
        # matplotlib leaves nan blank.
        values = np.array([[math.nan if v is None else v for v in row] for row in matrix], dtype=float)
        image = axes.imshow(values, cmap=colours, vmin=0.0, vmax=high, aspect="auto", interpolation="nearest")
        _style(axes, xlabel, ylabel if axes is panels[0] else "")
        axes.set_title(_label(title), fontsize=9, color=INK)
        axes.set_xticks(range(len(names)), names, fontsize=7, rotation=45 if max(map(len, names)) > 3 else 0)
        axes.set_yticks(range(len(rows)), map(_label, rows), fontsize=7)
        axes.grid(visible=False)
        if cell > 0.2:
            _annotate(axes, values, image.norm(values))

    # All panels share one scale, so that they share its bar.
    figure.colorbar(image, ax=list(panels), fraction=0.03, pad=0.02).outline.set_visible(False)
    return _svg(figure, panels[0], description, False)


def _annotate(axes: Axes, values: np.ndarray, shades: np.ndarray) -> None:
    """Write each value into its cell, dark on the paler half of the scale and white on the rest."""
    for (row, column), value in np.ndenumerate(values):
        if math.isfinite(value):
            # The scales of these maps are dark above 0.6 of their range.
            ink = INK if shades[row, column] < 0.6 else "white"
            text = f"{value:.2f}".lstrip("0") if value < 1 else f"{value:.1f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=6, color=ink)


def spans(rows: Sequence[Mapping[str, Any]], *, description: str, xlabel: str, zero: bool = True) -> Markup:
    """One line a row: its value with the 95 % interval, coloured where that excludes 0.

    A row has label, value, low, high (None: no interval); optional dots (group -> values, one colour a
    group), band
    (half the width of what would not be seen), mark (name -> value) and beside (name -> another row's
    numbers).
    """
    # The height grows with the rows.
    figure, axes = _new((7.8, 0.38 * len(rows) + 1.0), xlabel, "")
    axes.grid(visible=False)
    for y, row in enumerate(reversed(rows)):
        # One dot a run, spread a little so that equal runs are seen.
        for colour, values in zip(COLOURS * len(row.get("dots", ())), row.get("dots", ())):
            offsets = np.linspace(-0.2, 0.2, len(values)) if len(values) > 1 else [0.0]
            axes.scatter(
                values, [y + d for d in offsets], s=13, color=colour, alpha=0.75, linewidths=0, zorder=2
            )
        if row.get("band"):
            axes.barh(
                y, 2 * row["band"], left=-row["band"], height=0.62, color=GRID, label="below 80 % power"
            )
        _span(axes, y, row, _tone(row) if zero else INK)
        for name, other in row.get("beside", {}).items():
            _span(axes, y - 0.24, other, COLOURS[4], name)
        for name, value in row.get("mark", {}).items():
            axes.plot(value, y, "|", color=COLOURS[0], markersize=15, label=name)

    if zero:
        axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [_label(row["label"]) for row in reversed(rows)], fontsize=8, color=INK)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    return _svg(figure, axes, description, True)


def _span(axes: Axes, y: float, row: Mapping[str, Any], colour: str, label: str = "") -> None:
    if is_finite(row["low"]) and is_finite(row["high"]):
        axes.plot([row["low"], row["high"]], [y, y], color=colour, linewidth=2.2, solid_capstyle="round")
    axes.plot(row["value"], y, "D", markersize=5, color=colour, label=label)


def _tone(row: Mapping[str, Any]) -> str:
    clear = is_finite(row["low"]) and (row["low"] > 0 or row["high"] < 0)
    return (GOOD if row["value"] > 0 else BAD) if clear else MUTED


def histogram(
    counts: Sequence[float],
    *,
    edges: Sequence[float],
    description: str,
    xlabel: str,
    band: Sequence[float],
    marks: Sequence[float],
) -> Markup:
    """Counts between `edges`, with a shaded band and vertical marks."""
    figure, axes = _new((3.5, 2.1), xlabel, "")
    axes.bar(edges[:-1], counts, width=np.diff(edges), align="edge", color=COLOURS[0], alpha=0.55)
    axes.axvspan(*band, color=GRID, zorder=0)
    for mark in marks:
        axes.axvline(mark, color=INK if mark else BAD, linewidth=1.0)
    axes.set_yticks([])
    return _svg(figure, axes, description, False)


def thin(xs: Sequence[float], ys: Sequence[float], limit: int = MAX_POINTS) -> Series:
    """At most `limit` points: means over equal runs of neighbours, so noise shrinks and no spike is
    invented."""
    # Runs of equal length: the mean of the means is the mean.
    size = max(1, math.ceil(len(xs) / limit))
    starts = np.arange(0, len(xs), size)
    counts = np.diff([*starts, len(xs)])
    return (np.add.reduceat(xs, starts) / counts).tolist(), (np.add.reduceat(ys, starts) / counts).tolist()


def smooth(ys: Sequence[float], factor: float = 0.9) -> list[float]:
    """Bias-corrected moving average: the first value is the first observation, not a decayed zero."""
    out, average, weight = [], 0.0, 0.0
    for y in ys:
        average, weight = factor * average + (1 - factor) * y, factor * weight + (1 - factor)
        out.append(average / weight)
    return out


def _label(text: object) -> str:
    """A name as matplotlib may draw it: no mathematics between dollars, nothing that SVG or UTF-8 cannot
    hold."""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text)[:LABEL_CHARS])
    return shown.replace("$", r"\$")


def _figure(size: tuple[float, float]) -> Figure:
    # matplotlib takes half a second to import: not before something is drawn.
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def _new(size: tuple[float, float], xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = _figure(size)
    axes = figure.add_subplot()
    _style(axes, xlabel, ylabel)
    axes.spines["bottom"].set_visible(True)
    return figure, axes


def _style(axes: Axes, xlabel: str, ylabel: str) -> None:
    """The looks that all drawings share."""
    for spine in axes.spines.values():
        spine.set_visible(False)
        spine.set_color(GRID)
    axes.tick_params(which="both", colors=MUTED, labelsize=8, length=0)
    axes.set_xlabel(_label(xlabel), color=MUTED, fontsize=8)
    axes.set_ylabel(_label(ylabel), color=MUTED, fontsize=8)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _svg(figure: Figure, axes: Axes, description: str, legend: bool) -> Markup:
    """The figure as inline SVG; `description` is what a screen reader says of it."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles))  # each name once
    if legend and named:
        looks: Any = {"frameon": False, "fontsize": 8, "labelcolor": INK}
        axes.legend(named.values(), named, loc="center left", bbox_to_anchor=(1.0, 0.5), **looks)

    # Text stays text, and no date or random name enters: equal data give equal bytes.
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "earlyfusion"}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    drawing = buffer.getvalue().partition("<svg ")[2]
    return Markup('<svg role="img" aria-label="{}" ').format(description) + Markup(drawing)
