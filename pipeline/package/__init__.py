"""earlyfusion from Python: `load` reads a model directory, the rooms (earlyfusion.model, earlyfusion.data,
...) hold the rest.

    model, tokenizer = earlyfusion.load("runs/nano")

Installed as the package `earlyfusion` itself; importing it imports nothing else.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from earlyfusion.pipeline.load import load

__all__ = ["VERB_MODULES", "__version__", "load"]

VERB_MODULES = ("earlyfusion.rl.verbs",)
"""Modules of higher floors that add verbs to the command line (pipeline/verbs.py) when they are imported."""

try:
    __version__ = version("earlyfusion")
except PackageNotFoundError:
    __version__ = "0"


def __getattr__(name: str) -> Any:
    """`load` brings torch with it, so it is imported when first asked for."""
    if name != "load":
        raise AttributeError(f"module 'earlyfusion' has no attribute {name!r}; it has {', '.join(__all__)}")
    return import_module("earlyfusion.pipeline.load").load
