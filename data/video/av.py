"""PyAV: the packets of a video listed without decoding, and a reader that seeks by them.

The list is also asked before decord or torchcodec open a file: it knows the size, and where they would go
wrong.

FFmpeg never chooses the demuxer here and never opens anything: it is told the container that the first bytes
show, reads bytes that Python hands it, and may use no protocol for what a file refers to.
"""

from __future__ import annotations

import importlib
import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample
from earlyfusion.data.video.backends import average_fps, problem


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
    """The video stream FFmpeg deems best, as decord and torchcodec take it."""
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
