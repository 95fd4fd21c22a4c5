"""Files of text by the numbers of their documents: where every line of .jsonl, every text of a parquet column
and every piece of a plain text begins.

Compressed files and parquet are unpacked once into the cache ($EF_CACHE/text), parquet one row group at a
time, its text column only; offsets are kept there too.
"""

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.sample import TEXT_BYTES, json_object, utf8, within
from earlyfusion.data.shards.fetch import (
    UNPACKED_FREE,
    UNPACKED_RATIO,
    as_local,
    braces,
    cache_root,
    locked,
    plain_copy,
    stamp,
)
from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import replacing

LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".ndjson.zst")
TABLES = (".parquet",)
PLAIN = (".txt", ".md", ".txt.gz", ".txt.zst", ".md.gz", ".md.zst")
# No line, however long, takes more memory than this while it is looked for.
_BLOCK = 1 << 24
_ROWS = 128
"""Rows of a parquet file held at a time."""
# Arrow writes text in many types; all of them give str or bytes.
_TEXT_COLUMN = re.compile(r"(large_)?(string|binary)(_view)?|dictionary<values=(large_)?(string|binary),.*")


class TextTable:
    """One file: document i is bytes [starts[i], starts[i + 1]) of a plain local file.

    `lines`: a line of JSON holds the text in `field`. Raises DataError for a file that cannot be opened.
    """

    def __init__(self, url: str, *, field: str, chunk_bytes: int, cache: Path) -> None:
        name = url.split("?")[0].lower()
        self.lines, self.field = name.endswith(LINES), field
        try:
            base = cache / f"{digest64('text', url, field, chunk_bytes, *stamp(url)):016x}"
        except FileNotFoundError:
            raise DataError(f"{url}: no such file") from None
        table = name.endswith(TABLES)
        self.path = base.with_suffix(".txt") if table else plain_copy(url, cache)

        # Processes that open the same file at once make its offsets once.
        starts = base.with_suffix(".npy")
        with locked(base):
            if not starts.is_file():
                if table:
                    ends = _unpack_parquet(plain_copy(url, cache), field, self.path)
                else:
                    ends = [*self._beginnings(chunk_bytes), self.path.stat().st_size]
                with replacing(starts, sync=False) as temporary, temporary.open("wb") as file:
                    np.save(file, np.asarray(ends, dtype=np.int64))
        try:
            # Mapped: a hundred million offsets need not be in memory.
            self.starts = np.load(starts, mmap_mode="r")
        except (ValueError, EOFError):
            raise DataError(f"{starts}: damaged; delete it, it is made anew") from None

    def _beginnings(self, chunk_bytes: int) -> Iterator[int]:
        """Where documents begin: filled lines, or the first line at or after each `chunk_bytes`."""
        last = None
        for offset, filled in lines_of(self.path):
            chunk = last is None or (chunk_bytes and offset >= last + chunk_bytes)
            if filled if self.lines else chunk:
                yield (last := offset)

    def __len__(self) -> int:
        return max(0, len(self.starts) - 1)

    def raw(self, position: int) -> bytes:
        """The bytes of document `position`; raises BadSample (too_large)."""
        first, last = int(self.starts[position]), int(self.starts[position + 1])
        # Asked before reading: the file says how long it is.
        within(last - first, TEXT_BYTES, f"{self.path.name}, document {position + 1}")
        with self.path.open("rb") as file:
            file.seek(first)
            return file.read(last - first)

    def read(self, position: int, where: str) -> str:
        """Document `position`; raises BadSample (encoding, bad_json, empty_text)."""
        raw = self.raw(position)
        text = json_object(raw, where).get(self.field) if self.lines else utf8(raw, where)
        if not isinstance(text, str):
            raise BadSample(f"{where}: no string {self.field!r} in it; set the option text_field", "bad_json")
        if not text.strip():
            raise BadSample(f"{where}: the text is empty", "empty_text")
        return text


def lines_of(path: Path) -> Iterator[tuple[int, bool]]:
    """(offset, whether it holds more than spaces) of every line; a line of any length takes no more than a
    block."""
    begin, position, filled = 0, 0, False
    with path.open("rb") as file:
        while part := file.readline(_BLOCK):
            filled = filled or bool(part.strip())
            # A part without a line end is the middle of a long line.
            position += len(part)
            if part.endswith(b"\n"):
                yield begin, filled
                begin, filled = position, False
    if position > begin:
        yield begin, filled


def _unpack_parquet(path: Path, field: str, out: Path) -> list[int]:
    """Write the texts of a parquet column one after the other, a few rows at a time; returns where each
    ends, after a 0."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path}: parquet needs pyarrow; pip install 'earlyfusion[shards]'") from None
    try:
        table = parquet.ParquetFile(path)
    except Exception as error:
        raise DataError(f"{path}: not a parquet file ({error})") from None
    columns = dict(zip(table.schema_arrow.names, map(str, table.schema_arrow.types)))
    if field not in columns:
        raise DataError(f"{path}: no column {field!r}; there are {[*columns]}; set the option text_field")
    if not _TEXT_COLUMN.fullmatch(columns[field]):
        raise DataError(
            f"{path}: column {field!r} holds {columns[field]:.80}, expected text; set the option text_field"
        )

    # Compressed pages may unpack to more than any disk holds.
    limit, ends = max(UNPACKED_FREE, UNPACKED_RATIO * path.stat().st_size), [0]
    with replacing(out, sync=False) as temporary, temporary.open("wb") as file:
        try:
            for batch in table.iter_batches(batch_size=_ROWS, columns=[field]):
                for value in batch.column(0).to_pylist():
                    raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value or b""
                    ends.append(ends[-1] + file.write(raw))
                if ends[-1] > limit:
                    break
        except Exception as error:  # pyarrow: ArrowInvalid, OSError, ... for pages that are damaged
            told = f"damaged after row {len(ends) - 1} ({one_line(error, 120)})"
            raise DataError(f"{path}: {told}; fetch it again or leave it out") from None
        if ends[-1] > limit:
            raise DataError(
                f"{path}: its texts are more than {limit >> 20} MiB, {UNPACKED_RATIO} times the file"
            )
    return ends


def find_files(path: str) -> list[str]:
    """Every text file that `path` names, in order; raises DataError when there is none."""
    found: list[str] = []
    for pattern in braces(path):
        local = as_local(pattern)
        if local is None:
            found.append(pattern)
        elif local.is_dir():
            for inside in sorted(local.rglob("*")):
                # Hidden files are for tools, not for readers.
                hidden = any(part.startswith(".") for part in inside.relative_to(local).parts)
                if inside.is_file() and inside.name.lower().endswith(LINES + TABLES + PLAIN) and not hidden:
                    found.append(str(inside))
        elif glob.has_magic(str(local)):
            found += sorted(filter(os.path.isfile, glob.glob(str(local), recursive=True)))
        elif local.is_file():
            found.append(str(local))
    if not found:
        raise DataError(f"no text file at {path}: expected {', '.join(LINES + TABLES + PLAIN)}")
    return found


def text_cache(given: str | None = None) -> Path:
    """Where unpacked files and line positions lie: the option cache_dir, or $EF_CACHE/text."""
    return Path(given).expanduser() if given else cache_root() / "text"
