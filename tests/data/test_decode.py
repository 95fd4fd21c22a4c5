"""Pictures of every kind become patches of the exact navit size; hostile files are told apart and cost
nothing."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from earlyfusion.data.decode import decode_picture
from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample
from earlyfusion.data.picture import FORMATS, open_picture
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import navit_size, prepare_image, unpatchify

TINY = VisionConfig.preset("tiny")
EXACT = DecodeConfig(fast=False)
FAST_MEAN, FAST_MAX = 0.05, 2
"""Fast path beside full decode and Pillow bicubic, in levels of 255: torch's uint8 kernel rounds its weights
and the intermediate rows to other bits. Where libjpeg shrinks first (a quarter or less of the sides), see
SHRUNK_MEAN."""
SHRUNK_MEAN, SHRUNK_MAX = 0.5, 16
"""libjpeg's own reduction is a box filter on DCT blocks; single edge pixels differ more."""


def photo(width=1024, height=768, seed=0):
    """A smooth picture with edges and some grain, as photographs have."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    waves = [
        127 + 100 * np.sin(x * rng.uniform(3, 20) + y * rng.uniform(3, 20) + channel) for channel in range(3)
    ]
    pixels = np.stack(waves, -1) + rng.normal(0, 4, (height, width, 3))
    for _ in range(12):
        a, b = rng.integers(0, width), rng.integers(0, height)
        pixels[b : b + rng.integers(10, 200), a : a + rng.integers(10, 200)] = rng.integers(0, 256, 3)
    return PILImage.fromarray(pixels.clip(0, 255).astype(np.uint8))


def stored(image, kind="JPEG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels_of(media):
    (patches, grid), (width, height) = media.items[0], media.resized
    return unpatchify(patches, grid)[0][:height, :width].astype(int)


@pytest.mark.parametrize("limit", [60, 200, 1000, 65536])
@pytest.mark.parametrize("size", [(1024, 768), (777, 1031), (3000, 40)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_fast_path_has_the_exact_size_and_nearly_the_pixels_of_pillow(limit, size, seed):
    cfg = VisionConfig.preset("moonvit_v2", in_patch_limit=limit)
    image = photo(*size, seed)
    for data in (stored(image, quality=90), stored(image, "PNG")):
        fast, exact = decode_picture(data, cfg), decode_picture(data, cfg, EXACT)
        expected, grid = prepare_image(PILImage.open(io.BytesIO(data)), cfg)
        assert torch.equal(exact.items[0][0], expected)
        assert fast.items[0][1] == exact.items[0][1] == grid
        wanted = navit_size(*size, cfg)
        assert fast.original == exact.original == size
        assert fast.resized == exact.resized == (wanted.new_w, wanted.new_h)
        difference = np.abs(pixels_of(fast) - pixels_of(exact))
        shrunk = (
            data[:2] == b"\xff\xd8" and min(size[0] // (2 * wanted.new_w), size[1] // (2 * wanted.new_h)) >= 2
        )
        assert difference.mean() <= (SHRUNK_MEAN if shrunk else FAST_MEAN)
        assert difference.max() <= (SHRUNK_MAX if shrunk else FAST_MAX)


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_every_orientation_stands_upright_on_both_paths(turn, kind):
    upright = photo(300, 200)
    undo = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[turn]  # PIL transpose that stores it turned
    image = upright if undo is None else upright.transpose(PILImage.Transpose(undo))
    exif = PILImage.Exif()
    exif[0x0112] = turn
    options = {"quality": 95} if kind in ("JPEG", "WEBP") else {}
    data = stored(image, kind, exif=exif, **options)
    for decode in (DecodeConfig(), EXACT):
        media = decode_picture(data, TINY, decode)
        assert media.original == (300, 200)
        expected = pixels_of(decode_picture(stored(upright, "PNG"), TINY, EXACT))
        # JPEG and WebP store chroma at half resolution: mean 3 levels;
        # any other orientation differs by more than 20
        assert np.abs(pixels_of(media) - expected).mean() < 5


def test_a_damaged_exif_block_does_not_cost_the_picture():
    data = bytearray(stored(photo(64, 48), exif=b"Exif\0\0II*\0\xff\xff\xff\x7f" + b"\xff" * 40))
    assert decode_picture(bytes(data), TINY).original == (64, 48)


@pytest.mark.parametrize(
    ("mode", "stored_as", "kind", "expected"),
    [
        ("CMYK", (0, 255, 255, 0), "JPEG", (255, 0, 0)),
        ("L", 77, "JPEG", 77),
        ("1", 1, "PNG", 255),
        ("LA", (9, 0), "PNG", 255),
        ("RGBA", (9, 9, 9, 0), "WEBP", 255),
        ("I;16", 257 * 100, "PNG", 100),
        ("I", 257 * 30, "TIFF", 30),
        ("P", 3, "GIF", 3),
    ],
)
def test_every_kind_of_picture_keeps_its_colour(mode, stored_as, kind, expected):
    image = PILImage.new(mode, (20, 20), stored_as)
    if mode == "P":
        image.putpalette([value // 3 for value in range(768)])
    data = stored(image, kind)
    for decode in (DecodeConfig(), EXACT):
        assert np.abs(pixels_of(decode_picture(data, TINY, decode)) - expected).max() <= 3
    if "A" in mode:
        other = VisionConfig.preset("tiny", alpha_background=(10, 20, 30))
        assert np.abs(pixels_of(decode_picture(data, other)) - (10, 20, 30)).max() <= 3


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "MPO"])
def test_a_moving_picture_gives_its_first_frame(kind):
    frames = [PILImage.new("RGB", (24, 24), colour) for colour in ("red", "lime", "blue")]
    data = stored(frames[0], kind, save_all=True, append_images=frames[1:])
    assert np.abs(pixels_of(decode_picture(data, TINY)) - (255, 0, 0)).max() <= 3


def reason_of(picture, decode=None):
    with pytest.raises(BadSample) as caught:
        decode_picture(picture, TINY, decode)
    assert "\n" not in str(caught.value)
    return caught.value.reason


def png_header(width, height):
    """A PNG that claims a size and holds a few bytes of pixels."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def test_hostile_pictures_have_their_reasons(tmp_path):
    whole = stored(photo(200, 150))
    (tmp_path / "empty.jpg").write_bytes(b"")
    assert reason_of(tmp_path / "empty.jpg") == reason_of(b"") == "empty_file"
    assert reason_of(tmp_path / "missing.jpg") == "missing_member"
    assert reason_of(tmp_path) == "unreadable"
    assert reason_of(whole[: len(whole) // 2]) == reason_of(b"not a picture at all") == "corrupt_image"
    assert reason_of(whole[:20]) == "corrupt_image"
    assert reason_of(png_header(100, 100)) == "corrupt_image"
    for sides in ((20_000, 20_000), (2_000_000, 60_000)):
        assert reason_of(png_header(*sides)) == "pixel_limit"
    assert reason_of(stored(photo(100, 100)), DecodeConfig(max_pixels=9_999)) == "pixel_limit"
    assert decode_picture(stored(photo(100, 100)), TINY, DecodeConfig(max_pixels=10_000)).original == (
        100,
        100,
    )


def icon(picture, said=16):
    """An icon that says 16 x 16 and holds `picture`."""
    entry = struct.pack("<BBBBHHII", said, said, 0, 0, 1, 32, len(picture), 22)
    return b"\0\0\1\0\1\0" + entry + picture


def test_sizes_that_the_header_hides_are_found_before_anything_is_decoded(monkeypatch):
    from PIL import ImageFile

    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    bitmap = struct.pack("<IiiHHIIiiII", 40, 9_000, 18_000, 1, 32, 0, 0, 0, 0, 0, 0)
    stream = stored(photo(64, 48), "JPEG2000")
    at = stream.index(b"\xff\x4f\xff\x51") + 8
    grown = stream[:at] + struct.pack(">II", 9_000, 9_000) + stream[at + 8 :]
    for data in (icon(png_header(9_000, 9_000)), icon(bitmap), grown):
        assert reason_of(data) == "pixel_limit"


def test_a_png_of_which_most_rows_are_missing_is_not_taken_for_a_good_one():
    whole = stored(PILImage.new("RGB", (3_000, 3_000)), "PNG")
    assert decode_picture(whole, TINY).original == (3_000, 3_000)  # zeros: as small as a true one gets
    assert reason_of(png_header(3_000, 3_000)) == "corrupt_image"


def scans_of(count, **options):
    """A JPEG whose last scan stands there `count` times more."""
    data = stored(photo(64, 48), **options)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * (count + 1) + b"\xff\xd9"


def test_a_jpeg_of_more_scans_than_an_encoder_writes_is_left_out():
    for options in ({"progressive": True}, {}):
        assert decode_picture(scans_of(0, **options), TINY).original == (64, 48)
        assert reason_of(scans_of(101, **options)) == "pixel_limit"
    many = b"\xff\xe1\x02\x02" + b"\xff\xda" * 256  # bytes of metadata that look like scans
    data = stored(photo(64, 48))
    assert decode_picture(data[:2] + many + data[2:], TINY).original == (64, 48)


def test_a_jpeg_is_measured_by_what_is_decoded():
    data, progressive = stored(photo(1600, 1200)), stored(photo(1600, 1200), progressive=True)
    small = DecodeConfig(max_pixels=500_000)
    cfg = VisionConfig.preset("moonvit_v2", in_patch_limit=40)
    assert decode_picture(data, cfg, small).original == (1600, 1200)  # libjpeg makes 400 x 300 of it
    for picture, decode in ((progressive, small), (data, DecodeConfig(max_pixels=500_000, fast=False))):
        with pytest.raises(BadSample, match="1600 x 1200 pixels, more than 500000"):
            decode_picture(picture, cfg, decode)


def test_formats_that_start_programs_are_not_even_tried():
    assert "EPS" not in FORMATS and "WMF" not in FORMATS
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\nshowpage\n%%EOF\n"
    assert PILImage.open(io.BytesIO(postscript)).format == "EPS"  # Pillow alone would go for Ghostscript
    assert reason_of(postscript) == "corrupt_image"


def test_arrays_and_pil_images_pass_through():
    image = photo(80, 60)
    for picture in (image, np.asarray(image), stored(image, "PNG")):
        assert torch.equal(decode_picture(picture, TINY).items[0][0], prepare_image(image, TINY)[0])
    with pytest.raises(BadSample, match=r"expected uint8 \[height, width, 3\]"):
        decode_picture(np.zeros((4, 4), np.uint8), TINY)
    assert open_picture(stored(image, "PNG")).size == (80, 60)
