"""The meter against hand-kept clocks and counts."""

import pytest
import torch

from earlyfusion.pipeline import step as module
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.pipeline.step import Meter, measured_peak, peak_flops


class Clock:
    """time.perf_counter under the test's control, in seconds."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(module, "time", fake)
    return fake


def test_rates_are_counts_over_training_time(clock):
    meter = Meter(Runtime(), peak=1000.0)
    for _ in range(4):
        with meter.waiting():
            clock.now += 0.5
        clock.now += 1.5
        meter.step(tokens=100, patches=30, samples=2, decoder_flops=600, vision_flops=200)
    with meter.paused():
        clock.now += 1000.0
    record = meter.snapshot()
    assert record["tokens"] == 400 and record["patches"] == 120 and record["samples"] == 8
    assert record["tokens_per_s"] == pytest.approx(50) and record["patches_per_s"] == pytest.approx(15)
    assert record["data_wait"] == pytest.approx(0.25)
    assert record["mfu_decoder"] == pytest.approx(0.3) and record["mfu_vision"] == pytest.approx(0.1)
    assert record["mfu"] == pytest.approx(0.4)
    assert record["seconds"] == pytest.approx(8.0) and record["step_s"] == pytest.approx(2.0)


def test_a_checkpoint_between_snapshots_loses_no_count(clock):
    first = Meter(Runtime(), peak=1.0)
    clock.now += 2
    first.step(tokens=7, patches=3)
    second = Meter(Runtime(), peak=1.0)
    second.load_state_dict(first.state_dict())
    clock.now += 1
    second.step(tokens=5)
    record = second.snapshot()
    assert record["tokens"] == 12 and record["patches"] == 3 and record["seconds"] == pytest.approx(3.0)
    assert record["tokens_per_s"] == pytest.approx(5)
    assert first.snapshot()["tokens_per_s"] == pytest.approx(3.5)


def test_an_unknown_gpu_hides_mfu_and_known_ones_have_their_data_sheet_peak(monkeypatch):
    cuda = torch.device("cuda", 0)
    for name, expected in (
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(cuda, torch.bfloat16) == expected
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Unknown 9000")
    assert peak_flops(cuda, torch.bfloat16) is None
    meter = Meter(Runtime(), peak=None)
    meter.peak = None
    assert "mfu" not in meter.snapshot()


def test_the_cpu_peak_is_what_a_matmul_reaches_and_draws_no_random_number():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    measured_peak.cache_clear()
    peak = measured_peak(torch.float32, torch.get_num_threads(), seconds=0.02)
    assert 1e8 < peak < 1e14
    assert torch.equal(before, torch.get_rng_state())
