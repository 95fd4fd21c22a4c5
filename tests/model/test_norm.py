"""RMSNorm, plain and gated: values, closed-form gradients, dtypes, and buffers that refuse to be rounded."""

from __future__ import annotations

import pytest
import torch

from earlyfusion.model.layers import Fp32State, RMSNorm


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


class Counter(Fp32State):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor([1e6 + 1]))
        self.weight = torch.nn.Parameter(torch.ones(1))


def test_state_buffers_survive_casts_and_moves():
    module = torch.nn.Sequential(Counter())
    module.to(torch.bfloat16)
    assert module[0].weight.dtype == torch.bfloat16
    assert module[0].count.dtype == torch.float32 and module[0].count.item() == 1e6 + 1
    module.double()
    assert module[0].count.dtype == torch.float32 and module[0].count.item() == 1e6 + 1
    module.to("meta")
    assert module[0].count.is_meta and module.to_empty(device="cpu")[0].count.shape == (1,)


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
