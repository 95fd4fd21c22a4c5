"""What may be decoded and how: limits against hostile files, the fast path, the video backend."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

VIDEO_BACKENDS = ("decord", "pyav")


MOST_PIXELS = 178_956_970
"""What Pillow itself refuses to go beyond."""


class DecodeConfig(BaseModel):
    """Decoding of pictures and videos. A file over a limit is a BadSample, told from its header where it can
    be."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    # Part of what a resume compares: it changes pixels.
    fast: bool = True
    """Resize with the vectorised uint8 bicubic filter and let libjpeg shrink large JPEGs while decoding them;
    false decodes in full and resizes with Pillow, at about a third of the speed (the difference:
    tests/data/test_decode.py)."""
    max_pixels: int = Field(50_000_000, ge=1, le=MOST_PIXELS)
    """Most pixels of one picture, checked before it is decoded. Decoding takes up to 17 bytes a pixel (WebP),
    so the default stays below 1 GB. A JPEG that the fast path shrinks while it is read counts as shrunk (a
    progressive one as stored, since libjpeg keeps all of it). Pillow itself refuses more than 178,956,970."""
    video_backend: Literal["auto", "decord", "pyav"] = "auto"
    """"auto" takes the first of decord, pyav that is installed."""
    # The limits of a video are the server's business (pipeline/serve/prepare.py has tighter ones than a run).
    video_max_seconds: PositiveFloat = 4 * 3600.0
    """Longest video."""
    video_max_pixels: PositiveInt = 8192 * 4608
    """Most pixels of one frame."""
    video_max_frames: PositiveInt = 1_000_000
    """Most frames stored in a video."""
    animation_max_pixels: PositiveInt = 4_000_000_000
    """Most pixels of all frames of a GIF, animated WebP or PNG together: every frame up to the last that is
    wanted has to be painted. The default is a minute's work for one core."""
    video_max_patches: PositiveInt = 1 << 20
    """Most patches that one video may give, over all sampled frames (a million patches of 14 pixels are 617
    MB)."""
