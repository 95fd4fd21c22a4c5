"""Attention residuals: the two-phase schedule and its closed-form backward against the one-phase
definition."""

import pytest
import torch

from earlyfusion.kernels.attnres import naive, two_phase

EPS = 1e-5
FP64 = 1e-12  # the same sums in another order
FP32 = 5e-6  # relative to the largest entry
BF16 = 1.2e-2  # relative to the largest entry; one rounding of inputs' gradients and outputs to 8 bits
DIFFERENCES = 1e-7  # relative; central differences in float64

SHAPES = [(1, 1, 1, 3), (1, 4, 7, 16), (3, 2, 5, 24), (5, 4, 33, 128), (9, 1, 2, 7)]  # n, S, T, D


def tensors(n, S, T, D, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sources = [(draw(T, D) * (1 + 2 * i)).to(dtype) for i in range(n)]
    return sources, draw(S, D), draw(S, T, D).to(dtype), draw(S, T)


def values_and_gradients(function, leaves, cotangents):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    gradients = torch.autograd.grad(out, leaves, [c.to(o.dtype) for c, o in zip(cotangents, out)])
    return [*(o.detach() for o in out), *gradients]


def relative_error(got, want):
    return ((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30)).item()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_phase1_equals_the_definition_in_fp64(shape, seed):
    sources, qw, do, dlse = tensors(*shape, seed=seed)
    got, want = (
        values_and_gradients(lambda q, *v, m=m: m.phase1(v, q, EPS), [qw, *sources], [do, dlse])
        for m in (two_phase, naive)
    )
    for g, w in zip(got, want):
        assert (g - w).abs().max() < FP64 * 10 * shape[0]  # entries grow with the source index


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_merge_equals_the_definition_in_fp64(shape, seed):
    sources, qw, do, lse = tensors(*shape, seed=seed)
    leaves = [do[0].roll(1), lse[0], sources[-1], qw[0]]
    got, want = (
        values_and_gradients(lambda *a, m=m: m.merge(*a, EPS), leaves, [do[0]]) for m in (two_phase, naive)
    )
    for g, w in zip(got, want):
        assert (g - w).abs().max() < FP64 * 10 * shape[0]


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, FP32), (torch.bfloat16, BF16)])
def test_low_precision_stays_near_fp64(dtype, tolerance):
    sources, qw, do, dlse = tensors(5, 4, 40, 96, dtype)
    wide = [qw, *(v.double() for v in sources)]
    got = values_and_gradients(lambda q, *v: two_phase.phase1(v, q, EPS), [qw.float(), *sources], [do, dlse])
    want = values_and_gradients(lambda q, *v: naive.phase1(v, q, EPS), wide, [do.double(), dlse])
    assert got[0].dtype == dtype and got[1].dtype == torch.float32 and got[2].dtype == torch.float32
    for g, w in zip(got, want):
        assert relative_error(g, w) < tolerance
    leaves = [do[1], dlse[0].float(), sources[0], qw[0].float()]
    got = values_and_gradients(lambda *a: two_phase.merge(*a, EPS), leaves, [do[0]])
    want = values_and_gradients(
        lambda *a: naive.merge(*a, EPS), [x.double() for x in leaves], [do[0].double()]
    )
    assert got[0].dtype == dtype
    for g, w in zip(got, want):
        assert relative_error(g, w) < tolerance


@pytest.mark.parametrize("n", [1, 2, 6])
def test_two_phases_equal_one_phase_with_all_gradients(n):
    """A block of three sub-layers: merge(phase1(sources), partial) is mix([*sources, partial])."""
    sources, qw, partials, do = tensors(n, 3, 11, 20)[:3] + (tensors(1, 3, 11, 20, seed=9)[2],)

    def scheduled(q, parts, *v):
        o, lse = two_phase.phase1(v, q, EPS)
        rows = zip(o.unbind(), lse.unbind(), parts.unbind(), q.unbind())
        return torch.stack([two_phase.merge(o1, l1, p, w, EPS) for o1, l1, p, w in rows])

    def one_phase(q, parts, *v):
        return torch.stack([naive.mix([*v, p], w, EPS) for p, w in zip(parts.unbind(), q.unbind())])

    got, want = (values_and_gradients(f, [qw, partials, *sources], [do]) for f in (scheduled, one_phase))
    for g, w in zip(got, want):
        assert (g - w).abs().max() < FP64 * 10 * n


def test_closed_forms_match_finite_differences():
    sources, qw, do, dlse = tensors(3, 2, 3, 6)

    def loss(stack, q):
        o, lse = naive.phase1(list(stack), q, EPS)
        return ((o * do).sum() + (lse * dlse).sum()).item()

    stack = torch.stack(sources)
    _, _, dqw, *dv = values_and_gradients(
        lambda q, *v: two_phase.phase1(v, q, EPS), [qw, *sources], [do, dlse]
    )
    step = 1e-6
    for leaf, gradient, at in ((stack, torch.stack(dv), 0), (qw, dqw, 1)):
        numeric = torch.zeros_like(leaf)
        for index in range(leaf.numel()):
            pair = []
            for sign in (step, -step):
                moved = leaf.clone()
                moved.view(-1)[index] += sign
                pair.append(loss(moved, qw) if at == 0 else loss(stack, moved))
            numeric.view(-1)[index] = (pair[0] - pair[1]) / (2 * step)
        assert relative_error(gradient, numeric) < DIFFERENCES


def test_gradcheck():
    sources, qw, _, lse = tensors(3, 2, 4, 5)
    leaves = [x.requires_grad_() for x in (qw, *sources)]
    assert torch.autograd.gradcheck(lambda q, *v: two_phase.phase1(v, q, EPS), leaves)
    leaves = [x.detach().requires_grad_() for x in (sources[0], lse[0], sources[1], qw[0])]
    assert torch.autograd.gradcheck(lambda *a: two_phase.merge(*a, EPS), leaves)
    assert torch.autograd.gradcheck(
        lambda q, *v: two_phase.mix(v, q, EPS), [qw[0].detach().requires_grad_(), *sources]
    )


@pytest.mark.parametrize("implementation", [naive, two_phase])
def test_zero_query_is_the_uniform_mean_and_still_learns(implementation):
    sources, _, do, _ = tensors(4, 1, 6, 8)
    zero = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    h = implementation.mix(sources, zero, EPS)
    assert (h - torch.stack(sources).mean(0)).abs().max() < FP64
    (gradient,) = torch.autograd.grad(h, zero, do[0])
    assert gradient.abs().max() > 1e-3


def test_a_single_source_is_passed_through_whatever_the_query():
    sources, qw, do, _ = tensors(1, 1, 6, 8)
    h, dqw, dv = values_and_gradients(lambda q, v: two_phase.mix([v], q, EPS), [qw[0], sources[0]], [do[0]])
    assert torch.equal(h, sources[0])
    assert dqw.abs().max() < FP64 and (dv - do[0]).abs().max() < FP64


def test_one_block_is_a_residual_sum_with_the_embedding_apart():
    """N = 1: the only finished source is the embedding, so a sub-layer mixes it with the running residual
    sum."""
    (embedding,), qw, partials, _ = tensors(1, 3, 5, 8)
    o, lse = two_phase.phase1([embedding], qw, EPS)
    for s in range(3):
        running = partials[: s + 1].sum(0)
        h = two_phase.merge(o[s], lse[s], running, qw[s], EPS)
        assert (h - naive.mix([embedding, running], qw[s], EPS)).abs().max() < FP64


def test_source_order_does_not_matter():
    sources, qw, _, _ = tensors(5, 1, 6, 8)
    forward, backward = two_phase.mix(sources, qw[0], EPS), two_phase.mix(sources[::-1], qw[0], EPS)
    assert (forward - backward).abs().max() < FP64


def test_tiles_do_not_change_the_result(monkeypatch):
    sources, qw, do, dlse = tensors(3, 2, 29, 8)
    run = lambda: values_and_gradients(lambda q, *v: two_phase.phase1(v, q, EPS), [qw, *sources], [do, dlse])
    whole = run()
    monkeypatch.setattr(two_phase, "CPU_TILE", 4)
    for a, b in zip(whole, run()):
        assert (a - b).abs().max() < FP64 * 10


def test_autocast_does_not_lower_the_precision():
    sources, qw, do, dlse = tensors(4, 2, 9, 16, torch.float32)
    run = lambda: values_and_gradients(
        lambda q, *v: two_phase.phase1(v, q, EPS), [qw.float(), *sources], [do, dlse]
    )
    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        under = run()
    for a, b in zip(plain, under):
        assert torch.equal(a, b)


def test_large_scores_stay_finite():
    sources, qw, do, dlse = tensors(4, 2, 9, 16, torch.float32)
    got = values_and_gradients(
        lambda q, *v: two_phase.phase1(v, q, EPS), [1e3 * qw.float(), *sources], [do, dlse]
    )
    assert all(torch.isfinite(x).all() for x in got)
    h = two_phase.merge(sources[0], torch.full((9,), 1e4), sources[1], 1e3 * qw[0].float(), EPS)
    assert torch.isfinite(h).all()


def test_no_tokens_and_no_sources():
    o, lse = two_phase.phase1([torch.zeros(0, 8)] * 3, torch.zeros(2, 8), EPS)
    assert o.shape == (2, 0, 8) and lse.shape == (2, 0)
    for implementation in (naive, two_phase):
        with pytest.raises(ValueError, match="no sources"):
            implementation.phase1([], torch.zeros(2, 8), EPS)
        with pytest.raises(ValueError, match="width 8"):
            implementation.phase1([torch.zeros(3, 9)], torch.zeros(2, 8), EPS)
