"""What a video reader is, and which of them can be used here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Protocol

import numpy as np


class Reader(Protocol):
    """An open video."""

    name: str
    num_frames: int
    fps: float
    """Average rate: frames / seconds."""
    size: tuple[int, int]
    """(width, height) as stored; a rotated video gives frames the other way round"""

    def read(self, indices: Sequence[int]) -> Iterator[tuple[np.ndarray, float]]:
        """(uint8 [height, width, 3] upright, seconds from the first frame) for every index; indices must
        rise."""
        ...

    def close(self) -> None:
        """Free native memory."""
        ...


@cache
def problem(backend: str) -> str | None:
    """Why a backend cannot be used here; None when it can."""
    module = {"decord": "decord", "pyav": "av", "torchcodec": "torchcodec.decoders"}[backend]
    package = module.partition(".")[0]
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == package:
            extra = (
                "pip install torchcodec" if backend == "torchcodec" else "pip install 'earlyfusion[video]'"
            )
            return f"{package} is not installed; {extra}, or choose another backend"
        return f"{package} does not load ({error})"
    except Exception as error:  # torchcodec without FFmpeg's shared libraries, decord on another CPU
        return f"{package} is installed but does not load ({str(error).strip().splitlines()[0][:160]})"
    if backend == "decord":
        loaded.logging.set_level(loaded.logging.QUIET)
    return None


def average_fps(times: Sequence[float] | np.ndarray) -> float:
    """(n - 1) / (time of the last frame - time of the first); 1 for a single frame.

    For a constant rate it is that rate. The duration of the last frame is left out on purpose: readers
    disagree on it.
    """
    seconds = float(times[-1] - times[0])
    return (len(times) - 1) / seconds if seconds > 0 else 1.0
