"""Text files as a source: .jsonl, .jsonl.gz, .jsonl.zst, parquet and plain text, any document at once by its
number.

`path` is a file, a folder, a glob, braces, or a URL of a file. Documents are found by byte offsets: of lines
in .jsonl, of cuts at line ends in plain text. Compressed files and parquet are unpacked once into the cache
($EF_CACHE/text or the option cache_dir), parquet one row group at a time, its text column only; offsets are
kept there too.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.sample import TEXT_BYTES, Sample, Text, json_object, utf8, within
from earlyfusion.data.shards.fetch import (
    UNPACKED_FREE,
    UNPACKED_RATIO,
    as_local,
    braces,
    cache_root,
    locked,
    plain_copy,
    short_names,
    stamp,
)
from earlyfusion.data.shards.split import Split
from earlyfusion.data.sources.base import InFiles, Options, source
from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import replacing

LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".ndjson.zst")
TABLES = (".parquet",)
PLAIN = (".txt", ".md", ".txt.gz", ".txt.zst", ".md.gz", ".md.zst")
_BLOCK = 1 << 24
_ROWS = 128
"""Rows of a parquet file held at a time."""


class TextTable:
    """One file: document i is bytes [starts[i], starts[i + 1]) of a plain local file.

    `kind` is "json" (a line holds the text in `field`) or "text". Raises DataError for a file that cannot be
    opened.
    """

    def __init__(self, url: str, *, field: str, chunk_bytes: int, cache: Path) -> None:
        name = url.split("?")[0].lower()
        self.kind = "json" if name.endswith(LINES) else "text"
        self.field = field
        try:
            base = cache / f"{digest64('text', url, field, chunk_bytes, *stamp(url)):016x}"
        except FileNotFoundError:
            raise DataError(f"{url}: no such file") from None
        starts = base.with_suffix(".npy")
        if name.endswith(TABLES):
            self.path = base.with_suffix(".txt")
            with locked(base):
                if not starts.is_file():
                    _unpack_parquet(plain_copy(url, cache), field, self.path, starts)
        else:
            self.path = plain_copy(url, cache)
            with locked(base):
                if not starts.is_file():
                    _save(
                        starts, _lines(self.path) if self.kind == "json" else _chunks(self.path, chunk_bytes)
                    )
        try:
            self.starts = np.load(starts, mmap_mode="r")
        except (ValueError, EOFError):
            raise DataError(f"{starts}: damaged; delete it, it is made anew") from None

    def __len__(self) -> int:
        return max(0, len(self.starts) - 1)

    def raw(self, position: int) -> bytes:
        """The bytes of document `position`; raises BadSample (too_large)."""
        first, last = int(self.starts[position]), int(self.starts[position + 1])
        within(last - first, TEXT_BYTES, f"{self.path.name}, document {position + 1}")
        with self.path.open("rb") as file:
            file.seek(first)
            return file.read(last - first)

    def read(self, position: int, where: str) -> str:
        """Document `position`; raises BadSample (encoding, bad_json, empty_text)."""
        text: Any = utf8(self.raw(position), where)
        if self.kind == "json":
            text = json_object(text, where).get(self.field)
            if not isinstance(text, str):
                raise BadSample(
                    f"{where}: no string {self.field!r} in it; set the option text_field", "bad_json"
                )
        if not text.strip():
            raise BadSample(f"{where}: the text is empty", "empty_text")
        return str(text)


def _lines(path: Path) -> np.ndarray:
    """Starts of the lines that are not blank, and the end. A blank line belongs to the one before it."""
    starts = [offset for offset, filled in lines_of(path) if filled]
    return np.asarray([*starts, path.stat().st_size], dtype=np.int64)


def lines_of(path: Path) -> Iterator[tuple[int, bool]]:
    """(offset, whether it holds more than spaces) of every line; a line of any length takes no more than a
    block."""
    begin, position, filled = 0, 0, False
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            *whole, rest = block.split(b"\n")
            for line in whole:
                yield begin, filled or bool(line.strip())
                position += len(line) + 1
                begin, filled = position, False
            filled, position = filled or bool(rest.strip()), position + len(rest)
    if position > begin:
        yield begin, filled


def _chunks(path: Path, chunk_bytes: int) -> np.ndarray:
    """Starts of documents of about `chunk_bytes`, each the first line start at or after that distance; and
    the end."""
    size = path.stat().st_size
    starts = [0] if size else []
    if chunk_bytes:
        with path.open("rb") as file:
            while starts and (target := starts[-1] + chunk_bytes) < size:
                file.seek(target - 1)
                while (part := file.readline(_BLOCK)) and not part.endswith(b"\n"):
                    pass
                if file.tell() >= size:
                    break
                starts.append(file.tell())
    return np.asarray([*starts, size], dtype=np.int64)


def _unpack_parquet(path: Path, field: str, out: Path, starts: Path) -> None:
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path}: parquet needs pyarrow; pip install 'earlyfusion[shards]'") from None
    try:
        table = parquet.ParquetFile(path)
    except Exception as error:
        raise DataError(f"{path}: not a parquet file ({error})") from None
    if field not in table.schema_arrow.names:
        raise DataError(
            f"{path}: no column {field!r}; there are {table.schema_arrow.names}; set the option text_field"
        )
    kind = str(table.schema_arrow.field(field).type)
    if not re.fullmatch(
        r"(large_)?(string|binary)(_view)?|dictionary<values=(large_)?(string|binary),.*", kind
    ):
        raise DataError(
            f"{path}: column {field!r} holds {kind:.80}, expected text; set the option text_field"
        )
    limit = max(UNPACKED_FREE, UNPACKED_RATIO * path.stat().st_size)
    with replacing(out, sync=False) as temporary:
        ends = _write_column(table, field, temporary, limit, path)
    _save(starts, np.asarray(ends, dtype=np.int64))


def _write_column(table: Any, field: str, out: Path, limit: int, path: Path) -> list[int]:
    """Write the texts of a parquet column one after the other, a few rows at a time; returns where each
    ends."""
    ends = [0]
    with out.open("wb") as file:
        try:
            for batch in table.iter_batches(batch_size=_ROWS, columns=[field]):
                for value in batch.column(0).to_pylist():
                    raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else (value or b"")
                    file.write(raw)
                    ends.append(ends[-1] + len(raw))
                if ends[-1] > limit:
                    raise DataError(
                        f"{path}: its texts are more than {limit >> 20} MiB, {UNPACKED_RATIO} times the file"
                    )
        except DataError:
            raise
        except Exception as error:  # pyarrow: ArrowInvalid, OSError, ... for pages that are damaged
            raise DataError(
                f"{path}: damaged after row {len(ends) - 1} ({one_line(error, 120)}); fetch it again or leave"
                " it out"
            ) from None
    return ends


def _save(path: Path, array: np.ndarray) -> None:
    with replacing(path, sync=False) as temporary, temporary.open("wb") as file:
        np.save(file, array)


def find_files(path: str) -> list[str]:
    """Every text file that `path` names, in order; raises DataError when there is none."""
    found: list[str] = []
    for pattern in braces(path):
        local = as_local(pattern)
        if local is None:
            found.append(pattern)
        elif local.is_dir():
            inside = sorted(
                p for p in local.rglob("*") if p.is_file() and p.name.lower().endswith(LINES + TABLES + PLAIN)
            )
            found += [
                str(p) for p in inside if not any(n.startswith(".") for n in p.relative_to(local).parts)
            ]
        elif any(c in str(local) for c in "*?["):
            found += sorted(name for name in glob.glob(str(local), recursive=True) if os.path.isfile(name))
        elif local.is_file():
            found.append(str(local))
    if not found:
        raise DataError(f"no text file at {path}: expected {', '.join(LINES + TABLES + PLAIN)}")
    return found


class TextFilesOptions(Options):
    text_field: str = "text"
    """Field of a JSON line or column of a parquet file that holds the text."""
    chunk_bytes: int = Field(0, ge=0)
    """Plain text: cut at line ends into documents of about this size; 0 makes every file one document."""
    text_loss: float = Field(1.0, ge=0)
    """Loss weight of the text."""
    cache_dir: str | None = None
    """Where unpacked files and line positions lie; "null" takes $EF_CACHE/text."""


@source("text_files", TextFilesOptions, pictures=False, path="files")
class TextFiles(InFiles):
    """One document a line (.jsonl), row (.parquet), file or chunk of a file (plain text)."""

    def open(self) -> None:
        options = self.options
        how = {"field": options.text_field, "chunk_bytes": options.chunk_bytes}
        try:
            urls = find_files(str(self.config.path))
            self.tables = [TextTable(url, **how, cache=text_cache(options.cache_dir)) for url in urls]
        except DataError as error:
            raise DataError(f"source {self.name!r}: {error}") from None
        self.names = short_names(urls)
        self.split = Split(self.names, [len(table) for table in self.tables], self.val_fraction)

    def read(self, file: int, position: int, epoch: int) -> Sample:
        key = f"{self.names[file]}:{position + 1}"
        text = Text(self.tables[file].read(position, key), self.options.text_loss)
        return Sample([text], self.name, key)

    def contents(self) -> Iterator[object]:
        return contents_of(self.names, self.tables)


def text_cache(given: str | None = None) -> Path:
    """Where unpacked files and line positions lie: the option cache_dir, or $EF_CACHE/text."""
    return Path(given).expanduser() if given else cache_root() / "text"


def contents_of(names: Sequence[str], tables: Sequence[TextTable]) -> Iterator[object]:
    """What makes files of documents different: names, counts and sizes."""
    for name, table in zip(names, tables):
        yield f"{name} {len(table)} {int(table.starts[-1]) if len(table.starts) else 0}"
