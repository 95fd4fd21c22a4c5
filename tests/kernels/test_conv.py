"""The short convolution, in torch, in C++ and in Triton (interpreted), against its definition: values,
gradients, isolation."""

from itertools import product

import pytest
import torch
from cases import Form, forms, needs_interpreter, randn, relative_error

from earlyfusion.kernels.kda import conv, naive, recurrent
from earlyfusion.kernels.kda.triton import conv as triton_conv
from earlyfusion.kernels.segments import Segments

# float64 against float64: only the order of W additions differs. float32: sums of at most 5 x 64 products.
EXACT, TRITON = Form(conv.short_conv, torch.float64, 1e-12), Form(triton_conv.short_conv, torch.float32, 2e-6)
CPP = Form(recurrent.short_conv, torch.float32, 2e-6)
BOTH = forms(torch=EXACT, cpp=CPP, triton=TRITON)
ROUNDED = forms(
    torch32=Form(conv.short_conv, torch.float32, 2e-6),
    torch16=Form(conv.short_conv, torch.bfloat16, 2**-7),
    # The interpreter truncates.
    triton16=Form(triton_conv.short_conv, torch.bfloat16, 2e-2),
)
ROWS = [(1,), (3,), (2, 1, 1), (16, 17), (5, 1, 2, 3, 40, 1, 7), (130,), (300, 1, 2, 64)]


def inputs(lengths, channels=5, width=4, taps=False, seed=0):
    """(segments, [x, weight, initial taps if asked for] in float64)."""
    segments = Segments(tuple(lengths))
    shapes = [(segments.total, channels), (channels, width)] + [(segments.num, channels, width - 1)] * taps
    return segments, [randn(*shape, seed=seed + i) for i, shape in enumerate(shapes)]


def compare(form, segments, leaves):
    """Outputs, last taps and the gradients of both."""
    run = lambda op, x, w, t=None: op(x, w, segments, initial_taps_NCW1=t, output_taps=True)
    (tokens, channels), width = leaves[0].shape, leaves[1].shape[1]
    cotangents = randn(tokens, channels, seed=7), randn(segments.num, channels, width - 1, seed=8)
    return form.compare(run, naive.short_conv, leaves, cotangents)


@pytest.mark.parametrize("lengths", ROWS)
@BOTH
def test_values_and_gradients_match_the_definition(form, lengths, monkeypatch):
    # Blocks of 16 rows: documents cross block edges.
    monkeypatch.setattr(recurrent, "ROWS", 16)
    every = product((2, 3, 4), (False, True), (0, 1))
    # The interpreter is slow.
    few = [(4, False, 0), (4, True, 1), (3, True, 0), (2, False, 1)]
    for width, taps, seed in few if form is TRITON else every:
        channels = 70 if seed and len(lengths) < 4 else 3
        compare(form, *inputs(lengths, channels, width, taps, seed))


@ROUNDED
def test_low_precision_inputs_are_summed_in_float32(form):
    y, *_ = compare(form, *inputs((70, 3, 40), 6))
    assert y.dtype == form.dtype


def test_gradcheck_with_gradients_of_the_taps():
    segments, leaves = inputs((4, 1, 3), 2, 3, True, 3)
    call = lambda x, w, t: conv.short_conv(x, w, segments, initial_taps_NCW1=t, output_taps=True)
    assert torch.autograd.gradcheck(call, [leaf.requires_grad_() for leaf in leaves])


@BOTH
def test_packed_documents_equal_separate_ones_and_the_future_is_not_seen(form):
    segments, (x, weight) = inputs((1, 19, 1, 12), 20, seed=6)
    x, weight = x.to(form.dtype), weight.to(form.dtype)
    y, _ = form.op(x, weight, segments)
    parts = [form.op(part, weight, Segments((part.shape[0],)))[0] for part in x.split(segments.lengths)]
    # In torch a sum over the taps of one row may go in another order than over those of many.
    assert relative_error(torch.cat(parts), y) < form.error
    assert torch.equal(y, torch.cat(parts)) or form is EXACT
    changed = x.clone()
    changed[10:] += 1.0
    assert torch.equal(form.op(changed, weight, segments)[0][:10], y[:10])


@pytest.mark.parametrize("op", [conv.short_conv, recurrent.short_conv])
def test_a_neighbour_that_is_nan_does_not_leak(op):
    segments, (x, weight) = inputs((9, 2, 30), 4)
    # A document of two tokens between two others: shorter than the taps.
    x[9:11] = float("nan")
    x, weight = (each.to(torch.float64 if op is conv.short_conv else torch.float32) for each in (x, weight))
    x.requires_grad_()
    y, _ = op(x, weight, segments)
    keep = torch.cat([torch.arange(9), torch.arange(11, 41)])
    (dx,) = torch.autograd.grad(y[keep].sum(), x)
    clean = [naive.short_conv(x[a:b].detach(), weight, Segments((b - a,)))[0] for a, b in ((0, 9), (11, 41))]
    torch.testing.assert_close(y[keep], torch.cat(clean), rtol=0, atol=CPP.error)
    assert dx[keep].isfinite().all()


@needs_interpreter
def test_a_slice_of_a_wider_projection_is_read_in_place():
    segments, (x, weight) = inputs((9, 30), 24, seed=5)
    wide = torch.randn(segments.total, 50)
    wide[:, 7:31] = x.float()
    want, _ = triton_conv.short_conv(x.float(), weight.float(), segments)
    assert torch.equal(triton_conv.short_conv(wide[:, 7:31], weight.float(), segments)[0], want)
    # Zero taps, channels last as a cache holds them, are no taps.
    taps = torch.zeros(2, 3, 24).transpose(1, 2)
    got, _ = triton_conv.short_conv(x.float(), weight.float(), segments, initial_taps_NCW1=taps)
    assert torch.equal(got, want)


@BOTH
def test_an_empty_row_gives_an_empty_row(form):
    x = torch.zeros(0, 6, dtype=form.dtype, requires_grad=True)
    y, taps = form.op(x, torch.ones(6, 4, dtype=form.dtype), Segments(()), output_taps=True)
    assert y.shape == (0, 6) and taps.shape == (0, 6, 3)
