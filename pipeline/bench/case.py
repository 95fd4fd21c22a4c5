"""What `earlyfusion bench kernels` measures: a case, its sides, and where it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from earlyfusion.kernels.dispatch import REGISTRY, load
from earlyfusion.pipeline.bench.timing import Work

Side = Callable[..., Any]
PEERS = ("fla", "torch", "eager", "transformers", "recurrence", "muon", "liger")
FLA = ("fla", "fla-core==0.6.0")
"""A package, and what pip calls it."""


@dataclass
class Case:
    """One comparison: the same inputs through several sides.

    sides: name -> function of the leaves; "ours" first. law: the float64 definition, or None where the sides
    compute different functions. forward and backward: the least work. tolerance: of ours against the law,
    relative. skipped: peer -> why it is not there. leaves_of: the same inputs in the dtypes that a side
    takes, so that casting them is not timed as its work.
    """

    label: str
    leaves: list[Tensor]
    cotangents: list[Tensor]
    sides: dict[str, Side]
    forward: Work
    backward: Work | None = None
    law: Side | None = None
    tolerance: float = 0.03
    skipped: dict[str, str] = field(default_factory=dict)
    leaves_of: dict[str, list[Tensor]] = field(default_factory=dict)
    group: str = ""

    def inputs(self, side: str) -> list[Tensor]:
        return self.leaves_of.get(side, self.leaves)


class Setting:
    """Where and what: device, dtype of the data, which peers; check: small shapes for the comparison with
    float64."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        against: frozenset[str],
        seed: int = 0,
        check: bool = False,
    ) -> None:
        self.device, self.dtype, self.against, self.seed, self.check = device, dtype, against, seed, check
        self.generator = torch.Generator(device).manual_seed(seed)
        self.gpu = device.type == "cuda"

    def randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers, drawn in float32 on the setting's device."""
        x = torch.randn(*shape, generator=self.generator, device=self.device)
        return x.mul_(scale).to(dtype or self.dtype)

    def rand(self, *shape: int) -> Tensor:
        """Uniform numbers in [0, 1), float32."""
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def leaf(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers that want a gradient."""
        return self.randn(*shape, scale=scale, dtype=dtype).requires_grad_()

    def pick(self, check: Any, gpu: Any, cpu: Any) -> Any:
        """Shapes: small odd ones for the check, full ones on a GPU, small ones on a CPU."""
        if self.check:
            return check
        return gpu if self.gpu else cpu

    def tolerance(self, wide: float = 1e-4) -> float:
        """Relative error that is allowed: `wide` in float32."""
        return 0.03 if self.dtype == torch.bfloat16 else wide


def ours(op: str, setting: Setting) -> dict[str, Side]:
    """Our backends of an operation: on a GPU Triton as "ours" and the torch form as a peer, on a CPU the
    torch form."""
    # Where there is no fast form, the law itself is what users get.
    entries = REGISTRY[op]
    if setting.gpu and "triton" in entries:
        sides = {"ours": load(entries["triton"])}
        if "torch" in entries and "torch" in setting.against:
            sides["torch form"] = load(entries["torch"])
        return sides
    return {"ours": load(entries.get("torch", entries["naive"]))}


@dataclass(frozen=True)
class Called:
    """`op(*leaves, *after, **options)`; of several outputs the first `outputs`."""

    op: Side
    after: tuple[Any, ...]
    options: dict[str, Any]
    outputs: int

    def __call__(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        found = self.op(*leaves, *self.after, **self.options)
        return found[: self.outputs] if isinstance(found, tuple) else (found,)


def add_peer(case: Case, name: str, package: str, install: str, side: Callable[[], Side]) -> None:
    """Add a peer, or the reason why it is not there."""
    if find_spec(package) is None:
        case.skipped[name] = f"not installed: pip install {install}"
    else:
        case.sides[name] = side()


def case_of(
    op: str,
    label: str,
    setting: Setting,
    leaves: list[Tensor],
    cotangents: list[Tensor],
    after: tuple[Any, ...] = (),
    **more: Any,
) -> Case:
    """A case of one operation of the registry: our backends and its law, called alike as `op(*leaves,
    *after)`.

    more: other fields of the case, and "options", which the operation takes by name.
    """
    # The law and every backend get the same arguments, so that only the form differs.
    call = partial(Called, after=after, options=more.pop("options", {}), outputs=len(cotangents))
    sides: dict[str, Side] = {name: call(backend) for name, backend in ours(op, setting).items()}
    law = call(load(REGISTRY[op]["naive"]))
    return Case(label, leaves, cotangents, sides, law=law, **{"tolerance": setting.tolerance(), **more})
