"""A group: the members of one sample, as shards and preparations hand them to the formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from earlyfusion.data.errors import BadSample
from earlyfusion.data.sample import MEDIA_BYTES, TEXT_BYTES, Image, VideoFile, json_object, utf8, within

PICTURES = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff")
VIDEOS = ("mp4", "webm", "avi", "mkv", "mov", "m4v", "gif")
CODE = ("html", "htm", "svg", "jsx", "tsx", "vue", "css", "js", "tex", "xml")
TEXTS = ("txt", "text", "md", "caption")
MEDIA = (*PICTURES, *VIDEOS)
Entry: TypeAlias = dict[str, Any]
"""A JSON member; {} where there is none."""


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

    def objects(self, value: object, what: str) -> list[dict[str, Any]]:
        """`value` if it is a list of JSON objects; raises BadSample otherwise."""
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.bad(f"{what}: expected a list of objects, got {value!s:.80}")
        return value

    def json(self) -> Entry:
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
