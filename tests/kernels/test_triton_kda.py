"""The Triton KDA kernels through the interpreter against the token recurrence in float64: outputs and all
gradients."""

import math

import pytest
import torch
import triton.language as tl
from kda_cases import NAMES, REGIMES, cast, inputs, results
from triton_cases import needs_interpreter, poisoned_empties, relative_error, round_as_on_a_gpu

from earlyfusion.kernels import triton_support
from earlyfusion.kernels.kda import naive
from earlyfusion.kernels.kda.triton import kda as triton_kda
from earlyfusion.kernels.segments import Segments

pytestmark = needs_interpreter
# Relative to the largest entry. float32 sums over a chunk; gradients of the gate are running sums of
# differences.
OUTPUT, GRADIENT = 1e-5, 5e-5
GATE_SUM = 5e-4  # dA_log, ddt_bias: sums over all tokens of numbers that cancel, times exp(A_log) up to 200
BF16 = 3e-2  # inputs, o, dq, dk, dv, df rounded to 8 bits (the interpreter truncates), products in float32
ROUNDED = 8e-3  # 2-norm, with the roundings of a GPU: one to 8 bits is 2e-3
SUM_ROUNDED = 3e-2  # db, dA_log, ddt_bias: sums that cancel
GATES = ("init", "bounded", "checkpoint", "slow")


def gates(name, tokens, heads, key_dim, seed):
    """(f, A_log, dt_bias, lower_bound): fla's initial softplus, -5 sigmoid, checkpoint-like, |g| about
    1e-3."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    uniform = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)
    dt = torch.exp(uniform(heads, key_dim) * math.log(100.0) + math.log(1e-3))
    bias = dt + torch.log(-torch.expm1(-dt))
    f = normal(tokens, heads, key_dim)
    if name == "init":
        return f * 0.1, (1 + 15 * uniform(heads)).log(), bias, None
    if name == "bounded":
        return f, uniform(heads), uniform(heads, key_dim), -5.0
    if (
        name == "checkpoint"
    ):  # exp(A_log) log-uniform up to 200, Student t inputs: single tokens of -1000 nats
        tails = f / uniform(tokens, heads, key_dim).clamp_min(0.05).sqrt()
        return 3 * tails - 2, uniform(heads) * math.log(200.0), bias, None
    return (
        torch.full_like(f, math.log(math.expm1(1e-3))) + 0.1 * f,
        torch.zeros(heads).double(),
        bias * 0,
        None,
    )


def case(name, lengths, seed=0, **shape):
    """As kda_cases.inputs, with one of GATES."""
    segments, tensors, _ = inputs(lengths, seed=seed, **shape)
    tokens, heads, key_dim = tensors[3].shape
    f, A_log, dt_bias, lower_bound = gates(name, tokens, heads, key_dim, seed)
    tensors[3], tensors[5], tensors[6] = (x.double().requires_grad_() for x in (f, A_log, dt_bias))
    return segments, tensors, lower_bound


def compare(segments, tensors, lower_bound, **options):
    want = results(naive.kda, tensors, segments, lower_bound)
    with poisoned_empties():
        got = results(triton_kda.kda, cast(tensors, torch.float32), segments, lower_bound, **options)
    errors = {name: relative_error(got[name], want[name]) for name in want}
    limits = {"o": OUTPUT, "final_state": OUTPUT, "dA_log": GATE_SUM, "ddt_bias": GATE_SUM}
    bad = {name: error for name, error in errors.items() if not error < limits.get(name, GRADIENT)}
    assert not bad, bad
    return got


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 130])
@pytest.mark.parametrize("gate", GATES)
def test_outputs_and_all_gradients_equal_the_recurrence(gate, tokens):
    compare(*case(gate, (tokens,), seed=tokens, heads=1, key_dim=32, value_dim=32), chunk=64)


@pytest.mark.parametrize("chunk", [16, 32])
@pytest.mark.parametrize("gate", GATES)
def test_smaller_chunks(gate, chunk):
    compare(*case(gate, (50,), seed=chunk, heads=1, key_dim=32, value_dim=32), chunk=chunk)


@pytest.mark.parametrize("gate", GATES)
def test_packed_documents_with_states_grouped_heads_and_unequal_dims(gate):
    shape = dict(heads=1, group=2, key_dim=32, value_dim=64, states=True)
    compare(*case(gate, (1, 33, 1, 16), seed=3, **shape), chunk=32)


@pytest.mark.parametrize("dims", [(32, 64), (24, 40), (6, 100)])
def test_other_dims_are_padded(dims):
    compare(
        *case("init", (20, 3), seed=4, heads=2, key_dim=dims[0], value_dim=dims[1], states=True), chunk=16
    )


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(128, 128), (256, 64), (64, 256)])
def test_the_large_head_dims(dims):
    compare(
        *case("checkpoint", (40,), seed=5, heads=1, key_dim=dims[0], value_dim=dims[1], states=True), chunk=32
    )


@pytest.mark.parametrize("gate", ["checkpoint", "slow"])
@pytest.mark.parametrize("segment_chunks", [1, 2])
def test_segment_parallel_scan_equals_the_recurrence(gate, segment_chunks):
    shape = dict(heads=1, key_dim=32, value_dim=32, states=True)
    compare(*case(gate, (70, 1, 40), seed=6, **shape), chunk=16, segment_chunks=segment_chunks)


def test_segments_change_nothing_but_rounding():
    segments, tensors, lower_bound = case("slow", (60,), seed=7, heads=1, key_dim=32, value_dim=32)
    tensors = cast(tensors, torch.float32)
    whole = results(triton_kda.kda, tensors, segments, lower_bound, chunk=16, segment_chunks=0)
    parts = results(triton_kda.kda, tensors, segments, lower_bound, chunk=16, segment_chunks=2)
    assert max(relative_error(parts[name], whole[name]) for name in whole) < OUTPUT


@pytest.mark.parametrize("gate", GATES)
def test_bfloat16_inputs(gate):
    segments, tensors, lower_bound = case(gate, (37, 1), seed=8, heads=1, key_dim=32, value_dim=32)
    halves = [x.detach().bfloat16().requires_grad_() for x in tensors[:5]]
    halves += [x.detach().float().requires_grad_() for x in tensors[5:]]
    wide = [x.detach().double().requires_grad_() for x in halves]
    want = results(naive.kda, wide, segments, lower_bound)
    with poisoned_empties():
        got = results(triton_kda.kda, halves, segments, lower_bound, chunk=32)
    assert got["o"].dtype == torch.bfloat16 and got["df"].dtype == torch.bfloat16
    errors = {name: relative_error(got[name], want[name]) for name in want}
    assert max(errors.values()) < BF16, errors


@pytest.mark.parametrize("regime", REGIMES)
def test_the_roundings_of_a_gpu_stay_small_in_every_gate_regime(regime, monkeypatch):
    """bfloat16 tensors between the launches and operands of every product, float16 inside the inverse:
    against float64."""
    segments, tensors, lower_bound = inputs(
        (100, 1, 20), heads=1, key_dim=32, value_dim=32, states=True, regime=regime
    )
    leaves = [
        x.detach().to(torch.bfloat16 if i < 5 else torch.float32).requires_grad_()
        for i, x in enumerate(tensors)
    ]
    want = results(naive.kda, [x.detach().double().requires_grad_() for x in leaves], segments, lower_bound)
    round_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(triton_kda, "dot_dtype", lambda dtype, kernel: dtype)
    monkeypatch.setattr(triton_kda, "_precision", lambda *_: {"DOT": tl.float32, "PREC": "ieee"})
    found = results(triton_kda.kda, leaves, segments, lower_bound, chunk=64, segment_chunks=0)
    distance = lambda name: ((found[name].double() - want[name]).norm() / want[name].norm()).item()
    # a saturated gate has a true gradient near 1e-12 of the others: nothing to be relative to
    names = want.keys() - ({"df", "dA_log", "ddt_bias"} if regime == "saturated" else set())
    errors = {name: distance(name) for name in names}
    assert 1e-4 < errors["o"], "nothing was rounded"
    limits = {name: SUM_ROUNDED if name in ("db", "dA_log", "ddt_bias") else ROUNDED for name in errors}
    bad = {name: error for name, error in errors.items() if not error < limits[name]}
    assert not bad, bad


@pytest.mark.parametrize("gate", ["init", "bounded"])
def test_a_nan_in_the_gate_reaches_the_output_and_its_gradient(gate, monkeypatch):
    """As on a GPU, where arguments are not looked at. What the compiler makes of the clamp: test_aot_kda. It
    fills its chunk (0 times NaN), and neither an earlier chunk nor another document."""
    monkeypatch.setattr(triton_support, "checks_wanted", lambda tensor: False)
    segments, tensors, lower_bound = case(gate, (40, 9), seed=12, heads=1, key_dim=32, value_dim=32)
    with torch.no_grad():
        tensors[3][20, 0, 7] = math.nan
    found = results(triton_kda.kda, cast(tensors, torch.float32), segments, lower_bound, chunk=16)
    assert found["o"][20:40].isnan().all()
    assert found["o"][:16].isfinite().all() and found["o"][40:].isfinite().all()
    assert found["df"][20, 0, 7].isnan()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("cut", [1, 17, 40])
def test_the_future_is_not_seen_bit_for_bit(gate, cut):
    segments, tensors, lower_bound = case(gate, (70,), seed=9, heads=1, key_dim=32, value_dim=32)
    now = [x.detach().float() for x in tensors]
    later = [x.clone() for x in now]
    for x in later[:5]:
        x[cut:] = 3 * x[cut:].flip(0) - 1
    first, _ = triton_kda.kda(*now, segments, lower_bound=lower_bound, chunk=64)
    second, _ = triton_kda.kda(*later, segments, lower_bound=lower_bound, chunk=64)
    assert torch.equal(first[:cut], second[:cut])
    assert not torch.equal(first[cut:], second[cut:])


def test_gradients_of_the_past_do_not_see_the_future_beyond_the_loss():
    """dq_t, t < cut, of a loss on o[:cut] is bit for bit the same whatever stands at and after cut."""
    segments, tensors, lower_bound = case("bounded", (40,), seed=10, heads=1, key_dim=32, value_dim=32)
    found = []
    for change in (0.0, 2.0):
        leaves = cast(tensors, torch.float32)
        with torch.no_grad():
            for x in leaves[:5]:
                x[23:] += change
        o, _ = triton_kda.kda(*leaves, segments, lower_bound=lower_bound, chunk=64)
        found.append([g[:23] for g in torch.autograd.grad(o[:23].square().sum(), leaves[:5])])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_packed_equals_separate_bit_for_bit():
    lengths = (1, 20, 1, 33)
    segments, tensors, lower_bound = case("init", lengths, seed=11, heads=1, key_dim=32, value_dim=32)
    leaves = cast(tensors, torch.float32)
    weight = torch.randn(segments.total, 1, 32)
    o, _ = triton_kda.kda(*leaves, segments, lower_bound=lower_bound, chunk=32)
    together = [o, *torch.autograd.grad((o * weight).sum(), leaves)]
    apart = []
    for n, length in enumerate(lengths):
        rows = slice(segments.offsets[n], segments.offsets[n] + length)
        mine = [x.detach()[rows].clone().requires_grad_() for x in leaves[:5]]
        mine += [x.detach().clone().requires_grad_() for x in leaves[5:]]
        o, _ = triton_kda.kda(*mine, Segments((length,)), lower_bound=lower_bound, chunk=32)
        apart.append([o, *torch.autograd.grad((o * weight[rows]).sum(), mine)])
    for name, whole, parts in zip(("o", *NAMES), together, zip(*apart)):
        if name in ("A_log", "dt_bias"):
            assert relative_error(sum(parts), whole) < OUTPUT
        else:
            assert torch.equal(whole, torch.cat(parts)), name


def test_a_document_in_two_calls_equals_one_call():
    segments, tensors, lower_bound = case("slow", (60,), seed=12, heads=1, key_dim=32, value_dim=32)
    tensors = [x.detach().float() for x in tensors]
    whole, final = triton_kda.kda(
        *tensors, segments, lower_bound=lower_bound, output_final_state=True, chunk=16
    )
    state, parts = None, []
    for rows in (slice(0, 23), slice(23, 60)):
        mine = [*(x[rows] for x in tensors[:5]), *tensors[5:]]
        o, state = triton_kda.kda(
            *mine,
            Segments((rows.stop - rows.start,)),
            lower_bound=lower_bound,
            initial_state_NGKV=state,
            output_final_state=True,
            chunk=16,
        )
        parts.append(o)
    assert relative_error(torch.cat(parts), whole) < OUTPUT and relative_error(state, final) < OUTPUT


def test_slices_of_a_joint_projection_are_read_in_place():
    segments, tensors, lower_bound = case("init", (21,), seed=13, heads=2, key_dim=32, value_dim=32)
    q, k, v, f, b, A_log, dt_bias = (x.detach().float() for x in tensors)
    joint = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1), b], dim=1)
    parts = [joint[:, 64 * i : 64 * i + 64].unflatten(1, (2, 32)) for i in range(3)]
    want, _ = triton_kda.kda(q, k, v, f, b, A_log, dt_bias, segments, lower_bound=lower_bound, chunk=16)
    got, _ = triton_kda.kda(
        *parts, f, joint[:, 192:], A_log, dt_bias, segments, lower_bound=lower_bound, chunk=16
    )
    assert torch.equal(got, want)


def test_two_runs_give_the_same_bits():
    segments, tensors, lower_bound = case("bounded", (37,), seed=14, heads=1, key_dim=32, value_dim=32)
    tensors = cast(tensors, torch.float32)
    first, second = (results(triton_kda.kda, tensors, segments, lower_bound, chunk=32) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_empty_row_gives_an_empty_row():
    _, tensors, _ = case("init", (3,), seed=15, heads=1, key_dim=32, value_dim=32)
    tensors = [x.detach().float() for x in tensors]
    o, final = triton_kda.kda(
        *(x[:0] for x in tensors[:5]), *tensors[5:], Segments(()), output_final_state=True
    )
    assert o.shape == (0, 1, 32) and final.shape == (0, 1, 32, 32)


def _bad(index, change):
    return lambda tensors: [change(x) if i == index else x for i, x in enumerate(tensors)]


BAD = {
    "q dtype": (_bad(0, lambda x: x.double()), "q is torch.float64"),
    "v dtype": (_bad(2, lambda x: x.bfloat16()), "v is torch.bfloat16"),
    "int b": (_bad(4, lambda x: x.int()), "b is torch.int32"),
    "q shape": (_bad(0, lambda x: x[..., :16]), "q"),
    "k ndim": (_bad(1, lambda x: x.flatten(1)), "k is"),
    "f shape": (_bad(3, lambda x: x[:, :, :16]), "f is"),
    "b shape": (_bad(4, lambda x: x[:5]), "b is"),
    "v strides": (_bad(2, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)), "v has strides"),
    "A_log shape": (_bad(5, lambda x: x[:1]), "A_log is"),
    "dt_bias shape": (_bad(6, lambda x: x.flatten()), "dt_bias is"),
    "f NaN": (_bad(3, lambda x: x.index_fill(0, torch.tensor([2]), torch.nan)), "f holds NaN"),
    "A_log NaN": (_bad(5, lambda x: x * torch.nan), "A_log holds NaN"),
    "tokens": (lambda tensors: [x[:6] for x in tensors[:5]] + tensors[5:], "q"),
    "K over 256": (
        lambda tensors: [
            torch.zeros(7, 2, 300),
            torch.zeros(7, 2, 300),
            tensors[2],
            torch.zeros(7, 2, 300),
            tensors[4],
            tensors[5],
            torch.zeros(2, 300),
        ],
        "q is 300",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    segments, tensors, _ = case("init", (7,), seed=16, heads=2, key_dim=32, value_dim=32)
    change, named = BAD[name]
    with pytest.raises(ValueError, match=named):
        triton_kda.kda(*change([x.detach().float() for x in tensors]), segments)


def test_bad_options_are_named():
    segments, tensors, _ = case("init", (7,), seed=17, heads=2, key_dim=32, value_dim=32)
    tensors = [x.detach().float() for x in tensors]
    state = torch.zeros(1, 2, 32, 32)
    for options, named in (
        (dict(chunk=48), "chunk=48"),
        (dict(lower_bound=1.0), "lower_bound=1.0"),
        (dict(initial_state_NGKV=state.bfloat16()), "initial_state is torch.bfloat16"),
        (dict(initial_state_NGKV=state[:, :1]), "initial_state is"),
    ):
        with pytest.raises(ValueError, match=named):
            triton_kda.kda(*tensors, segments, **options)
    with pytest.raises(ValueError):
        triton_kda.kda(*tensors, Segments((4,)))


def test_more_documents_than_a_grid_has_blocks():
    tokens = 65_536
    q, f, b = torch.zeros(tokens, 1, 32), torch.zeros(tokens, 1, 32), torch.zeros(tokens, 1)
    with pytest.raises(ValueError, match=r"65,536 documents .* at most 65,535: split the batch"):
        triton_kda.kda(
            q, q, q, f, b, torch.zeros(1), torch.zeros(1, 32), Segments((1,) * tokens), segment_chunks=0
        )
