"""The Triton KDA kernels on a CUDA device, in bfloat16 and float32, against the torch chunk form in
float64."""

import pytest
import torch
from kda_cases import NAMES
from triton_cases import interpreted, poisoned_empties

from earlyfusion.kernels.kda import chunk, naive
from earlyfusion.kernels.kda.triton import conv as triton_conv
from earlyfusion.kernels.kda.triton import kda as triton_kda
from earlyfusion.kernels.segments import Segments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(interpreted, reason="run with TRITON_INTERPRET=0")]
# Root mean square of the error over that of the wanted tensor; fla's own tolerances for bfloat16 operands.
LIMITS = {"o": 5e-3, "final_state": 5e-3, "dq": 8e-3, "dk": 8e-3, "dv": 8e-3} | dict.fromkeys(
    ("df", "db", "dA_log", "ddt_bias", "dinitial_state"), 2e-2
)


def rms_error(got, want):
    return (
        (got.double() - want.double()).square().mean().sqrt() / want.double().square().mean().sqrt()
    ).item()


def problem(lengths, key_dim, value_dim, dtype, lower_bound, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    segments = Segments(tuple(lengths))
    T, H, G = segments.total, 2, 4
    normal = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")
    wide = [normal(G).abs(), normal(G, key_dim), normal(segments.num, G, key_dim, value_dim)]
    narrow = [
        normal(T, H, key_dim),
        normal(T, H, key_dim),
        normal(T, G, value_dim),
        normal(T, G, key_dim),
        normal(T, G),
    ]
    return segments, [x.to(dtype) for x in narrow] + wide


def results(op, segments, tensors, lower_bound, **options):
    leaves = [x.detach().requires_grad_() for x in tensors]
    o, final = op(
        *leaves[:7],
        segments,
        lower_bound=lower_bound,
        initial_state_NGKV=leaves[7],
        output_final_state=True,
        **options,
    )
    generator = torch.Generator(device="cuda").manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, device="cuda").bfloat16() for x in (o, final)]
    loss = sum((x * w.to(x.dtype)).sum() for x, w in zip((o, final), weights))
    return {"o": o, "final_state": final} | dict(
        zip([f"d{n}" for n in NAMES], torch.autograd.grad(loss, leaves))
    )


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (128, 256), (256, 256)])
@pytest.mark.parametrize("segment_chunks", [0, 4])
def test_bfloat16_on_the_device(dims, lower_bound, segment_chunks):
    segments, tensors = problem((1, 700, 64, 1, 333), *dims, torch.bfloat16, lower_bound)
    want = results(chunk.kda, segments, [x.double() for x in tensors], lower_bound)
    with poisoned_empties():
        got = results(triton_kda.kda, segments, tensors, lower_bound, segment_chunks=segment_chunks)
    errors = {name: rms_error(got[name], want[name]) for name in want}
    assert all(errors[name] < LIMITS[name] for name in errors), errors


def test_float32_on_the_device():
    segments, tensors = problem((1, 130, 17), 64, 64, torch.float32, None)
    want = results(chunk.kda, segments, [x.double() for x in tensors], None)
    got = results(triton_kda.kda, segments, tensors, None)
    assert max(rms_error(got[name], want[name]) for name in want) < 1e-4


def test_convolution_on_the_device():
    segments, tensors = problem((1, 70, 3), 128, 128, torch.bfloat16, None)
    x = tensors[2].flatten(1)
    weight = torch.randn(x.shape[1], 4, device="cuda")
    got, _ = triton_conv.short_conv(x, weight, segments)
    want, _ = naive.short_conv(x.double(), weight.double(), segments)
    assert rms_error(got, want) < LIMITS["o"]
