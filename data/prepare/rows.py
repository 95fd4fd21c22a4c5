"""A row (of a jsonl, parquet or Arrow file) as the members of one sample: media out of the row, the rest as
JSON or text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from earlyfusion.data.errors import BadSample
from earlyfusion.data.formats.build import PICTURES, VIDEOS, ending

MEDIA_FIELDS = {
    "image",
    "images",
    "img",
    "picture",
    "photo",
    "screenshot",
    "file_name",
    "file",
    "path",
    "filename",
}
MEDIA_FIELDS |= {"image_path", "image_name", "video", "videos", "video_path", "clip"}
"""Fields whose strings are taken as paths of media when they end like one."""
_TEXT_FIELDS = ("caption", "text")
_WORDS = {*_TEXT_FIELDS, "question", "answer"}


def sniff(data: bytes) -> str | None:
    """The extension of media bytes by their first bytes; None for anything else."""
    for head, name in ((b"\xff\xd8\xff", "jpg"), (b"\x89PNG\r\n", "png"), (b"GIF8", "gif"), (b"BM", "bmp")):
        if data.startswith(head):
            return name
    if data[:4] == b"RIFF":
        return {b"WEBP": "webp", b"AVI ": "avi"}.get(data[8:12])
    if data[4:8] == b"ftyp":
        return "mp4"
    if data[:4] in (b"II*\0", b"MM\0*"):
        return "tif"
    return "webm" if data[:4] == b"\x1aE\xdf\xa3" else None


class RowMembers:
    """Takes one row apart.

    Args:
        load: bytes of a path that the row names; raises BadSample.
        image_field: one more field whose strings are paths of media.
        text_field, question_field, answer_field: the fields that hold these; they are stored as "text",
        "question", "answer".
    """

    def __init__(
        self,
        load: Callable[[str], bytes],
        *,
        image_field: str | None = None,
        text_field: str | None = None,
        question_field: str | None = None,
        answer_field: str | None = None,
    ) -> None:
        self._load = load
        given = {"text": text_field, "question": question_field, "answer": answer_field}
        self._renamed = {name: field for name, field in given.items() if field is not None}
        self._fields = MEDIA_FIELDS | ({image_field} if image_field else set())
        self._media: dict[str, bytes] = {}
        self._names: dict[str, str] = {}

    def __call__(self, row: Mapping[str, Any]) -> dict[str, bytes]:
        """Extension -> bytes; raises BadSample when a path cannot be read or nothing is left."""
        self._media, self._names = {}, {}
        rest = {key: self._walk(value, key) for key, value in row.items()}
        rest = {key: value for key, value in rest.items() if value is not None}
        for name, field in self._renamed.items():
            if field not in rest:
                raise BadSample(f"no field {field!r}; there are {sorted(map(str, row))}", "bad_json")
            rest = {name: rest.pop(field), **rest}
        if not self._media:
            self._refuse_unread_media(rest)
        members = dict(self._media)
        if len(members) == 1:
            (old, data), *_ = members.items()
            members = {ending(old): data}
            rest = {key: ending(old) if value == old else value for key, value in rest.items()}
        words = {
            key: value for key, value in rest.items() if not (isinstance(value, str) and value in members)
        }
        if (
            len(words) == 1
            and next(iter(words)) in _TEXT_FIELDS
            and isinstance(next(iter(words.values())), str)
        ):
            (text,) = words.values()
            if not text.strip():
                raise BadSample("the text is empty", "empty_text")
            return {**members, "txt": text.encode("utf-8", "surrogatepass")}
        if rest:
            members["json"] = json.dumps(rest, ensure_ascii=False, sort_keys=True).encode(
                "utf-8", "surrogatepass"
            )
        if not members:
            raise BadSample("an empty row", "empty_text")
        return members

    @staticmethod
    def _refuse_unread_media(rest: Mapping[str, Any]) -> None:
        """A row that names a picture in a field nobody reads must not become a text without it."""
        for key, value in rest.items():
            named = isinstance(value, str) and len(value) < 256 and "\n" not in value and key not in _WORDS
            if named and ending(value) in (*PICTURES, *VIDEOS):
                raise BadSample(
                    f"the field {key!r} names {value!r}, which is not read as a picture or video:"
                    f" --image-field {key}",
                    "missing_member",
                )

    def _walk(self, value: Any, key: str) -> Any:
        if isinstance(value, str):
            named = key in self._fields and ending(value) in (*PICTURES, *VIDEOS)
            return self._add_path(value) if named else value
        if isinstance(value, bytes | bytearray | memoryview):
            return self._add(bytes(value), "")
        if isinstance(value, Mapping):
            if "bytes" in value and set(value) <= {"bytes", "path"}:  # how Arrow stores an image or a video
                path = value.get("path") or ""
                return (
                    self._add(bytes(value["bytes"]), path)
                    if value["bytes"] is not None
                    else self._add_path(path)
                )
            return {str(name): self._walk(item, str(name)) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._walk(item, key) for item in value]
        return value if isinstance(value, int | float | bool | None) else str(value)

    def _add_path(self, path: str) -> str:
        if path not in self._names:
            self._names[path] = self._add(self._load(path), path)
        return self._names[path]

    def _add(self, data: bytes, path: str) -> str:
        by_name = ending(path) if ending(path) in (*PICTURES, *VIDEOS) else None
        name = f"{len(self._media)}.{sniff(data) or by_name or 'jpg'}"
        self._media[name] = data
        return name
