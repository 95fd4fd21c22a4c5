"""The sources of the installed Python's standard library: text that every machine has."""

import sysconfig
from functools import cache
from pathlib import Path

from earlyfusion.data.loading.order import digest64

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
    "encodings",
    "turtledemo",
    "ensurepip",
}


@cache
def library(total_bytes: int) -> tuple[tuple[str, str], ...]:
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
