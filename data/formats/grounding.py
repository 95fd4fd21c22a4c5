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
from typing import Any

from earlyfusion.data.errors import BadSample
from earlyfusion.data.sample import Region, Regions

Size = tuple[int, int]


def clip(region: Region, size: Size) -> list[float]:
    """The box (cut to the picture) or the point of `region` in pixels of the original picture of `size` (w,
    h).

    A box that reaches over the edge keeps the part inside. Raises BadSample (box_outside) for a point or a
    whole box outside, a box without area, and coordinates that are not finite numbers.
    """
    values: Sequence[Any] = region.box or region.point or ()
    wrong = f"region {region.label!r} {tuple(values)} in a picture of {size[0]} x {size[1]}: "
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != (4 if region.box else 2) or not all(map(math.isfinite, numbers)):
        raise BadSample(f"{wrong}expected {4 if region.box else 2} finite numbers", "box_outside")
    # What reaches over the edge is cut there, as a photograph is.
    cut = [min(max(value, 0.0), float(side)) for value, side in zip(numbers, size * 2)]
    if region.point and cut != numbers:
        raise BadSample(f"{wrong}the point lies outside", "box_outside")
    if region.box and (numbers[2] <= numbers[0] or numbers[3] <= numbers[1]):
        raise BadSample(f"{wrong}no area; expected (left, top, right, bottom)", "box_outside")
    if region.box and (cut[2] <= cut[0] or cut[3] <= cut[1]):
        raise BadSample(f"{wrong}the box lies outside", "box_outside")
    return cut


def write_regions(regions: Regions, original: Size, resized: Size) -> str:
    """The text of `regions` in a picture of `original` (w, h) pixels that the model sees at `resized` (w,
    h)."""
    lines = []
    for region in regions.regions:
        numbers, name = clip(region, original), "box" if region.box else "point"
        shares = [value / side for value, side in zip(numbers, original * 2)]
        # Written by hand: the model learns one spacing and one number of decimals.
        parts = [f'"label": {json.dumps(region.label, ensure_ascii=False)}']
        if regions.form != "normalized":
            # Not from the shares: their division would round otherwise.
            scaled = [value * new / old for value, new, old in zip(numbers, resized * 2, original * 2)]
            parts.append(f'"{name}": {_whole(scaled, resized)}')
        if regions.form != "absolute":
            parts.append(f'"{name}01": [{", ".join(f"{share:.3f}" for share in shares)}]')
        lines.append("{" + ", ".join(parts) + "}")
    return "\n".join(lines) if lines else "[]"


def _whole(scaled: Sequence[float], size: Size) -> list[int]:
    """Whole pixels of the resized picture."""
    whole = [min(math.floor(value + 0.5), side) for value, side in zip(scaled, size * 2)]
    for axis in range(len(whole) - 2):
        if whole[axis + 2] <= whole[axis]:  # thinner than half a pixel: the pixel it lies in
            whole[axis] = min(math.floor(scaled[axis]), size[axis] - 1)
            whole[axis + 2] = whole[axis] + 1
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
        name = "box" if self.box or self.box01 else "point"
        # Pixels are the finer of the two where the picture is large.
        pixels, shares = getattr(self, name), getattr(self, f"{name}01")
        unit = (1, 1) if pixels is None else resized
        values = [value * side / one for value, side, one in zip(pixels or shares, original * 2, unit * 2)]
        return Region(self.label, **{name: tuple(values)})  # type: ignore[arg-type]


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
        places = {name: _numbers(entry.get(name), name) for name in ("box", "box01", "point", "point01")}
        if isinstance(entry.get("label"), str) and any(places.values()):
            found.append(FoundRegion(entry["label"], **places))
    return found


def _numbers(value: object, name: str) -> tuple[float, ...] | None:
    if not isinstance(value, list) or len(value) != (4 if name.startswith("box") else 2):
        return None
    # JSON's true is a number to Python.
    if not all(type(v) in (int, float) and abs(v) < 1e9 for v in value):
        return None
    if len(value) == 4 and not (value[0] < value[2] and value[1] < value[3]):
        return None
    return tuple(map(float, value))
