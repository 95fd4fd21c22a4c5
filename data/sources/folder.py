"""Any folder of files: pictures with a caption beside them, and text.

    photo.jpg + photo.txt     picture, then its caption
    photo.png + photo.json    {"caption" | "text": str} and/or {"questions": [{"question": str, "answer":
                              str}]}
    notes.txt  page.md  x.py  one document each
    lines.jsonl               one document a line: {"text": str, "image": path inside the folder, optional}

Files are taken in the order of their paths, folders below included; names that begin with a dot are left
alone.
"""

from __future__ import annotations

import json
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
    question_text,
    within,
)
from earlyfusion.data.shards.fetch import LOG
from earlyfusion.data.sources.base import Options, Source, SourceConfig, source
from earlyfusion.data.sources.text_files import lines_of

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
class Folder(Source):
    """Files below `path`; items are held out by the hash of their relative name."""

    def __init__(self, config: SourceConfig, *, seed: int, val_fraction: float) -> None:
        super().__init__(config, seed=seed, val_fraction=val_fraction)
        self.root = Path(str(config.path)).expanduser()
        if not self.root.is_dir():
            raise DataError(
                f"source {self.name!r}: folder {self.root} does not exist; check data.sources path"
            )
        self.left_out = Counter[str]()
        """Files that are no sample, by what they are."""
        items = list(self._scan())
        if self.left_out:
            LOG.warning("source %r: %s: not used: %s", self.name, self.root, told(self.left_out))
        if not items:
            raise DataError(
                f"source {self.name!r}: folder {self.root} holds nothing to read; expected pictures with a"
                " .txt or .json of the same name beside them, or .txt, .md, .py, .jsonl files"
            )
        self._held = [item for item in items if held_out(f"folder/{item.key}", val_fraction)]
        self._train = [item for item in items if not held_out(f"folder/{item.key}", val_fraction)]
        self._size = sum(path.stat().st_size for path in {item.path for item in items})

    def _scan(self) -> Iterator[_Item]:
        files = sorted(path for path in self.root.rglob("*") if path.is_file())
        files = [
            path for path in files if not any(p.startswith(".") for p in path.relative_to(self.root).parts)
        ]
        present = set(files)
        captions = set()
        for path in files:
            if path.suffix.lower() in PICTURES:
                beside = [
                    path.with_suffix(end) for end in (".txt", ".json") if path.with_suffix(end) in present
                ]
                captions.update(beside)
        for path in files:
            key, suffix = path.relative_to(self.root).as_posix(), path.suffix.lower()
            if suffix in PICTURES:
                caption = next(
                    (path.with_suffix(e) for e in (".txt", ".json") if path.with_suffix(e) in captions), None
                )
                if caption is not None:
                    yield _Item(key, path, caption)
                else:
                    self.left_out["picture without .txt or .json beside it"] += 1
            elif suffix in TEXTS and path not in captions:
                yield _Item(key, path)
            elif suffix == ".jsonl":
                yield from self._lines(path, key)
            elif path not in captions:
                self.left_out[f"file of kind {suffix or 'none'}"] += 1

    @staticmethod
    def _lines(path: Path, key: str) -> Iterator[_Item]:
        for number, (offset, filled) in enumerate(lines_of(path), start=1):
            if filled:
                yield _Item(f"{key}:{number}", path, offset=offset)

    def __len__(self) -> int:
        return len(self._train)

    def get(self, index: int, epoch: int) -> Sample:
        return self._read(self._train[index])

    def locate(self, index: int) -> tuple[str, str]:
        return str(self._train[index].path), self._train[index].key

    def heldout_len(self) -> int:
        return len(self._held)

    def heldout(self, index: int) -> Sample:
        return self._read(self._held[index])

    def contents(self) -> Iterator[object]:
        for item in self._train:
            yield item.key
        yield self._size

    def _read(self, item: _Item) -> Sample:
        loss = self.config.typed.text_loss
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
            segments = [
                Image(item.path),
                *_caption(_json(_text_of(item.caption), str(item.caption)), item.caption, loss),
            ]
        return Sample(segments, self.name, item.key)

    def _line(self, item: _Item, loss: float) -> list[Segment]:
        with item.path.open("rb") as file:
            file.seek(item.offset)
            raw = file.readline(TEXT_BYTES + 1)
        where = f"{item.path}, line {item.key.rpartition(':')[2]}"
        within(len(raw), TEXT_BYTES, where)
        try:
            entry = _json(raw.decode("utf-8"), where)
        except UnicodeDecodeError as error:
            raise BadSample(
                f"{where}: not UTF-8 ({error.reason} at byte {error.start}); convert it", "encoding"
            ) from None
        if not isinstance(entry.get("text"), str):
            raise BadSample(
                f'{where}: no "text" string; expected {{"text": ..., "image": optional path}}', "bad_json"
            )
        if "image" not in entry:
            return [Text(entry["text"], loss)]
        path = file_below(self.root, item.path.parent.absolute() / str(entry["image"]), f"{where}: image")
        return [Image(path), Text("\n" + entry["text"], loss)]


def _text_of(path: Path) -> str:
    try:
        within(path.stat().st_size, TEXT_BYTES, str(path))
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSample(
            f"{path}: not UTF-8 ({error.reason} at byte {error.start}); convert it to UTF-8", "encoding"
        ) from None
    except OSError as error:
        raise BadSample(f"{path}: cannot be read ({error.strerror})") from None
    if not text.strip():
        raise BadSample(f"{path}: the text is empty", "empty_text" if text else "empty_file")
    return text


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSample(f"{where}: not valid JSON ({error})", "bad_json") from None
    if not isinstance(entry, dict):
        raise BadSample(f"{where}: expected a JSON object, got {type(entry).__name__}", "bad_json")
    return entry


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
