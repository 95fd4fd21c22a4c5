"""Every backend gives the frame that was asked for, with its real time."""

import multiprocessing
import os

import numpy as np
import pytest

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.video.read import open_video
from earlyfusion.data.video.readers import problem
from tests.data.clip_files import CODECS, SHARED, number_in, numbered, write_clip

BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(problem(name) is not None, reason=f"{name}: {problem(name)}"))
    for name in ("decord", "pyav")
]
VARIABLE = [0, 0.1, 0.15, 0.5, 0.9, 1.0, 2.0, 2.04, 2.08, 2.5, 3.0, 3.7]
CLOCK = 1e-3
"""Containers store milliseconds at worst."""
UNREADABLE = {("decord", codec) for codec in ("h264-avi", "h264-ts", "av1")}
"""decord 0.6 has no AV1 decoder; it loses frames at the end of a transport stream, and AVI with B-frames has
no times."""


@pytest.mark.parametrize("count", [1, 5, 6, 40])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_frame_is_the_one_that_was_asked_for(backend, codec, count):
    if (backend, codec) in UNREADABLE:
        pytest.skip(f"{backend} does not read {codec}")
    if codec == "hevc-open" and count == 1:
        pytest.skip("x265 does not flush a single frame reliably")
    data = write_clip(numbered(count), codec)
    with open_video(data, backend, DecodeConfig(video_fallback=False)) as reader:
        assert reader.num_frames == count
        assert count == 1 or reader.fps == pytest.approx(10, rel=1e-6)
        assert reader.size == (96, 64)
        for indices in (
            range(count),
            range(1, count, 7),
            [0, count - 1][: min(2, count)],
            [count // 2],
            [count - 1],
        ):
            found = [(number_in(frame), seconds) for frame, seconds in reader.read(list(indices))]
            assert [number for number, _ in found] == list(indices)
            assert np.allclose([seconds for _, seconds in found], [i / 10 for i in indices], atol=CLOCK)


@pytest.mark.parametrize("codec", ["h264", "h264-mkv", "hevc-open", "vp9", "av1", "gif"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_times_are_those_of_the_file_when_the_rate_varies(backend, codec):
    if (backend, codec) in UNREADABLE:
        pytest.skip(f"{backend} does not read {codec}")
    data = write_clip(numbered(len(VARIABLE)), codec, times=VARIABLE)
    with open_video(data, backend, DecodeConfig(video_fallback=False)) as reader:
        found = list(reader.read(range(len(VARIABLE))))
        assert np.allclose([seconds for _, seconds in found], VARIABLE, atol=CLOCK)
        assert [number_in(frame) for frame, _ in found] == list(range(len(VARIABLE)))
        assert reader.fps == pytest.approx((len(VARIABLE) - 1) / VARIABLE[-1], rel=1e-3)


@pytest.mark.parametrize("rotation", [90, -90, 180])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_turned_phone_video_stands_upright(backend, rotation):
    frames = numbered(6)
    with open_video(write_clip(frames, rotation=rotation), backend) as reader:
        frame, _ = next(iter(reader.read([5])))
    expected = np.rot90(frames[5], rotation // 90)
    assert frame.shape == expected.shape

    def distance(other):
        return np.abs(frame.astype(int) - other).mean()

    assert distance(expected) < 6  # H.264 at its default quality
    assert all(distance(other) > 2 * distance(expected) for other in (expected[::-1], expected[:, ::-1]))


@pytest.mark.parametrize(
    ("name", "mean"),
    [
        ("bigbuckbunny.mp4", 0.5),
        ("tc_nasa_13013.mp4", 0.5),
        # 10 bits: FFmpeg 4 (decord) and later ones upsample chroma
        # differently; the neighbouring frame differs by 7
        ("tc_h264_10bits.mp4", 4.0),
        ("tc_h265_10bits.mp4", 4.0),
    ],
)
def test_decord_and_pyav_agree_on_real_videos(name, mean):
    path = SHARED / "data" / "video" / name
    if problem("decord") is not None:
        pytest.skip(f"decord: {problem('decord')}")
    if not path.exists():
        pytest.skip("no shared videos here")
    read = {}
    for each in ("decord", "pyav"):
        with open_video(path, each) as reader:
            read[each] = (reader.num_frames, reader.fps, list(reader.read(range(3, reader.num_frames, 29))))
    ours, theirs = read["decord"], read["pyav"]
    assert ours[0] == theirs[0] and ours[1] == pytest.approx(theirs[1], rel=1e-3)
    for (frame, seconds), (other, when) in zip(ours[2], theirs[2], strict=True):
        assert seconds == pytest.approx(when, abs=CLOCK)
        assert np.abs(frame.astype(int) - other).mean() <= mean


def test_pillow_and_pyav_agree_on_a_gif():
    from earlyfusion.data.video.readers import PillowReader, PyavReader

    data = write_clip(numbered(12), "gif", times=VARIABLE)
    readers = [PillowReader(data, DecodeConfig(), "gif"), PyavReader(data, DecodeConfig(), "gif")]
    one, two = (list(reader.read(range(12))) for reader in readers)
    for (frame, seconds), (other, when) in zip(one, two, strict=True):
        assert seconds == pytest.approx(when, abs=0.01)  # GIF counts hundredths
        assert np.array_equal(frame, other)


def test_decord_without_pyav_beside_it_decodes_frame_after_frame(monkeypatch):
    if problem("decord") is not None:
        pytest.skip(f"decord: {problem('decord')}")
    monkeypatch.setattr(
        "earlyfusion.data.video.readers.problem", lambda name: "not installed" if name == "pyav" else None
    )
    data = write_clip(numbered(40), "hevc-open")
    with open_video(data, "decord") as reader:
        assert reader.sequential and reader.size == (96, 64)
        for indices in ([1, 8, 15, 22, 29, 36], [13], [39]):
            assert [number_in(frame) for frame, _ in reader.read(indices)] == indices


def test_seeking_of_decord_is_really_off_in_open_groups():
    """The reason for `sequential`; when this fails, decord has been mended and the detour can go."""
    decord = pytest.importorskip("decord")
    import io

    reader = decord.VideoReader(io.BytesIO(write_clip(numbered(100), "mpeg4-open")), num_threads=1)
    found = [number_in(frame) for frame in reader.get_batch([0, 30, 60, 90]).asnumpy()]
    assert found != [0, 30, 60, 90]


def test_a_decord_reader_refuses_to_cross_a_fork():
    if problem("decord") is not None:
        pytest.skip(f"decord: {problem('decord')}")
    with open_video(write_clip(numbered(6)), "decord") as reader:
        reader._process += 1  # as a child process would see it
        with pytest.raises(DataError, match="inside the worker"):
            next(iter(reader.read([0])))


def _numbers(data, backend, queue):
    with open_video(data, backend) as reader:
        queue.put([number_in(frame) for frame, _ in reader.read([0, 3, 5])])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forked_worker_decodes_after_its_parent_did(backend):
    data = write_clip(numbered(6))
    with open_video(data, backend) as reader:
        list(reader.read([0, 5]))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_numbers, args=(data, backend, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        assert [queue.get(timeout=30) for _ in workers] == [[0, 3, 5]] * 2
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


@pytest.mark.parametrize("backend", BACKENDS)
def test_readers_leave_no_files_and_no_threads_behind(backend, tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(write_clip(numbered(12)))

    def held():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for _ in range(3):
        with open_video(path, backend) as reader:
            list(reader.read([0, 6]))
    before = held()
    for _ in range(20):
        with open_video(path, backend) as reader:
            list(reader.read([0, 6]))
    assert held() == before


def test_a_backend_that_is_not_installed_names_the_extra(monkeypatch):
    monkeypatch.setattr(
        "earlyfusion.data.video.read.problem", lambda name: f"{name} is not installed; pip install X"
    )
    for name in ("decord", "pyav", None):
        with (
            pytest.raises(DataError, match=r"is not installed; pip install X"),
            open_video(write_clip(numbered(1)), name),
        ):
            pass


def test_problem_tells_what_is_missing_and_how_to_get_it(monkeypatch):
    import importlib

    real = importlib.import_module

    def missing(name):
        if name == "decord":
            raise ModuleNotFoundError("No module named 'decord'", name="decord")
        if name == "av":
            raise RuntimeError("Could not load libav\nmore lines")
        return real(name)

    monkeypatch.setattr("earlyfusion.data.video.readers.importlib.import_module", missing)
    problem.cache_clear()
    try:
        assert "pip install 'earlyfusion[video]'" in problem("decord")
        assert problem("pyav") == "av is installed but does not load (Could not load libav)"
    finally:
        problem.cache_clear()


@pytest.mark.parametrize("way", ["argument", "config", "environment"])
def test_the_backend_is_chosen_by_argument_config_or_environment(way, monkeypatch):
    data = write_clip(numbered(3))
    for name in ("decord", "pyav"):
        if problem(name) is not None:
            continue
        monkeypatch.setenv("EF_VIDEO_BACKEND", name if way == "environment" else "auto")
        decode = DecodeConfig(video_backend=name if way == "config" else "auto")
        with open_video(data, name if way == "argument" else None, decode) as reader:
            assert reader.name == name
    monkeypatch.setenv("EF_VIDEO_BACKEND", "pyaw")
    with (
        pytest.raises(DataError, match=r"unknown video backend 'pyaw'; did you mean 'pyav'"),
        open_video(data),
    ):
        pass


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_no_video_never_reaches_a_decoder(backend, monkeypatch):
    monkeypatch.setattr("earlyfusion.data.video.read.READERS", {})
    playlist = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n"
    for data, reason in (
        (playlist, "corrupt_video"),
        (b"ffconcat version 1.0\nfile /x\n", "corrupt_video"),
        (b"", "empty_file"),
    ):
        with pytest.raises(BadSample) as caught, open_video(data, backend):
            pass
        assert caught.value.reason == reason
