"""Rows of files of every usual form, as plain dicts."""

import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from earlyfusion.data.errors import DataError
from earlyfusion.kernels.files import Record


def read_rows(path: Path) -> list[Record]:
    """Rows of a .jsonl, .jsonl.gz, .json (a list, or {"examples": [...]}), .csv or .parquet file.

    Raises DataError naming the file and line, never quoting its content (it may be a private benchmark).
    """
    name = path.name.lower()
    if name.endswith(".parquet"):
        return list(_parquet(path))
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


def _parquet(path: Path) -> Iterator[Record]:
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
