"""What `earlyfusion bench kernels` measures: a case, its sides, and how both are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from earlyfusion.kernels.dispatch import REGISTRY, load
from earlyfusion.pipeline.bench import timing as bench
from earlyfusion.pipeline.bench.timing import Work

Side = Callable[..., Any]


@dataclass
class Case:
    """One comparison: the same inputs through several sides.

    sides: name -> function of the leaves; "ours" first. law: the float64 definition, or None where the sides
    compute different functions. forward and backward: the least work. tolerance: of ours against the law,
    relative. leaves_of: the same inputs in the dtypes that a side wants, so that casting them is not timed as
    its work.
    """

    group: str
    label: str
    leaves: list[Tensor]
    cotangents: list[Tensor]
    sides: dict[str, Side]
    forward: Work
    backward: Work | None
    law: Side | None = None
    tolerance: float = 0.05
    skipped: dict[str, str] = field(default_factory=dict)
    leaves_of: dict[str, list[Tensor]] = field(default_factory=dict)

    def inputs(self, side: str) -> list[Tensor]:
        return self.leaves_of.get(side, self.leaves)


@dataclass(frozen=True)
class Setting:
    """Where and what: device, dtype of the data, which peers, full sizes (a GPU) or small ones."""

    device: torch.device
    dtype: torch.dtype
    against: frozenset[str]
    generator: torch.Generator
    check: bool = False  # small shapes for the comparison with float64

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    def randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers, drawn in float32 on the device the setting names."""
        x = torch.randn(*shape, generator=self.generator, device=self.device)
        return x.mul_(scale).to(dtype or self.dtype)


def ours(op: str, setting: Setting) -> dict[str, Side]:
    """Our backends of an operation: on a GPU Triton as "ours" and the torch form as a peer, on a CPU the
    torch form."""
    entries = REGISTRY[op]
    best = "triton" if setting.gpu and "triton" in entries else "torch" if "torch" in entries else "naive"
    sides = {"ours": load(entries[best])}
    if best == "triton" and "torch" in entries and "torch" in setting.against:
        sides["torch form"] = load(entries["torch"])
    return sides


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def measure(case: Case, setting: Setting, rounds: int) -> dict[str, Any]:
    """Timings, memory and achieved rates of every side; a side that raises is reported with its message."""
    device, dtype = setting.device, setting.dtype

    def forward(name: str) -> Callable[[], Any]:
        def call() -> None:
            with torch.no_grad():
                case.sides[name](*case.inputs(name))

        return call

    def both(name: str) -> Callable[[], Any]:
        return lambda: bench.forward_and_backward(case.sides[name], case.inputs(name), case.cotangents)

    result: dict[str, Any] = {
        "group": case.group,
        "label": case.label,
        "sides": {},
        "failed": dict(case.skipped),
    }
    passes = [("forward", forward, case.forward)]
    if case.backward is not None:
        passes.append(("both", both, case.forward + case.backward))
    for name, make, work in passes:
        timings, failed = bench.interleaved({side: make(side) for side in case.sides}, device, rounds)
        result["failed"] |= failed
        floor = work.floor_ms(device, dtype)
        result[f"{name}_floor_ms"] = floor
        for side, timing in timings.items():
            seconds = timing.median_ms / 1e3
            result["sides"].setdefault(side, {})[name] = {
                "median_ms": timing.median_ms,
                "p10_ms": timing.p10_ms,
                "p90_ms": timing.p90_ms,
                "tb_per_s": work.bytes / seconds / 1e12,
                "tflop_per_s": work.flops / seconds / 1e12,
                "share_of_floor": floor / timing.median_ms,
                "peak_mib": bench.peak_bytes(make(side), device) / 2**20,
            }
    return result


def errors(case: Case) -> dict[str, float]:
    """Relative error (2-norm, worst tensor) of every side against the law in float64, outputs and
    gradients."""
    if case.law is None:
        return {}
    wide = [
        (x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x)
        for x in case.leaves
    ]
    want = _values(case.law, wide, case.cotangents)
    found = {}
    for name, side in case.sides.items():
        try:
            found[name] = bench.relative_error(_values(side, case.inputs(name), case.cotangents), want)
        except Exception as error:
            case.skipped[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return found


def _values(side: Side, leaves: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
    outputs = side(*leaves)
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    values = [out.detach() for out, _ in zip(outputs, cotangents)]
    if any(x.requires_grad for x in leaves):
        values += bench.forward_and_backward(
            side, leaves, [c.double() if values[0].dtype == torch.float64 else c for c in cotangents]
        )
    return values
