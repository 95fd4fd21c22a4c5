"""A folder of documents that agents search and read: text, Markdown, HTML and pictures.

    library = Library("docs")
    library.search("learning rate of muon")        # "recipes.md#2: ... the rate of Muon is ..."
    library.read("recipes.md#2")                   # that part's text; a picture's place gives the picture

Parts of some 1,500 characters, cut at line ends, are ranked by BM25 in SQLite's FTS5. Documents are data:
HTML is read as text, nothing of it is run, and links out of the folder are not followed.
"""

import re
import sqlite3
import threading
from html.parser import HTMLParser
from pathlib import Path

from PIL import Image as PILImage

from earlyfusion.data.errors import DataError
from earlyfusion.data.tasks.collection import parts_of
from earlyfusion.kernels.errors import did_you_mean

MOST_FILES, MOST_BYTES = 20_000, 4 << 20
"""Files of a folder, bytes of one text: beyond it a folder is no collection to read through."""
TEXTS, PAGES = (".txt", ".md", ".rst", ".py", ".toml", ".json", ".csv"), (".html", ".htm")
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
HITS = 5
"""Results of one search."""
SNIPPET = 24
"""Tokens of a result's excerpt."""


class _Words(HTMLParser):
    """The words of a page, blocks on lines of their own."""

    hidden = 0

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.hidden += tag in ("script", "style")
        self.parts.append("\n" if tag not in ("a", "b", "i", "em", "strong", "span", "code") else "")

    def handle_endtag(self, tag: str) -> None:
        self.hidden = max(0, self.hidden - (tag in ("script", "style")))

    def handle_data(self, data: str) -> None:
        self.parts.append("" if self.hidden else data)


def words_of(path: Path) -> str:
    """The text of a document."""
    raw = path.read_bytes()[:MOST_BYTES].decode("utf-8", "replace")
    if path.suffix.lower() not in PAGES:
        return raw
    page = _Words()
    page.feed(raw)
    return re.sub(r"\s*\n\s*", "\n", "".join(page.parts)).strip()


class Library:
    """See the module. Raises DataError for a folder that is missing or holds nothing to read."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise DataError(f"docs {folder}: no such folder; give one with text, HTML or pictures")
        known = (*TEXTS, *PAGES, *PICTURES)
        files = [path for path in sorted(self.folder.rglob("*")) if path.suffix.lower() in known]
        # Links are followed, but not out of the folder.
        inside = self.folder.resolve()
        files = [path for path in files if path.is_file() and path.resolve().is_relative_to(inside)]
        if not files or len(files) > MOST_FILES:
            raise DataError(
                f"docs {folder}: {len(files)} documents; expected 1 to {MOST_FILES:,} of {', '.join(known)}"
            )
        self.places: list[str] = []
        self._lock = threading.Lock()
        # Asked from threads, one at a time.
        self._base = sqlite3.connect(":memory:", check_same_thread=False)
        self._base.execute("create virtual table parts using fts5(place unindexed, name, words)")
        for path in files:
            name = path.relative_to(self.folder).as_posix()
            if path.suffix.lower() in PICTURES:
                self.places.append(name)
                self._base.execute("insert into parts values (?, ?, ?)", (name, name, "picture"))
                continue
            for number, part in enumerate(parts_of(words_of(path)), 1):
                self.places.append(f"{name}#{number}")
                self._base.execute("insert into parts values (?, ?, ?)", (f"{name}#{number}", name, part))

    def search(self, query: str) -> str:
        """The parts that fit the words best, a line each: place, then an excerpt."""
        # Quoted words are words: nothing of a query is syntax.
        words = re.findall(r"\w+", query)[:32]
        if not words:
            return "no words to search for"
        asked = " OR ".join(f'"{word}"' for word in words)
        sql = f"select place, snippet(parts, 2, '', '', ' ... ', {SNIPPET}) from parts where parts match ?"
        with self._lock:
            rows = self._base.execute(f"{sql} order by rank limit {HITS}", (asked,)).fetchall()
        lines = [f"{place}: {' '.join(words.split())}" for place, words in rows]
        return "\n".join(lines) or f"nothing holds any of: {' '.join(words)}"

    def read(self, place: str) -> str | PILImage.Image:
        """The text of a part, or a picture; for a document without a part its first one."""
        if place not in self.places and f"{place}#1" in self.places:
            place = f"{place}#1"
        if place not in self.places:
            return f"there is no {place!r}; {did_you_mean(place, self.places)}"
        if "#" not in place:
            with PILImage.open(self.folder / place) as picture:
                return picture.convert("RGB")
        with self._lock:
            (words,) = self._base.execute("select words from parts where place = ?", (place,)).fetchone()
        name, _, number = place.rpartition("#")
        more = f"{name}#{int(number) + 1}"
        return words + (f"\n(goes on in {more})" if more in self.places else "")
