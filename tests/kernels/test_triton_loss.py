"""The chunked loss and log-probabilities with Triton row kernels, through the interpreter, against the
definition."""

import pytest
import torch
from triton_cases import needs_interpreter, relative_error, values_and_gradients

from earlyfusion.kernels.loss import chunked_ce, naive, triton_rows

pytestmark = needs_interpreter
FP32 = 5e-6  # relative to the largest entry; float32 sums in another order
ENTROPY = 2e-5  # a difference of two numbers near 30
FP16 = 5e-3  # logits' gradients are rounded to 11 bits before the products


def tensors(T, D, V, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(T, D, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, V, (T,), generator=generator)
    labels[torch.rand(T, generator=generator) < 0.2] = naive.IGNORE
    return h, weight, labels, torch.rand(T, generator=generator)


@pytest.mark.parametrize("implementation", [chunked_ce, triton_rows])
@pytest.mark.parametrize("shape,chunk", [((1, 8, 20), 4), ((37, 12, 67), 8), ((40, 16, 5003), 64)])
def test_the_loss_equals_the_definition(implementation, shape, chunk):
    for seed in (0, 1):
        h, weight, labels, w = tensors(*shape, seed=seed)
        labels[0] = 3
        got, want = (
            values_and_gradients(
                lambda a, b, m=m, labels=labels, w=w: m.linear_cross_entropy(a, b, labels, w, chunk=chunk)[0],
                [h.to(dtype), weight.to(dtype)],
                [torch.tensor(1.7)],
            )
            for m, dtype in ((implementation, torch.float32), (naive, torch.float64))
        )
        for g, x in zip(got, want):
            assert relative_error(g, x) < FP32


@pytest.mark.parametrize("implementation", [chunked_ce, triton_rows])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("shape", [(37, 12, 67), (9, 12, 9001)])  # one tile of the vocabulary, and three
def test_log_probabilities_and_entropy_equal_the_definition(implementation, temperature, shape):
    h, weight, labels, upstream = tensors(*shape)
    options = {"temperature": temperature, "chunk": 8}
    got, want = (
        values_and_gradients(
            lambda a, b, m=m: m.token_log_probs(a, b, labels, **options)[0],
            [h.to(dtype), weight.to(dtype)],
            [upstream - 0.5],
        )
        for m, dtype in ((implementation, torch.float32), (naive, torch.float64))
    )
    for g, x in zip(got, want):
        assert relative_error(g, x) < FP32
    entropy = implementation.token_log_probs(h, weight, labels, **options)[1]
    expected = naive.token_log_probs(h.double(), weight.double(), labels, **options)[1]
    assert relative_error(entropy, expected) < ENTROPY and not entropy.requires_grad
    assert (got[0][labels == naive.IGNORE] == 0).all()


def test_log_probabilities_are_the_negative_losses():
    h, weight, labels, _ = tensors(23, 12, 67)
    logp, _ = triton_rows.token_log_probs(h, weight, labels)
    _, nll = triton_rows.linear_cross_entropy(h, weight, labels, torch.ones(23))
    assert torch.equal(logp, -nll)


def test_gradcheck_of_the_new_terms():
    h, weight, labels, w = tensors(6, 3, 5, torch.float64)
    leaves = [h.requires_grad_(), weight.requires_grad_()]
    assert torch.autograd.gradcheck(
        lambda a, b: chunked_ce.linear_cross_entropy(a, b, labels, w, chunk=4)[0], leaves
    )
    assert torch.autograd.gradcheck(
        lambda a, b: chunked_ce.token_log_probs(a, b, labels, chunk=4, temperature=0.7)[0], leaves
    )


def test_half_precision_gradients_take_half_of_the_logits_bytes():
    h, weight, labels, w = tensors(37, 12, 67, torch.float16)
    kept = torch.randn(3, 67)
    lse = kept.logsumexp(-1)
    before = kept.clone()
    out = triton_rows.TRITON_ROWS.gradient(
        kept, lse, labels[:3].clamp_min(0), torch.ones(3), w[:3], torch.float16
    )
    assert out.data_ptr() == kept.data_ptr() and out.dtype == torch.float16
    expected = (before - lse[:, None]).exp()
    expected[torch.arange(3), labels[:3].clamp_min(0)] -= w[:3]
    assert relative_error(out, expected) < 1e-3
    got = values_and_gradients(
        lambda a, b: triton_rows.linear_cross_entropy(a, b, labels, w, chunk=8)[0],
        [h, weight],
        [torch.tensor(1.0)],
    )
    want = values_and_gradients(
        lambda a, b: naive.linear_cross_entropy(a, b, labels, w)[0],
        [h.double(), weight.double()],
        [torch.tensor(1.0)],
    )
    for g, x in zip(got, want):
        assert relative_error(g, x) < FP16


def test_extreme_and_masked_logits_stay_finite():
    """Rows with logits of 1e4 and rows with -inf (a banned token) give finite statistics."""
    logits = torch.randn(3, 5000) * 3000
    logits[1, 7:4999] = float("-inf")
    labels = torch.tensor([3, 2, 4999])
    got = triton_rows.TRITON_ROWS.statistics(logits.clone(), labels, True)
    assert relative_error(got.lse_R, logits.double().logsumexp(-1)) < FP32
    p = logits.double().softmax(-1)
    mean = torch.where(p > 0, p * logits.double(), 0.0).sum(-1)
    assert relative_error(got.mean_R, mean) < FP32


def test_a_second_run_is_bit_identical():
    h, weight, labels, w = tensors(37, 12, 67)
    runs = [
        values_and_gradients(
            lambda a, b: triton_rows.linear_cross_entropy(a, b, labels, w, chunk=8)[0],
            [h, weight],
            [torch.tensor(1.0)],
        )
        for _ in range(2)
    ]
    for a, b in zip(*runs):
        assert torch.equal(a, b)


@pytest.mark.parametrize("implementation", [naive, chunked_ce, triton_rows])
def test_bad_input_names_the_argument(implementation):
    h, weight, labels, w = tensors(4, 8, 30)
    with pytest.raises(ValueError, match=r"\[T, D\]"):
        implementation.linear_cross_entropy(h, weight.T, labels, w)
    with pytest.raises(ValueError, match="labels_T"):
        implementation.linear_cross_entropy(h, weight, labels.int(), w)
    with pytest.raises(ValueError, match="temperature"):
        implementation.token_log_probs(h, weight, labels, temperature=0.0)
    with pytest.raises(ValueError, match=r"\[T, D\]"):
        implementation.token_log_probs(h, weight, labels[:2])
