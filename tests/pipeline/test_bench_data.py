"""`earlyfusion bench data`: its sides read the same, it prints its tables and saves its numbers."""

import json
from types import SimpleNamespace

import pytest

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.bench import data as bench_data
from earlyfusion.pipeline.bench.frame import run_side


@pytest.mark.slow
def test_bench_data_runs_both_parts_and_saves_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_data, "run_side", lambda side, request, **_: side(**request))
    monkeypatch.setattr(bench_data, "SAMPLES", 100)
    out = tmp_path / "data.json"
    options = "--images 8 --samples 30 --workers 1 --length 1024 --rounds 1 --patch-limit 200"
    assert cli.main(["bench", "data", *options.split(), "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert set(record["decoding"]) >= {"webdataset", "ours", "ours-exact"}
    assert record["decoding"]["ours / webdataset"]["images_per_core_s"] > 0
    assert 0 < record["loading"]["ours"]["fill"] <= 1
    printed = capsys.readouterr().out
    for words in ("images_per_core_s", "fill", "energon"):
        assert words in printed


def test_a_side_that_fails_is_one_line(tmp_path):
    request = {"side": "ours", "shards": [str(tmp_path / "no.tar")], "patch_limit": 9, "images": 1}
    with pytest.raises(UserError, match=r"bench.data:decoding_side ended with 1: .*no.tar"):
        run_side(bench_data.decoding_side, request)


@pytest.mark.slow
def test_energon_gives_the_patches_of_webdataset_in_its_order(tmp_path):
    pytest.importorskip("megatron.energon", reason="pip install megatron-energon")
    shards = bench_data.write_shards(tmp_path, 24, 10)  # three shards, the last one short
    request = {"patch_limit": 300, "shards": shards, "images": 20}  # over the end of an epoch
    sides = ("energon", "webdataset")
    theirs, plain = (run_side(bench_data.decoding_side, {**request, "side": side}) for side in sides)
    assert theirs["digest"] == plain["digest"] and theirs["patches"] == plain["patches"]


class Clock:
    """Time that passes only where somebody sleeps."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)


class Slow:
    """A loader that takes `pace` seconds for a step, prepared while the consumer is busy, one in stock."""

    spec = SimpleNamespace(data=SimpleNamespace(prefetch_steps=1))

    def __init__(self, pace: float, clock: Clock) -> None:
        self.pace, self.clock, self.ready_at = pace, clock, 0.0

    def next_step(self):
        self.clock.sleep(self.ready_at - self.clock.now)
        self.ready_at = self.clock.now + self.pace


@pytest.mark.parametrize("pace, waited_s", [(0.1, 5 * 0.04), (0.02, 0.0)])
def test_waiting_is_what_the_data_takes_longer_than_the_step(monkeypatch, pace, waited_s):
    clock = Clock()
    monkeypatch.setattr(bench_data, "time", clock)
    assert bench_data.consume(Slow(pace, clock), 5, 0.06) == pytest.approx(waited_s)


@pytest.mark.slow
def test_a_recipe_tells_how_long_its_steps_wait(tmp_path):
    out = tmp_path / "wait.json"
    options = "--recipe nano --workers 1 --step-ms 300 --recipe-steps 2"
    assert cli.main(["bench", "data", *options.split(), "--out", str(out)]) == 0
    part = json.loads(out.read_text())["waiting"]
    assert 0 <= part["wait_share"] < 1 and part["data_s_per_step"] > 0
