"""What holds of every page: tags are closed in order, nothing is loaded, nothing runs."""

import re
from html.parser import HTMLParser
from pathlib import Path

EMPTY = ("meta", "img", "br", "path", "use")


class Page(HTMLParser):
    """Tags and attributes of a page; fails on one that is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.open.pop() == tag, (tag, self.getpos())


def checked(path: Path) -> str:
    """The text of a page that stands alone."""
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    sources = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert all(value.startswith(("data:image/", "#")) for value in sources)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not {"script", "iframe", "object", "link", "base"} & set(page.tags)
    assert "@import" not in text and not re.search(r"url\((?!#)", text) and "default-src 'none'" in text
    return text
