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

# Dense bf16 tensor-core FLOP/s by a part of torch.cuda.get_device_name. First match wins.
PEAKS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "A10": 125e12,
}
EMA = 0.95

COUNTS = ("tokens", "patches", "samples", "decoder_flops", "vision_flops")


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of one device in `dtype`; None for a GPU that is not in the table, and for float32 on one,
    whose peak depends on how it is multiplied (MFU is then not shown)."""
    if device.type != "cuda":
        return measured_peak(dtype, torch.get_num_threads())
    name = torch.cuda.get_device_name(device)
    known = [peak for part, peak in PEAKS.items() if part in name and dtype == torch.bfloat16]
    return known[0] if known else None


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

    dtype: compute dtype of the matmuls (for the peak). peak: FLOP/s of one rank; None looks it up.
    """

    def __init__(
        self, runtime: Runtime, dtype: torch.dtype = torch.float32, peak: float | None = None
    ) -> None:
        self.runtime = runtime
        self.peak = peak_flops(runtime.device, dtype) if peak is None else peak
        self.totals = dict.fromkeys(COUNTS, 0.0)  # over all ranks, over the whole run
        self.seconds = self.step_s = 0.0  # in all, and their exponential moving average
        self._pending = dict.fromkeys(COUNTS, 0.0)  # of this rank, since the last flush
        self.restart_clock()

    def restart_clock(self) -> None:
        """Begin a new interval now: set-up, loading and compiling before this do not count."""
        self._before, self._began_s = dict(self.totals), self.seconds
        self._waited_s = self._not_counted_s = 0.0
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

    def step(self, **counts: float) -> None:
        """One optimizer step of this rank has ended; counts: those of COUNTS, of this rank alone."""
        now = time.perf_counter()
        took = now - self._last - self._not_counted_s
        self._last, self._not_counted_s = now, 0.0
        self.seconds += took
        # A mean over about twenty steps: one slow step must not move the ETA.
        self.step_s = EMA * (self.step_s or took) + (1 - EMA) * took
        for name, value in counts.items():
            self._pending[name] += value

    def flush(self) -> None:
        """Add this rank's pending counts to the totals of all ranks. Every rank calls it."""
        for name, value in self.runtime.sum_dict(self._pending).items():
            self.totals[name] += value
            self._pending[name] = 0.0

    def snapshot(self) -> dict[str, float]:
        """Rates since the last snapshot and totals of the run; every rank calls it.

        Keys: tokens, patches, samples (totals), tokens_per_s, patches_per_s, step_s, data_wait (share of
        time), mfu, mfu_decoder, mfu_vision (absent without a known peak), memory_gib (the fullest rank),
        seconds.
        """
        self.flush()
        elapsed = max(self.seconds - self._began_s, 1e-9)
        rates = {name: (self.totals[name] - self._before[name]) / elapsed for name in COUNTS}
        # The fullest rank and the longest wait decide what a user should look at.
        worst = [peak_memory_bytes(self.runtime.device), self._waited_s / elapsed]
        memory_bytes, wait = self.runtime.max(torch.tensor(worst, dtype=torch.float64)).tolist()
        record = {name: self.totals[name] for name in ("tokens", "patches", "samples")}
        record |= {
            "tokens_per_s": rates["tokens"],
            "patches_per_s": rates["patches"],
            "step_s": self.step_s,
            "data_wait": min(1.0, wait),
            "memory_gib": memory_bytes / 2**30,
            "seconds": self.seconds,
        }
        if self.peak:
            peak = self.peak * self.runtime.world
            record["mfu_decoder"] = rates["decoder_flops"] / peak
            record["mfu_vision"] = rates["vision_flops"] / peak
            record["mfu"] = record["mfu_decoder"] + record["mfu_vision"]
        # The next interval begins where the last step ended; totals go on.
        self._before, self._began_s, self._waited_s = dict(self.totals), self.seconds, 0.0
        return record

    def state_dict(self) -> dict[str, Any]:
        """Totals and times, equal on all ranks; every rank calls it."""
        self.flush()
        return {"totals": dict(self.totals), "seconds": self.seconds, "step_s": self.step_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.totals = dict(state["totals"])
        self.seconds, self.step_s = state["seconds"], state["step_s"]
        self.restart_clock()
