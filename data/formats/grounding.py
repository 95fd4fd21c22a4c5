"""Boxes and points as text: kept right through clipping and resizing.

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

from earlyfusion.data.errors import BadSample
from earlyfusion.data.sample import Region, Regions

Size = tuple[int, int]


def clip(region: Region, size: Size) -> list[float]:
    """The box (cut to the picture) or the point of `region` in pixels of the original picture of `size` (w,
    h).

    A box that reaches over the edge keeps the part inside. Raises BadSample (box_outside) for a point or a
    whole box outside, a box without area, and coordinates that are not finite numbers.
    """
    given = region.box or region.point or ()
    wrong = f"region {region.label!r} {tuple(given)} in a picture of {size[0]} x {size[1]}: "
    count = 4 if region.box else 2
    try:
        numbers = list(map(float, given))
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise BadSample(f"{wrong}expected {count} finite numbers", "box_outside")
    # What reaches over the edge is cut there, as a photograph is.
    cut = [min(max(value, 0.0), float(side)) for value, side in zip(numbers, size * 2)]
    if region.point and cut != numbers:
        raise BadSample(f"{wrong}the point lies outside", "box_outside")
    if region.box and (cut[2] <= cut[0] or cut[3] <= cut[1]):
        raise BadSample(f"{wrong}no area inside; expected (left, top, right, bottom)", "box_outside")
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


def _whole(scaled: list[float], size: Size) -> list[int]:
    """Whole pixels of the resized picture."""
    whole = [min(math.floor(value + 0.5), side) for value, side in zip(scaled, size * 2)]
    for axis in range(len(whole) - 2):
        if whole[axis + 2] <= whole[axis]:  # thinner than half a pixel: the pixel it lies in
            whole[axis] = min(math.floor(scaled[axis]), size[axis] - 1)
            whole[axis + 2] = whole[axis] + 1
    return whole
