"""Shared by the kernel tests: interpreter on, forms to try, comparison with a law, NaN in fresh tensors."""

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

# Before any kernel module is imported. On a machine with a GPU the kernels themselves run (tests marked gpu).
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

triton = pytest.importorskip("triton")

# Decided once per process: Triton makes its functions when they are defined.
interpreted = os.environ["TRITON_INTERPRET"] == "1"
needs_interpreter = pytest.mark.skipif(
    not interpreted, reason="the interpreter is off in this process (TRITON_INTERPRET=0)"
)


@contextlib.contextmanager
def poisoned_empties():
    """Inside, torch.empty and its relatives are filled with NaN: whatever a kernel forgets to write shows
    up."""
    names = ["empty", "empty_like"]
    saved = {name: getattr(torch, name) for name in names}
    saved_method = torch.Tensor.new_empty

    # Integers are left alone: as indices, NaN's bits would lead anywhere.
    def poison(tensor):
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    try:
        for name in names:
            setattr(torch, name, lambda *a, f=saved[name], **k: poison(f(*a, **k)))
        torch.Tensor.new_empty = lambda self, *a, **k: poison(saved_method(self, *a, **k))
        yield
    finally:
        for name in names:
            setattr(torch, name, saved[name])
        torch.Tensor.new_empty = saved_method


def round_as_on_a_gpu(monkeypatch):
    """Give interpreted kernels the roundings of bfloat16, which the interpreter itself gets wrong: what they
    load and store in 16 bits is widened before a launch and rounded after it, and float32 operands of
    products are rounded. Left out is the rounding of what a launch stores and reads again itself."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

    # The interpreter computes in numpy, which knows no bfloat16.
    launch, product = GridExecutor.__call__, InterpreterBuilder.create_dot

    def rounded(handle):
        if handle.data.dtype != "float32":
            return handle
        return TensorHandle(torch.from_numpy(handle.data.copy()).bfloat16().float().numpy(), handle.dtype)

    def launch_widened(self, *args, **kwargs):
        made = []

        def widened(x):
            # Records of tensors.
            if isinstance(x, tuple):
                parts = [widened(part) for part in x]
                return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
            if not isinstance(x, torch.Tensor) or x.dtype != torch.bfloat16:
                return x
            # The whole storage: views of it may overlap, and all of them must see the result.
            wide = x.new_empty(x.untyped_storage().nbytes() // 2, dtype=torch.float32)
            flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), 0, wide.shape)
            made.append((flat, wide.copy_(flat)))
            return wide.as_strided(x.size(), x.stride(), x.storage_offset())

        with torch.no_grad():
            launch(self, *map(widened, args), **kwargs)
            for flat, wide in made:
                flat.copy_(wide)

    monkeypatch.setattr(GridExecutor, "__call__", launch_widened)
    monkeypatch.setattr(
        InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: product(self, rounded(a), rounded(b), *rest),
    )


def values_and_gradients(function, leaves, cotangents):
    """Outputs (detached) and gradients of every leaf for fixed cotangents; fresh memory is poisoned
    throughout."""
    # Clones: an operation that writes into its inputs would spoil the law's run.
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    with poisoned_empties():
        out = function(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        gradients = torch.autograd.grad(out, leaves, [c.to(o) for c, o in zip(cotangents, out)])
    return [*(o.detach() for o in out), *gradients]


def relative_error(got, want):
    """Largest difference over the largest wanted entry; infinite if anything is not finite."""
    if got.numel() == 0:
        return 0.0
    if not torch.isfinite(got).all():
        return float("inf")
    return ((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30)).item()


@dataclass(frozen=True)
class Form:
    """An implementation (a module, or a function), the dtype it is tried in, and its error there."""

    op: Any
    dtype: torch.dtype
    error: float

    def compare(self, function, law, leaves, cotangents, error=None):
        """function(op, *leaves) in the form's dtype against function(law, *leaves) in float64."""
        # The law sees what the form sees.
        leaves = [x.to(self.dtype) for x in leaves]
        got = values_and_gradients(lambda *x: function(self.op, *x), leaves, cotangents)
        wide = [x.double() for x in leaves]
        cotangents = [c.to(g).double() for c, g in zip(cotangents, got)]
        want = values_and_gradients(lambda *x: function(law, *x), wide, cotangents)
        for index, (g, w) in enumerate(zip(got, want, strict=True)):
            assert g.shape == w.shape
            # Where the law is zero there is nothing to be relative to.
            small = w.abs().max() < 1e-9 if w.numel() else True
            off = g.abs().max() if small and w.numel() else relative_error(g, w)
            assert off < (error or self.error), f"tensor {index}: {off:.1e}"
        return got


def forms(**made):
    """Parametrise a test over implementations; those of Triton need its interpreter."""
    listed = []
    for name, form in made.items():
        marks = [needs_interpreter] if name.startswith("triton") else []
        listed.append(pytest.param(form, id=name, marks=marks))
    return pytest.mark.parametrize("form", listed)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def refused(cases, error=ValueError):
    """{what the message names: call}: each call must raise it."""
    for named, call in cases.items():
        with pytest.raises(error, match=named):
            call()
