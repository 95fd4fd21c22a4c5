"""Attention Residuals, in torch and in Triton (interpreted), against the one-phase definition: outputs and
all gradients, the schedule of a block, and the pass between two sub-layers."""

import pytest
import torch
from cases import Form, forms, randn, refused
from cases import values_and_gradients as values

from earlyfusion.kernels.attnres import naive, triton_two_phase, two_phase


class triton:
    """Both files as one form."""

    phase1 = triton_two_phase.phase1
    # Alone, a merge is torch's.
    merge, step = two_phase.merge, triton_two_phase.step


EPS, NORM_EPS = 1e-5, 1e-6
# The same sums in another order.
EXACT = Form(two_phase, torch.float64, 1e-11)
# Logits reach 30 here, and a softmax amplifies their last bits.
TRITON = Form(triton, torch.float32, 5e-5)
BOTH = forms(torch=EXACT, triton=TRITON)
ROUNDED = forms(
    torch32=Form(two_phase, torch.float32, 5e-6),
    torch16=Form(two_phase, torch.bfloat16, 1.2e-2),
    # With cancelling terms in dv.
    triton16=Form(triton, torch.float16, 4e-3),
)
SHAPES = [(1, 1, 1, 16), (1, 4, 7, 24), (3, 2, 5, 40), (5, 4, 33, 128), (9, 3, 4, 96), (17, 1, 3, 32)]
SEEDS = pytest.mark.parametrize("seed", [0, 20])


def tensors(n, S, T, D, seed=0, dtype=torch.float64):
    """Sources, queries, cotangents of the mixtures and of their log-sum-exps."""
    # Sources grow, as residual sums do; only keys are normed.
    sources = [randn(T, D, seed=seed + i, dtype=dtype) * (1 + i) for i in range(n)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    do, dlse = randn(S, T, D, seed=seed + 98), randn(S, T, seed=seed + 97)
    return sources, randn(S, D, seed=seed + 99, dtype=wide), do.to(dtype), dlse.to(wide)


def phase1(module, q, *v):
    mixes, lses, _ = module.phase1(v, q, EPS)
    return torch.stack(mixes), torch.stack(lses)


def merge(module, *leaves):
    return module.merge(*leaves, EPS)


@SEEDS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@BOTH
def test_phase1_and_merge_equal_the_definition(form, shape, seed):
    sources, qw, do, dlse = tensors(*shape, seed=seed)
    form.compare(phase1, naive, [qw, *sources], [do, dlse])
    # Any tensor of the shape will do as a phase-1 result.
    form.compare(merge, naive, [do[0].flip(0), dlse[0], sources[-1], qw[0]], [do[-1]])


@ROUNDED
def test_low_precision_loses_only_roundings(form):
    sources, qw, do, dlse = tensors(5, 4, 40, 96)
    o, lse, *_ = form.compare(phase1, naive, [qw, *sources], [do, dlse])
    assert o.dtype == form.dtype and lse.dtype == torch.float32
    form.compare(merge, naive, [do[1], dlse[0], sources[0], qw[0]], [do[0]])


@pytest.mark.parametrize("n", [1, 2, 6])
@BOTH
def test_two_phases_equal_one_phase_with_all_gradients(form, n):
    """merge(phase1(sources), partial) is mix([*sources, partial])."""
    sources, qw, partials, _ = tensors(n, 3, 11, 20)

    def block(module, q, parts, *v):
        # The law of a block: one softmax over the sources and the sum.
        if module is naive:
            return torch.stack([naive.mix([*v, p], w, EPS) for p, w in zip(parts, q)])
        rows = zip(*module.phase1(v, q, EPS)[:2], parts, q)
        return torch.stack([module.merge(o1, l1, p, w, EPS) for o1, l1, p, w in rows])

    form.compare(block, naive, [qw, partials, *sources], [randn(3, 11, 20, seed=9)])


@pytest.mark.parametrize("T,D", [(1, 16), (11, 144), (30, 40)])
@forms(triton=TRITON, triton16=Form(triton, torch.float16, 8e-3), torch=Form(two_phase, torch.float64, 1e-11))
def test_sum_merge_and_norm_in_one_pass_equal_the_three_operations(form, T, D):
    sources, qw, do, lse = tensors(3, 2, T, D)
    leaves = [sources[0], lse[0], sources[1], sources[2], qw[0], 1 + 0.1 * qw[1]]

    def step(module, o1, lse1, *rest):
        # Normalisers are float32 at least, whatever the rows are.
        return module.step(o1, lse1 if lse1.dtype == torch.float64 else lse1.float(), *rest, EPS, NORM_EPS)

    form.compare(step, naive, leaves, do)


def schedule(module, sources, outs, qw, norms):
    """Two blocks of two sub-layers whose outputs are given: all inputs the sub-layers see, and the last block
    sum."""
    # Every input that a sub-layer would see is an output here, so all gradients pass through.
    seen = []
    for block in range(2):
        o, lse, sources = module.phase1(sources, qw[2 * block : 2 * block + 2], EPS)
        first, second = outs[2 * block], outs[2 * block + 1]
        summed, x = module.step(o[1], lse[1], first, None, qw[2 * block + 1], norms[block], EPS, NORM_EPS)
        seen += [o[0], x]
        # The next block has the sum of this one as a source, and its gradient comes back.
        sources = [*sources, summed + second]
    return (*seen, sources[-1])


@forms(torch=Form(two_phase, torch.float64, 1e-10), triton=TRITON)
def test_blocks_with_carried_gradients_equal_the_definition_end_to_end(form):
    """The gradient of a source collects the later blocks inside the kernel of the earlier one."""
    (embedding,), qw, outs, _ = tensors(1, 4, 7, 48)
    norms = 1 + 0.1 * randn(2, 48, seed=5)

    run = lambda module, e, f, q, g: schedule(module, [e], f.unbind(), q, g)
    cotangents = randn(5, 7, 48, seed=7)
    form.compare(run, naive, [embedding, outs, qw, norms], cotangents)


def test_gradcheck():
    sources, qw, _, lse = tensors(3, 2, 4, 5)
    check = lambda function, *leaves: torch.autograd.gradcheck(function, [x.requires_grad_() for x in leaves])
    assert check(lambda *x: phase1(two_phase, *x), qw.clone(), *sources)
    merged = [x.detach().clone() for x in (sources[0], lse[0], sources[1], qw[0])]
    assert check(lambda *x: merge(two_phase, *x), *merged)


def mix(module, q, *v):
    return module.phase1(v, q[None], EPS)[0][0]


@pytest.mark.parametrize("implementation", [naive, two_phase])
def test_zero_query_is_the_uniform_mean_and_still_learns(implementation):
    sources, _, do, _ = tensors(4, 1, 6, 8)
    zero = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    h = mix(implementation, zero, *sources)
    assert (h - torch.stack(sources).mean(0)).abs().max() < EXACT.error
    (gradient,) = torch.autograd.grad(h, zero, do[0])
    assert gradient.abs().max() > 1e-3


def test_source_order_and_tiles_do_not_matter(monkeypatch):
    sources, qw, do, dlse = tensors(3, 2, 29, 8)
    run = lambda v: values(lambda *x: phase1(two_phase, *x), [qw, *v], [do, dlse])
    whole = run(sources)
    # 29 rows in tiles of 4: the last one is not full.
    monkeypatch.setattr(two_phase, "CPU_TILE", 4)
    o, lse, dqw, *dv = run(sources[::-1])
    for a, b in zip(whole, [o, lse, dqw, *dv[::-1]]):
        assert (a - b).abs().max() < EXACT.error


def test_autocast_does_not_lower_the_precision():
    sources, qw, do, dlse = tensors(4, 2, 9, 16, dtype=torch.float32)
    run = lambda: values(lambda *x: phase1(two_phase, *x), [qw, *sources], [do, dlse])
    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(plain, run()))


@forms(torch=Form(two_phase, torch.float32, 0), triton=TRITON)
def test_large_scores_stay_finite(form):
    sources, qw, do, dlse = tensors(4, 2, 9, 16, dtype=torch.float32)
    got = values(lambda *x: phase1(form.op, *x), [1e3 * qw, *sources], [do, dlse])
    got.append(form.op.merge(sources[0], torch.full((9,), 1e4), sources[1], 1e3 * qw[0], EPS))
    assert all(torch.isfinite(x).all() for x in got)


@forms(torch=Form(two_phase, torch.float32, 0), triton=TRITON)
def test_tokens_do_not_influence_each_other(form):
    """Rows of a tile share a product; the others must not notice a huge one."""
    sources, qw, _, _ = tensors(3, 2, 6, 32, dtype=torch.float32)
    clean, _ = phase1(form.op, qw, *sources)
    # Its square overflows: whoever shares a sum with it would get infinity.
    sources[1][2] = 1e30
    dirty, _ = phase1(form.op, qw, *sources)
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(clean[:, kept], dirty[:, kept])


@BOTH
def test_an_empty_row_is_fine(form):
    sources, qw, do, dlse = tensors(2, 2, 0, 32, dtype=form.dtype)
    o, lse, dqw, *_ = values(lambda *x: phase1(form.op, *x), [qw, *sources], [do, dlse])
    assert o.shape == (2, 0, 32) and lse.shape == (2, 0) and (dqw == 0).all()


@BOTH
def test_wrong_sources_are_named(form):
    run = lambda *sources: form.op.phase1(list(sources), torch.zeros(2, 8), EPS)
    refused({"no sources": run, "D = 8": lambda: run(torch.zeros(3, 9))})
