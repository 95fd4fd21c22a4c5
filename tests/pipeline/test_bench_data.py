"""`earlyfusion bench data` prints its tables and saves its numbers."""

import json
from types import SimpleNamespace

import pytest
import torch

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.bench import data as bench_data
from earlyfusion.pipeline.bench.record import run_side


@pytest.mark.slow
def test_bench_data_runs_all_three_parts_and_saves_them(tmp_path, capsys):
    out = tmp_path / "data.json"
    options = (
        "--images 8 --samples 30 --workers 1 --length 1024 --rounds 1 --memory-samples 60 --patch-limit 200"
    )
    assert cli.main(["bench", "data", *options.split(), "--step-ms", "1", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert set(record["decoding"]["sides"]) == {"webdataset", "ours", "ours-exact"}
    assert record["decoding"]["sides"]["webdataset"]["ratio"] == 1
    assert 0 < record["loading"]["sides"]["ours"]["fill"] <= 1
    assert record["memory"]["samples"] == 60 and len(record["memory"]["resident_mib"]) == 60
    printed = capsys.readouterr().out
    for words in ("images_per_core_s", "wait_share", "Megatron-Energon", "mib_per_10k_samples"):
        assert words in printed


def test_a_side_that_fails_is_one_line(tmp_path):
    request = {
        "side": "ours",
        "shards": [str(tmp_path / "no.tar")],
        "patch_limit": 9,
        "images": 1,
        "warmup": 1,
    }
    with pytest.raises(UserError, match=r"bench.data:decoding_side ended with 1: .*no.tar"):
        run_side(bench_data.decoding_side, request)


@pytest.mark.parametrize("given, shown", [("x", "'x'"), ("-1", "'-1'"), ("nan", "'nan'"), ("inf", "'inf'")])
def test_a_step_that_is_no_time_is_refused(given, shown):
    with pytest.raises(UserError, match=f"--step-ms {shown}: expected milliseconds"):
        bench_data.data(step_ms=given)


def test_auto_without_a_recipe_is_refused():
    with pytest.raises(UserError, match="--step-ms auto needs --recipe"):
        bench_data.data(step_ms="auto")


@pytest.mark.parametrize("data_s, handover_s", [(2.0, 0.001), (0.1, 0.05), (1.0, 0.02)])
def test_the_shortest_step_waits_just_two_per_cent(data_s, handover_s):
    step = bench_data.shortest_step_s(data_s, handover_s)
    for length, over in ((step * 1.001, False), (step * 0.999, True)):
        waits = max(data_s - length, handover_s)
        assert (waits / (length + waits) > bench_data.BAR) == over


class Clock:
    """Time that passes only where somebody sleeps."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)


class Slow:
    """A loader that takes `pace` seconds for a step, prepared while the consumer is busy, one in stock."""

    def __init__(self, pace: float, clock: Clock) -> None:
        self.pace, self.clock, self.ready_at = pace, clock, 0.0
        self.spec = SimpleNamespace(data=SimpleNamespace(prefetch_steps=1))

    def next_step(self):
        self.clock.sleep(self.ready_at - self.clock.now)
        self.ready_at = self.clock.now + self.pace
        return [SimpleNamespace(num_tokens=3, ids=torch.zeros(4), num_patches=5)]


@pytest.mark.parametrize("pace, waited_s", [(0.1, 5 * 0.04), (0.02, 0.0)])
def test_waiting_is_what_the_data_takes_longer_than_the_step(monkeypatch, pace, waited_s):
    clock = Clock()
    monkeypatch.setattr(bench_data, "time", clock)
    found = bench_data.consume(Slow(pace, clock), 5, 0.06)
    assert found["waited_s"] == pytest.approx(waited_s)
    assert (found["tokens"], found["positions"], found["patches"]) == (15, 20, 25)


@pytest.mark.slow
def test_a_recipe_tells_how_long_its_steps_wait(tmp_path, capsys):
    out = tmp_path / "wait.json"
    options = "--recipe nano --workers 1 --step-ms auto --train-steps 1 --recipe-steps 2 --threads 1"
    assert cli.main(["bench", "data", *options.split(), "--out", str(out)]) == 0
    part = json.loads(out.read_text())["waiting"]
    assert part["trained_s"] and part["step_ms"] == pytest.approx(1000 * part["trained_s"][0])
    assert 0 <= part["wait_share"] < 1 and part["data_s_per_step"] > 0
    assert part["shortest_step_ms"] >= 1000 * part["data_s_per_step"] * 0.979
    assert "shortest_step_ms" in capsys.readouterr().out
