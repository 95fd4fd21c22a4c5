"""The largest logit per head by the gate on the device, through the interpreter, against materialised
logits."""

import math

import pytest
import torch
from triton_cases import needs_interpreter, poisoned_empties

from earlyfusion.kernels.attention import max_logit as gate
from earlyfusion.kernels.attention import naive
from earlyfusion.kernels.attention.triton import max_logit as triton_max_logit
from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.segments import Segments

pytestmark = needs_interpreter
CLOSE = dict(rtol=2e-6, atol=2e-6)  # float32 products in another order
LENGTHS = (37, 1, 16, 65, 2)


def inputs(heads, groups, dim, causal, seed=0, size=1.0, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    segments = Segments.from_lengths(lengths)
    q, k = (torch.randn(segments.total, n, dim, generator=generator) * size for n in (heads, groups))
    _, lse = naive.attention(q, k, k, segments, causal=causal, scale=0.2, return_lse=True)
    return q, k, lse.float(), segments


def ask(function, q, k, lse, segments, causal, tau):
    return function(q, k, lse, segments, causal=causal, scale=0.2, tau=tau)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(1, 1, 8), (3, 1, 24), (4, 2, 40), (2, 2, 192)])
def test_it_is_exact_once_a_head_may_exceed_tau(heads, groups, dim, causal, seed):
    q, k, lse, segments = inputs(heads, groups, dim, causal, seed, size=3.0)
    q[:, -1] *= 0.1  # a quiet head next to loud ones is exact too
    _, lse = naive.attention(q, k, k, segments, causal=causal, scale=0.2, return_lse=True)
    lse = lse.float()
    with poisoned_empties():
        got = ask(triton_max_logit.max_logit, q, k, lse, segments, causal, lse.max().item() - 1e-3)
    want = ask(naive.max_logit, q, k, lse, segments, causal, 0.0)
    torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(
        got, ask(gate.max_logit, q, k, lse, segments, causal, lse.max().item() - 1e-3), **CLOSE
    )


@pytest.mark.parametrize("causal", [True, False])
def test_below_tau_it_is_the_bound_and_loads_no_key(causal):
    q, k, lse, segments = inputs(2, 1, 24, causal)
    poisoned = torch.full_like(q, torch.nan), torch.full_like(k, torch.nan)
    got = ask(triton_max_logit.max_logit, *poisoned, lse, segments, causal, 100.0)
    assert torch.equal(got, lse.amax(0)) and torch.equal(
        got, ask(gate.max_logit, q, k, lse, segments, causal, 100.0)
    )
    assert (got >= ask(naive.max_logit, q, k, lse, segments, causal, 0.0)).all()


def test_larger_logits_behind_the_mask_are_not_seen():
    segments = Segments.from_lengths((4, 4))
    q, k = torch.zeros(8, 1, 16), torch.zeros(8, 1, 16)
    q[:, 0, 0] = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 0.5])
    k[:, 0, 0] = torch.tensor([30.0, 1, 50, 2, 3, 4, 1, 90])
    _, lse = naive.attention(q, k, k, segments, causal=True, scale=1.0, return_lse=True)
    got = triton_max_logit.max_logit(q, k, lse.float(), segments, causal=True, scale=1.0, tau=10.0)
    assert (q[:, 0] @ k[:, 0].T).max().item() == 630.0 and got.tolist() == [200.0]  # row 3, key 2: 4 * 50


def test_views_are_read_in_place():
    q, k, lse, segments = inputs(2, 2, 24, True, size=3.0)
    wide = torch.full((segments.total, 2, 60), torch.nan)
    wide[..., 4:28], wide[..., 30:54] = q, k
    got = ask(triton_max_logit.max_logit, wide[..., 4:28], wide[..., 30:54], lse, segments, True, 0.1)
    torch.testing.assert_close(got, ask(naive.max_logit, q, k, lse, segments, True, 0.1), **CLOSE)


def test_what_the_kernel_does_not_take_goes_to_the_other_form():
    q, k, lse, segments = inputs(2, 1, 24, True, size=3.0)
    wide = ask(triton_max_logit.max_logit, q.double(), k.double(), lse.double(), segments, True, 0.1)
    torch.testing.assert_close(wide, ask(naive.max_logit, q, k, lse, segments, True, 0.1), **CLOSE)
    empty = torch.zeros(0, 3, 8)
    got = ask(
        triton_max_logit.max_logit, empty, empty, torch.zeros(0, 3), Segments.from_lengths(()), True, 1.0
    )
    assert got.tolist() == [-math.inf] * 3


def test_wrong_shapes_are_named():
    q, k, lse, segments = inputs(2, 1, 24, True)
    with pytest.raises(ValueError, match="lse_TH"):
        ask(triton_max_logit.max_logit, q, k, lse[:, :1], segments, True, 1.0)
    with pytest.raises(ValueError, match="max_logit"):
        ask(triton_max_logit.max_logit, q[1:], k, lse, segments, True, 1.0)


def test_a_gpu_takes_this_form():
    assert resolve("max_logit", "cuda").__module__.endswith("triton.max_logit")
    assert resolve("max_logit", "cpu") is gate.max_logit
