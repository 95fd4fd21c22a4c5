"""Every backend gives the frame that was asked for, with its real time."""

import multiprocessing

import numpy as np
import pytest

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import DataError
from earlyfusion.data.video import backend_of, container_of, open_clip, problem

from .clip_files import BACKENDS, CODECS, SHARED, number_in, numbered, write_clip

VARIABLE = [0, 0.1, 0.15, 0.5, 0.9, 1.0, 2.0, 2.04, 2.08, 2.5, 3.0, 3.7]
CLOCK = 1e-3
"""Containers store milliseconds at worst."""
UNREADABLE = {("decord", codec) for codec in ("h264-avi", "h264-ts", "av1", "hevc-open", "mpeg4-open")}
"""decord 0.6 has no AV1 decoder; it loses frames at the end of a transport stream, AVI with B-frames has no
times, and its seeking is off in open groups."""


def opened(data, backend):
    if not isinstance(data, bytes):
        data = data.read_bytes()
    container = container_of(data[:512])
    return open_clip(data, "pillow" if container == "gif" else backend, container, "clip", DecodeConfig())


def readable(backend, codec):
    if (backend, codec) in UNREADABLE:
        pytest.skip(f"{backend} does not read {codec}")


@pytest.mark.parametrize("count", [1, 5, 6, 40])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_frame_is_the_one_that_was_asked_for(backend, codec, count):
    readable(backend, codec)
    if codec == "hevc-open" and count == 1:
        pytest.skip("x265 does not flush a single frame reliably")
    clip = opened(write_clip(numbered(count), codec), backend)
    assert len(clip.seconds) == count and clip.size == (96, 64)
    assert count == 1 or clip.fps == pytest.approx(10, rel=1e-6)
    for indices in (range(count), range(1, count, 7), sorted({0, count - 1}), [count // 2]):
        found = [(number_in(frame), seconds) for frame, seconds in clip.read(list(indices))]
        assert [number for number, _ in found] == list(indices)
        assert np.allclose([seconds for _, seconds in found], [i / 10 for i in indices], atol=CLOCK)


@pytest.mark.parametrize("codec", ["h264", "h264-mkv", "hevc-open", "vp9", "av1", "gif"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_times_are_those_of_the_file_when_the_rate_varies(backend, codec):
    readable(backend, codec)
    clip = opened(write_clip(numbered(len(VARIABLE)), codec, times=VARIABLE), backend)
    found = list(clip.read(range(len(VARIABLE))))
    assert np.allclose([seconds for _, seconds in found], VARIABLE, atol=CLOCK)
    assert [number_in(frame) for frame, _ in found] == list(range(len(VARIABLE)))
    assert clip.fps == pytest.approx((len(VARIABLE) - 1) / VARIABLE[-1], rel=1e-3)


@pytest.mark.parametrize("rotation", [90, -90, 180])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_turned_phone_video_stands_upright(backend, rotation):
    frames = numbered(6)
    frame, _ = next(opened(write_clip(frames, rotation=rotation), backend).read([5]))
    expected = np.rot90(frames[5], rotation // 90)
    assert frame.shape == expected.shape

    def distance(other):
        return np.abs(frame.astype(int) - other).mean()

    assert distance(expected) < 6  # H.264 at its default quality
    assert all(distance(other) > 2 * distance(expected) for other in (expected[::-1], expected[:, ::-1]))


# 10 bits: FFmpeg 4 (decord) and later ones upsample chroma differently; the neighbouring frame differs by 7.
@pytest.mark.parametrize(
    ("name", "mean"),
    [
        ("bigbuckbunny.mp4", 0.5),
        ("tc_nasa_13013.mp4", 0.5),
        ("tc_h264_10bits.mp4", 4.0),
        ("tc_h265_10bits.mp4", 4.0),
    ],
)
def test_decord_and_pyav_agree_on_real_videos(name, mean):
    path = SHARED / "data" / "video" / name
    if problem("decord") is not None or not path.exists():
        pytest.skip(f"decord: {problem('decord')}; shared videos: {path.exists()}")
    ours, theirs = (opened(path, backend) for backend in ("decord", "pyav"))
    indices = range(3, len(ours.seconds), 29)
    for (frame, seconds), (other, when) in zip(ours.read(indices), theirs.read(indices), strict=True):
        assert seconds == pytest.approx(when, abs=CLOCK)
        assert np.abs(frame.astype(int) - other).mean() <= mean


def _numbers(clip, queue):
    queue.put([number_in(frame) for frame, _ in clip.read([0, 3, 5])])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forked_worker_decodes_after_its_parent_did(backend):
    """Also a clip that its parent opened: no native reader crosses the fork."""
    clip = opened(write_clip(numbered(6)), backend)
    list(clip.read([0, 5]))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_numbers, args=(clip, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        assert [queue.get(timeout=30) for _ in workers] == [[0, 3, 5]] * 2
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def test_a_backend_that_is_not_there_is_named_with_the_extra(monkeypatch):
    def missing(name):
        raise RuntimeError(f"Could not load {name}")

    monkeypatch.setattr("earlyfusion.data.video.importlib.import_module", missing)
    problem.cache_clear()
    try:
        for name in ("decord", "pyav", "auto"):
            with pytest.raises(
                DataError, match=r"not load \(Could not load av\); pip install 'earlyfusion\[vi"
            ):
                backend_of(name)
    finally:
        problem.cache_clear()
