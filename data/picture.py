"""From a stored picture (bytes, path, array, PIL) to uint8 patches, safe against hostile files.

Only the formats of FORMATS are tried: Pillow's other readers include some that start programs (EPS) or that
nobody's shards hold. Size is checked from the header; a picture is never decoded before it is known to be
small enough.

A hostile file is small and asks for much: an icon of "16 x 16" that holds a PNG of 13,000 x 13,000, a
progressive JPEG whose 200,000 scans of 95 bytes each pass over all pixels. What Pillow does not ask a header
is read here from the bytes: sizes inside ICO and JPEG 2000, scans of a JPEG, missing rows of a PNG.

Two ways to the same size: `fast` (libjpeg shrinks large JPEGs while decoding, then torch's uint8 bicubic,
which uses the weights of Pillow) and exact (full decode, Pillow bicubic).

Sources: RFC 1951, the ICO directory and BITMAPINFOHEADER (Microsoft), PNG 5.6, ISO/IEC 15444-1 A.5.1 (SIZ),
ITU-T T.81 B.1.1.
"""

from __future__ import annotations

import io
import math
import re
import struct
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image as PILImage
from PIL import UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample
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

Picture: TypeAlias = PILImage.Image | np.ndarray | bytes | str | Path
"""What an image may be: decoded (PIL, or uint8 [H, W, 3]), encoded bytes, or a path."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO", "TGA", "PCX")
"""Formats that are tried, by Pillow's names (JPEG includes MPO)."""


@cache
def _formats() -> tuple[str, ...]:
    """FORMATS that this build of Pillow can read."""
    # A build may lack AVIF or JPEG 2000; asking for them would fail.
    PILImage.init()
    return tuple(name for name in FORMATS if name in PILImage.OPEN)


ADVICE = "mend it or set on_bad_sample = 'skip'"
"""What every message about a damaged picture ends with."""


JPEG_SCANS = 100
"""Most scans of a JPEG. Progressive files have about ten; libjpeg's own test programs stop at 100 to 500."""

ICO_ENTRIES = 256
"""Most pictures in an icon."""

DEFLATE = 1032
"""Bytes that one byte of a deflate stream can stand for (a match of 258 bytes in two bits)."""

JPEG_GAP = 2.0
"""libjpeg may shrink a JPEG by 2, 4 or 8 as long as this many times the final size is left for the filter."""

_PNG = b"\x89PNG\r\n\x1a\n"
_SIZ = b"\xff\x4f\xff\x51"
_AFTER_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""The next marker that ends a scan: not a stuffed byte, not a restart, not filling."""


def hidden_sizes(data: bytes) -> Iterator[tuple[int, int]]:
    """(width, height) of what Pillow would decode, whatever the outer header claims: of a PNG, of every
    picture in an icon, of the code stream of a JPEG 2000 file.

    A part whose header cannot be read is left out: Pillow refuses it.
    """
    if data[:8] == _PNG and len(data) >= 26:
        yield struct.unpack_from(">II", data, 16)
    # The container may claim any size; the code stream is what is decoded.
    if data[:4] == _SIZ or data[4:8] == b"jP  ":
        at = data.find(_SIZ)
        if 0 <= at <= len(data) - 24:
            right, bottom, left, top = struct.unpack_from(">IIII", data, at + 8)
            yield max(right - left, 0), max(bottom - top, 0)
    if data[:4] != b"\0\0\1\0" or len(data) < 6:
        return

    # An icon's directory says 16 x 16 in one byte each; the picture itself has its true size.
    for number in range(min(struct.unpack_from("<H", data, 4)[0], ICO_ENTRIES)):
        entry = data[6 + 16 * number : 22 + 16 * number]
        if len(entry) < 16:
            return
        start = struct.unpack_from("<I", entry, 12)[0]
        head = data[start : start + 26]
        if head[:8] == _PNG:
            yield from hidden_sizes(head)
        elif len(head) >= 24:  # a bitmap and its mask, one above the other
            width, height = struct.unpack_from("<ii", head, 4)
            yield abs(width), abs(height) // 2


def png_is_short(data: bytes) -> bool:
    """Whether a PNG is smaller than its pixels can be packed: most of its rows are not there, which Pillow
    does not tell."""
    # A header without its sizes is refused by Pillow itself.
    if data[:8] != _PNG or len(data) < 26:
        return False
    width, height = struct.unpack_from(">II", data, 16)
    # Bits a pixel by colour type; palettes and grey have one sample.
    bits = data[24] * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(data[25], 0)
    rows: int = height * (1 + (width * bits + 7) // 8)
    return rows > DEFLATE * len(data)


def jpeg_scans(data: bytes, most: int = JPEG_SCANS) -> int:
    """Scans of the first picture of a JPEG, counted no further than `most` + 1; 0 for anything that is no
    JPEG."""
    # Counting bytes is quick, and enough for nearly every file.
    if data[:2] != b"\xff\xd8" or data.count(b"\xff\xda") <= most:
        return 0
    at, scans = 2, 0
    while scans <= most:
        found = _AFTER_SCAN.search(data, at)
        if found is None or data[found.start() + 1] == 0xD9:
            break
        at = found.end()
        if data[at - 1] == 0xDA:
            scans += 1
        if data[at - 1] not in (0x01, 0xD8):  # all others have a length, which holds itself
            if len(data) < at + 2:
                break
            at += max(struct.unpack_from(">H", data, at)[0], 2)
    return scans


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
    # Decoded already: whoever made it has paid for it.
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
        raise BadSample(f"{where}: empty file; {ADVICE}", "empty_file")
    # Before Pillow sees the file: opening an icon decodes it.
    _check_hidden_work(data, where, DecodeConfig().max_pixels if max_pixels is None else max_pixels)
    try:
        image = PILImage.open(io.BytesIO(data), formats=_formats())
        if jpeg_scans(data, 1) > 1:
            image.info["progressive"] = (
                1  # colours in scans of their own: libjpeg keeps the whole picture, too
            )
        return image
    except UnidentifiedImageError:
        raise BadSample(f"{where}: not an image Pillow can read; {ADVICE}", "corrupt_image") from None
    except (PILImage.DecompressionBombError, PILImage.DecompressionBombWarning) as error:
        raise BadSample(f"{where}: too many pixels ({error})", "pixel_limit") from None
    except (
        Exception
    ) as error:  # a hostile header makes Pillow's readers raise anything: struct.error, KeyError, ...
        raise BadSample(f"{where}: not readable ({error!r}); {ADVICE}", "corrupt_image") from None


def open_picture(picture: Picture, max_pixels: int | None = None) -> PILImage.Image:
    """The picture as stored, decoded in full (first frame of an animation).

    Raises BadSample: empty_file, missing_member, unreadable, corrupt_image, pixel_limit (more than
    `max_pixels`).
    """
    limit = DecodeConfig().max_pixels if max_pixels is None else max_pixels
    image = open_header(picture, limit)
    check_pixels(image.size, describe(picture), limit)
    load(image, describe(picture))
    return image


def _check_hidden_work(data: bytes, where: str, limit: int) -> None:
    """Raises BadSample (pixel_limit, corrupt_image) for what Pillow's header does not show."""
    for size in hidden_sizes(data):
        check_pixels(size, where, limit)
    if png_is_short(data):
        raise BadSample(f"{where}: cannot be decoded (rows are missing); {ADVICE}", "corrupt_image")
    if jpeg_scans(data) > JPEG_SCANS:
        raise BadSample(f"{where}: a JPEG of more than {JPEG_SCANS} scans; {ADVICE}", "pixel_limit")


def check_pixels(size: tuple[int, int], where: str, limit: int) -> None:
    """Raises BadSample (pixel_limit) for more than `limit` pixels."""
    # Sides may be anything, also negative in a damaged file; the product is what costs.
    width, height = size
    if width * height > limit:
        raise BadSample(
            f"{where}: {width} x {height} pixels, more than {limit}; raise data.decode.max_pixels (prepare:"
            " --max-pixels) or leave it out",
            "pixel_limit",
        )


def load(image: PILImage.Image, where: str) -> None:
    """Decode the pixels; raises BadSample (pixel_limit, corrupt_image)."""
    try:
        image.load()
    except (PILImage.DecompressionBombError, PILImage.DecompressionBombWarning) as error:
        raise BadSample(f"{where}: too many pixels ({error})", "pixel_limit") from None
    except Exception as error:  # see open_header: anything may be raised
        raise BadSample(
            f"{where}: cannot be decoded ({str(error) or type(error).__name__}); {ADVICE}", "corrupt_image"
        ) from None


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
