"""What a GPU, its node and its network can do, and how long an operation takes there at least.

Peaks are the data sheets'; what is reached of them is an assumption that is named beside the number, until a
run has been measured (`earlyfusion plan --calibrate RUN` scales by one). Nothing here was measured on a GPU.

A step's time is the sum over its operations of the larger of arithmetic and memory traffic (roofline), but
never less than a launch. Operations of standins.py say themselves how long they take.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.model.engine.cpu import free_memory
from earlyfusion.pipeline.step import PEAKS, measured_peak

USABLE = 0.92
"""Share of a GPU's memory that a plan may take: the rest is the CUDA context's, NCCL's and fragments."""
GB = 1e9
NODE = 8
"""GPUs of a node."""


@dataclass(frozen=True)
class Hardware:
    """One kind of machine. peak, products: FLOP/s of the data sheet (bf16) and of real matrix products;
    copy_bytes_s: memory traffic that a copy reaches; node_bytes_s, net_bytes_s: what one GPU sends inside a
    node and between nodes; memory: bytes; node: GPUs; launch_s: the shortest operation."""

    name: str
    peak: float
    products: float
    copy_bytes_s: float
    node_bytes_s: float
    net_bytes_s: float
    memory: float
    node: int = NODE
    launch_s: float = 4e-6
    gpu: bool = True


# Assumed: products at 0.8 of the peak, copies at 0.9 of HBM (4.8, 3.35, 2.0 and 8.0 TB/s), NVLink (900, 600
# and 1,800 GB/s both ways) and an adapter a GPU (400 or 200 Gbit/s) at 0.8 of one direction.
GPUS = {
    "h200": Hardware("H200", PEAKS["H200"], 790e12, 4300 * GB, 360 * GB, 40 * GB, 141 * GB),
    "h100": Hardware("H100", PEAKS["H100"], 790e12, 3000 * GB, 360 * GB, 40 * GB, 80 * GB),
    "a100": Hardware("A100", PEAKS["A100"], 250e12, 1800 * GB, 240 * GB, 20 * GB, 80 * GB),
    "b200": Hardware("B200", PEAKS["B200"], 1800e12, 7200 * GB, 720 * GB, 40 * GB, 180 * GB),
}


def hardware(name: str) -> Hardware:
    """The machine of this name, or this one: "cpu". Raises UserError with the nearest name."""
    if name == "cpu":
        return this_cpu()
    if name.lower() not in GPUS:
        raise UserError(f"--gpu {name!r} is not known; {did_you_mean(name, [*GPUS, 'cpu'])}")
    return GPUS[name.lower()]


def this_cpu(size: int = 1 << 24, seconds: float = 0.2) -> Hardware:
    """This machine: its products and copies, timed for a moment. Processes share it, memory is their link."""
    peak = measured_peak(torch.float32, torch.get_num_threads())
    given, out, best = torch.ones(size), torch.empty(size), float("inf")
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = time.perf_counter()
        out.copy_(given)
        best = min(best, time.perf_counter() - start)
    copied = 2 * given.nbytes / best
    links = copied / 4, copied / 4
    return Hardware("CPU", peak, peak, copied, *links, free_memory(), launch_s=5e-6, gpu=False)


@dataclass
class Clock:
    """Adds up how long operations take on `machine`, and their FLOPs."""

    machine: Hardware
    seconds: float = 0.0
    flops: float = 0.0

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """One operation of torch."""
        name = func.__name__
        if func.namespace != "aten" or func.is_view or "empty" in name or "detach" in name:
            return
        flops = 0.0
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            flops = float(count(*args, **kwargs, out_val=out))
        self.add(flops / self.machine.products, size_of(args) + size_of(out), flops)

    def add(self, seconds: float, nbytes: float, flops: float = 0.0) -> None:
        """An operation that computes for so long, and moves so many bytes."""
        self.seconds += max(seconds, nbytes / self.machine.copy_bytes_s, self.machine.launch_s)
        self.flops += flops


def size_of(value: Any) -> int:
    """Bytes of a tensor, or of a list of them."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(size_of, value)) if isinstance(value, list | tuple) else 0
