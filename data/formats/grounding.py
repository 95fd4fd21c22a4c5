"""Boxes and points as text, and back: kept right through clipping and resizing.

One region a line, a JSON object; pixels of the picture as the model sees it (resized, without the padding),
and the same divided by its sides with three decimals. Kimi K3 supervises both (its report, section on visual
grounding data):

    {"label": "red cup", "box": [12, 30, 200, 181], "box01": [0.027, 0.089, 0.446, 0.539]}
    {"label": "handle", "point": [190, 77], "point01": [0.424, 0.229]}

form = "absolute" leaves out the keys that end in 01, form = "normalized" leaves out the others. No region at
all is written "[]". Coordinates are edges, not pixel numbers: a box over the whole picture is [0, 0, width,
height].
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from earlyfusion.data.errors import BadSample
from earlyfusion.data.sample import Region, Regions

Size = tuple[int, int]
DECIMALS = 3


def clip(region: Region, size: Size) -> tuple[float, ...]:
    """The box (cut to the picture) or the point of `region` in pixels of the original picture of `size` (w,
    h).

    A box that reaches over the edge keeps the part inside. Raises BadSample (box_outside) for a point or a
    whole box outside, a box without area, and coordinates that are not finite numbers.
    """
    width, height = size
    values = region.box if region.box is not None else region.point
    assert values is not None
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        numbers = ()
    expected = 4 if region.box is not None else 2
    if len(numbers) != expected or not all(math.isfinite(value) for value in numbers):
        raise _outside(region, size, f"expected {expected} finite numbers")
    if region.point is not None:
        x, y = numbers
        if not (0 <= x <= width and 0 <= y <= height):
            raise _outside(region, size, "the point lies outside")
        return numbers
    left, top, right, bottom = numbers
    if right <= left or bottom <= top:
        raise _outside(region, size, "the box has no area; expected (left, top, right, bottom)")
    left, top, right, bottom = (
        max(left, 0.0),
        max(top, 0.0),
        min(right, float(width)),
        min(bottom, float(height)),
    )
    if right <= left or bottom <= top:
        raise _outside(region, size, "the box lies outside")
    return left, top, right, bottom


def _outside(region: Region, size: Size, what: str) -> BadSample:
    given = region.box if region.box is not None else region.point
    return BadSample(
        f"region {region.label!r} {given} in a picture of {size[0]} x {size[1]}: {what}", "box_outside"
    )


def write_regions(regions: Regions, original: Size, resized: Size) -> str:
    """The text of `regions` in a picture of `original` (w, h) pixels that the model sees at `resized` (w,
    h)."""
    lines = [_line(region, regions.form, original, resized) for region in regions.regions]
    return "\n".join(lines) if lines else "[]"


def _line(
    region: Region, form: Literal["absolute", "normalized", "both"], original: Size, resized: Size
) -> str:
    numbers = clip(region, original)
    name = "box" if region.box is not None else "point"
    parts = [f'"label": {json.dumps(region.label, ensure_ascii=False)}']
    if form != "normalized":
        parts.append(f'"{name}": [{", ".join(str(value) for value in _pixels(numbers, original, resized))}]')
    if form != "absolute":
        shares = [value / original[axis % 2] for axis, value in enumerate(numbers)]
        parts.append(f'"{name}01": [{", ".join(f"{value:.{DECIMALS}f}" for value in shares)}]')
    return "{" + ", ".join(parts) + "}"


def _pixels(numbers: Sequence[float], original: Size, resized: Size) -> list[int]:
    scaled = [value * resized[axis % 2] / original[axis % 2] for axis, value in enumerate(numbers)]
    whole = [min(math.floor(value + 0.5), resized[axis % 2]) for axis, value in enumerate(scaled)]
    if len(whole) == 4:
        for low, high in ((0, 2), (1, 3)):
            if whole[high] <= whole[low]:  # thinner than half a pixel: the pixel it lies in
                whole[low] = min(math.floor(scaled[low]), resized[low] - 1)
                whole[high] = whole[low] + 1
    return whole


@dataclass(frozen=True, slots=True)
class FoundRegion:
    """A region read from text; at least one of the four is there."""

    label: str
    box: tuple[float, ...] | None = None
    """Pixels of the resized picture."""
    box01: tuple[float, ...] | None = None
    point: tuple[float, ...] | None = None
    point01: tuple[float, ...] | None = None

    def to_region(self, original: Size, resized: Size) -> Region:
        """In pixels of the original picture; the pixel coordinates count where both are given."""
        pixels, shares = (self.box, self.box01) if self.box or self.box01 else (self.point, self.point01)
        if pixels is not None:
            values = [value * original[axis % 2] / resized[axis % 2] for axis, value in enumerate(pixels)]
        else:
            values = [value * original[axis % 2] for axis, value in enumerate(shares or ())]
        if len(values) == 4:
            return Region(self.label, box=(values[0], values[1], values[2], values[3]))
        return Region(self.label, point=(values[0], values[1]))


# A flat object; braces inside its strings belong to it.
_OBJECT = re.compile(r'\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')


def parse_regions(text: str) -> list[FoundRegion]:
    """Every well-formed region in `text`, in order; whatever else stands there is passed over.

    Inverse of `write_regions`, and lenient enough for what a model writes: objects may stand in a list or in
    prose, keys in any order. An object without label or with coordinates that are no numbers (or no box) is
    not a region.
    """
    found = []
    for match in _OBJECT.finditer(text):
        try:
            entry = json.loads(match.group())
        except ValueError:
            continue
        label = entry.get("label")
        values = {name: _numbers(entry.get(name), name) for name in ("box", "box01", "point", "point01")}
        if isinstance(label, str) and any(value is not None for value in values.values()):
            found.append(FoundRegion(label, **values))
    return found


def _numbers(value: object, name: str) -> tuple[float, ...] | None:
    count = 4 if name.startswith("box") else 2
    if not isinstance(value, list) or len(value) != count:
        return None
    if not all(isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e9 for v in value):
        return None
    if count == 4 and not (value[0] < value[2] and value[1] < value[3]):
        return None
    return tuple(float(v) for v in value)
