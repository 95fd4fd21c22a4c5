"""From a stored video to groups of frames as uint8 patches, with the real time of every frame.

Sampling (Kimi K2.5): k = max(round(n * f / native), 1) frames at indices round(linspace(0, n - 1, k)), with n
the frames of the video, native its average rate and f = min(fps, native); then up to four frames in a row are
one item. Timestamps are those of the stream (variable frame rate included), counted from its first frame.

Readers are opened inside the worker (a decord reader that crosses a fork hangs), use `video_threads` threads,
hand over one group of frames at a time and are closed after use. GIF, animated WebP and PNG are always read
by Pillow.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from earlyfusion.data.decode import Media
from earlyfusion.data.decode_config import VIDEO_BACKENDS, DecodeConfig
from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.sample import VideoFile
from earlyfusion.data.video.readers import READERS, Reader, problem
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import Grid, grid_of, navit_size, num_patches, prepare_clip

Stored = bytes | str | Path
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
    which demuxer to use (data/video/readers.py).
    """
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


def backend_of(asked: str | None, decode: DecodeConfig) -> str:
    """The backend to use: `asked`, else the configuration's, else $EF_VIDEO_BACKEND, else the first
    installed.

    Raises DataError for an unknown one, and for one that is not installed, naming the extra.
    """
    name = asked or (decode.video_backend if decode.video_backend != "auto" else None)
    name = name or os.environ.get("EF_VIDEO_BACKEND") or "auto"
    if name == "auto":
        name = next((each for each in VIDEO_BACKENDS if problem(each) is None), "decord")
    if name not in VIDEO_BACKENDS:
        raise DataError(f"unknown video backend {name!r}; {did_you_mean(name, VIDEO_BACKENDS)}")
    missing = problem(name)
    if missing is not None:
        raise DataError(f"video backend {name!r}: {missing}")
    return name


def sample_indices(
    count: int, native_fps: float, fps: float = 2.0, max_frames: int | None = None
) -> list[int]:
    """Which of `count` frames are taken (see the head of this file); at most `max_frames`, evenly spread."""
    wanted = max(round(count * min(fps, native_fps) / native_fps), 1) if native_fps > 0 else 1
    wanted = min(wanted, count, max_frames or wanted)
    return [int(index) for index in np.linspace(0, count - 1, wanted).round()]


def describe(video: Stored, suffix: str = "") -> str:
    """ "video of 1234 bytes", "video /path": how messages name a video."""
    return (
        f"{suffix.lstrip('.') or ''} video of {len(video)} bytes".strip()
        if isinstance(video, bytes)
        else f"video {video}"
    )


def _checked(video: Stored, where: str, decode: DecodeConfig) -> tuple[str, bytes]:
    """(container, first bytes) of a file that is there, not empty and not too large; raises BadSample."""
    try:
        size = len(video) if isinstance(video, bytes) else os.path.getsize(video)
        if isinstance(video, bytes):
            head = video[:_HEAD]
        else:
            with open(video, "rb") as file:
                head = file.read(_HEAD)
    except FileNotFoundError:
        raise BadSample(f"{where}: no such file; check the path", "missing_member") from None
    except OSError as error:
        raise BadSample(f"{where}: cannot be read ({error.strerror})", "unreadable") from None
    if size == 0:
        raise BadSample(f"{where}: empty file", "empty_file")
    if size > decode.video_max_mb * 2**20:
        raise BadSample(
            f"{where}: {size / 2**20:.0f} MiB, more than data.decode.video_max_mb = {decode.video_max_mb:g}",
            "video_limit",
        )
    container = container_of(head)
    if container is None:
        raise BadSample(
            f"{where}: not a video this reads (mp4, mov, mkv, webm, avi, flv, ogg, wmv, mpeg, ts, gif, webp)",
            "corrupt_video",
        )
    return container, head


@contextmanager
def open_video(
    video: Stored, backend: str | None = None, decode: DecodeConfig | None = None, suffix: str = ""
) -> Iterator[Reader]:
    """A reader of one backend, closed at the end: number of frames, average rate, size, frames by index.

    Raises BadSample (missing_member, unreadable, empty_file, corrupt_video, video_limit), and DataError for a
    backend that is not there. No fallback: see `decode_video`.
    """
    decode = decode or DecodeConfig()
    where = describe(video, suffix)
    container, head = _checked(video, where, decode)
    name = "pillow" if container in ("gif", "webp", "png") else backend_of(backend, decode)
    if name == "decord" and not sure_of(head):
        raise BadSample(
            f"{where}: {name} cannot read it (it cannot be told that this is {container})", "corrupt_video"
        )
    reader = None
    try:
        with _as_bad_sample(where, name):
            reader = READERS[name](video, decode, container)
        yield reader
    finally:
        if reader is not None:
            with suppress(Exception):
                reader.close()


@contextmanager
def _as_bad_sample(where: str, backend: str) -> Iterator[None]:
    """Whatever a native decoder raises for a damaged file is one reason to skip it."""
    try:
        yield
    except (DataError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadSample(f"{where}: {backend} cannot read it ({said})", "corrupt_video") from None


def decode_video(video: VideoFile, cfg: VisionConfig, decode: DecodeConfig | None = None) -> Media:
    """The sampled frames of a video, in items of up to `cfg.pos_emb_time` frames.

    What the backend cannot read is tried once more with PyAV when `decode.video_fallback` says so and it is
    installed. Raises BadSample: missing_member, unreadable, empty_file, corrupt_video, video_limit; and
    DataError (see backend_of).
    """
    decode = decode or DecodeConfig()
    try:
        return _decode_with(video, video.backend, cfg, decode)
    except BadSample as error:
        used = backend_of(video.backend, decode) if error.reason == "corrupt_video" else "pyav"
        if (
            used == "pyav"
            or not decode.video_fallback
            or " pillow cannot" in str(error)
            or problem("pyav") is not None
        ):
            raise
        try:
            return _decode_with(video, "pyav", cfg, decode)
        except BadSample as second:
            if second.reason != "corrupt_video":
                raise
            raise BadSample(
                f"{error}; pyav: {str(second).rpartition('(')[2].rstrip(')')}", "corrupt_video"
            ) from None


def _decode_with(video: VideoFile, backend: str | None, cfg: VisionConfig, decode: DecodeConfig) -> Media:
    where = describe(video.video, video.suffix)
    with open_video(video.video, backend, decode, video.suffix) as reader, _as_bad_sample(where, reader.name):
        check_limits(reader, where, decode)
        indices = sample_indices(reader.num_frames, reader.fps, video.fps, video.max_frames)
        size = navit_size(*reader.size, cfg, patch_limit=cfg.in_patch_limit_each_frame)
        patches = num_patches(grid_of(size, cfg, len(indices)))
        if patches > decode.video_max_patches:
            raise BadSample(
                f"{where}: {len(indices)} frames give {patches} patches, more than"
                f" data.decode.video_max_patches = {decode.video_max_patches}; set max_frames, or lower fps"
                " or vision.in_patch_limit_each_frame",
                "video_limit",
            )
        return _patches_of(reader, indices, cfg, decode)


def check_limits(reader: Reader, where: str, decode: DecodeConfig) -> None:
    """Raises BadSample (video_limit) when frames, seconds or pixels of a frame are over a limit."""
    width, height = reader.size
    found = (
        (reader.num_frames, decode.video_max_frames, "frames", "video_max_frames"),
        (
            reader.num_frames / reader.fps if reader.fps > 0 else 0.0,
            decode.video_max_seconds,
            "s",
            "video_max_seconds",
        ),
        (width * height, decode.video_max_pixels, "pixels in a frame", "video_max_pixels"),
    )
    for value, limit, unit, option in found:
        if value > limit:
            raise BadSample(
                f"{where}: {value:.0f} {unit}, more than data.decode.{option} = {limit:g}", "video_limit"
            )


def _patches_of(reader: Reader, indices: Sequence[int], cfg: VisionConfig, decode: DecodeConfig) -> Media:
    items: list[tuple[torch.Tensor, Grid]] = []
    timestamps: list[float] = []
    group: list[np.ndarray] = []
    for frame, seconds in reader.read(indices):
        group.append(frame)
        timestamps.append(seconds)
        if len(group) == cfg.pos_emb_time or len(timestamps) == len(indices):
            items.append(
                prepare_clip(
                    group[0][None] if len(group) == 1 else np.stack(group), cfg, exact=not decode.fast
                )
            )
            height, width = group[0].shape[:2]
            group = []
    if len(timestamps) != len(indices):
        raise ValueError(f"{len(timestamps)} of {len(indices)} frames could be decoded")
    size = navit_size(width, height, cfg, patch_limit=cfg.in_patch_limit_each_frame)
    return Media(items, (width, height), (size.new_w, size.new_h), timestamps)
