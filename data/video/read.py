"""From a stored video to groups of frames as uint8 patches, with the real time of every frame.

Sampling (Kimi K2.5): k = max(round(n * f / native), 1) frames at indices round(linspace(0, n - 1, k)), with n
the frames of the video, native its average rate and f = min(fps, native); then up to four frames in a row are
one item. Timestamps are those of the stream (variable frame rate included), counted from its first frame.

GIF, animated WebP and PNG are always read by Pillow, everything else by decord or PyAV (readers.py).
"""

from __future__ import annotations

import os
import re

import numpy as np
import torch

from earlyfusion.data.decode import Media
from earlyfusion.data.decode_config import VIDEO_BACKENDS, DecodeConfig
from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.sample import MEDIA_BYTES, VideoFile, within
from earlyfusion.data.video.readers import Clip, Stored, open_clip, problem, within_limits
from earlyfusion.kernels.errors import did_you_mean, one_line
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import Grid, grid_of, navit_size, num_patches, prepare_clip

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


def backend_of(asked: str) -> str:
    """The backend to use: `asked`, or for "auto" the first installed.

    Raises DataError for an unknown one, and for one that is not installed, naming the extra.
    """
    if asked == "auto":
        asked = next((name for name in VIDEO_BACKENDS if problem(name) is None), "pyav")
    if asked not in VIDEO_BACKENDS:
        raise DataError(f"unknown video backend {asked!r}; {did_you_mean(asked, VIDEO_BACKENDS)}")
    missing = problem(asked)
    if missing is not None:
        raise DataError(f"video backend {asked!r}: {missing}")
    return asked


def sample_indices(
    count: int, native_fps: float, fps: float = 2.0, max_frames: int | None = None
) -> list[int]:
    """Which of `count` frames are taken (see the head of this file); at most `max_frames`, evenly spread."""
    wanted = max(round(count * min(fps, native_fps) / native_fps), 1)
    wanted = min(wanted, count, max_frames or wanted)
    return [int(index) for index in np.linspace(0, count - 1, wanted).round()]


def _head(video: Stored, where: str) -> bytes:
    """The first bytes of a file that is there, not empty and not too large; raises BadSample."""
    try:
        if isinstance(video, bytes):
            size, head = len(video), video[:_HEAD]
        else:
            with open(video, "rb") as file:
                size, head = os.fstat(file.fileno()).st_size, file.read(_HEAD)
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
    where = f"video {video.video}"
    if isinstance(video.video, bytes):
        where = f"{video.suffix.lstrip('.')} video of {len(video.video)} bytes".strip()
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
