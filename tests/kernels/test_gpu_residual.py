"""On a GPU: Attention Residuals, loss and log-probabilities in bfloat16 against float64, bit-exact from run
to run."""

import pytest
import torch
from gpu_cases import SEEDS, compare, device, randn

from earlyfusion.kernels.attnres import fused, naive
from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.loss import naive as loss_naive

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "n,S,T,D", [(1, 6, 33, 2304), (5, 6, 129, 2304), (9, 6, 64, 2304), (8, 24, 17, 7168), (40, 1, 31, 2560)]
)
def test_phase1(n, S, T, D, seed):
    sources = [randn(T, D, seed=seed + i) * (1 + i / 3) for i in range(n)]
    qw = randn(S, D, seed=99, dtype=torch.float32) / D**0.5
    op = resolve("attnres_phase1", device())
    cotangents = [randn(S, T, D, seed=7), randn(S, T, seed=8, dtype=torch.float32)]
    compare(lambda q, *v: op(v, q, 1e-5), lambda q, *v: naive.phase1(v, q, 1e-5), [qw, *sources], cotangents)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("T,D", [(1, 2304), (1000, 2304), (77, 2560), (33, 7168)])
def test_step(T, D, seed):
    leaves = [
        randn(T, D, seed=seed),
        randn(T, seed=1, dtype=torch.float32),
        randn(T, D, seed=2),
        randn(T, D, seed=3),
        randn(D, seed=4, dtype=torch.float32) / D**0.5,
        1 + 0.1 * randn(D, seed=5, dtype=torch.float32),
    ]
    op = resolve("attnres_step", device())
    cotangents = [randn(T, D, seed=6), randn(T, D, seed=7)]
    compare(lambda *a: op(*a, 1e-5, 1e-5), lambda *a: fused.step_naive(*a, 1e-5, 1e-5), leaves, cotangents)


def test_the_loss_and_its_memory():
    T, D, V = 2000, 512, 50_000
    h, weight = randn(T, D), randn(V, D, seed=1) / D**0.5
    labels = torch.randint(0, V, (T,), device=device())
    labels[::7] = -100
    weights = torch.rand(T, device=device())
    op = resolve("linear_cross_entropy", device())
    law = loss_naive.linear_cross_entropy
    one = [torch.ones((), device=device())]
    compare(
        lambda a, b: op(a, b, labels, weights)[0],
        lambda a, b: law(a, b, labels, weights)[0],
        [h, weight],
        one,
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    op(h.requires_grad_(), weight.requires_grad_(), labels, weights, chunk=256)[0].backward()
    full = T * V * 4
    assert torch.cuda.max_memory_allocated() - before < full  # logits in full would take twice this


def test_log_probabilities():
    T, D, V = 500, 256, 20_000
    h, weight = randn(T, D), randn(V, D, seed=1) / D**0.5
    labels = torch.randint(0, V, (T,), device=device())
    op, upstream = resolve("token_log_probs", device()), [randn(T, seed=3, dtype=torch.float32)]
    compare(
        lambda a, b: op(a, b, labels, temperature=0.7)[0],
        lambda a, b: loss_naive.token_log_probs(a, b, labels, temperature=0.7)[0],
        [h, weight],
        upstream,
    )


def test_a_label_outside_the_vocabulary_gives_nan_not_a_fault():
    h, weight = randn(8, 64), randn(100, 64, seed=1)
    labels = torch.tensor([0, 1, 2, 3, 100, 5, 6, 7], device=device())
    with torch.no_grad():
        _, nll = resolve("linear_cross_entropy", device())(h, weight, labels, torch.ones(8, device=device()))
    torch.cuda.synchronize()
    assert nll[4].isnan() and nll[[0, 1, 2, 3, 5, 6, 7]].isfinite().all()


def test_without_a_counted_position_there_is_no_loss_and_no_gradient():
    h, weight = randn(8, 64).requires_grad_(), randn(100, 64, seed=1).requires_grad_()
    labels = torch.full((8,), -100, device=device())
    loss, _ = resolve("linear_cross_entropy", device())(h, weight, labels, torch.ones(8, device=device()))
    assert all(not value.any() for value in (loss, *torch.autograd.grad(loss, (h, weight))))
