"""Boxes, points and recognised text beside a picture (see data/formats/build.py for the shapes).

Coordinates may come in pixels of the picture or as shares of its sides; here they all become pixels of the
original picture, and data/formats/grounding.py writes them for the resized one. The size is read from the
picture's header.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from earlyfusion.data.errors import BadSample
from earlyfusion.data.formats.group import PICTURES, TEXTS, Entry, Group
from earlyfusion.data.picture import open_header
from earlyfusion.data.sample import Image, Region, Regions, Segment, Text

_ORIENTATION = 0x0112
_LABELS = ("label", "text", "name", "category", "phrase")
Item = tuple[str, Any, int]
"""Label, coordinates as the file has them, how many there must be: 4 of a box, 2 of a point."""


def picture_size(group: Group, data: bytes) -> tuple[int, int]:
    """(width, height) after EXIF orientation, from the header alone; raises BadSample (corrupt_image)."""
    try:
        with open_header(data) as picture:
            # Four of the eight orientations lie on their side.
            turned = picture.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
            return (picture.height, picture.width) if turned else picture.size
    except BadSample as error:
        raise group.bad(str(error), error.reason) from None
    except Exception as error:  # EXIF of others makes Pillow raise anything
        raise group.bad(f"the picture's header cannot be read ({error})", "corrupt_image") from None


def grounding(group: Group, entry: Entry, options: Any, epoch: int) -> list[Segment]:
    """Picture, caption if there is one, then the regions."""
    data = group.read(group.one((*PICTURES, "gif"), "picture"))
    segments: list[Segment] = [Image(data)]
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
    return [*segments, *_written(group, data, items, entry, options)]


def ocr(group: Group, entry: Entry, options: Any, epoch: int) -> list[Segment]:
    """Picture, then the text in it: a whole string, or lines with the box of each."""
    data = group.read(group.one((*PICTURES, "gif"), "picture"))
    found = entry.get("ocr")
    if found is None:
        found = group.text(group.one(TEXTS, 'text (.txt, or "ocr" in .json)'))
    if isinstance(found, str):
        lines = [group.filled(found, '"ocr"')]
    else:
        items = list(_items(group, found, '"ocr"'))
        lines = [label for label, _, _ in items]
        if not lines:
            raise group.bad('"ocr" is empty', "empty_text")
        if all(values is not None for _, values, _ in items):
            return [Image(data), *_written(group, data, items, entry, options)]
    return [Image(data), Text("\n" + "\n".join(lines), options.text_loss)]


def _items(group: Group, listed: object, what: str) -> Iterator[Item]:
    for item in group.objects(listed, what):
        label = next((item[name] for name in _LABELS if name in item), None)
        box = item.get("box", item.get("bbox"))
        values, count = (item.get("point"), 2) if box is None else (box, 4)
        yield group.filled(label, f"a label in {what}"), values, count


def _written(group: Group, data: bytes, items: Sequence[Item], entry: Entry, options: Any) -> list[Segment]:
    """The regions in pixels. Raises BadSample for what lies outside by more than one pixel (rounding in the
    file) and for a box without area."""
    numbers = [_numbers(group, *item) for item in items]
    given = entry.get("coordinates", options.box_input)
    # Boxes of one picture have one unit: shares only where every number could be one.
    small = all(0 <= min(values) and max(values) <= 1 for values in numbers)
    shares = given == "normalized" or (given == "auto" and small)
    sides = picture_size(group, data) * 2
    regions = []
    for (label, _, count), values in zip(items, numbers):
        if count == 4 and entry.get("box_format", options.box_format) == "xywh":
            values[2:] = [values[0] + values[2], values[1] + values[3]]
        if shares:
            values = [value * side for value, side in zip(values, sides)]
        inside = all(-1 <= value <= side + 1 for value, side in zip(values, sides))
        flat = count == 4 and (values[2] <= values[0] or values[3] <= values[1])
        if flat or not inside:
            shown = [round(value, 1) for value in values]
            size = f"{sides[0]} x {sides[1]}"
            raise group.bad(f"region {label!r} {shown} in a picture of {size}", "box_outside")
        # Rounding of one pixel is forgiven; the coordinates are inside afterwards.
        place: Any = tuple(min(max(value, 0.0), float(side)) for value, side in zip(values, sides))
        regions.append(Region(label, **{"box" if count == 4 else "point": place}))
    return [Text("\n", options.text_loss), Regions(regions, 0, options.boxes, options.text_loss)]


def _numbers(group: Group, label: str, values: Any, count: int) -> list[float]:
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):  # JSON knows integers of any length
        numbers = []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise group.bad(f"region {label!r}: {values!s:.80}, expected {count} finite numbers")
    return numbers
