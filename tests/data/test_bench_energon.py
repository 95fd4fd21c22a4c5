"""The side of Megatron-Energon in `earlyfusion bench data` reads the same samples and makes the same of
them."""

import sys
from random import Random

import pytest
import torch

from earlyfusion.pipeline.bench import data as bench_data
from earlyfusion.pipeline.bench import loaders
from earlyfusion.pipeline.bench.record import SideFailed, run_side
from earlyfusion.pipeline.bench.shards import write_shards

BASE = {"patch_limit": 300}


@pytest.mark.parametrize("seed", [0, 1])
def test_packing_for_energon_keeps_every_document_once_and_within_the_length(seed):
    generator = Random(seed)
    sizes = [generator.randint(1, 90) for _ in range(101)] + [130]
    groups = loaders.first_fit(sizes, 100)
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    assert all(sum(sizes[index] for index in group) <= 100 or len(group) == 1 for group in groups)
    assert len(groups) <= 1.3 * sum(sizes) / 100  # first fit decreasing: at most 11/9 of the best


def test_without_energon_the_benchmark_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(bench_data.importlib.util, "find_spec", lambda name: None)
    assert bench_data.find_energon() == {
        "version": None,
        "problem": "not installed (pip install megatron-energon)",
    }
    monkeypatch.setitem(sys.modules, "megatron", None)
    assert "pip install megatron-energon" in loaders.energon_here()["problem"]


def test_an_energon_that_does_not_load_is_left_out_with_its_words(monkeypatch):
    monkeypatch.setattr(bench_data.importlib.util, "find_spec", lambda name: object())

    def fails(side, request, **environment):
        raise SideFailed("energon_here ended with 1: no such symbol")

    monkeypatch.setattr(bench_data, "run_side", fails)
    assert bench_data.find_energon()["problem"].endswith("no such symbol")


@pytest.fixture(scope="module")
def energon():
    return pytest.importorskip("megatron.energon", reason="pip install megatron-energon")


@pytest.mark.slow
def test_energon_gives_the_patches_of_webdataset_in_its_order(tmp_path, cache, energon):
    shards = write_shards(tmp_path, 24, mixed=False, per_shard=10)  # three shards, the last one short
    request = {
        **BASE,
        "shards": shards,
        "images": 6,
        "warmup": 30,
    }  # over the end of an epoch
    theirs, plain = (
        run_side(bench_data.decoding_side, {**request, "side": side}) for side in ("energon", "webdataset")
    )
    assert theirs["digest"] == plain["digest"] and theirs["patches"] == plain["patches"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_energon_loads_and_packs_the_same_samples(tmp_path, cache, energon, workers):
    shards = write_shards(tmp_path, 120, mixed=True, per_shard=30)
    found = run_side(
        bench_data.loading_side,
        {
            **BASE,
            "side": "energon",
            "shards": shards,
            "samples": 60,
            "workers": workers,
            "length": 1024,
            "rows": 4,
            "step_ms": 0,
            "warmup_steps": 1,
        },
    )
    assert found["samples"] >= 60 and found["media_bytes"] == found["patches"] * 3 * 14 * 14
    assert 0.8 < found["tokens"] / found["positions"] <= 1
    assert {path.name for path in (tmp_path / ".nv-meta").iterdir()} >= {
        "dataset.yaml",
        "split.yaml",
        "index.sqlite",
    }


@pytest.mark.slow
def test_one_epoch_of_energon_holds_every_document_of_the_shards_once(tmp_path, cache, energon):
    import webdataset

    shards = write_shards(tmp_path, 130, mixed=True, per_shard=50)
    request = {**BASE, "shards": shards, "workers": 0, "length": 2048}
    rows = list(energon.get_loader(loaders.energon_packed(request, repeat=False)))
    read = webdataset.WebDataset(shards, shardshuffle=False).decode("pil").to_tuple("jpg", "txt")
    plain = [loaders.PlainSample(300)(sample) for sample in read]
    assert sum(row["documents"] for row in rows) == len(plain) == 130
    assert sorted(row_id for row in rows for row_id in row["ids"].tolist()) == sorted(
        one for ids, _ in plain for one in ids.tolist()
    )
    sums = sorted(int(patches.sum(dtype=torch.int64)) for _, patches in plain)
    assert sum(int(row["patches"].sum(dtype=torch.int64)) for row in rows) == sum(sums)
    assert all(len(row["ids"]) <= 2048 for row in rows)
