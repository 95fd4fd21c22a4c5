"""earlyfusion from Python: `load` reads a model directory, the rooms (earlyfusion.model, earlyfusion.data,
...) hold the rest.

    model, tokenizer = earlyfusion.load("runs/nano")

Installed as the package `earlyfusion` itself; importing it imports nothing else.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from earlyfusion.data.tokenizer import Tokenizer
    from earlyfusion.model.fusion import NativeFusion

__all__ = ["VERB_MODULES", "__version__", "load"]

VERB_MODULES = ("earlyfusion.rl.verbs",)
"""Modules of higher floors that add verbs to the command line (pipeline/verbs.py) when they are imported."""

try:
    __version__ = version("earlyfusion")
except PackageNotFoundError:
    __version__ = "0"


def load(directory: str | Path, device: str = "cpu", dtype: Any = None) -> tuple[NativeFusion, Tokenizer]:
    """Model (in eval mode) and tokenizer of a model directory, a run's folder, or "embedded:NAME".

    dtype: torch dtype of the weights; None keeps what is stored. Raises ModelDirectoryError or DataError.
    """
    from earlyfusion.data.tokenizer import Tokenizer
    from earlyfusion.model.hub.config import model_folder
    from earlyfusion.model.hub.folder import load_model

    folder = model_folder(directory)
    return load_model(folder, device, dtype), Tokenizer.load(folder)
