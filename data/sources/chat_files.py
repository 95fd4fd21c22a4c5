"""Conversations from files: one a line of .jsonl (also .gz, .zst), in the form that data/chat/template.py
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

from earlyfusion.data.chat.template import Media, chat_sample, messages_of
from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.sample import Sample, json_object
from earlyfusion.data.shards.fetch import as_local
from earlyfusion.data.sources.base import Options, source
from earlyfusion.data.sources.text_files import LINES, TextFiles, find_files


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
