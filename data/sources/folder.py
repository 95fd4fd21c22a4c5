"""Any folder of files: pictures with a caption beside them, and text.

    photo.jpg + photo.txt     picture, then its caption
    photo.png + photo.json    {"caption" | "text": str} and/or {"questions": [{"question": str, "answer":
                              str}]}
    notes.txt  page.md  x.py  one document each
    lines.jsonl               one document a line: {"text": str, "image": path inside the folder, optional}

Files are taken in the order of their paths, folders below included; names that begin with a dot are left
alone.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from earlyfusion.data.errors import BadSample, DataError, told
from earlyfusion.data.loading.order import held_out
from earlyfusion.data.sample import (
    TEXT_BYTES,
    Image,
    Sample,
    Segment,
    Text,
    answer_text,
    file_below,
    json_object,
    question_text,
    utf8,
    within,
)
from earlyfusion.data.shards.remote import LOG
from earlyfusion.data.sources.base import Listed, Options, source
from earlyfusion.data.text_table import lines_of

# What Pillow opens and people have.
PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
TEXTS = {".txt", ".md", ".py"}


@dataclass(frozen=True, slots=True)
class _Item:
    key: str
    path: Path
    caption: Path | None = None
    offset: int = -1
    """Byte position of a .jsonl line; -1 for whole files."""


class FolderOptions(Options):
    text_loss: float = Field(1.0, ge=0)
    """Loss weight of the text."""


@source("folder", FolderOptions, pictures=True, path="directory")
class Folder(Listed):
    """Files below `path`; items are held out by the hash of their relative name."""

    def open(self) -> None:
        self.root = Path(str(self.config.path)).expanduser()
        if not self.root.is_dir():
            raise DataError(f"folder {self.root} does not exist; check data.sources path")

        self.left_out = Counter[str]()
        """Files that are no sample, by what they are."""
        items = list(self._scan())
        if self.left_out:
            LOG.warning("source %r: %s: not used: %s", self.name, self.root, told(self.left_out))
        if not items:
            raise DataError(
                f"folder {self.root} holds nothing to read; expected pictures with a .txt or .json of the"
                " same name beside them, or .txt, .md, .py, .jsonl files"
            )

        self.train, self.held = [], []
        for item in items:
            side = self.held if held_out(f"folder/{item.key}", self.val_fraction) else self.train
            side.append(item)
        # Sizes, not dates: a copy of the folder is the same source.
        paths = {item.path for item in items}
        self._size = sum(path.stat().st_size for path in paths)

    def _scan(self) -> Iterator[_Item]:
        files: dict[Path, str] = {}
        for path in self.root.rglob("*"):
            name = path.relative_to(self.root)
            if path.is_file() and not any(part.startswith(".") for part in name.parts):
                files[path] = name.as_posix()

        # A caption belongs to its picture and is no document of its own.
        captions: dict[Path, Path] = {}
        used = set[Path]()
        for path in files:
            beside = [path.with_suffix(end) for end in (".json", ".txt") if path.with_suffix(end) in files]
            if beside and path.suffix.lower() in PICTURES:
                captions[path] = beside[-1]
                used.update(beside)

        # In the order of the paths: the same on every file system.
        for path, key in sorted(files.items()):
            suffix = path.suffix.lower()
            if path in captions:
                yield _Item(key, path, captions[path])
            elif suffix in PICTURES:
                self.left_out["picture without .txt or .json beside it"] += 1
            elif suffix == ".jsonl":
                for number, (offset, filled) in enumerate(lines_of(path), start=1):
                    if filled:
                        yield _Item(f"{key}:{number}", path, offset=offset)
            elif suffix in TEXTS and path not in used:
                yield _Item(key, path)
            elif path not in used:
                self.left_out[f"file of kind {suffix or 'none'}"] += 1

    def locate(self, index: int) -> tuple[str, str]:
        return str(self.train[index].path), self.train[index].key

    def contents(self) -> Iterator[object]:
        for item in self.train:
            yield item.key
        yield self._size

    def read(self, item: _Item) -> Sample:
        loss = self.options.text_loss
        for path in (item.path, item.caption):
            if path is not None:
                file_below(self.root, path.absolute())  # a link may lead anywhere

        segments: list[Segment]
        if item.offset >= 0:
            segments = self._line(item, loss)
        elif item.caption is None:
            segments = [Text(_text_of(item.path), loss)]
        elif item.caption.suffix == ".txt":
            segments = [Image(item.path), Text("\n" + _text_of(item.caption).strip(), loss)]
        else:
            entry = json_object(_text_of(item.caption), str(item.caption))
            segments = [Image(item.path), *_caption(entry, item.caption, loss)]
        return Sample(segments, self.name, item.key)

    def _line(self, item: _Item, loss: float) -> list[Segment]:
        where = f"{item.path}, line {item.key.rpartition(':')[2]}"
        entry = json_object(_text_of(item.path, item.offset), where)
        if not isinstance(entry.get("text"), str):
            raise BadSample(
                f'{where}: no "text" string; expected {{"text": ..., "image": optional path}}', "bad_json"
            )
        if "image" not in entry:
            return [Text(entry["text"], loss)]
        # A row of others must not name a file outside the folder.
        path = file_below(self.root, item.path.parent.absolute() / str(entry["image"]), f"{where}: image")
        return [Image(path), Text("\n" + entry["text"], loss)]


def _text_of(path: Path, offset: int = -1) -> str:
    """The text of a file, or of its line at `offset`."""
    try:
        with path.open("rb") as file:
            # One more than allowed, so that too long a text is noticed without reading it.
            file.seek(max(offset, 0))
            raw = file.read(TEXT_BYTES + 1) if offset < 0 else file.readline(TEXT_BYTES + 1)
    except OSError as error:
        raise BadSample(f"{path}: cannot be read ({error.strerror})") from None
    within(len(raw), TEXT_BYTES, str(path))
    # Never guessed: text in a wrong encoding would be learned as it looks.
    text = utf8(raw, str(path))
    if not text.strip():
        raise BadSample(f"{path}: the text is empty", "empty_text" if raw else "empty_file")
    return text


def _caption(entry: dict[str, Any], path: Path, loss: float) -> list[Segment]:
    segments: list[Segment] = []
    caption = entry.get("caption", entry.get("text"))
    if isinstance(caption, str) and caption:
        segments.append(Text("\n" + caption, loss))
    turns = entry.get("questions", [])
    for turn in turns if isinstance(turns, list) else [turns]:
        if not (isinstance(turn, dict) and isinstance(turn.get("question"), str) and "answer" in turn):
            raise BadSample(
                f"{path}: questions must be objects with question and answer, got {turn!r:.80}", "bad_json"
            )
        segments += [Text(question_text(turn["question"]), 0.0), Text(answer_text(str(turn["answer"])), loss)]
    if not segments:
        raise BadSample(f'{path}: neither "caption" nor "text" nor "questions" in it', "empty_text")
    return segments
