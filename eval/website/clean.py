"""Any HTML file as a page that can be shown, recorded and learned from: in one piece, without what acts, and
not too long.

    html, left_out = clean(Path("site/index.html"))

Style sheets and pictures below the file's folder come into the document; scripts, frames, forms' targets,
handlers and everything that lies elsewhere go. Texts are cut at MOST_TEXT characters, and the document ends
at MOST characters with its open elements closed.
"""

import base64
import mimetypes
import re
from collections import Counter
from html import escape
from html.parser import HTMLParser
from pathlib import Path

from earlyfusion.data.errors import BadSample
from earlyfusion.data.sample import file_below, utf8, within

MOST, MOST_TEXT = 60_000, 300
"""Characters of the document without its pictures and style sheets, and of one text."""
MOST_FILE = 1 << 20
"""Bytes of a style sheet or a picture that is taken in."""
ACTING = frozenset("script noscript iframe frame frameset object embed applet base portal template".split())
"""Elements that go with all they hold."""
EMPTY = frozenset("area br col embed hr img input link meta source track wbr".split())
"""Elements without an end."""
KEPT = re.compile(
    "class|id|style|type|checked|open|for|name|colspan|rowspan|width|height|alt|lang|title|value|placeholder|"
    "viewbox|d|fill|stroke|[xy][12]?|c[xy]|r[xy]?|points|transform|aria-[a-z]+"
)
"""Attributes that only say what an element is and how it looks."""
_ELSEWHERE = re.compile(r"""@import[^;]*;?|url\(\s*(?!["']?data:)[^)]*\)""", re.IGNORECASE)


def clean(path: Path) -> tuple[str, Counter[str]]:
    """The document, and how many of what was left out. Raises BadSample for a file that is none, is too large
    or holds nothing to be seen."""
    file = file_below(path.parent, path.name)
    within(file.stat().st_size, 32 * MOST_FILE, str(path))
    reader = _Cleaner(file.parent)
    reader.feed(utf8(file.read_bytes(), str(path)))
    reader.close()
    return reader.document(str(path)), reader.left_out


class _Cleaner(HTMLParser):
    """Copies what is kept, element by element."""

    def __init__(self, folder: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.folder, self.left_out = folder, Counter[str]()
        self.parts: list[str] = []
        self.styles: list[str] = []
        self.open: list[str] = []
        self.skipped, self.size, self.shown = "", 0, False
        self.depth = 0
        self.in_style = self.full = False

    def document(self, where: str) -> str:
        """All of it. Raises BadSample (bad_page) where nothing is seen."""
        if not self.shown:
            raise BadSample(f"{where}: no text and no picture of its own to be seen", "bad_page")
        ends = "".join(f"</{tag}>" for tag in reversed(self.open))
        style = "\n".join(self.styles)
        return (
            f'<!doctype html>\n<meta charset="utf-8">\n<style>{style}</style>\n{"".join(self.parts)}{ends}\n'
        )

    def near(self, name: str) -> bytes | None:
        """A file below the folder; None, counted, for another place."""
        try:
            file = file_below(self.folder, name.split("?")[0].split("#")[0])
            within(file.stat().st_size, MOST_FILE, name)
            return file.read_bytes()
        except BadSample:
            self.left_out["files that are elsewhere, missing or too large"] += 1
            return None

    def style(self, text: str) -> str:
        """A style sheet that asks for nothing and does not end its element."""
        return _ELSEWHERE.sub("", text).replace("</", "<\\/")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep an element, with the attributes that only say how it looks."""
        given = {name.lower(): value or "" for name, value in attrs}
        if self.skipped:
            self.depth += tag == self.skipped
            return
        if tag in ACTING:
            self.left_out[f"<{tag}>"] += 1
            if tag not in EMPTY:
                self.skipped, self.depth = tag, 1
            return
        if tag == "style":
            self.in_style = True
            return
        if tag == "link":
            sheet = self.near(given.get("href", "")) if "stylesheet" in given.get("rel", "") else None
            self.styles += [self.style(sheet.decode("utf-8", "replace"))] if sheet else []
            return
        if tag in ("meta", "html", "head", "title") or self.full:
            self.skipped, self.depth = ("title", 1) if tag == "title" else ("", 0)
            return
        self._keep(tag, given)

    def _keep(self, tag: str, given: dict[str, str]) -> None:
        kept = {name: value for name, value in given.items() if KEPT.fullmatch(name)}
        if "style" in kept:
            kept["style"] = _ELSEWHERE.sub("", kept["style"])
        if tag == "img":
            source = given.get("src", "")
            if not source.startswith("data:image/"):
                held = self.near(source)
                kind = mimetypes.guess_type(source)[0] or "image/png"
                source = f"data:{kind};base64,{base64.b64encode(held).decode()}" if held else ""
            kept |= {"src": source} if source else {}
            self.shown |= bool(source)
        told = "".join(f' {name}="{escape(value)}"' for name, value in kept.items())
        self._write(f"<{tag}{told}>")
        if tag not in EMPTY:
            self.open.append(tag)

    def _write(self, text: str) -> None:
        self.parts.append(text)
        # Pictures are counted as files.
        self.size += min(len(text), 2 * MOST_TEXT)
        if self.size > MOST and not self.full:
            self.full = True
            self.left_out["what comes after the most characters of a page"] += 1

    def handle_endtag(self, tag: str) -> None:
        """Close what is open down to that element."""
        if self.skipped:
            self.depth -= tag == self.skipped
            self.skipped = self.skipped if self.depth > 0 else ""
        elif tag == "style":
            self.in_style = False
        elif tag in self.open and not self.full:
            while (last := self.open.pop()) != tag:
                self.parts.append(f"</{last}>")
            self.parts.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        """Keep a text."""
        if self.in_style and not self.skipped:
            self.styles.append(self.style(data))
        elif not self.skipped and not self.full:
            said = re.sub(r"\s+", " ", data)
            if len(said) > MOST_TEXT:
                self.left_out["ends of long texts"] += 1
                said = said[:MOST_TEXT].rpartition(" ")[0] + " …"
            self.shown |= bool(said.strip())
            self._write(escape(said, quote=False))
