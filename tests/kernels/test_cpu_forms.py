"""The forms for inference on a CPU: equal to their laws, a row's bits its own, and taken only there."""

import pytest
import torch
from cases import randn

from earlyfusion.kernels import dispatch
from earlyfusion.kernels.attnres import naive as attnres_naive
from earlyfusion.kernels.attnres import two_phase
from earlyfusion.kernels.attnres.two_phase import SubLayer
from earlyfusion.kernels.moe import naive as moe_naive
from earlyfusion.kernels.moe.grouped import moe_experts_alone

# Float64, other sums of the same numbers.
EXACT = 1e-12
CPU_OPS = [
    op for op, entries in dispatch.REGISTRY.items() if "cpu" in entries and op not in dispatch.WITH_GRADIENT
]


def test_they_are_taken_for_inference_in_full_precision_on_a_cpu_alone(monkeypatch):
    monkeypatch.delenv(dispatch.ENVIRONMENT, raising=False)
    assert set(CPU_OPS) == {"attnres_block", "attnres_phase1", "moe_experts", "rms_norm"}
    x = torch.zeros(2)
    for op in CPU_OPS:
        with torch.no_grad():
            assert dispatch.pick(op, x) == dispatch.pick(op, x.double()) == "cpu"
            others = [x.bfloat16(), x.to("meta"), "cpu", torch.device("cpu")]
            assert {dispatch.pick(op, other) for other in others} == {"torch"}
            with torch.autocast("cpu", torch.bfloat16):
                assert dispatch.pick(op, x) == "torch"
        assert dispatch.pick(op, x) == "torch"
        # The environment caps the choice, here as everywhere.
        for capped in ("naive", "torch"):
            monkeypatch.setenv(dispatch.ENVIRONMENT, capped)
            with torch.no_grad():
                assert dispatch.pick(op, x) == capped
        monkeypatch.delenv(dispatch.ENVIRONMENT)


def experts(tokens, dtype=torch.float64):
    ids = randn(tokens, 5).topk(2).indices
    rows = [randn(tokens, size, seed=size, dtype=dtype) for size in (24, 2)]
    return rows[0], ids, rows[1], randn(5, 32, 24, seed=3, dtype=dtype), randn(5, 24, 16, seed=4, dtype=dtype)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_experts_equal_their_law(tokens):
    given = experts(tokens)
    torch.testing.assert_close(moe_experts_alone(*given), moe_naive.moe_experts(*given), atol=EXACT, rtol=0)
    # A step without tokens, as a rank may have.
    none = [tensor[:0] for tensor in given[:3]]
    assert moe_experts_alone(*none, *given[3:]).shape == (0, 24)


def sublayers(dtype):
    norm = torch.nn.RMSNorm(24, 1e-5).to(dtype).requires_grad_(False)
    return [SubLayer(norm, scale.mul) for scale in randn(3, 24, seed=1, dtype=dtype)]


def residual(tokens, dtype=torch.float64):
    return [*randn(3, tokens, 24, seed=2, dtype=dtype)], randn(3, 24, seed=5, dtype=dtype)


def test_a_block_and_a_mix_equal_their_laws():
    sources, qw = residual(9)
    layers, seen = sublayers(torch.float64), []
    got = two_phase.block_alone(sources, layers, qw, 1e-5)[1]
    torch.testing.assert_close(got, attnres_naive.block(sources, layers, qw, 1e-5)[1], atol=EXACT, rtol=0)
    mixes = two_phase.phase1_alone(sources, qw, 1e-5), attnres_naive.phase1(sources, qw, 1e-5)
    torch.testing.assert_close(*mixes, atol=EXACT, rtol=0)
    # A probe sees the sources and the sum in front of every sub-layer, and changes nothing.
    watch = lambda index, before, partial: seen.append((index, len(before), partial is None))
    watched = two_phase.block_alone(sources, layers, qw, 1e-5, watch)[1]
    torch.testing.assert_close(watched, got, atol=EXACT, rtol=0)
    assert seen == [(0, 3, True), (1, 3, False), (2, 3, False)]


@pytest.mark.parametrize("rows", [4, 7, 39])
def test_a_tokens_bits_do_not_depend_on_the_others(rows):
    x, ids, weights, up, down = experts(40, torch.float32)
    # A product of fewer rows sums in another order, unless its form forbids that.
    whole = moe_experts_alone(x, ids, weights, up, down)
    assert torch.equal(moe_experts_alone(x[:rows], ids[:rows], weights[:rows], up, down), whole[:rows])
    sources, qw = residual(40, torch.float32)
    layers = sublayers(torch.float32)
    whole = two_phase.block_alone(sources, layers, qw, 1e-5)[1]
    some = two_phase.block_alone([source[:rows] for source in sources], layers, qw, 1e-5)[1]
    assert torch.equal(some, whole[:rows])
