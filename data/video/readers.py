"""Readers behind one interface: decord, torchcodec, PyAV (data/video/av.py), and Pillow for animated
pictures.

Each takes bytes or a path, tells how many frames there are and how fast they come, and gives frames at rising
indices with their times. They hold native memory and belong to the process that opened them: open, read,
close.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.video.av import PyavReader, probe
from earlyfusion.data.video.backends import average_fps

CHUNK = 4
"""Frames asked of decord and torchcodec at once: enough to decode in one sweep, few enough to stay small."""

TRIM_EVERY = 16
"""Videos of torchcodec after which freed memory goes back to the system. Each leaves a few small blocks
behind (about 0.8 kB), which keep the room of freed frames around them from being joined: without this a
worker grows by 45 kB a video."""


def give_back() -> None:
    """Return the freed pages of the heap to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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


class TorchcodecReader:
    """torchcodec, scanning the file for exact indices."""

    name = "torchcodec"
    closed = 0
    """Readers of this process that were closed."""

    def __init__(self, video: bytes | str | Path, decode: DecodeConfig, container: str) -> None:
        decoders = importlib.import_module("torchcodec.decoders")
        listing = probe(video, decode, container)
        if listing is not None and not listing.stamped:
            raise ValueError("frames without times of their own")
        self._decoder: Any = decoders.VideoDecoder(
            video if isinstance(video, bytes) else os.path.abspath(video),
            dimension_order="NHWC",
            num_ffmpeg_threads=decode.video_threads,
            seek_mode="exact",
        )
        about = self._decoder.metadata
        self.num_frames, self.size = int(about.num_frames), (int(about.width), int(about.height))
        self._start = float(about.begin_stream_seconds)
        seconds = float(about.end_stream_seconds) - self._start
        self.fps = self.num_frames / seconds if seconds > 0 else 1.0
        if listing is not None:
            self.fps = average_fps([when * listing.time_base for when in listing.pts])

    def read(self, indices: Sequence[int]) -> Iterator[tuple[np.ndarray, float]]:
        for start in range(0, len(indices), CHUNK):
            batch = self._decoder.get_frames_at(indices=list(indices[start : start + CHUNK]))
            for frame, seconds in zip(batch.data, batch.pts_seconds):
                yield frame.numpy(), float(seconds) - self._start

    def close(self) -> None:
        self._decoder = None
        TorchcodecReader.closed += 1
        if TorchcodecReader.closed % TRIM_EVERY == 0:
            give_back()


class PillowReader:
    """GIF, animated WebP and PNG; a still picture is a video of one frame. Transparency is put on white."""

    name = "pillow"
    SHORTEST_MS, DEFAULT_MS = 20, 100
    """A shorter duration counts as the default, as in browsers and FFmpeg."""

    def __init__(self, video: bytes | str | Path, decode: DecodeConfig, container: str) -> None:
        from PIL import Image

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
                from PIL import Image

                frame = frame.convert("RGBA")
                frame = Image.alpha_composite(Image.new("RGBA", frame.size, (255, 255, 255, 255)), frame)
            yield np.array(frame.convert("RGB")), self._seconds[index]

    def close(self) -> None:
        self._image.close()


READERS: dict[str, Any] = {
    "decord": DecordReader,
    "pyav": PyavReader,
    "torchcodec": TorchcodecReader,
    "pillow": PillowReader,
}
