"""Conversations from files: one a line of .jsonl (also .gz, .zst), in the form that data/chat/rows.py
describes.

`path` is a file, a folder, a glob or braces. Pictures are named relative to the folder of their file, or to
the option `media`. A row is read by its number, so order, sharing among ranks and exact resume are those of
every other source.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt

from earlyfusion.data.chat.rows import Media, messages_of
from earlyfusion.data.chat.template import chat_sample
from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.sample import Sample, json_object
from earlyfusion.data.shards.fetch import as_local, short_names
from earlyfusion.data.shards.split import Split
from earlyfusion.data.sources.base import InFiles, Options, source
from earlyfusion.data.sources.text_files import LINES, TextTable, contents_of, find_files, text_cache


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
class ChatFiles(InFiles):
    """One conversation a line, in the form of the option `template`; only the assistant's messages are
    learned."""

    def open(self) -> None:
        options = self.options
        try:
            urls = [url for url in find_files(str(self.config.path)) if url.lower().endswith(LINES)]
            if not urls:
                raise DataError(f"no chat file at {self.config.path}: expected {', '.join(LINES)}")
            cache = text_cache(options.cache_dir)
            self.tables = [TextTable(url, field="messages", chunk_bytes=0, cache=cache) for url in urls]
        except DataError as error:
            raise DataError(f"source {self.name!r}: {error}") from None
        self.media = [
            Media(_folder(url, options.media), max_frames=options.max_frames, fps=options.fps) for url in urls
        ]
        self.names = short_names(urls)
        self.split = Split(self.names, [len(table) for table in self.tables], self.val_fraction)

    def read(self, file: int, position: int, epoch: int) -> Sample:
        where = f"{self.names[file]}:{position + 1}"
        row = json_object(self.tables[file].raw(position), where)
        messages = messages_of(row, where, self.media[file])
        try:
            return chat_sample(messages, source=self.name, key=where, template=self.options.template)
        except BadSample:
            raise
        except DataError as error:
            raise BadSample(f"{where}: {error}", "bad_json") from None

    def contents(self) -> Iterator[object]:
        yield from contents_of(self.names, self.tables)
        if self.options.template != "chat":
            yield self.options.template


def _folder(url: str, media: str | None) -> Path:
    """Where the pictures and videos of a file are named in."""
    local = as_local(url)
    if media is not None:
        return Path(media).expanduser()
    return local.parent if local is not None else Path(".")
