"""What `earlyfusion prepare` reads: numbered items, each the members of one sample; the layouts stand in its
help (data/prepare/cmd.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.formats.build import chosen_format
from earlyfusion.data.formats.group import CODE, PICTURES, TEXTS, VIDEOS, ending, most_bytes
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.prepare.rows import (
    MEDIA_FIELDS,
    ArrowDataset,
    JsonLines,
    Parquet,
    RowFile,
    RowMembers,
    begins_array,
    names_columns,
    reader_of,
)
from earlyfusion.data.sample import file_below, within
from earlyfusion.data.shards.fetch import TAR_ENDS, as_local
from earlyfusion.data.shards.index import split_name
from earlyfusion.data.shards.read import Shards
from earlyfusion.data.shards.split import Numbered
from earlyfusion.data.sources.text_files import find_files

_MEDIA = {*PICTURES, *VIDEOS}
_KNOWN = {*_MEDIA, *CODE, *TEXTS, "json", "py"}


@dataclass(frozen=True)
class InputOptions:
    """How rows are read; part of what a finished shard is recognised by."""

    image_field: str | None = None
    text_field: str | None = None
    split: str | None = None
    question_field: str | None = None
    answer_field: str | None = None

    def members(self, folder: Path) -> RowMembers:
        """What takes rows of a file in `folder` apart."""
        fields = asdict(self)
        del fields["split"]
        return RowMembers(files_below(folder), **fields)


class Input(ABC):
    """Numbered items; the same in every process."""

    form = "auto"
    """the format that a preparation before this one was told to take"""

    @abstractmethod
    def __len__(self) -> int:
        """Items."""

    @abstractmethod
    def origin(self, number: int) -> str:
        """Where item `number` comes from: file, or file:row with rows counted from 1."""

    @abstractmethod
    def members(self, number: int) -> dict[str, bytes]:
        """Extension -> bytes of item `number`; raises BadSample."""

    @abstractmethod
    def identity(self) -> Iterator[object]:
        """What changes when the items do."""

    def fingerprint(self) -> str:
        """16 hexadecimal digits of `identity`."""
        return f"{digest64(type(self).__name__, len(self), *self.identity()):016x}"


def files_below(root: Path) -> Callable[[str], bytes]:
    """Reads files below `root` only: a row from elsewhere must not be able to name other files of this
    machine."""

    def load(name: str) -> bytes:
        path = file_below(root, name, outside="unreadable")
        try:
            within(path.stat().st_size, most_bytes(path.name), repr(name))
            return path.read_bytes()
        except OSError as error:
            raise BadSample(f"{name!r}: cannot be read ({error.strerror})", "unreadable") from None

    return load


class Rows(Input):
    """The rows of files, one file after the other."""

    def __init__(self, files: Sequence[RowFile], options: InputOptions) -> None:
        self._files, self._numbers = files, Numbered(map(len, files))
        self._members = [options.members(file.folder) for file in files]

    def __len__(self) -> int:
        return len(self._numbers)

    def origin(self, number: int) -> str:
        file, row = self._numbers.locate(number)
        return f"{self._files[file].path.name}:{row + 1}"

    def members(self, number: int) -> dict[str, bytes]:
        file, row = self._numbers.locate(number)
        return self._members[file](self._files[file][row])

    def identity(self) -> Iterator[object]:
        return (file.identity() for file in self._files)


class Folder(Input):
    """Files below a folder, those of one name together, in the order of their names; then the rows of .jsonl
    files, and those of .json lists and of .csv and .tsv files with a column that rows have."""

    def __init__(self, root: Path, options: InputOptions) -> None:
        self.root = root
        groups: dict[str, dict[str, Path]] = {}
        lines: list[Path] = []
        tables: list[Path] = []
        columns = {*MEDIA_FIELDS, "caption", "text", "question", *filter(None, asdict(options).values())}
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if any(part.startswith(".") for part in name.split("/")) or not path.is_file():
                continue
            if reader_of(path) is JsonLines:
                lines.append(path)
            elif path.suffix.lower() in (".csv", ".tsv"):
                tables += [path] if names_columns(path, columns) else []
            elif (parts := split_name(name)) and ending(parts[1]) in _KNOWN:
                end = "txt" if parts[1] == "py" else parts[1]
                groups.setdefault(parts[0], {}).setdefault(end, path)

        for key, ends in list(groups.items()):
            if set(ends) == {"json"} and begins_array(ends["json"]):
                tables.append(groups.pop(key)["json"])
        # Media without a word beside them are then what the rows name.
        if lines or tables:
            groups = {key: ends for key, ends in groups.items() if not set(map(ending, ends)) <= _MEDIA}
        self._groups = list(groups.items())
        self._rows = Rows(_row_files([*lines, *tables]), options)

    def __len__(self) -> int:
        return len(self._groups) + len(self._rows)

    def origin(self, number: int) -> str:
        if number >= len(self._groups):
            return self._rows.origin(number - len(self._groups))
        return self._groups[number][0]

    def members(self, number: int) -> dict[str, bytes]:
        if number >= len(self._groups):
            return self._rows.members(number - len(self._groups))
        load = files_below(self.root)
        paths = self._groups[number][1]
        return {end: load(str(path.relative_to(self.root))) for end, path in paths.items()}

    def identity(self) -> Iterator[object]:
        for key, paths in self._groups:
            for end, path in paths.items():
                status = path.stat()
                yield f"{key}.{end} {status.st_size} {status.st_mtime_ns}"
        yield from self._rows.identity()


class Reshard(Input):
    """Samples of shards, damaged ones left out."""

    def __init__(self, path: str) -> None:
        self._shards = Shards(path)
        self.form = chosen_format(self._shards.manifest)
        self._numbers = Numbered(self._shards.counts)

    def __len__(self) -> int:
        return len(self._numbers)

    def origin(self, number: int) -> str:
        shard, position = self._numbers.locate(number)
        try:
            return f"{self._shards.names[shard]}/{self._shards.key(shard, position)}"
        except BadSample:
            return self._shards.names[shard]

    def members(self, number: int) -> dict[str, bytes]:
        group = self._shards.group(*self._numbers.locate(number))
        return {name: group.read(name) if size else b"" for name, size in group.sizes.items()}

    def identity(self) -> Iterator[object]:
        for shard, (name, count) in enumerate(zip(self._shards.names, self._shards.counts)):
            yield f"{name} {count} {self._shards.index(shard).header['bytes']}"


def _row_files(paths: Sequence[Path]) -> list[RowFile]:
    return [reader(path) for path in paths if (reader := reader_of(path))]


def open_input(path: str, options: InputOptions) -> Input:
    """The input that `path` is; raises DataError when it is nothing that can be prepared."""
    local = as_local(path)
    if local is None or path.endswith(TAR_ENDS):
        return Reshard(path)
    if local.is_dir():
        return _open_folder(local, options)
    if local.is_file() or any(c in path for c in "*?[{"):
        paths = [Path(name) for name in find_files(path)]
        if all(reader_of(each) for each in paths):
            return Rows(_row_files(paths), options)
    raise DataError(
        f"{path}: {'cannot be prepared' if local.exists() else 'does not exist'}; expected a folder, .jsonl"
        " (.gz, .zst), .json, .csv, .tsv, .parquet, a dataset on disk or tar shards (earlyfusion prepare"
        " --help shows their layouts)"
    )


def _open_folder(root: Path, options: InputOptions) -> Input:
    if (root / "dataset_dict.json").is_file() or (root / "state.json").is_file():
        return Rows([ArrowDataset(root, options.split)], options)
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    if any(path.name.endswith(TAR_ENDS) for path in files):
        return Reshard(str(root))

    folder = Folder(root, options)
    if len(folder):
        return folder
    tables = [path for path in files if reader_of(path) is Parquet]
    if tables:
        return Rows(_row_files(tables), options)
    raise DataError(
        f"{root} holds nothing to prepare; expected pictures or videos with .txt or .json beside them,"
        " texts, .jsonl, .json, .csv, .parquet, a dataset on disk or tar shards (earlyfusion prepare"
        " --help shows their layouts)"
    )
