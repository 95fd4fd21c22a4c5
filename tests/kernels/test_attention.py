"""Packed attention: the fast forms on a CPU and Triton's (interpreted) against the definition, document by
document: values, gradients, isolation; new tokens after earlier keys; the largest logit behind its varlen."""

import math

import pytest
import torch
import torch.nn.functional as F
from cases import Form, forms, needs_interpreter, poisoned_empties, randn, relative_error

from earlyfusion.kernels.attention import naive, varlen
from earlyfusion.kernels.attention.triton import flash
from earlyfusion.kernels.segments import Segments

# The same sums in another order.
EXACT = Form(varlen, torch.float64, 1e-12)
TRITON = Form(flash, torch.float32, 1e-5)
# Outputs and P are rounded to 8 bits.
BF16 = 1.5e-2
# What low precision may cost.
ROUNDED = {
    "torch32": Form(varlen, torch.float32, 5e-6),
    "torch16": Form(varlen, torch.bfloat16, BF16),
    "triton16": Form(flash, torch.float16, 5e-3),
}
ODD = (5, 1, 40, 41, 41, 7, 130)
LENGTHS = [ODD, (1,), (64, 64, 64), (3, 3, 300), tuple(range(1, 20))]
# H, G, D, V.
HEADS = [(4, 24, 24), (4, 40, 16), (6, 16, 72), (3, 72, 72), (2, 128, 40)]
# The interpreter is slow.
SMALL = (37, 1, 16, 33, 2)
CAUSAL = pytest.mark.parametrize("causal", [True, False])


WAYS = ["flash", "products"]


@pytest.fixture(params=WAYS)
# Which one is chosen is a matter of speed; both must be right everywhere.
def way(request, monkeypatch):
    """Both CPU ways, whatever the dtype would choose."""
    monkeypatch.setattr(varlen, "suits_flash", lambda *_: request.param == "flash")
    return request.param


def both_ways(**made):
    """`forms`, those of torch in both ways; Triton has only one."""
    given = [(form, way) for form in forms(**made).args[1] for way in WAYS]
    listed = [
        pytest.param(*form.values, way, id=f"{way}-{form.id}", marks=form.marks)
        for form, way in given
        if way == "flash" or not form.marks
    ]
    return pytest.mark.parametrize("form, way", listed, indirect=["way"])


def inputs(lengths, heads, seed=0, size=1.0, dtype=torch.float64):
    """q, k, v, do."""
    (H, D, V), T = heads, sum(lengths)
    shapes = ((T, H, D), (T, H, D), (T, H, V), (T, H, V))
    return [randn(*shape, seed=seed + i, dtype=dtype) * size for i, shape in enumerate(shapes)]


def compare(form, lengths, heads, causal, seed=0, scale=0.3, size=1.0, error=None):
    *qkv, do = inputs(lengths, heads, seed, size)
    segments = Segments(lengths)
    # The log-sum-exp has no gradient, so it is caught beside the outputs.
    found = {}

    def run(module, q, k, v):
        o, found[module] = module.attention(q, k, v, segments, causal=causal, scale=scale)
        return o

    got = form.compare(run, naive, qkv, [do], error)
    lse, want = found[form.op], found[naive]
    assert not lse.requires_grad and lse.dtype == (torch.float64 if form is EXACT else torch.float32)
    return got, (lse.double() - want).abs().max().item() if want.numel() else 0.0


@CAUSAL
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
def test_the_torch_form_equals_the_definition(lengths, heads, causal, way):
    _, lse = compare(EXACT, lengths, heads, causal, seed=len(lengths), scale=heads[1] ** -0.5)
    assert lse < EXACT.error


@needs_interpreter
@CAUSAL
@pytest.mark.parametrize("heads", [(2, 24, 16), (2, 72, 72), (1, 16, 40)], ids=str)
def test_the_triton_form_equals_the_definition(heads, causal):
    for seed in (0, 10):
        assert compare(TRITON, SMALL, heads, causal, seed)[1] < 1e-4


@CAUSAL
@both_ways(**ROUNDED)
def test_low_precision_loses_only_roundings(form, causal, way):
    for seed in (0, 10):
        got, lse = compare(form, SMALL if form.op is flash else ODD, (4, 40, 16), causal, seed, 0.2)
        # that kernel of torch sums rounded exponentials
        rough = way == "flash" and form.dtype == torch.bfloat16
        assert got[0].dtype == form.dtype and lse < (1.5e-2 if rough else 1e-4)


def test_definition_equals_sdpa_document_by_document():
    q, k, v, _ = inputs((9, 4), (4, 8, 8))
    o, _ = naive.attention(q, k, v, Segments((9, 4)), causal=True, scale=0.3)
    for part, *x in zip(o.split([9, 4]), *(y.split([9, 4]) for y in (q, k, v))):
        batched = [y.transpose(0, 1)[None] for y in x]
        want = F.scaled_dot_product_attention(*batched, is_causal=True, scale=0.3)
        assert (want[0].transpose(0, 1) - part).abs().max() < EXACT.error


@CAUSAL
def test_gradients_pass_gradcheck(causal, way):
    *qkv, _ = (x.requires_grad_() for x in inputs((3, 1, 4), (4, 3, 5)))
    call = lambda q, k, v: varlen.attention(q, k, v, Segments((3, 1, 4)), causal=causal, scale=0.5)[0]
    assert torch.autograd.gradcheck(call, qkv)


@CAUSAL
@both_ways(torch=EXACT, torch32=Form(varlen, torch.float32, 5e-6), triton=Form(flash, torch.float32, 5e-6))
def test_packed_documents_do_not_leak(form, causal, way):
    """Outputs and gradients of a document do not change by one bit when its neighbours do, and are those of
    the document alone; two runs give the same bits."""
    lengths = (11, 33, 30, 33) if form.op is flash else (11, 64, 30, 64)
    segments = Segments(lengths)
    # The third of four: neighbours on both sides, one of equal length in the same bucket.
    third = slice(segments.offsets[2], segments.offsets[3])

    def run(tensors, segments):
        *qkv, do = (x.to(form.dtype).requires_grad_() for x in tensors)
        o, _ = form.op.attention(*qkv, segments, causal=causal, scale=0.2)
        return [o.detach(), *torch.autograd.grad(o, qkv, do)]

    # The interpreter is slow.
    given = inputs(lengths, (2 if form.op is flash else 4, 24, 24))
    packed = run(given, segments)
    other = [x.clone() for x in given]
    for x in other:
        # Large, so that a leak through a masked product would show.
        x[third] = 1e3 * torch.randn_like(x[third])
    keep = torch.ones(segments.total, dtype=torch.bool)
    keep[third] = False
    for a, b, again in zip(packed, run(other, segments), run(given, segments)):
        assert torch.equal(a[keep], b[keep]) and not torch.equal(a, b) and torch.equal(a, again)
    for start, length in zip(segments.offsets, lengths):
        rows = slice(start, start + length)
        for a, b in zip(packed, run([x[rows] for x in given], Segments((length,)))):
            assert relative_error(a[rows], b) < form.error


@forms(torch=Form(varlen, torch.float64, 0), triton=TRITON)
def test_the_future_is_not_seen(form):
    *qkv, _ = inputs((37, 16), (2, 24, 16), dtype=form.dtype)
    run = lambda: form.op.attention(*qkv, Segments((37, 16)), causal=True, scale=0.3)[0]
    before = run()
    for x in qkv:
        # The end of the first document: later tokens of the same, and another one behind it.
        x[20:37] *= -3
    after = run()
    assert torch.equal(before[:20], after[:20]) and torch.equal(before[37:], after[37:])
    assert not torch.equal(before[20:37], after[20:37])


@both_ways(torch=Form(varlen, torch.float32, 5e-3), triton=Form(flash, torch.float32, 5e-3))
def test_extreme_logits_stay_finite(form, way):
    got, _ = compare(form, (37, 13), (2, 24, 16), True, scale=300.0, error=float("inf"))
    assert all(torch.isfinite(x).all() for x in got)


@forms(naive=Form(naive, torch.float32, 0), torch=Form(varlen, torch.float32, 0), triton=TRITON)
def test_empty_row_works_and_keeps_the_graph(form):
    q, k, v = (torch.zeros(0, 4, 8, requires_grad=True) for _ in range(3))
    o, lse = form.op.attention(q, k, v, Segments(()), causal=False, scale=1.0)
    assert o.shape == (0, 4, 8) and lse.shape == (0, 4)
    o.sum().backward()
    assert q.grad.shape == q.shape


def test_autocast_runs_products_in_bf16_and_returns_fp32_gradients():
    # The backward pass runs under autocast as well.
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = compare(Form(varlen, torch.float32, BF16), ODD, (4, 24, 24), True, scale=0.2)
    assert got[0].dtype == torch.bfloat16 and got[1].dtype == torch.float32


def test_very_long_document_is_tiled_without_changing_the_result(monkeypatch):
    monkeypatch.setattr(varlen, "suits_flash", lambda *_: False)
    # Tiles much smaller than the documents.
    monkeypatch.setattr(varlen, "TILE_ELEMENTS", 2000)
    monkeypatch.setattr(varlen, "CAUSAL_ROWS", 7)
    for causal in (True, False):
        compare(EXACT, (90, 300, 90), (2, 8, 8), causal)


# Triton's own: strides, new tokens after earlier keys, which kernel is taken.


@needs_interpreter
def test_the_shape_of_mla_with_views():
    """Head dims 192 and 128, and q as a slice of a wider tensor, read in place."""
    q, k, v, _ = inputs((33, 5), (2, 192, 128), dtype=torch.float32)
    # What lies between the slices must never be read.
    wide = torch.cat([q, torch.full_like(q, torch.nan)], dim=-1)
    options = {"causal": True, "scale": 0.07}
    got = flash.attention(wide[..., :192], k, v, Segments((33, 5)), **options)
    want = naive.attention(q.double(), k.double(), v.double(), Segments((33, 5)), **options)
    assert all(relative_error(g, w) < TRITON.error for g, w in zip(got, want))


KEYS, NEW = Segments((90, 33, 5)), Segments((37, 1, 5))


@forms(triton=TRITON, triton16=ROUNDED["triton16"])
def test_new_tokens_after_earlier_keys_are_the_end_of_attention_over_all(form):
    """|logit| up to about 20."""
    # The last tokens of every document are asked again.
    ends = torch.cat([torch.arange(end - n, end) for end, n in zip(KEYS.offsets[1:], NEW.lengths)])
    for seed in (0, 10):
        q, k, v, _ = inputs(KEYS.lengths, (4, 24, 16), seed, dtype=form.dtype)
        logits = torch.einsum("ihd,jhd->hij", q.float(), k.float())
        scale = 20 / logits.abs().max().item()
        wide = [x.double() for x in (q, k, v)]
        law, _ = naive.attention(*wide, KEYS, causal=True, scale=scale)
        asked = naive.attention_append(wide[0][ends], *wide[1:], NEW, KEYS, scale=scale)
        torch.testing.assert_close(asked, law[ends], rtol=0, atol=1e-12)
        with poisoned_empties():
            got = flash.attention_append(q[ends], k, v, NEW, KEYS, scale=scale)
        assert got.dtype == form.dtype and relative_error(got, law[ends]) < form.error


def test_with_a_gradient_the_kernel_without_atomics_is_taken(monkeypatch):
    """So that a tower trains bit for bit alike twice; without one, torch's kernel serves equal dims."""
    monkeypatch.setattr(varlen, "varlen_available", lambda q, v: True)
    q, k, v, _ = inputs(SMALL, (2, 72, 72))
    assert flash.prefers_torch(q, k, v) and not flash.prefers_torch(q, k, v[..., :40])
    for leaf in (q, k, v):
        leaf.requires_grad_()
        assert not flash.prefers_torch(q, k, v)
        with torch.no_grad():
            assert flash.prefers_torch(q, k, v)
        leaf.requires_grad_(False)


# The largest logit: exact once a head may exceed tau, else the log-sum-exp's bound.

GATES = {
    "torch64": Form(varlen, torch.float64, 1e-6),
    "torch32": Form(varlen, torch.float32, 1e-6),
    "torch16": Form(varlen, torch.bfloat16, 1e-6),
    "triton": Form(flash, torch.float32, 3e-6),
}


def logits_case(form, heads, causal, size, lengths=SMALL):
    """(q, k, lse of the form's own attention, the exact largest logits, ask(tau)); a quiet head stands beside
    the loud ones."""
    q, k, v, _ = inputs(lengths, heads, seed=5, size=size, dtype=form.dtype)
    # Exact for each head, not only for the loudest.
    q[:, -1] *= 0.1
    segments, options = Segments(lengths), {"causal": causal, "scale": 0.2}
    attend = flash if form.op is flash else varlen
    _, lse = attend.attention(q, k, v, segments, **options)
    exact = naive.max_logit(q, k, lse, segments, **options, tau=0.0)
    ask = lambda tau, q=q, k=k: form.op.max_logit(q, k, lse, segments, **options, tau=tau)
    return q, k, lse, exact, ask


@CAUSAL
@pytest.mark.parametrize("size", [0.5, 3.0, 8.0])
@both_ways(**GATES)
def test_the_largest_logit_is_exact_once_a_head_may_exceed_tau(form, size, causal, way):
    for heads in ((4, 24, 24), (3, 40, 40)):
        *_, lse, exact, ask = logits_case(form, heads, causal, size)
        with poisoned_empties():
            got = ask(lse.max().item() - 1e-3)
        assert relative_error(got, exact) < form.error


@CAUSAL
@forms(torch=GATES["torch32"], triton=GATES["triton"])
def test_below_tau_it_is_a_bound_that_reads_no_key(form, causal):
    q, k, lse, exact, ask = logits_case(form, (4, 24, 24), causal, 1.0)
    # With NaN for operands, one product would be enough to see it.
    bound = ask(100.0, torch.full_like(q, torch.nan), torch.full_like(k, torch.nan))
    assert torch.equal(bound, lse.amax(0)) and (bound >= exact).all()


@forms(naive=Form(naive, None, 0), torch=GATES["torch32"], triton=GATES["triton"])
def test_the_largest_logit_of_an_empty_row_is_minus_infinity(form):
    empty, options = torch.zeros(0, 3, 8), {"causal": True, "scale": 1.0, "tau": 1.0}
    got = form.op.max_logit(empty, empty, torch.zeros(0, 3), Segments(()), **options)
    assert got.tolist() == [-math.inf] * 3
