import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from earlyfusion.data.errors import BadSample
from earlyfusion.data.loading.encode import cuts, encode, timestamp
from earlyfusion.data.sample import Image, Sample, Text, Video
from earlyfusion.vision.patches import num_patches, num_tokens, prepare_frames, prepare_image


def picture(width, height, seed=0):
    return PILImage.fromarray(
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    )


def random_document(rng, pieces=12):
    """Text runs with and without line ends, images of many sizes, clips."""
    segments = []
    for i in range(pieces):
        kind = rng.random()
        if kind < 0.7:
            words = [
                rng.choice(["red", "circle", "12", "\n", "é", "  ", "def f():\n"])
                for _ in range(rng.randint(1, 40))
            ]
            segments.append(Text(" ".join(words), rng.choice([0.0, 0.5, 1.0])))
        elif kind < 0.9:
            segments.append(Image(picture(rng.randint(8, 90), rng.randint(8, 90), i)))
        else:
            frames = rng.randint(1, 9)
            segments.append(
                Video([picture(32, 24, j) for j in range(frames)], [j / 2 for j in range(frames)])
            )
    return Sample(segments, "random", "0")


def test_an_image_document_has_the_published_layout(tokenizer, vision):
    image = picture(40, 20)
    document = encode(Sample([Text("see", 0.5), Image(image), Text(" end")], "s", "k"), tokenizer, vision)
    patches, grid = prepare_image(image, vision)
    pads = num_tokens(grid)
    expected = [
        tokenizer.bos_id,
        *tokenizer.encode("see"),
        tokenizer.media_begin_id,
        *tokenizer.encode("image"),
    ]
    expected += [tokenizer.media_content_id, *[tokenizer.media_pad_id] * pads, tokenizer.media_end_id]
    expected += [*tokenizer.encode(" end"), tokenizer.eos_id]
    assert document.ids.tolist() == expected
    assert torch.equal(document.patches, patches) and document.grids == [grid]
    see, end = len(tokenizer.encode("see")), len(tokenizer.encode(" end"))
    media = len(expected) - 2 - see - end
    assert document.loss_weights.tolist() == [0.0] + [0.5] * see + [0.0] * media + [1.0] * (end + 1)
    assert document.ids[document.media_positions].eq(tokenizer.media_pad_id).all()


def test_a_video_is_chunks_of_four_frames_with_the_time_of_the_first(tokenizer, vision):
    frames = [picture(33, 25, i) for i in range(6)]
    document = encode(Sample([Video(frames, [0.5 * i for i in range(6)])], "s", "k"), tokenizer, vision)
    items = prepare_frames(frames, vision)
    assert [grid[0] for grid in document.grids] == [4, 2]
    assert torch.equal(document.patches, torch.cat([patches for patches, _ in items]))
    text = tokenizer.decode([i for i in document.ids.tolist() if i not in tokenizer.special_ids.values()])
    assert text == "00:00:00.000video00:00:02.000video"
    assert document.loss_weights.sum() == 0.0  # nothing but media: not even [EOS] is trained


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "00:00:00.000"), (3661.5, "01:01:01.500"), (59.9996, "00:01:00.000"), (1e5, "27:46:40.000")],
)
def test_timestamps_are_hours_minutes_seconds_milliseconds(seconds, text):
    assert timestamp(seconds) == text


@pytest.mark.parametrize("length", [48, 100, 333])
@pytest.mark.parametrize("seed", range(5))
def test_a_long_document_is_split_without_losing_a_token_or_a_patch(tokenizer, vision, seed, length):
    document = encode(random_document(random.Random(seed), pieces=30), tokenizer, vision)
    length = max([length, *(b - a + 2 for a, b in document.spans)])
    limit = max(map(num_patches, document.grids), default=0) + 40
    ranges = cuts(document, length, limit, tokenizer.ends_line)
    assert ranges[0][0] == 0 and ranges[-1][1] == len(document)
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    ids, weights, patches = [], [], []
    for start, stop in ranges:
        piece = document.piece(start, stop)
        assert len(piece) <= length and piece.num_patches <= limit
        assert piece.ids[0] == tokenizer.bos_id and piece.loss_weights[0] == 0
        lead = int(start > 0)
        ids += piece.ids[lead:].tolist()
        weights += piece.loss_weights[lead:].tolist()
        patches += [] if piece.patches is None else [piece.patches]
        pads = (piece.ids == tokenizer.media_pad_id).nonzero().flatten()
        assert pads.equal(piece.media_positions) and len(pads) == sum(map(num_tokens, piece.grids))
        for a, b in piece.spans:
            assert (piece.ids[a], piece.ids[b - 1]) == (tokenizer.media_begin_id, tokenizer.media_end_id)
    assert (ids, weights) == (document.ids.tolist(), document.loss_weights.tolist())
    assert document.patches is None or torch.equal(torch.cat(patches), document.patches)


def test_long_text_is_cut_at_line_ends_and_leaves_no_crumbs(tokenizer, vision):
    text = "".join(f"line number {i} of a long text\n" for i in range(400))
    document = encode(Sample([Text(text)], "s", "k"), tokenizer, vision)
    ranges = cuts(document, 128, 0, tokenizer.ends_line)
    assert len(ranges) > 20
    assert all(tokenizer.decode(document.ids[a:b].tolist()).endswith("\n") for a, b in ranges[:-1])
    assert min(b - a for a, b in ranges) >= 16


@pytest.mark.parametrize(("length", "max_patches"), [(20, 10_000), (1000, 30)])
def test_an_image_over_the_budget_is_refused_with_the_numbers(tokenizer, vision, length, max_patches):
    document = encode(Sample([Image(picture(80, 80))], "shop", "p7"), tokenizer, vision)
    with pytest.raises(
        BadSample, match=r"shop p7: an image takes 29 tokens and 100 patches; length = \d+ and max_patches"
    ):
        cuts(document, length, max_patches, tokenizer.ends_line)


def test_frames_of_two_sizes_and_missing_timestamps_are_refused(tokenizer, vision):
    with pytest.raises(BadSample, match=r"clips 3: the video cannot be prepared: .*share a size"):
        encode(Sample([Video([picture(16, 16), picture(32, 16)], [0, 1])], "clips", "3"), tokenizer, vision)
    with pytest.raises(BadSample, match="one timestamp"):
        Video([picture(16, 16)], [])
