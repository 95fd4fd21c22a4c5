"""What `earlyfusion prepare` reads: numbered items, each the members of one sample; the layouts stand in its
help (data/prepare/cmd.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.formats.build import chosen_format
from earlyfusion.data.formats.group import CODE, PICTURES, TEXTS, VIDEOS, ending, most_bytes
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.prepare.rows import (
    MEDIA_FIELDS,
    READERS,
    InputOptions,
    RowFile,
    arrow_dataset,
    begins_array,
    names_columns,
    row_kind,
    row_members,
)
from earlyfusion.data.sample import file_below, within
from earlyfusion.data.shards.fetch import TAR_ENDS, as_local
from earlyfusion.data.shards.read import Shards, split_name
from earlyfusion.data.shards.split import Numbered
from earlyfusion.data.sources.text_files import find_files

_MEDIA = {*PICTURES, *VIDEOS}
_KNOWN = {*_MEDIA, *CODE, *TEXTS, "json", "py"}
_HELP = "(earlyfusion prepare --help shows their layouts)"


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

    def __len__(self) -> int:
        return self.count

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change when the items do."""
        return f"{digest64(self.count, *self.identity):016x}"


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
        file, row = numbers.locate(number)
        # Paths in a row are relative to its file, and may not leave that folder.
        folder = files[file].folder or files[file].path.parent
        return row_members(files[file].read(row), partial(load_below, folder), options)

    return Input(len(numbers), origin, members, [file.identity() for file in files])


def _folder(root: Path, options: InputOptions) -> Input:
    """Files below a folder, those of one name together, in the order of their names; then the rows of .jsonl
    files, and those of .json lists and of .csv and .tsv files with a column that rows have."""
    groups: dict[str, dict[str, Path]] = {}
    lines: list[Path] = []
    tables: list[Path] = []
    columns = {*MEDIA_FIELDS, "caption", "text", "question", *filter(None, asdict(options).values())}
    # Sorted: the numbers must be the same in every process and after every kill.
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if any(part.startswith(".") for part in name.split("/")) or not path.is_file():
            continue
        kind = row_kind(path)
        if kind in (".csv", ".tsv"):
            tables += [path] if names_columns(path, columns) else []
        elif kind not in ("", ".json", ".parquet"):
            lines.append(path)
        elif (parts := split_name(name)) and ending(parts[1]) in _KNOWN:
            # A program is text to learn; shards know it as such.
            end = "txt" if parts[1] == "py" else parts[1]
            groups.setdefault(parts[0], {}).setdefault(end, path)

    # A list in a .json beside nothing is a table of rows.
    for key, ends in list(groups.items()):
        if set(ends) == {"json"} and begins_array(ends["json"]):
            tables.append(groups.pop(key)["json"])
    # Media without a word beside them are then what the rows name.
    if lines or tables:
        groups = {key: ends for key, ends in groups.items() if not set(map(ending, ends)) <= _MEDIA}
    keys = list(groups)
    # Rows come after the files, whatever their names.
    rows = _rows(_row_files([*lines, *tables]), options)

    def origin(number: int) -> str:
        return keys[number] if number < len(keys) else rows.origin(number - len(keys))

    def members(number: int) -> dict[str, bytes]:
        if number >= len(keys):
            return rows.members(number - len(keys))
        found = groups[keys[number]]
        return {end: load_below(root, str(path.relative_to(root))) for end, path in found.items()}

    # Sizes and times stand for contents: hashing a data set would take as long as reading it.
    identity = list(rows.identity)
    for key, ends in groups.items():
        for end, path in ends.items():
            status = path.stat()
            identity.append(f"{key}.{end} {status.st_size} {status.st_mtime_ns}")
    return Input(len(keys) + len(rows), origin, members, identity)


def _shards(path: str) -> Input:
    """Samples of shards, damaged ones left out."""
    shards = Shards(path)
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
    for shard, (name, count) in enumerate(zip(shards.names, shards.counts)):
        identity.append(f"{name} {count} {shards.index(shard).header['bytes']}")
    return Input(len(numbers), origin, members, identity, chosen_format(shards.manifest))


def _row_files(paths: Sequence[Path]) -> list[RowFile]:
    return [READERS[row_kind(path)](path) for path in paths]


def open_input(path: str, options: InputOptions) -> Input:
    """The input that `path` is; raises DataError when it is nothing that can be prepared."""
    # A URL or a command can be nothing but shards.
    local = as_local(path)
    if local is None or path.endswith(TAR_ENDS):
        return _shards(path)
    if not local.is_dir():
        if local.is_file() or any(c in path for c in "*?[{"):
            paths = [Path(name) for name in find_files(path)]
            if all(map(row_kind, paths)):
                return _rows(_row_files(paths), options)
        raise DataError(
            f"{path}: {'cannot be prepared' if local.exists() else 'does not exist'}; expected a folder,"
            f" .jsonl (.gz, .zst), .json, .csv, .tsv, .parquet, a dataset on disk or tar shards {_HELP}"
        )

    # A folder: of a dataset, of shards, of files and rows, or of parquet alone.
    if (local / "dataset_dict.json").is_file() or (local / "state.json").is_file():
        return _rows([arrow_dataset(local, options.split)], options)
    files = [path for path in sorted(local.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    # Shards go first: their .json is an index, not a row.
    if any(path.name.endswith(TAR_ENDS) for path in files):
        return _shards(str(local))
    folder = _folder(local, options)
    if len(folder):
        return folder
    tables = [path for path in files if row_kind(path) == ".parquet"]
    if tables:
        return _rows(_row_files(tables), options)
    raise DataError(
        f"{local} holds nothing to prepare; expected pictures or videos with .txt or .json beside them,"
        f" texts, .jsonl, .json, .csv, .parquet, a dataset on disk or tar shards {_HELP}"
    )
