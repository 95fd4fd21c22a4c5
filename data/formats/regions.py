"""Boxes, points and recognised text beside a picture: as files have them (see data/formats/build.py for the
shapes), and as the model is given them.

Coordinates may come in pixels of the picture or as shares of its sides; here they all become pixels of the
original picture, and `write_regions` writes them for the resized one. The size is read from the picture's
header. One region a line, a JSON object; pixels of the picture as the model sees it (resized, without the
padding), and the same divided by its sides with three decimals. Kimi K3 supervises both (its report, section
on visual grounding data):

    {"label": "red cup", "box": [12, 30, 200, 181], "box01": [0.027, 0.089, 0.446, 0.539]}
    {"label": "handle", "point": [190, 77], "point01": [0.424, 0.229]}

form = "absolute" leaves out the keys that end in 01, form = "normalized" leaves out the others. No region at
all is written "[]". Coordinates are edges, not pixel numbers: a box over the whole picture is [0, 0, width,
height].
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from earlyfusion.data.errors import BadSample
from earlyfusion.data.formats.group import TEXTS, Entry, Group
from earlyfusion.data.picture import open_header
from earlyfusion.data.sample import Image, Region, Regions, Segment, Text

_ORIENTATION = 0x0112
_LABELS = ("label", "text", "name", "category", "phrase")
Size = tuple[int, int]
Item = tuple[str, Any, int]
"""Label, coordinates as the file has them, how many there must be: 4 of a box, 2 of a point."""


def picture_size(group: Group, picture: Image) -> tuple[int, int]:
    """(width, height) after EXIF orientation, from the header alone; raises BadSample (corrupt_image)."""
    try:
        with open_header(picture.image) as header:
            # Four of the eight orientations lie on their side.
            turned = header.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
            return (header.height, header.width) if turned else header.size
    except BadSample as error:
        raise group.bad(str(error), error.reason) from None
    except Exception as error:  # EXIF of others makes Pillow raise anything
        raise group.bad(f"the picture's header cannot be read ({error})", "corrupt_image") from None


def grounding(group: Group, entry: Entry, options: Any, epoch: int) -> list[Segment]:
    """Picture, caption if there is one, then the regions."""
    picture = group.picture()
    segments: list[Segment] = [picture]
    # A caption beside the boxes is told before them.
    captions = [entry.get(name) for name in options.text_fields]
    caption = next((text for text in captions if isinstance(text, str) and text.strip()), None)
    if caption is not None:
        segments.append(Text("\n" + caption.strip(), options.text_loss))

    items: list[Item] = []
    for key in ("regions", "objects"):
        items += _items(group, entry.get(key, []), f'"{key}"')
    for key, count in (("boxes", 4), ("bboxes", 4), ("points", 2)):
        if key in entry:
            own = "point_labels" if key == "points" and "point_labels" in entry else "labels"
            listed, labels = entry[key], entry.get(own)
            if not isinstance(listed, list) or not isinstance(labels, list) or len(labels) != len(listed):
                raise group.bad(f'"{key}" and "{own}" must be lists of one length')
            items += [(group.filled(label, own), values, count) for label, values in zip(labels, listed)]
    return [*segments, *_placed(group, picture, items, entry, options)]


def ocr(group: Group, entry: Entry, options: Any, epoch: int) -> list[Segment]:
    """Picture, then the text in it: a whole string, or lines with the box of each."""
    picture, found = group.picture(), entry.get("ocr")
    if found is None:
        found = group.text(group.one(TEXTS, 'text (.txt, or "ocr" in .json)'))
    if isinstance(found, str):
        return [picture, Text("\n" + group.filled(found, '"ocr"'), options.text_loss)]
    items = list(_items(group, found, '"ocr"'))
    if not items:
        raise group.bad('"ocr" is empty', "empty_text")
    if all(values is not None for _, values, _ in items):
        return [picture, *_placed(group, picture, items, entry, options)]
    return [picture, Text("\n".join(["", *(label for label, _, _ in items)]), options.text_loss)]


def _items(group: Group, listed: object, what: str) -> Iterator[Item]:
    for item in group.objects(listed, what):
        label = next((item[name] for name in _LABELS if name in item), None)
        box = item.get("box", item.get("bbox"))
        values, count = (item.get("point"), 2) if box is None else (box, 4)
        yield group.filled(label, f"a label in {what}"), values, count


def _placed(group: Group, picture: Image, items: Sequence[Item], entry: Entry, options: Any) -> list[Segment]:
    """The regions in pixels. Raises BadSample for what lies outside by more than one pixel (rounding in the
    file) and for a box without area."""
    numbers = []
    for label, values, count in items:
        found = finite(values, count)
        if found is None:
            raise group.bad(f"region {label!r}: {values!s:.80}, expected {count} finite numbers")
        numbers.append(found)
    given = entry.get("coordinates", options.box_input)
    # Boxes of one picture have one unit: shares only where every number could be one.
    small = all(0 <= value <= 1 for values in numbers for value in values)
    shares = given == "normalized" or (given == "auto" and small)
    size = picture_size(group, picture)
    regions = []
    for (label, _, count), values in zip(items, numbers):
        if count == 4 and entry.get("box_format", options.box_format) == "xywh":
            values[2:] = [values[0] + values[2], values[1] + values[3]]
        if shares:
            values = [value * side for value, side in zip(values, size * 2)]
        cut = inside(values, size)
        # Rounding of one pixel is forgiven; more is another unit, or another picture.
        far = any(abs(value - kept) > 1 for value, kept in zip(values, cut))
        if far or flat(cut):
            raise group.bad(f"region {label!r} {values!s:.80} in a picture of {size}", "box_outside")
        place: Any = {"box" if count == 4 else "point": tuple(cut)}
        regions.append(Region(label, **place))
    return [Text("\n", options.text_loss), Regions(regions, 0, options.boxes, options.text_loss)]


def inside(values: Sequence[float], size: Size) -> list[float]:
    """Coordinates cut at the edges of a picture, as a photograph is."""
    return [min(max(value, 0.0), float(side)) for value, side in zip(values, size * 2)]


def flat(values: Sequence[float]) -> bool:
    """Whether a box has no area; a point is not flat."""
    return any(high <= low for low, high in zip(values, values[2:]))


def finite(values: Any, count: int) -> list[float] | None:
    """`count` finite numbers, or None for anything else."""
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):  # JSON knows integers of any length
        return None
    return numbers if len(numbers) == count and all(map(math.isfinite, numbers)) else None


def clip(region: Region, size: Size) -> list[float]:
    """The box (cut to the picture) or the point of `region` in pixels of the original picture of `size` (w,
    h).

    A box that reaches over the edge keeps the part inside. Raises BadSample (box_outside) for a point or a
    whole box outside, a box without area, and coordinates that are not finite numbers.
    """
    given = region.box or region.point or ()
    wrong = f"region {region.label!r} {tuple(given)} in a picture of {size[0]} x {size[1]}: "
    count = 4 if region.box else 2
    numbers = finite(given, count)
    if numbers is None:
        raise BadSample(f"{wrong}expected {count} finite numbers", "box_outside")
    cut = inside(numbers, size)
    if region.point and cut != numbers:
        raise BadSample(f"{wrong}the point lies outside", "box_outside")
    if flat(cut):
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
