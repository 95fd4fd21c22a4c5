"""Packed attention: every fast path against the per-document definition, and the log-sum-exp gate."""

import math

import pytest
import torch
import torch.nn.functional as F

from earlyfusion.kernels.attention import cpu_flash, naive, varlen
from earlyfusion.kernels.attention import max_logit as gate
from earlyfusion.kernels.attention.buckets import SLACK, buckets, group_lengths, padded_length
from earlyfusion.kernels.segments import Segments

FP64 = 1e-12  # the same sums in another order
FP32 = 5e-6  # relative to the largest entry; sums of a few hundred float32 terms
BF16 = 1.5e-2  # relative to the largest entry; outputs and P are rounded to 8 bits

ODD = (5, 1, 40, 41, 41, 7, 130)
LENGTHS = [ODD, (1,), (64, 64, 64), (3, 3, 300), tuple(range(1, 20))]
HEADS = [(4, 4, 24, 24), (4, 2, 40, 16), (6, 2, 16, 72), (3, 1, 72, 72), (2, 2, 128, 40)]  # H, G, D, V


@pytest.fixture(params=["flash", "products"])
def way(request, monkeypatch):
    """Both CPU ways, whatever the dtype would choose."""
    monkeypatch.setattr(cpu_flash, "suits", lambda *_: request.param == "flash")
    return request.param


def inputs(segments, heads, dtype=torch.float64, seed=0, size=1.0):
    H, G, D, V = heads
    generator = torch.Generator().manual_seed(seed)
    shapes = ((H, D), (G, D), (G, V), (H, V))
    return [
        (torch.randn(segments.total, *s, generator=generator, dtype=torch.float64) * size).to(dtype)
        for s in shapes
    ]


def run(implementation, q, k, v, do, segments, causal, scale):
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    o, lse = implementation.attention(q, k, v, segments, causal=causal, scale=scale, return_lse=True)
    gradients = torch.autograd.grad(o, (q, k, v), do.to(o.dtype))
    assert not lse.requires_grad
    return [o.detach(), lse, *gradients]


def relative_error(got, want):
    return ((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30)).item()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_torch_form_equals_the_definition_in_fp64(lengths, heads, causal, way):
    segments = Segments.from_lengths(lengths)
    *qkv, do = inputs(segments, heads, seed=len(lengths))
    scale = heads[2] ** -0.5
    got, want = (run(m, *qkv, do, segments, causal, scale) for m in (varlen, naive))
    for g, w in zip(got, want):
        assert g.shape == w.shape and g.dtype == w.dtype
        assert (g - w).abs().max() < FP64


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, FP32), (torch.bfloat16, BF16)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_low_precision_stays_near_fp64(dtype, tolerance, causal, seed, way):
    segments, heads = Segments.from_lengths(ODD), HEADS[1 + seed]
    *qkv, do = inputs(segments, heads, dtype, seed)
    got = run(varlen, *qkv, do, segments, causal, 0.2)
    want = run(naive, *(x.double() for x in qkv), do.double(), segments, causal, 0.2)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    rough = way == "flash" and dtype == torch.bfloat16  # that kernel sums rounded exponentials
    assert (got[1] - want[1]).abs().max() < (1.5e-2 if rough else 1e-5)
    for g, w in zip(got, want):
        assert relative_error(g, w) < tolerance


def test_definition_equals_sdpa_document_by_document():
    segments = Segments.from_lengths((9, 4))
    q, k, v, _ = inputs(segments, (4, 2, 8, 8))
    o, _ = naive.attention(q, k, v, segments, causal=True, scale=0.3)
    for part, *x in zip(o.split([9, 4]), *(y.split([9, 4]) for y in (q, k, v))):
        batched = [y.transpose(0, 1)[None] for y in x]
        want = F.scaled_dot_product_attention(*batched, is_causal=True, scale=0.3, enable_gqa=True)
        assert (want[0].transpose(0, 1) - part).abs().max() < FP64


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_pass_gradcheck(causal, way):
    segments = Segments.from_lengths((3, 1, 4))
    *qkv, _ = inputs(segments, (4, 2, 3, 5))
    qkv = [x.requires_grad_() for x in qkv]
    assert torch.autograd.gradcheck(
        lambda q, k, v: varlen.attention(q, k, v, segments, causal=causal, scale=0.5)[0], qkv
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents_do_not_leak(causal, dtype, way):
    """Outputs and gradients of a document do not change by one bit when its neighbours do."""
    lengths = (11, 64, 30, 64)
    segments = Segments.from_lengths(lengths)
    *qkv, do = inputs(segments, (4, 2, 24, 24), dtype)
    packed = run(varlen, *qkv, do, segments, causal, 0.2)
    other = [x.clone() for x in (*qkv, do)]
    for x in other:
        x[75:105] = 1e3 * torch.randn_like(x[75:105])  # rewrite the third document
    changed = run(varlen, *other, segments, causal, 0.2)
    for a, b in zip(packed, changed):
        keep = torch.ones(segments.total, dtype=torch.bool)
        keep[75:105] = False
        assert torch.equal(a[keep], b[keep])
    for start, length in zip(segments.offsets, lengths):
        alone = [x[start : start + length] for x in (*qkv, do)]
        separate = run(varlen, *alone, Segments.from_lengths([length]), causal, 0.2)
        for a, b in zip(packed, separate):
            assert relative_error(a[start : start + length], b) < (FP64 if dtype == torch.float64 else FP32)


def test_lse_is_the_logsumexp_of_visible_logits(way):
    segments = Segments.from_lengths((6, 10))
    q, k, v, _ = inputs(segments, (2, 2, 8, 8), seed=3)
    ids, place = segments.ids(), torch.arange(16)
    hidden = (ids[:, None] != ids) | (place[:, None] < place)
    logits = torch.einsum("ihd,jhd->hij", q, k).mul(0.4).masked_fill(hidden, -math.inf)
    _, lse = varlen.attention(q, k, v, segments, causal=True, scale=0.4, return_lse=True)
    assert (lse - logits.logsumexp(-1).T).abs().max() < FP64


def test_extreme_logits_stay_finite(way):
    segments = Segments.from_lengths((50,))
    *qkv, do = inputs(segments, (2, 2, 24, 24), torch.float32, size=60.0)
    for x in run(varlen, *qkv, do, segments, True, 1.0):
        assert torch.isfinite(x).all()


@pytest.mark.parametrize("implementation", [naive, varlen])
def test_empty_row_works_and_keeps_the_graph(implementation):
    segments = Segments.from_lengths(())
    q, k, v = (torch.zeros(0, h, 8, requires_grad=True) for h in (4, 2, 2))
    o, lse = implementation.attention(q, k, v, segments, causal=False, scale=1.0, return_lse=True)
    assert o.shape == (0, 4, 8) and lse.shape == (0, 4)
    o.sum().backward()
    assert q.grad.shape == q.shape


def test_autocast_runs_products_in_bf16_and_returns_fp32_gradients():
    segments = Segments.from_lengths(ODD)
    *qkv, do = inputs(segments, (4, 2, 24, 24), torch.float32)
    want = run(naive, *(x.double() for x in qkv), do.double(), segments, True, 0.2)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(varlen, *qkv, do, segments, True, 0.2)  # the backward pass runs under autocast as well
    assert got[0].dtype == torch.bfloat16 and got[2].dtype == torch.float32
    for g, w in zip(got, want):
        assert relative_error(g, w) < BF16


def test_very_long_document_is_tiled_without_changing_the_result(monkeypatch):
    segments = Segments.from_lengths((90, 300, 90))
    *qkv, do = inputs(segments, (2, 1, 8, 8))
    whole = [run(varlen, *qkv, do, segments, causal, 0.3) for causal in (True, False)]
    monkeypatch.setattr(cpu_flash, "suits", lambda *_: False)
    monkeypatch.setattr(varlen, "TILE_ELEMENTS", 2000)
    monkeypatch.setattr(varlen, "CAUSAL_ROWS", 7)
    tiled = [run(varlen, *qkv, do, segments, causal, 0.3) for causal in (True, False)]
    for a, b in zip(whole, tiled):
        assert all((x - y).abs().max() < FP64 for x, y in zip(a, b))


@pytest.mark.parametrize("multiple", [1, 64])
@pytest.mark.parametrize("seed", [0, 1])
def test_buckets_cover_every_token_once_and_waste_little(multiple, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 300, (60,), generator=generator).tolist()
    segments = Segments.from_lengths(lengths)
    plan = buckets(segments, torch.device("cpu"), multiple)
    assert buckets(segments, torch.device("cpu"), multiple) is plan  # one plan for all layers
    assert sorted(torch.cat([bucket.rows for bucket in plan]).tolist()) == list(range(segments.total))
    for group, bucket in zip(group_lengths(lengths, multiple), plan):
        useful = sum(padded_length(lengths[i], multiple) ** 2 for i in group)
        assert bucket.documents * bucket.length**2 <= useful + SLACK
        x = torch.randn(segments.total, 2)
        out = torch.full_like(x, math.nan)
        bucket.unpad_into(out, bucket.pad(x))
        assert torch.equal(out[bucket.rows], x[bucket.rows])


def test_equal_adjacent_documents_are_batched_without_a_copy():
    segments = Segments.from_lengths([64] * 8)
    (bucket,) = buckets(segments, torch.device("cpu"))
    x = torch.randn(512, 2, 4)
    assert bucket.pad(x).data_ptr() == x.data_ptr() and bucket.key_bias(x.dtype) is None


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_max_logit_is_exact_once_a_head_may_exceed_tau(dtype, size, causal, way):
    segments = Segments.from_lengths(ODD)
    q, k, v, _ = inputs(segments, (4, 2, 24, 24), dtype, seed=5, size=size)
    q[:, 1] *= 0.1  # a quiet head next to loud ones is exact too
    _, lse = varlen.attention(q, k, v, segments, causal=causal, scale=0.2, return_lse=True)
    want = naive.max_logit(q, k, lse, segments, causal=causal, scale=0.2, tau=0.0)
    before = gate.COUNTS.opened
    got = gate.max_logit(q, k, lse, segments, causal=causal, scale=0.2, tau=lse.max().item() - 1e-3)
    assert gate.COUNTS.opened == before + 1
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_max_logit_is_a_bound_below_tau_and_recomputes_nothing_when_no_head_exceeds_it():
    segments = Segments.from_lengths(ODD)
    q, k, v, _ = inputs(segments, (4, 2, 24, 24), torch.float32)
    _, lse = varlen.attention(q, k, v, segments, causal=True, scale=0.2, return_lse=True)
    exact = naive.max_logit(q, k, lse, segments, causal=True, scale=0.2, tau=0.0)
    before = gate.COUNTS.rows
    bound = gate.max_logit(q, k, lse, segments, causal=True, scale=0.2, tau=100.0)
    assert gate.COUNTS.rows == before
    assert (bound >= exact).all() and (bound <= 100.0).all()


def test_max_logit_ignores_larger_logits_behind_the_mask():
    """The largest entry of the unmasked product is in the future or in another document; S_h must not see
    it."""
    segments = Segments.from_lengths((4, 4))
    q = torch.zeros(8, 1, 2)
    k = torch.zeros(8, 1, 2)
    q[:, 0, 0] = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])
    k[:, 0, 0] = torch.tensor([30.0, 1, 50, 2, 3, 4, 90, 1])
    _, lse = varlen.attention(q, k, k, segments, causal=True, scale=1.0, return_lse=True)
    got = gate.max_logit(q, k, lse, segments, causal=True, scale=1.0, tau=10.0)
    unmasked = (q[:, 0] @ k[:, 0].T).max().item()
    assert unmasked == 720.0 and got.tolist() == [8 * 90.0]  # row 7 sees key 6
    k[7, 0, 0], k[6, 0, 0] = (
        90.0,
        1.0,
    )  # now only row 7 itself sees it; move it out of sight of the large rows
    q[7, 0, 0] = 0.5
    _, lse = varlen.attention(q, k, k, segments, causal=True, scale=1.0, return_lse=True)
    got = gate.max_logit(q, k, lse, segments, causal=True, scale=1.0, tau=10.0)
    assert (q[:, 0] @ k[:, 0].T).max().item() == 630.0 and got.tolist() == [200.0]  # row 3, key 2: 4 * 50


def test_max_logit_of_an_empty_row_is_minus_infinity():
    empty = torch.zeros(0, 3, 8)
    for implementation in (gate, naive):
        got = implementation.max_logit(
            empty, empty, torch.zeros(0, 3), Segments.from_lengths(()), causal=True, scale=1.0, tau=1.0
        )
        assert got.tolist() == [-math.inf] * 3


def test_wrong_shapes_are_named():
    segments = Segments.from_lengths((4,))
    with pytest.raises(ValueError, match="3 query heads, 2 key heads"):
        varlen.attention(
            torch.zeros(4, 3, 8), torch.zeros(4, 2, 8), torch.zeros(4, 2, 8), segments, causal=True, scale=1.0
        )
    with pytest.raises(ValueError, match="5 tokens"):
        varlen.attention(*(torch.zeros(5, 2, 8) for _ in range(3)), segments, causal=True, scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEADS)
def test_varlen_flash_on_cuda_stays_near_fp64(heads, causal):
    segments = Segments.from_lengths(ODD)
    *qkv, do = (x.cuda() for x in inputs(segments, heads, torch.bfloat16))
    got = run(varlen, *qkv, do, segments, causal, 0.2)
    want = run(naive, *(x.double() for x in qkv), do.double(), segments, causal, 0.2)
    for g, w in zip(got, want):
        assert g.shape == w.shape and relative_error(g, w) < BF16
