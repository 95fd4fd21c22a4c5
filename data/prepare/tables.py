"""Rows of .json arrays (as LLaVA's), .csv and .tsv files as items of `earlyfusion prepare`; paths are
relative to the file."""

from __future__ import annotations

import csv
import json
import mmap
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.sample import TEXT_BYTES, within

TABLES = (".json", ".csv", ".tsv")
MOST_BYTES = 1 << 29
"""Largest .csv or .tsv, which is held in memory. Of an array only the places of its objects are."""
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)
"""A JSON string as a whole, or a bracket: enough to know where the objects of an array begin and end."""


class TableRows:
    """The rows of one file by number, each a dict; a row's own faults come to light when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spans: list[tuple[int, int]] = []
        self._lines: list[dict[str, Any]] = []
        if path.suffix.lower() == ".json":
            self._spans = list(_array(path))
        else:
            self._lines = _table(path)

    def __len__(self) -> int:
        return len(self._spans) or len(self._lines)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Row `number` without its empty cells. Raises BadSample."""
        if not self._spans:
            return {key: value for key, value in self._lines[number].items() if key and value}
        start, stop = self._spans[number]
        within(stop - start, TEXT_BYTES, f"{self.path.name}:{number + 1}")
        with self.path.open("rb") as file:
            file.seek(start)
            raw = file.read(stop - start)
        return json_row(raw)


def json_row(raw: bytes) -> dict[str, Any]:
    """The JSON object of a row. Raises BadSample (encoding, bad_json)."""
    try:
        entry = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadSample(f"not UTF-8 ({error.reason} at byte {error.start})", "encoding") from None
    except (ValueError, RecursionError) as error:
        raise BadSample(f"not valid JSON ({error})", "bad_json") from None
    if not isinstance(entry, dict):
        raise BadSample(f"{type(entry).__name__}, expected a JSON object", "bad_json")
    return entry


def begins_array(path: Path) -> bool:
    """Whether a .json file holds an array (of rows) rather than one object."""
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def names_columns(path: Path, known: set[str]) -> bool:
    """Whether the first line of a .csv or .tsv names a column of `known`."""
    with path.open("rb") as file:
        head = file.readline(1 << 16).decode("utf-8-sig", "replace").strip()
    return bool({name.strip().strip('"') for name in re.split(r"[,\t]", head)} & known)


def _array(path: Path) -> Iterator[tuple[int, int]]:
    """Byte ranges of the objects of an array. Raises DataError when the file holds none or its end is
    missing."""
    if not begins_array(path):
        raise DataError(
            f"{path}: not a list of rows; expected [{{...}}, ...], or .jsonl with one object a line"
        )
    depth = first = found = 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for match in _TOKEN.finditer(data):
            token = data[match.start()]
            if token in b"{[":
                first = match.start() if depth == 1 else first
                depth += 1
            elif token in b"}]":
                depth -= 1
                if depth == 1 and data[first] == ord("{"):
                    found += 1
                    yield first, match.end()
                if depth <= 0:
                    break
    if depth:
        raise DataError(f"{path}: not valid JSON: the list is not closed (a file cut short?)")
    if not found:
        raise DataError(
            f'{path}: a list without an object; expected rows such as {{"image": ..., "caption": ...}}'
        )


def _table(path: Path) -> list[dict[str, Any]]:
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise DataError(
            f"{path}: {size / 2**20:.0f} MiB; the limit of a table is {MOST_BYTES >> 20} MiB: split it, or"
            " take .jsonl"
        )
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); convert it") from None
    except (csv.Error, OSError) as error:
        raise DataError(f"{path}: cannot be read as a table ({error})") from None
    if not rows:
        raise DataError(
            f"{path}: no rows; expected a first line of column names (image,caption) and lines below it"
        )
    return rows


class Rows:
    """Rows of several files, numbered through. `members`: takes a row of file number i apart."""

    def __init__(
        self, paths: Sequence[Path], members: Sequence[Callable[[dict[str, Any]], dict[str, bytes]]]
    ) -> None:
        self._tables = [TableRows(path) for path in paths]
        self._ends = list(accumulate(map(len, self._tables)))
        self._members = list(members)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _locate(self, number: int) -> tuple[int, int]:
        file = bisect_right(self._ends, number)
        return file, number - (self._ends[file - 1] if file else 0)

    def origin(self, number: int) -> str:
        """file:row, rows counted from 1 (the line of column names left out)."""
        file, row = self._locate(number)
        return f"{self._tables[file].path.name}:{row + 1}"

    def members(self, number: int) -> dict[str, bytes]:
        """Extension -> bytes; raises BadSample."""
        file, row = self._locate(number)
        return self._members[file](self._tables[file][row])

    def identity(self) -> Iterator[object]:
        """Names, sizes and times of the files."""
        for table in self._tables:
            status = table.path.stat()
            yield f"{table.path.name} {len(table)} {status.st_size} {status.st_mtime_ns}"
