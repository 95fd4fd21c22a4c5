"""Shards made for measuring: pictures with captions, and short clips.

Pictures are photo-like (waves, edges, grain); a few dozen different ones are written
again and again under new keys, so that making a shard costs little and reading it costs what it always does.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image as PILImage

DIFFERENT = 32
"""Different pictures in a set of shards."""
SIDES = (1024, 768)
"""Width and height of the pictures in the comparison of decoding."""
CLIPS = {
    "h264": ("libx264", "mp4"),
    "vp9": ("libvpx-vp9", "webm"),
    "av1": ("libsvtav1", "mp4"),
    "gif": ("gif", "gif"),
}
"""Name -> (encoder, container)."""
WORDS = (
    "a red kite over the harbour two boats wait near an old wall under low clouds while gulls circle".split()
)


def photo(width: int, height: int, seed: int) -> PILImage.Image:
    """A picture that compresses like a photograph."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    waves = [
        127 + 100 * np.sin(x * rng.uniform(3, 20) + y * rng.uniform(3, 20) + channel) for channel in range(3)
    ]
    pixels = np.stack(waves, -1) + rng.normal(0, 6, (height, width, 3))
    for _ in range(20):
        left, top = rng.integers(0, width), rng.integers(0, height)
        pixels[top : top + rng.integers(10, 200), left : left + rng.integers(10, 200)] = rng.integers(
            0, 256, 3
        )
    return PILImage.fromarray(pixels.clip(0, 255).astype(np.uint8))


def pictures(sizes: Sequence[tuple[int, int]]) -> list[bytes]:
    """JPEGs of quality 85, photo-like, one for each of `sizes` (w, h)."""
    encoded = []
    for number, (width, height) in enumerate(sizes):
        out = io.BytesIO()
        photo(width, height, number).save(out, "JPEG", quality=85)
        encoded.append(out.getvalue())
    return encoded


def write_shards(folder: Path, count: int, *, mixed: bool, per_shard: int = 500) -> list[str]:
    """`count` samples (jpg, txt) in tar files below `folder`; returns their paths.

    `mixed`: sides from 128 to 1024 and captions of 4 to 300 words, as a mix has; otherwise all of SIDES, 12
    words.
    """
    # Few different pictures: decoding costs the same for every copy.
    rng = Random(0)
    sides = [128, 224, 256, 336, 448, 512, 640, 768, 1024]
    sizes = [(rng.choice(sides), rng.choice(sides)) if mixed else SIDES for _ in range(DIFFERENT)]
    jpegs = pictures(sizes)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for first in range(0, count, per_shard):
        path = folder / f"{'mixed' if mixed else 'plain'}-{first // per_shard:04d}.tar"
        with tarfile.open(path, "w") as tar:
            for number in range(first, min(first + per_shard, count)):
                words = round(4 * 75 ** rng.random()) if mixed else 12
                caption = " ".join(rng.choice(WORDS) for _ in range(words))
                for ending, body in ((".jpg", jpegs[number % DIFFERENT]), (".txt", caption.encode())):
                    info = tarfile.TarInfo(f"{number:08d}{ending}")
                    info.size = len(body)
                    tar.addfile(info, io.BytesIO(body))
        paths.append(str(path))
    return paths


def clip(name: str, seed: int) -> bytes | None:
    """A clip of 8 frames of one of CLIPS; None where PyAV, or its encoder, is not there."""
    encoder, container = CLIPS[name]
    frames, width, height = 8, 160, 120
    try:
        import av
    except ModuleNotFoundError:
        return None
    if encoder not in av.codecs_available:
        return None
    still = np.asarray(photo(width + frames, height, seed))
    out = io.BytesIO()
    with av.open(out, "w", format=container) as output:
        stream: Any = output.add_stream(encoder, rate=4)
        stream.width, stream.height = width, height
        stream.pix_fmt = "rgb8" if name == "gif" else "yuv420p"
        for number in range(frames):
            pixels = np.ascontiguousarray(still[:, number : number + width])
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode())
    return out.getvalue()
