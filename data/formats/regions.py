"""Boxes, points and recognised text beside a picture (see data/formats/build.py for the shapes).

Coordinates may come in pixels of the picture or as shares of its sides; here they all become pixels of the
original picture, and data/formats/grounding.py writes them for the resized one. The size is read from the
picture's header.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from earlyfusion.data.errors import BadSample
from earlyfusion.data.formats.group import PICTURES, Group
from earlyfusion.data.picture import open_header
from earlyfusion.data.sample import Image, Region, Regions, Segment, Text

_ORIENTATION = 0x0112
_PICTURES = (*PICTURES, "gif")


def picture_size(group: Group, data: bytes) -> tuple[int, int]:
    """(width, height) after EXIF orientation, from the header alone; raises BadSample (corrupt_image)."""
    try:
        with open_header(data) as picture:
            turned = picture.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
            return (picture.height, picture.width) if turned else picture.size
    except BadSample as error:
        raise group.bad(str(error), error.reason) from None
    except Exception as error:  # EXIF of others makes Pillow raise anything
        raise group.bad(f"the picture's header cannot be read ({error})", "corrupt_image") from None


def grounding(group: Group, entry: dict[str, Any] | None, options: Any, epoch: int) -> list[Segment]:
    """Picture, caption if there is one, then the regions."""
    segments, data = _picture(group)
    for name in options.text_fields:
        if entry and isinstance(entry.get(name), str) and entry[name].strip():
            segments.append(Text("\n" + entry[name].strip(), options.text_loss))
            break
    return segments + _written(group, data, list(_regions(group, entry or {})), entry or {}, options)


def ocr(group: Group, entry: dict[str, Any] | None, options: Any, epoch: int) -> list[Segment]:
    """Picture, then the text in it: a whole string, or lines with the box of each."""
    segments, data = _picture(group)
    found = (entry or {}).get("ocr")
    if found is None:
        member = group.first(("txt", "text", "md"))
        if member is None:
            raise group.bad('no text: expected .txt, or "ocr" in .json', "missing_member")
        found = group.text(member)
    if isinstance(found, str):
        return [*segments, Text("\n" + group.filled(found, '"ocr"').strip(), options.text_loss)]
    lines = list(_items(group, found, '"ocr"'))
    if not lines:
        raise group.bad('"ocr" is empty', "empty_text")
    if any(box is None and point is None for _, box, point in lines):
        return [*segments, Text("\n" + "\n".join(label for label, _, _ in lines), options.text_loss)]
    return segments + _written(group, data, lines, entry or {}, options)


def _picture(group: Group) -> tuple[list[Segment], bytes]:
    member = group.first(_PICTURES)
    if member is None:
        raise group.bad(f"no picture beside {', '.join(group.sizes)}", "missing_member")
    data = group.read(member)
    return [Image(data)], data


Item = tuple[str, Any, Any]
"""Label, box or None, point or None, as the file has them."""


def _items(group: Group, listed: object, what: str) -> Iterator[Item]:
    if not isinstance(listed, list):
        raise group.bad(f"{what} is {type(listed).__name__}, expected a list", "bad_json")
    for item in listed:
        if not isinstance(item, dict):
            raise group.bad(f"{what} holds {type(item).__name__}, expected objects", "bad_json")
        label = next((item[k] for k in ("label", "text", "name", "category", "phrase") if k in item), None)
        box = item.get("box", item.get("bbox"))
        yield group.filled(label, f"a label in {what}").strip(), box, item.get("point")


def _regions(group: Group, entry: Mapping[str, Any]) -> Iterator[Item]:
    for key in ("regions", "objects"):
        if key in entry:
            yield from _items(group, entry[key], f'"{key}"')
    for key, is_box in (("boxes", True), ("bboxes", True), ("points", False)):
        if key not in entry:
            continue
        listed = entry[key]
        labels = entry.get("point_labels" if not is_box and "point_labels" in entry else "labels")
        if not isinstance(listed, list) or not isinstance(labels, list) or len(labels) != len(listed):
            raise group.bad(f'"{key}" and "labels" must be lists of one length', "bad_json")
        for label, values in zip(labels, listed):
            label = group.filled(label, '"labels"').strip()
            yield (label, values, None) if is_box else (label, None, values)


def _written(
    group: Group, data: bytes, items: Sequence[Item], entry: Mapping[str, Any], options: Any
) -> list[Segment]:
    numbers = [_numbers(group, item) for item in items]
    given = str(entry.get("coordinates", options.box_input))
    shares = given == "normalized" or (
        given == "auto" and bool(numbers) and all(0 <= value <= 1 for values in numbers for value in values)
    )
    width, height = picture_size(group, data)
    regions = []
    for (label, box, _), values in zip(items, numbers):
        if box is not None and entry.get("box_format", options.box_format) == "xywh":
            values = [values[0], values[1], values[0] + values[2], values[1] + values[3]]
        if shares:
            values = [value * (height if axis % 2 else width) for axis, value in enumerate(values)]
        regions.append(_region(group, label, values, (width, height)))
    return [Text("\n", options.text_loss), Regions(regions, 0, options.boxes, options.text_loss)]


def _numbers(group: Group, item: Item) -> list[float]:
    label, box, point = item
    values, expected = (box, 4) if box is not None else (point, 2)
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):  # JSON knows integers of any length
        numbers = []
    if len(numbers) != expected or not all(map(math.isfinite, numbers)):
        raise group.bad(f"region {label!r}: {values!s:.80}, expected {expected} finite numbers", "bad_json")
    return numbers


def _region(group: Group, label: str, values: list[float], size: tuple[int, int]) -> Region:
    """Refuses what lies outside by more than one pixel (rounding in the file); a box also without area."""
    width, height = size
    xs, ys = values[0::2], values[1::2]
    inside = -1 <= min(xs) and max(xs) <= width + 1 and -1 <= min(ys) and max(ys) <= height + 1
    if not inside or (len(values) == 4 and (xs[1] <= xs[0] or ys[1] <= ys[0])):
        shown = [round(value, 1) for value in values]
        raise group.bad(f"region {label!r} {shown} in a picture of {width} x {height}", "box_outside")
    xs, ys = [min(max(x, 0.0), float(width)) for x in xs], [min(max(y, 0.0), float(height)) for y in ys]
    if len(values) == 2:
        return Region(label, point=(xs[0], ys[0]))
    return Region(label, box=(xs[0], ys[0], xs[1], ys[1]))
