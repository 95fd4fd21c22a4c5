"""What kind of source reads what lies at a path."""

from __future__ import annotations

from pathlib import Path

from earlyfusion.data.shards.fetch import TAR_ENDS
from earlyfusion.data.sources.text_files import LINES, TABLES


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
