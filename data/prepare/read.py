"""What `earlyfusion prepare` reads: numbered items, each the members of one sample; the layouts stand in its
help (data/prepare/cmd.py).

An item is the files of one name in a folder, a sample of a shard, or a row: of a file that holds one sample
in each, taken apart into the members of one sample.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.formats import CODE, MEDIA, TEXTS, chosen_format, ending, most_bytes
from earlyfusion.data.loading.order import Numbered, digest64
from earlyfusion.data.prepare.layouts import class_names, coco_captions, looks_like_coco
from earlyfusion.data.row_files import (
    READERS,
    Row,
    RowFile,
    arrow_dataset,
    begins_array,
    is_dataset,
    names_columns,
    row_kind,
)
from earlyfusion.data.sample import file_below, within
from earlyfusion.data.shards.fetch import TAR_ENDS, as_local
from earlyfusion.data.shards.read import Shards, split_name
from earlyfusion.data.text_table import find_files

_KNOWN = {*MEDIA, *CODE, *TEXTS, "json", "py"}
_MEDIA_FIELDS = (
    "image images img picture photo screenshot file_name file path filename image_path image_name"
    " video videos video_path clip"
).split()
"""Fields whose strings are taken as paths of media when they end like one."""
_TEXT_FIELDS = ("caption", "text")
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


@dataclass(frozen=True)
class Input:
    """Numbered items; the same in every process."""

    count: int
    origin: Callable[[int], str]
    """Where an item comes from: file, or file:row with rows counted from 1."""
    members: Callable[[int], dict[str, bytes]]
    """Extension -> bytes of an item; raises BadSample."""
    identity: Sequence[object]
    """What changes when the items do."""
    form: str = "auto"
    """The format that a preparation before this one was told to take."""
    layout: str = ""
    """What was found, in words."""
    notes: Sequence[str] = ()
    """What is not read, and why."""

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change when the items do."""
        return f"{digest64(self.count, *self.identity):016x}"


# ---- one row


def _is_media(name: str) -> bool:
    return ending(name) in MEDIA


def _take_media(value: Any, key: str, fields: set[str], store: Callable[[bytes | None, str], str]) -> Any:
    """A value of a row as JSON, with the names of members where media stood: `store(bytes or None, path)`."""
    if isinstance(value, str):
        return store(None, value) if key in fields and _is_media(value) else value
    if isinstance(value, bytes | bytearray | memoryview):
        return store(bytes(value), "")
    if isinstance(value, Mapping):
        # How Arrow stores an image or a video.
        if "bytes" in value and set(value) <= {"bytes", "path"}:
            data = value["bytes"]
            return store(None if data is None else bytes(data), value.get("path") or "")
        return {str(name): _take_media(item, str(name), fields, store) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_take_media(item, key, fields, store) for item in value]
    return value if isinstance(value, int | float | bool | None) else str(value)


def row_members(row: Row, load: Callable[[str], bytes], options: InputOptions) -> dict[str, bytes]:
    """The members of one sample: extension -> bytes. `load` gives the bytes of a path that the row names.

    Raises BadSample when a path cannot be read or nothing is left.
    """
    members: dict[str, bytes] = {}

    # One picture asked about twice is stored once.
    @cache
    def store(data: bytes | None, path: str) -> str:
        data = load(path) if data is None else data
        # The first bytes know better than the name.
        ends = [end for end, head in _HEADS.items() if re.match(head, data[:12], re.DOTALL)]
        if _is_media(path):
            ends.append(ending(path))
        name = f"{len(members)}.{[*ends, 'jpg'][0]}"
        members[name] = data
        return name

    # Media go out of the row; in their places stand the names of their members.
    fields = {*_MEDIA_FIELDS, options.image_field or "image"}
    rest = {key: _take_media(value, key, fields, store) for key, value in row.items() if value is not None}
    # Renamed to what the formats know; in front, where they look first.
    for name in ("text", "question", "answer"):
        field = getattr(options, f"{name}_field")
        if field is not None:
            if field not in rest:
                raise BadSample(f"no field {field!r}; there are {sorted(map(str, row))}", "bad_json")
            rest = {name: rest.pop(field), **rest}

    # A row that names a picture in a field nobody reads must not become a text without it.
    for key, value in rest.items() if not members else ():
        named = isinstance(value, str) and len(value) < 256 and "\n" not in value
        if named and _is_media(value) and key not in (*_TEXT_FIELDS, "question", "answer"):
            raise BadSample(
                f"the field {key!r} names {value!r}, which is not read as a picture or video:"
                f" --image-field {key}",
                "missing_member",
            )

    # A single picture needs no number.
    if len(members) == 1:
        ((old, data),) = members.items()
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


# ---- inputs


def load_below(root: Path, name: str) -> bytes:
    """The bytes of a file below `root` only: a row from elsewhere must not be able to name other files of
    this machine."""
    path = file_below(root, name, outside="unreadable")
    try:
        within(path.stat().st_size, most_bytes(path.name), repr(name))
        return path.read_bytes()
    except OSError as error:
        raise BadSample(f"{name!r}: cannot be read ({error.strerror})", "unreadable") from None


def _rows(files: Sequence[RowFile], options: InputOptions) -> Input:
    """The rows of files, one file after the other."""
    # One numbering over all files: workers take ranges of it.
    numbers = Numbered(file.count for file in files)

    def origin(number: int) -> str:
        file, row = numbers.locate(number)
        return f"{files[file].path.name}:{row + 1}"

    def members(number: int) -> dict[str, bytes]:
        place, row = numbers.locate(number)
        file = files[place]
        return row_members(file.read(row), partial(load_below, file.folder), options)

    identity: list[object] = []
    for file in files:
        # Its name, too: the keys of the items are made from it.
        identity += [file.path.name, file.count, *_stamp(file.path)]
    return Input(len(numbers), origin, members, identity)


def _stamp(path: Path) -> tuple[int, int]:
    """Size and time stand for contents: hashing a data set would take as long as reading it."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _files(
    root: Path, options: InputOptions
) -> tuple[dict[str, dict[str, Path]], list[Path], list[Path], dict[str, list[Path]], list[str]]:
    """What lies below a folder: files of one name by their endings, files of rows a line, tables, media by
    their names; and what is not read."""
    groups: dict[str, dict[str, Path]] = {}
    lines: list[Path] = []
    tables: list[Path] = []
    unread = Counter[str]()
    notes: list[str] = []
    pictures: dict[str, list[Path]] = {}
    columns = {*_MEDIA_FIELDS, "caption", "text", "question", *filter(None, astuple(options))}
    # Sorted: the numbers must be the same in every process and after every kill.
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if any(part.startswith(".") for part in name.split("/")) or not path.is_file():
            continue
        kind = row_kind(path)
        if kind in (".csv", ".tsv"):
            if names_columns(path, columns):
                tables.append(path)
            else:
                known = ", ".join(sorted(columns))
                notes.append(
                    f"{name} is not read: it has no column of {known}; name yours (--text-field ...)"
                )
        elif kind not in ("", ".json", ".parquet"):
            lines.append(path)
        elif (parts := split_name(name)) and ending(parts[1]) in _KNOWN:
            # A program is text to learn; shards know it as such.
            end = "txt" if parts[1] == "py" else parts[1]
            groups.setdefault(parts[0], {}).setdefault(end, path)
            if _is_media(parts[1]):
                pictures.setdefault(path.name, []).append(path)
        else:
            unread[path.suffix.lower() or path.name] += 1
    if unread:
        most = ", ".join(f"{kind} {count:,}" for kind, count in unread.most_common(5))
        notes.append(f"files of unknown kinds are not read: {most}")
    return groups, lines, tables, pictures, notes


def _folder(root: Path, options: InputOptions) -> Input:
    """Files below a folder, those of one name together, in the order of their names; then the rows of .jsonl
    files, and those of .json lists, of .csv and .tsv files with a column that rows have, and of COCO's
    captions. Pictures that have no words at all but lie in several folders are called what these are."""
    groups, lines, tables, pictures, notes = _files(root, options)
    # A .json beside nothing: a list is a table of rows, an object may be COCO's annotations.
    coco: list[RowFile] = []
    for key, ends in list(groups.items()):
        if set(ends) != {"json"}:
            continue
        if begins_array(ends["json"]):
            tables.append(groups.pop(key)["json"])
        elif looks_like_coco(ends["json"]):
            captions, note = coco_captions(groups.pop(key)["json"], root, pictures)
            coco += [captions] if captions.count else []
            notes += [note] if note else []
    # Media without a word beside them are then what the rows name.
    bare = [key for key, ends in groups.items() if all(map(_is_media, ends))]
    words: list[str] | None = None
    if lines or tables or coco:
        groups = {key: ends for key, ends in groups.items() if key not in {*bare}}
    elif len(bare) == len(groups):
        words = class_names(bare)
    keys = list(groups)
    # Rows come after the files, whatever their names.
    rows = _rows([*(READERS[row_kind(path)](path) for path in (*lines, *tables)), *coco], options)

    def origin(number: int) -> str:
        return keys[number] if number < len(keys) else rows.origin(number - len(keys))

    def members(number: int) -> dict[str, bytes]:
        if number >= len(keys):
            return rows.members(number - len(keys))
        found = groups[keys[number]]
        made = {end: load_below(root, str(path.relative_to(root))) for end, path in found.items()}
        return made if words is None else {**made, "txt": words[number].encode()}

    identity = [*rows.identity]
    for key, ends in groups.items():
        for end, path in ends.items():
            identity += [f"{key}.{end}", *_stamp(path)]

    kinds = []
    if keys:
        together = Counter(" + ".join(sorted(ends)) for ends in groups.values())
        shown = ", ".join(f"{count:,} {names}" for names, count in together.most_common(3))
        kinds = [f"files of one name: {shown}"]
    if words is not None:
        kinds = [f"pictures in {len(set(words))} folders, whose names are their words"]
    kinds += [f"rows of {path.name}" for path in (*lines, *tables)][:3]
    kinds += [f"COCO captions of {one.path.name}" for one in coco]
    if bare and rows.count:
        notes.append(f"{len(bare):,} pictures or videos without words are read where a row names them")
    return Input(len(keys) + rows.count, origin, members, identity, layout="; ".join(kinds), notes=notes)


def _shards(path: str) -> Input:
    """Samples of shards, damaged ones left out."""
    # Each worker reads a piece of every shard, so none should copy the whole.
    shards = Shards(path, ranges=True)
    # A missing end counts as one item, so that it is named among what is left out.
    numbers = Numbered(shards.counts)

    def origin(number: int) -> str:
        shard, position = numbers.locate(number)
        try:
            return f"{shards.names[shard]}/{shards.key(shard, position)}"
        except BadSample:
            return shards.names[shard]

    def members(number: int) -> dict[str, bytes]:
        group = shards.group(*numbers.locate(number))
        # An empty member is kept: the check says which one is empty.
        return {name: group.read(name) if size else b"" for name, size in group.sizes.items()}

    identity = []
    for name, count, header in zip(shards.names, shards.counts, shards.headers):
        identity.append(f"{name} {count} {header['bytes']}")
    form = chosen_format(shards.manifest)
    return Input(
        len(numbers), origin, members, identity, form, f"{len(shards.names)} tar shards (webdataset)"
    )


def open_input(path: str, options: InputOptions) -> Input:
    """The input that `path` is; raises DataError when it is nothing that can be prepared."""
    # A URL or a command can be nothing but shards.
    local = as_local(path)
    if local is None or path.endswith(TAR_ENDS):
        return _shards(path)
    # A folder: of a dataset, of shards, of files and rows, or of parquet alone.
    tables: list[Path] = []
    if local.is_dir():
        if is_dataset(local):
            found = _rows([arrow_dataset(local, options.split)], options)
            return replace(found, layout="a Hugging Face dataset on disk")
        files = [file for file in sorted(local.rglob("*")) if file.is_file() and file.name[0] != "."]
        # Shards go first: their .json is an index, not a row.
        if any(file.name.endswith(TAR_ENDS) for file in files):
            return _shards(str(local))
        folder = _folder(local, options)
        if folder.count:
            return folder
        tables = [file for file in files if row_kind(file) == ".parquet"]
    elif local.is_file() or any(c in path for c in "*?[{"):
        tables = [Path(name) for name in find_files(path)]

    if tables and all(map(row_kind, tables)):
        found = _rows([READERS[row_kind(table)](table) for table in tables], options)
        return replace(found, layout=f"rows of {', '.join(table.name for table in tables[:3])}")
    raise DataError(
        f"{path}: {'holds nothing to prepare' if local.exists() else 'does not exist'}; expected a folder of"
        " pictures or videos with .txt or .json beside them, folders of classes, COCO captions, texts, .jsonl"
        " (.gz, .zst), .json, .csv, .tsv, .parquet, a dataset on disk (datasets' save_to_disk) or tar shards"
        " (earlyfusion prepare --help shows their layouts)"
    )
