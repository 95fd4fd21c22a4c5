"""The short convolution, in torch and in Triton (interpreted), against its definition: values, gradients,
isolation."""

from itertools import product

import pytest
import torch
from cases import needs_interpreter, poisoned_empties, relative_error

from earlyfusion.kernels.kda import conv, naive
from earlyfusion.kernels.kda.triton import conv as triton_conv
from earlyfusion.kernels.segments import Segments

EXACT = 1e-12  # float64 against float64: only the order of W additions differs
FP32 = 2e-6  # float32 against float64: sums of at most 5 x 64 products of order 1
HALF = 2**-8  # half a unit of bfloat16
BF16 = 2e-2  # inputs, outputs and gradients rounded (the interpreter truncates) to 8 bits
TRITON = pytest.param(triton_conv.short_conv, torch.float32, FP32, id="triton", marks=needs_interpreter)
FORMS = [pytest.param(conv.short_conv, torch.float64, EXACT, id="torch"), TRITON]
BOTH = pytest.mark.parametrize("op, dtype, tolerance", FORMS)
ROWS = [(1,), (3,), (2, 1, 1), (16, 17), (5, 1, 2, 3, 40, 1, 7), (130,), (300, 1, 2, 64)]


def inputs(lengths, channels=5, width=4, taps=False, seed=0):
    """(segments, [x, weight, initial taps if asked for] in float64)."""
    generator = torch.Generator().manual_seed(seed)
    segments = Segments(tuple(lengths))
    shapes = [(segments.total, channels), (channels, width)] + [(segments.num, channels, width - 1)] * taps
    return segments, [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def run(op, leaves, segments, dtype, seed=5):
    """Outputs, last taps, gradients of a fixed functional of the outputs; whatever is not written is NaN."""
    x, weight, *taps = leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    generator = torch.Generator().manual_seed(seed)
    # Rounded to bfloat16, so that every dtype gets the very same gradient.
    dy = torch.randn(x.shape, generator=generator, dtype=torch.float64).bfloat16().to(dtype)
    with poisoned_empties():
        y, last = op(x, weight, segments, initial_taps_NCW1=taps[0] if taps else None, output_taps=True)
        return [y.detach(), last.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("lengths", ROWS)
@BOTH
def test_values_and_gradients_match_the_definition(op, dtype, tolerance, lengths, monkeypatch):
    monkeypatch.setattr(conv, "_BLOCK_ELEMENTS", 64)  # blocks of 16 rows: documents cross block edges
    every = product((2, 3, 4), (False, True), (0, 1))
    few = [(4, False, 0), (4, True, 1), (3, True, 0), (2, False, 1)]  # the interpreter is slow
    for width, taps, seed in every if dtype == torch.float64 else few:
        segments, leaves = inputs(lengths, 70 if seed and len(lengths) < 4 else 3, width, taps, seed)
        law = run(naive.short_conv, leaves, segments, torch.float64)
        for ours, theirs in zip(run(op, leaves, segments, dtype), law):
            assert relative_error(ours, theirs) < tolerance, (width, taps, seed)


def test_gradcheck_with_gradients_of_the_taps():
    segments, leaves = inputs((4, 1, 3), 2, 3, True, 3)
    call = lambda x, w, t: conv.short_conv(x, w, segments, initial_taps_NCW1=t, output_taps=True)
    assert torch.autograd.gradcheck(call, [leaf.requires_grad_() for leaf in leaves])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_inputs_are_summed_in_float32(dtype):
    segments, leaves = inputs((70, 3, 40), 6)
    x, weight = (leaf.to(dtype) for leaf in leaves)
    y, _ = conv.short_conv(x, weight, segments)
    law, _ = naive.short_conv(x.double(), weight.double(), segments)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), law, rtol=FP32 if dtype == torch.float32 else HALF, atol=FP32)


@needs_interpreter
def test_bfloat16_in_triton():
    segments, leaves = inputs((21, 1, 8), 40, seed=4)
    leaves = [leaf.bfloat16() for leaf in leaves]
    found = run(triton_conv.short_conv, leaves, segments, torch.bfloat16)
    assert found[0].dtype == torch.bfloat16
    law = run(naive.short_conv, leaves, segments, torch.float64)
    assert max(relative_error(ours, theirs) for ours, theirs in zip(found, law)) < BF16


@BOTH
def test_packed_documents_equal_separate_ones_and_the_future_is_not_seen(op, dtype, tolerance):
    segments, (x, weight) = inputs((1, 19, 1, 12), 20, seed=6)
    x, weight = x.to(dtype), weight.to(dtype)
    y, _ = op(x, weight, segments)
    parts = [op(part, weight, Segments((part.shape[0],)))[0] for part in x.split(segments.lengths)]
    assert torch.equal(y, torch.cat(parts))
    changed = x.clone()
    changed[10:] += 1.0
    assert torch.equal(op(changed, weight, segments)[0][:10], y[:10])


def test_a_neighbour_that_is_nan_does_not_leak():
    segments, (x, weight) = inputs((9, 2, 30), 4)
    # A document of two tokens between two others: shorter than the taps.
    x[9:11] = float("nan")
    x.requires_grad_()
    y, _ = conv.short_conv(x, weight, segments)
    keep = torch.cat([torch.arange(9), torch.arange(11, 41)])
    (dx,) = torch.autograd.grad(y[keep].sum(), x)
    clean = [naive.short_conv(x[a:b].detach(), weight, Segments((b - a,)))[0] for a, b in ((0, 9), (11, 41))]
    torch.testing.assert_close(y[keep], torch.cat(clean), rtol=0, atol=EXACT)
    assert dx[keep].isfinite().all()


def test_decoding_token_by_token_continues_the_row():
    segments, (x, weight) = inputs((11, 2, 1), 3, seed=1)
    more = torch.randn(
        5, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )  # [step, document, C]
    _, taps = conv.short_conv(x, weight, segments, output_taps=True)
    for n, (start, length) in enumerate(zip(segments.offsets, segments.lengths)):
        whole = torch.cat([x[start : start + length], more[:, n]])
        expected, _ = naive.short_conv(whole, weight, Segments((length + 5,)))
        state = taps[n : n + 1]
        for step in range(5):
            token = more[step, n : n + 1]
            y, state = conv.short_conv(
                token, weight, Segments((1,)), initial_taps_NCW1=state, output_taps=True
            )
            torch.testing.assert_close(y[0], expected[length + step], rtol=0, atol=EXACT)


@needs_interpreter
def test_a_slice_of_a_wider_projection_is_read_in_place():
    segments, (x, weight) = inputs((9, 30), 24, seed=5)
    wide = torch.randn(segments.total, 50)
    wide[:, 7:31] = x.float()
    want, _ = triton_conv.short_conv(x.float(), weight.float(), segments)
    assert torch.equal(triton_conv.short_conv(wide[:, 7:31], weight.float(), segments)[0], want)


@BOTH
def test_an_empty_row_gives_an_empty_row(op, dtype, tolerance):
    x = torch.zeros(0, 6, dtype=dtype, requires_grad=True)
    y, taps = op(x, torch.ones(6, 4, dtype=dtype), Segments(()), output_taps=True)
    assert y.shape == (0, 6) and taps.shape == (0, 6, 3)
