"""Boxes and points stay on what they mark through orientation, resizing and clipping, and can be read
back."""

import io
import json
import random

import numpy as np
import pytest
from PIL import Image as PILImage

from earlyfusion.data.errors import BadSample
from earlyfusion.data.formats import write_regions
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Image, Region, Regions, Sample, Text, Video
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import unpatchify

CFG = VisionConfig.preset("tiny", in_patch_limit=200)


def marked(width, height, box):
    """A black picture with a white rectangle."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[box[1] : box[3], box[0] : box[2]] = 255
    return PILImage.fromarray(pixels)


def text_of(document, tokenizer):
    return tokenizer.decode([i for i in document.ids.tolist() if i not in tokenizer.special_ids.values()])


def read(text):
    """The JSON objects of a text, wherever they stand."""
    found, at = [], 0
    while (at := text.find("{", at)) >= 0:
        entry, at = json.JSONDecoder().raw_decode(text, at)
        found.append(entry)
    return found


@pytest.mark.parametrize("turn", [1, 3, 6, 8])
@pytest.mark.parametrize("size", [(640, 360), (201, 503), (90, 70)])
def test_the_box_in_the_text_is_where_the_rectangle_is_in_the_patches(tokenizer, size, turn):
    """The oracle is the picture itself: the rectangle is found again in the pixels the model gets."""
    width, height = size
    box = (width // 5, height // 4, width * 3 // 5, height * 3 // 4)
    upright = marked(width, height, box)
    exif = PILImage.Exif()
    exif[0x0112] = turn
    undo = {1: None, 3: 3, 6: 2, 8: 4}[turn]
    buffer = io.BytesIO()
    (upright if undo is None else upright.transpose(PILImage.Transpose(undo))).save(buffer, "PNG", exif=exif)
    sample = Sample([Image(buffer.getvalue()), Regions([Region("rectangle", box=box)])], "s", "k")
    document = encode(sample, tokenizer, CFG)
    (found,) = read(text_of(document, tokenizer))
    pixels = unpatchify(document.patches, document.grids[0])[0][..., 0]
    rows, columns = np.flatnonzero((pixels > 127).any(1)), np.flatnonzero((pixels > 127).any(0))
    seen = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
    assert np.abs(np.array(found["box"]) - seen).max() <= 1  # one pixel: bicubic edges
    assert np.allclose(
        found["box01"], [box[0] / width, box[1] / height, box[2] / width, box[3] / height], atol=5.1e-4
    )


def test_the_text_form_is_this():
    regions = [Region("red cup", box=(25, 60, 400, 362)), Region('say "é"', point=(380, 154.2))]
    both = write_regions(Regions(regions), (896, 672), (448, 336))
    assert both == (
        '{"label": "red cup", "box": [13, 30, 200, 181], "box01": [0.028, 0.089, 0.446, 0.539]}\n'
        '{"label": "say \\"é\\"", "point": [190, 77], "point01": [0.424, 0.229]}'
    )
    assert write_regions(Regions(regions[:1], form="absolute"), (896, 672), (448, 336)) == (
        '{"label": "red cup", "box": [13, 30, 200, 181]}'
    )
    assert write_regions(Regions(regions[:1], form="normalized"), (896, 672), (448, 336)) == (
        '{"label": "red cup", "box01": [0.028, 0.089, 0.446, 0.539]}'
    )
    assert write_regions(Regions([]), (9, 9), (9, 9)) == "[]"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("form", ["absolute", "normalized", "both"])
def test_what_is_written_is_read_back_within_half_a_step(seed, form):
    rng = random.Random(seed)
    original = (rng.randint(300, 4000), rng.randint(300, 4000))
    resized = tuple(side * rng.randint(20, 100) // 100 for side in original)
    regions = []
    for label in ("cat", "a {brace} and ]", 'quote " \\ slash', "zeile\nneu", "猫", "<|media_pad|>", "") * 4:
        x, y = (sorted(rng.uniform(0, side) for _ in "ab") for side in original)
        if x[1] - x[0] > 0.01 * original[0] and y[1] - y[0] > 0.01 * original[1]:
            regions.append(Region(label, box=(x[0], y[0], x[1], y[1])))
        regions.append(Region(label, point=(x[0], y[0])))
    text = write_regions(Regions(regions, form=form), original, resized)
    back = read(text)
    assert [found["label"] for found in back] == [region.label for region in regions]
    for given, found in zip(regions, back, strict=True):
        name = "box" if given.box else "point"
        exact = np.array(given.box or given.point)
        sides, seen = np.resize(original, exact.shape), np.resize(resized, exact.shape)
        # Half a pixel of the resized picture, half of the third decimal of a share.
        if form != "normalized":
            assert (np.abs(exact - found[name] * sides / seen) <= 0.5 * sides / seen + 1e-6).all()
        if form != "absolute":
            assert (np.abs(exact - found[f"{name}01"] * sides) <= 0.0005 * sides + 1e-6).all()


def test_a_box_over_the_edge_is_cut_and_one_outside_is_refused():
    text = write_regions(Regions([Region("a", box=(-50, 20, 300, 90))]), (200, 100), (200, 100))
    assert read(text) == [{"label": "a", "box": [0, 20, 200, 90], "box01": [0.0, 0.2, 1.0, 0.9]}]
    nan, inf = float("nan"), float("inf")
    boxes = [(200, 0, 300, 50), (-20, -20, 0, 50), (50, 50, 50, 60), (60, 60, 50, 50), (0, 0, nan, 5)]
    boxes += [(0, 0, inf, 5), (1, 2, 3), ("x", 2, 3, 4)]
    places = [{"box": box} for box in boxes] + [{"point": (201, 5)}, {"point": (5, -1)}]
    for place in places:
        with pytest.raises(BadSample, match="in a picture of 200 x 100") as caught:
            write_regions(Regions([Region("a", **place)]), (200, 100), (100, 50))
        assert caught.value.reason == "box_outside"


def test_a_box_thinner_than_a_pixel_keeps_an_area():
    for left in (0.0, 17.3, 99.9, 999.7):
        text = write_regions(Regions([Region("a", box=(left, 0, left + 0.2, 500))]), (1000, 500), (100, 50))
        (found,) = read(text)
        low, _, high, _ = found["box"]
        assert high == low + 1 and low <= left / 10 <= high <= 100


def test_regions_may_stand_before_their_picture_and_name_any_medium(tokenizer):
    one, two = marked(40, 20, (0, 0, 9, 9)), marked(80, 60, (0, 0, 9, 9))
    clip = Video([marked(64, 32, (0, 0, 9, 9))] * 2, [0, 1])
    region = [Region("x", box=(0, 0, 20, 20))]
    sample = Sample(
        [Regions(region, media=1), Image(one), Text("t", 0.0), Image(two), clip, Regions(region, media=2)],
        "s",
        "k",
    )
    document = encode(sample, tokenizer, CFG)
    first, second = read(text_of(document, tokenizer))
    assert first["box01"] == [0.0, 0.0, 0.25, 0.333] and second["box01"] == [0.0, 0.0, 0.312, 0.625]
    for number in (3, -1):
        with pytest.raises(BadSample, match=rf"s k: regions of media item {number}, but the sample has 3"):
            encode(Sample([*sample.segments, Regions(region, media=number)], "s", "k"), tokenizer, CFG)
