"""From a stored picture (bytes, path, array, PIL) to uint8 patches, safe against hostile files.

data/picture.py opens it, here it is decoded and resized.

Two ways to the same size: `fast` (libjpeg shrinks large JPEGs while decoding, then torch's uint8 bicubic,
which uses the weights of Pillow) and exact (full decode, Pillow bicubic).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from PIL import Image as PILImage
from PIL.JpegImagePlugin import JpegImageFile

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample
from earlyfusion.data.picture import ADVICE, Picture, check_pixels, describe, load, open_header
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import Grid, fit, grid_of, navit_size, orientation, patchify, to_rgb


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


def decode_picture(picture: Picture, cfg: VisionConfig, decode: DecodeConfig | None = None) -> Media:
    """One picture -> patches at its native resolution by the navit rule (vision/patches.py).

    Raises BadSample: empty_file, missing_member, unreadable, corrupt_image, pixel_limit.
    """
    decode = decode or DecodeConfig()
    where = describe(picture)
    image = open_header(picture, decode.max_pixels)
    baseline = isinstance(image, JpegImageFile) and not image.info.get("progressive")
    if not (decode.fast and baseline):
        check_pixels(image.size, where, decode.max_pixels)
    original, extent = _shrink_on_load(image, cfg, decode) if decode.fast else (None, None)
    check_pixels(
        image.size, where, decode.max_pixels
    )  # a JPEG that is shrunk row by row may be stored larger
    load(image, where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about odd metadata; the pixels are what counts
            rgb = to_rgb(image, cfg.alpha_background)
    except Exception as error:  # frames and palettes are decoded here as well
        raise BadSample(
            f"{where}: cannot be prepared ({str(error) or type(error).__name__}); {ADVICE}", "corrupt_image"
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
