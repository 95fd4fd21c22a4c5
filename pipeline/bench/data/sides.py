"""The sides of `earlyfusion bench data`, each in a process of its own: `python -m
earlyfusion.pipeline.bench.data.sides JSON`.

The request is one JSON object; the last line of stdout is the result. Sides of one comparison read the same
shards and end with the same arrays: uint8 patches, padded to whole tokens by the navit rule.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from earlyfusion.data.config import DataConfig
from earlyfusion.data.decode import decode_picture
from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.loading.loader import Loader
from earlyfusion.data.sample import Image, Sample, Segment, Text, VideoFile
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.vocabulary import embedded_tokenizer
from earlyfusion.pipeline.bench.data import energon as bench_energon
from earlyfusion.pipeline.bench.data import plain as bench_plain
from earlyfusion.pipeline.bench.data.plain import Request, vision_of
from earlyfusion.pipeline.bench.data.shards import CLIPS, SIDES, clip, pictures


def source_config(request: Request) -> SourceConfig:
    """The shards as a source of the loader."""
    return SourceConfig(name="shards", kind="webdataset", options={"shards": request["shards"]})


# decoding, one core: shard -> patches


def _ours(request: Request) -> Iterator[torch.Tensor]:
    cfg, decode = vision_of(request), DecodeConfig(fast=request["side"] == "ours")
    source = build_source(source_config(request), val_fraction=0.0)
    for index in cycle(range(len(source))):
        picture = next(segment for segment in source.get(index, 0).segments if isinstance(segment, Image))
        yield decode_picture(picture.image, cfg, decode).items[0][0]


def _pictures(request: Request) -> Iterator[torch.Tensor]:
    if request["side"] == "webdataset":
        return bench_plain.patches(request)
    if request["side"] == "energon":
        return bench_energon.patches(request)
    return _ours(request)


def decoding(request: Request) -> dict[str, Any]:
    """Seconds of CPU and of the clock for `images` pictures; `digest` of the first patches shows who computes
    the same."""
    stream = _pictures(request)
    digest = 0
    for found in islice(stream, request["warmup"]):
        digest = zlib.crc32(found.numpy().tobytes(), digest)
    patches, started, cpu = 0, time.perf_counter(), time.process_time()
    for found in islice(stream, request["images"]):
        patches += found.shape[0]
    return {
        "images": request["images"],
        "patches": patches,
        "digest": digest,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - started,
    }


# a whole loader: shard -> batches in the training process


def _our_batches(request: Request) -> Iterator[dict[str, Any]]:
    workers = request["workers"]
    data = DataConfig(
        sources=[source_config(request)],
        val_fraction=0.0,
        prefetch="process" if workers else "none",
        workers=max(1, workers),
    )
    tokenizer = embedded_tokenizer()
    lanes = max(1, workers)
    with Loader(
        data,
        tokenizer,
        vision_of(request),
        length=request["length"],
        tokens=request["length"],
        max_patches=4 * request["length"],
        lanes=lanes,
    ) as loader:
        for batches in loader:
            yield {
                "samples": sum(int((batch.ids == tokenizer.bos_id).sum()) for batch in batches),
                "tokens": sum(batch.num_tokens for batch in batches),
                "positions": sum(batch.ids.shape[0] for batch in batches),
                "patches": sum(batch.num_patches for batch in batches),
                "media_bytes": sum(batch.patches.numel() for batch in batches),
            }


def _batches(request: Request) -> Iterator[dict[str, Any]]:
    if request["side"] == "webdataset":
        return bench_plain.batches(request)
    if request["side"] == "energon":
        return bench_energon.batches(request)
    return _our_batches(request)


def loading(request: Request) -> dict[str, Any]:
    """Totals over `samples` samples; with `step_ms` the consumer is busy that long and `wait_share` is what
    it waits."""
    stream = _batches(request)
    total = dict.fromkeys(("samples", "tokens", "positions", "patches", "media_bytes"), 0)
    for _ in range(request["warmup_steps"]):
        next(stream)
    started, waited, pause = time.perf_counter(), 0.0, request["step_ms"] / 1000
    while total["samples"] < request["samples"]:
        asked = time.perf_counter()
        batch = next(stream)
        waited += time.perf_counter() - asked
        for name in total:
            total[name] += batch[name]
        time.sleep(pause)
    wall = time.perf_counter() - started
    stream.close()  # type: ignore[attr-defined]
    return {**total, "wall_s": wall, "wait_share": waited / wall}


# memory: one worker, pictures and clips in turn


def resident_mib() -> float:
    """Memory of this process that lies in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory(request: Request) -> dict[str, Any]:
    """Resident memory, open files and threads of a worker while it encodes `samples` samples, every
    `every`-th a video."""
    tokenizer, cfg = embedded_tokenizer(), vision_of(request)
    decode = DecodeConfig(video_backend=request["backend"])
    stills = pictures(None, [SIDES, (640, 480), (333, 500)])
    made = {name: clip(name, seed) for seed, name in enumerate(CLIPS)}
    clips = [body for body in made.values() if body is not None]
    points: list[tuple[int, float]] = []
    videos, started = 0, time.perf_counter()
    mark = max(1, request["samples"] // 50)
    for number in range(request["samples"]):
        media: Segment
        if clips and number % request["every"] == 0:
            media = VideoFile(clips[videos % len(clips)], max_frames=4)
            videos += 1
        else:
            media = Image(stills[number % len(stills)])
        encode(
            Sample([media, Text(f"sample {number % 1000}")], "memory", str(number)),
            tokenizer,
            cfg,
            decode=decode,
        )
        if (number + 1) % mark == 0:
            points.append((number + 1, resident_mib()))
    tail = points[len(points) // 5 :]
    slope = (
        float(np.polyfit([n for n, _ in tail], [m for _, m in tail], 1)[0]) if len(tail) > 2 else float("nan")
    )
    gc.collect()
    return {
        "samples": request["samples"],
        "videos": videos,
        "codecs": [name for name, body in made.items() if body is not None],
        "wall_s": time.perf_counter() - started,
        "resident_mib": points,
        "mib_per_10k_samples": slope * 10_000,
        "open_files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


PARTS: dict[str, Callable[[Request], dict[str, Any]]] = {
    "decoding": decoding,
    "loading": loading,
    "memory": memory,
    "energon": bench_energon.found,
}


def main(argv: list[str]) -> int:
    """Run one side; the result goes to stdout as JSON."""
    request = json.loads(argv[0])
    torch.set_num_threads(1)
    print(json.dumps(PARTS[request["part"]](request)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
