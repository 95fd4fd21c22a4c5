"""From a stored video to groups of frames as uint8 patches, with the real time of every frame.

Sampling (Kimi K2.5): k = max(round(n * f / native), 1) frames at indices round(linspace(0, n - 1, k)), with n
the frames of the video, native its average rate and f = min(fps, native); then up to four frames in a row are
one item. Timestamps are those of the stream (variable frame rate included), counted from its first frame.

GIF, animated WebP and PNG are always read by Pillow, everything else by decord or PyAV. `open_clip` tells the
size of a video and the time of every frame, and gives frames at rising indices. Nothing is held between the
two, so that no native reader ever crosses a fork (a decord reader would hang).

PyAV's list of the packets of a video, made without decoding, stands before decord too: decord cannot tell the
size, seeks past frames in open groups of pictures (the default of x265, and mpeg4 with B-frames), and its
FFmpeg of 2019 crashes the process on some damaged files. FFmpeg never chooses the demuxer in PyAV and never
opens anything: it is told the container that the first bytes show, reads bytes that Python hands it, and may
use no protocol for what a file refers to.
"""

import ctypes
import importlib
import io
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from earlyfusion.data.decode import Media
from earlyfusion.data.decode_config import VIDEO_BACKENDS, DecodeConfig
from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.sample import MEDIA_BYTES, VideoFile, within
from earlyfusion.kernels.errors import one_line
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import Grid, grid_of, navit_size, num_patches, prepare_clip

Stored = bytes | str | Path
Frames = Iterator[tuple[np.ndarray, float]]

CHUNK = 4
"""Frames asked of decord at once: enough to decode in one sweep, few enough to stay small."""
SHORTEST_MS, DEFAULT_MS = 20, 100
"""Durations in an animation: a shorter one counts as the default, as in browsers and FFmpeg."""


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
    # decord is never asked without PyAV beside it, which lists the packets first.
    module = "av"
    try:
        importlib.import_module(module)
        if backend == "decord":
            module = "decord"
            decord = importlib.import_module(module)
            decord.logging.set_level(decord.logging.QUIET)
    except Exception as error:  # not there, made for another CPU, a library of FFmpeg that is missing
        return f"{module} does not load ({one_line(error, 160)}); pip install 'earlyfusion[video]'"
    return None


def give_back() -> None:
    """Return the freed pages of the heap to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def within_limits(where: str, decode: DecodeConfig, **found: float) -> None:
    """Raises BadSample (video_limit) when a value is over the option of DecodeConfig that it is named by."""
    for option, value in found.items():
        # Named by the option, so that the message says what to change.
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
        listing = _listing(*opened, decode.video_max_frames)
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
def _container(video: Stored, container: str) -> Iterator[tuple[Any, Any]]:
    """The open container, closed with its file at the end, and the video stream FFmpeg deems best, as decord
    takes it."""
    av = importlib.import_module("av")
    # A path is opened here: FFmpeg would take "concat:a" for an order.
    with io.BytesIO(video) if isinstance(video, bytes) else open(video, "rb") as file:
        options = {"protocol_whitelist": "none"}
        with av.open(file, format=container, container_options=options) as opened:
            # A file may hold a cover picture as a second stream.
            stream = opened.streams.best("video")
            if stream is None:
                raise ValueError("no video stream in it")
            stream.codec_context.thread_count = 1  # workers are parallel already
            yield opened, stream


def _listing(container: Any, stream: Any, limit: int) -> Listing:
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
            opened, stream = held.enter_context(_container(video, container))
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
    # Phones store a picture as the sensor sees it, and the turn beside it.
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
    # From the header, before anything is painted.
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


_HEAD = 512
_ATOMS = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot")
_STARTS = {
    "flv": re.compile(rb"FLV\x01[\x01\x04\x05]\0\0\0\x09\0\0\0\0[\x08\x09\x12]"),
    "ogg": re.compile(rb"OggS\0\x02\0{8}"),
    "asf": re.compile(re.escape(bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c"))),
    "mpeg": re.compile(rb"\0\0\x01\xba(?:[\x44-\x7f]|[\x21\x23\x25\x27\x29\x2b\x2d\x2f])", re.DOTALL),
}


def container_of(head: bytes) -> str | None:
    """The container that a file with these first bytes (512 are enough) is, or None.

    A file of no known container never reaches a native decoder: FFmpeg takes text for playlists and session
    descriptions, and follows them to other files and hosts. A few bytes in front of such a text are not
    enough: what stands in the first 16 must be what the container's own writers put there, and PyAV is told
    which demuxer to use.
    """
    # By what stands at fixed places, never by the name of the file.
    if head[4:8] in _ATOMS:
        return "mp4" if _is_mp4(head) else None
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska" if _ebml_header(head) is not None else None
    if head[:4] == b"RIFF":
        if head[8:16] == b"AVI LIST":
            return "avi"
        return "webp" if head[8:15] == b"WEBPVP8" else None
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    if head[:16] == b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR":
        return "png"
    if head[:1] == head[188:189] == head[376:377] == b"\x47":
        return "mpegts"
    return next((name for name, pattern in _STARTS.items() if pattern.match(head)), None)


def _is_mp4(head: bytes) -> bool:
    """Whether the first box has a size that it can have; `ftyp` names brands, and JPEG 2000's are no
    videos."""
    size = int.from_bytes(head[:4], "big")
    if head[4:8] != b"ftyp":
        return size == 1 or size >= 8 or (size == 0 and head[4:8] == b"mdat")
    return 16 <= size <= 4096 and size % 4 == 0 and head[8:12] not in (b"jp2 ", b"jpx ", b"jpm ", b"mjp2")


def _ebml_header(head: bytes) -> bytes | None:
    """The body of the header element that a Matroska or WebM file begins with (RFC 8794), if it names its
    document type."""
    if len(head) < 5 or not head[4]:
        return None
    width = 9 - head[4].bit_length()  # bytes of the length: leading zeros of the first
    size = int.from_bytes(head[4 : 4 + width], "big") & ((1 << 7 * width) - 1)
    body = head[4 + width : 4 + width + size]
    known = re.search(rb"\x42\x82[\x84\x88](webm|matroska)", body)
    return body if known and len(body) == size else None


def sure_of(head: bytes) -> bool:
    """Whether FFmpeg, left to itself, can take a file with this beginning for nothing but its container.

    decord cannot be told the demuxer. FFmpeg's own probes give these beginnings more points
    than a session description anywhere in the file can get (libavformat: mov_probe, matroska_probe,
    avi_probe, asf_probe, sdp_probe).
    """
    container = container_of(head)
    if container == "mp4":
        return head[4:8] in (b"ftyp", b"moov", b"mdat") and head[:4] > b"\0\0\0\7"
    return container in ("matroska", "avi", "asf")


def backend_of(asked: str) -> str:
    """The backend to use: `asked`, or for "auto" the first installed.

    Raises DataError for one that is not installed, naming the extra.
    """
    # decord is the faster one where it can read a file.
    if asked == "auto":
        asked = next((name for name in VIDEO_BACKENDS if problem(name) is None), "pyav")
    missing = problem(asked)
    if missing is not None:
        raise DataError(f"video backend {asked!r}: {missing}")
    return asked


def sample_indices(
    count: int, native_fps: float, fps: float = 2.0, max_frames: int | None = None
) -> list[int]:
    """Which of `count` frames are taken (see the head of this file); at most `max_frames`, evenly spread."""
    # A clip shorter than the distance of two frames still gives one.
    wanted = max(round(count * min(fps, native_fps) / native_fps), 1)
    wanted = min(wanted, count, max_frames or wanted)
    return [int(index) for index in np.linspace(0, count - 1, wanted).round()]


def _head(video: Stored, where: str) -> bytes:
    """The first bytes of a file that is there, not empty and not too large; raises BadSample."""
    try:
        with io.BytesIO(video) if isinstance(video, bytes) else open(video, "rb") as file:
            head, size = file.read(_HEAD), file.seek(0, os.SEEK_END)
    except FileNotFoundError:
        raise BadSample(f"{where}: no such file; check the path", "missing_member") from None
    except OSError as error:
        raise BadSample(f"{where}: cannot be read ({error.strerror})", "unreadable") from None
    if size == 0:
        raise BadSample(f"{where}: empty file", "empty_file")
    within(size, MEDIA_BYTES, where)
    return head


def decode_video(video: VideoFile, cfg: VisionConfig, decode: DecodeConfig | None = None) -> Media:
    """The sampled frames of a video, in items of up to `cfg.pos_emb_time` frames.

    What decord cannot read is tried once more with PyAV. Raises BadSample: missing_member, unreadable,
    empty_file, too_large, corrupt_video, video_limit; and DataError (see backend_of).
    """
    decode = decode or DecodeConfig()
    if isinstance(video.video, bytes):
        where = f"{video.suffix.lstrip('.')} video of {len(video.video)} bytes".strip()
    else:
        where = f"video {video.video}"
    head = _head(video.video, where)
    container = container_of(head)
    if container is None:
        raise BadSample(
            f"{where}: not a video this reads (mp4, mov, mkv, webm, avi, flv, ogg, wmv, mpeg, ts, gif, webp)",
            "corrupt_video",
        )
    if container in ("gif", "webp", "png"):
        backends = ["pillow"]
    else:
        backends = [backend_of(video.backend or decode.video_backend)]
        # FFmpeg in decord chooses the demuxer itself: it gets only what it cannot take for something else.
        if backends == ["decord"]:
            backends = ["decord", "pyav"] if sure_of(head) else ["pyav"]

    failures = []
    for name in backends:
        try:
            return _sampled(open_clip(video.video, name, container, where, decode), video, where, cfg, decode)
        except (DataError, MemoryError):
            raise
        except Exception as error:  # whatever a native decoder raises for a damaged file
            failures.append(f"{name} cannot read it ({one_line(error, 200) or type(error).__name__})")
    raise BadSample(f"{where}: {'; '.join(failures)}", "corrupt_video")


def _sampled(clip: Clip, video: VideoFile, where: str, cfg: VisionConfig, decode: DecodeConfig) -> Media:
    """The frames of a clip that is within the limits, as patches."""
    count, (width, height) = len(clip.seconds), clip.size
    within_limits(
        where,
        decode,
        video_max_frames=count,
        video_max_seconds=count / clip.fps,
        video_max_pixels=width * height,
    )
    indices = sample_indices(count, clip.fps, video.fps, video.max_frames)
    size = navit_size(width, height, cfg, patch_limit=cfg.in_patch_limit_each_frame)
    within_limits(where, decode, video_max_patches=num_patches(grid_of(size, cfg, len(indices))))

    # A group of frames at a time: a decoded hour would not fit in memory.
    items: list[tuple[torch.Tensor, Grid]] = []
    timestamps: list[float] = []
    group: list[np.ndarray] = []
    for frame, seconds in clip.read(indices):
        group.append(frame)
        timestamps.append(seconds)
        if len(group) == cfg.pos_emb_time or len(timestamps) == len(indices):
            items.append(prepare_clip(np.stack(group), cfg, exact=not decode.fast))
            height, width = frame.shape[:2]
            group = []
    if len(timestamps) != len(indices):
        raise ValueError(f"{len(timestamps)} of {len(indices)} frames could be decoded")
    # A rotated video has other sides than its file says.
    size = navit_size(width, height, cfg, patch_limit=cfg.in_patch_limit_each_frame)
    return Media(items, (width, height), (size.new_w, size.new_h), timestamps)
