"""Opening a stored picture (bytes, path, array, PIL), safe against hostile files.

Only the formats of FORMATS are tried: Pillow's other readers include some that start programs (EPS) or that
nobody's shards hold. Size is checked from the header; a picture is never decoded before it is known to be
small enough.

A hostile file is small and asks for much: an icon of "16 x 16" that holds a PNG of 13,000 x 13,000, a
progressive JPEG whose 200,000 scans of 95 bytes each pass over all pixels. What Pillow does not ask a header
is read here from the bytes: sizes inside ICO and JPEG 2000, scans of a JPEG, missing rows of a PNG.

Sources: RFC 1951, the ICO directory and BITMAPINFOHEADER (Microsoft), PNG 5.6, ISO/IEC 15444-1 A.5.1 (SIZ),
ITU-T T.81 B.1.1.
"""

import io
import re
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image as PILImage
from PIL import UnidentifiedImageError

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample

Picture = PILImage.Image | np.ndarray | bytes | str | Path
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
