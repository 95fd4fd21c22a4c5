"""What decoding costs: memory of a worker stays flat, and the sides of the benchmark compute the same."""

import pytest

from earlyfusion.data.video import problem
from earlyfusion.pipeline.bench.data import decoding_side, loading_side, memory_side
from earlyfusion.pipeline.bench.record import run_side
from earlyfusion.pipeline.bench.shards import write_shards

BASE = {"patch_limit": 300}
FLAT_MIB = 12
"""The decoders' pools grow by steps of 1 to 6 MiB at first. A clip holds 450 kB of pixels, so losing every
clip of the second half would be 130 MiB in 1,200 samples."""


def growth(backend, samples):
    if problem(backend) is not None or problem("pyav") is not None:
        pytest.skip(f"{backend}: {problem(backend)}, PyAV: {problem('pyav')}")
    found = run_side(memory_side, {**BASE, "samples": samples, "every": 2, "backend": backend})
    assert found["videos"] == samples // 2 and found["codecs"] == ["h264", "vp9", "av1", "gif"]
    sizes = [mib for _, mib in found["resident_mib"]]
    assert found["threads"] <= 4 and found["open_files"] <= 12
    return max(sizes[-len(sizes) // 5 :]) - max(sizes[: len(sizes) // 2])


@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_memory_of_a_worker_stays_flat_over_pictures_and_videos(backend):
    assert growth(backend, 1200) < FLAT_MIB


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"), 40, mixed=False, per_shard=20)


def test_the_exact_side_of_the_benchmark_equals_webdataset_with_pillow(shards, cache):
    request = {**BASE, "shards": shards, "images": 4, "warmup": 36}
    found = {side: decoding_side(side, **request) for side in ("webdataset", "ours-exact", "ours")}
    assert found["webdataset"]["digest"] == found["ours-exact"]["digest"] != found["ours"]["digest"]
    assert len({result["patches"] for result in found.values()}) == 1


def test_both_loaders_of_the_benchmark_deliver_the_same_kind_of_batches(tmp_path, cache):
    mixed = write_shards(tmp_path, 60, mixed=True)
    request = {
        **BASE,
        "shards": mixed,
        "samples": 40,
        "workers": 0,
        "length": 1024,
        "rows": 4,
        "step_ms": 0,
        "warmup_steps": 1,
    }
    ours, theirs = (loading_side(side, **request) for side in ("ours", "webdataset"))
    for found in (ours, theirs):
        assert found["samples"] >= 40 and 0 < found["tokens"] <= found["positions"]
        assert found["media_bytes"] == found["patches"] * 3 * 14 * 14
    assert ours["tokens"] / ours["positions"] > 0.9 > theirs["tokens"] / theirs["positions"]
