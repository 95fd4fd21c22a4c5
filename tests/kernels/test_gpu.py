"""On a GPU: every operation as it is dispatched, in bfloat16 against its definition in float64, outputs and
gradients, bit for bit alike twice; and what only a device shows: graphs, syncs, memory, reads outside."""

import os

import pytest
import torch
from cases import randn as draw
from kda_cases import call, halves, inputs, results

from earlyfusion.kernels.attention import naive as attention_naive
from earlyfusion.kernels.dispatch import REGISTRY, load, resolve
from earlyfusion.kernels.kda import naive as kda_naive
from earlyfusion.kernels.muon import naive as muon_naive
from earlyfusion.kernels.muon.newton_schulz import prefers_gram
from earlyfusion.kernels.segments import Segments

pytestmark = pytest.mark.gpu
# 2-norm, relative: one rounding to 8 bits of inputs' products, results and gradients.
BF16 = 2e-2
# And along a recurrence.
KDA = 3e-2
LENGTHS = (300, 1, 65, 1024, 2)
T = sum(LENGTHS)
FP32 = torch.float32


def device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; none is visible")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        pytest.fail(
            "TRITON_INTERPRET is set: kernels would be interpreted, and bfloat16 would be wrong; unset it"
        )
    return torch.device("cuda", torch.cuda.current_device())


def randn(*shape, seed=0, dtype=torch.bfloat16):
    return draw(*shape, seed=seed, dtype=dtype).to(device())


def distance(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def compare(op, run, leaves, tolerance=BF16, function=None):
    """run(op, *leaves) -> outputs that are differentiated, against the law on float64 copies."""
    # As a user gets it, unless a form is named.
    function = resolve(op, device()) if function is None else function

    def values(form, leaves):
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = run(form, *leaves)
        out = [out] if isinstance(out, torch.Tensor) else list(out)
        cotangents = [randn(*o.shape, seed=50 + i).to(o.dtype) for i, o in enumerate(out)]
        return [*(o.detach() for o in out), *torch.autograd.grad(out, leaves, cotangents)]

    # Twice: what adds up with atomics differs from run to run.
    first, second = values(function, leaves), values(function, leaves)
    want = values(load(REGISTRY[op]["naive"]), [x.double() for x in leaves])
    for index, (a, b, w) in enumerate(zip(first, second, want, strict=True)):
        assert torch.equal(a, b), f"tensor {index} differs from run to run"
        assert torch.isfinite(a).all() and distance(a, w) < tolerance, f"tensor {index}: {distance(a, w):.2e}"


SEEDS = pytest.mark.parametrize("seed", [0, 1])
# K, V, group.
SHAPES = [(128, 128, 1), (64, 128, 2), (32, 32, 1), (128, 256, 1), (256, 256, 1)]


@pytest.mark.parametrize("segment_chunks", [None, 0, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("regime", ["bounded", "init", "brutal", "slow"])
def test_kda_in_four_gate_regimes(regime, shape, segment_chunks):
    dims = dict(zip(("key_dim", "value_dim", "group"), shape))
    segments, tensors, bound = inputs((700, 1, 64, 333), regime=regime, states=True, **dims)
    options = {} if segment_chunks is None else {"segment_chunks": segment_chunks}
    run = lambda op, *x: call(op, x, segments, bound, **({} if op is kda_naive.kda else options))
    compare("kda", run, [x.to(device()) for x in halves(tensors)], KDA)


def test_kda_in_float32():
    segments, tensors, bound = inputs((1, 130, 17), key_dim=64, value_dim=64, states=True)
    wide = [x.detach().to(device()).requires_grad_() for x in tensors]
    single = [x.detach().float().requires_grad_() for x in wide]
    found = results(resolve("kda", device()), single, segments, bound)
    for name, want in results(kda_naive.kda, wide, segments, bound).items():
        assert distance(found[name], want) < 1e-4, name


def test_changing_the_future_leaves_the_past_bit_identical():
    segments, tensors, bound = inputs((300,), key_dim=128, value_dim=128, regime="brutal")
    leaves = [x.detach().to(device()) for x in halves(tensors)]
    before, _ = call(resolve("kda", device()), leaves, segments, bound)
    for x in leaves[:5]:
        x[170:] = x[170:] * -3 + 1
    after, _ = call(resolve("kda", device()), leaves, segments, bound)
    assert torch.equal(before[:170], after[:170]) and not torch.equal(before[170:], after[170:])


def test_short_convolution():
    leaves = randn(T, 256), randn(256, 4, seed=1, dtype=FP32)
    compare("short_conv", lambda op, *x: op(*x, Segments(LENGTHS))[0], leaves)


@SEEDS
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "dispatched"])
@pytest.mark.parametrize(
    "H,D,V,causal",
    [(4, 192, 128, True), (4, 128, 128, True), (4, 72, 72, False), (2, 40, 24, False)],
)
def test_attention(H, D, V, causal, ours, seed):
    from earlyfusion.kernels.attention.triton.flash import FlashAttention

    segments, scale = Segments(LENGTHS), D**-0.5
    # torch's kernel would be preferred for some of the shapes.
    mine = lambda q, k, v, segments, causal, scale: FlashAttention.apply(q, k, v, segments, causal, scale)
    run = lambda op, *x: op(*x, segments, causal=causal, scale=scale)[0]
    leaves = randn(T, H, D, seed=seed), randn(T, H, D, seed=1), randn(T, H, V, seed=2)
    compare("attention", run, leaves, function=mine if ours else None)
    options = {"causal": causal, "scale": scale}
    _, lse = resolve("attention", device())(*leaves, segments, **options)
    _, want = attention_naive.attention(*(x.double() for x in leaves), segments, **options)
    assert (lse - want).abs().max() < 2e-2


def test_new_tokens_after_earlier_keys_with_logits_of_twenty():
    keys, new = Segments((700, 33, 5000)), Segments((512, 1, 90))
    q, k, v = (randn(keys.total, 8, width, seed=i) for i, width in enumerate((192, 192, 128)))
    ends = torch.cat([torch.arange(end - n, end) for end, n in zip(keys.offsets[1:], new.lengths)])
    # Five standard deviations.
    scale = 20 / (192**0.5 * 5)
    got = resolve("attention_append", device())(q[ends.to(device())], k, v, new, keys, scale=scale)
    want, _ = attention_naive.attention(q.double(), k.double(), v.double(), keys, causal=True, scale=scale)
    assert distance(got, want[ends.to(device())]) < BF16


@pytest.mark.parametrize("H,D", [(16, 72), (12, 128)])
def test_rope(H, D):
    angles = torch.rand(777, D // 2, device=device()) * 6
    turns = torch.polar(torch.ones_like(angles), angles)
    compare("qkv_rope", lambda op, x: op(x, turns), [randn(777, 3, H, D)])


def test_decode_inside_a_cuda_graph():
    B, H, R, rank, page, most = 5, 32, 576, 512, 64, 40
    query, pages = randn(B, H, R), randn(B * most, page, R, seed=1)
    table = torch.randperm(B * most, device=device()).int().view(B, most)
    lengths = torch.tensor([1, 64, 65, 1500, 2560], dtype=torch.int32, device=device())
    op = resolve("mla_decode", device())
    want = attention_naive.mla_decode(query.double(), pages.double(), table, lengths, rank, R**-0.5)
    op(query, pages, table, lengths, rank, R**-0.5)
    # Nothing of the step may ask the host.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixed = op(query, pages, table, lengths, rank, R**-0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert distance(mixed, want) < BF16


@SEEDS
@pytest.mark.parametrize(
    "n,S,T,D", [(1, 6, 33, 2304), (5, 6, 129, 2304), (9, 6, 64, 2304), (8, 24, 17, 7168), (40, 1, 31, 2560)]
)
def test_attnres_phase1(n, S, T, D, seed):
    sources = [randn(T, D, seed=seed + i) * (1 + i / 3) for i in range(n)]
    qw = randn(S, D, seed=99, dtype=FP32) / D**0.5
    run = lambda op, q, *v: map(torch.stack, op(v, q, 1e-5)[:2])
    compare("attnres_phase1", run, [qw, *sources])


@SEEDS
@pytest.mark.parametrize("T,D", [(1, 2304), (1000, 2304), (77, 2560), (33, 7168)])
def test_attnres_step(T, D, seed):
    rows = [randn(T, D, seed=seed + i) for i in range(3)]
    vectors = randn(D, seed=4, dtype=FP32) / D**0.5, 1 + 0.1 * randn(D, seed=5, dtype=FP32)
    leaves = [rows[0], randn(T, seed=1, dtype=FP32), *rows[1:], *vectors]
    compare("attnres_step", lambda op, *x: op(*x, 1e-5, 1e-5), leaves)


@SEEDS
@pytest.mark.parametrize("T,J,E,D,F", [(700, 4, 16, 256, 128), (33, 2, 64, 2304, 1024), (50, 3, 5, 96, 72)])
@pytest.mark.parametrize("form", ["torch", "triton"])
def test_experts(T, J, E, D, F, form, seed):
    ids = torch.rand(T, E, device=device()).topk(J, dim=1).indices
    experts = randn(E, 2 * F, D, seed=1) / D**0.5, randn(E, D, F, seed=2) / F**0.5
    leaves = randn(T, D, seed=seed), torch.rand(T, J, device=device()), *experts
    op = load(REGISTRY["moe_experts"][form])
    run = lambda op, x, *rest: op(x, ids, *rest)
    compare("moe_experts", run, leaves, function=op)
    if form == "triton":
        # The torch form needs the loads on the host; this one must not.
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(op, *leaves)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def loss_case(T, D, V):
    labels = torch.randint(0, V, (T,), device=device())
    return [randn(T, D), randn(V, D, seed=1) / D**0.5], labels, torch.rand(T, device=device())


def test_the_loss_and_its_memory():
    leaves, labels, weights = loss_case(2000, 512, 50_000)
    labels[::7] = -100
    compare("linear_cross_entropy", lambda op, *x: op(*x, labels, weights)[0], leaves)
    torch.cuda.reset_peak_memory_stats()
    before, leaves = torch.cuda.memory_allocated(), [x.requires_grad_() for x in leaves]
    resolve("linear_cross_entropy", device())(*leaves, labels, weights)[0].backward()
    full = 2000 * 50_000 * 4
    # Logits in full would take twice this.
    assert torch.cuda.max_memory_allocated() - before < full


def test_log_probabilities():
    leaves, labels, _ = loss_case(500, 256, 20_000)
    compare("token_log_probs", lambda op, *x: op(*x, labels, temperature=0.7)[0], leaves)


def test_a_label_outside_the_vocabulary_gives_nan_not_a_fault():
    (h, weight), _, ones = loss_case(8, 64, 100)
    # 100 is one beyond the last.
    labels = torch.tensor([0, 1, 2, 3, 100, 5, 6, 7], device=device())
    with torch.no_grad():
        _, nll = resolve("linear_cross_entropy", device())(h, weight, labels, torch.ones_like(ones))
    torch.cuda.synchronize()
    assert nll[4].isnan() and nll[[0, 1, 2, 3, 5, 6, 7]].isfinite().all()


@pytest.mark.parametrize("shape", [(8, 512, 1152), (1, 768, 768), (3, 900, 300)])
def test_newton_schulz_as_dispatched(shape):
    G = randn(*shape, dtype=FP32)
    got, want = resolve("newton_schulz", device())(G), muon_naive.newton_schulz(G.double())
    assert distance(got, want) < 0.05
    assert torch.linalg.svdvals(got).max() < torch.linalg.svdvals(want).max() + 0.1
    assert prefers_gram(*shape) == (shape != (1, 768, 768))
