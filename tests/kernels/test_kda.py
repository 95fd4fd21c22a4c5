"""KDA, chunked in torch and in Triton and token by token in C++, against the token recurrence in float64:
outputs and every gradient, packing, causality, states, seven gate regimes. The Triton kernels run through the
interpreter."""

import math
from itertools import product

import pytest
import torch
from cases import Form, forms, needs_interpreter, poisoned_empties, relative_error, round_as_on_a_gpu
from kda_cases import NAMES, REGIMES, call, cast, halves, inputs, results

from earlyfusion.kernels.kda import chunk, naive, recurrent
from earlyfusion.kernels.kda.triton import kda as triton_kda
from earlyfusion.kernels.segments import Segments

GATE_GRADIENTS = ("df", "dA_log", "ddt_bias")
# 2-norm, with the roundings of a GPU: one to 8 bits is 2e-3.
ROUNDED = 8e-3
# db, dA_log, ddt_bias: sums that cancel.
SUM_ROUNDED = 3e-2
# Relative RMS error of float32. Measured 1e-7 to 6e-7 for outputs and most gradients; the gate's gradient is
# a running sum in which most terms cancel, and its parameters sum it over all tokens: up to 1.1e-5 (dt_bias)
# in strong regimes.
VALUE_RTOL, GATE_RTOL = 2e-6, 5e-5


# Sums over all tokens, of numbers that cancel, times exp(A_log) up to 200.
SUMS = ("dA_log", "ddt_bias")
TORCH = Form(chunk.kda, torch.float64, 1e-9)
# Sums over a chunk: 1.04e-5 at gates of 2,000 nats.
TRITON = Form(triton_kda.kda, torch.float32, 5e-5)
# Measured up to 3e-6.
CPP = Form(recurrent.kda, torch.float32, 1e-5)
BOTH = forms(torch=TORCH, cpp=CPP, triton=TRITON)
FLOAT32 = forms(torch=Form(chunk.kda, torch.float32, 0), cpp=CPP, triton=TRITON)
SMALL = {"heads": 1, "key_dim": 32, "value_dim": 32}
LENGTHS = [(1,), (15,), (16,), (17,), (63,), (64,), (65,), (130,)]
PACKED = [*LENGTHS, (3, 1, 1, 40, 16, 7), (1, 1, 1, 1), (16, 16, 32, 1)]
GATES = ("init", "bounded", "brutal", "slow")


def shape(heads=2, key_dim=8, value_dim=6, group=1, **rest):
    return {"heads": heads, "group": group, "key_dim": key_dim, "value_dim": value_dim, **rest}


def laws():
    """(form, lengths, shape, options): odd to a chunk, packed, grouped heads, unequal and padded dims,
    large ones."""
    torch_axes = PACKED, ("spread", "bounded"), (False, True), (0, 1), (16, 32)
    for lengths, regime, states, seed, size in product(*torch_axes):
        yield TORCH, lengths, {"regime": regime, "states": states, "seed": seed}, {"chunk": size}
    for size in (2, 4, 8, 64, 128):
        yield TORCH, (45, 2, 90), {"regime": "strong", "seed": 4}, {"chunk": size}
    for states, dims in product((False, True), ((1, 8, 5, 4), (3, 4, 16, 2), (2, 16, 2, 1))):
        yield TORCH, (21, 1, 50), shape(*dims, states=states, seed=2), {}

    for lengths, regime, states in product(PACKED, GATES, (False, True)):
        yield CPP, lengths, SMALL | {"regime": regime, "states": states, "seed": len(lengths)}, {}
    for dims in ((2, 6, 100), (1, 24, 40, 2), (3, 5, 4, 2), (1, 128, 128), (1, 256, 64), (1, 64, 256)):
        yield CPP, (40, 1, 21), shape(*dims[:3], *dims[3:], states=True, seed=5), {}

    for regime in GATES:
        for lengths in LENGTHS:
            yield TRITON, lengths, SMALL | {"regime": regime, "seed": lengths[0]}, {"chunk": 64}
        for size in (16, 32):
            yield TRITON, (50,), SMALL | {"regime": regime, "seed": size}, {"chunk": size}
        grouped = shape(1, 32, 64, 2, states=True, seed=3, regime=regime)
        yield TRITON, (1, 33, 1, 16), grouped, {"chunk": 32}
    for dims in ((2, 32, 64), (2, 24, 40), (2, 6, 100)):
        yield TRITON, (20, 3), shape(*dims, states=True, seed=4, regime="init"), {"chunk": 16}
    for regime, parallel in product(("brutal", "slow"), (1, 2)):
        segments = {"chunk": 16, "segment_chunks": parallel}
        yield TRITON, (70, 1, 40), SMALL | {"states": True, "seed": 6, "regime": regime}, segments
    for dims in ((1, 128, 128), (1, 256, 64), (1, 64, 256)):
        yield TRITON, (40,), shape(*dims, states=True, seed=5, regime="brutal"), {"chunk": 32}


def named(case):
    form, lengths, sizes, options = case
    words = [f"{key} {value}" for key, value in {**sizes, **options}.items()]
    marks = []
    if form is TRITON:
        marks.append(needs_interpreter)
    # The interpreter takes a minute for each.
    if sizes.get("key_dim", 0) + sizes.get("value_dim", 0) > 255:
        marks.append(pytest.mark.slow)
    return pytest.param(*case, id=" ".join([str(form.dtype), str(lengths), *words]), marks=marks)


@pytest.mark.parametrize("form, lengths, sizes, options", map(named, laws()))
def test_outputs_and_all_gradients_equal_the_recurrence(form, lengths, sizes, options):
    segments, tensors, bound = inputs(lengths, **sizes)
    want = results(naive.kda, tensors, segments, bound)
    with poisoned_empties():
        found = results(form.op, cast(tensors, form.dtype), segments, bound, **options)
    assert found.keys() == want.keys()
    for name, value in want.items():
        factor = 10 if name in SUMS and form is not TORCH else 1
        assert relative_error(found[name], value) < factor * form.error, name


@pytest.mark.parametrize("bound", [None, -5.0])
def test_gradcheck(bound):
    segments, tensors, _ = inputs((3, 1, 5), seed=5, heads=1, group=2, key_dim=3, value_dim=2, states=True)
    assert torch.autograd.gradcheck(lambda *x: call(chunk.kda, x, segments, bound, chunk=4), tensors)


# Causality and packing, bit for bit: what stands elsewhere is not seen, in values or in gradients.


@FLOAT32
@pytest.mark.parametrize("regime", ["init", "bounded", "brutal", "slow"])
def test_the_past_is_bit_identical_whatever_the_future_holds(form, regime):
    segments, tensors, bound = inputs((70, 30), seed=6, regime=regime, **SMALL)
    now = [x.detach().float() for x in tensors]
    first, _ = call(form.op, now, segments, bound)
    # At the edges of chunks and documents, and one off.
    for cut in (1, 16, 17, 40, 64, 70, 85):
        later = [x.clone() for x in now]
        # Gate parameters and state have no time.
        for x in later[:5]:
            x[cut:] = 3 * x[cut:].flip(0) - 1
        second, _ = call(form.op, later, segments, bound)
        assert torch.equal(first[:cut], second[:cut]), f"outputs before token {cut} changed"
        assert not torch.equal(first[cut:], second[cut:])


@FLOAT32
def test_gradients_of_a_loss_on_the_past_do_not_see_the_future(form):
    found = []
    for change in (0.0, 2.0):
        segments, tensors, bound = inputs((70, 20), seed=7, regime="bounded", **SMALL)
        leaves = cast(tensors, torch.float32)
        with torch.no_grad():
            for x in leaves[:5]:
                x[41:] += change
        o, _ = call(form.op, leaves, segments, bound)
        found.append(torch.autograd.grad(o[:41].square().sum(), leaves[:5]))
    for name, before, after in zip(NAMES, *found):
        assert torch.equal(before[:41], after[:41]) and before[:41].abs().sum() > 0, name
        assert not before[41:].any(), name


@FLOAT32
def test_a_packed_document_does_not_leak_a_single_bit(form):
    segments, tensors, bound = inputs((33, 5, 50), seed=8, **SMALL)
    tensors = cast(tensors, torch.float32)
    o, _ = call(form.op, tensors, segments, bound)
    changed = [x.detach().clone() for x in tensors]
    for x in changed[:5]:
        x[33:38] *= -2.0
    other, _ = call(form.op, changed, segments, bound)
    # The middle document is changed; both neighbours share chunks with it.
    rest = torch.cat([torch.arange(33), torch.arange(38, 88)])
    assert torch.equal(o[rest], other[rest])
    for name, gradient in zip(NAMES[:5], torch.autograd.grad(o[33:38].square().sum(), tensors)):
        assert gradient[33:38].abs().sum() > 0 and not gradient[rest].any(), name


@BOTH
@pytest.mark.parametrize("cut", [1, 16, 31, 50])
def test_a_document_cut_in_two_continues_through_its_state(form, cut):
    segments, tensors, bound = inputs((70,), seed=9, states=True, **SMALL)
    tensors = cast(tensors, form.dtype)
    whole, end = call(form.op, tensors, segments, bound)
    # What decoding does after a prefill.
    head, state = call(form.op, [x[:cut] for x in tensors[:5]] + tensors[5:], Segments((cut,)), bound)
    rest = [x[cut:] for x in tensors[:5]] + tensors[5:7] + [state]
    tail, final = call(form.op, rest, Segments((70 - cut,)), bound)
    assert (
        relative_error(torch.cat([head, tail]), whole) < form.error
        and relative_error(final, end) < form.error
    )


# Precision and gates of any strength.


@pytest.mark.parametrize("states", [False, True], ids=["flat", "states"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("op", [chunk.kda, recurrent.kda], ids=["torch", "cpp"])
def test_float32_is_accurate_in_every_gate_regime(op, regime, seed, states):
    segments, tensors, bound = inputs(
        (150, 1, 37, 70), seed=seed, key_dim=32, value_dim=32, regime=regime, states=states
    )
    # The law sees the rounded inputs: only the computation is compared.
    tensors = cast(cast(tensors, torch.float32), torch.float64)
    expected = results(naive.kda, tensors, segments, bound)
    found = results(op, cast(tensors, torch.float32), segments, bound)
    for name, value in expected.items():
        error = (found[name].double() - value).square().mean().sqrt()
        tolerance = GATE_RTOL if name in GATE_GRADIENTS else VALUE_RTOL
        # A saturated gate has a true gradient near 1e-12 of the others: nothing to be relative to.
        assert error <= tolerance * value.square().mean().sqrt() + 1e-10, f"{name}: {error:.1e}"


def test_a_decay_of_exactly_zero_stays_finite_and_forgets():
    segments, tensors, _ = inputs((40,), seed=3, regime="init")
    tensors = cast(tensors, torch.float32)
    with torch.no_grad():
        # The gate of token 20: alpha underflows to 0.
        tensors[3][20] = 1e30
    found = results(chunk.kda, tensors, segments, None)
    assert all(value.isfinite().all() for value in found.values())
    fresh, _ = chunk.kda(*(x[20:] for x in tensors[:5]), *tensors[5:], Segments((20,)))
    torch.testing.assert_close(found["o"][20:], fresh, rtol=0, atol=1e-6)


def test_a_saturated_bounded_gate_with_a_huge_rate_has_finite_gradients():
    segments, tensors, bound = inputs((9,), regime="bounded")
    tensors = cast(tensors, torch.float32)
    with torch.no_grad():
        tensors[3].copy_(40 * tensors[3].sign())
        tensors[5].fill_(30.0)
    found = results(chunk.kda, tensors, segments, bound)
    assert all(value.isfinite().all() for value in found.values()) and not found["df"].any()


@pytest.mark.parametrize("size", [32, 64])
def test_identical_keys_without_decay_do_not_blow_up_the_triangular_inverse(size):
    """L is all ones below the diagonal: its powers reach 1e17 at 64 tokens, its inverse has entries 0, 1,
    -1 only."""
    segments, tensors, _ = inputs((128,), seed=4, regime="slow", key_dim=16, value_dim=8)
    with torch.no_grad():
        # The worst case for an inverse by powers.
        tensors[1][:] = tensors[1][0]
        tensors[3][:] = -40.0
        tensors[4][:] = 20.0
    expected = results(naive.kda, tensors, segments, None)
    found = results(chunk.kda, cast(tensors, torch.float32), segments, None, chunk=size)
    for name in ("o", "dq", "dv"):
        error = (found[name].double() - expected[name]).square().mean().sqrt()
        assert error <= 1e-5 * expected[name].square().mean().sqrt(), f"{name}: {error:.1e}"


def test_autocast_and_bfloat16_inputs_keep_the_inside_in_float32():
    segments, tensors, bound = inputs((90, 40), seed=11, key_dim=32, value_dim=32)
    leaves = halves(tensors)
    expected = results(naive.kda, cast(leaves, torch.float64), segments, bound)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(chunk.kda, leaves, segments, bound)
    assert found["o"].dtype == torch.bfloat16 and found["dA_log"].dtype == torch.float32
    for name, value in expected.items():
        error = (found[name].double() - value).square().mean().sqrt() / value.square().mean().sqrt()
        # Only results are rounded, by at most 2**-9 of each element;
        # gradients of parameters are not rounded at all.
        assert error < (1e-4 if name in ("dA_log", "ddt_bias") else 2**-9), f"{name}: {error:.1e}"


@needs_interpreter
@pytest.mark.parametrize(
    "regime, size", [*((regime, 64) for regime in REGIMES), ("init", 16), ("strong", 32)]
)
def test_the_roundings_of_a_gpu_stay_small_in_every_gate_regime(regime, size, monkeypatch):
    """bfloat16 between the launches and in operands of every product, float16 inside the inverse: against
    float64."""
    import triton.language as tl

    segments, tensors, bound = inputs((100, 1, 20), states=True, regime=regime, **SMALL)
    leaves = halves(tensors)
    want = results(naive.kda, cast(leaves, torch.float64), segments, bound)
    round_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(triton_kda, "dot_dtype", lambda dtype, kernel: dtype)
    monkeypatch.setattr(triton_kda, "precision", lambda *_: (tl.float32, "ieee"))
    found = results(triton_kda.kda, leaves, segments, bound, chunk=size, segment_chunks=0)
    # A saturated gate has a true gradient near 1e-12 of the others: nothing to be relative to.
    names = want.keys() - (set(GATE_GRADIENTS) if regime == "saturated" else set())
    errors = {name: ((found[name].double() - want[name]).norm() / want[name].norm()).item() for name in names}
    assert 1e-4 < errors["o"], "nothing was rounded"
    sums = ("db", "dA_log", "ddt_bias")
    bad = {
        name: error
        for name, error in errors.items()
        if not error < (SUM_ROUNDED if name in sums else ROUNDED)
    }
    assert not bad, bad


@needs_interpreter
@pytest.mark.parametrize("regime", ["init", "bounded"])
def test_a_nan_in_the_gate_reaches_the_output_and_its_gradient(regime):
    """What the compiler makes of the clamp: test_aot. It
    fills its chunk (0 times NaN), and neither an earlier chunk nor another document."""
    segments, tensors, bound = inputs((40, 9), seed=12, regime=regime, **SMALL)
    with torch.no_grad():
        # One channel of one gate.
        tensors[3][20, 0, 7] = math.nan
    found = results(triton_kda.kda, cast(tensors, torch.float32), segments, bound, chunk=16)
    assert found["o"][20:40].isnan().all() and found["df"][20, 0, 7].isnan()
    assert found["o"][:16].isfinite().all() and found["o"][40:].isfinite().all()


@needs_interpreter
def test_two_runs_give_the_same_bits_and_slices_are_read_in_place():
    segments, tensors, bound = inputs((37,), seed=14, heads=2, key_dim=32, value_dim=32, regime="bounded")
    leaves = cast(tensors, torch.float32)
    first, second = (results(triton_kda.kda, leaves, segments, bound, chunk=32) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    q, k, v, f, b, A_log, dt_bias = (x.detach() for x in leaves)
    # As the model's joint projection lays them out.
    joint = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1), b], dim=1)
    parts = [joint[:, 64 * i : 64 * i + 64].unflatten(1, (2, 32)) for i in range(3)]
    got, _ = triton_kda.kda(*parts, f, joint[:, 192:], A_log, dt_bias, segments, lower_bound=bound, chunk=32)
    assert torch.equal(got, first["o"])


@FLOAT32
def test_an_empty_row_gives_an_empty_row(form):
    segments, tensors, _ = inputs((), **SMALL)
    o, final = form.op(*cast(tensors, torch.float32), segments, output_final_state=True)
    assert o.shape == (0, 1, 32) and final.shape == (0, 1, 32, 32)
