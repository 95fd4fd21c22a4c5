"""The chunked KDA in float32 over seven gate regimes: as accurate as float32 allows, finite where others
overflow."""

import pytest
import torch
from kda_cases import REGIMES, cast, inputs, results

from earlyfusion.kernels.kda import chunk, naive
from earlyfusion.kernels.segments import Segments

# Relative RMS error against the definition in float64. Measured 1e-7 to 6e-7 for outputs and most gradients.
VALUE_RTOL = 2e-6
# The gate's gradient is a running sum in which most terms cancel, and its parameters sum it over all tokens.
# Measured
# up to 4e-6 (f) and 1.1e-5 (dt_bias) in the strong regimes.
GATE_RTOL = 5e-5
GATE_GRADIENTS = ("df", "dA_log", "ddt_bias")
LENGTHS = (150, 1, 37, 70)


@pytest.mark.parametrize("states", [False, True], ids=["flat", "states"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("regime", REGIMES)
def test_float32_is_accurate_in_every_gate_regime(regime, seed, states):
    segments, tensors, bound = inputs(
        LENGTHS, seed=seed, key_dim=32, value_dim=32, regime=regime, states=states
    )
    tensors = cast(cast(tensors, torch.float32), torch.float64)
    expected = results(naive.kda, tensors, segments, bound)
    found = results(chunk.kda, cast(tensors, torch.float32), segments, bound)
    for name, value in expected.items():
        error = (found[name].double() - value).square().mean().sqrt()
        tolerance = GATE_RTOL if name in GATE_GRADIENTS else VALUE_RTOL
        # A saturated gate has a true gradient near 1e-12 of the others: nothing to be relative to.
        assert error <= tolerance * value.square().mean().sqrt() + 1e-10, f"{name}: {error:.1e}"


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gates_of_thousands_of_nats_stay_finite_forward_and_backward(seed, size):
    segments, tensors, bound = inputs(
        (130, 1, 64), seed=seed, key_dim=32, value_dim=16, regime="brutal", states=True
    )
    found = results(chunk.kda, cast(tensors, torch.float32), segments, bound, chunk=size)
    for name, value in found.items():
        assert value.isfinite().all(), name


def test_a_decay_of_exactly_zero_stays_finite_and_forgets():
    segments, tensors, _ = inputs((40,), seed=3, regime="init")
    tensors = cast(tensors, torch.float32)
    with torch.no_grad():
        tensors[3][20] = 1e30  # the gate of token 20: alpha underflows to 0
    found = results(chunk.kda, tensors, segments, None)
    assert all(value.isfinite().all() for value in found.values())
    alone = [x[20:] for x in tensors[:5]] + tensors[5:]
    fresh, _ = chunk.kda(*alone, Segments((20,)))
    torch.testing.assert_close(found["o"][20:], fresh, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [32, 64])
def test_identical_keys_without_decay_do_not_blow_up_the_triangular_inverse(size):
    # L is all ones below the diagonal: its powers reach 1e17 at 64 tokens, its inverse has entries 0, 1 and
    # -1 only.
    segments, tensors, _ = inputs((128,), seed=4, regime="slow", key_dim=16, value_dim=8)
    with torch.no_grad():
        tensors[1][:] = tensors[1][0]
        tensors[3][:] = -40.0
        tensors[4][:] = 20.0
    expected = results(naive.kda, tensors, segments, None)
    found = results(chunk.kda, cast(tensors, torch.float32), segments, None, chunk=size)
    for name in ("o", "dq", "dv"):
        error = (found[name].double() - expected[name]).square().mean().sqrt()
        assert error <= 1e-5 * expected[name].square().mean().sqrt(), f"{name}: {error:.1e}"
