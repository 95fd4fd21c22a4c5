"""One comparison of kernels: the same inputs through several sides, and their error against the law.

`earlyfusion bench kernels` measures cases, `earlyfusion doctor` only asks for their errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from earlyfusion.kernels.dispatch import REGISTRY, load, resolve
from earlyfusion.pipeline.bench.timing import NOTHING, Work, reason

Side = Callable[..., Any]
PEERS = ("fla", "torch", "eager", "transformers", "recurrence", "muon")


@dataclass
class Setting:
    """Where and what: device, dtype of the data, which peers; check: small shapes for the comparison with
    float64."""

    device: torch.device
    dtype: torch.dtype
    against: Sequence[str] = ()
    check: bool = False

    def __post_init__(self) -> None:
        # Seeded by whoever draws, group by group.
        self.generator = torch.Generator(self.device)
        self.gpu = self.device.type == "cuda"

    def randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers, drawn in float32 on the setting's device."""
        x = torch.randn(*shape, generator=self.generator, device=self.device)
        return x.mul_(scale).to(dtype or self.dtype)

    def rand(self, *shape: int) -> Tensor:
        """Uniform numbers in [0, 1), float32."""
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def leaf(self, *shape: int, **options: Any) -> Tensor:
        """Normal numbers that want a gradient; options of `randn`."""
        return self.randn(*shape, **options).requires_grad_()

    def pick(self, check: Any, gpu: Any, cpu: Any) -> Any:
        """Shapes: small odd ones for the check, full ones on a GPU, small ones on a CPU."""
        if self.check:
            return check
        return gpu if self.gpu else cpu


@dataclass
class Case:
    """One comparison.

    ops: the operations of the registry that it runs, between spaces. sides: name -> function of the leaves;
    "ours" first. law: the float64 definition, or None where the sides compute different functions. forward
    and backward: the least work. tolerance: of ours against the law, relative. skipped: peer -> why it is not
    there.
    """

    ops: str
    label: str
    leaves: list[Tensor]
    sides: dict[str, Side]
    law: Any = None
    forward: Work = NOTHING
    backward: Work | None = None
    tolerance: float = 0.03
    skipped: dict[str, str] = field(default_factory=dict)


def case_of(
    ops: str,
    label: str,
    setting: Setting,
    leaves: list[Tensor],
    *after: Any,
    wide: float = 2e-5,
    around: Callable[..., Side] | None = None,
    forward: Work = NOTHING,
    backward: Work | None = None,
    **options: Any,
) -> Case:
    """A case of operations: what dispatch picks, on a GPU the torch form as a peer, and the law. They are
    called alike, as `op(*leaves, *after, **options)`, or as `around(*ops)(*leaves)`.

    wide: the tolerance in float32.
    """

    def plain(op: Side) -> Side:
        return lambda *given: op(*given, *after, **options)

    names, call = ops.split(), around or plain
    # EF_KERNELS counts here as everywhere.
    sides = {"ours": call(*(resolve(op, setting.device) for op in names))}
    if setting.gpu and "torch" in setting.against and "torch" in REGISTRY[names[0]]:
        sides["torch form"] = call(*(load(REGISTRY[op]["torch"]) for op in names))
    law = call(*(load(REGISTRY[op]["naive"]) for op in names))
    tolerance = 0.03 if setting.dtype == torch.bfloat16 else wide
    return Case(ops, label, leaves, sides, law, forward, backward, tolerance)


def tensors_in(found: Any) -> Iterator[Tensor]:
    """The tensors of what an operation returns, also in lists and tuples inside: order is all that counts."""
    if isinstance(found, Tensor):
        yield found
    elif found is not None:
        for one in found:
            yield from tensors_in(one)


def slopes_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """A direction for every output, drawn on the CPU: the same numbers whatever the dtype and device."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(out.shape, generator=generator).to(out) for out in outputs]


def forward_and_backward(
    side: Side, leaves: Sequence[Tensor], slopes: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Outputs, and the gradients of all leaves that want one along the slopes (`slopes_of` where none are
    given)."""
    outputs = list(tensors_in(side(*leaves)))
    trained = [leaf for leaf in leaves if leaf.requires_grad]

    # Outputs without a gradient (a mask, an entropy) have no slope.
    pairs = zip(outputs, slopes or slopes_of(outputs))
    sloped = [(out, slope.to(out.dtype)) for out, slope in pairs if out.requires_grad]
    if not trained or not sloped:
        return outputs
    heads, directions = zip(*sloped)
    return [*outputs, *torch.autograd.grad(heads, trained, directions, materialize_grads=True)]


def on_copies(side: Side, leaves: Sequence[Tensor], wide: bool) -> list[Tensor]:
    """`forward_and_backward` on copies, in float64 if `wide`: a kernel may update a state in place."""
    copies = []
    for leaf in leaves:
        copy = leaf.detach().clone()
        if wide and copy.is_floating_point():
            copy = copy.double()
        copies.append(copy.requires_grad_(leaf.requires_grad))
    return forward_and_backward(side, copies)


def relative_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Worst over tensors of ||got - expected|| / ||expected||; infinite if anything is not finite."""
    # The 2-norm of a whole tensor: single entries near zero have no relative error.
    worst = 0.0
    for one, law in zip(got, expected):
        one, law = one.detach().double(), law.detach().to(one.device)
        if one.shape != law.shape or not bool(one.isfinite().all()):
            return float("inf")
        worst = max(worst, float((one - law).norm() / law.norm().clamp_min(1e-30)))
    return worst


def errors(case: Case) -> dict[str, float]:
    """Relative error (2-norm, worst tensor) of every side against the law in float64, outputs and
    gradients."""
    if case.law is None:
        return {}

    # The law in float64 is as near to the truth as it gets.
    expected = on_copies(case.law, case.leaves, wide=True)
    found = {}
    for name, side in case.sides.items():
        try:
            found[name] = relative_error(on_copies(side, case.leaves, wide=False), expected)
        except Exception as error:  # a peer's failure is a result of the comparison
            case.skipped[name] = reason(error)
    return found
