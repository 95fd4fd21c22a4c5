"""Cross-entropy and log-probabilities in chunks, in plain torch and with Triton row kernels (interpreted),
against the definition with all logits in memory."""

import pytest
import torch
import torch.nn.functional as F
from cases import Form, forms, randn, refused, relative_error

from earlyfusion.kernels.loss import chunked_ce, naive, triton_rows

# The same sums in another order.
EXACT = Form(chunked_ce, torch.float64, 1e-11)
FP32 = 5e-6
TORCH, TRITON = Form(chunked_ce, torch.float32, FP32), Form(triton_rows, torch.float32, FP32)
BOTH = forms(torch64=EXACT, torch=TORCH, triton=TRITON)
# Gradients are rounded to 8 bits.
BF16 = 1.5e-2
# T, D, V, chunk.
SHAPES = [(1, 3, 2, 1), (37, 24, 50, 8), (64, 16, 33, 1024), (40, 16, 5003, 13)]


def tensors(T, D, V, seed=0, dtype=torch.float64):
    """(h, weight, labels, loss weights); some labels are ignored, some weights zero."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, V, (T,), generator=generator)
    weights = torch.rand(T, generator=generator)
    # Both ways of leaving a position out, also together.
    labels[2::5], weights[1::7] = naive.IGNORE, 0.0
    return randn(T, D, seed=seed, dtype=dtype), randn(V, D, seed=seed + 1, dtype=dtype), labels, weights


def losses(form, given, **options):
    """The gradients and values of the loss against the law; every token's loss against its."""
    h, weight, labels, weights = given
    # Losses per token have no gradient: they are caught beside the sum.
    found = {}

    def run(module, a, b):
        loss, found[module] = module.linear_cross_entropy(a, b, labels, weights)
        return loss

    got = form.compare(run, naive, [h, weight], [torch.tensor(-2.5)], **options)
    assert not found[form.op].requires_grad
    return got, found[form.op], found[naive]


@pytest.fixture(autouse=True)
def chunk(monkeypatch, request):
    """Rows of logits at once."""
    size = getattr(request, "param", 8)
    monkeypatch.setattr(chunked_ce, "MOST_ROWS", size)
    return size


@pytest.mark.parametrize("seed", [0, 10])
@pytest.mark.parametrize("T,D,V,chunk", SHAPES, indirect=["chunk"])
@BOTH
def test_the_loss_equals_the_definition(form, T, D, V, chunk, seed):
    _, nll, want = losses(form, tensors(T, D, V, seed))
    assert relative_error(nll, want) < form.error


@forms(torch16=Form(chunked_ce, torch.bfloat16, BF16), triton16=Form(triton_rows, torch.float16, 5e-3))
def test_low_precision_rounds_gradients_alone(form):
    got, nll, want = losses(form, tensors(60, 32, 129))
    assert got[0].dtype == nll.dtype == torch.float32 and got[1].dtype == got[2].dtype == form.dtype
    # Losses themselves are float32 even from 16-bit operands.
    assert relative_error(nll, want) < FP32


@pytest.mark.parametrize("temperature", [1.0, 0.6])
# One tile of the vocabulary, and three.
@pytest.mark.parametrize("shape", [(37, 12, 67), (9, 12, 9001)])
@BOTH
def test_log_probabilities_and_entropy_equal_the_definition(form, temperature, shape):
    h, weight, labels, _ = tensors(*shape)
    entropy = {}

    def run(module, a, b):
        logp, entropy[module] = module.token_log_probs(a, b, labels, temperature=temperature)
        return logp

    got = form.compare(run, naive, [h, weight], [randn(shape[0], seed=3)])
    # a difference of two numbers near 30
    assert relative_error(entropy[form.op], entropy[naive]) < 4 * form.error
    assert not entropy[form.op].requires_grad and (got[0][labels == naive.IGNORE] == 0).all()


def test_unit_weights_equal_torch_cross_entropy_and_minus_the_log_probabilities():
    h, weight, labels, _ = tensors(50, 16, 40)
    loss, nll = chunked_ce.linear_cross_entropy(h, weight, labels, torch.ones(50))
    logits = h @ weight.T
    assert (loss - F.cross_entropy(logits, labels, reduction="sum")).abs() < EXACT.error
    assert (nll - F.cross_entropy(logits, labels, reduction="none")).abs().max() < EXACT.error
    assert torch.equal(chunked_ce.token_log_probs(h, weight, labels)[0], -nll)
    loss, nll = chunked_ce.linear_cross_entropy(h, weight, labels, torch.arange(50.0))
    assert (loss - (nll * torch.arange(50.0)).sum()).abs() < EXACT.error


def test_gradcheck():
    h, weight, labels, weights = tensors(6, 3, 5)
    leaves = [h.requires_grad_(), weight.requires_grad_()]
    loss = lambda a, b: chunked_ce.linear_cross_entropy(a, b, labels, weights)[0]
    logp = lambda a, b: chunked_ce.token_log_probs(a, b, labels, temperature=0.7)[0]
    assert torch.autograd.gradcheck(loss, leaves) and torch.autograd.gradcheck(logp, leaves)


def run(form, h, weight, labels, weights, **options):
    h, weight = (x.to(form.dtype).requires_grad_() for x in (h, weight))
    loss, nll = form.op.linear_cross_entropy(h, weight, labels, weights, **options)
    return [loss.detach(), nll, *torch.autograd.grad(loss, (h, weight))]


@BOTH
def test_skipped_positions_are_not_computed(form):
    """Poison where there is no loss: any use of those rows would show up as NaN. Twice the same bits."""
    h, *rest = tensors(40, 8, 20)
    skipped = (rest[1] == naive.IGNORE) | (rest[2] == 0)
    clean = run(form, h, *rest)
    poisoned = run(form, h.masked_fill(skipped[:, None], torch.nan), *rest)
    assert skipped.sum() > 5 and all(torch.equal(a, b) for a, b in zip(clean, poisoned))
    assert (poisoned[1][skipped] == 0).all() and (poisoned[2][skipped] == 0).all()


@pytest.mark.parametrize("T", [0, 9])
@pytest.mark.parametrize("why", ["ignored", "weightless"])
def test_without_any_counted_position_nothing_is_multiplied_and_all_is_zero(T, why):
    """A chunk of no rows would be a product of no rows, on a GPU with an output dtype of its own."""

    def never(*_):
        raise AssertionError("a chunk of no rows")

    nothing = chunked_ce.Rows(never, never)
    labels = torch.full((T,), naive.IGNORE if why == "ignored" else 1)
    weights = torch.full((T,), 1.0 if why == "ignored" else 0.0)
    h, weight = torch.randn(T, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    loss, nll = chunked_ce.linear_cross_entropy(h, weight, labels, weights, rows=nothing)
    ignored = torch.full((T,), naive.IGNORE)
    logp, entropy = chunked_ce.token_log_probs(h, weight, ignored, rows=nothing)
    gradients = torch.autograd.grad(loss + logp.sum(), (h, weight))
    assert not any(value.any() for value in (loss, nll, logp, entropy, *gradients))
    assert [gradient.shape for gradient in gradients] == [(T, 8), (20, 8)]


@forms(torch=TORCH, triton=TRITON)
def test_extreme_logits_give_finite_losses_and_gradients(form):
    h, *rest = tensors(20, 8, 30)
    # Logits near 2000 carry 1e-4 in float32.
    losses(form, (200 * h, *rest), error=1e-4)


def test_only_the_wanted_gradients_are_computed():
    h, *rest = tensors(20, 8, 30)
    leaf = h.clone().requires_grad_()
    chunked_ce.linear_cross_entropy(leaf, *rest)[0].backward()
    assert leaf.grad is not None and rest[0].grad is None
    with torch.no_grad():
        assert not chunked_ce.linear_cross_entropy(leaf, *rest)[0].requires_grad


def test_backward_can_run_twice():
    h, *rest = tensors(20, 8, 30)
    leaf = h.clone().requires_grad_()
    loss, _ = chunked_ce.linear_cross_entropy(leaf, *rest)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(3 * loss, leaf)
    assert torch.equal(3 * first, second)


def test_logits_never_exceed_one_chunk(monkeypatch):
    rows, product = [], chunked_ce.wide_mm
    monkeypatch.setattr(chunked_ce, "wide_mm", lambda a, b: rows.append(a.shape[0]) or product(a, b))
    h, weight, labels, weights = tensors(100, 8, 30)
    run(EXACT, h, weight, labels, weights)
    assert max(rows) == 8 and sum(rows) == ((labels != naive.IGNORE) & (weights != 0)).sum()


def test_autocast_computes_in_bf16_and_returns_gradients_in_the_inputs_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        got, *_ = losses(Form(chunked_ce, torch.float32, BF16), tensors(60, 16, 40))
    assert all(x.dtype == torch.float32 for x in got)


@forms(torch=TORCH, triton=TRITON)
def test_bad_input_names_the_argument(form):
    h, weight, labels, w = tensors(4, 8, 30, dtype=torch.float32)
    loss, logp = form.op.linear_cross_entropy, form.op.token_log_probs
    refused(
        {
            "weight_VD is": lambda: loss(h, weight.T, labels, w),
            "labels_T is torch.int32": lambda: loss(h, weight, labels.int(), w),
            "temperature": lambda: logp(h, weight, labels, temperature=0.0),
            "labels_T is": lambda: logp(h, weight, labels[:2]),
        }
    )
