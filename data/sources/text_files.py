"""Text files as a source: .jsonl, .jsonl.gz, .jsonl.zst, parquet and plain text, any document at once by its
number.

`path` is a file, a folder, a glob, braces, or a URL of a file. Documents are found by byte offsets: of lines
in .jsonl, of cuts at line ends in plain text. Compressed files and parquet are unpacked once into the cache
($EF_CACHE/text or the option cache_dir), parquet one row group at a time, its text column only; offsets are
kept there too.

Conversations (chat_files) are lines of .jsonl in the form that data/chat/template.py describes. Pictures are
named relative to the folder of their file, or to the option `media`.
"""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, PositiveInt

from earlyfusion.data.chat.template import Media, chat_sample, messages_of
from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.sample import TEXT_BYTES, Sample, Text, json_object, utf8, within
from earlyfusion.data.shards.fetch import (
    TAR_ENDS,
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
from earlyfusion.data.sources.base import InFiles, Options, Split, source
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
        urls = find_files(str(self.config.path))
        self.read_tables(urls, field=options.text_field, chunk_bytes=options.chunk_bytes)

    def read_tables(self, urls: Sequence[str], *, field: str, chunk_bytes: int) -> None:
        """Find the documents of every file, and which of them are held out."""
        cache = text_cache(self.options.cache_dir)
        self.tables = [TextTable(url, field=field, chunk_bytes=chunk_bytes, cache=cache) for url in urls]
        self.names = short_names(urls)
        # By arithmetic on the counts: no document is read to choose the held-out ones.
        self.split = Split(self.names, list(map(len, self.tables)), self.val_fraction)

    def read(self, file: int, position: int, epoch: int) -> Sample:
        key = f"{self.names[file]}:{position + 1}"
        text = Text(self.tables[file].read(position, key), self.options.text_loss)
        return Sample([text], self.name, key)

    def contents(self) -> Iterator[object]:
        for name, table in zip(self.names, self.tables):
            yield f"{name} {len(table)} {int(table.starts[-1]) if len(table.starts) else 0}"


class ChatFilesOptions(Options):
    media: str | None = None
    """Folder that pictures and videos are named in; "null" takes the folder of the file that names them."""
    max_frames: PositiveInt | None = None
    """Most frames of a video; "null" means no limit."""
    fps: float = Field(2.0, gt=0)
    """Frames taken in a second of video, at most the native rate."""
    cache_dir: str | None = None
    """Where unpacked files and line positions lie; "null" takes $EF_CACHE/text."""
    template: Literal["chat", "qa", "plain"] = "chat"
    """How messages stand in a document: in the chat form, with the marks "Q:" and "A:" of pretraining, or as
    they are, one after the other (for rows that hold the marks themselves)."""


@source("chat_files", ChatFilesOptions, pictures=True, path="files", chat=True)
class ChatFiles(TextFiles):
    """One conversation a line, in the form of the option `template`; only the assistant's messages are
    learned."""

    def open(self) -> None:
        options = self.options
        urls = [url for url in find_files(str(self.config.path)) if url.lower().endswith(LINES)]
        if not urls:
            raise DataError(f"no chat file at {self.config.path}: expected {', '.join(LINES)}")
        # Chat rows are objects: their lines are read as they are, no field is taken out.
        self.read_tables(urls, field="messages", chunk_bytes=0)

        self.media = []
        for url in urls:
            # Names in a row are relative to its file, which for a URL has no folder here.
            local = as_local(url)
            beside = local.parent if local is not None else Path(".")
            folder = Path(options.media).expanduser() if options.media else beside
            self.media.append(Media(folder, max_frames=options.max_frames, fps=options.fps))

    def read(self, file: int, position: int, epoch: int) -> Sample:
        where = f"{self.names[file]}:{position + 1}"
        row = json_object(self.tables[file].raw(position), where)
        messages = messages_of(row, where, self.media[file])
        try:
            return chat_sample(messages, source=self.name, key=where, template=self.options.template)
        except BadSample:
            raise
        except DataError as error:  # a template that cannot say these messages: one row's fault
            raise BadSample(f"{where}: {error}", "bad_json") from None

    def contents(self) -> Iterator[object]:
        yield from super().contents()
        # Only where it says something new, so that older runs keep their fingerprint.
        if self.options.template != "chat":
            yield self.options.template


def text_cache(given: str | None = None) -> Path:
    """Where unpacked files and line positions lie: the option cache_dir, or $EF_CACHE/text."""
    return Path(given).expanduser() if given else cache_root() / "text"


def guess_kind(path: str, local: Path | None) -> str:
    """The kind of source that reads what is at `path` (`local`: the same as a path, None for a URL)."""
    name = path.split("?")[0].lower()
    if name.endswith((*LINES, *TABLES, ".txt", ".md")):
        return "text_files"
    # Of what cannot be listed shards are the likeliest.
    if local is None or not local.is_dir() or any(p.name.endswith(TAR_ENDS) for p in local.rglob("*.t*")):
        return "webdataset"
    only_tables = any(local.rglob("*.parquet")) and not any(local.rglob("*.txt"))
    return "text_files" if only_tables else "folder"
