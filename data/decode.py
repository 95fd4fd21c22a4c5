"""From a stored picture (bytes, path, array, PIL) to uint8 patches, safe against hostile files.

Only the formats of FORMATS are tried: Pillow's other readers include some that start programs (EPS) or that
nobody's shards hold. Size is checked from the header; a picture is never decoded before it is known to be
small enough. Where Pillow tells another size than the file decodes to, or a small file asks for much work,
data/decode_headers.py looks.

Two ways to the same size: `fast` (libjpeg shrinks large JPEGs while decoding, then torch's uint8 bicubic,
which uses the weights of Pillow) and exact (full decode, Pillow bicubic).
"""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image as PILImage
from PIL import UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.decode_headers import (
    JPEG_SCANS,
    ico_sizes,
    jpeg2000_size,
    jpeg_scans,
    png_is_short,
    png_size,
)
from earlyfusion.data.errors import BadSample
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import Grid, fit, grid_of, navit_size, orientation, patchify, to_rgb

Picture: TypeAlias = PILImage.Image | np.ndarray | bytes | str | Path
"""What an image may be: decoded (PIL, or uint8 [H, W, 3]), encoded bytes, or a path."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO", "TGA", "PCX")
"""Formats that are tried, by Pillow's names (JPEG includes MPO)."""


@cache
def _formats() -> tuple[str, ...]:
    """FORMATS that this build of Pillow can read."""
    PILImage.init()
    return tuple(name for name in FORMATS if name in PILImage.OPEN)


_ADVICE = "mend it or set on_bad_sample = 'skip'"


@dataclass(slots=True)
class Media:
    """One decoded picture or video."""

    items: list[tuple[torch.Tensor, Grid]]
    """(uint8 patches [t*h*w, 3, p, p], (t, h, w)): one for a picture, one for every group of frames of a
    video"""
    original: tuple[int, int]
    """(width, height) as stored, upright"""
    resized: tuple[int, int]
    """(width, height) that the model sees, without the padding"""
    timestamps: list[float]
    """Seconds of every frame from the start of the video; empty for a picture"""


def describe(picture: Picture) -> str:
    """ "image of 1234 bytes", "image /path": how messages name a picture."""
    if isinstance(picture, bytes):
        return f"image of {len(picture)} bytes"
    return f"image {picture}" if isinstance(picture, str | Path) else "image"


def open_header(picture: Picture, max_pixels: int | None = None) -> PILImage.Image:
    """The picture with its header read and no pixel decoded (but an icon's, which is small: see
    `max_pixels`).

    Raises BadSample with its reason when that fails, when pictures hidden inside are larger than
    `max_pixels`, and for a JPEG of more scans than any encoder writes.
    """
    if isinstance(picture, PILImage.Image):
        return picture
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
            raise BadSample(
                f"image array {picture.dtype} {list(picture.shape)}: expected uint8 [height, width, 3]"
            )
        return PILImage.fromarray(picture)
    where = describe(picture)
    try:
        data = picture if isinstance(picture, bytes) else Path(picture).read_bytes()
    except FileNotFoundError:
        raise BadSample(
            f"{where}: no such file; check the path or set on_bad_sample = 'skip'", "missing_member"
        ) from None
    except OSError as error:
        raise BadSample(f"{where}: cannot be read ({error.strerror})", "unreadable") from None
    if not data:
        raise BadSample(f"{where}: empty file; {_ADVICE}", "empty_file")
    _check_hidden_work(data, where, DecodeConfig().max_pixels if max_pixels is None else max_pixels)
    try:
        image = PILImage.open(io.BytesIO(data), formats=_formats())
        if jpeg_scans(data, 1) > 1:
            image.info["progressive"] = (
                1  # colours in scans of their own: libjpeg keeps the whole picture, too
            )
        return image
    except UnidentifiedImageError:
        raise BadSample(f"{where}: not an image Pillow can read; {_ADVICE}", "corrupt_image") from None
    except (PILImage.DecompressionBombError, PILImage.DecompressionBombWarning) as error:
        raise BadSample(f"{where}: too many pixels ({error})", "pixel_limit") from None
    except (
        Exception
    ) as error:  # a hostile header makes Pillow's readers raise anything: struct.error, KeyError, ...
        raise BadSample(f"{where}: not readable ({error!r}); {_ADVICE}", "corrupt_image") from None


def open_picture(picture: Picture, max_pixels: int | None = None) -> PILImage.Image:
    """The picture as stored, decoded in full (first frame of an animation).

    Raises BadSample: empty_file, missing_member, unreadable, corrupt_image, pixel_limit (more than
    `max_pixels`).
    """
    limit = DecodeConfig().max_pixels if max_pixels is None else max_pixels
    image = open_header(picture, limit)
    _check_pixels(image.size, describe(picture), limit)
    _load(image, describe(picture))
    return image


def _check_hidden_work(data: bytes, where: str, limit: int) -> None:
    """Raises BadSample (pixel_limit, corrupt_image) for what Pillow's header does not show."""
    for size in (*ico_sizes(data), jpeg2000_size(data) or (0, 0), png_size(data) or (0, 0)):
        _check_pixels(size, where, limit)
    if png_is_short(data):
        raise BadSample(f"{where}: cannot be decoded (rows are missing); {_ADVICE}", "corrupt_image")
    if jpeg_scans(data) > JPEG_SCANS:
        raise BadSample(f"{where}: a JPEG of more than {JPEG_SCANS} scans; {_ADVICE}", "pixel_limit")


def _check_pixels(size: tuple[int, int], where: str, limit: int) -> None:
    width, height = size
    if width * height > limit:
        raise BadSample(
            f"{where}: {width} x {height} pixels, more than {limit}; raise data.decode.max_pixels (prepare:"
            " --max-pixels) or leave it out",
            "pixel_limit",
        )


def _load(image: PILImage.Image, where: str) -> None:
    try:
        image.load()
    except (PILImage.DecompressionBombError, PILImage.DecompressionBombWarning) as error:
        raise BadSample(f"{where}: too many pixels ({error})", "pixel_limit") from None
    except Exception as error:  # see open_header
        raise BadSample(
            f"{where}: cannot be decoded ({str(error) or type(error).__name__}); {_ADVICE}", "corrupt_image"
        ) from None


def decode_picture(picture: Picture, cfg: VisionConfig, decode: DecodeConfig | None = None) -> Media:
    """One picture -> patches at its native resolution by the navit rule (vision/patches.py).

    Raises BadSample: empty_file, missing_member, unreadable, corrupt_image, pixel_limit.
    """
    decode = decode or DecodeConfig()
    where = describe(picture)
    image = open_header(picture, decode.max_pixels)
    baseline = isinstance(image, JpegImageFile) and not image.info.get("progressive")
    if not (decode.fast and baseline):
        _check_pixels(image.size, where, decode.max_pixels)
    original, extent = _shrink_on_load(image, cfg, decode) if decode.fast else (None, None)
    _check_pixels(
        image.size, where, decode.max_pixels
    )  # a JPEG that is shrunk row by row may be stored larger
    _load(image, where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about odd metadata; the pixels are what counts
            rgb = to_rgb(image, cfg.alpha_background)
    except Exception as error:  # frames and palettes are decoded here as well
        raise BadSample(
            f"{where}: cannot be prepared ({str(error) or type(error).__name__}); {_ADVICE}", "corrupt_image"
        ) from None
    original = original or rgb.size
    size = navit_size(*original, cfg)
    patches = patchify(fit(rgb, size, exact=not decode.fast, extent=extent), cfg.patch_size)
    return Media([(patches, grid_of(size, cfg))], original, (size.new_w, size.new_h), [])


def _shrink_on_load(
    image: PILImage.Image, cfg: VisionConfig, decode: DecodeConfig
) -> tuple[tuple[int, int] | None, tuple[float, float] | None]:
    """Ask libjpeg for a smaller picture when the final one is much smaller.

    Returns the upright size before that and the upright extent after it (a side of 777 shrunk by 4 gives 195
    pixels, of which 194.25 are picture); (None, None) for other formats.
    """
    if not isinstance(image, JpegImageFile):
        return None, None
    turned = orientation(image) >= 5
    width, height = image.size[::-1] if turned else image.size
    size = navit_size(width, height, cfg)
    wanted = (math.ceil(size.new_w * decode.jpeg_gap), math.ceil(size.new_h * decode.jpeg_gap))
    drafted = image.draft(None, wanted[::-1] if turned else wanted)
    if drafted is None:
        return (width, height), None
    extent = drafted[1][2:]
    return (width, height), extent[::-1] if turned else extent
