"""On a GPU: KDA, its decode step and the short convolution in bfloat16 against the recurrence in float64."""

import pytest
import torch
from gpu_cases import compare, device, randn
from kda_cases import call, inputs, results

from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.kda import naive
from earlyfusion.kernels.segments import Segments

pytestmark = pytest.mark.gpu
KDA = 3e-2  # 2-norm, relative: bfloat16 inputs, products and results along a recurrence
SHAPES = [
    dict(key_dim=128, value_dim=128),
    dict(key_dim=64, value_dim=128, group=2),
    dict(key_dim=32, value_dim=32),
    dict(key_dim=128, value_dim=256),
    dict(key_dim=256, value_dim=256),
]


@pytest.mark.parametrize("segment_chunks", [None, 0, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("regime", ["bounded", "init", "brutal", "slow"])
def test_kda_in_four_gate_regimes(regime, shape, segment_chunks):
    segments, tensors, bound = inputs((700, 1, 64, 333), heads=2, regime=regime, states=True, **shape)
    options = {} if segment_chunks is None else {"segment_chunks": segment_chunks}
    # A_log, dt_bias and the state stay float32, as in the model
    dtypes = [torch.bfloat16] * 5 + [torch.float32] * 3
    leaves = [x.detach().to(device(), dtype) for x, dtype in zip(tensors, dtypes)]
    op = resolve("kda", device())
    heads, values = leaves[2].shape[1:]
    cotangents = [
        randn(segments.total, heads, values, seed=5),
        randn(segments.num, heads, leaves[0].shape[2], values, seed=6, dtype=torch.float32),
    ]
    compare(
        lambda *x: call(op, list(x), segments, bound, **options),
        lambda *x: call(naive.kda, list(x), segments, bound),
        leaves,
        cotangents,
        tolerance=KDA,
    )


def test_kda_in_float32():
    segments, tensors, bound = inputs((1, 130, 17), heads=2, key_dim=64, value_dim=64, states=True)
    leaves = [x.detach().to(device(), torch.float32) for x in tensors]
    found = results(resolve("kda", device()), [x.requires_grad_() for x in leaves], segments, bound)
    wanted = results(naive.kda, [x.detach().double().requires_grad_() for x in leaves], segments, bound)
    for name, want in wanted.items():
        assert ((found[name].double() - want).norm() / want.norm()).item() < 1e-4, name


def test_changing_the_future_leaves_the_past_bit_identical():
    segments, tensors, bound = inputs((300,), heads=2, key_dim=128, value_dim=128, regime="brutal")
    leaves = [
        x.detach().to(device(), torch.bfloat16 if i < 5 else torch.float32) for i, x in enumerate(tensors)
    ]
    op = resolve("kda", device())
    before, _ = call(op, leaves, segments, bound)
    for x in leaves[:5]:
        x[170:] = x[170:] * -3 + 1
    after, _ = call(op, leaves, segments, bound)
    assert torch.equal(before[:170], after[:170]) and not torch.equal(before[170:], after[170:])


def test_prefill_then_steps_equal_one_pass():
    segments, tensors, bound = inputs((70,), heads=2, key_dim=128, value_dim=128, regime="bounded")
    leaves = [
        x.detach().to(device(), torch.bfloat16 if i < 5 else torch.float32) for i, x in enumerate(tensors)
    ]
    full, _ = call(resolve("kda", device()), leaves, segments, bound)
    head = [x[:60] for x in leaves[:5]] + leaves[5:]
    _, state = resolve("kda", device())(*head, Segments((60,)), lower_bound=bound, output_final_state=True)
    for t in range(60, 70):
        o, state = resolve("kda_step", device())(
            *(x[t : t + 1] for x in leaves[:5]), *leaves[5:], state, lower_bound=bound
        )
        assert ((o[0].double() - full[t].double()).norm() / full[t].double().norm()).item() < KDA


def test_short_convolution():
    segments = Segments((300, 1, 2, 65))
    x, weight = randn(segments.total, 256), randn(256, 4, seed=1, dtype=torch.float32)
    compare(
        lambda a, b: resolve("short_conv", device())(a, b, segments)[0],
        lambda a, b: naive.short_conv(a, b, segments)[0],
        [x, weight],
        [randn(segments.total, 256, seed=2)],
    )


@pytest.mark.parametrize("regime", ["bounded", "init"])
def test_a_nan_in_the_gate_reaches_the_output(regime):
    segments, tensors, bound = inputs((100,), heads=2, key_dim=64, value_dim=64, regime=regime)
    leaves = [
        x.detach().to(device(), torch.bfloat16 if i < 5 else torch.float32) for i, x in enumerate(tensors)
    ]
    leaves[3][70, 1, 5] = torch.nan
    o, _ = call(resolve("kda", device()), leaves, segments, bound)
    assert o[70:, 1].isnan().any() and o[:64].isfinite().all() and o[:, 0].isfinite().all()
