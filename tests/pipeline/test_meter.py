"""The meter against hand-kept clocks and counts."""

import pytest
import torch

from earlyfusion.pipeline import meter as module
from earlyfusion.pipeline.meter import Meter, measured_peak, peak_flops
from earlyfusion.pipeline.runtime import Runtime


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


def test_an_evaluation_between_two_steps_does_not_slow_the_next(clock):
    meter = Meter(Runtime(), peak=1.0)
    with meter.paused():
        clock.now += 50
    clock.now += 1
    meter.step(tokens=10)
    assert meter.snapshot()["tokens_per_s"] == pytest.approx(10)


def test_each_snapshot_begins_a_new_interval_and_totals_go_on(clock):
    meter = Meter(Runtime(), peak=1.0)
    clock.now += 1
    meter.step(tokens=10)
    meter.snapshot()
    clock.now += 1
    meter.step(tokens=30)
    record = meter.snapshot()
    assert record["tokens_per_s"] == pytest.approx(30) and record["tokens"] == 40


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


class Uneven:
    """Two ranks: this one and another, of fixed vision work a step."""

    world, device = 2, torch.device("cpu")

    def __init__(self, other: list[tuple[float, float]]):
        self.other = torch.tensor(other, dtype=torch.float64)

    sum_dict = Runtime.sum_dict

    def _both(self, values):
        return values, (self.other if values.ndim == 2 else values)

    def sum(self, values):
        a, b = self._both(values)
        return a + b

    def max(self, values):
        return torch.maximum(*self._both(values))


def test_vision_imbalance_is_the_time_of_the_slowest_rank_in_every_step_over_the_mean(clock):
    """Steps of (own, encoded) work: (8, 4) and (0, 4), then (2, 3) and (4, 3); largest 8 + 4 over mean 4
    + 3."""
    meter = Meter(Uneven([(0.0, 4.0), (4.0, 3.0)]), peak=1.0)
    for work in ((8.0, 4.0), (2.0, 3.0)):
        clock.now += 1
        meter.step(tokens=1, vision_work=work)
    second = Meter(Uneven([(0.0, 4.0)]), peak=1.0)
    second.load_state_dict(meter.state_dict())
    record = meter.snapshot()
    assert record["vision_imbalance"] == pytest.approx(12 / 7) and record[
        "vision_imbalance_after"
    ] == pytest.approx(1)
    second.step(tokens=1, vision_work=(8.0, 4.0))
    assert second.snapshot()["vision_imbalance"] == pytest.approx(20 / 11), (
        "a checkpoint in between loses nothing"
    )
    assert "vision_imbalance" not in second.snapshot()


def test_steps_of_text_alone_are_even(clock):
    meter = Meter(Runtime(), peak=1.0)
    meter.step(tokens=1, vision_work=(0.0, 0.0))
    assert meter.snapshot()["vision_imbalance"] == 1.0
