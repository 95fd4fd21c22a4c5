"""Images become patches by the navit rule: never upscaled, never squashed, padded to whole tokens."""

import ast
import io
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import (
    navit_size,
    num_patches,
    patchify,
    prepare_frames,
    prepare_image,
    to_rgb,
    unpatchify,
)

K25 = VisionConfig.preset("moonvit3d")
TINY = VisionConfig.preset("tiny")


def noise(width, height, seed=0, channels=3):
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, channels), dtype=np.uint8))


def test_frames_of_a_video_have_their_own_limit():
    assert navit_size(1792, 1792, K25, patch_limit=K25.in_patch_limit_each_frame).new_w == 896
    items = prepare_frames([Image.new("RGB", (400, 400))], TINY)
    assert items[0][1] == (1, 16, 16)  # 256 patches of 8 pixels, although the image limit is 1024


def test_sizes_agree_with_transformers():
    spec = find_spec("transformers")
    source = Path(spec.origin).parent / "models/kimi_k25/image_processing_kimi_k25.py"
    if not source.exists():
        pytest.skip("this transformers has no kimi_k25")
    # The module imports torchvision; only its size rule is wanted.
    tree = ast.parse(source.read_text())
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "navit_resize"]
    scope = {"math": math}
    exec(compile(ast.Module(wanted, []), str(source), "exec"), scope)
    rng = np.random.default_rng(1)
    # On the limits, one patch over them, and a line that must keep a pixel; then whatever comes.
    sizes = [(1, 1), (448, 449), (1792, 1792), (3584, 3584), (14 * 513, 14), (100_000, 3)]
    sizes += np.exp(rng.uniform(0, math.log(9000), (400, 2))).round().astype(int).tolist()
    for width, height in sizes:
        (new_h, new_w), (padded_h, padded_w) = scope["navit_resize"](height, width, 14, 2, 16384, 512)
        size = navit_size(width, height, K25)
        assert (size.new_w, size.new_h, size.width, size.height) == (new_w, new_h, padded_w, padded_h)


def test_unpatchify_inverts_patchify():
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (3, 24, 40, 3), dtype=np.uint8)
    patches = patchify(frames, 8)
    assert patches.shape == (3 * 3 * 5, 3, 8, 8) and patches.dtype == torch.uint8
    assert np.array_equal(unpatchify(patches, (3, 3, 5)), frames)
    # frame 1, patch row 2, patch column 4
    picked = patches[15 + 2 * 5 + 4].numpy()
    assert np.array_equal(picked, frames[1, 16:24, 32:40].transpose(2, 0, 1))


def test_small_image_is_padded_black_right_and_bottom_and_else_untouched():
    image = noise(21, 18)
    patches, grid = prepare_image(image, TINY)
    assert grid == (1, 4, 4) and patches.shape[0] == num_patches(grid)
    whole = unpatchify(patches, grid)[0]
    assert np.array_equal(whole[:18, :21], np.asarray(image))
    assert not whole[18:].any() and not whole[:, 21:].any()

    large, size = noise(700, 300), navit_size(700, 300, TINY)  # Pillow's bicubic
    expected = np.asarray(large.resize((size.new_w, size.new_h), Image.Resampling.BICUBIC))
    got = unpatchify(*prepare_image(large, TINY))[0, : size.new_h, : size.new_w]
    assert np.array_equal(got, expected)


def test_frames_group_by_four_and_the_last_group_may_be_short():
    frames = [noise(20, 30, seed) for seed in range(6)]
    items = prepare_frames(frames, TINY)
    assert [grid for _, grid in items] == [(4, 4, 4), (2, 4, 4)]
    assert [len(patches) for patches, _ in items] == [64, 32]
    single, _ = prepare_image(frames[5], TINY)
    assert torch.equal(items[1][0][16:], single)
    assert prepare_frames([], TINY) == []
    flat = VisionConfig.preset("tiny", pos_emb_time=1)
    assert [grid for _, grid in prepare_frames(frames, flat)] == [(1, 4, 4)] * 6
    with pytest.raises(ValueError, match="share a size"):
        prepare_frames([noise(8, 8), noise(8, 9)], TINY)


def saved(image, format, **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return Image.open(io.BytesIO(buffer.getvalue()))


def test_exif_orientation_is_applied():
    image = noise(10, 6)
    exif = Image.Exif()
    exif[0x0112] = 6  # stored turned: show rotated by 90 degrees clockwise
    upright = to_rgb(saved(image, "PNG", exif=exif))
    assert np.array_equal(np.asarray(upright), np.rot90(np.asarray(image), k=-1))


def test_transparency_shows_the_background():
    pixels = np.zeros((1, 3, 4), np.uint8)
    pixels[0, :, 0] = 200
    pixels[0, :, 3] = [0, 51, 255]  # nothing, a fifth, all of the red
    image = Image.fromarray(pixels, "RGBA")
    expected = np.array([[[255, 255, 255], [244, 204, 204], [200, 0, 0]]])
    assert np.abs(np.asarray(to_rgb(image)).astype(int) - expected).max() <= 1  # PIL rounds by its own rule
    assert np.asarray(to_rgb(image, (0, 0, 0)))[0, 0].tolist() == [0, 0, 0]
    patches, grid = prepare_image(image, VisionConfig.preset("tiny", alpha_background=(1, 2, 3)))
    assert unpatchify(patches, grid)[0, 0, 0].tolist() == [1, 2, 3]

    image = Image.new("P", (2, 1))  # a palette with a transparent colour
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    reread = saved(image, "PNG", transparency=0)
    assert np.asarray(to_rgb(reread)).tolist() == [[[255, 255, 255], [40, 50, 60]]]


@pytest.mark.parametrize(
    "mode", "1 L LA La P PA RGB RGBA RGBa RGBX CMYK YCbCr HSV LAB I F I;16 I;16B".split()
)
def test_every_mode_becomes_rgb(mode):
    patches, grid = prepare_image(Image.new(mode, (9, 5)), TINY)
    assert grid == (1, 2, 2) and patches.shape == (4, 3, 8, 8)
    if mode in ("CMYK", "YCbCr"):  # 8-bit colour conversion
        got = np.asarray(to_rgb(Image.new("RGB", (8, 8), (200, 40, 90)).convert(mode))).astype(int)
        assert np.abs(got - [200, 40, 90]).max() <= 2


def test_sixteen_bit_grey_keeps_its_range():
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16)[None]
    image = saved(Image.fromarray(ramp), "PNG")
    assert image.mode == "I;16"
    assert np.array_equal(np.asarray(to_rgb(image))[0, :, 0], np.arange(256))


def test_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "lime", "blue")]
    image = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    image.seek(2)
    assert np.asarray(to_rgb(image))[0, 0].tolist() == [255, 0, 0]
