"""From a stored picture (bytes, path, array, PIL) to uint8 patches, safe against hostile files.

data/picture.py opens it, here it is decoded and resized: apart, because the command line knows samples (by
the schema of recipes) and must not load torch for a help.

Two ways to the same size: `fast` (libjpeg shrinks large JPEGs while decoding, then torch's uint8 bicubic,
which uses the weights of Pillow) and exact (full decode, Pillow bicubic).
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from PIL.JpegImagePlugin import JpegImageFile

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample
from earlyfusion.data.picture import ADVICE, Picture, check_pixels, describe, load, open_header, open_picture
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import (
    Grid,
    fit,
    grid_of,
    navit_size,
    orientation,
    patchify,
    prepare_frames,
    to_rgb,
)

JPEG_GAP = 2.0
"""libjpeg may shrink a JPEG by 2, 4 or 8 as long as this many times the final size is left for the filter."""


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
    timestamps: Sequence[float] = field(default_factory=list)
    """Seconds of every frame from the start of the video; empty for a picture"""


def decode_picture(picture: Picture, cfg: VisionConfig, decode: DecodeConfig | None = None) -> Media:
    """One picture -> patches at its native resolution by the navit rule (vision/patches.py).

    Raises BadSample: empty_file, missing_member, unreadable, corrupt_image, pixel_limit.
    """
    decode = decode or DecodeConfig()
    where = describe(picture)
    # Nothing is decoded yet: the size decides how.
    image = open_header(picture, decode.max_pixels)

    # A baseline JPEG may be stored larger than the limit: libjpeg shrinks it row by row.
    jpeg = decode.fast and isinstance(image, JpegImageFile)
    original, extent = None, None
    if not jpeg or image.info.get("progressive"):
        check_pixels(image.size, where, decode.max_pixels)
    if jpeg:
        turned = orientation(image) >= 5
        original = image.size[::-1] if turned else image.size
        size = navit_size(*original, cfg)
        wanted = (math.ceil(size.new_w * JPEG_GAP), math.ceil(size.new_h * JPEG_GAP))
        drafted = image.draft(None, wanted[::-1] if turned else wanted)
        # A side of 777 shrunk by 4 gives 195 pixels, of which 194.25 are picture.
        if drafted is not None:
            extent = drafted[1][2:]
            extent = extent[::-1] if turned else extent
    check_pixels(image.size, where, decode.max_pixels)

    load(image, where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about odd metadata; the pixels are what counts
            rgb = to_rgb(image, cfg.alpha_background)
    except Exception as error:  # frames and palettes are decoded here as well
        raise BadSample(
            f"{where}: cannot be prepared ({str(error) or type(error).__name__}); {ADVICE}", "corrupt_image"
        ) from None
    # Other formats are decoded in full; only then is it known how they are turned.
    original = original or rgb.size
    size = navit_size(*original, cfg)
    patches = patchify(fit(rgb, size, exact=not decode.fast, extent=extent), cfg.patch_size)
    return Media([(patches, grid_of(size, cfg))], original, (size.new_w, size.new_h))


def decode_frames(
    frames: Sequence[Picture], timestamps: Sequence[float], cfg: VisionConfig, decode: DecodeConfig
) -> Media:
    """A video given as pictures of one size, with the seconds of each; raises BadSample."""
    # A bad frame is named as the picture it is.
    opened = [open_picture(frame, decode.max_pixels) for frame in frames]
    try:
        items = prepare_frames(opened, cfg, exact=not decode.fast)
    except (ValueError, OSError) as error:
        raise BadSample(f"the video cannot be prepared: {error}", "corrupt_video") from None
    original = opened[0].size[::-1] if orientation(opened[0]) >= 5 else opened[0].size
    size = navit_size(*original, cfg, patch_limit=cfg.in_patch_limit_each_frame)
    return Media(items, original, (size.new_w, size.new_h), timestamps)
