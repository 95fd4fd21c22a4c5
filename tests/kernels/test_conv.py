"""The short convolution against its definition: values, gradients, isolation, decoding."""

import pytest
import torch

from earlyfusion.kernels.kda import conv, naive
from earlyfusion.kernels.segments import Segments

EXACT = 1e-12  # float64 against float64: only the order of W additions differs
FP32 = 2e-6  # float32 against float64, W = 4 products of order 1
ROWS = [(1,), (2, 1, 1), (5, 1, 2, 3, 40, 1, 7), (130,), (300, 1, 2, 64)]


def inputs(segments, channels, width, seed, taps=True):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(segments.total, channels), (channels, width)] + [(segments.num, channels, width - 1)] * taps
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def run(op, tensors, segments, seed=5):
    x, weight, *taps = tensors
    y, final = op(x, weight, segments, initial_taps_NCW1=taps[0] if taps else None, output_taps=True)
    generator = torch.Generator().manual_seed(seed)
    loss = (y * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum()
    loss = loss + (final * torch.randn(final.shape, generator=generator, dtype=y.dtype)).sum()
    return [y, final, *torch.autograd.grad(loss, tensors)]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("taps", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("lengths", ROWS)
def test_values_and_gradients_match_the_definition(lengths, width, taps, seed, monkeypatch):
    monkeypatch.setattr(conv, "_BLOCK_ELEMENTS", 64)  # blocks of 16 rows: documents cross block edges
    segments = Segments(lengths)
    tensors = inputs(segments, 5, width, seed, taps)
    for ours, law in zip(run(conv.short_conv, tensors, segments), run(naive.short_conv, tensors, segments)):
        torch.testing.assert_close(ours, law, rtol=0, atol=EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_inputs_are_summed_in_float32(dtype):
    segments = Segments((70, 3, 40))
    x, weight = (t.detach().to(dtype) for t in inputs(segments, 6, 4, 0, taps=False))
    y, _ = conv.short_conv(x, weight, segments)
    law, _ = naive.short_conv(x.double(), weight.double(), segments)
    assert y.dtype == dtype
    half_ulp = FP32 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(y.double(), law, rtol=half_ulp, atol=FP32)


def test_packed_documents_do_not_leak_even_when_a_neighbour_is_nan():
    segments = Segments((9, 2, 30))
    x, weight = (t.detach() for t in inputs(segments, 4, 4, 0, taps=False))
    x[9:11] = float("nan")
    x.requires_grad_()
    y, _ = conv.short_conv(x, weight, segments)
    keep = torch.cat([torch.arange(9), torch.arange(11, 41)])
    (dx,) = torch.autograd.grad(y[keep].sum(), x)
    clean = torch.cat(
        [naive.short_conv(x[a:b].detach(), weight, Segments((b - a,)))[0] for a, b in ((0, 9), (11, 41))]
    )
    torch.testing.assert_close(y[keep], clean, rtol=0, atol=EXACT)
    assert dx[keep].isfinite().all()


def test_decoding_token_by_token_continues_the_row():
    segments = Segments((11, 2, 1))
    x, weight = (t.detach() for t in inputs(segments, 3, 4, 1, taps=False))
    more = torch.randn(
        5, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )  # [step, document, C]
    _, taps = conv.short_conv(x, weight, segments, output_taps=True)
    for n, (start, length) in enumerate(zip(segments.offsets, segments.lengths)):
        whole = torch.cat([x[start : start + length], more[:, n]])
        expected, _ = naive.short_conv(whole, weight, Segments((length + 5,)))
        state = taps[n : n + 1]
        for step in range(5):
            y, state = conv.short_conv(
                more[step, n : n + 1], weight, Segments((1,)), initial_taps_NCW1=state, output_taps=True
            )
            torch.testing.assert_close(y[0], expected[length + step], rtol=0, atol=EXACT)


def test_gradcheck():
    segments = Segments((4, 1, 3))
    tensors = inputs(segments, 2, 3, 3)
    assert torch.autograd.gradcheck(
        lambda x, w, t: conv.short_conv(x, w, segments, initial_taps_NCW1=t, output_taps=True), tensors
    )


def test_an_empty_row_gives_an_empty_result():
    y, taps = conv.short_conv(
        torch.zeros(0, 3, requires_grad=True), torch.zeros(3, 4), Segments(()), output_taps=True
    )
    assert y.shape == (0, 3) and taps.shape == (0, 3, 3)
    y.sum().backward()


def test_a_weight_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"expected \[C, W\]"):
        conv.short_conv(torch.zeros(4, 3), torch.zeros(2, 4), Segments((4,)))
