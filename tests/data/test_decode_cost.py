"""What decoding costs: memory of a worker stays flat, and the sides of the benchmark compute the same."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Image, Sample, Text, VideoFile
from earlyfusion.data.video import problem
from earlyfusion.data.vocabulary import embedded_tokenizer
from earlyfusion.pipeline.bench.data import decoding_side, jpeg, vision_of, write_shards
from tests.data.clip_files import numbered, write_clip

PATCH_LIMIT = 300
FLAT_MIB = 12
"""The decoders' pools grow by steps of 1 to 6 MiB at first. A clip holds 450 kB of pixels, so losing every
clip of the second half would be 130 MiB in 1,200 samples."""


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory_of(backend, samples):
    """A worker that encodes pictures and clips by turns: resident MiB along the way, open files, threads."""
    stills = [jpeg(width, height, 0) for width, height in ((1024, 768), (640, 480), (333, 500))]
    clips = [write_clip(numbered(8, 160, 120), codec) for codec in ("h264", "vp9", "av1", "gif")]
    decode, cfg, sizes = DecodeConfig(video_backend=backend), vision_of(PATCH_LIMIT), []
    tokenizer = embedded_tokenizer()
    for number in range(samples):
        media = Image(stills[number % 3]) if number % 2 else VideoFile(clips[number // 2 % 4], max_frames=4)
        sample = Sample([media, Text(f"sample {number % 1000}")], "memory", str(number))
        encode(sample, tokenizer, cfg, decode=decode)
        if number % 24 == 23:
            sizes.append(resident_mib())
    return sizes, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_memory_of_a_worker_stays_flat_over_pictures_and_videos(backend, monkeypatch):
    if problem(backend) is not None or problem("pyav") is not None:
        pytest.skip(f"{backend}: {problem(backend)}, PyAV: {problem('pyav')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        sizes, files, threads = pool.submit(memory_of, backend, 1200).result()
    assert threads <= 8 and files <= 24
    assert max(sizes[-len(sizes) // 5 :]) - max(sizes[: len(sizes) // 2]) < FLAT_MIB


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"), 40, 20)


def test_the_exact_side_of_the_benchmark_equals_webdataset_with_pillow(shards, cache):
    request = {"patch_limit": PATCH_LIMIT, "shards": shards, "images": 24}
    found = {side: decoding_side(side, **request) for side in ("webdataset", "ours-exact", "ours")}
    assert found["webdataset"]["digest"] == found["ours-exact"]["digest"] != found["ours"]["digest"]
    assert len({result["patches"] for result in found.values()}) == 1
