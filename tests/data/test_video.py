"""From a video file to items of four frames: sampling, timestamps, limits, fallback, damage."""

import contextlib
import os
import threading

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Sample, Text, VideoFile
from earlyfusion.data.video import decode_video, open_clip, sample_indices, sure_of
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import navit_size, num_tokens, prepare_frames, unpatchify

from .clip_files import BACKENDS, number_in, numbered, write_clip

CFG = VisionConfig.preset("tiny", in_patch_limit_each_frame=1024)
ALL = 1000.0
"""A rate that takes every frame."""


def numbers(media):
    """The numbers of the frames in the patches of a clip."""
    return [number_in(frame) for patches, grid in media.items for frame in unpatchify(patches, grid)]


@pytest.mark.parametrize(
    ("count", "native", "fps", "most", "expected"),
    [
        (1, 25, 2.0, None, [0]),
        (10, 1, 2.0, None, list(range(10))),  # slower than asked: every frame once
        (5, 30, 2.0, None, [0]),  # 0.33 frames, but at least one
        (40, 30, 2.0, None, [0, 20, 39]),
        (6, 4, 2.0, None, [0, 2, 5]),  # linspace 0, 2.5, 5: halves go to the even neighbour
        (300, 30, 2.0, 4, [0, 100, 199, 299]),
        (3, 30, 30.0, 100, [0, 1, 2]),
    ],
)
def test_frames_are_sampled_by_the_published_rule(count, native, fps, most, expected):
    assert sample_indices(count, native, fps, most) == expected


def test_bytes_and_path_are_the_same_and_the_patches_those_of_prepare_frames(tmp_path):
    data, path = write_clip(numbered(6, 200, 144), "h264"), tmp_path / "a.mp4"
    path.write_bytes(data)
    small = VisionConfig.preset("tiny", in_patch_limit_each_frame=100)
    clip = open_clip(data, "pyav", "mp4", "clip", DecodeConfig())
    frames = [PILImage.fromarray(frame) for frame, _ in clip.read(range(6))]
    expected = prepare_frames(frames, small, exact=False)
    size = navit_size(200, 144, small, patch_limit=100)
    for video in (data, str(path)):
        media = decode_video(VideoFile(video, fps=ALL), small)
        assert media.resized == (size.new_w, size.new_h) and media.original == (200, 144)
        for (patches, grid), (wanted, places) in zip(media.items, expected, strict=True):
            assert torch.equal(patches, wanted) and grid == places
    exact = decode_video(VideoFile(data, fps=ALL), small, DecodeConfig(fast=False))
    for (a, _), (b, _) in zip(expected, exact.items):
        difference = (a.int() - b.int()).abs().float()
        assert difference.max() <= 2 and difference.mean() < 0.01


def test_the_document_of_a_video_file_carries_the_times_of_its_file(tokenizer):
    times = [0, 0.1, 0.15, 0.5, 2.25, 62.5]
    video = VideoFile(write_clip(numbered(6), "vp9", times=times), ".webm", fps=ALL)
    document = encode(Sample([video, Text("done")], "s", "k"), tokenizer, CFG)
    assert [grid[0] for grid in document.grids] == [4, 2]
    text = tokenizer.decode([i for i in document.ids.tolist() if i not in tokenizer.special_ids.values()])
    assert text == "00:00:00.000video00:00:02.250videodone"
    assert len(document.media_positions) == sum(num_tokens(grid) for grid in document.grids)
    assert document.loss_weights.sum() == len(tokenizer.encode("done")) + 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", ["hevc-open", "mpeg4-open", "h264-avi", "h264"])
def test_sparse_frames_are_right_whatever_the_backend_makes_of_seeking(backend, codec):
    data = write_clip(numbered(100), codec)
    for fps in (0.4, 0.7, 2.0):
        media = decode_video(VideoFile(data, fps=fps, backend=backend), CFG)
        assert numbers(media) == sample_indices(100, 10, fps)


@pytest.mark.parametrize(
    ("option", "limit"),
    [
        ("video_max_seconds", 1.0),
        ("video_max_frames", 5),
        ("video_max_pixels", 1000),
        ("video_max_patches", 50),
    ],
)
@pytest.mark.parametrize("codec", ["h264", "av1", "gif"])
def test_a_video_over_a_limit_is_left_out_undecoded_with_the_option_that_says_so(
    option, limit, codec, monkeypatch
):
    data = write_clip(numbered(20), codec)
    monkeypatch.setattr("av.VideoFrame.to_ndarray", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(BadSample, match=f"more than data.decode.{option} = {limit:g}") as caught:
        decode_video(VideoFile(data), CFG, DecodeConfig(**{option: limit}))
    assert caught.value.reason == "video_limit"


def test_missing_empty_and_foreign_files_have_their_reasons(tmp_path, tokenizer):
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("#EXTM3U\nfile:///etc/passwd\n")
    found = {}
    for name in ("empty.mp4", "text.mp4", "missing.mp4"):
        with pytest.raises(BadSample, match=f"shop 7: .*{name}") as caught:
            encode(Sample([VideoFile(tmp_path / name)], "shop", "7"), tokenizer, CFG)
        found[name] = caught.value.reason
    assert found == {"empty.mp4": "empty_file", "text.mp4": "corrupt_video", "missing.mp4": "missing_member"}


SESSION = (
    b"\nv=0\no=- 0 0 IN IP4 127.0.0.1\ns=-\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 15004 RTP/AVP 96\na=rtpmap:96"
    b" H264/90000\n"
)
BEGINNINGS = {
    "jpeg2000": b"AAAAftypjp2 ",
    "ftyp": b"\0\0\0\x18ftypisom\0\0\2\0isom",
    "skip": b"\0\0\0\x08skip",
    "free": b"AAAAfree",
    "ebml": b"\x1a\x45\xdf\xa3\x01\0\0\0\0\0\xff\xff\x42\x82\x84webm",
    "flv": b"FLV\x01\x01\0\0\0\x09\0\0\0\0\x09",
    "ogg": b"OggS\0\x02" + bytes(8),
    "avi": b"RIFF\xff\0\0\0AVI LIST",
    "mpeg": b"\0\0\x01\xba\x44",
    "asf": bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c"),
    "webm": b"\x1a\x45\xdf\xa3\x87\x42\x82\x84webm",
}


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_session_description_behind_a_containers_first_bytes_opens_no_port(backend, beginning, tmp_path):
    """FFmpeg, left to choose, reads such a file as SDP: it binds UDP ports, looks names up and waits for
    packets."""
    path = tmp_path / "a.mp4"
    path.write_bytes(BEGINNINGS[beginning] + SESSION)
    opened: set[str] = set()
    done = threading.Event()

    def sockets() -> set[str]:
        with contextlib.suppress(OSError):
            return {name for name in map(_target, os.listdir("/proc/self/fd")) if name.startswith("socket:")}
        return set()

    def watch() -> None:
        while not done.wait(0.002):
            opened.update(sockets() - before)

    before = sockets()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for video in (path.read_bytes(), path):
            with pytest.raises(BadSample) as caught:
                decode_video(VideoFile(video, backend=backend), CFG)
            assert caught.value.reason == "corrupt_video"
    finally:
        done.set()
        watcher.join()
    assert not opened


def _target(number: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{number}")
    return ""


def test_a_decoder_that_guesses_gets_only_files_of_which_it_can_be_sure():
    sure = {name: sure_of(head + SESSION) for name, head in BEGINNINGS.items()}
    assert {name for name, yes in sure.items() if yes} == {"ftyp", "avi", "asf", "webm"}
    for codec in ("h264", "h264-mkv", "h264-avi", "vp9"):
        assert sure_of(write_clip(numbered(1), codec)[:512])


def test_an_animation_that_asks_for_too_much_painting_is_told_from_its_header(monkeypatch):
    data = write_clip(numbered(20), "gif")
    monkeypatch.setattr("PIL.GifImagePlugin.GifImageFile.load", lambda self: pytest.fail("decoded"))
    with pytest.raises(
        BadSample, match=r"122880 pixels, more than data.decode.animation_max_pixels = 120000"
    ):
        decode_video(VideoFile(data), CFG, DecodeConfig(animation_max_pixels=120_000))


def test_an_animated_webp_has_its_durations_and_its_transparency_is_white(tmp_path):
    frames = []
    for number in range(3):
        pixels = np.zeros((32, 32, 4), np.uint8)
        pixels[8:24, 8:24] = (80 * number + 10, 0, 0, 255)
        pixels[28:] = (0, 0, 0, 128)
        frames.append(PILImage.fromarray(pixels, "RGBA"))
    path = tmp_path / "a.webp"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=[300, 500, 200], lossless=True)
    media = decode_video(VideoFile(path, fps=ALL), CFG)
    assert media.timestamps == pytest.approx([0.0, 0.3, 0.8])
    pixels = unpatchify(*media.items[0])
    assert (pixels[:, 2, 2] == 255).all() and pixels[:, 16, 16].tolist() == [
        [10, 0, 0],
        [90, 0, 0],
        [170, 0, 0],
    ]
