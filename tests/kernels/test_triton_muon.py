"""The symmetric product kernel and Newton-Schulz on top of it, through the interpreter."""

import pytest
import torch
from triton_cases import needs_interpreter, poisoned_empties, relative_error

from earlyfusion.kernels.muon import naive, triton_symmetric
from earlyfusion.kernels.muon.naive import PRESETS

pytestmark = needs_interpreter
FP32 = 2e-6  # float32 sums in another order
FP16 = 2e-3  # one rounding to 11 bits
STEPS = 2e-3  # ten float32 steps, each with slope up to 8 at small singular values


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, FP32), (torch.float16, FP16)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 17, 40), (2, 130, 33), (1, 150, 150)])
def test_half_of_the_tiles_give_the_whole_product(shape, dtype, tolerance):
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        X = torch.randn(*shape, generator=generator).to(dtype)
        added = torch.randn(shape[0], shape[1], shape[1], generator=generator)
        added = (added + added.mT).to(dtype)
        with poisoned_empties():
            plain = triton_symmetric.symmetric_product(X, None, 0.0, 0.5)
            summed = triton_symmetric.symmetric_product(X, added, -1.5, 0.5)
        want = 0.5 * X.double() @ X.double().mT
        assert relative_error(plain, want) < tolerance and torch.equal(plain, plain.mT)
        assert relative_error(summed, want - 1.5 * added.double()) < tolerance and torch.equal(
            summed, summed.mT
        )


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("shape", [(2, 24, 40), (1, 40, 24)])
def test_newton_schulz_equals_the_definition(preset, shape):
    G = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    got = triton_symmetric.newton_schulz(G, preset, dtype=torch.float32)
    assert relative_error(got, naive.newton_schulz(G.double(), preset)) < STEPS


def test_stacks_of_long_matrices_take_the_gram_form_in_fp16():
    G = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(4))
    got = triton_symmetric.newton_schulz(G)
    want = naive.newton_schulz(G.double())
    assert got.dtype == torch.float32 and (got - want).norm() / want.norm() < 3e-2  # as bfloat16


def test_double_precision_goes_to_plain_torch():
    G = torch.randn(2, 8, 20, dtype=torch.float64)
    assert (triton_symmetric.newton_schulz(G) - naive.newton_schulz(G)).abs().max() < 1e-9


def test_bad_input_names_the_argument():
    with pytest.raises(ValueError, match="X_Bsl"):
        triton_symmetric.symmetric_product(torch.randn(2, 8, 4).mT, None, 0.0, 1.0)
    with pytest.raises(ValueError, match="X_Bsl"):
        triton_symmetric.symmetric_product(torch.ones(2, 8, 4, dtype=torch.int64), None, 0.0, 1.0)
    with pytest.raises(ValueError, match="added_Bss"):
        triton_symmetric.symmetric_product(torch.randn(2, 8, 4), torch.randn(2, 4, 4), 1.0, 1.0)
    with pytest.raises(ValueError, match=r"\[B, m, n\]"):
        triton_symmetric.newton_schulz(torch.randn(4, 8))
