"""One comparison of kernels: the same inputs through several sides, and their error against the law.

`earlyfusion bench kernels` measures cases, `earlyfusion doctor` only asks for their errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from earlyfusion.kernels.dispatch import REGISTRY, load, resolve
from earlyfusion.pipeline.bench.timing import NOTHING, Work, reason

Side = Callable[..., Any]
PEERS = ("fla", "torch", "eager", "transformers", "recurrence", "muon")
FLA = ("fla", "fla-core==0.6.0")
"""A package, and what pip calls it."""


class Setting:
    """Where and what: device, dtype of the data, which peers; check: small shapes for the comparison with
    float64."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, against: Sequence[str] = (), check: bool = False
    ) -> None:
        self.device, self.dtype, self.against, self.check = device, dtype, against, check
        # Seeded by whoever draws, group by group.
        self.generator = torch.Generator(device)
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

    def tolerance(self, wide: float = 2e-5) -> float:
        """Relative error that is allowed: `wide` in float32."""
        return 0.03 if self.dtype == torch.bfloat16 else wide


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
    law: Side | None = None
    forward: Work = NOTHING
    backward: Work | None = None
    tolerance: float = 0.03
    skipped: dict[str, str] = field(default_factory=dict)

    def add_peer(self, name: str, package: str, install: str, side: Callable[[], Side]) -> None:
        """Add a peer, or the reason why it is not there."""
        # Looked up, not imported: an import may fail without a GPU.
        if find_spec(package) is None:
            self.skipped[name] = f"not installed: pip install {install}"
        else:
            self.sides[name] = side()


def ours(op: str, setting: Setting) -> dict[str, Side]:
    """Our backends of an operation: what dispatch picks, on a GPU with the torch form as a peer."""
    # EF_KERNELS counts here as everywhere.
    sides = {"ours": resolve(op, setting.device)}
    if setting.gpu and "torch" in setting.against and "torch" in REGISTRY[op]:
        sides["torch form"] = load(REGISTRY[op]["torch"])
    return sides


def law_of(op: str) -> Side:
    """The definition of an operation."""
    return load(REGISTRY[op]["naive"])


def case_of(
    op: str,
    label: str,
    setting: Setting,
    leaves: list[Tensor],
    *after: Any,
    forward: Work = NOTHING,
    backward: Work | None = None,
    wide: float = 2e-5,
    around: Callable[[Side], Side] | None = None,
    **options: Any,
) -> Case:
    """A case of one operation: our backends and its law, called alike as `op(*leaves, *after, **options)`, or
    as `around(op)(*leaves)`."""

    def plain(backend: Side) -> Side:
        return lambda *given: backend(*given, *after, **options)

    call = around or plain
    sides = {name: call(backend) for name, backend in ours(op, setting).items()}
    return Case(op, label, leaves, sides, call(law_of(op)), forward, backward, setting.tolerance(wide))


def outputs_of(side: Side, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that a side returns, also out of lists and tuples inside."""
    # Operations return tensors, tuples and lists of them; order is all that counts.
    found, waiting = [], [side(*leaves)]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, Tensor):
            found.append(one)
        elif one is not None:
            waiting = [*one, *waiting]
    return found


def cotangents_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """A direction for every output, the same numbers whatever the dtype and device."""
    # Drawn on the CPU, so that every device sees the same numbers.
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(out.shape, generator=generator).to(out) for out in outputs]


def forward_and_backward(
    side: Side, leaves: Sequence[Tensor], slopes: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Outputs, and the gradients of all leaves that want one along the slopes (`cotangents_of` where none are
    given)."""
    outputs = outputs_of(side, leaves)
    trained = [leaf for leaf in leaves if leaf.requires_grad]

    # Outputs without a gradient (a mask, an entropy) have no slope.
    pairs = zip(outputs, slopes or cotangents_of(outputs))
    sloped = [(out, slope.to(out.dtype)) for out, slope in pairs if out.requires_grad]
    if not trained or not sloped:
        return outputs
    heads, directions = zip(*sloped)
    return [*outputs, *torch.autograd.grad(heads, trained, directions, materialize_grads=True)]


def copied(leaves: Sequence[Tensor], wide: bool = False) -> list[Tensor]:
    """The same inputs anew, in float64 if `wide`: a kernel may update a state in place."""
    copies = []
    for leaf in leaves:
        copy = leaf.detach().clone()
        if wide and copy.is_floating_point():
            copy = copy.double()
        copies.append(copy.requires_grad_(leaf.requires_grad))
    return copies


def relative_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Worst over tensors of ||got - expected|| / ||expected||; infinite if anything is not finite."""
    # The 2-norm of a whole tensor: single entries near zero have no relative error.
    worst = 0.0
    for one, law in zip(got, expected):
        one, law = one.detach().double(), law.detach().double().to(one.device)
        if one.shape != law.shape or not bool(torch.isfinite(one).all()):
            return float("inf")
        worst = max(worst, float((one - law).norm() / law.norm().clamp_min(1e-30)))
    return worst


def errors(case: Case) -> dict[str, float]:
    """Relative error (2-norm, worst tensor) of every side against the law in float64, outputs and
    gradients."""
    if case.law is None:
        return {}

    # The law in float64 is as near to the truth as it gets.
    expected = forward_and_backward(case.law, copied(case.leaves, wide=True))
    found = {}
    for name, side in case.sides.items():
        try:
            found[name] = relative_error(forward_and_backward(side, copied(case.leaves)), expected)
        except Exception as error:  # a peer's failure is a result of the comparison
            case.skipped[name] = reason(error)
    return found
