"""One small random case per kernel operation, for `earlyfusion doctor`: any backend against its law in
float64.

A case makes its inputs in float64 from a seeded generator and calls the operation; inputs listed as
differentiable get gradients of a fixed random projection of the output. Shapes are odd and packed on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from earlyfusion.kernels.dispatch import REGISTRY, resolve
from earlyfusion.kernels.segments import Segments

Op = Callable[..., Any]
LENGTHS = (37, 1, 64, 11)
NEWEST = (5, 1, 20, 11)  # tokens at the ends of those documents

# Error of a float32 backend against the float64 law, relative to the largest entry of each tensor. KDA
# multiplies
# decays over whole documents and inverts a triangular matrix per chunk, hence ten times more.
TOLERANCE = 2e-5
TOLERANCES = {"kda": 2e-4, "kda_step": 2e-5}


@dataclass(frozen=True)
class Case:
    """make(generator) -> float64 inputs by name; call(op, inputs) -> output tensors; grads: names to
    differentiate."""

    make: Callable[[torch.Generator], dict[str, Tensor]]
    call: Callable[[Op, dict[str, Tensor]], list[Tensor]]
    grads: tuple[str, ...] = ()


def _normal(generator: torch.Generator, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


_TOKENS = sum(LENGTHS)


def _segments() -> Segments:
    return Segments.from_lengths(LENGTHS)


def _kda_inputs(g: torch.Generator) -> dict[str, Tensor]:
    t, h, k, v = _TOKENS, 2, 16, 24
    return _normal(
        g, q=(t, h, k), k=(t, h, k), v=(t, h, v), f=(t, h, k), b=(t, h), A_log=(h,), dt_bias=(h, k)
    )


def _kda(op: Op, x: dict[str, Tensor]) -> list[Tensor]:
    o, state = op(*x.values(), _segments(), lower_bound=-5.0, output_final_state=True)
    return [o, state]


def _kda_step_inputs(g: torch.Generator) -> dict[str, Tensor]:
    n, h, k, v = 3, 2, 16, 24
    shapes: dict[str, tuple[int, ...]] = dict(q=(n, h, k), k=(n, h, k), v=(n, h, v), f=(n, h, k), b=(n, h))
    return _normal(g, **shapes, A_log=(h,), dt_bias=(h, k), state=(n, h, k, v))


def _moe_inputs(g: torch.Generator) -> dict[str, Tensor]:
    t, d, e, f = _TOKENS, 12, 5, 8
    inputs = _normal(g, x=(t, d), weights=(t, 2), gate_up=(e, 2 * f, d), down=(e, d, f))
    inputs["ids"] = torch.rand(t, e, generator=g).topk(2, dim=-1).indices
    return inputs


def _loss_inputs(g: torch.Generator) -> dict[str, Tensor]:
    t, d, v = _TOKENS, 16, 67
    inputs = _normal(g, h=(t, d), weight=(v, d))
    labels = torch.randint(0, v, (t,), generator=g)
    inputs["labels"] = torch.where(torch.rand(t, generator=g) < 0.2, -100, labels)
    inputs["loss_weights"] = torch.rand(t, generator=g).float()
    return inputs


def _attention_inputs(g: torch.Generator) -> dict[str, Tensor]:
    return _normal(g, q=(_TOKENS, 4, 24), k=(_TOKENS, 2, 24), v=(_TOKENS, 2, 16))


def _max_logit(op: Op, x: dict[str, Tensor]) -> list[Tensor]:
    attention = resolve("attention", x["q"].device)
    lse = attention(x["q"], x["k"], x["v"], _segments(), causal=True, scale=0.2, return_lse=True)[1]
    return [op(x["q"], x["k"], lse, _segments(), causal=True, scale=0.2, tau=-1e4)]


CASES: dict[str, Case] = {
    "kda": Case(_kda_inputs, _kda, ("q", "k", "v", "f", "b", "A_log", "dt_bias")),
    "kda_step": Case(_kda_step_inputs, lambda op, x: list(op(*x.values(), lower_bound=-5.0))),
    "short_conv": Case(
        lambda g: _normal(g, x=(_TOKENS, 10), weight=(10, 4)),
        lambda op, x: list(op(x["x"], x["weight"], _segments(), output_taps=True)),
        ("x", "weight"),
    ),
    "attention": Case(
        _attention_inputs,
        lambda op, x: list(op(x["q"], x["k"], x["v"], _segments(), causal=True, scale=0.2, return_lse=True)),
        ("q", "k", "v"),
    ),
    "attention_append": Case(
        lambda g: _normal(g, q=(sum(NEWEST), 4, 24), k=(_TOKENS, 2, 24), v=(_TOKENS, 2, 16)),
        lambda op, x: [op(x["q"], x["k"], x["v"], Segments.from_lengths(NEWEST), _segments(), scale=0.2)],
    ),
    "max_logit": Case(_attention_inputs, _max_logit),
    "attnres_phase1": Case(
        lambda g: _normal(g, a=(_TOKENS, 20), b=(_TOKENS, 20), c=(_TOKENS, 20), qw=(4, 20)),
        lambda op, x: list(op([x["a"], x["b"], x["c"]], x["qw"], 1e-5)),
        ("a", "b", "c", "qw"),
    ),
    "attnres_merge": Case(
        lambda g: _normal(g, o=(_TOKENS, 20), lse=(_TOKENS,), partial=(_TOKENS, 20), qw=(20,)),
        lambda op, x: [op(x["o"], x["lse"], x["partial"], x["qw"], 1e-5)],
        ("o", "lse", "partial", "qw"),
    ),
    "attnres_open": Case(
        lambda g: _normal(g, a=(_TOKENS, 20), b=(_TOKENS, 20), qw=(2, 20)),
        lambda op, x: [t for part in op([x["a"], x["b"]], x["qw"], 1e-5) for t in part],
        ("a", "b", "qw"),
    ),
    "attnres_step": Case(
        lambda g: _normal(
            g, o=(_TOKENS, 20), lse=(_TOKENS,), partial=(_TOKENS, 20), out=(_TOKENS, 20), qw=(20,), norm=(20,)
        ),
        lambda op, x: list(op(*x.values(), 1e-5, 1e-5)),
        ("o", "lse", "partial", "out", "qw", "norm"),
    ),
    "token_log_probs": Case(
        _loss_inputs,
        lambda op, x: list(op(x["h"], x["weight"], x["labels"], temperature=0.7)),
        ("h", "weight"),
    ),
    "qkv_rope": Case(
        lambda g: _normal(g, qkv=(_TOKENS, 3, 2, 8), angles=(_TOKENS, 4)),
        lambda op, x: list(op(x["qkv"], torch.polar(torch.ones_like(x["angles"]), x["angles"]))),
        ("qkv",),
    ),
    "mla_decode": Case(
        lambda g: _normal(g, query=(3, 4, 24), pages=(6, 8, 24)),
        lambda op, x: list(
            op(
                x["query"],
                x["pages"],
                torch.tensor([[4, 1], [0, 5], [3, 2]], device=x["query"].device),
                torch.tensor([16, 3, 9], device=x["query"].device),
                16,
                0.2,
            )
        ),
    ),
    "moe_experts": Case(
        _moe_inputs,
        lambda op, x: [op(x["x"], x["ids"], x["weights"], x["gate_up"], x["down"])],
        ("x", "weights", "gate_up", "down"),
    ),
    "linear_cross_entropy": Case(
        _loss_inputs,
        lambda op, x: list(op(x["h"], x["weight"], x["labels"], x["loss_weights"])),
        ("h", "weight"),
    ),
    "newton_schulz": Case(
        lambda g: _normal(g, G=(2, 24, 40)),
        lambda op, x: [op(x["G"], dtype=x["G"].dtype)],
    ),
}


def tensors_of(case: Case, op: Op, device: torch.device, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Outputs ("out0", ...) and gradients ("d" + input) of one backend, as float64 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for name, value in case.make(generator).items():
        value = value.to(device=device, dtype=dtype if value.dtype == torch.float64 else value.dtype)
        inputs[name] = value.requires_grad_(name in case.grads)
    outputs = case.call(op, inputs)
    found = {f"out{i}": out.detach().double().cpu() for i, out in enumerate(outputs)}
    if case.grads:
        terms = []
        for out in outputs:
            direction = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(
                device=device, dtype=out.dtype
            )
            if out.requires_grad:
                terms.append((out * direction).sum())
        grads = torch.autograd.grad(torch.stack(terms).sum(), [inputs[name] for name in case.grads])
        found |= {f"d{name}": grad.double().cpu() for name, grad in zip(case.grads, grads, strict=True)}
    return found


def disagreement(op_name: str, device: torch.device, seed: int = 0) -> tuple[float, str]:
    """Largest error of the backend in force against the float64 law, and the tensor it is in.

    Error of a tensor: max |a - law| / max |law|; infinite when anything is not finite or a shape differs.
    """
    case = CASES[op_name]
    module, _, function = REGISTRY[op_name]["naive"].partition(":")
    law = getattr(import_module(module), function)
    wanted = tensors_of(case, law, torch.device("cpu"), torch.float64, seed)
    given = tensors_of(case, resolve(op_name, device), device, torch.float32, seed)
    errors = {}
    for name, expected in wanted.items():
        found = given[name]
        if found.shape != expected.shape or not found.isfinite().all():
            errors[name] = float("inf")
        else:
            errors[name] = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst
