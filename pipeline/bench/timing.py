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
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

Call = Callable[[], Any]
FLUSH_BYTES = 1 << 28
"""Several times the L2 cache of any current GPU."""


def default_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def now() -> float:
    """Seconds of the clock; waits for the device first."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the time of a block to `seconds[name]`."""
    start = now()
    yield
    seconds[name] += now() - start


def peak_mib() -> float:
    """Peak resident memory of this process in MiB (or of the CUDA device when one is used)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@lru_cache(maxsize=4)
def _flush_buffer(device: torch.device) -> Tensor:
    return torch.empty(FLUSH_BYTES // 4, dtype=torch.float32, device=device)


def time_once(call: Call, device: torch.device) -> float:
    """Milliseconds of one call with a cold L2 cache (CUDA) or of the wall clock (CPU)."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    # What the last call left in the L2 cache would make the next one look quicker.
    _flush_buffer(device).zero_()
    start_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start_event.record()
    call()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event)


def interleaved(
    calls: Mapping[str, Call], device: torch.device, rounds: int, warmup: int = 2, budget_s: float = 20.0
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Time all calls in turn; a call too slow for ``rounds`` repetitions in ``budget_s`` gets fewer, at least
    3.

    Returns {"median_ms", "p10_ms", "p90_ms"} by name, and for calls that raised (a peer without support for a
    shape) the message instead.
    """
    # Warm up, and see how often each call can be afforded.
    repeats: dict[str, int] = {}
    failed: dict[str, str] = {}
    for name, call in calls.items():
        try:
            slowest = [time_once(call, device) for _ in range(warmup)][-1]
            repeats[name] = min(rounds, max(3, int(1e3 * budget_s / max(slowest, 1e-6))))
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


def reason(error: Exception, limit: int = 160) -> str:
    """Why a side did not run, in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:limit]


@contextmanager
def _quiet() -> Iterator[None]:
    """Drops what native code writes to the error stream: the profiler announces every start and stop
    there."""
    sys.stderr.flush()
    saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)


def peak_bytes(call: Call, device: torch.device) -> int:
    """Most bytes of tensors alive during the call beyond those alive before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    activities = [torch.profiler.ProfilerActivity.CPU]
    with _quiet(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    results: Any = profile.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())

    # Positive sizes are allocations, negative ones what was given back.
    alive = np.cumsum([0, *(event.nbytes() for event in events)])
    return int(alive.max())


@lru_cache(maxsize=4)
def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second (read plus written) of a large copy; the median of a few."""
    # Far more than any cache holds.
    elements = (1 << 30 if device.type == "cuda" else 1 << 26) // 4
    source = torch.zeros(elements, dtype=torch.float32, device=device)
    target = source.clone()
    return (
        8e3 * elements / statistics.median(time_once(lambda: target.copy_(source), device) for _ in range(7))
    )


@lru_cache(maxsize=8)
def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of a large matrix product in ``dtype``; the median of a few."""
    side = 8192 if device.type == "cuda" else 768
    a = torch.randn(side, side, device=device).to(dtype)
    torch.mm(a, a)
    return 2e3 * side**3 / statistics.median(time_once(lambda: torch.mm(a, a), device) for _ in range(7))


@dataclass(frozen=True)
class Work:
    """Least bytes moved and operations done by a call."""

    bytes: float
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def floor_ms(self, device: torch.device, dtype: torch.dtype) -> float:
        """The larger of the times at copy bandwidth and at the rate of a large product."""
        return 1e3 * max(self.bytes / copy_bandwidth(device), self.flops / product_rate(device, dtype))
