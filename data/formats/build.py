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
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from earlyfusion.data.errors import BadSample
from earlyfusion.data.formats import dialogue as formats_dialogue
from earlyfusion.data.formats import regions as formats_regions
from earlyfusion.data.sample import MEDIA_BYTES, TEXT_BYTES, Image, Segment, Text, VideoFile, within

PICTURES = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff")
VIDEOS = ("mp4", "webm", "avi", "mkv", "mov", "m4v", "gif")
CODE = ("html", "htm", "svg", "jsx", "tsx", "vue", "css", "js", "tex", "xml")
TEXTS = ("txt", "text", "md", "caption")


def ending(member: str) -> str:
    """The last extension of a member: "jpg" of "0.jpg"."""
    return member.rpartition(".")[2].lower()


def most_bytes(member: str) -> int:
    """Most bytes of a member that are read."""
    return MEDIA_BYTES if ending(member) in (*PICTURES, *VIDEOS) else TEXT_BYTES


def _natural(member: str) -> tuple[int, int, str]:
    stem = member.rpartition(".")[0]
    return (0, int(stem), member) if stem.isdecimal() and len(stem) < 19 else (1, 0, member)


@dataclass(frozen=True, slots=True)
class Group:
    """The members of one sample: extension -> size in bytes, and how to read one. `where` names shard and
    key."""

    key: str
    where: str
    sizes: Mapping[str, int]
    fetch: Callable[[str], bytes]

    def first(self, endings: tuple[str, ...]) -> str | None:
        """The first member of one of `endings`, numbered ones in the order of their numbers."""
        return next(iter(self.all(endings)), None)

    def all(self, endings: tuple[str, ...]) -> list[str]:
        """All members of one of `endings`."""
        return sorted((name for name in self.sizes if ending(name) in endings), key=_natural)

    def bad(self, message: str, reason: str) -> BadSample:
        """A BadSample that names this shard and key."""
        return BadSample(f"{self.where}: {message}", reason)

    def read(self, member: str) -> bytes:
        """Bytes of a member; raises BadSample when it has none or there is no such member."""
        if member not in self.sizes:
            raise self.bad(
                f"no member .{member}; there are {', '.join(sorted(self.sizes))}", "missing_member"
            )
        within(self.sizes[member], most_bytes(member), f"{self.where} .{member}")
        data = self.fetch(member) if self.sizes[member] else b""
        if not data:
            raise self.bad(f".{member} has 0 bytes", "empty_file")
        return data

    def text(self, member: str) -> str:
        """A member as UTF-8 text without the spaces around it; raises BadSample (encoding, empty_text)."""
        raw = self.read(member)
        try:
            text = raw.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise self.bad(
                f".{member} is not UTF-8 ({error.reason} at byte {error.start})", "encoding"
            ) from None
        if "\0" in text:
            raise self.bad(f".{member} holds null characters: not UTF-8 text (UTF-16?)", "encoding")
        return self.filled(text, f".{member}")

    def filled(self, text: object, what: str) -> str:
        """`text` if it is a string with words in it; raises BadSample otherwise."""
        if not isinstance(text, str):
            raise self.bad(f"{what} is {type(text).__name__}, expected a string", "bad_json")
        if not text.strip():
            raise self.bad(f"{what} is empty", "empty_text")
        return text

    def json(self, member: str = "json") -> dict[str, Any]:
        """A member as a JSON object; raises BadSample (bad_json, encoding)."""
        text = self.text(member)
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.bad(f".{member} is not valid JSON ({error})", "bad_json") from None
        if not isinstance(entry, dict):
            raise self.bad(f".{member} holds {type(entry).__name__}, expected an object", "bad_json")
        return entry

    def media(self, member: str, options: Any) -> Image | VideoFile:
        """A member as picture or video, still encoded."""
        end = ending(member)
        if end in VIDEOS and not (end == "gif" and self.first(PICTURES)):
            return VideoFile(
                self.read(member), f".{end}", options.max_frames, options.fps, options.video_backend
            )
        return Image(self.read(member))

    def named(self, reference: object) -> str:
        """The member that a JSON refers to: by extension ("0.jpg"), file name or path; raises BadSample."""
        if isinstance(reference, str):
            base = reference.replace("\\", "/").rpartition("/")[2]
            own = self.key.rpartition("/")[2]
            tries = (reference.lower(), base.lower(), base.removeprefix(f"{own}.").lower(), ending(base))
            for name in tries[: 4 if len(self.all((*PICTURES, *VIDEOS))) == 1 else 3]:
                if name in self.sizes:
                    return name
        raise self.bad(
            f"refers to {reference!r}; there are {', '.join(sorted(self.sizes))}", "missing_member"
        )


def detect(group: Group, entry: Mapping[str, Any] | None) -> str:
    """The format of a group, by its members and the keys of its JSON."""
    keys = set(entry or ())
    if keys & {"conversations", "messages"}:
        return "conversation"
    if {"texts", "images"} <= keys or "text_list" in keys:
        return "interleaved"
    picture = group.first(PICTURES)
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


def describe(group: Group, options: Any) -> tuple[str, dict[str, Any] | None]:
    """(format, parsed JSON or None)."""
    entry = group.json() if "json" in group.sizes else None
    return (detect(group, entry) if options.format == "auto" else options.format), entry


def build(group: Group, options: Any, epoch: int = 0) -> list[Segment]:
    """The segments of one sample; raises BadSample, naming shard, key and reason. `options` are
    ShardsOptions."""
    kind, entry = describe(group, options)
    return BUILDERS[kind](group, entry, options, epoch)


def words(group: Group, entry: Mapping[str, Any] | None, options: Any, epoch: int = 0) -> str:
    """The text of a sample: its .txt, else the first of `text_fields` in its JSON (a list gives one each
    epoch)."""
    for name in options.text_fields:
        if entry is not None and name in entry:
            value = entry[name]
            if isinstance(value, list) and value:
                value = value[epoch % len(value)]
            return group.filled(value, f'"{name}"').strip()
    member = group.first(TEXTS)
    if member is None:
        raise group.bad(
            f"no text: expected .txt or .json with one of {list(options.text_fields)}", "missing_member"
        )
    return group.text(member)


def picture_of(group: Group) -> Image:
    """The first picture; raises BadSample when there is none."""
    member = group.first((*PICTURES, "gif"))
    if member is None:
        raise group.bad(
            f"no picture ({', '.join(PICTURES)}) beside {', '.join(group.sizes)}", "missing_member"
        )
    return Image(group.read(member))


def _caption(group: Group, entry: dict[str, Any] | None, options: Any, epoch: int) -> list[Segment]:
    return [picture_of(group), Text("\n" + words(group, entry, options, epoch), options.text_loss)]


def _text(group: Group, entry: dict[str, Any] | None, options: Any, epoch: int) -> list[Segment]:
    member = group.first(CODE)
    has_text = entry is not None or group.first(TEXTS) is not None
    text = group.text(member) if member and not has_text else words(group, entry, options, epoch)
    return [Text(text, options.text_loss)]


def _video(group: Group, entry: dict[str, Any] | None, options: Any, epoch: int) -> list[Segment]:
    member = group.first(VIDEOS)
    if member is None:
        raise group.bad(f"no video ({', '.join(VIDEOS)}) beside {', '.join(group.sizes)}", "missing_member")
    return [group.media(member, options), Text("\n" + words(group, entry, options, epoch), options.text_loss)]


def _code(group: Group, entry: dict[str, Any] | None, options: Any, epoch: int) -> list[Segment]:
    member = group.first(CODE)
    text = group.text(member) if member else words(group, entry, options, epoch)
    return [picture_of(group), Text("\n" + text, options.text_loss)]


BUILDERS: dict[str, Callable[[Group, dict[str, Any] | None, Any, int], list[Segment]]] = {
    "caption": _caption,
    "qa": formats_dialogue.questions,
    "conversation": formats_dialogue.conversation,
    "interleaved": formats_dialogue.interleaved,
    "grounding": formats_regions.grounding,
    "ocr": formats_regions.ocr,
    "video": _video,
    "code": _code,
    "text": _text,
}
"""Format -> function(group, JSON, options, epoch)."""


def chosen_format(manifest: Mapping[str, Any] | None) -> str:
    """The format that a preparation was told to take (prepare --format); "auto" where it was told none."""
    chosen = (manifest or {}).get("format")
    return chosen if isinstance(chosen, str) and chosen in BUILDERS else "auto"
