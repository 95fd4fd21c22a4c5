"""What `earlyfusion prepare` reads: numbered items, each the members of one sample.

folder     files of one name together (a.jpg + a.txt, clip.mp4 + clip.json,
           page.html + page.png), and the rows of .jsonl, .json lists, .csv
           and .tsv files in it
.jsonl     one object a line, also .gz and .zst; .json: a list of objects;
           .csv, .tsv: a first line of column names. Paths in a row are
           relative to its file
.parquet   one file, a folder or a glob
datasets   a folder written by Hugging Face datasets' save_to_disk (media are
           taken as stored, not decoded)
shards     tar files, to shard, index and deduplicate them anew

What a row may hold (other names by --image-field, --text-field,
--question-field, --answer-field):

{"image": PATH, "caption": TEXT}     a picture and its caption (or "text")
{"image": PATH, "question": TEXT, "answer": TEXT}
                                     or "questions": a list of such pairs
{"image": PATH, "conversations": [{"from", "value"}]}
                                     LLaVA; or "messages": [{"role", "content"}]
{"file_name": PATH, "text": TEXT}    of a Hugging Face image folder
{"video": PATH, "caption": TEXT}
{"text": TEXT}
{"texts": [...], "images": [...]}

Files beside a picture: .txt its caption, .json a row without the path,
.html .svg ... its source. A picture with a source and a caption becomes a
caption, --format code makes it source.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.formats.build import CODE, PICTURES, TEXTS, VIDEOS, chosen_format, most_bytes
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.prepare.rows import MEDIA_FIELDS, RowMembers
from earlyfusion.data.prepare.tables import TABLES, Rows, begins_array, json_row, names_columns
from earlyfusion.data.sample import TEXT_BYTES, file_below, within
from earlyfusion.data.shards.fetch import TAR_ENDS, as_local, cache_root
from earlyfusion.data.shards.index import split_name
from earlyfusion.data.shards.read import Shards
from earlyfusion.data.sources.text_files import LINES, TextTable, find_files
from earlyfusion.kernels.errors import one_line

_KNOWN = {*PICTURES, *VIDEOS, *CODE, *TEXTS, "json", "py"}


@dataclass(frozen=True)
class InputOptions:
    """How rows are read; part of what a finished shard is recognised by."""

    image_field: str | None = None
    text_field: str | None = None
    split: str | None = None
    question_field: str | None = None
    answer_field: str | None = None

    def rows(self, folder: Path) -> RowMembers:
        """What takes rows of a file in `folder` apart."""
        return RowMembers(
            _inside(folder),
            image_field=self.image_field,
            text_field=self.text_field,
            question_field=self.question_field,
            answer_field=self.answer_field,
        )


class Input(ABC):
    """Numbered items; the same in every process."""

    form = "auto"
    """the format that a preparation before this one was told to take"""

    @abstractmethod
    def __len__(self) -> int:
        """Items."""

    @abstractmethod
    def origin(self, number: int) -> str:
        """Where item `number` comes from: file, file:line, or row."""

    @abstractmethod
    def members(self, number: int) -> dict[str, bytes]:
        """Extension -> bytes of item `number`; raises BadSample."""

    @abstractmethod
    def identity(self) -> Iterator[object]:
        """What changes when the items do."""

    def fingerprint(self) -> str:
        """16 hexadecimal digits of `identity`."""
        return f"{digest64(type(self).__name__, len(self), *self.identity()):016x}"


def _inside(root: Path) -> Callable[[str], bytes]:
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


class Lines(Input):
    """Lines of .jsonl files."""

    def __init__(self, paths: Sequence[Path], options: InputOptions) -> None:
        cache = cache_root() / "text"
        self._paths = list(paths)
        self._tables = [TextTable(str(path), field="", chunk_bytes=0, cache=cache) for path in paths]
        self._ends = list(accumulate(map(len, self._tables)))
        self._rows = [options.rows(path.parent) for path in paths]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _locate(self, number: int) -> tuple[int, int]:
        file = bisect_right(self._ends, number)
        return file, number - (self._ends[file - 1] if file else 0)

    def origin(self, number: int) -> str:
        file, line = self._locate(number)
        return f"{self._paths[file].name}:{line + 1}"

    def members(self, number: int) -> dict[str, bytes]:
        file, line = self._locate(number)
        return self._rows[file](json_row(self._tables[file].raw(line)))

    def identity(self) -> Iterator[object]:
        for path, table in zip(self._paths, self._tables):
            yield f"{path.name} {len(table)} {int(table.starts[-1])} {path.stat().st_mtime_ns}"


class TableFiles(Rows, Input):
    """Rows of .json lists, .csv and .tsv files."""

    def __init__(self, paths: Sequence[Path], options: InputOptions) -> None:
        super().__init__(paths, [options.rows(path.parent) for path in paths])


class Folder(Input):
    """Files below a folder, those of one name together, in the order of their names; then the rows of .jsonl
    files, and those of .json lists and of .csv and .tsv files with a column that rows have."""

    def __init__(self, root: Path, options: InputOptions) -> None:
        groups: dict[str, dict[str, Path]] = {}
        lines, tables = [], []
        columns = {*MEDIA_FIELDS, "caption", "text", "question", *filter(None, asdict(options).values())}
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if any(part.startswith(".") for part in name.split("/")) or not path.is_file():
                continue
            if name.lower().endswith(LINES):
                lines.append(path)
            elif path.suffix.lower() in (".csv", ".tsv"):
                tables += [path] if names_columns(path, columns) else []
            elif (parts := split_name(name)) and parts[1].rpartition(".")[2] in _KNOWN:
                end = "txt" if parts[1] == "py" else parts[1]
                groups.setdefault(parts[0], {}).setdefault(end, path)
        for key, ends in list(groups.items()):
            if set(ends) == {"json"} and begins_array(ends["json"]):
                tables.append(groups.pop(key)["json"])
        if lines or tables:  # media without a word beside them are then what the lines name
            media = {*PICTURES, *VIDEOS}
            groups = {
                key: ends for key, ends in groups.items() if {end.rpartition(".")[2] for end in ends} - media
            }
        self.root = root
        self._groups = list(groups.items())
        self._parts: list[Input] = [Lines(lines, options), TableFiles(tables, options)]

    def __len__(self) -> int:
        return len(self._groups) + sum(map(len, self._parts))

    def _row(self, number: int) -> tuple[Input, int]:
        """The input that item `number` behind the groups of files is of, and its number there."""
        number -= len(self._groups)
        lines, tables = self._parts
        return (lines, number) if number < len(lines) else (tables, number - len(lines))

    def origin(self, number: int) -> str:
        if number >= len(self._groups):
            part, row = self._row(number)
            return part.origin(row)
        return self._groups[number][0]

    def members(self, number: int) -> dict[str, bytes]:
        if number >= len(self._groups):
            part, row = self._row(number)
            return part.members(row)
        load = _inside(self.root)
        paths = self._groups[number][1]
        return {end: load(str(path.relative_to(self.root))) for end, path in paths.items()}

    def identity(self) -> Iterator[object]:
        for key, paths in self._groups:
            for end, path in paths.items():
                status = path.stat()
                yield f"{key}.{end} {status.st_size} {status.st_mtime_ns}"
        for part in self._parts:
            yield from part.identity()


class Parquet(Input):
    """Rows of parquet files; one row group is held at a time."""

    def __init__(self, paths: Sequence[Path], options: InputOptions) -> None:
        try:
            from pyarrow import parquet
        except ImportError:
            raise DataError(f"{paths[0]}: parquet needs pyarrow; pip install 'earlyfusion[shards]'") from None
        self._paths, self._open = list(paths), parquet.ParquetFile
        self._where: list[tuple[int, int]] = []
        counts = []
        for file, path in enumerate(paths):
            try:
                meta = parquet.ParquetFile(path).metadata
            except Exception as error:
                raise DataError(f"{path}: not a parquet file ({error})") from None
            for group in range(meta.num_row_groups):
                self._where.append((file, group))
                counts.append(meta.row_group(group).num_rows)
        self._ends = list(accumulate(counts))
        self._rows = [options.rows(path.parent) for path in paths]
        self._held: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _locate(self, number: int) -> tuple[int, int]:
        group = bisect_right(self._ends, number)
        return group, number - (self._ends[group - 1] if group else 0)

    def origin(self, number: int) -> str:
        group, _ = self._locate(number)
        file = self._where[group][0]
        before = next(i for i, (f, _) in enumerate(self._where) if f == file)
        return f"{self._paths[file].name}:{number - (self._ends[before - 1] if before else 0)}"

    def members(self, number: int) -> dict[str, bytes]:
        group, row = self._locate(number)
        file, inside = self._where[group]
        if self._held[0] != group:
            self._held = (group, self._read(file, inside))
        if isinstance(self._held[1], BadSample):
            raise self._held[1]
        return self._rows[file](self._held[1].slice(row, 1).to_pylist()[0])

    def _read(self, file: int, group: int) -> Any:
        """A row group, or what makes every row of it unreadable."""
        try:
            return self._open(self._paths[file]).read_row_group(group)
        except Exception as error:  # pyarrow: ArrowInvalid, OSError, ... for pages that are damaged
            return BadSample(f"row group {group} of {self._paths[file]} is damaged ({one_line(error, 120)})")

    def identity(self) -> Iterator[object]:
        for path in self._paths:
            yield f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}"


class Datasets(Input):
    """A Hugging Face dataset on disk, read as Arrow, so that no image feature is decoded."""

    def __init__(self, root: Path, options: InputOptions) -> None:
        try:
            import datasets
        except ImportError:
            raise DataError(f"{root}: needs Hugging Face datasets; pip install 'earlyfusion[eval]'") from None
        try:
            loaded: Any = _load_from_disk(datasets, root)
        except DataError:
            raise
        except Exception as error:  # JSON of the wrong kind, Arrow that is damaged: anything
            raise DataError(
                f"{root}: not a dataset on disk ({type(error).__name__}: {one_line(error, 160)})"
            ) from None
        if isinstance(loaded, datasets.DatasetDict):
            names = sorted(loaded)
            if options.split is None and len(names) > 1:
                raise DataError(f"{root} has the splits {', '.join(names)}; name one with --split")
            if (options.split or names[0]) not in loaded:
                raise DataError(f"{root} has no split {options.split!r}; there are {', '.join(names)}")
            loaded = loaded[options.split or names[0]]
        self._name = root.name
        self._rows = loaded.with_format("arrow")
        self._identity = str(loaded._fingerprint)
        self._members = options.rows(root)

    def __len__(self) -> int:
        return len(self._rows)

    def origin(self, number: int) -> str:
        return f"{self._name}:{number}"

    def members(self, number: int) -> dict[str, bytes]:
        return self._members(self._rows[number : number + 1].to_pylist()[0])

    def identity(self) -> Iterator[object]:
        yield self._identity


def _load_from_disk(datasets: Any, root: Path) -> Any:
    """load_from_disk, once every file that a state.json names is known to lie inside the folder."""
    for state in sorted(root.rglob("state.json")):
        within(state.stat().st_size, TEXT_BYTES, str(state))
        for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]:
            file_below(state.parent, entry["filename"], str(state))
    return datasets.load_from_disk(str(root))


class Reshard(Input):
    """Samples of shards, damaged ones left out."""

    def __init__(self, path: str) -> None:
        self._shards = Shards(path)
        self.form = chosen_format(self._shards.manifest)
        self._ends = list(accumulate(self._shards.counts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _locate(self, number: int) -> tuple[int, int]:
        shard = bisect_right(self._ends, number)
        return shard, number - (self._ends[shard - 1] if shard else 0)

    def origin(self, number: int) -> str:
        shard, position = self._locate(number)
        try:
            return f"{self._shards.names[shard]}/{self._shards.key(shard, position)}"
        except BadSample:
            return self._shards.names[shard]

    def members(self, number: int) -> dict[str, bytes]:
        group = self._shards.group(*self._locate(number))
        return {name: group.read(name) if size else b"" for name, size in group.sizes.items()}

    def identity(self) -> Iterator[object]:
        for shard, (name, count) in enumerate(zip(self._shards.names, self._shards.counts)):
            yield f"{name} {count} {self._shards.index(shard).header['bytes']}"


def open_input(path: str, options: InputOptions) -> Input:
    """The input that `path` is; raises DataError when it is nothing that can be prepared."""
    local = as_local(path)
    if path.startswith("pipe:") or local is None or path.endswith(TAR_ENDS):
        return Reshard(path)
    if local.is_dir():
        return _open_folder(local, options)
    files = (
        [Path(name) for name in find_files(path)] if local.is_file() or any(c in path for c in "*?[{") else []
    )
    if files and all(file.name.lower().endswith(LINES) for file in files):
        return Lines(files, options)
    if files and all(file.suffix == ".parquet" for file in files):
        return Parquet(files, options)
    if files and all(file.suffix.lower() in TABLES for file in files):
        return TableFiles(files, options)
    raise DataError(
        f"{path}: {'cannot be prepared' if local.exists() else 'does not exist'}; expected a folder, .jsonl"
        " (.gz, .zst), .json, .csv, .tsv, .parquet, a dataset on disk or tar shards (earlyfusion prepare"
        " --help shows their layouts)"
    )


def _open_folder(root: Path, options: InputOptions) -> Input:
    if (root / "dataset_dict.json").is_file() or (root / "state.json").is_file():
        return Datasets(root, options)
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    if any(path.name.endswith(TAR_ENDS) for path in files):
        return Reshard(str(root))
    tables = [path for path in files if path.suffix == ".parquet"]
    folder = Folder(root, options)
    if tables and not len(folder):
        return Parquet(tables, options)
    if not len(folder):
        raise DataError(
            f"{root} holds nothing to prepare; expected pictures or videos with .txt or .json beside them,"
            " texts, .jsonl, .json, .csv, .parquet, a dataset on disk or tar shards (earlyfusion prepare"
            " --help shows their layouts)"
        )
    return folder
