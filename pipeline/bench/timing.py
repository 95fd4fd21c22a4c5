"""Measuring kernels honestly: interleaved with their peers, cold caches, medians with spread, peak memory,
the floor.

On CUDA a call is timed by events after the L2 cache was overwritten; on a CPU by the clock. Candidates of one
case take turns (A B C A B C ...), so that clocks, temperature and neighbours hit all alike. The floor of a
case is what its bytes and operations would take at the bandwidth of a large copy and the rate of a large
matrix product, both measured in the same process.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]
FLUSH_BYTES = 1 << 28  # several times the L2 cache of any current GPU


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median and the 10th and 90th percentile over ``rounds`` calls."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    rounds: int


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@lru_cache(maxsize=4)
def _flush_buffer(device: torch.device) -> Tensor:
    return torch.empty(FLUSH_BYTES // 4, dtype=torch.float32, device=device)


def time_once(call: Call, device: torch.device) -> float:
    """Milliseconds of one call with a cold L2 cache (CUDA) or of the wall clock (CPU)."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    _flush_buffer(device).zero_()
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    call()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event)


def interleaved(
    calls: Mapping[str, Call], device: torch.device, rounds: int, warmup: int = 2, budget_s: float = 20.0
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time all calls in turn; a call too slow for ``rounds`` repetitions in ``budget_s`` gets fewer, at least
    3.

    Returns the timings by name, and for calls that raised (a peer without support for a shape) the message
    instead.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    failed: dict[str, str] = {}
    wanted: dict[str, int] = {}
    for name, call in calls.items():
        try:
            slowest = time_once(call, device)
            for _ in range(warmup - 1):
                slowest = time_once(call, device)
            wanted[name] = min(rounds, max(3, int(1e3 * budget_s / max(slowest, 1e-6))))
        except Exception as error:  # a peer's failure is a result of the comparison, not an end of it
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
    for number in range(rounds):
        for name, call in calls.items():
            if name not in failed and number < wanted[name]:
                samples[name].append(time_once(call, device))
    return {
        name: Timing(statistics.median(values), quantile(values, 0.1), quantile(values, 0.9), len(values))
        for name, values in samples.items()
        if values
    }, failed


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
    with (
        _quiet(),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile,
    ):
        call()
    results: Any = profile.profiler
    events = [
        (event.start_ns(), event.nbytes())
        for event in results.kineto_results.events()
        if event.name() == "[memory]"
    ]
    alive = peak = 0
    for _, size in sorted(events, key=lambda item: item[0]):
        alive += size
        peak = max(peak, alive)
    return peak


@lru_cache(maxsize=4)
def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second (read plus written) of a large copy; the median of a few."""
    elements = (1 << 30 if device.type == "cuda" else 1 << 26) // 4
    source, target = (torch.empty(elements, dtype=torch.float32, device=device) for _ in range(2))
    source.zero_()
    call = lambda: target.copy_(source)
    call()
    return 8 * elements / (statistics.median(time_once(call, device) for _ in range(7)) / 1e3)


@lru_cache(maxsize=8)
def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of a large matrix product in ``dtype``; the median of a few."""
    side = 8192 if device.type == "cuda" else 768
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    call = lambda: torch.mm(a, b)
    call()
    return 2 * side**3 / (statistics.median(time_once(call, device) for _ in range(7)) / 1e3)


@dataclass(frozen=True)
class Work:
    """Least bytes moved and operations done by a call."""

    bytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def floor_ms(self, device: torch.device, dtype: torch.dtype) -> float:
        """The larger of the times at copy bandwidth and at the rate of a large product."""
        return 1e3 * max(self.bytes / copy_bandwidth(device), self.flops / product_rate(device, dtype))


def relative_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Worst over tensors of ||got - want|| / ||want||; infinite if anything is not finite."""
    worst = 0.0
    for g, w in zip(got, want, strict=True):
        g, w = g.double(), w.double().to(g.device)
        if not bool(torch.isfinite(g).all()):
            return float("inf")
        worst = max(worst, float((g - w).norm() / w.norm().clamp_min(1e-30)))
    return worst


def forward_and_backward(
    function: Callable[..., Any], leaves: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of all leaves that require one, for fixed cotangents of the outputs."""
    outputs = function(*leaves)
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    pairs = [
        (out, cotangent.to(out.dtype)) for out, cotangent in zip(outputs, cotangents) if out.requires_grad
    ]
    return list(
        torch.autograd.grad([out for out, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True)
    )
