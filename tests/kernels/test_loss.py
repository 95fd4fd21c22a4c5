"""Chunked linear cross-entropy against the definition and against torch."""

import pytest
import torch
import torch.nn.functional as F

from earlyfusion.kernels.loss import chunked_ce, naive

FP64 = 1e-12  # the same sums in another order
FP32 = 5e-6  # relative to the largest entry
BF16 = 1.5e-2  # relative to the largest entry; gradients are rounded to 8 bits

SHAPES = [(1, 3, 2, 1), (37, 24, 50, 8), (64, 16, 33, 1024), (100, 7, 129, 13)]  # T, D, V, chunk


def tensors(T, D, V, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    h, weight = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((T, D), (V, D)))
    labels = torch.randint(0, V, (T,), generator=generator)
    loss_weights = torch.rand(T, generator=generator)
    labels[2::5] = -100
    loss_weights[1::7] = 0.0
    return h.to(dtype), weight.to(dtype), labels, loss_weights


def run(implementation, h, weight, labels, loss_weights, upstream=1.0, **options):
    h, weight = (x.detach().clone().requires_grad_() for x in (h, weight))
    loss, nll = implementation.linear_cross_entropy(h, weight, labels, loss_weights, **options)
    assert not nll.requires_grad
    return [loss.detach(), nll, *torch.autograd.grad(loss * upstream, (h, weight))]


def relative_error(got, want):
    return ((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30)).item()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("T,D,V,chunk", SHAPES)
def test_chunked_equals_the_definition_in_fp64(T, D, V, chunk, seed):
    inputs = tensors(T, D, V, seed=seed)
    got, want = run(chunked_ce, *inputs, upstream=-2.5, chunk=chunk), run(naive, *inputs, upstream=-2.5)
    for g, w in zip(got, want):
        assert g.shape == w.shape and g.dtype == w.dtype
        assert (g - w).abs().max() < FP64 * T


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, FP32), (torch.bfloat16, BF16)])
def test_low_precision_stays_near_fp64(dtype, tolerance):
    h, weight, labels, loss_weights = tensors(100, 32, 129, dtype)
    want = run(naive, h.double(), weight.double(), labels, loss_weights)
    got = run(chunked_ce, h, weight, labels, loss_weights, chunk=16)
    assert got[0].dtype == got[1].dtype == torch.float32 and got[2].dtype == got[3].dtype == dtype
    for g, w in zip(got, want):
        assert relative_error(g, w) < tolerance
    assert relative_error(got[1], want[1]) < FP32  # losses themselves are float32 even from bfloat16 operands


def test_unit_weights_equal_torch_cross_entropy():
    h, weight, labels, _ = tensors(50, 16, 40)
    loss, nll = chunked_ce.linear_cross_entropy(h, weight, labels, torch.ones(50), chunk=7)
    logits = h @ weight.T
    assert (loss - F.cross_entropy(logits, labels, reduction="sum")).abs() < FP64 * 50
    assert (nll - F.cross_entropy(logits, labels, reduction="none")).abs().max() < FP64


def test_gradcheck():
    h, weight, labels, loss_weights = tensors(6, 3, 5)
    leaves = [h.requires_grad_(), weight.requires_grad_()]
    assert torch.autograd.gradcheck(
        lambda a, b: chunked_ce.linear_cross_entropy(a, b, labels, loss_weights, chunk=4)[0], leaves
    )


def test_skipped_positions_are_not_computed():
    """Poison where there is no loss: any use of those rows would show up as NaN."""
    h, weight, labels, loss_weights = tensors(40, 8, 20)
    skipped = (labels == -100) | (loss_weights == 0)
    clean = run(chunked_ce, h, weight, labels, loss_weights, chunk=8)
    h = h.masked_fill(skipped[:, None], torch.nan)
    poisoned = run(chunked_ce, h, weight, labels, loss_weights, chunk=8)
    assert skipped.sum() > 5
    for a, b in zip(clean, poisoned):
        assert torch.equal(a, b)
    assert (poisoned[1][skipped] == 0).all() and (poisoned[2][skipped] == 0).all()


@pytest.mark.parametrize("T", [0, 9])
@pytest.mark.parametrize("why", ["ignored", "weightless"])
def test_without_any_counted_position_loss_and_gradients_are_zero(T, why):
    labels = torch.full((T,), -100 if why == "ignored" else 1)
    loss_weights = torch.full((T,), 1.0 if why == "ignored" else 0.0)
    loss, nll, dh, dweight = run(chunked_ce, torch.randn(T, 8), torch.randn(20, 8), labels, loss_weights)
    assert loss == 0 and (nll == 0).all() and (dh == 0).all() and (dweight == 0).all()
    assert dh.shape == (T, 8) and dweight.shape == (20, 8)


def test_loss_is_the_weighted_sum_of_the_reported_losses():
    h, weight, labels, loss_weights = tensors(60, 12, 30)
    loss, nll = chunked_ce.linear_cross_entropy(h, weight, labels, loss_weights)
    assert (loss - (nll * loss_weights.double()).sum()).abs() < FP64 * 60


def test_extreme_logits_give_finite_losses_and_gradients():
    h, weight, labels, loss_weights = tensors(20, 8, 30, torch.float32)
    got = run(chunked_ce, 200 * h, weight, labels, loss_weights)
    want = run(naive, 200 * h.double(), weight.double(), labels, loss_weights)
    for g, w in zip(got, want):
        assert (
            torch.isfinite(g).all() and relative_error(g, w) < 1e-4
        )  # logits near 2000 carry 1e-4 in float32


def test_only_the_wanted_gradients_are_computed():
    h, weight, labels, loss_weights = tensors(20, 8, 30)
    leaf = h.clone().requires_grad_()
    chunked_ce.linear_cross_entropy(leaf, weight, labels, loss_weights)[0].backward()
    assert leaf.grad is not None and weight.grad is None
    with torch.no_grad():
        loss, _ = chunked_ce.linear_cross_entropy(leaf, weight, labels, loss_weights)
    assert not loss.requires_grad


def test_backward_can_run_twice():
    h, weight, labels, loss_weights = tensors(20, 8, 30)
    leaf = h.clone().requires_grad_()
    loss, _ = chunked_ce.linear_cross_entropy(leaf, weight, labels, loss_weights)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(3 * loss, leaf)
    assert torch.equal(3 * first, second)


def test_logits_never_exceed_one_chunk(monkeypatch):
    rows = []
    product = chunked_ce.wide_mm
    monkeypatch.setattr(chunked_ce, "wide_mm", lambda a, b: rows.append(a.shape[0]) or product(a, b))
    h, weight, labels, loss_weights = tensors(100, 8, 30)
    run(chunked_ce, h, weight, labels, loss_weights, chunk=16)
    assert max(rows) == 16 and sum(rows) == ((labels != -100) & (loss_weights != 0)).sum()


def test_autocast_computes_in_bf16_and_returns_gradients_in_the_inputs_dtype():
    h, weight, labels, loss_weights = tensors(60, 16, 40, torch.float32)
    want = run(naive, h.double(), weight.double(), labels, loss_weights)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(chunked_ce, h, weight, labels, loss_weights)
    assert got[0].dtype == torch.float32 and got[2].dtype == got[3].dtype == torch.float32
    for g, w in zip(got, want):
        assert relative_error(g, w) < BF16


def test_wrong_shapes_and_chunks_are_named():
    h, weight, labels, loss_weights = tensors(4, 8, 30)
    with pytest.raises(ValueError, match=r"\[T, D\]"):
        chunked_ce.linear_cross_entropy(h, weight.T, labels, loss_weights)
    with pytest.raises(ValueError, match="at least 1"):
        chunked_ce.linear_cross_entropy(h, weight, labels, loss_weights, chunk=0)


def test_without_a_counted_position_nothing_is_multiplied():
    """A chunk of no rows would be a product of no rows, on a GPU with an output dtype of its own."""

    def never(*_):
        raise AssertionError("a chunk of no rows")

    nothing = chunked_ce.Rows(never, never)
    h, weight = torch.randn(5, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    labels = torch.full((5,), -100)
    loss, nll = chunked_ce.linear_cross_entropy(h, weight, labels, torch.ones(5), rows=nothing)
    logp, entropy = chunked_ce.token_log_probs(h, weight, labels, rows=nothing)
    gradients = torch.autograd.grad(loss + logp.sum(), (h, weight))
    for value in (loss, nll, logp, entropy, *gradients):
        assert not value.any()
