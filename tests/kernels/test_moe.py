"""Dropless experts, sorted in torch and in Triton (interpreted), against the loop over experts."""

import pytest
import torch
from cases import Form, forms, needs_interpreter, randn, relative_error

from earlyfusion.kernels import products
from earlyfusion.kernels.moe import grouped, naive, triton_experts

# The same sums in another order.
EXACT = Form(grouped, torch.float64, 1e-12)
TRITON = Form(triton_experts, torch.float32, 1e-5)
BOTH = forms(torch=EXACT, triton=TRITON)
# Activations and outputs are rounded to 8 bits.
BF16 = 2e-2
ROUNDED = forms(
    torch32=Form(grouped, torch.float32, 5e-6),
    torch16=Form(grouped, torch.bfloat16, BF16),
    triton16=Form(triton_experts, torch.float16, 6e-3),
)
# T, J, D, E, F.
SHAPES = [(1, 1, 16, 3, 16), (37, 2, 24, 5, 20), (64, 3, 8, 4, 7), (50, 2, 33, 8, 10)]


def tensors(T, J, D, E, F, seed=0, busy=None, dtype=torch.float64):
    """(ids, [x, weights, gate_up, down]). busy: how many experts receive tokens (all by default)."""
    # The largest J of random scores, as a router chooses.
    ids = randn(T, busy or E, seed=seed).topk(J, dim=1).indices
    weights = randn(T, J, seed=seed + 2).softmax(-1)
    gate_up = randn(E, 2 * F, D, seed=seed + 3) * D**-0.5
    leaves = randn(T, D, seed=seed + 1), weights, gate_up, randn(E, D, F, seed=seed + 4) * F**-0.5
    return ids, [x.to(dtype) for x in leaves]


def compare(form, ids, leaves):
    run = lambda module, x, w, g, d: module.moe_experts(x, ids, w, g, d)
    return form.compare(run, naive, leaves, [randn(*leaves[0].shape, seed=9)])


@pytest.mark.parametrize("seed", [0, 10])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@BOTH
def test_experts_equal_the_loop(form, shape, seed):
    compare(form, *tensors(*shape, seed=seed))


@ROUNDED
def test_low_precision_loses_only_roundings(form):
    got = compare(form, *tensors(100, 2, 33, 8, 10))
    assert all(x.dtype == form.dtype for x in got)


@BOTH
@pytest.mark.parametrize("which", ["both choices the same", "all on one expert"])
def test_any_routing_is_computed(form, which):
    ids, leaves = tensors(40, 2, 16, 4, 16)
    ids = torch.full_like(ids, 3) if which == "all on one expert" else ids[:, :1].expand(40, 2).contiguous()
    compare(form, ids, leaves)


def test_filling_rows_change_nothing(monkeypatch):
    """bfloat16 on a CPU rounds every expert's share up; forced on in float64, results must not move."""
    monkeypatch.setattr(grouped, "_row_multiple", lambda *_: 16)
    compare(EXACT, *tensors(37, 2, 24, 5, 16, busy=3))


def test_halved_products_lose_only_roundings(monkeypatch):
    """Operands in bfloat16, the rest in float32: gradients of what is rounded, and in float32 all of them."""
    monkeypatch.setattr(products, "LEAST", 1)
    for seed in (0, 1):
        ids, leaves = tensors(300, 2, 24, 5, 20, seed, dtype=torch.float32)
        with products.halved_products():
            compare(Form(grouped, torch.float32, BF16), ids, leaves)


def test_gradcheck():
    ids, leaves = tensors(5, 2, 3, 4, 2)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(lambda x, w, a, b: grouped.moe_experts(x, ids, w, a, b), leaves)


@BOTH
def test_expanded_gradient_is_accepted(form):
    ids, leaves = tensors(9, 2, 16, 3, 16, dtype=form.dtype)
    x = leaves[0].requires_grad_()
    # The gradient of sum has stride 0.
    form.op.moe_experts(x, ids, *leaves[1:]).sum().backward()
    (want,) = torch.autograd.grad(naive.moe_experts(x, ids, *leaves[1:]).sum(), x)
    assert relative_error(x.grad, want) < form.error


@forms(
    torch32=Form(grouped, torch.float32, 5e-6),
    torch16=Form(grouped, torch.bfloat16, BF16),
    triton=Form(triton_experts, torch.float32, 1e-6),
)
def test_a_token_does_not_depend_on_its_batch(form):
    ids, (x, weights, *experts) = tensors(60, 2, 24, 5, 16, dtype=form.dtype)
    together = form.op.moe_experts(x, ids, weights, *experts)
    assert torch.equal(together, form.op.moe_experts(x, ids, weights, *experts))
    # One token, a few, many: products of other shapes.
    for rows in (slice(0, 1), slice(7, 9), slice(30, 60)):
        alone = form.op.moe_experts(x[rows], ids[rows], weights[rows], *experts)
        assert relative_error(together[rows], alone) < form.error


@BOTH
def test_idle_experts_get_zero_gradients_not_garbage(form):
    got = compare(form, *tensors(40, 2, 16, 6, 16, busy=2))
    for gradient in got[3:]:
        assert (gradient[2:] == 0).all() and (gradient[:2].abs().amax((1, 2)) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@forms(naive=Form(naive, None, 0), torch=EXACT, triton=TRITON)
def test_no_tokens_at_all(form, dtype):
    ids, leaves = tensors(0, 2, 16, 4, 16, dtype=dtype)
    leaves = [x.requires_grad_() for x in leaves]
    y = form.op.moe_experts(leaves[0], ids, *leaves[1:])
    dx, dweights, *rest = torch.autograd.grad(y.sum(), leaves)
    assert y.shape == dx.shape == (0, 16) and dweights.shape == (0, 2)
    assert all((gradient == 0).all() for gradient in rest)


def test_autocast_computes_in_bf16_and_returns_gradients_in_the_parameters_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        got = compare(Form(grouped, torch.float32, BF16), *tensors(60, 2, 24, 5, 16))
    assert got[0].dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in got[1:])


@needs_interpreter
def test_an_id_outside_the_experts_gives_nan_for_its_token_only():
    ids, leaves = tensors(9, 2, 16, 4, 16, dtype=torch.float32)
    good = triton_experts.moe_experts(leaves[0], ids, *leaves[1:])
    # A read outside the weights would be silent.
    ids[4, 1] = 99
    bad = triton_experts.moe_experts(leaves[0], ids, *leaves[1:])
    assert bad[4].isnan().all() and torch.equal(bad[[0, 8]], good[[0, 8]])


@pytest.mark.parametrize("seed", [0, 1])
def test_situ_in_bfloat16_is_rounded_once(seed):
    """Kimi K3 computes it in float32 whatever the dtype of its products; five roundings differ in the last
    digit of most values."""
    torch.manual_seed(seed)
    gate, up = torch.randn(2, 4000).mul(6.0).bfloat16()
    wide = (
        4.0 * torch.tanh(gate.float() / 4.0) * gate.float().sigmoid() * 25.0 * torch.tanh(up.float() / 25.0)
    )
    found = naive.activate(gate, up, (4.0, 25.0))
    assert torch.equal(found, wide.bfloat16())
    stepwise = 4.0 * torch.tanh(gate / 4.0) * gate.sigmoid() * (25.0 * torch.tanh(up / 25.0))
    assert (found != stepwise).float().mean() > 0.3


@pytest.mark.parametrize("situ", [(4.0, 25.0), (1.5, None)])
def test_situ_is_its_formula_in_every_form(situ):
    """SiTU (Kimi K3): beta tanh(g / beta) sigmoid(g) and lambda tanh(u / lambda), the loop and sorted, and
    the gradients of both by differences."""
    ids, (x, weights, gate_up, down) = tensors(37, 2, 24, 5, 20, seed=1)
    beta, bound = situ
    y = torch.zeros_like(x)
    for t in range(37):
        for j in range(2):
            g, u = (3.0 * gate_up[ids[t, j]] @ x[t]).chunk(2)
            u = u if bound is None else bound * torch.tanh(u / bound)
            act = beta * torch.tanh(g / beta) / (1 + torch.exp(-g)) * u
            y[t] += weights[t, j] * (down[ids[t, j]] @ act)
    for form in (naive, grouped, triton_experts):
        got = form.moe_experts(x, ids, weights, 3.0 * gate_up, down, situ)
        torch.testing.assert_close(got, y, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(
        grouped.moe_experts_alone(x, ids, weights, 3.0 * gate_up, down, situ), y, atol=1e-12, rtol=1e-12
    )
    ids, leaves = tensors(5, 2, 3, 4, 2)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    run = lambda x, w, a, b: grouped.moe_experts(x, ids, w, a, b, situ)
    assert torch.autograd.gradcheck(run, leaves)
