"""The report's drawings: line charts and heat maps as inline SVG text, made with matplotlib and no display.

Colours come from one colour-blind safe list, in a fixed order, so that a modality or source keeps its colour.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

from earlyfusion.eval.compare.text import chart_label

INK, MUTED, GRID = "#1d2433", "#6b7487", "#e4e8ef"
COLOURS = (
    "#2f6fde",
    "#d9603b",
    "#2a9d6e",
    "#8b5cc7",
    "#c9a227",
    "#3aa6c2",
    "#c2447d",
    "#7a8450",
    "#5b6b8c",
    "#a0522d",
)
SMOOTHED_OVER = 50  # a moving average spans a fiftieth of its curve: the lag does not show
MAX_POINTS = 500  # of one curve: more than the pixels of a chart's width, and the file stays small

Series = tuple[Sequence[float], Sequence[float]]  # steps, values


def thin(xs: Sequence[float], ys: Sequence[float], limit: int = MAX_POINTS) -> Series:
    """At most `limit` points: means over equal runs of neighbours, so noise shrinks and no spike is
    invented."""
    if len(xs) <= limit:
        return list(xs), list(ys)
    size = math.ceil(len(xs) / limit)
    starts = range(0, len(xs), size)
    mean = lambda values: sum(values) / len(values)
    return [mean(xs[s : s + size]) for s in starts], [mean(ys[s : s + size]) for s in starts]


def smooth(ys: Sequence[float], factor: float = 0.9) -> list[float]:
    """Bias-corrected exponential moving average (the first value is the first observation, not a decayed
    zero)."""
    out, average, weight = [], 0.0, 0.0
    for y in ys:
        average, weight = factor * average + (1 - factor) * y, factor * weight + (1 - factor)
        out.append(average / weight)
    return out


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches. matplotlib takes half a second to import: not before something is
    drawn."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def to_svg(figure: Figure, description: str) -> str:
    """The figure as inline SVG; `description` is what a screen reader says of it."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "earlyfusion"}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(description)}" ', 1)


def new_axes(figure: Figure, *, xlabel: str, ylabel: str) -> Axes:
    """Axes in the style of every chart of a report."""
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)
    axes.set_xlabel(xlabel, color=MUTED, fontsize=8)
    axes.set_ylabel(ylabel, color=MUTED, fontsize=8)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def line_chart(
    series: Mapping[str, Series],
    *,
    description: str,
    ylabel: str,
    levels: Mapping[str, float] | None = None,
    marks: Sequence[float] = (),
    smoothing: bool = False,
    log: bool = False,
    points: bool = False,
    size: tuple[float, float] = (6.4, 2.9),
) -> str:
    """Curves over optimizer steps. `levels` are named horizontal reference lines, `marks` vertical ones
    (events).

    With `smoothing` a long raw curve is drawn pale and its moving average, over a fiftieth of it, on top.
    Non-finite values are left out.
    """
    figure = new_figure(*size)
    axes = new_axes(figure, xlabel="step", ylabel=ylabel)
    for index, (label, (xs, ys)) in enumerate(series.items()):
        kept = [(x, y) for x, y in zip(xs, ys) if y is not None and math.isfinite(y) and (not log or y > 0)]
        if not kept:
            continue
        colour = COLOURS[index % len(COLOURS)]
        raw_x, raw_y = [x for x, _ in kept], [y for _, y in kept]
        marker = "o" if points or len(kept) == 1 else None
        if smoothing and len(kept) > 2 * SMOOTHED_OVER:
            axes.plot(*thin(raw_x, raw_y), color=colour, alpha=0.22, linewidth=0.8)
            raw_y = smooth(raw_y, 1 - SMOOTHED_OVER / len(kept))
        axes.plot(
            *thin(raw_x, raw_y),
            color=colour,
            linewidth=1.8,
            label=chart_label(label),
            marker=marker,
            markersize=3.5,
        )
    for index, (label, level) in enumerate((levels or {}).items()):
        dashes = ((4, 3), (1, 2), (6, 2, 1, 2))[index % 3]
        axes.axhline(
            level, color=MUTED, linewidth=1.1, dashes=dashes, label=f"{chart_label(label)} {level:.3g}"
        )
    for mark in marks:
        axes.axvline(mark, color="#c0392b", linewidth=0.8, alpha=0.7)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
        low, high = axes.get_ylim()
        if (
            high < 10 * low
        ):  # less than a decade: the powers of ten alone would leave the axis without numbers
            axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
        axes.tick_params(which="both", axis="y", colors=MUTED, labelsize=8, length=0)
    if len(series) + len(levels or {}) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return to_svg(figure, description)


def heat_map(
    matrices: Mapping[str, Sequence[Sequence[float | None]]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    description: str,
    ylabel: str,
    xlabel: str,
    colours: str = "Blues",
    low: float | None = 0.0,
    high: float | None = None,
    annotate: bool = True,
    cell: tuple[float, float] = (0.46, 0.26),
) -> str:
    """One heat map per entry, side by side, sharing rows, columns and colour scale. None = no such cell (left
    blank)."""
    flat = [
        v for matrix in matrices.values() for row in matrix for v in row if v is not None and math.isfinite(v)
    ]
    low = min(flat, default=0.0) if low is None else low
    high = max(flat, default=1.0) if high is None else high
    rows, columns = [chart_label(name) for name in rows], [chart_label(name) for name in columns]
    width = max(2.6, cell[0] * len(columns) + 1.0) * len(matrices) + 0.6
    figure = new_figure(width, max(1.6, cell[1] * len(rows) + 0.9))
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    image = None
    for position, (axes, (title, matrix)) in enumerate(zip(panels, matrices.items())):
        values = [[math.nan if v is None else v for v in row] for row in matrix]
        image = axes.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
        axes.set_title(chart_label(title), fontsize=9, color=INK)
        axes.set_xticks(
            range(len(columns)), columns, fontsize=7, rotation=45 if max(map(len, columns)) > 3 else 0
        )
        axes.set_yticks(range(len(rows)), rows if position == 0 else [""] * len(rows), fontsize=7)
        axes.set_xlabel(xlabel, fontsize=8, color=MUTED)
        axes.tick_params(colors=MUTED, length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        if annotate:
            _annotate(axes, image, values)
    panels[0].set_ylabel(ylabel, fontsize=8, color=MUTED)
    if image is not None:
        bar = figure.colorbar(image, ax=list(panels), fraction=0.03, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=7, colors=MUTED, length=0)
    return to_svg(figure, description)


def _annotate(axes: Axes, image: AxesImage, values: Sequence[Sequence[float]]) -> None:
    """Write each value into its cell, dark on pale cells and white on dark ones (by the cell's luminance)."""
    for r, row in enumerate(values):
        for c, value in enumerate(row):
            if math.isfinite(value):
                red, green, blue, _ = image.to_rgba(np.asarray(value))
                ink = INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"
                text = f"{value:.2f}".lstrip("0") if value < 1 else f"{value:.1f}"
                axes.text(c, r, text, ha="center", va="center", fontsize=6, color=ink)
