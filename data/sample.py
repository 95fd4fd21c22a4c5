"""Sample: the one currency between sources and the encoder, an ordered list of text, image and video segments."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image as PILImage
from PIL import UnidentifiedImageError

from earlyfusion.data.errors import BadSample

Picture: TypeAlias = PILImage.Image | np.ndarray | bytes | str | Path
"""What an image may be: decoded (PIL, or uint8 [H, W, 3]), encoded bytes, or a path."""


@dataclass(frozen=True, slots=True)
class Text:
    """A run of text. `loss` is the weight of predicting its tokens (0: context only)."""

    text: str
    loss: float = 1.0


@dataclass(frozen=True, slots=True)
class Image:
    """One picture. Its tokens are never predicted."""

    image: Picture

    def open(self) -> PILImage.Image:
        """The decoded picture; raises BadSample, naming the path, when it cannot be read."""
        return open_picture(self.image)


@dataclass(frozen=True, slots=True)
class Video:
    """Frames of one size with the time of each, in seconds from the start. Its tokens are never predicted."""

    frames: Sequence[Picture]
    timestamps: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.frames) != len(self.timestamps) or not self.frames:
            raise BadSample(
                f"video with {len(self.frames)} frames and {len(self.timestamps)} timestamps: "
                "give one timestamp (seconds) for every frame, and at least one frame"
            )


Segment: TypeAlias = Text | Image | Video


@dataclass(frozen=True, slots=True)
class Sample:
    """One document. `source` is the name of its source, `key` names it inside the source (file, index, line)."""

    segments: Sequence[Segment]
    source: str
    key: str

    @property
    def text(self) -> str:
        """All text of the document, without media."""
        return "".join(segment.text for segment in self.segments if isinstance(segment, Text))


def open_picture(picture: Picture) -> PILImage.Image:
    """Decode `picture` completely; raises BadSample with the path (or the number of bytes) when that fails."""
    if isinstance(picture, PILImage.Image):
        return picture
    if isinstance(picture, np.ndarray):
        return PILImage.fromarray(picture)
    where = f"image of {len(picture)} bytes" if isinstance(picture, bytes) else f"image {picture}"
    try:
        image = PILImage.open(io.BytesIO(picture) if isinstance(picture, bytes) else picture)
        image.load()
    except FileNotFoundError:
        raise BadSample(f"{where}: no such file; check the path or set on_bad_sample = 'skip'") from None
    except UnidentifiedImageError:
        raise BadSample(f"{where}: not an image Pillow can read; mend it or set on_bad_sample = 'skip'") from None
    except (OSError, SyntaxError, ValueError, PILImage.DecompressionBombError) as error:
        raise BadSample(f"{where}: cannot be decoded ({error}); mend it or set on_bad_sample = 'skip'") from None
    return image
