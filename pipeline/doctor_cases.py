"""One small random case per kernel operation, for `earlyfusion doctor`: any backend against its law.

A case is the call of an operation on inputs made in float64 from a seeded generator; inputs listed as
differentiable get gradients of a fixed random projection of the output. Shapes are odd and packed on purpose.

Shapes: T tokens of the packed documents, H heads, K key and V value width, D width, E experts, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from earlyfusion.kernels.attnres.block import SubLayer
from earlyfusion.kernels.dispatch import REGISTRY, load, resolve
from earlyfusion.kernels.segments import Segments

Op = Callable[..., Any]
Inputs = dict[str, Tensor]
LENGTHS = (37, 1, 64, 11)
NEWEST = (5, 1, 20, 11)  # tokens at the ends of those documents
T = sum(LENGTHS)

# Error of a float32 backend against the float64 law, relative to the largest entry of each tensor. KDA
# multiplies decays over whole documents and inverts a triangular matrix per chunk, hence ten times more.
TOLERANCE = 2e-5
TOLERANCES = {"kda": 2e-4}


@dataclass(frozen=True)
class Case:
    """call(op, inputs) -> outputs; shapes of the inputs by name; names of those that are differentiated."""

    call: Callable[[Op, Inputs], Iterable[Tensor]]
    shapes: dict[str, tuple[int, ...]]
    grads: tuple[str, ...]


CASES: dict[str, Case] = {}


def case(grads: str = "", /, **shapes: tuple[int, ...]) -> Callable[[Any], Any]:
    """Register the decorated call as the case of the operation that it is named after."""

    def register(call: Any) -> Any:
        CASES[call.__name__] = Case(call, shapes, tuple(grads.split()))
        return call

    return register


def segments() -> Segments:
    return Segments.from_lengths(LENGTHS)


def integers(high: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The same random integers below `high` for every backend, on the device of `like`."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1)).to(like.device)


KDA = dict(q=(T, 2, 16), k=(T, 2, 16), v=(T, 2, 24), f=(T, 2, 16), b=(T, 2), A_log=(2,), dt_bias=(2, 16))
STEP = dict(q=(3, 2, 16), k=(3, 2, 16), v=(3, 2, 24), f=(3, 2, 16), b=(3, 2), A_log=(2,), dt_bias=(2, 16))
HEADS = dict(q=(T, 4, 24), k=(T, 2, 24), v=(T, 2, 16))
ROWS = dict(h=(T, 16), weight=(67, 16))


@case("q k v f b A_log dt_bias", **KDA)
def kda(op: Op, x: Inputs) -> Iterable[Tensor]:
    return op(*x.values(), segments(), lower_bound=-5.0, output_final_state=True)


@case(**STEP, state=(3, 2, 16, 24))
def kda_step(op: Op, x: Inputs) -> Iterable[Tensor]:
    return op(*x.values(), lower_bound=-5.0)


@case("x weight", x=(T, 10), weight=(10, 4))
def short_conv(op: Op, x: Inputs) -> Iterable[Tensor]:
    return op(*x.values(), segments(), output_taps=True)


@case("q k v", **HEADS)
def attention(op: Op, x: Inputs) -> Iterable[Tensor]:
    return op(*x.values(), segments(), causal=True, scale=0.2, return_lse=True)


@case(q=(sum(NEWEST), 4, 24), k=(T, 2, 24), v=(T, 2, 16))
def attention_append(op: Op, x: Inputs) -> Iterable[Tensor]:
    return [op(*x.values(), Segments.from_lengths(NEWEST), segments(), scale=0.2)]


@case(**HEADS)
def max_logit(op: Op, x: Inputs) -> Iterable[Tensor]:
    lse = attention(resolve("attention", x["q"].device), x)[1]  # type: ignore[index]
    return [op(x["q"], x["k"], lse, segments(), causal=True, scale=0.2, tau=-1e4)]


@case("a b c qw", a=(T, 20), b=(T, 20), c=(T, 20), qw=(4, 20))
def attnres_phase1(op: Op, x: Inputs) -> Iterable[Tensor]:
    return op([x["a"], x["b"], x["c"]], x["qw"], 1e-5)


@case("o lse partial qw", o=(T, 20), lse=(T,), partial=(T, 20), qw=(20,))
def attnres_merge(op: Op, x: Inputs) -> Iterable[Tensor]:
    return [op(*x.values(), 1e-5)]


@case("a b qw", a=(T, 20), b=(T, 20), qw=(2, 20))
def attnres_open(op: Op, x: Inputs) -> Iterable[Tensor]:
    return [part for pair in op([x["a"], x["b"]], x["qw"], 1e-5) for part in pair]


@case(
    "o lse partial out qw norm",
    **dict(o=(T, 20), lse=(T,), partial=(T, 20), out=(T, 20), qw=(20,), norm=(20,)),
)
def attnres_step(op: Op, x: Inputs) -> Iterable[Tensor]:
    return op(*x.values(), 1e-5, 1e-5)


@case("a b qw w", a=(T, 20), b=(T, 20), qw=(3, 20), w=(3, 20))
def attnres_block(op: Op, x: Inputs) -> Iterable[Tensor]:
    layers = []
    for weight in x["w"]:
        norm = torch.nn.RMSNorm(20, 1e-5).to(weight)
        layers.append(SubLayer(norm, weight.mul))
    sources, summed = op([x["a"], x["b"]], layers, x["qw"], 1e-5)
    return [*sources, summed]


@case("x weight gate", x=(T, 20), weight=(20,), gate=(T, 20))
def rms_norm(op: Op, x: Inputs) -> Iterable[Tensor]:
    return op(*x.values(), 1e-5), op(x["x"], x["weight"], None, 1e-5)


@case("h weight", **ROWS)
def token_log_probs(op: Op, x: Inputs) -> Iterable[Tensor]:
    return op(*x.values(), integers(67, (T,), x["h"]), temperature=0.7)


@case("h weight", **ROWS)
def linear_cross_entropy(op: Op, x: Inputs) -> Iterable[Tensor]:
    labels = integers(67, (T,), x["h"])
    labels[labels % 5 == 0] = -100  # no loss at these
    return op(*x.values(), labels, (labels % 7 + 1).float() / 7)


@case("qkv", qkv=(T, 3, 2, 8), angles=(T, 4))
def qkv_rope(op: Op, x: Inputs) -> Iterable[Tensor]:
    return op(x["qkv"], torch.polar(torch.ones_like(x["angles"]), x["angles"]))


@case(query=(3, 4, 24), pages=(6, 8, 24))
def mla_decode(op: Op, x: Inputs) -> Iterable[Tensor]:
    device = x["query"].device
    tables = torch.tensor([[4, 1], [0, 5], [3, 2]], device=device)
    return op(*x.values(), tables, torch.tensor([16, 3, 9], device=device), 16, 0.2)


@case("x weights gate_up down", x=(T, 12), weights=(T, 2), gate_up=(5, 16, 12), down=(5, 12, 8))
def moe_experts(op: Op, x: Inputs) -> Iterable[Tensor]:
    first = integers(5, (T,), x["x"])
    ids = torch.stack([first, (first + 2) % 5], dim=1)
    return [op(x["x"], ids, x["weights"], x["gate_up"], x["down"])]


@case(G=(2, 24, 40))
def newton_schulz(op: Op, x: Inputs) -> Iterable[Tensor]:
    return [op(x["G"], dtype=x["G"].dtype)]


def tensors_of(case: Case, op: Op, device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    """Outputs ("out0", ...) and gradients ("d" + input) of one backend, as float64 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for name, shape in case.shapes.items():
        value = torch.randn(shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)
        inputs[name] = value.requires_grad_(name in case.grads)
    outputs = list(case.call(op, inputs))
    found = {f"out{i}": out.detach().double().cpu() for i, out in enumerate(outputs)}
    if not case.grads:
        return found

    # One direction for each output, the same for every backend, also where an output has no gradient.
    loss: Tensor | float = 0.0
    for out in outputs:
        direction = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
        if out.requires_grad:
            loss = loss + (out * direction).sum()
    grads = torch.autograd.grad(torch.as_tensor(loss), [inputs[name] for name in case.grads])
    return found | {f"d{name}": grad.double().cpu() for name, grad in zip(case.grads, grads, strict=True)}


def disagreement(op_name: str, device: torch.device, seed: int = 0) -> tuple[float, str]:
    """Largest error of the backend in force against the float64 law, and the tensor it is in.

    Error of a tensor: max |a - law| / max |law|; infinite when anything is not finite or a shape differs.
    """
    law = load(REGISTRY[op_name]["naive"])
    expected = tensors_of(CASES[op_name], law, torch.device("cpu"), torch.float64, seed)
    measured = tensors_of(CASES[op_name], resolve(op_name, device), device, torch.float32, seed)
    errors = {}
    for name, right in expected.items():
        value = measured[name]
        errors[name] = float("inf")
        if value.shape == right.shape and value.isfinite().all():
            errors[name] = float((value - right).abs().max() / right.abs().max().clamp_min(1e-30))
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst
