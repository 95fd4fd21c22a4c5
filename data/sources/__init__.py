"""The kinds of sources, one file each; importing this package registers them (data/sources/base.py)."""

# Imported for what they register alone.
from earlyfusion.data.sources import (  # noqa: F401
    embedded,
    folder,
    page_talks,
    problems,
    shards,
    text_files,
    tool_problems,
    zero_vision,
)
