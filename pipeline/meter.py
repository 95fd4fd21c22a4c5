"""Speed, cost and memory of training: tokens/s, patches/s, MFU split into decoder and vision, data wait, step
time.

MFU = model FLOPs done / (seconds * peak FLOP/s of all ranks), for decoder and vision apart; their sum is the
whole. FLOPs are those the model needs (forward and backward, no recomputation), counted by `model/flops.py`.
Peaks are dense tensor-core peaks of the data sheets; a CPU's peak is what a short matmul reaches here, in the
dtype of the run.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from earlyfusion.pipeline.runtime import Runtime

# Dense FLOP/s by name in torch.cuda.get_device_name: (bf16 tensor
# cores, fp32 without tensor cores). First match wins.
PEAKS: dict[str, tuple[float, float]] = {
    "GB200": (2500e12, 80e12),
    "B200": (2250e12, 75e12),
    "GH200": (989e12, 67e12),
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "RTX 4090": (165e12, 82.6e12),
    "A10": (125e12, 31.2e12),
}
TF32_SHARE_OF_BF16 = 0.5
EMA = 0.95

COUNTS = ("tokens", "patches", "samples", "decoder_flops", "vision_flops")


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of one device in `dtype`; None for a GPU that is not in the table (MFU is then not
    shown)."""
    if device.type != "cuda":
        return measured_peak(dtype, torch.get_num_threads())
    name = torch.cuda.get_device_name(device)
    for key, (bf16, fp32) in PEAKS.items():
        if key in name:
            if dtype is not torch.float32:
                return bf16
            return bf16 * TF32_SHARE_OF_BF16 if torch.backends.cuda.matmul.allow_tf32 else fp32
    return None


@cache
def measured_peak(dtype: torch.dtype, threads: int, size: int = 512, seconds: float = 0.15) -> float:
    """The best of repeated size^3 CPU matmuls within `seconds`, in FLOP/s. `threads` keys the cache.

    Values do not matter and no random number is drawn, so a measurement never shifts a training run.
    """
    # 512 fits the cache of a core and keeps every core busy.
    a = torch.full((size, size), 0.5, dtype=dtype)
    torch.mm(a, a)
    # The best of many: whatever else the machine does only makes a product slower.
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rss if sys.platform == "darwin" else rss * 1024


class Meter:
    """Counts what this rank does and reports what all ranks do.

    Args:
        dtype: compute dtype of the matmuls (for the peak).
        peak: FLOP/s of one rank; None looks it up.
    """

    def __init__(self, runtime: Runtime, dtype: torch.dtype = torch.float32, peak: float | None = None):
        self.runtime = runtime
        self.peak = peak if peak is not None else peak_flops(runtime.device, dtype)
        self.totals = dict.fromkeys(COUNTS, 0.0)  # over all ranks, over the whole run
        self.seconds = 0.0
        self.step_s = 0.0  # exponential moving average
        self._pending = dict.fromkeys(COUNTS, 0.0)  # of this rank, since the last flush
        self._work: list[tuple[float, float]] = []
        self._vision_3 = torch.zeros(3, dtype=torch.float64)  # since the last snapshot, see `flush`
        self.restart_clock()

    def restart_clock(self) -> None:
        """Begin a new interval now: set-up, loading and compiling before this do not count."""
        self._interval = dict.fromkeys(COUNTS, 0.0)
        self._interval_s = self._waited_s = self._not_counted_s = 0.0
        self._last = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for the next batch: its share of time is reported as data_wait."""
        start = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around evaluation and checkpoints: time that is not training."""
        start = time.perf_counter()
        yield
        self._not_counted_s += time.perf_counter() - start

    def step(self, *, vision_work: tuple[float, float] | None = None, **counts: float) -> None:
        """One optimizer step of this rank has ended; counts: those of COUNTS, of this rank alone.

        vision_work: FLOPs of the pictures it holds, and of those it encoded; given by all ranks or by none.
        """
        now = time.perf_counter()
        took = now - self._last - self._not_counted_s
        self._last, self._not_counted_s = now, 0.0
        self._interval_s += took
        self.seconds += took
        # A mean over about twenty steps: one slow step must not move the ETA.
        self.step_s = EMA * (self.step_s or took) + (1 - EMA) * took
        for name, value in counts.items():
            self._pending[name] += value
        if vision_work is not None:
            self._work.append(vision_work)

    def flush(self) -> None:
        """Add this rank's pending counts to the totals of all ranks. Every rank calls it."""
        for name, value in self.runtime.sum_dict(self._pending).items():
            self.totals[name] += value
            self._interval[name] += value
            self._pending[name] = 0.0
        if self._work:
            # The slowest rank of every step, with its own pictures and with those it encoded; the mean rank.
            work_S2 = torch.tensor(self._work, dtype=torch.float64)
            mean = self.runtime.sum(work_S2)[:, :1].sum(dim=0) / self.runtime.world
            self._vision_3 += torch.cat([self.runtime.max(work_S2).sum(dim=0), mean]).cpu()
            self._work = []

    def snapshot(self) -> dict[str, float]:
        """Rates since the last snapshot and totals of the run; every rank calls it.

        Keys: tokens, patches, samples (totals), tokens_per_s, patches_per_s, step_s, data_wait (share of
        time), mfu, mfu_decoder, mfu_vision (absent without a known peak), memory_gib (the fullest rank),
        seconds; vision_imbalance and vision_imbalance_after: FLOPs of the rank with most vision work in each
        step over the mean of ranks, pictures where they were read and where they were encoded (absent without
        vision_work).
        """
        measured = bool(self._work) or bool(self._vision_3.any())
        self.flush()
        # The fullest rank and the longest wait decide what a user should look at.
        elapsed = max(self._interval_s, 1e-9)
        worst = [peak_memory_bytes(self.runtime.device), self._waited_s / elapsed]
        memory_bytes, wait = self.runtime.max(torch.tensor(worst, dtype=torch.float64)).tolist()
        record = {name: self.totals[name] for name in ("tokens", "patches", "samples")}
        record |= {
            "tokens_per_s": self._interval["tokens"] / elapsed,
            "patches_per_s": self._interval["patches"] / elapsed,
            "step_s": self.step_s,
            "data_wait": min(1.0, wait),
            "memory_gib": memory_bytes / 2**30,
            "seconds": self.seconds,
        }
        if self.peak:
            done = self.peak * self.runtime.world * elapsed
            record["mfu_decoder"] = self._interval["decoder_flops"] / done
            record["mfu_vision"] = self._interval["vision_flops"] / done
            record["mfu"] = record["mfu_decoder"] + record["mfu_vision"]
        if measured:
            held, encoded, mean = self._vision_3.tolist()
            record["vision_imbalance"] = held / mean if mean else 1.0
            record["vision_imbalance_after"] = encoded / mean if mean else 1.0
        # The next interval begins now; totals go on.
        self._vision_3.zero_()
        self._interval = dict.fromkeys(COUNTS, 0.0)
        self._interval_s = self._waited_s = 0.0
        return record

    def state_dict(self) -> dict[str, Any]:
        """Totals and times, equal on all ranks; every rank calls it."""
        self.flush()
        return {
            "totals": dict(self.totals),
            "seconds": self.seconds,
            "step_s": self.step_s,
            "vision": self._vision_3.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.totals = dict(state["totals"])
        self.seconds, self.step_s = state["seconds"], state["step_s"]
        self._vision_3, self._work = state["vision"].clone(), []
        self.restart_clock()
