"""Shared inputs of the KDA tests: seeded tensors for one packed row, and outputs with all gradients."""

import math

import torch

from earlyfusion.kernels.segments import Segments

NAMES = ("q", "k", "v", "f", "b", "A_log", "dt_bias", "initial_state")
# Gate regimes, from the mildest to the most brutal: see `gate_inputs`.
REGIMES = ("slow", "init", "spread", "bounded", "saturated", "strong", "brutal")


def gate_inputs(regime, tokens, heads, key_dim, generator):
    """(f, A_log, dt_bias, lower_bound) of one gate regime."""
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    uniform = lambda *shape: torch.rand(*shape, generator=generator)
    # As the model is initialised: steps of 0.001 to 0.1, log-uniform.
    dt = torch.exp(uniform(heads, key_dim) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
    initial_bias = dt + torch.log(-torch.expm1(-dt))
    initial_rate = (1 + 15 * uniform(heads)).log()
    full, zero = (tokens, heads, key_dim), torch.zeros(heads, key_dim)
    return {
        # Alpha about 0.9999.
        "slow": (torch.full(full, -9.0), torch.zeros(heads), zero, None),
        # A freshly initialised layer.
        "init": (torch.zeros(full), initial_rate, initial_bias, None),
        "spread": (2 * normal(*full), initial_rate, initial_bias, None),
        "bounded": (normal(*full), uniform(heads), uniform(heads, key_dim), -5.0),
        # Every token at the bound.
        "saturated": (30 + normal(*full), torch.zeros(heads), zero, -5.0),
        "strong": (3 * normal(*full), torch.full((heads,), math.log(16.0)), zero, None),
        "brutal": (
            3 * normal(*full),
            torch.full((heads,), math.log(200.0)),
            zero,
            None,
            # Up to 2000 nats a token.
        ),
    }[regime]


def inputs(lengths, *, seed=0, heads=2, group=1, key_dim=8, value_dim=6, states=False, regime="spread"):
    """(segments, list of float64 leaf tensors in the order of NAMES, lower_bound)."""
    generator = torch.Generator().manual_seed(seed)
    segments = Segments(tuple(lengths))
    tokens, values = segments.total, heads * group
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    f, A_log, dt_bias, lower_bound = gate_inputs(regime, tokens, values, key_dim, generator)
    tensors = [
        normal(tokens, heads, key_dim),
        normal(tokens, heads, key_dim),
        normal(tokens, values, value_dim),
    ]
    tensors += [f, normal(tokens, values), A_log, dt_bias]
    if states:
        tensors.append(normal(segments.num, values, key_dim, value_dim))
    return segments, [tensor.double().requires_grad_() for tensor in tensors], lower_bound


def cast(tensors, dtype):
    return [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]


def halves(tensors):
    """bfloat16 but for the gate's parameters and the state, as in the model."""
    dtypes = [torch.bfloat16] * 5 + [torch.float32] * 3
    return [x.detach().to(dtype).requires_grad_() for x, dtype in zip(tensors, dtypes)]


def call(op, tensors, segments, lower_bound, **options):
    """op on the tensors; final states are asked for when an initial state is given."""
    # An eighth tensor is the state before the first token.
    states = len(tensors) == len(NAMES)
    return op(
        *tensors[:7],
        segments,
        lower_bound=lower_bound,
        initial_state_NGKV=tensors[7] if states else None,
        output_final_state=states,
        **options,
    )


def results(op, tensors, segments, lower_bound, seed=17, **options):
    """dict of the output, the final state if any, and the gradient of a fixed random functional of both."""
    o, final = call(op, tensors, segments, lower_bound, **options)
    generator = torch.Generator().manual_seed(seed)
    # Rounded to bfloat16 so that a run in any dtype gets the very same incoming gradient.
    weight = lambda x: torch.randn(x.shape, generator=generator).bfloat16().to(x.dtype)
    # A random functional: a sum of ones would let errors of opposite sign cancel.
    loss = (o * weight(o)).sum()
    found = {"o": o}
    if final is not None:
        loss = loss + (final * weight(final)).sum()
        found["final_state"] = final
    gradients = torch.autograd.grad(loss, tensors)
    return found | {f"d{name}": gradient for name, gradient in zip(NAMES, gradients)}
