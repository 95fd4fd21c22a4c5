"""Newton-Schulz: the batched iteration equals its definition, and presets come as near to U V^T as they
promise."""

import pytest
import torch

from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.muon import naive
from earlyfusion.kernels.muon.newton_schulz import default_dtype, newton_schulz

FP64_TOL = 1e-10  # same polynomial, other order of additions, ten steps at most
# Frobenius error relative to the naive fp32 iteration; slopes of 8 a step amplify rounding at small values
FP32_TOL = 2e-4
BF16_TOL = 0.06  # relative Frobenius error to fp64: 8 bits of mantissa through five steps with slopes up to 8

SHAPES = [(1, 1, 1), (3, 5, 5), (4, 7, 33), (2, 33, 7), (5, 1, 9), (2, 64, 48)]
# range of the scalar polynomial over [0.05, 1], rounded outwards
BANDS = {
    "polar_express": (0.870, 1.124),
    "keller_jordan": (0.681, 1.135),
    "deepseek_v4": (0.999, 1.001),
    "cubic": (0.774, 1.301),
}


def matrix_with_spectrum(
    values: torch.Tensor, m: int, n: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(G, U V^T) with the given singular values, fp64."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(m, len(values), generator=generator, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(n, len(values), generator=generator, dtype=torch.float64))[0]
    return (u * values) @ v.T, u @ v.T


@pytest.mark.parametrize("preset", naive.PRESETS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_batched_iteration_equals_the_definition(preset, shape, seed):
    G = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(
        newton_schulz(G, preset), naive.newton_schulz(G, preset), rtol=FP64_TOL, atol=FP64_TOL
    )
    want = naive.newton_schulz(G.float(), preset, torch.float32)
    got = newton_schulz(G.float(), preset, torch.float32)
    assert (got - want).norm() <= FP32_TOL * want.norm()


@pytest.mark.parametrize("seed", [0, 1])
def test_bf16_iteration_stays_near_fp64(seed):
    G = torch.randn(3, 48, 80, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    want = naive.newton_schulz(G)
    got = newton_schulz(G.float(), dtype=torch.bfloat16)
    assert got.dtype == torch.float32
    assert (got.double() - want).norm() <= BF16_TOL * want.norm()
    assert not torch.equal(got, newton_schulz(G.float(), dtype=torch.float32))  # the option does something


@pytest.mark.parametrize("preset", naive.PRESETS)
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (24, 24)])
def test_presets_approach_the_polar_factor(preset, shape):
    values = torch.logspace(
        0, -0.6, min(shape), dtype=torch.float64
    )  # smallest is over 0.05 of the Frobenius norm
    assert (values / values.norm()).min() > 0.05
    G, polar = matrix_with_spectrum(values, *shape, seed=2)
    O = newton_schulz(G[None], preset)[0]
    singular = torch.linalg.svdvals(O)
    low, high = BANDS[preset]
    assert low <= singular.min() and singular.max() <= high, singular
    # singular vectors are kept: U^T O V is diagonal, so O has no part outside span of the rank-one pieces
    u, _, vh = torch.linalg.svd(G, full_matrices=False)
    inner = u.T @ O @ vh.T
    assert (inner - torch.diag(inner.diagonal())).abs().max() < 1e-9
    assert (O * polar).sum() / (O.norm() * polar.norm()) > 0.98


def test_each_singular_value_follows_the_scalar_polynomial():
    values = torch.tensor([1.0, 0.3, 1e-2, 1e-3, 1e-4], dtype=torch.float64)
    G, _ = matrix_with_spectrum(values, 5, 9, seed=3)
    for preset, steps in naive.PRESETS.items():
        s = values / values.norm()
        for a, b, c in steps:
            s = a * s + b * s**3 + c * s**5
        got = torch.linalg.svdvals(newton_schulz(G[None], preset)[0])
        torch.testing.assert_close(got, s.abs().sort(descending=True)[0], rtol=1e-8, atol=1e-10)


def test_polar_express_lifts_small_singular_values_more_than_keller_jordan():
    values = torch.tensor([1.0, 1e-3], dtype=torch.float64)
    G, _ = matrix_with_spectrum(values, 2, 6, seed=4)
    smallest = {p: torch.linalg.svdvals(newton_schulz(G[None], p)[0]).min().item() for p in naive.PRESETS}
    assert smallest["polar_express"] > 0.8 and smallest["deepseek_v4"] > 0.98
    assert smallest["cubic"] < smallest["keller_jordan"] < 0.5


def test_matrices_of_a_batch_do_not_mix():
    G = torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(5))
    alone = torch.cat([newton_schulz(g[None], dtype=torch.float32) for g in G])
    G_poisoned = torch.cat([G, torch.full((1, 6, 10), float("nan"))])
    torch.testing.assert_close(
        newton_schulz(G_poisoned, dtype=torch.float32)[:4], alone, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("factor", [1e-6, 1e12])
def test_result_does_not_depend_on_the_scale_of_the_input(factor):
    G = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(6))
    for dtype in (torch.float32, torch.bfloat16):
        want, got = newton_schulz(G, dtype=dtype), newton_schulz(G * factor, dtype=dtype)
        assert (got - want).norm() <= 0.02 * want.norm()


def test_zero_and_empty_batches_are_harmless():
    G = torch.zeros(2, 4, 6)
    assert torch.equal(newton_schulz(G), G)
    assert newton_schulz(torch.empty(0, 4, 6)).shape == (0, 4, 6)


def test_input_is_not_modified_and_views_are_fine():
    base = torch.randn(3, 10, 8, generator=torch.Generator().manual_seed(7))
    view, before = base[:, ::2], base.clone()
    torch.testing.assert_close(
        newton_schulz(view, dtype=torch.float32), newton_schulz(view.clone(), dtype=torch.float32)
    )
    assert torch.equal(base, before)


def test_dispatch_finds_both_forms(monkeypatch):
    assert resolve("newton_schulz", "cpu") is newton_schulz
    monkeypatch.setenv("EF_KERNELS", "naive")
    assert resolve("newton_schulz", "cpu") is naive.newton_schulz
    assert default_dtype(torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize("function", [naive.newton_schulz, newton_schulz])
def test_wrong_input_is_refused(function):
    with pytest.raises(ValueError, match="polar_express"):
        function(torch.randn(1, 2, 2), "polar_expres")
    for bad in (torch.randn(2, 2), torch.randn(1, 1, 2, 2), torch.ones(1, 2, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"\[B, m, n\]"):
            function(bad)
