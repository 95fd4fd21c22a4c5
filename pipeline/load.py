"""`earlyfusion.load`: a model and its tokenizer from a model directory."""

from pathlib import Path
from typing import Any

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import load_model


def load(directory: str | Path, device: str = "cpu", dtype: Any = None) -> tuple[NativeFusion, Tokenizer]:
    """Model (in eval mode) and tokenizer of a model directory, a run's folder, or "embedded:NAME".

    dtype: torch dtype of the weights; None keeps what is stored. Raises ModelDirectoryError or DataError.
    """
    # "embedded:NAME" and a run's folder both become a directory here.
    folder = model_folder(directory)
    return load_model(folder, device, dtype), Tokenizer.load(folder)
