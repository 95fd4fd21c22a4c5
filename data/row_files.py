"""Rows of files of every usual form, as plain dicts: all at once (`read_rows`, for a benchmark), or one by
its number (`row_files`, for data of any size)."""

import csv
import gzip
import json
import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.order import Numbered
from earlyfusion.data.sample import TEXT_BYTES, file_below, json_object, within
from earlyfusion.data.text_table import LINES, TextTable, find_files, text_cache
from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import Record

MOST_BYTES = 1 << 29
"""Largest .csv or .tsv, which is held in memory. Of an array only the places of its objects are."""
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)
"""A JSON string as a whole, or a bracket: enough to know where the objects of an array begin and end."""
Row = Mapping[str, Any]


def read_rows(path: Path) -> list[Record]:
    """Rows of a .jsonl, .jsonl.gz, .json (a list, or {"examples": [...]}), .csv or .parquet file.

    Raises DataError naming the file and line, never quoting its content (it may be a private benchmark).
    """
    name = path.name.lower()
    if name.endswith(".parquet"):
        return list(_parquet_rows(path))
    try:
        # None stands for a plain file below.
        opened = gzip.open(path, "rt", encoding="utf-8", newline="") if name.endswith(".gz") else None
        with opened or path.open(encoding="utf-8-sig", newline="") as file:
            if ".csv" in name:
                return list(csv.DictReader(file))
            if name.endswith((".json", ".json.gz")):
                content = json.load(file)
                # BIG-bench's form.
                rows = content.get("examples") if isinstance(content, dict) else content
            else:
                rows = [_line(path, number, line) for number, line in enumerate(file, 1) if line.strip()]
    except DataError:
        raise
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read ({type(error).__name__})") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: expected a list of objects (or one object a line), found something else")
    return rows


# A function for the number of the line: the loop above has no place for its own error.
def _line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f"{path}:{number}: not valid JSON; expected one object a line") from None


def _parquet_rows(path: Path) -> Iterator[Record]:
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        raise DataError(
            f"{path}: parquet needs pyarrow; pip install 'earlyfusion[eval]', or give jsonl"
        ) from None
    try:
        yield from parquet.read_table(str(path)).to_pylist()
    except Exception as error:  # pyarrow raises its own hierarchy
        raise DataError(f"{path}: not a parquet file that can be read ({type(error).__name__})") from None


# ---- one row at a time


@dataclass(frozen=True)
class RowFile:
    """The rows of one file by number; what is wrong with one row comes to light when it is read."""

    path: Path
    count: int
    read: Callable[[int], Row]
    """Row of a number from 0; raises BadSample."""
    base: Path | None = None
    """Folder that its paths are relative to; its own if None."""

    @property
    def folder(self) -> Path:
        """What paths in its rows are relative to, and may not leave."""
        return self.base or (self.path if self.path.is_dir() else self.path.parent)


def _json_lines(path: Path) -> RowFile:
    """.jsonl, also compressed."""
    # The source of texts knows how to find a line by its number, also in a compressed file.
    table = TextTable(str(path), field="", chunk_bytes=0, cache=text_cache())
    return RowFile(path, len(table), lambda number: json_object(table.raw(number)))


def _json_array(path: Path) -> RowFile:
    """.json with a list of objects, as LLaVA's; none of it is parsed before it is asked for."""
    if not begins_array(path):
        raise DataError(
            f"{path}: not a list of rows; expected [{{...}}, ...], or .jsonl with one object a line"
        )
    # Brackets inside strings do not count; the pattern takes a string as a whole.
    spans: list[tuple[int, int]] = []
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
                    spans.append((first, match.end()))
                if depth <= 0:
                    break
    if depth:
        raise DataError(f"{path}: not valid JSON: the list is not closed (a file cut short?)")
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


def _table(path: Path) -> RowFile:
    """.csv or .tsv with a first line of column names."""
    # A row may go over lines, so a table has no offsets; it is held in memory.
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise DataError(
            f"{path}: {size >> 20} MiB; the limit of a table is {MOST_BYTES >> 20} MiB: split it, or take"
            " .jsonl"
        )
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t" if row_kind(path) == ".tsv" else ","))
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
    groups = Numbered(meta.row_group(group).num_rows for group in range(meta.num_row_groups))

    def read(number: int) -> Row:
        group, place = groups.locate(number)
        row: Row = _row_group(path, group).slice(place, 1).to_pylist()[0]
        return row

    return RowFile(path, len(groups), read)


@lru_cache(maxsize=1)
def _row_group(path: Path, group: int) -> Any:
    from pyarrow import parquet

    return parquet.ParquetFile(path).read_row_group(group)


def is_dataset(root: Path) -> bool:
    """Whether a folder is a Hugging Face dataset saved on disk."""
    return (root / "dataset_dict.json").is_file() or (root / "state.json").is_file()


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
    return RowFile(root, len(rows), lambda n: rows[n : n + 1].to_pylist()[0])


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


def row_files(path: str | Path, split: str | None = None) -> list[RowFile]:
    """The files of rows that `path` is: a file, a pattern, a folder of them, or a Hugging Face dataset on
    disk (split: which of its). Raises DataError for anything else."""
    local = Path(path).expanduser()
    if is_dataset(local):
        return [arrow_dataset(local, split)]
    tables = [local]
    if local.is_dir():
        tables = [file for file in sorted(local.rglob("*")) if file.is_file() and row_kind(file)]
    elif not local.is_file():
        tables = [Path(name) for name in find_files(str(path))] if any(c in str(path) for c in "*?[{") else []
    if not tables or not all(map(row_kind, tables)):
        raise DataError(
            f"{path}: no rows there; expected a file or folder of {', '.join(READERS)}, or a Hugging Face"
            " dataset saved on disk"
        )
    return [READERS[row_kind(table)](table) for table in tables]


def row_kind(path: Path) -> str:
    """The ending by which a file holds rows (a key of READERS); "" for any other file."""
    return next((end for end in READERS if path.name.lower().endswith(end)), "")
