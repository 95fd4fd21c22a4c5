"""Text files as a source: .jsonl, .jsonl.gz, .jsonl.zst, parquet and plain text, any document at once by its
number.

`path` is a file, a folder, a glob, braces, or a URL of a file. Documents are found by byte offsets: of lines
in .jsonl, of cuts at line ends in plain text. Compressed files and parquet are unpacked once into the cache
($EF_CACHE/text or the option cache_dir), parquet one row group at a time, its text column only; offsets are
kept there too.

Conversations (chat_files) are lines of .jsonl in the form that data/chat/template.py describes. Pictures are
named relative to the folder of their file, or to the option `media`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt

from earlyfusion.data.chat.template import Media, chat_sample, messages_of
from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.sample import Sample, Text, json_object
from earlyfusion.data.shards.fetch import TAR_ENDS, as_local, short_names
from earlyfusion.data.sources.base import InFiles, Options, Split, source
from earlyfusion.data.text_table import LINES, TABLES, TextTable, find_files, text_cache


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
