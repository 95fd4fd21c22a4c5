"""Dropless experts: the sorted form against the loop over experts."""

import pytest
import torch

from earlyfusion.kernels.moe import grouped, naive

FP64 = 1e-12  # the same sums in another order
FP32 = 5e-6  # relative to the largest entry
BF16 = 2e-2  # relative to the largest entry; activations and outputs are rounded to 8 bits

SHAPES = [(1, 1, 4, 3, 5), (37, 2, 24, 5, 16), (64, 3, 8, 4, 7), (200, 2, 33, 8, 10)]  # T, J, D, E, F


def tensors(T, J, D, E, F, dtype=torch.float64, seed=0, busy=None):
    """`busy`: how many experts receive tokens (all by default)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ids = draw(T, busy or E).topk(J, dim=1).indices
    weights = draw(T, J).softmax(-1)
    return ids, [
        x.to(dtype) for x in (draw(T, D), weights, draw(E, 2 * F, D) * D**-0.5, draw(E, D, F) * F**-0.5)
    ]


def run(implementation, ids, leaves, dy):
    x, weights, gate_up, down = (leaf.detach().clone().requires_grad_() for leaf in leaves)
    y = implementation.moe_experts(x, ids, weights, gate_up, down)
    return [y.detach(), *torch.autograd.grad(y, (x, weights, gate_up, down), dy.to(y.dtype))]


def relative_error(got, want):
    return ((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30)).item()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_sorted_form_equals_the_loop_in_fp64(shape, seed):
    ids, leaves = tensors(*shape, seed=seed)
    dy = torch.randn(leaves[0].shape, dtype=torch.float64)
    for g, w in zip(run(grouped, ids, leaves, dy), run(naive, ids, leaves, dy)):
        assert (g - w).abs().max() < FP64


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, FP32), (torch.bfloat16, BF16)])
def test_low_precision_stays_near_fp64(dtype, tolerance):
    ids, leaves = tensors(200, 2, 33, 8, 10, dtype)
    dy = torch.randn(leaves[0].shape).to(dtype)
    want = run(naive, ids, [leaf.double() for leaf in leaves], dy.double())
    for g, w in zip(run(grouped, ids, leaves, dy), want):
        assert g.dtype == dtype and relative_error(g, w) < tolerance


def test_filling_rows_change_nothing(monkeypatch):
    """bfloat16 on a CPU rounds every expert's share up; forced on in float64, results must not move."""
    ids, leaves = tensors(37, 2, 24, 5, 16, busy=3)
    dy = torch.randn(leaves[0].shape, dtype=torch.float64)
    plain = run(grouped, ids, leaves, dy)
    monkeypatch.setattr(grouped, "_row_multiple", lambda *_: 16)
    for a, b in zip(plain, run(grouped, ids, leaves, dy)):
        assert (a - b).abs().max() < FP64


def test_gradcheck():
    ids, leaves = tensors(5, 2, 3, 4, 2)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(lambda x, w, a, b: grouped.moe_experts(x, ids, w, a, b), leaves)


def test_expanded_gradient_is_accepted():
    ids, leaves = tensors(9, 2, 4, 3, 5)
    x = leaves[0].requires_grad_()
    grouped.moe_experts(x, ids, *leaves[1:]).sum().backward()  # the gradient of sum has stride 0
    (want,) = torch.autograd.grad(naive.moe_experts(x, ids, *leaves[1:]).sum(), x)
    assert (x.grad - want).abs().max() < FP64


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, FP32), (torch.bfloat16, BF16)])
def test_a_token_does_not_depend_on_its_batch(dtype, tolerance):
    ids, (x, weights, gate_up, down) = tensors(120, 2, 24, 5, 16, dtype)
    together = grouped.moe_experts(x, ids, weights, gate_up, down)
    for rows in (slice(0, 1), slice(7, 9), slice(50, 120)):
        alone = grouped.moe_experts(x[rows], ids[rows], weights[rows], gate_up, down)
        assert relative_error(together[rows], alone) < tolerance


def test_no_token_is_dropped_when_all_choose_one_expert():
    ids, (x, weights, gate_up, down) = tensors(300, 1, 8, 6, 4)
    ids = torch.full_like(ids, 4)
    y = grouped.moe_experts(x, ids, weights, gate_up, down)
    gate, up = (x @ gate_up[4].T).chunk(2, dim=-1)
    want = weights * ((torch.nn.functional.silu(gate) * up) @ down[4].T)
    assert (y - want).abs().max() < FP64
    assert (y.abs().sum(dim=1) > 0).all()


def test_every_choice_is_counted_once():
    """With experts that return a constant per expert, the output is the sum of chosen weights: a dropless
    count."""
    T, J, E = 64, 2, 6
    ids, (_, weights, *_) = tensors(T, J, 4, E, 1)
    x = torch.ones(T, 4, dtype=torch.float64)
    gate_up = torch.zeros(E, 2, 4, dtype=torch.float64)
    gate_up[:, 0, 0], gate_up[:, 1, 0] = 50.0, 1 / 50.0  # silu(50) * 1/50 = 1
    down = torch.arange(E, dtype=torch.float64)[:, None, None].expand(E, 4, 1).contiguous()
    y = grouped.moe_experts(x, ids, weights, gate_up, down)
    assert (y[:, 0] - (weights * ids).sum(1)).abs().max() < FP64


def test_idle_experts_get_zero_gradients_not_garbage():
    ids, leaves = tensors(40, 2, 8, 6, 4, busy=2)
    _, _, _, dgate_up, ddown = run(grouped, ids, leaves, torch.ones(40, 8, dtype=torch.float64))
    assert (dgate_up[2:] == 0).all() and (ddown[2:] == 0).all()
    assert (dgate_up[:2].abs().amax((1, 2)) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", [naive, grouped])
def test_no_tokens_at_all(implementation, dtype):
    _, (_, _, gate_up, down) = tensors(1, 2, 8, 6, 4, dtype)
    leaves = [torch.zeros(0, 8, dtype=dtype), torch.zeros(0, 2), gate_up, down]
    y, dx, dweights, dgate_up, ddown = run(
        implementation, torch.zeros(0, 2, dtype=torch.int64), leaves, torch.zeros(0, 8, dtype=dtype)
    )
    assert y.shape == dx.shape == (0, 8) and dweights.shape == (0, 2)
    assert (dgate_up == 0).all() and (ddown == 0).all()


def test_both_choices_may_name_the_same_expert():
    ids, leaves = tensors(12, 2, 8, 3, 4)
    ids = ids[:, :1].expand(12, 2).contiguous()
    dy = torch.randn(12, 8, dtype=torch.float64)
    for g, w in zip(run(grouped, ids, leaves, dy), run(naive, ids, leaves, dy)):
        assert (g - w).abs().max() < FP64


def test_autocast_computes_in_bf16_and_returns_gradients_in_the_parameters_dtype():
    ids, leaves = tensors(60, 2, 24, 5, 16, torch.float32)
    dy = torch.randn(60, 24)
    want = run(naive, ids, [leaf.double() for leaf in leaves], dy.double())
    with torch.autocast("cpu", torch.bfloat16):
        got = run(grouped, ids, leaves, dy)
    assert got[0].dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in got[1:])
    for g, w in zip(got, want):
        assert relative_error(g, w) < BF16


def test_wrong_shapes_are_named():
    ids, (x, weights, gate_up, down) = tensors(4, 2, 8, 3, 5)
    with pytest.raises(ValueError, match=r"gate rows first"):
        grouped.moe_experts(x, ids, weights, gate_up.transpose(1, 2), down)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, BF16)])
def test_cuda_stays_near_fp64(dtype, tolerance):
    ids, leaves = tensors(300, 2, 64, 8, 32, dtype, busy=6)
    ids, leaves = ids.cuda(), [leaf.cuda() for leaf in leaves]
    dy = torch.randn_like(leaves[0])
    want = run(naive, ids, [leaf.double() for leaf in leaves], dy.double())
    for g, w in zip(run(grouped, ids, leaves, dy), want):
        assert relative_error(g, w) < tolerance
