"""The Triton short convolution through the interpreter against its definition in float64."""

import pytest
import torch
from triton_cases import needs_interpreter, poisoned_empties, relative_error

from earlyfusion.kernels.kda import naive
from earlyfusion.kernels.kda.triton import conv as triton_conv
from earlyfusion.kernels.segments import Segments

pytestmark = needs_interpreter
FP32 = 2e-6  # sums of at most 5 x 64 products in float32
BF16 = 2e-2  # inputs, outputs and gradients rounded (the interpreter truncates) to 8 bits


def draw(lengths, channels, width, taps, seed):
    generator = torch.Generator().manual_seed(seed)
    segments = Segments(tuple(lengths))
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    leaves = [normal(segments.total, channels), normal(channels, width)]
    if taps:
        leaves.append(normal(segments.num, channels, width - 1))
    return segments, leaves, normal(segments.total, channels).bfloat16().float()


def outputs(op, segments, leaves, dy, dtype):
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    taps = leaves[2] if len(leaves) == 3 else None
    with poisoned_empties():
        y, last = op(leaves[0], leaves[1], segments, initial_taps_NCW1=taps, output_taps=True)
        return [y.detach(), last.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


@pytest.mark.parametrize("lengths", [(1,), (3,), (16, 17), (1, 2, 5, 40, 1, 17), (33,)])
@pytest.mark.parametrize("taps", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_outputs_gradients_and_taps_equal_the_definition(lengths, taps, seed):
    segments, leaves, dy = draw(lengths, channels=70 if seed else 3, width=4, taps=taps, seed=seed)
    got = outputs(triton_conv.short_conv, segments, leaves, dy, torch.float32)
    want = outputs(naive.short_conv, segments, leaves, dy, torch.float64)
    assert [relative_error(g, w) < FP32 for g, w in zip(got, want)] == [True] * len(want)


@pytest.mark.parametrize("width", [2, 3])
def test_other_widths(width):
    segments, leaves, dy = draw((5, 1, 20), channels=10, width=width, taps=True, seed=3)
    got = outputs(triton_conv.short_conv, segments, leaves, dy, torch.float32)
    want = outputs(naive.short_conv, segments, leaves, dy, torch.float64)
    assert max(relative_error(g, w) for g, w in zip(got, want)) < FP32


def test_bfloat16_inputs():
    segments, leaves, dy = draw((21, 1, 8), channels=40, width=4, taps=False, seed=4)
    leaves = [leaf.bfloat16() for leaf in leaves]
    got = outputs(triton_conv.short_conv, segments, leaves, dy, torch.bfloat16)
    want = outputs(naive.short_conv, segments, leaves, dy, torch.float64)
    assert got[0].dtype == torch.bfloat16
    assert max(relative_error(g, w) for g, w in zip(got, want)) < BF16


def test_a_slice_of_a_wider_projection_is_read_in_place():
    segments, (x, weight), _ = draw((9, 30), channels=24, width=4, taps=False, seed=5)
    wide = torch.randn(segments.total, 50)
    wide[:, 7:31] = x
    want, _ = triton_conv.short_conv(x, weight, segments)
    got, _ = triton_conv.short_conv(wide[:, 7:31], weight, segments)
    assert torch.equal(got, want)


def test_packed_documents_equal_separate_ones_and_the_future_is_not_seen():
    segments, (x, weight), _ = draw((1, 19, 1, 12), channels=20, width=4, taps=False, seed=6)
    y, _ = triton_conv.short_conv(x, weight, segments)
    parts = [
        triton_conv.short_conv(part, weight, Segments((part.shape[0],)))[0]
        for part in x.split(segments.lengths)
    ]
    assert torch.equal(y, torch.cat(parts))
    changed = x.clone()
    changed[10:] += 1.0
    assert torch.equal(triton_conv.short_conv(changed, weight, segments)[0][:10], y[:10])


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda x, w, s: (x.double(), w, s), "x is torch.float64"),
        (lambda x, w, s: (x.T, w, s), "x"),
        (lambda x, w, s: (x, w[:4], s), "weight"),
        (lambda x, w, s: (x, w[:, :1], s), "weight"),
        (lambda x, w, s: (x[None], w, s), "x is"),
        (lambda x, w, s: (x, w, Segments((3,))), "x"),
        (lambda x, w, s: (x, w * torch.nan, s), "weight holds NaN"),
    ],
)
def test_bad_input_names_the_argument(change, named):
    segments, (x, weight), _ = draw((12,), channels=12, width=4, taps=False, seed=7)
    x, weight, segments = change(x, weight, segments)
    with pytest.raises(ValueError, match=named):
        triton_conv.short_conv(x, weight, segments)


def test_wrong_taps_are_refused():
    segments, (x, weight), _ = draw((12,), channels=12, width=4, taps=False, seed=8)
    with pytest.raises(ValueError, match="initial_taps"):
        triton_conv.short_conv(x, weight, segments, initial_taps_NCW1=torch.zeros(2, 12, 3))


def test_an_empty_row_gives_an_empty_row():
    y, taps = triton_conv.short_conv(torch.zeros(0, 6), torch.ones(6, 4), Segments(()), output_taps=True)
    assert y.shape == (0, 6) and taps.shape == (0, 6, 3)
