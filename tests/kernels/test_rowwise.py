"""Norms and activations of rows in C++ against torch in float64, and rows shared out over torch's threads."""

import threading

import pytest
import torch
import torch.nn.functional as F

from earlyfusion.kernels import rowwise
from earlyfusion.kernels.cpu import program
from earlyfusion.kernels.moe import grouped
from earlyfusion.kernels.products import RmsNorm

pytestmark = pytest.mark.skipif(program.library() is None, reason="no C++ compiler")
ROUNDING = 3e-5  # of float32 sums of up to 600 terms of size one; the exponential is good to two units
SHAPES = [(1, 5), (256, 16), (300, 33), (600, 128)]


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def gradients(form, leaves, seed=9):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    y = form(*leaves)
    return y, *torch.autograd.grad(y, leaves, normal(seed, *y.shape).to(y.dtype))


def compare(ours, theirs, leaves):
    for mine, exact in zip(
        gradients(ours, leaves), gradients(theirs, [x.double() for x in leaves]), strict=True
    ):
        assert mine.shape == exact.shape and (mine - exact).abs().max() < ROUNDING


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_norms(threads, rows, width, gated):
    given = [normal(0, 1, rows, width), normal(1, width), *([normal(2, 1, rows, width)] if gated else [])]
    ours = lambda x, w, gate=None: RmsNorm.apply(x, w, gate, 1e-2)

    def theirs(x, w, gate=None):
        y = F.rms_norm(x, w.shape, w, 1e-2)
        return y if gate is None else y * gate.sigmoid()

    compare(ours, theirs, given)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_swiglu(threads, rows, width):
    compare(
        lambda gate, up: grouped.activated(gate, up, None),
        lambda gate, up: F.silu(gate) * up,
        [normal(0, rows, width), normal(1, rows, width)],
    )


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_weighted_rows_and_their_slopes(threads, rows, width, monkeypatch):
    """Halves of wider rows, as experts hand them in, beside torch's operations."""
    h, weight, dact = normal(0, rows, 2 * width), normal(1, rows, 1), normal(2, rows, width)
    gate, up = h.chunk(2, dim=1)
    y = rowwise.swiglu_rows(gate, up, weight)
    ours = grouped._slopes(gate, up, weight, dact, None, torch.float32)
    monkeypatch.setattr(grouped, "serves", lambda *_: False)
    wide = [x.double() for x in (gate, up, weight, dact)]
    theirs = grouped._slopes(*wide, None, torch.float64)
    assert (y - theirs[0]).abs().max() < ROUNDING
    for mine, exact in zip(ours, theirs, strict=True):
        assert (mine.flatten() - exact.flatten()).abs().max() < ROUNDING


def test_the_number_of_threads_changes_no_bit():
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(
            gradients(lambda x, w: RmsNorm.apply(x, w, None, 1e-5), [normal(0, 900, 40), normal(1, 40)])
        )
    torch.set_num_threads(1)
    for one in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(one, found[0], strict=True))


@pytest.mark.parametrize("team", [True, False])
def test_shared_rows_are_all_done_once_and_errors_are_told(monkeypatch, team):
    if not team:
        monkeypatch.setattr(program, "_team", lambda: None)
    done, lock = [], threading.Lock()

    def work(first, end):
        with lock:
            done.extend(range(first, end))

    program.run_shared(work, (), range(101), 3)
    assert sorted(done) == list(range(100))

    def interrupted(first, end):
        raise KeyboardInterrupt

    # OpenMP's threads cannot carry an exception.
    with pytest.raises(KeyboardInterrupt):
        program.run_shared(interrupted, (), range(101), 2)
