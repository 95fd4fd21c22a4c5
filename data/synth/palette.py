"""Shapes and colours of generated pictures, how each shape is drawn, and which combinations are held out."""

from __future__ import annotations

from functools import cache, lru_cache
from math import cos, pi, sin

from PIL import ImageDraw, ImageFont

from earlyfusion.data.loading.order import held_out

Colour = tuple[int, int, int]
Box = tuple[int, int, int, int]
"""(left, top, right, bottom) in pixels; right and bottom are the first column and row outside."""

COLOURS: dict[str, Colour] = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (30, 60, 220),
    "yellow": (240, 220, 40),
    "black": (10, 10, 10),
    "gray": (128, 128, 128),
    "teal": (0, 150, 150),
    "brown": (120, 70, 20),
    "purple": (130, 40, 170),
    "orange": (250, 140, 20),
}
BACKGROUNDS: dict[str, Colour] = {
    "white": (255, 255, 255),
    "light gray": (215, 215, 215),
    "pale blue": (205, 225, 250),
}
SHAPES = ("circle", "square", "triangle", "rectangle", "star", "diamond")
HELDOUT_FRACTION = 0.12
"""Share of combinations kept for evaluation, in every family of generated pictures."""


@cache
def pairs(heldout: bool) -> tuple[tuple[str, str], ...]:
    """(colour, shape) pairs of one side; the two sides share none."""
    everything = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    return tuple(
        pair for pair in everything if held_out(f"pair/{pair[0]}/{pair[1]}", HELDOUT_FRACTION) == heldout
    )


def paint(draw: ImageDraw.ImageDraw, shape: str, box: Box, colour: Colour) -> None:
    """Fill `shape` so that its pixels touch all four sides of `box` and none lies outside."""
    left, top, right, bottom = box[0], box[1], box[2] - 1, box[3] - 1
    if shape == "circle":
        draw.ellipse((left, top, right, bottom), fill=colour)
    elif shape in ("square", "rectangle"):
        draw.rectangle((left, top, right, bottom), fill=colour)
    else:
        points = [(left + x * (right - left), top + y * (bottom - top)) for x, y in _OUTLINES[shape]]
        draw.polygon([(round(x), round(y)) for x, y in points], fill=colour)


def _star() -> list[tuple[float, float]]:
    """Ten corners stretched to the unit square."""
    corners = []
    for i in range(10):
        radius = 1.0 if i % 2 == 0 else 0.42
        corners.append((radius * sin(i * pi / 5), -radius * cos(i * pi / 5)))
    xs, ys = [x for x, _ in corners], [y for _, y in corners]
    return [((x - min(xs)) / (max(xs) - min(xs)), (y - min(ys)) / (max(ys) - min(ys))) for x, y in corners]


_OUTLINES: dict[str, list[tuple[float, float]]] = {
    "triangle": [(0.5, 0.0), (1.0, 1.0), (0.0, 1.0)],
    "diamond": [(0.5, 0.0), (1.0, 0.5), (0.5, 1.0), (0.0, 0.5)],
    "star": _star(),
}


def corners(shape: str, box: Box) -> list[tuple[float, float]]:
    """The outline of `shape` in `box` as a polygon in pixels; a circle as 24 corners."""
    left, top, right, bottom = box
    if shape == "circle":
        unit = [(0.5 + 0.5 * cos(i * pi / 12), 0.5 + 0.5 * sin(i * pi / 12)) for i in range(24)]
    elif shape in ("square", "rectangle"):
        unit = [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0)]
    else:
        unit = _OUTLINES[shape]
    return [(left + x * (right - left), top + y * (bottom - top)) for x, y in unit]


@lru_cache(maxsize=64)
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's built-in font at `size` pixels."""
    return ImageFont.load_default(size)


def native_size(rng, min_side: int, max_side: int) -> tuple[int, int]:  # type: ignore[no-untyped-def]
    """(width, height): a longest side in the range and an aspect ratio from 1:3 to 3:1, as far as min_side
    allows."""
    long_side = rng.randint(min_side, max_side)
    short_side = max(min_side, round(long_side / 3.0 ** rng.random()))
    return (long_side, short_side) if rng.random() < 0.5 else (short_side, long_side)
