"""RMSNorm, plain and gated: values, closed-form gradients, dtypes."""

import pytest
import torch

from earlyfusion.model.layers import RMSNorm


def definition(x, weight, eps, gate=None):
    y = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
    return y if gate is None else y * torch.sigmoid(gate)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(7, 5), (3, 2, 9), (0, 4), (1, 1)])
def test_norm_equals_its_definition_and_finite_differences(shape, gated):
    torch.manual_seed(0)
    draw = lambda *size: torch.randn(size, dtype=torch.float64, requires_grad=True)
    norm = RMSNorm(shape[-1], 1e-2).double()
    inputs = [draw(*shape), *([draw(*shape)] if gated else [])]
    run = lambda weight, *given: torch.func.functional_call(norm, {"weight": weight}, given)
    law = lambda weight, x, gate=None: definition(x, weight, 1e-2, gate)
    weight = draw(shape[-1])
    torch.testing.assert_close(run(weight, *inputs), law(weight, *inputs))
    with torch.no_grad():
        torch.testing.assert_close(run(weight, *inputs), law(weight, *inputs))
    assert not shape[0] or torch.autograd.gradcheck(run, (weight, *inputs))


def test_autocast_computes_in_fp32_and_rounds_once():
    norm = RMSNorm(64, 1e-5)
    x = torch.randn(10, 64) * 100
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, definition(x, norm.weight, 1e-5).bfloat16())
    assert norm(x).dtype == torch.float32
    x = x.bfloat16().requires_grad_()
    norm(x).float().pow(2).sum().backward()
    assert x.grad.dtype == torch.bfloat16 and norm.weight.grad.dtype == torch.float32
