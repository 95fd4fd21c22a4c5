"""Shards made for measuring: pictures with captions.

Pictures are photo-like (waves, edges, grain); a few dozen different ones are written
again and again under new keys, so that making a shard costs little and reading it costs what it always does.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image as PILImage

DIFFERENT = 32
"""Different pictures in a set of shards."""
SIDES = (1024, 768)
"""Width and height of the pictures in the comparison of decoding."""
WORDS = (
    "a red kite over the harbour two boats wait near an old wall under low clouds while gulls circle".split()
)


def jpeg(width: int, height: int, seed: int) -> bytes:
    """A picture that compresses like a photograph, as JPEG of quality 85."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    # Waves and grain: flat colours would decode too quickly.
    waves = [127 + 100 * np.sin(x * rng.uniform(3, 20) + y * rng.uniform(3, 20) + c) for c in range(3)]
    pixels = np.stack(waves, -1) + rng.normal(0, 6, (height, width, 3))
    for _ in range(20):
        left, top = rng.integers(0, width), rng.integers(0, height)
        w, h = rng.integers(10, 200, 2)
        pixels[top : top + h, left : left + w] = rng.integers(0, 256, 3)
    out = io.BytesIO()
    PILImage.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=85)
    return out.getvalue()


def write_shards(folder: Path, count: int, *, mixed: bool, per_shard: int = 500) -> list[str]:
    """`count` samples (jpg, txt) in tar files below `folder`; returns their paths.

    `mixed`: sides from 128 to 1024 and captions of 4 to 300 words, as a mix has; otherwise all of SIDES, 12
    words.
    """
    # Few different pictures: decoding costs the same for every copy.
    rng = Random(0)
    sides = [128, 224, 256, 336, 448, 512, 640, 768, 1024]
    jpegs = []
    for number in range(DIFFERENT):
        size = (rng.choice(sides), rng.choice(sides)) if mixed else SIDES
        jpegs.append(jpeg(*size, number))

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for first in range(0, count, per_shard):
        paths.append(str(folder / f"{first // per_shard:04d}.tar"))
        with tarfile.open(paths[-1], "w") as tar:
            for number in range(first, min(first + per_shard, count)):
                # Lengths of captions spread over two orders of magnitude.
                words = round(4 * 75 ** rng.random()) if mixed else 12
                caption = " ".join(rng.choices(WORDS, k=words)).encode()
                for ending, body in ((".jpg", jpegs[number % DIFFERENT]), (".txt", caption)):
                    info = tarfile.TarInfo(f"{number:08d}{ending}")
                    info.size = len(body)
                    tar.addfile(info, io.BytesIO(body))
    return paths
