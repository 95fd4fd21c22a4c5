"""From the files of one sample (a picture, a text, a JSON ...) to segments. Nothing is decoded here.

The format is told by the members, or named by the option `format`:

    caption       picture + .txt, or + .json {"caption" | "text": str or list of str (one an epoch)}
    qa            picture + .json {"question", "answer"} or {"questions": [{"question", "answer"}, ...]}
    conversation  .json {"conversations": [{"from", "value"}]} (LLaVA) or {"messages": [{"role", "content"}]},
                  any media
    interleaved   .json {"texts", "images"} (OBELICS) or {"text_list", "image_info"} (MMC4), any number of
                  pictures
    grounding     picture + .json with "boxes", "points", "regions" or "objects"
    ocr           picture + .json {"ocr": str, or list of {"text", "box"}}, or + .txt
    video         .mp4 .webm .avi .mkv .mov .gif + .txt or .json
    code          picture + .html, .svg or another source text, without a caption beside them
    text          .txt, .md or .json {"text": str} alone

Boxes, points and recognised text beside a picture, as files have them and as the model is given them:

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

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from earlyfusion.data.chat.template import turns_of
from earlyfusion.data.errors import BadSample
from earlyfusion.data.picture import open_header
from earlyfusion.data.sample import (
    MEDIA_BYTES,
    TEXT_BYTES,
    Image,
    Region,
    Regions,
    Segment,
    Text,
    VideoFile,
    answer_text,
    json_object,
    question_text,
    utf8,
    within,
)
from earlyfusion.kernels.files import Record

PICTURES = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff")
VIDEOS = ("mp4", "webm", "avi", "mkv", "mov", "m4v", "gif")
CODE = ("html", "htm", "svg", "jsx", "tsx", "vue", "css", "js", "tex", "xml")
TEXTS = ("txt", "text", "md", "caption")
MEDIA = (*PICTURES, *VIDEOS)


def ending(member: str) -> str:
    """The last extension of a member: "jpg" of "0.jpg"."""
    return member.rpartition(".")[2].lower()


def most_bytes(member: str) -> int:
    """Most bytes of a member that are read."""
    return MEDIA_BYTES if ending(member) in MEDIA else TEXT_BYTES


def _natural(member: str) -> tuple[bool, int, str]:
    """Numbered members in the order of their numbers, before the others."""
    stem = member.rpartition(".")[0]
    number = int(stem) if stem.isdecimal() and len(stem) < 19 else -1
    return number < 0, number, member


@dataclass(frozen=True, slots=True)
class Group:
    """The members of one sample: extension -> size in bytes, and how to read one. `where` names shard and
    key."""

    key: str
    where: str
    sizes: Mapping[str, int]
    fetch: Callable[[str], bytes]

    def all(self, endings: Iterable[str]) -> list[str]:
        """All members of one of `endings`, numbered ones in the order of their numbers."""
        return sorted((name for name in self.sizes if ending(name) in endings), key=_natural)

    def first(self, endings: Iterable[str]) -> str | None:
        """The first of these."""
        return next(iter(self.all(endings)), None)

    def one(self, endings: Iterable[str], what: str) -> str:
        """The first of these; raises BadSample (missing_member) when there is none."""
        member = self.first(endings)
        if member is None:
            raise self.bad(f"no {what} beside {', '.join(self.sizes)}", "missing_member")
        return member

    def bad(self, message: str, reason: str = "bad_json") -> BadSample:
        """A BadSample that names this shard and key."""
        return BadSample(f"{self.where}: {message}", reason)

    def read(self, member: str) -> bytes:
        """Bytes of a member of this sample; raises BadSample when it has none."""
        # Before reading: an archive may claim any size.
        within(self.sizes[member], most_bytes(member), f"{self.where} .{member}")
        data = self.fetch(member) if self.sizes[member] else b""
        if not data:
            raise self.bad(f".{member} has 0 bytes", "empty_file")
        return data

    def text(self, member: str) -> str:
        """A member as UTF-8 text without the spaces around it; raises BadSample (encoding, empty_text)."""
        text = utf8(self.read(member), f"{self.where}: .{member}")
        # UTF-16 without its mark decodes as UTF-8 with a null between letters.
        if "\0" in text:
            raise self.bad(f".{member} holds null characters: not UTF-8 text (UTF-16?)", "encoding")
        return self.filled(text, f".{member}")

    def filled(self, text: object, what: str) -> str:
        """`text` without the spaces around it, if it is a string with words in it; raises BadSample
        otherwise."""
        if not isinstance(text, str):
            raise self.bad(f"{what} is {type(text).__name__}, expected a string")
        if not text.strip():
            raise self.bad(f"{what} is empty", "empty_text")
        return text.strip()

    def objects(self, value: object, what: str) -> list[Record]:
        """`value` if it is a list of JSON objects; raises BadSample otherwise."""
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.bad(f"{what}: expected a list of objects, got {value!s:.80}")
        return value

    def json(self) -> Record:
        """The JSON member as an object, {} where there is none; raises BadSample (bad_json, encoding)."""
        return json_object(self.text("json"), f"{self.where}: .json") if "json" in self.sizes else {}

    def media(self, member: str, options: Any) -> Image | VideoFile:
        """A member as picture or video, still encoded."""
        end = ending(member)
        # A gif alone is a clip; beside another picture it is a picture.
        if end in VIDEOS and not (end == "gif" and self.first(PICTURES)):
            limits = options.max_frames, options.fps, options.video_backend
            return VideoFile(self.read(member), f".{end}", *limits)
        return Image(self.read(member))

    def picture(self) -> Image:
        """The picture, still encoded; raises BadSample when there is none."""
        return Image(self.read(self.one((*PICTURES, "gif"), "picture")))

    def named(self, reference: object) -> str:
        """The member that a JSON refers to: by extension ("0.jpg"), file name or path; raises BadSample."""
        base = str(reference).replace("\\", "/").rpartition("/")[2]
        # Tools often prefix members with the sample's own name.
        own = self.key.rpartition("/")[2]
        tries = [str(reference).lower(), base.lower(), base.removeprefix(f"{own}.").lower()]
        if len(self.all(MEDIA)) == 1:  # no doubt which one is meant, whatever it was called once
            tries.append(ending(base))
        for name in tries:
            if name in self.sizes:
                return name
        raise self.bad(
            f"refers to {reference!r}; there are {', '.join(sorted(self.sizes))}", "missing_member"
        )


_MARKS = {"user": ("\nQ: ", "\nA:"), "assistant": (" ", ""), "system": ("\n", "")}
"""What stands before and behind the words of a role."""


def questions(group: Group, entry: Record, options: Any, epoch: int) -> list[Segment]:
    """The media, then every question with its answer; a list of answers gives one each epoch. Every epoch
    another question comes last, for only behind the last answer does a model learn to end."""
    segments: list[Segment] = [group.media(member, options) for member in group.all(MEDIA)]
    turns = group.objects(entry.get("questions", [entry]), '"questions"')
    if not turns:
        raise group.bad('"questions" is empty')
    first = epoch % len(turns)
    turns = turns[first:] + turns[:first]
    for turn in turns:
        answer = turn.get("answer", turn.get("answers"))
        if isinstance(answer, list) and answer:
            answer = answer[epoch % len(answer)]
        if isinstance(answer, dict):  # VQAv2 writes {"answer": ..., "answer_id": ...}
            answer = answer.get("answer")
        # Counts are often written as numbers.
        answer = str(answer) if isinstance(answer, int | float) else answer
        asked = group.filled(turn.get("question"), '"question"')
        segments.append(Text(question_text(asked), options.question_loss))
        segments.append(Text(answer_text(group.filled(answer, '"answer"')), options.text_loss))
    return segments


def conversation(group: Group, entry: Record, options: Any, epoch: int) -> list[Segment]:
    """Turns in order, answers with `text_loss`, the rest with `question_loss`; media stand where the turns
    place them."""
    turns = [(role, _stripped(parts)) for role, parts, _ in turns_of(entry, group.where)]
    roles = [role for role, _ in turns]
    if not _MARKS.keys() >= set(roles):
        raise group.bad(f"turns of {sorted(set(roles))}; known: {sorted(_MARKS)}")
    if "assistant" not in roles:
        raise group.bad("no turn of the assistant: nothing to learn", "empty_text")
    if [] in [parts for _, parts in turns]:
        raise group.bad("an empty turn", "empty_text")

    # Every medium has one place; where nobody said which, they stand before the first word.
    members = _members(group, entry)
    media = [value for kind, value in chain.from_iterable(parts for _, parts in turns) if kind != "text"]
    places, named = media.count(None), any(media)
    if not media:
        first = roles.index("user") if "user" in roles else 0
        turns[first][1][:0] = [("image", None)] * len(members)
    elif places > len(members) or (places < len(members) and not named):
        reason = "missing_member" if places > len(members) else "bad_json"
        raise group.bad(f"{places} places for media, and {len(members)} media members", reason)

    order = iter(members)
    segments: list[Segment] = []
    for role, parts in turns:
        placed: list[str | Segment] = []
        for kind, value in parts:
            if kind != "text":
                value = group.media(group.named(value) if value else next(order), options)
            placed.append(value)
        segments += _turn(role, placed, options)
    return segments


def _stripped(parts: list[Any]) -> list[Any]:
    """Without line ends around a place, which belong to the mark-up, and blanks around a turn; the blanks of
    a sentence stay."""
    kept = []
    for number, (kind, value) in enumerate(parts, 1):
        if kind == "text":
            value = value.strip("\n" if number < len(parts) else None)
        if kind != "text" or value.strip():
            kept.append((kind, value))
    return kept


def _members(group: Group, entry: Record) -> list[str]:
    """The media in the order the JSON names them, else in the order of their numbers."""
    for key in ("image", "images", "video", "videos"):
        if entry.get(key) is not None:
            listed = entry[key] if isinstance(entry[key], list) else [entry[key]]
            return [group.named(reference) for reference in listed]
    return group.all(MEDIA)


def _turn(role: str, parts: list[Any], options: Any) -> Iterator[Segment]:
    """Media at the edge of a question stand before its "Q:", as in every other source of questions."""
    while parts and not isinstance(parts[0], str):
        yield parts.pop(0)
    if role == "user" and (not parts or not isinstance(parts[-1], str)):
        parts.append("")
    loss = options.text_loss if role == "assistant" else options.question_loss
    opening, closing = _MARKS[role]
    for number, part in enumerate(parts):
        if isinstance(part, str):
            before = opening if number == 0 else ""
            behind = closing if number == len(parts) - 1 else ""
            part = Text((before + part if part else before.rstrip()) + behind, loss)
        yield part


def interleaved(group: Group, entry: Record, options: Any, epoch: int) -> list[Segment]:
    """A web page: texts and pictures in order; it ends before the picture over `max_images`."""
    segments: list[Segment] = []
    images = 0
    for kind, value in _mmc4(group, entry) if "text_list" in entry else _obelics(group, entry):
        if kind == "text":
            segments.append(
                Text(("\n" if segments else "") + group.filled(value, "a text"), options.text_loss)
            )
            continue
        # Cut before the picture that is too many: what follows may speak about it.
        images += 1
        if images > (options.max_images or images):
            break
        segments.append(group.media(group.named(value), options))
    if not any(isinstance(segment, Text) for segment in segments):
        raise group.bad("no text in the document", "empty_text")
    return segments


def _obelics(group: Group, entry: Record) -> Iterator[tuple[str, Any]]:
    texts, images = entry.get("texts"), entry.get("images")
    if not isinstance(texts, list) or not isinstance(images, list) or len(texts) != len(images):
        raise group.bad('"texts" and "images" must be lists of one length (null where the other has one)')
    for text, image in zip(texts, images):
        if image is not None:
            yield "image", image
        if text is not None and str(text).strip():
            yield "text", text


def _mmc4(group: Group, entry: Record) -> Iterator[tuple[str, Any]]:
    texts, infos = entry["text_list"], group.objects(entry.get("image_info", []), '"image_info"')
    if not isinstance(texts, list):
        raise group.bad('"text_list" must be a list')
    # MMC4 says beside which text a picture belongs; it stands before it.
    before: dict[int, list[object]] = {}
    for info in infos:
        place = info.get("matched_text_index", 0)
        if not isinstance(place, int) or not 0 <= place <= len(texts):
            raise group.bad(f"matched_text_index {place!r} among {len(texts)} texts")
        before.setdefault(place, []).append(info.get("image_name"))
    for number, text in enumerate([*texts, ""]):
        for name in before.get(number, []):
            yield "image", name
        if str(text).strip():
            yield "text", text


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


def grounding(group: Group, entry: Record, options: Any, epoch: int) -> list[Segment]:
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


def ocr(group: Group, entry: Record, options: Any, epoch: int) -> list[Segment]:
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


def _placed(
    group: Group, picture: Image, items: Sequence[Item], entry: Record, options: Any
) -> list[Segment]:
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
        # Rounding of one pixel is forgiven; more is another unit, or another picture.
        try:
            cut = fitted(label, values, count, size, 1.0)
        except BadSample as error:
            raise group.bad(str(error), error.reason) from None
        place: Any = {"box" if count == 4 else "point": tuple(cut)}
        regions.append(Region(label, **place))
    return [Text("\n", options.text_loss), Regions(regions, 0, options.boxes, options.text_loss)]


def fitted(label: str, values: Any, count: int, size: Size, reach: float) -> list[float]:
    """`count` numbers in pixels of a picture of `size` (w, h), cut at its edges as a photograph is.

    Raises BadSample (box_outside) where more than `reach` pixels are cut off, for a box without area, and for
    coordinates that are not finite numbers.
    """
    wrong = f"region {label!r} {values!s:.80} in a picture of {size[0]} x {size[1]}: "
    numbers = finite(values, count)
    if numbers is None:
        raise BadSample(f"{wrong}expected {count} finite numbers", "box_outside")
    cut = [min(max(value, 0.0), float(side)) for value, side in zip(numbers, size * 2)]
    if any(abs(value - kept) > reach for value, kept in zip(numbers, cut)):
        raise BadSample(f"{wrong}it lies outside", "box_outside")
    if any(high <= low for low, high in zip(cut, cut[2:])):
        raise BadSample(f"{wrong}no area inside; expected (left, top, right, bottom)", "box_outside")
    return cut


def finite(values: Any, count: int) -> list[float] | None:
    """`count` finite numbers, or None for anything else."""
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):  # JSON knows integers of any length
        return None
    return numbers if len(numbers) == count and all(map(math.isfinite, numbers)) else None


def write_regions(regions: Regions, original: Size, resized: Size) -> str:
    """The text of `regions` in a picture of `original` (w, h) pixels that the model sees at `resized` (w,
    h)."""
    lines = []
    for region in regions.regions:
        # A box that reaches over the edge keeps the part inside; a point has no part.
        name, count, reach = ("box", 4, math.inf) if region.box else ("point", 2, 0.0)
        numbers = fitted(region.label, region.box or region.point, count, original, reach)
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


def detect(group: Group, entry: Record) -> str:
    """The format of a group, by its members and the keys of its JSON."""
    # Media that stand in a conversation come before what merely lies beside them.
    keys, picture = set(entry), group.first(PICTURES)
    if keys & {"conversations", "messages"}:
        return "conversation"
    if {"texts", "images"} <= keys or "text_list" in keys:
        return "interleaved"
    if keys & {"boxes", "bboxes", "points", "regions", "objects"} and picture:
        return "grounding"
    if "ocr" in keys and picture:
        return "ocr"
    if keys & {"questions", "question"}:
        return "qa"
    if picture and group.first(CODE) and not (group.first(TEXTS) or keys & {"caption", "text"}):
        return "code"
    if group.first(VIDEOS) and not picture:
        return "video"
    return "caption" if picture else "text"


def describe(group: Group, options: Any) -> tuple[str, Record]:
    """(format, parsed JSON or {})."""
    entry = group.json()
    return (detect(group, entry) if options.format == "auto" else options.format), entry


def build(group: Group, options: Any, epoch: int = 0) -> list[Segment]:
    """The segments of one sample; raises BadSample, naming shard, key and reason. `options` are
    ShardsOptions."""
    kind, entry = describe(group, options)
    return BUILDERS[kind](group, entry, options, epoch)


def words(group: Group, entry: Record, options: Any, epoch: int = 0) -> str:
    """The text of a sample: the first of `text_fields` in its JSON (a list gives one each epoch), else its
    .txt."""
    for name in options.text_fields:
        if name in entry:
            value = entry[name]
            if isinstance(value, list) and value:
                # Every epoch another of the captions, in order: none is seen twice before all are.
                value = value[epoch % len(value)]
            return group.filled(value, f'"{name}"')
    return group.text(group.one(TEXTS, f"text (.txt, or .json with one of {list(options.text_fields)})"))


def _text(group: Group, entry: Record, options: Any, epoch: int) -> list[Segment]:
    code = group.first(CODE)
    if code is not None and not entry and not group.first(TEXTS):
        return [Text(group.text(code), options.text_loss)]
    return [Text(words(group, entry, options, epoch), options.text_loss)]


def _caption(group: Group, entry: Record, options: Any, epoch: int) -> list[Segment]:
    return [group.picture(), *_told(words(group, entry, options, epoch), options)]


def _told(caption: str, options: Any) -> list[Segment]:
    """A caption as it stands behind its picture, or as the answer to options.ask."""
    if options.ask:
        asked = Text(question_text(options.ask), options.question_loss)
        return [asked, Text(answer_text(caption), options.text_loss)]
    return [Text("\n" + caption, options.text_loss)]


def _video(group: Group, entry: Record, options: Any, epoch: int) -> list[Segment]:
    clip = group.media(group.one(VIDEOS, f"video ({', '.join(VIDEOS)})"), options)
    return [clip, *_told(words(group, entry, options, epoch), options)]


def _code(group: Group, entry: Record, options: Any, epoch: int) -> list[Segment]:
    code = group.first(CODE)
    text = words(group, entry, options, epoch) if code is None else group.text(code)
    return [group.picture(), Text("\n" + text, options.text_loss)]


BUILDERS: dict[str, Callable[[Group, Record, Any, int], list[Segment]]] = {
    "caption": _caption,
    "qa": questions,
    "conversation": conversation,
    "interleaved": interleaved,
    "grounding": grounding,
    "ocr": ocr,
    "video": _video,
    "code": _code,
    "text": _text,
}
"""Format -> function(group, JSON, options, epoch)."""


def chosen_format(manifest: Record | None) -> str:
    """The format that a preparation was told to take (prepare --format); "auto" where it was told none."""
    chosen = (manifest or {}).get("format")
    # The manifest is a file of others: what it says may be anything.
    return chosen if isinstance(chosen, str) and chosen in BUILDERS else "auto"
