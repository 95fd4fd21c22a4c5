"""Shared by the tests that need a GPU: bfloat16 on the device against the definition in float64."""

import os

import pytest
import torch

BF16 = 2e-2  # 2-norm, relative: one rounding to 8 bits of inputs' products, results and gradients
SEEDS = (0, 1)


def device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; none is visible")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        pytest.fail(
            "TRITON_INTERPRET is set: kernels would be interpreted, and bfloat16 would be wrong; unset it"
        )
    return torch.device("cuda", torch.cuda.current_device())


def randn(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device(), dtype)


def compare(function, law, leaves, cotangents, tolerance=BF16):
    """Outputs and gradients of ``function`` on the leaves against ``law`` on their float64 copies; runs
    twice."""
    runs = []
    for _ in range(2):
        fresh = [x.detach().clone().requires_grad_() for x in leaves]
        out = function(*fresh)
        out = list(out) if isinstance(out, (tuple, list)) else [out]
        grads = torch.autograd.grad(out, fresh, [c.to(o.dtype) for c, o in zip(cotangents, out)])
        runs.append([*(o.detach() for o in out), *grads])
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = law(*wide)
    want = list(want) if isinstance(want, (tuple, list)) else [want]
    grads = torch.autograd.grad(want, wide, [c.double() for c in cotangents])
    for index, (a, b, w) in enumerate(zip(runs[0], runs[1], [*(o.detach() for o in want), *grads])):
        assert torch.equal(a, b), f"tensor {index} differs from run to run"
        assert torch.isfinite(a).all(), f"tensor {index} is not finite"
        error = ((a.double() - w).norm() / w.norm().clamp_min(1e-30)).item()
        assert error < tolerance, f"tensor {index}: {error:.2e}"
