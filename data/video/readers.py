"""Readers of videos behind one interface: decord, PyAV, and Pillow for animated pictures.

Each takes bytes or a path, tells how many frames there are and how fast they come, and gives frames at rising
indices with their times. They hold native memory and belong to the process that opened them: open, read,
close.

PyAV's list of the packets of a video, made without decoding, is also asked before decord opens a file: it
knows the size, and where decord would go wrong. FFmpeg never chooses the demuxer here and never opens
anything: it is told the container that the first bytes show, reads bytes that Python hands it, and may use no
protocol for what a file refers to.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample, DataError

CHUNK = 4
"""Frames asked of decord at once: enough to decode in one sweep, few enough to stay small."""


class Reader(Protocol):
    """An open video."""

    name: str
    num_frames: int
    fps: float
    """Average rate: frames / seconds."""
    size: tuple[int, int]
    """(width, height) as stored; a rotated video gives frames the other way round"""

    def read(self, indices: Sequence[int]) -> Iterator[tuple[np.ndarray, float]]:
        """(uint8 [height, width, 3] upright, seconds from the first frame) for every index; indices must
        rise."""
        ...

    def close(self) -> None:
        """Free native memory."""
        ...


@cache
def problem(backend: str) -> str | None:
    """Why a backend cannot be used here; None when it can."""
    module = {"decord": "decord", "pyav": "av"}[backend]
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            return f"{module} is not installed; pip install 'earlyfusion[video]', or choose another backend"
        return f"{module} does not load ({error})"
    except Exception as error:  # decord on another CPU, a library of FFmpeg that is missing
        return f"{module} is installed but does not load ({str(error).strip().splitlines()[0][:160]})"
    if backend == "decord":
        loaded.logging.set_level(loaded.logging.QUIET)
    return None


def average_fps(times: Sequence[float] | np.ndarray) -> float:
    """(n - 1) / (time of the last frame - time of the first); 1 for a single frame.

    For a constant rate it is that rate. The duration of the last frame is left out on purpose: readers
    disagree on it.
    """
    seconds = float(times[-1] - times[0])
    return (len(times) - 1) / seconds if seconds > 0 else 1.0


def give_back() -> None:
    """Return the freed pages of the heap to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@dataclass(slots=True)
class Listing:
    """The packets of a video stream, listed without decoding."""

    size: tuple[int, int]
    time_base: float
    pts: list[int]
    """Presentation time of every frame, rising, in units of time_base"""
    keys: list[int]
    """Those that decoding can start from"""
    early: dict[int, int]
    """Key frame -> the earlier of its decoding and presentation times: where to seek"""
    stamped: bool
    """Every packet tells its presentation time (AVI has none)"""
    closed: bool
    """No frame after a key frame in the file is shown before it"""


def _listing(container: Any, limit: int) -> Listing:
    stream = _stream(container)
    pts: list[int] = []
    early: dict[int, int] = {}
    # AVI stores no presentation times, and what FFmpeg guesses is wrong with B-frames.
    stamped, closed = container.format.name != "avi", True
    latest = None
    for packet in container.demux(stream):
        if not packet.size or packet.is_discard:
            continue
        stamped = stamped and packet.pts is not None
        when = next((time for time in (packet.pts, packet.dts) if time is not None), len(pts))
        if packet.is_keyframe:
            latest = when
            early[when] = when if packet.dts is None else min(when, packet.dts)
        elif latest is not None and when < latest:
            closed = False
        pts.append(when)
        if len(pts) > limit:
            break
    if not pts:
        raise ValueError("no frames in its video stream")
    stamped = stamped and len(set(pts)) == len(pts)
    context = stream.codec_context
    keys = sorted(early) or pts[:1]
    size = (context.width, context.height)
    return Listing(size, float(stream.time_base), sorted(pts), keys, early, stamped, closed and stamped)


DEMUXERS = {
    "mp4": "mov",
    "matroska": "matroska",
    "avi": "avi",
    "mpegts": "mpegts",
    "flv": "flv",
    "ogg": "ogg",
    "asf": "asf",
    "mpeg": "mpeg",
    "gif": "gif",
}
"""Container (`video.container_of`) -> FFmpeg's name of its demuxer."""


@contextmanager
def _container(video: bytes | str | Path, container: str) -> Iterator[Any]:
    """The open container, closed with its file at the end. A path is opened here: FFmpeg would take
    "concat:a" for an order."""
    av = importlib.import_module("av")
    with io.BytesIO(video) if isinstance(video, bytes) else open(video, "rb") as file:
        options = {"protocol_whitelist": "none"}
        with av.open(file, format=DEMUXERS[container], container_options=options) as opened:
            yield opened


def _stream(container: Any) -> Any:
    """The video stream FFmpeg deems best, as decord takes it."""
    stream = container.streams.best("video")
    if stream is None:
        raise ValueError("no video stream in it")
    return stream


def probe(video: bytes | str | Path, decode: DecodeConfig, container: str) -> Listing | None:
    """What PyAV, where installed, tells about a file without decoding it.

    decord cannot tell the size, seeks past frames in open groups, and its FFmpeg of 2019 crashes the process
    on some damaged files: what PyAV refuses is not given to it.
    """
    if problem("pyav") is not None:
        return None
    with _container(video, container) as opened:
        listing = _listing(opened, decode.video_max_frames)
    if listing.size[0] * listing.size[1] > decode.video_max_pixels:
        raise BadSample(
            f"video frames of {listing.size[0]} x {listing.size[1]} pixels, more than"
            f" data.decode.video_max_pixels = {decode.video_max_pixels}",
            "video_limit",
        )
    if min(listing.size) < 1:
        raise ValueError(f"frames of {listing.size[0]} x {listing.size[1]} pixels")
    return listing


class PyavReader:
    """PyAV. The packets are listed once without decoding; then frames are decoded from the nearest key frame
    on."""

    name = "pyav"

    def __init__(self, video: bytes | str | Path, decode: DecodeConfig, container: str) -> None:
        self._video, self._container, self._threads = video, container, decode.video_threads
        self._open: Any = None
        self._held = ExitStack()
        with _container(video, container) as opened:
            self._list = _listing(opened, decode.video_max_frames)
        self.size, self.num_frames = self._list.size, len(self._list.pts)
        self.fps = average_fps([when * self._list.time_base for when in self._list.pts])

    def read(self, indices: Sequence[int]) -> Iterator[tuple[np.ndarray, float]]:
        first, base = self._list.pts[0], self._list.time_base
        found = self._by_time(indices) if self._list.stamped else self._by_number(indices)
        for index, frame in zip(indices, found):
            if frame.is_corrupt:
                raise ValueError(f"frame {index} of {self.num_frames} is damaged")
            when = frame.pts if self._list.stamped else self._list.pts[index]
            yield _upright(frame), (when - first) * base

    def _frames(self) -> Iterator[Any]:
        """All frames from the start, by a fresh container."""
        self.close()
        self._open = self._held.enter_context(_container(self._video, self._container))
        self._stream = _stream(self._open)
        self._stream.codec_context.thread_count = self._threads
        return iter(self._open.decode(self._stream))

    def _by_number(self, indices: Sequence[int]) -> Iterator[Any]:
        wanted = set(indices)
        return (frame for number, frame in enumerate(self._frames()) if number in wanted)

    def _by_time(self, indices: Sequence[int]) -> Iterator[Any]:
        keys, frames = self._list.keys, self._frames()
        frame, now = None, self._list.pts[0] - 1
        for index in indices:
            target = self._list.pts[index]
            key = keys[max(0, bisect_right(keys, target) - 1)]
            if key > now and key != keys[0]:
                self._open.seek(self._list.early[key], stream=self._stream, backward=True)
                frames = iter(self._open.decode(self._stream))
                frame = next(frames, None)
                if (
                    frame is None or frame.pts > target
                ):  # the container's own index is wrong: from the beginning then
                    frames, frame = self._frames(), None
            while frame is None or frame.pts < target:
                frame = next(frames, None)
                if frame is None:
                    raise ValueError(f"frame {index} of {self.num_frames} is not in the stream")
            now = frame.pts
            yield frame

    def close(self) -> None:
        self._held.close()
        self._open = None


def _upright(frame: Any) -> np.ndarray:
    pixels: np.ndarray = frame.to_ndarray(format="rgb24")
    turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


class DecordReader:
    """decord 0.6 or decord2. A frame that had to be guessed is an error, not a repeated picture.

    Where groups of pictures are open (the default of x265, and mpeg4 with B-frames), decord's seeking gives a
    neighbour of the frame that was asked for. PyAV tells, and reads such a file if `decode.video_fallback`;
    otherwise, and where there is no PyAV, every frame is decoded one after the other (`sequential`).
    """

    name = "decord"

    def __init__(self, video: bytes | str | Path, decode: DecodeConfig, container: str) -> None:
        decord = importlib.import_module("decord")
        listing = probe(video, decode, container)
        if listing is not None and not listing.stamped:  # and damaged files of this kind crash it
            raise ValueError("frames without times of their own")
        self.sequential, self._next = listing is None or not listing.closed, 0
        if listing is not None and self.sequential and decode.video_fallback:
            raise ValueError("open groups of pictures: its seeking would be off")
        handle: Any = io.BytesIO(video) if isinstance(video, bytes) else os.path.abspath(video)
        self._reader: Any = decord.VideoReader(
            handle, ctx=decord.cpu(0), num_threads=decode.video_threads, fault_tol=0.0001
        )
        self._process = os.getpid()
        self.num_frames = len(self._reader)
        times = self._reader.get_frame_timestamp(list(range(self.num_frames)))[:, 0]
        if (np.diff(times) <= 0).any():
            raise ValueError("frames without times of their own")
        self._seconds = times - times[0]
        self.fps = average_fps(times)
        if listing is not None:
            self.size = listing.size
        else:
            height, width = _array(self._reader.get_batch([0])).shape[1:3]
            self.size, self._next = (width, height), 1

    def read(self, indices: Sequence[int]) -> Iterator[tuple[np.ndarray, float]]:
        if os.getpid() != self._process:
            raise DataError(
                "a decord reader was opened before a fork and would hang; open it inside the worker"
            )
        if self._next:
            self._reader.seek(0)
            self._next = 0
        for start in range(0, len(indices), CHUNK):
            part = list(indices[start : start + CHUNK])
            for index, frame in zip(
                part, self._sweep(part) if self.sequential else _array(self._reader.get_batch(part))
            ):
                yield frame, float(self._seconds[index])

    def _sweep(self, part: Sequence[int]) -> Iterator[np.ndarray]:
        """Frame after frame: `next()` alone never seeks."""
        for index in part:
            while self._next <= index:
                frame = self._reader.next()
                self._next += 1
            yield _array(frame)

    def close(self) -> None:
        self._reader = None


def _array(frames: Any) -> np.ndarray:
    """decord's frames as numpy, whatever bridge the program has set."""
    return frames.asnumpy() if hasattr(frames, "asnumpy") else np.asarray(frames)


class PillowReader:
    """GIF, animated WebP and PNG; a still picture is a video of one frame. Transparency is put on white."""

    name = "pillow"
    SHORTEST_MS, DEFAULT_MS = 20, 100
    """A shorter duration counts as the default, as in browsers and FFmpeg."""

    def __init__(self, video: bytes | str | Path, decode: DecodeConfig, container: str) -> None:
        data = video if isinstance(video, bytes) else Path(video).read_bytes()
        self._image: Any = Image.open(io.BytesIO(data), formats=("GIF", "WEBP", "PNG"))
        self.size = self._image.size
        if self.size[0] * self.size[1] > decode.video_max_pixels:
            self.num_frames, self.fps = 1, 1.0  # enough for the caller's check of the limits
            return
        self.num_frames = int(getattr(self._image, "n_frames", 1))
        self._most = decode.video_max_pixels
        times, now = [], 0.0
        if self.num_frames > decode.video_max_frames:
            self.fps = 1.0
            return
        if self.num_frames * self.size[0] * self.size[1] > decode.animation_max_pixels:
            raise BadSample(
                f"animation of {self.num_frames} frames of {self.size[0]} x {self.size[1]} pixels, in all"
                f" more than data.decode.animation_max_pixels = {decode.animation_max_pixels}",
                "video_limit",
            )
        for index in range(self.num_frames):
            self._show(index)
            times.append(now)
            shown = self._image.info.get("duration", 0) or 0
            now += shown if shown >= self.SHORTEST_MS else self.DEFAULT_MS
        self._seconds = [time / 1000 for time in times]
        self.fps = average_fps(self._seconds)

    def _show(self, index: int) -> None:
        self._image.seek(index)
        if self._image.size[0] * self._image.size[1] > self._most:  # a later frame of a GIF may be larger
            raise ValueError(f"frame {index} is larger than the picture")
        self._image.load()

    def read(self, indices: Sequence[int]) -> Iterator[tuple[np.ndarray, float]]:
        for index in indices:
            self._show(index)
            frame = self._image
            if frame.has_transparency_data:
                frame = frame.convert("RGBA")
                frame = Image.alpha_composite(Image.new("RGBA", frame.size, (255, 255, 255, 255)), frame)
            yield np.array(frame.convert("RGB")), self._seconds[index]

    def close(self) -> None:
        self._image.close()


READERS: dict[str, Any] = {"decord": DecordReader, "pyav": PyavReader, "pillow": PillowReader}
