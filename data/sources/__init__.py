"""The kinds of sources, one file each; importing this package registers them (data/sources/base.py)."""

from earlyfusion.data.sources import (
    chat_files,
    easy_vqa,
    folder,
    problems,
    shards,
    synth,
    text,
    text_files,
    zero_vision,
)

__all__ = [
    "chat_files",
    "easy_vqa",
    "folder",
    "problems",
    "shards",
    "synth",
    "text",
    "text_files",
    "zero_vision",
]
