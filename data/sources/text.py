"""Text that every Python carries: its own reference manual in English, and the sources of the standard
library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pydantic import PositiveInt

from earlyfusion.data.loading.order import digest64, held_out
from earlyfusion.data.sample import Sample, Text
from earlyfusion.data.sources.base import Listed, Options, source


@source("pydoc", pictures=False, licence="PSF-2.0", note="topics of the installed Python's reference manual")
class Pydoc(Listed):
    """The topics of `pydoc_data` (79 chapters of the language reference, 465 kB), about `val_fraction` of the
    bytes held out."""

    def open(self) -> None:
        # Here, for some distributions leave the manual out.
        from pydoc_data.topics import topics

        self._topics = topics
        held = _heldout_topics(self._topics, self.val_fraction)
        self.held = [name for name in sorted(self._topics) if name in held]
        self.train = [name for name in sorted(self._topics) if name not in held]

    def read(self, item: str) -> Sample:
        return Sample([Text(self._topics[item])], self.name, item)

    def contents(self) -> Iterator[object]:
        for name in self.train:
            yield f"{name} {len(self._topics[name])}"


_SHARED_PARAGRAPH_CHARS = 80


def _families(topics: dict[str, str]) -> list[list[str]]:
    """Topics that share a paragraph: the manual gives whole sections again under other names ("if" inside
    "compound")."""
    family = {name: [name] for name in topics}
    owner: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            # Set anew at other widths, the same paragraph has other line ends.
            words = " ".join(paragraph.split())
            if len(words) < _SHARED_PARAGRAPH_CHARS:
                continue
            other = owner.setdefault(words, name)
            if family[other] is not family[name]:
                # All members share one list, so that joining two families is seen by each.
                joined = family[other] + family[name]
                family.update(dict.fromkeys(joined, joined))
    return [sorted(members) for name, members in sorted(family.items()) if name == min(members)]


def _heldout_topics(topics: dict[str, str], fraction: float) -> set[str]:
    """Whole families in hash order, as many as fit in `fraction` of the characters."""
    # Of characters, not of topics: some are a hundred times as long as others.
    room = fraction * sum(map(len, topics.values()))
    held: set[str] = set()
    for members in sorted(_families(topics), key=lambda members: digest64("pydoc", members[0])):
        size = sum(len(topics[name]) for name in members)
        # A family that does not fit is passed over; smaller ones after it may.
        if size <= room:
            held.update(members)
            room -= size
    return held


# Left out of the standard library: what is not library code, and
# pydoc_data, whose held-out topics must stay unseen.
_EXCLUDED = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "pydoc_data",
    "__pycache__",
    "lib2to3",
}
_EXCLUDED |= {"encodings", "turtledemo", "ensurepip"}


class StdlibCodeOptions(Options):
    total_bytes: PositiveInt = 4_000_000
    """Files are taken in a fixed random order until they hold this many bytes."""
    chunk_bytes: PositiveInt = 8_192
    """A file becomes documents of about this size, cut at line ends."""


@source(
    "stdlib_code",
    StdlibCodeOptions,
    pictures=False,
    licence="PSF-2.0",
    note="sources of the installed Python's standard library",
)
class StdlibCode(Listed):
    """Python sources of the running standard library, as chunks of about `chunk_bytes`; files are held out by
    name."""

    def open(self) -> None:
        self.train: list[tuple[str, str]] = []
        self.held: list[tuple[str, str]] = []
        for name, text in _library(self.options.total_bytes):
            side = self.held if held_out(f"stdlib/{name}", self.val_fraction) else self.train
            for number, chunk in enumerate(chunks_of_lines(text, self.options.chunk_bytes)):
                side.append((f"{name}#{number}", chunk))

    def read(self, item: tuple[str, str]) -> Sample:
        key, text = item
        return Sample([Text(text)], self.name, key)

    def contents(self) -> Iterator[object]:
        for key, text in self.train:
            yield f"{key} {len(text)}"


@cache
def _library(total_bytes: int) -> tuple[tuple[str, str], ...]:
    """(relative path, text) of library files in hash order until `total_bytes` are reached."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = [str(name.as_posix()) for name in names if not _EXCLUDED & set(name.parts)]
    files, used = [], 0
    # In the order of hashes: a sample of the whole library, and the same everywhere.
    for name in sorted(kept, key=lambda name: digest64("stdlib", name)):
        if used >= total_bytes:
            break
        try:
            text = (root / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a handful of files in other encodings
        if text.strip():
            files.append((name, text))
            used += len(text.encode())
    return tuple(files)


def chunks_of_lines(text: str, size: int) -> list[str]:
    """Cut at line ends into chunks of at most `size` UTF-8 bytes (one longer line stays whole); joined they
    are `text`."""
    chunks: list[str] = []
    current: list[str] = []
    used = 0
    # Lines stay whole: half a line of code teaches little.
    for line in text.splitlines(keepends=True):
        width = len(line.encode())
        if current and used + width > size:
            chunks.append("".join(current))
            current, used = [], 0
        current.append(line)
        used += width
    if current:
        chunks.append("".join(current))
    return chunks
