"""Rows: files that hold one sample in each, and a row taken apart into the members of one sample."""

from __future__ import annotations

import csv
import json
import mmap
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
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

# ---- files of rows


class RowFile(ABC):
    """The rows of one file by number; what is wrong with one row comes to light when it is read."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent
        """`folder`: where the paths in a row begin."""

    @abstractmethod
    def __len__(self) -> int:
        """Rows."""

    @abstractmethod
    def __getitem__(self, number: int) -> Mapping[str, Any]:
        """Row `number`, from 0; raises BadSample."""

    def identity(self) -> str:
        """Changes when the rows do."""
        status = self.path.stat()
        return f"{self.path.name} {len(self)} {status.st_size} {status.st_mtime_ns}"


class JsonLines(RowFile):
    """.jsonl, also compressed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._table = TextTable(str(path), field="", chunk_bytes=0, cache=text_cache())

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return json_object(self._table.raw(number))


class JsonArray(RowFile):
    """.json with a list of objects, as LLaVA's."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._spans = list(self._objects())
        if not self._spans:
            raise DataError(
                f'{path}: a list without an object; expected rows such as {{"image": ..., "caption": ...}}'
            )

    def _objects(self) -> Iterator[tuple[int, int]]:
        """Byte ranges of the objects. Raises DataError when it holds no list or its end is missing."""
        if not begins_array(self.path):
            raise DataError(
                f"{self.path}: not a list of rows; expected [{{...}}, ...], or .jsonl with one object a line"
            )
        depth = first = 0
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for match in _TOKEN.finditer(data):
                token = data[match.start()]
                if token in b"{[":
                    first = match.start() if depth == 1 else first
                    depth += 1
                elif token in b"}]":
                    depth -= 1
                    if depth == 1 and data[first] == ord("{"):
                        yield first, match.end()
                    if depth <= 0:
                        break
        if depth:
            raise DataError(f"{self.path}: not valid JSON: the list is not closed (a file cut short?)")

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, number: int) -> dict[str, Any]:
        start, stop = self._spans[number]
        within(stop - start, TEXT_BYTES, f"{self.path.name}:{number + 1}")
        with self.path.open("rb") as file:
            file.seek(start)
            return json_object(file.read(stop - start))


class Table(RowFile):
    """.csv or .tsv with a first line of column names."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if (size := path.stat().st_size) > MOST_BYTES:
            raise DataError(
                f"{path}: {size / 2**20:.0f} MiB; the limit of a table is {MOST_BYTES >> 20} MiB: split it,"
                " or take .jsonl"
            )
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                mark = "\t" if path.suffix.lower() == ".tsv" else ","
                self._rows = list(csv.DictReader(file, delimiter=mark))
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); convert it") from None
        except (csv.Error, OSError) as error:
            raise DataError(f"{path}: cannot be read as a table ({error})") from None
        if not self._rows:
            raise DataError(
                f"{path}: no rows; expected a first line of column names (image,caption) and lines below it"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {key: value for key, value in self._rows[number].items() if key and value}


class Parquet(RowFile):
    """A parquet file; one row group of all files is held at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            meta = _parquet(path).metadata
        except Exception as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path}: not a parquet file ({error})") from None
        self._rows = [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]

    def __len__(self) -> int:
        return sum(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        group = 0
        while number >= self._rows[group]:
            number -= self._rows[group]
            group += 1
        table = _row_group(self.path, group)
        if isinstance(table, BadSample):
            raise table
        row: dict[str, Any] = table.slice(number, 1).to_pylist()[0]
        return row


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path}: parquet needs pyarrow; pip install 'earlyfusion[shards]'") from None
    return parquet.ParquetFile(path)


@lru_cache(maxsize=1)
def _row_group(path: Path, group: int) -> Any:
    """A row group, or what makes every row of it unreadable."""
    try:
        return _parquet(path).read_row_group(group)
    except Exception as error:  # pyarrow: ArrowInvalid, OSError, ... for pages that are damaged
        return BadSample(f"row group {group} of {path} is damaged ({one_line(error, 120)})")


class ArrowDataset(RowFile):
    """A Hugging Face dataset on disk, read as Arrow, so that no image feature is decoded."""

    def __init__(self, root: Path, split: str | None) -> None:
        super().__init__(root)
        self.folder = root
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
            if split is None and len(names) > 1:
                raise DataError(f"{root} has the splits {', '.join(names)}; name one with --split")
            if (split or names[0]) not in loaded:
                raise DataError(f"{root} has no split {split!r}; there are {', '.join(names)}")
            loaded = loaded[split or names[0]]
        self._rows, self._fingerprint = loaded.with_format("arrow"), str(loaded._fingerprint)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row: dict[str, Any] = self._rows[number : number + 1].to_pylist()[0]
        return row

    def identity(self) -> str:
        return self._fingerprint


def begins_array(path: Path) -> bool:
    """Whether a .json file holds an array (of rows) rather than one object."""
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def names_columns(path: Path, known: set[str]) -> bool:
    """Whether the first line of a .csv or .tsv names a column of `known`."""
    with path.open("rb") as file:
        head = file.readline(1 << 16).decode("utf-8-sig", "replace").strip()
    return bool({name.strip().strip('"') for name in re.split(r"[,\t]", head)} & known)


READERS: dict[str, type[JsonLines | JsonArray | Table | Parquet]] = {
    **dict.fromkeys(LINES, JsonLines),
    ".json": JsonArray,
    ".csv": Table,
    ".tsv": Table,
    ".parquet": Parquet,
}


def reader_of(path: Path) -> type[JsonLines | JsonArray | Table | Parquet] | None:
    """The kind of file of rows that a path names; None for anything else."""
    return next((kind for end, kind in READERS.items() if path.name.lower().endswith(end)), None)


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


def _is_media(name: str) -> bool:
    return ending(name) in (*PICTURES, *VIDEOS)


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
        renamed = {"text": text_field, "question": question_field, "answer": answer_field}
        self._renamed = {name: field for name, field in renamed.items() if field is not None}
        self._fields = MEDIA_FIELDS | ({image_field} if image_field else set())
        self._media: dict[str, bytes] = {}
        self._names: dict[str, str] = {}

    def __call__(self, row: Mapping[str, Any]) -> dict[str, bytes]:
        """Extension -> bytes; raises BadSample when a path cannot be read or nothing is left."""
        # Media go out of the row; in their places stand the names of their members.
        self._media, self._names = {}, {}
        rest = {key: self._walk(value, key) for key, value in row.items()}
        rest = {key: value for key, value in rest.items() if value is not None}
        for name, field in self._renamed.items():
            if field not in rest:
                raise BadSample(f"no field {field!r}; there are {sorted(map(str, row))}", "bad_json")
            rest = {name: rest.pop(field), **rest}
        if not self._media:
            self._refuse_unread_media(rest)

        # A single picture needs no number.
        members = dict(self._media)
        if len(members) == 1:
            (old, data), *_ = members.items()
            members = {ending(old): data}
            rest = {key: ending(old) if value == old else value for key, value in rest.items()}

        # A caption alone is a .txt, everything else a .json.
        words = {
            key: value for key, value in rest.items() if not isinstance(value, str) or value not in members
        }
        key, text = next(iter(words.items()), ("", None))
        if len(words) == 1 and key in _TEXT_FIELDS and isinstance(text, str):
            if not text.strip():
                raise BadSample("the text is empty", "empty_text")
            return {**members, "txt": text.encode("utf-8", "surrogatepass")}
        if rest:
            entry = json.dumps(rest, ensure_ascii=False, sort_keys=True)
            members["json"] = entry.encode("utf-8", "surrogatepass")
        if not members:
            raise BadSample("an empty row", "empty_text")
        return members

    @staticmethod
    def _refuse_unread_media(rest: Mapping[str, Any]) -> None:
        """A row that names a picture in a field nobody reads must not become a text without it."""
        for key, value in rest.items():
            named = isinstance(value, str) and len(value) < 256 and "\n" not in value and key not in _WORDS
            if named and _is_media(value):
                raise BadSample(
                    f"the field {key!r} names {value!r}, which is not read as a picture or video:"
                    f" --image-field {key}",
                    "missing_member",
                )

    def _walk(self, value: Any, key: str) -> Any:
        if isinstance(value, str):
            return self._add_path(value) if key in self._fields and _is_media(value) else value
        if isinstance(value, bytes | bytearray | memoryview):
            return self._add(bytes(value), "")
        if isinstance(value, Mapping):
            if "bytes" in value and set(value) <= {"bytes", "path"}:  # how Arrow stores an image or a video
                path = value.get("path") or ""
                if value["bytes"] is None:
                    return self._add_path(path)
                return self._add(bytes(value["bytes"]), path)
            return {str(name): self._walk(item, str(name)) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._walk(item, key) for item in value]
        return value if isinstance(value, int | float | bool | None) else str(value)

    def _add_path(self, path: str) -> str:
        if path not in self._names:
            self._names[path] = self._add(self._load(path), path)
        return self._names[path]

    def _add(self, data: bytes, path: str) -> str:
        looks = [name for name, head in _HEADS.items() if re.match(head, data[:12], re.DOTALL)]
        end = looks[0] if looks else ending(path) if _is_media(path) else "jpg"
        name = f"{len(self._media)}.{end}"
        self._media[name] = data
        return name
