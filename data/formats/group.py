"""A group: the members of one sample, as shards and preparations hand them to the formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from earlyfusion.data.errors import BadSample
from earlyfusion.data.sample import MEDIA_BYTES, TEXT_BYTES, Image, VideoFile, json_object, utf8, within

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
        text = utf8(self.read(member), f"{self.where}: .{member}").strip()
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
        return json_object(self.text(member), f"{self.where}: .{member}")

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
