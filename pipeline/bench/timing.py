"""Measuring calls honestly: interleaved with their peers, cold caches, medians with spread, peak memory, the
floor.

On CUDA a call is timed by events after the L2 cache was overwritten; on a CPU by the clock. Candidates of one
case take turns (A B C A B C ...), so that clocks, temperature and neighbours hit all alike. The floor of a
case is what its bytes and operations would take at the bandwidth of a large copy and the rate of a large
matrix product, both measured in the same process.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

Call = Callable[[], Any]
FLUSH_BYTES = 1 << 28
"""Several times the L2 cache of any current GPU."""
BUDGET_MS = 20_000
"""Longest time that the calls of one side may take; at least three are made."""


def default_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def now() -> float:
    """Seconds of the clock; waits for the device first."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_mib() -> float:
    """Peak resident memory of this process in MiB (or of the CUDA device when one is used)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@cache
def _flush_buffer(device: torch.device) -> torch.Tensor:
    return torch.empty(FLUSH_BYTES // 4, device=device)


def time_once(call: Call, device: torch.device) -> float:
    """Milliseconds of one call with a cold L2 cache (CUDA) or of the wall clock (CPU)."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    # What the last call left in the L2 cache would make the next one look quicker.
    _flush_buffer(device).zero_()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def interleaved(
    calls: Mapping[str, Call], device: torch.device, rounds: int
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Time all calls in turn; a call too slow for ``rounds`` repetitions in BUDGET_MS gets fewer.

    Returns {"median_ms", "p10_ms", "p90_ms"} by name, and for calls that raised (a peer without support for a
    shape) the message instead.
    """
    # The first call compiles and allocates, the second says how many can be afforded.
    repeats: dict[str, int] = {}
    failed: dict[str, str] = {}
    for name, call in calls.items():
        try:
            time_once(call, device)
            repeats[name] = min(rounds, max(3, int(BUDGET_MS / time_once(call, device))))
        except Exception as error:  # a peer's failure is a result of the comparison, not an end of it
            failed[name] = reason(error)

    # All take turns, so that clocks, heat and neighbours hit all alike.
    samples: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        for name, most in repeats.items():
            if number < most:
                samples[name].append(time_once(calls[name], device))

    # Median and spread: a mean would follow one bad moment.
    timings = {}
    for name, values in samples.items():
        low, middle, high = np.quantile(values, [0.1, 0.5, 0.9]).tolist()
        timings[name] = {"median_ms": middle, "p10_ms": low, "p90_ms": high}
    return timings, failed


def reason(error: Exception) -> str:
    """Why a side did not run, in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def peak_bytes(call: Call, device: torch.device) -> int:
    """Most bytes of tensors alive during the call beyond those alive before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    # The profiler announces every start and stop on stderr unless it is told not to.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # The allocator of a CPU counts nothing; its events do.
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    results: Any = profile.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())

    # Positive sizes are allocations, negative ones what was given back.
    alive = np.cumsum([0, *(event.nbytes() for event in events)])
    return int(alive.max())


@cache
def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second (read plus written) of a large copy; the median of a few."""
    # Far more than any cache holds.
    elements = (1 << 28) if device.type == "cuda" else (1 << 24)
    source = torch.zeros(elements, device=device)
    target = source.clone()
    times = [time_once(lambda: target.copy_(source), device) for _ in range(7)]
    return 8e3 * elements / statistics.median(times)


@cache
def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of a large matrix product in ``dtype``; the median of a few."""
    side = 8192 if device.type == "cuda" else 768
    a = torch.randn(side, side, device=device).to(dtype)
    times = [time_once(lambda: a @ a, device) for _ in range(8)]
    return 2e3 * side**3 / statistics.median(times[1:])


@dataclass(frozen=True)
class Work:
    """Least bytes moved and operations done by a call."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def floor_ms(self, device: torch.device, dtype: torch.dtype) -> float:
        """The larger of the times at copy bandwidth and at the rate of a large product."""
        return 1e3 * max(self.bytes / copy_bandwidth(device), self.flops / product_rate(device, dtype))


NOTHING = Work()
