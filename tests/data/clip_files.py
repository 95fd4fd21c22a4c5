"""Video files made on the spot: every frame carries its number in binary, so a test can tell which one it was
given."""

import io
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from earlyfusion.data.video import problem

av = pytest.importorskip("av")

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
BITS = 8
BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(problem(name) is not None, reason=f"{name}: {problem(name)}"))
    for name in ("decord", "pyav")
]

# name -> (encoder, container, options)
CODECS = {
    "h264": ("libx264", "mp4", {"bf": "3"}),
    "h264-mkv": ("libx264", "matroska", {}),
    "h264-avi": ("libx264", "avi", {"bf": "2"}),
    "h264-ts": ("libx264", "mpegts", {}),
    "hevc-open": ("libx265", "mp4", {"x265-params": "log-level=error:keyint=12:min-keyint=12"}),
    "mpeg4-open": ("mpeg4", "mp4", {"bf": "2"}),
    "vp9": ("libvpx-vp9", "webm", {"deadline": "realtime", "cpu-used": "8"}),
    "av1": ("libsvtav1", "mp4", {"preset": "12", "crf": "5"}),
    "gif": ("gif", "gif", {}),
}


def numbered(count, width=96, height=64, first=0):
    """Frames with their number as white squares on grey and red."""
    frames = []
    for number in range(first, first + count):
        frame = np.full((height, width, 3), 40, np.uint8)
        frame[:, : width // 2] = (200, 60, 60)
        for bit in range(BITS):
            if number >> bit & 1:
                frame[8:24, 8 + bit * 10 : 16 + bit * 10] = 255
        frames.append(frame)
    return frames


def number_in(frame):
    """The number a frame carries."""
    return sum(1 << bit for bit in range(BITS) if frame[12:20, 10 + bit * 10 : 14 + bit * 10].mean() > 128)


def write_clip(frames, codec="h264", times=None, fps=10, rotation=None):
    """Encoded bytes; `times` (seconds) makes the frame rate variable; `rotation` in degrees
    counter-clockwise."""
    encoder, container, options = CODECS[codec]
    if encoder not in av.codecs_available:
        pytest.skip(f"this PyAV has no {encoder}")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(encoder, rate=fps, options=options)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        stream.gop_size = 12
        if rotation is not None:
            stream.set_display_rotation(rotation)
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for index, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = round(times[index] * 1000), Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return buffer.getvalue()
