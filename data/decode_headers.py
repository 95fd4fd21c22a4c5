"""What a picture's own header says where Pillow does not ask: sizes inside ICO and JPEG 2000, scans of a
JPEG, missing rows.

A hostile file is small and asks for much: an icon of "16 x 16" that holds a PNG of 13,000 x 13,000, a
progressive JPEG whose 200,000 scans of 95 bytes each pass over all pixels. Everything here reads bytes and
decodes nothing.

Sources: RFC 1951, the ICO directory and BITMAPINFOHEADER (Microsoft), PNG 5.6, ISO/IEC 15444-1 A.5.1 (SIZ),
ITU-T T.81 B.1.1.
"""

from __future__ import annotations

import re
import struct

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


def ico_sizes(data: bytes) -> list[tuple[int, int]]:
    """(width, height) of every picture in an icon, from its own header; [] for anything that is no icon.

    An entry whose header cannot be read is left out: Pillow refuses it.
    """
    if data[:4] != b"\0\0\1\0" or len(data) < 6:
        return []
    sizes = []
    for number in range(min(struct.unpack_from("<H", data, 4)[0], ICO_ENTRIES)):
        entry = data[6 + 16 * number : 22 + 16 * number]
        if len(entry) < 16:
            break
        head = data[(start := struct.unpack_from("<I", entry, 12)[0]) : start + 24]
        if len(head) < 24:
            continue
        if head[:8] == _PNG:
            sizes.append(struct.unpack_from(">II", head, 16))
        else:  # a bitmap and its mask, one above the other
            width, height = struct.unpack_from("<ii", head, 4)
            sizes.append((abs(width), abs(height) // 2))
    return sizes


def png_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) of a PNG; None for anything else."""
    if data[:8] != _PNG or len(data) < 26:
        return None
    return struct.unpack_from(">II", data, 16)


def png_is_short(data: bytes) -> bool:
    """Whether a PNG is smaller than its pixels can be packed: most of its rows are not there, which Pillow
    does not tell."""
    width, height = png_size(data) or (0, 0)
    if not height:
        return False
    depth, colour = data[24], data[25]
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(colour, 0)
    return height * (1 + (width * bits + 7) // 8) > DEFLATE * len(data)


def jpeg2000_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) of the code stream of a JPEG 2000 file, whatever its container claims; None where there
    is none."""
    if data[:4] != _SIZ and data[4:8] != b"jP  ":
        return None
    at = data.find(_SIZ)
    if at < 0 or len(data) < at + 24:
        return None
    right, bottom, left, top = struct.unpack_from(">IIII", data, at + 8)
    return max(right - left, 0), max(bottom - top, 0)


def jpeg_scans(data: bytes, most: int = JPEG_SCANS) -> int:
    """Scans of the first picture of a JPEG, counted no further than `most` + 1; 0 for anything that is no
    JPEG."""
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
