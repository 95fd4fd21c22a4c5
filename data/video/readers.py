"""Frames of videos by decord, PyAV, and Pillow for animated pictures.

`open_clip` tells the size of a video and the time of every frame, and gives frames at rising indices. Nothing
is held between the two, so that no native reader ever crosses a fork (a decord reader would hang).

PyAV's list of the packets of a video, made without decoding, stands before decord too: decord cannot tell the
size, seeks past frames in open groups of pictures (the default of x265, and mpeg4 with B-frames), and its
FFmpeg of 2019 crashes the process on some damaged files. FFmpeg never chooses the demuxer in PyAV and never
opens anything: it is told the container that the first bytes show, reads bytes that Python hands it, and may
use no protocol for what a file refers to.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample

Stored = bytes | str | Path
Frames = Iterator[tuple[np.ndarray, float]]

CHUNK = 4
"""Frames asked of decord at once: enough to decode in one sweep, few enough to stay small."""
SHORTEST_MS, DEFAULT_MS = 20, 100
"""Durations in an animation: a shorter one counts as the default, as in browsers and FFmpeg."""
DEMUXERS = {"mp4": "mov"}
"""Container (read.container_of) -> FFmpeg's name of its demuxer, where it is another."""


@dataclass(frozen=True)
class Clip:
    """A video of which no frame is decoded yet."""

    size: tuple[int, int]
    """(width, height) as stored; a rotated video gives frames the other way round"""
    seconds: Sequence[float]
    """Time of every frame from the first"""
    read: Callable[[Sequence[int]], Frames]
    """Rising indices -> (uint8 [height, width, 3] upright, seconds from the first frame)"""

    @property
    def fps(self) -> float:
        """Average rate: (n - 1) / seconds between the first and the last frame; 1 for a single frame.

        For a constant rate it is that rate. The duration of the last frame is left out on purpose: readers
        disagree on it.
        """
        return (len(self.seconds) - 1) / self.seconds[-1] if self.seconds[-1] > 0 else 1.0


@cache
def problem(backend: str) -> str | None:
    """Why a backend cannot be used here; None when it can."""
    for module in ("av", "decord")[: 1 + (backend == "decord")]:
        try:
            loaded = importlib.import_module(module)
        except Exception as error:  # not there, made for another CPU, a library of FFmpeg that is missing
            said = str(error).strip().splitlines()[0][:160]
            return f"{module} does not load ({said}); pip install 'earlyfusion[video]'"
        if module == "decord":
            loaded.logging.set_level(loaded.logging.QUIET)
    return None


def give_back() -> None:
    """Return the freed pages of the heap to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def within_limits(where: str, decode: DecodeConfig, **found: float) -> None:
    """Raises BadSample (video_limit) when a value is over the option of DecodeConfig that it is named by."""
    for option, value in found.items():
        limit, unit = getattr(decode, option), option.rpartition("_")[2]
        if value > limit:
            raise BadSample(
                f"{where}: {value:.0f} {unit}, more than data.decode.{option} = {limit:g}; set max_frames, or"
                " lower fps or vision.in_patch_limit_each_frame",
                "video_limit",
            )


def open_clip(video: Stored, backend: str, container: str, where: str, decode: DecodeConfig) -> Clip:
    """What `backend` ("decord", "pyav", "pillow") makes of a video; whatever it raises but BadSample
    (video_limit) is a damaged file."""
    if backend == "pillow":
        return _open_animation(video, where, decode)
    with _container(video, container) as opened:
        listing = _listing(opened, decode.video_max_frames)
    if min(listing.size) < 1:
        raise ValueError(f"frames of {listing.size[0]} x {listing.size[1]} pixels")

    first, base = listing.pts[0], listing.time_base
    seconds = [(when - first) * base for when in listing.pts]
    if backend == "pyav":
        return Clip(listing.size, seconds, partial(_pyav_frames, video, container, listing))
    if not listing.stamped:
        raise ValueError("frames without times of their own")
    if not listing.closed:
        raise ValueError("open groups of pictures: its seeking would be off")
    return Clip(listing.size, seconds, partial(_decord_frames, video, seconds))


# ---- PyAV


@dataclass(slots=True)
class Listing:
    """The packets of a video stream, listed without decoding."""

    size: tuple[int, int]
    time_base: float
    pts: list[int]
    """Presentation time of every frame, rising, in units of time_base"""
    early: dict[int, int]
    """Key frame, which decoding can start from -> the earlier of its decoding and presentation times: where
    to seek"""
    stamped: bool
    """Every packet tells its presentation time (AVI has none)"""
    closed: bool
    """No frame after a key frame in the file is shown before it"""


@contextmanager
def _container(video: Stored, container: str) -> Iterator[Any]:
    """The open container, closed with its file at the end."""
    av = importlib.import_module("av")
    # A path is opened here: FFmpeg would take "concat:a" for an order.
    with io.BytesIO(video) if isinstance(video, bytes) else open(video, "rb") as file:
        options = {"protocol_whitelist": "none"}
        demuxer = DEMUXERS.get(container, container)
        with av.open(file, format=demuxer, container_options=options) as opened:
            yield opened


def _stream(container: Any) -> Any:
    """The video stream FFmpeg deems best, as decord takes it."""
    stream = container.streams.best("video")
    if stream is None:
        raise ValueError("no video stream in it")
    return stream


def _listing(container: Any, limit: int) -> Listing:
    stream = _stream(container)
    pts: list[int] = []
    early: dict[int, int] = {}
    # AVI stores no presentation times, and what FFmpeg guesses is wrong with B-frames.
    stamped, closed, latest = container.format.name != "avi", True, None
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
    context = stream.codec_context
    size = (context.width, context.height)
    stamped = stamped and len(set(pts)) == len(pts)
    return Listing(size, float(stream.time_base), sorted(pts), early, stamped, closed)


def _pyav_frames(video: Stored, container: str, listing: Listing, indices: Sequence[int]) -> Frames:
    """Frames decoded from the nearest key frame on."""
    pts = listing.pts
    keys = sorted(listing.early) or pts[:1]
    with ExitStack() as held:

        def start() -> tuple[Any, Any, Iterator[Any]]:
            held.close()
            opened = held.enter_context(_container(video, container))
            stream = _stream(opened)
            stream.codec_context.thread_count = 1  # workers are parallel already
            return opened, stream, opened.decode(stream)

        opened, stream, frames = start()
        if not listing.stamped:
            wanted = set(indices)
            for number, frame in enumerate(frames):
                if number in wanted:
                    yield _upright(frame), (pts[number] - pts[0]) * listing.time_base
            return

        frame, now = None, pts[0] - 1
        for target in (pts[index] for index in indices):
            key = keys[max(0, bisect_right(keys, target) - 1)]
            if key > now and key != keys[0]:
                opened.seek(listing.early[key], stream=stream, backward=True)
                frames = opened.decode(stream)
                frame = next(frames, None)
                # The container's own index is wrong: from the beginning then.
                if frame is None or frame.pts > target:
                    opened, stream, frames = start()
                    frame = None
            while frame is None or frame.pts < target:
                frame = next(frames, None)
                if frame is None:
                    raise ValueError(f"the frame at {target} is not in the stream")
            now = frame.pts
            yield _upright(frame), (now - pts[0]) * listing.time_base


def _upright(frame: Any) -> np.ndarray:
    if frame.is_corrupt:
        raise ValueError("a frame is damaged")
    pixels: np.ndarray = frame.to_ndarray(format="rgb24")
    turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


# ---- decord


def _decord_frames(video: Stored, seconds: Sequence[float], indices: Sequence[int]) -> Frames:
    decord = importlib.import_module("decord")
    source = io.BytesIO(video) if isinstance(video, bytes) else os.path.abspath(video)
    # A frame that had to be guessed is an error (fault_tol), not a repeated picture.
    reader = decord.VideoReader(source, ctx=decord.cpu(0), num_threads=1, fault_tol=0.0001)
    if len(reader) != len(seconds):
        raise ValueError(f"{len(reader)} frames where there are {len(seconds)}")
    for start in range(0, len(indices), CHUNK):
        part = list(indices[start : start + CHUNK])
        frames = reader.get_batch(part)
        # Whatever bridge the program has set: numpy.
        pixels = frames.asnumpy() if hasattr(frames, "asnumpy") else np.asarray(frames)
        for index, frame in zip(part, pixels):
            yield frame, seconds[index]


# ---- Pillow


def _open_animation(video: Stored, where: str, decode: DecodeConfig) -> Clip:
    """GIF, animated WebP and PNG; a still picture is a video of one frame."""
    data = video if isinstance(video, bytes) else Path(video).read_bytes()
    image: Any = Image.open(io.BytesIO(data), formats=("GIF", "WEBP", "PNG"))
    pixels = image.size[0] * image.size[1]
    within_limits(where, decode, video_max_pixels=pixels)
    frames = int(getattr(image, "n_frames", 1))
    # Durations come only with the frames, and every frame has to be painted on the one before it.
    within_limits(where, decode, video_max_frames=frames, animation_max_pixels=frames * pixels)

    def show(index: int) -> None:
        image.seek(index)
        if image.size[0] * image.size[1] > decode.video_max_pixels:  # a later frame of a GIF may be larger
            raise ValueError(f"frame {index} is larger than the picture")
        image.load()

    seconds, now = [], 0.0
    for index in range(frames):
        show(index)
        seconds.append(now / 1000)
        shown = image.info.get("duration", 0) or 0
        now += shown if shown >= SHORTEST_MS else DEFAULT_MS

    def read(indices: Sequence[int]) -> Frames:
        for index in indices:
            show(index)
            frame = image
            # Transparency is put on white.
            if frame.has_transparency_data:
                frame = frame.convert("RGBA")
                frame = Image.alpha_composite(Image.new("RGBA", frame.size, (255, 255, 255, 255)), frame)
            yield np.array(frame.convert("RGB")), seconds[index]

    return Clip(image.size, seconds, read)
