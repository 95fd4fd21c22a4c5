"""Newton-Schulz: the batched iteration, the Gram form and Triton's symmetric products (interpreted) equal
the definition, and presets come as near to U V^T as they promise."""

import pytest
import torch
from cases import needs_interpreter, poisoned_empties, randn, refused, relative_error

from earlyfusion.kernels.muon import naive, triton_symmetric
from earlyfusion.kernels.muon.newton_schulz import gram_newton_schulz, newton_schulz, prefers_gram

# The same polynomial, another order of additions, ten steps at most.
EXACT = 1e-10
# 2-norm: slopes of 8 a step amplify rounding at small values.
FP32 = 2e-4
# 2-norm: 8 bits of mantissa through five steps with slopes up to 8.
HALF = 0.06
# Above the largest singular value of the exact polynomial.
OVERSHOOT = 0.1
PRESET = pytest.mark.parametrize("preset", naive.PRESETS)
# range of the scalar polynomial over [0.05, 1], rounded outwards
BANDS = {
    "polar_express": (0.870, 1.124),
    "keller_jordan": (0.681, 1.135),
    "deepseek_v4": (0.999, 1.001),
    "cubic": (0.774, 1.301),
}
FORMS = {
    "batched": newton_schulz,
    "gram": gram_newton_schulz,
    "triton": triton_symmetric.newton_schulz,
}
ALL = pytest.mark.parametrize("form", [pytest.param(form, id=name) for name, form in FORMS.items()])


def distance(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def with_spectrum(values, *shape, seed=0):
    """(G, U V^T) with the given singular values; shape [.., m, n]."""
    # Singular vectors from QR of random matrices, values as given.
    s = len(values)
    u = torch.linalg.qr(randn(*shape[:-1], s, seed=seed))[0]
    v = torch.linalg.qr(randn(*shape[:-2], shape[-1], s, seed=seed + 1))[0]
    return (u * values) @ v.mT, u @ v.mT


def spread(B, m, n, seed=0, decades=3.0):
    """Stacks with singular values spread log-uniformly over so many decades."""
    values = torch.logspace(0, -decades, min(m, n), dtype=torch.float64)
    return with_spectrum(values, B, m, n, seed=seed)[0]


@PRESET
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 5), (4, 7, 33), (2, 33, 7), (5, 1, 9), (2, 64, 48)])
@pytest.mark.parametrize("seed", [0, 10])
def test_the_batched_iteration_equals_the_definition(preset, shape, seed):
    G = randn(*shape, seed=seed)
    want = naive.newton_schulz(G, preset)
    torch.testing.assert_close(newton_schulz(G, preset), want, rtol=EXACT, atol=EXACT)
    single = naive.newton_schulz(G.float(), preset, torch.float32)
    assert distance(newton_schulz(G.float(), preset, torch.float32), single) <= FP32


@PRESET
@pytest.mark.parametrize("shape", [(2, 12, 40), (3, 40, 12), (1, 16, 16)])
def test_in_fp64_the_gram_form_is_the_same_polynomial(preset, shape):
    G = spread(*shape)
    got = gram_newton_schulz(G, preset, dtype=torch.float64)
    # squared singular values lose half of the digits of the smallest ones
    assert (got - naive.newton_schulz(G, preset)).abs().max() < 1e-6


@needs_interpreter
@PRESET
@pytest.mark.parametrize("shape", [(2, 24, 40), (1, 40, 24)])
def test_the_triton_form_equals_the_definition(preset, shape):
    G = randn(*shape, seed=3)
    got = triton_symmetric.newton_schulz(G.float(), preset, dtype=torch.float32)
    assert relative_error(got, naive.newton_schulz(G, preset)) < 2e-3


@pytest.mark.parametrize("seed", [0, 10])
@PRESET
def test_in_fp16_with_restarts_singular_values_stay_in_range(preset, seed):
    # Three decades: what gradients of experts look like.
    G = spread(4, 64, 160, seed).float()
    got, want = gram_newton_schulz(G, preset), naive.newton_schulz(G.double(), preset)
    most = torch.linalg.svdvals(want).max() + OVERSHOOT
    assert got.dtype == torch.float32 and torch.linalg.svdvals(got.double()).max() < most
    # and nearer to the polynomial than the usual bfloat16 iteration
    assert distance(got, want) < distance(newton_schulz(G, preset, dtype=torch.bfloat16), want)


@PRESET
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (24, 24)])
def test_presets_approach_the_polar_factor(preset, shape):
    values = torch.logspace(0, -0.6, min(shape), dtype=torch.float64)
    assert (values / values.norm()).min() > 0.05
    G, polar = with_spectrum(values, *shape, seed=2)
    O = newton_schulz(G[None], preset)[0]
    singular = torch.linalg.svdvals(O)
    low, high = BANDS[preset]
    assert low <= singular.min() and singular.max() <= high, singular
    # singular vectors are kept: U^T O V is diagonal, so O has no part outside span of the rank-one pieces
    u, _, vh = torch.linalg.svd(G, full_matrices=False)
    inner = u.T @ O @ vh.T
    assert (inner - torch.diag(inner.diagonal())).abs().max() < 1e-9
    assert (O * polar).sum() / (O.norm() * polar.norm()) > 0.98


def test_matrices_of_a_batch_do_not_mix():
    G = randn(4, 6, 10, seed=5, dtype=torch.float32)
    alone = torch.cat([newton_schulz(g[None], dtype=torch.float32) for g in G])
    poisoned = torch.cat([G, torch.full((1, 6, 10), float("nan"))])
    together = newton_schulz(poisoned, dtype=torch.float32)[:4]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


@ALL
def test_tiny_huge_zero_and_no_matrices(form):
    G = randn(2, 16, 48, seed=6, dtype=torch.float32)
    # The norm is taken before the cast, or 16 bits would overflow.
    for factor in (1e-5, 1e12):
        assert distance(form(G * factor), form(G)) <= 0.02
    assert torch.equal(form(torch.zeros(2, 16, 48)), torch.zeros(2, 16, 48))
    assert form(torch.empty(0, 16, 48)).shape == (0, 16, 48)


@needs_interpreter
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 2e-6), (torch.float16, 2e-3)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 17, 40), (2, 130, 33), (1, 150, 150)])
def test_half_of_the_tiles_give_the_whole_product(shape, dtype, tolerance):
    X = randn(*shape).to(dtype)
    symmetric = (X @ X.mT) / shape[2]
    squares = symmetric.double() @ symmetric.double().mT
    for operand, weights, law in (
        (X, (), X.double() @ X.double().mT),
        (symmetric, (-1.5, 0.5), 0.5 * squares - 1.5 * symmetric.double()),
    ):
        with poisoned_empties():
            got = triton_symmetric.symmetric_product(operand, *weights)
        assert relative_error(got, law) < tolerance and torch.equal(got, got.mT)


@needs_interpreter
def test_stacks_of_long_matrices_take_the_gram_form_in_fp16():
    G = randn(3, 24, 64, seed=4, dtype=torch.float32)
    got = triton_symmetric.newton_schulz(G)
    # As bfloat16.
    assert got.dtype == torch.float32 and distance(got, naive.newton_schulz(G.double())) < 3e-2
    assert prefers_gram(256, 1024, 2304) and prefers_gram(2, 2304, 1024)
    assert not prefers_gram(1, 1024, 2304) and not prefers_gram(8, 1024, 1024)


@ALL
def test_wrong_input_is_refused(form):
    refused({"polar_express": lambda: form(torch.randn(1, 2, 2), "polar_expres")})
    for bad in (torch.randn(2, 2), torch.randn(1, 1, 2, 2), torch.ones(1, 2, 2, dtype=torch.int64)):
        refused({r"G_Bmn is": lambda bad=bad: form(bad)})
