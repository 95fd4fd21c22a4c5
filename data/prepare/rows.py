"""Rows: files that hold one sample in each, and a row taken apart into the members of one sample."""

from __future__ import annotations

import csv
import json
import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.formats.group import PICTURES, VIDEOS, ending
from earlyfusion.data.sample import TEXT_BYTES, file_below, json_object, within
from earlyfusion.data.sources.text_files import LINES, TextTable, text_cache
from earlyfusion.kernels.errors import one_line

MOST_BYTES = 1 << 29
"""Largest .csv or .tsv, which is held in memory. Of an array only the places of its objects are."""
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)
"""A JSON string as a whole, or a bracket: enough to know where the objects of an array begin and end."""

Row = Mapping[str, Any]

# ---- files of rows


@dataclass(frozen=True)
class RowFile:
    """The rows of one file by number; what is wrong with one row comes to light when it is read."""

    path: Path
    count: int
    read: Callable[[int], Row]
    """Row of a number from 0; raises BadSample."""
    folder: Path | None = None
    """Where the paths in a row begin; None for the file's own folder."""

    def identity(self) -> str:
        """Changes when the rows do."""
        # Its name, too: the keys of the items are made from it.
        status = self.path.stat()
        return f"{self.path.name} {self.count} {status.st_size} {status.st_mtime_ns}"


def _json_lines(path: Path) -> RowFile:
    """.jsonl, also compressed."""
    # The source of texts knows how to find a line by its number, also in a compressed file.
    table = TextTable(str(path), field="", chunk_bytes=0, cache=text_cache())
    return RowFile(path, len(table), lambda number: json_object(table.raw(number)))


def _json_array(path: Path) -> RowFile:
    """.json with a list of objects, as LLaVA's; none of it is parsed before it is asked for."""
    spans = list(_objects(path))
    if not spans:
        raise DataError(
            f'{path}: a list without an object; expected rows such as {{"image": ..., "caption": ...}}'
        )

    def read(number: int) -> Row:
        start, stop = spans[number]
        within(stop - start, TEXT_BYTES, f"{path.name}:{number + 1}")
        with path.open("rb") as file:
            file.seek(start)
            return json_object(file.read(stop - start))

    return RowFile(path, len(spans), read)


def _objects(path: Path) -> Iterator[tuple[int, int]]:
    """Byte ranges of the objects in a list. Raises DataError when there is no list or its end is missing."""
    if not begins_array(path):
        raise DataError(
            f"{path}: not a list of rows; expected [{{...}}, ...], or .jsonl with one object a line"
        )
    # Brackets inside strings do not count; the pattern takes a string as a whole.
    depth = first = 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for match in _TOKEN.finditer(data):
            token = data[match.start()]
            if token in b"{[":
                if depth == 1:
                    first = match.start()
                depth += 1
            elif token in b"}]":
                depth -= 1
                if depth == 1 and data[first] == ord("{"):
                    yield first, match.end()
                if depth <= 0:
                    break
    if depth:
        raise DataError(f"{path}: not valid JSON: the list is not closed (a file cut short?)")


def _table(path: Path) -> RowFile:
    """.csv or .tsv with a first line of column names."""
    # A row may go over lines, so a table has no offsets; it is held in memory.
    size, mark = path.stat().st_size, ","
    if path.suffix.lower() == ".tsv":
        mark = "\t"
    if size > MOST_BYTES:
        raise DataError(
            f"{path}: {size >> 20} MiB; the limit of a table is {MOST_BYTES >> 20} MiB: split it, or take"
            " .jsonl"
        )
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, delimiter=mark))
    except (csv.Error, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as a table ({error}); expected UTF-8") from None
    if not rows:
        raise DataError(
            f"{path}: no rows; expected a first line of column names (image,caption) and lines below it"
        )
    # Empty cells are fields that a row does not have.
    return RowFile(path, len(rows), lambda n: {key: cell for key, cell in rows[n].items() if key and cell})


def _parquet(path: Path) -> RowFile:
    """A parquet file; one row group of all files is held at a time."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path}: parquet needs pyarrow; pip install 'earlyfusion[shards]'") from None
    try:
        meta = parquet.ParquetFile(path).metadata
    except Exception as error:  # pyarrow: ArrowInvalid, OSError, ...
        raise DataError(f"{path}: not a parquet file ({error})") from None
    # From the footer: no page is read before a row is asked for.
    sizes = [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]

    def read(number: int) -> Row:
        group = 0
        while number >= sizes[group]:
            number -= sizes[group]
            group += 1
        row: Row = _row_group(path, group).slice(number, 1).to_pylist()[0]
        return row

    return RowFile(path, sum(sizes), read)


@lru_cache(maxsize=1)
def _row_group(path: Path, group: int) -> Any:
    from pyarrow import parquet

    return parquet.ParquetFile(path).read_row_group(group)


def arrow_dataset(root: Path, split: str | None) -> RowFile:
    """A Hugging Face dataset on disk, read as Arrow, so that no image feature is decoded."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"{root}: needs Hugging Face datasets; pip install 'earlyfusion[eval]'") from None
    try:
        # Every file that a state.json names must lie inside the folder.
        for state in sorted(root.rglob("state.json")):
            within(state.stat().st_size, TEXT_BYTES, str(state))
            for entry in json_object(state.read_bytes(), str(state))["_data_files"]:
                file_below(state.parent, entry["filename"], str(state))
        loaded: Any = datasets.load_from_disk(str(root))
    except DataError:
        raise
    except Exception as error:  # JSON of the wrong kind, Arrow that is damaged: anything
        raise DataError(
            f"{root}: not a dataset on disk ({type(error).__name__}: {one_line(error, 160)})"
        ) from None

    if isinstance(loaded, datasets.DatasetDict):
        names = sorted(loaded)
        if split is None and len(names) == 1:
            split = names[0]
        if split not in names:
            raise DataError(f"{root} has the splits {', '.join(names)}; name one with --split")
        loaded = loaded[split]
    # Its own format would decode pictures, and encode them anew.
    rows = loaded.with_format("arrow")
    return RowFile(root, len(rows), lambda n: rows[n : n + 1].to_pylist()[0], root)


def begins_array(path: Path) -> bool:
    """Whether a .json file holds an array (of rows) rather than one object."""
    with path.open("rb") as file:
        # Spreadsheets write a byte order mark.
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def names_columns(path: Path, known: set[str]) -> bool:
    """Whether the first line of a .csv or .tsv names a column of `known`."""
    with path.open("rb") as file:
        # A table of measurements beside pictures is no table of samples.
        head = file.readline(1 << 16).decode("utf-8-sig", "replace").strip()
    return bool({name.strip().strip('"') for name in re.split(r"[,\t]", head)} & known)


READERS: dict[str, Callable[[Path], RowFile]] = {
    **dict.fromkeys(LINES, _json_lines),
    ".json": _json_array,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
}


def row_kind(path: Path) -> str:
    """The ending by which a file holds rows (a key of READERS); "" for any other file."""
    return next((end for end in READERS if path.name.lower().endswith(end)), "")


# ---- one row


_NAMES = "image images img picture photo screenshot file_name file path filename image_path image_name"
MEDIA_FIELDS = {*_NAMES.split(), "video", "videos", "video_path", "clip"}
"""Fields whose strings are taken as paths of media when they end like one."""
_TEXT_FIELDS = ("caption", "text")
_WORDS = {*_TEXT_FIELDS, "question", "answer"}
_HEADS = {
    "jpg": rb"\xff\xd8\xff",
    "png": rb"\x89PNG\r\n",
    "gif": rb"GIF8",
    "bmp": rb"BM",
    "webp": rb"RIFF....WEBP",
    "avi": rb"RIFF....AVI ",
    "mp4": rb"....ftyp",
    "tif": rb"II\*\0|MM\0\*",
    "webm": rb"\x1aE\xdf\xa3",
}
"""Extension of media -> what its first bytes look like."""


@dataclass(frozen=True)
class InputOptions:
    """How rows are read; part of what a finished shard is recognised by."""

    image_field: str | None = None
    """One more field whose strings are paths of media."""
    text_field: str | None = None
    """The field that is stored as "text"; so of question and answer."""
    split: str | None = None
    question_field: str | None = None
    answer_field: str | None = None


def _is_media(name: str) -> bool:
    return ending(name) in (*PICTURES, *VIDEOS)


class _Media:
    """The media of one row: `walk` takes them out, in their places stand the names of their members."""

    def __init__(self, load: Callable[[str], bytes], fields: set[str]) -> None:
        self.load, self.fields = load, fields
        self.members: dict[str, bytes] = {}
        self._names: dict[str, str] = {}

    def walk(self, value: Any, key: str) -> Any:
        if isinstance(value, str):
            if key in self.fields and _is_media(value):
                return self._add_path(value)
            return value
        if isinstance(value, bytes | bytearray | memoryview):
            return self._add(bytes(value), "")
        if isinstance(value, Mapping):
            # How Arrow stores an image or a video.
            if "bytes" in value and set(value) <= {"bytes", "path"}:
                path = value.get("path") or ""
                if value["bytes"] is None:
                    return self._add_path(path)
                return self._add(bytes(value["bytes"]), path)
            return {str(name): self.walk(item, str(name)) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.walk(item, key) for item in value]
        return value if isinstance(value, int | float | bool | None) else str(value)

    def _add_path(self, path: str) -> str:
        # One picture asked about twice is stored once.
        if path not in self._names:
            self._names[path] = self._add(self.load(path), path)
        return self._names[path]

    def _add(self, data: bytes, path: str) -> str:
        # The first bytes know better than the name.
        looks = [name for name, head in _HEADS.items() if re.match(head, data[:12], re.DOTALL)]
        if _is_media(path):
            looks.append(ending(path))
        name = f"{len(self.members)}.{[*looks, 'jpg'][0]}"
        self.members[name] = data
        return name


def row_members(row: Row, load: Callable[[str], bytes], options: InputOptions) -> dict[str, bytes]:
    """The members of one sample: extension -> bytes. `load` gives the bytes of a path that the row names.

    Raises BadSample when a path cannot be read or nothing is left.
    """
    # Media go out of the row; in their places stand the names of their members.
    media = _Media(load, MEDIA_FIELDS | {options.image_field or "image"})
    rest = {key: media.walk(value, key) for key, value in row.items()}
    rest = {key: value for key, value in rest.items() if value is not None}
    # Renamed to what the formats know; in front, where they look first.
    for name in ("text", "question", "answer"):
        field = getattr(options, f"{name}_field")
        if field is not None:
            if field not in rest:
                raise BadSample(f"no field {field!r}; there are {sorted(map(str, row))}", "bad_json")
            rest = {name: rest.pop(field), **rest}

    # A row that names a picture in a field nobody reads must not become a text without it.
    for key, value in rest.items() if not media.members else ():
        named = isinstance(value, str) and len(value) < 256 and "\n" not in value and key not in _WORDS
        if named and _is_media(value):
            raise BadSample(
                f"the field {key!r} names {value!r}, which is not read as a picture or video:"
                f" --image-field {key}",
                "missing_member",
            )

    # A single picture needs no number.
    members = dict(media.members)
    if len(members) == 1:
        (old, data), *_ = members.items()
        members = {ending(old): data}
        rest = {key: ending(old) if value == old else value for key, value in rest.items()}

    # A caption alone is a .txt, everything else a .json.
    words = [key for key, value in rest.items() if not isinstance(value, str) or value not in members]
    if len(words) == 1 and words[0] in _TEXT_FIELDS and isinstance(text := rest[words[0]], str):
        if not text.strip():
            raise BadSample("the text is empty", "empty_text")
        return {**members, "txt": text.encode("utf-8", "surrogatepass")}
    if rest:
        entry = json.dumps(rest, ensure_ascii=False, sort_keys=True)
        members["json"] = entry.encode("utf-8", "surrogatepass")
    if not members:
        raise BadSample("an empty row", "empty_text")
    return members
