"""On a GPU: attention, RoPE, decode, experts and Muon in bfloat16 against float64, bit-exact from run to
run."""

import pytest
import torch
from gpu_cases import BF16, SEEDS, compare, device, randn

from earlyfusion.kernels.attention import decode, rope
from earlyfusion.kernels.attention import naive as attention_naive
from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.moe import naive as moe_naive
from earlyfusion.kernels.muon import gram, triton_symmetric
from earlyfusion.kernels.muon import naive as muon_naive
from earlyfusion.kernels.segments import Segments

pytestmark = pytest.mark.gpu
LENGTHS = (300, 1, 65, 1024, 2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "H,G,D,V,causal",
    [(4, 4, 192, 128, True), (4, 2, 128, 128, True), (4, 4, 72, 72, False), (2, 1, 40, 24, False)],
)
def test_attention_ours(H, G, D, V, causal, seed):
    """Our own kernels, whatever the dispatch would prefer for the shape."""
    from earlyfusion.kernels.attention.triton import flash as triton_flash

    segments, T = Segments.from_lengths(LENGTHS), sum(LENGTHS)
    leaves = [randn(T, H, D, seed=seed), randn(T, G, D, seed=1), randn(T, G, V, seed=2)]
    scale = D**-0.5
    compare(
        lambda *a: triton_flash._Flash.apply(*a, segments, causal, scale)[0],
        lambda *a: attention_naive.attention(*a, segments, causal=causal, scale=scale)[0],
        leaves,
        [randn(T, H, V, seed=3)],
    )


@pytest.mark.parametrize("D,V", [(192, 128), (72, 72), (128, 128)])
def test_attention_as_dispatched_returns_the_lse(D, V):
    segments, T = Segments.from_lengths(LENGTHS), sum(LENGTHS)
    q, k, v = randn(T, 4, D), randn(T, 4, D, seed=1), randn(T, 4, V, seed=2)
    o, lse = resolve("attention", device())(q, k, v, segments, causal=True, scale=D**-0.5, return_lse=True)
    want, want_lse = attention_naive.attention(
        q.double(), k.double(), v.double(), segments, causal=True, scale=D**-0.5, return_lse=True
    )
    assert ((o - want).norm() / want.norm()).item() < BF16 and (lse - want_lse).abs().max() < 2e-2


def test_a_tower_trains_bit_for_bit_alike_twice():
    segments, T = Segments.from_lengths(LENGTHS), sum(LENGTHS)
    op = resolve("attention", device())
    compare(
        lambda *a: op(*a, segments, causal=False, scale=72**-0.5)[0],
        lambda *a: attention_naive.attention(*a, segments, causal=False, scale=72**-0.5)[0],
        [randn(T, 4, 72, seed=i) for i in range(3)],
        [randn(T, 4, 72, seed=3)],
    )


def test_new_tokens_after_earlier_keys_with_logits_of_twenty():
    keys, new = Segments((700, 33, 5000)), Segments((512, 1, 90))
    q, k, v = (randn(keys.total, 8, width, seed=i) for i, width in enumerate((192, 192, 128)))
    ends = torch.cat([torch.arange(end - n, end) for end, n in zip(keys.offsets[1:], new.lengths)]).to(
        device()
    )
    scale = 20 / (192**0.5 * 5)  # five standard deviations
    got = resolve("attention_append", device())(q[ends], k, v, new, keys, scale=scale)
    want, _ = attention_naive.attention(q.double(), k.double(), v.double(), keys, causal=True, scale=scale)
    assert ((got - want[ends]).norm() / want[ends].norm()).item() < BF16


@pytest.mark.parametrize("H,D", [(16, 72), (12, 128)])
def test_rope(H, D):
    T = 777
    turns = torch.polar(torch.ones(T, D // 2, device=device()), torch.rand(T, D // 2, device=device()) * 6)
    op = resolve("qkv_rope", device())
    compare(
        lambda x: op(x, turns),
        lambda x: rope.qkv_rope_naive(x, turns),
        [randn(T, 3, H, D)],
        [randn(T, H, D, seed=i) for i in range(3)],
    )


def test_decode_inside_a_cuda_graph():
    B, H, R, rank, page, most = 5, 32, 576, 512, 64, 40
    query, pages = randn(B, H, R), randn(B * most, page, R, seed=1)
    table = torch.randperm(B * most, device=device()).int().view(B, most)
    lengths = torch.tensor([1, 64, 65, 1500, 2560], dtype=torch.int32, device=device())
    op = resolve("mla_decode", device())
    want, _ = decode.mla_decode(query.double(), pages.double(), table, lengths, rank, R**-0.5)
    op(query, pages, table, lengths, rank, R**-0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixed, _ = op(query, pages, table, lengths, rank, R**-0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert ((mixed - want).norm() / want.norm()).item() < BF16


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("T,J,E,D,F", [(700, 4, 16, 256, 128), (33, 2, 64, 2304, 1024), (50, 3, 5, 96, 72)])
def test_experts_without_a_host_sync(T, J, E, D, F, seed):
    ids = torch.rand(T, E, device=device()).topk(J, dim=1).indices
    leaves = [
        randn(T, D, seed=seed),
        torch.rand(T, J, device=device()),
        randn(E, 2 * F, D, seed=1) / D**0.5,
        randn(E, D, F, seed=2) / F**0.5,
    ]
    op = resolve("moe_experts", device())
    dy = [randn(T, D, seed=3)]
    compare(
        lambda x, w, g, d: op(x, ids, w, g, d),
        lambda x, w, g, d: moe_naive.moe_experts(x, ids, w, g, d),
        leaves,
        dy,
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(leaves[0], ids, *leaves[1:])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", [(4, 300, 700), (1, 513, 513), (2, 1024, 2304)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_symmetric_product(shape, dtype):
    X = randn(*shape, dtype=dtype) / shape[2] ** 0.5
    added = triton_symmetric.symmetric_product(X, None, 0.0, 1.0)
    assert torch.equal(added, added.mT)
    want = X.double() @ X.double().mT
    assert ((added - want).norm() / want.norm()).item() < BF16
    both = triton_symmetric.symmetric_product(added, added, -2.0, 0.5)
    want = 0.5 * added.double() @ added.double() - 2 * added.double()
    assert ((both - want).norm() / want.norm()).item() < BF16


@pytest.mark.parametrize("shape", [(8, 512, 1152), (1, 768, 768), (3, 900, 300)])
def test_newton_schulz_as_dispatched(shape):
    G = randn(*shape, dtype=torch.float32)
    got, want = resolve("newton_schulz", device())(G), muon_naive.newton_schulz(G.double())
    assert ((got - want).norm() / want.norm()).item() < 0.05
    assert torch.linalg.svdvals(got).max() < torch.linalg.svdvals(want).max() + 0.1
    assert gram.prefers_gram(*shape) == (shape != (1, 768, 768))
