"""The chunked KDA against the definition: values, every gradient, packing, causality, states, memory."""

import pytest
import torch
from kda_cases import NAMES, call, cast, inputs, results

from earlyfusion.kernels.kda import chunk, naive
from earlyfusion.kernels.segments import Segments

EXACT = 1e-10  # float64 on both sides, values of order 1 to 100
BLOCKS = (16, 32)  # chunk lengths under test: every length below is odd to one of them
PACKED = [
    (1,),
    (15,),
    (16,),
    (17,),
    (63,),
    (64,),
    (65,),
    (130,),
    (3, 1, 1, 40, 16, 7),
    (1, 1, 1, 1),
    (16, 16, 32, 1),
]


def assert_match(found, expected, atol):
    assert found.keys() == expected.keys()
    for name in expected:
        scale = max(expected[name].abs().max().item(), 1.0)
        error = (found[name] - expected[name]).abs().max().item() if expected[name].numel() else 0.0
        assert error <= atol * scale, f"{name}: {error:.1e}"


@pytest.mark.parametrize("regime", ["spread", "bounded"])
@pytest.mark.parametrize("states", [False, True], ids=["flat", "states"])
@pytest.mark.parametrize("lengths", PACKED, ids=str)
def test_outputs_and_all_gradients_match_the_definition(lengths, states, regime):
    for seed in (0, 1):
        segments, tensors, bound = inputs(lengths, seed=seed, states=states, regime=regime)
        expected = results(naive.kda, tensors, segments, bound)
        for size in BLOCKS:
            assert_match(results(chunk.kda, tensors, segments, bound, chunk=size), expected, EXACT)


@pytest.mark.parametrize("shape", [(1, 4, 8, 5), (3, 2, 4, 16), (2, 1, 16, 2)], ids=str)
@pytest.mark.parametrize("states", [False, True], ids=["flat", "states"])
def test_grouped_heads_and_unequal_head_dims_match_the_definition(shape, states):
    heads, group, key_dim, value_dim = shape
    sizes = {"heads": heads, "group": group, "key_dim": key_dim, "value_dim": value_dim}
    segments, tensors, bound = inputs((21, 1, 50), seed=2, states=states, **sizes)
    expected = results(naive.kda, tensors, segments, bound)
    assert_match(results(chunk.kda, tensors, segments, bound), expected, EXACT)


@pytest.mark.parametrize("size", [2, 4, 8, 64, 128])
def test_the_chunk_length_does_not_change_the_result(size):
    segments, tensors, bound = inputs((45, 2, 90), seed=4, regime="strong")
    expected = results(chunk.kda, tensors, segments, bound)
    assert_match(results(chunk.kda, tensors, segments, bound, chunk=size), expected, EXACT)


def test_an_explicit_scale_is_used():
    segments, tensors, bound = inputs((20, 9), seed=1)
    ours, _ = chunk.kda(*tensors, segments, lower_bound=bound, scale=0.7)
    law, _ = naive.kda(*tensors, segments, lower_bound=bound, scale=0.7)
    torch.testing.assert_close(ours, law, rtol=0, atol=EXACT)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_gradcheck(bound):
    segments, tensors, _ = inputs((3, 1, 5), seed=5, heads=1, group=2, key_dim=3, value_dim=2, states=True)

    def op(*tensors):
        return call(chunk.kda, tensors, segments, bound, chunk=4)

    assert torch.autograd.gradcheck(op, tensors)


@pytest.mark.parametrize("regime", ["init", "bounded", "brutal"])
def test_the_past_is_bit_identical_whatever_the_future_holds(regime):
    segments, tensors, bound = inputs((100, 30), seed=6, key_dim=32, value_dim=32, regime=regime)
    tensors = cast(tensors, torch.float32)
    first, _ = call(chunk.kda, tensors, segments, bound)
    generator = torch.Generator().manual_seed(1)
    for t in (1, 16, 37, 63, 64, 99, 100, 115):
        changed = [x.detach().clone() for x in tensors]
        for x in changed[:5]:
            x[t:] = 3 * torch.randn(x[t:].shape, generator=generator)
        second, _ = call(chunk.kda, changed, segments, bound)
        assert torch.equal(first[:t], second[:t]), f"outputs before token {t} changed"
        assert not torch.equal(first[t:], second[t:])


def test_the_future_gets_no_gradient_from_the_past():
    segments, tensors, bound = inputs((100, 30), seed=7)
    tensors = cast(tensors, torch.float32)
    o, _ = call(chunk.kda, tensors, segments, bound)
    gradients = torch.autograd.grad(o[:41].square().sum(), tensors)
    for name, gradient in zip(NAMES[:5], gradients):
        assert gradient[:41].abs().sum() > 0, name
        assert not gradient[41:].any(), name


@pytest.mark.parametrize("seed", [0, 1])
def test_packed_documents_equal_separate_documents(seed):
    lengths = (33, 1, 64, 17, 2)
    segments, tensors, bound = inputs(lengths, seed=seed)
    packed = results(chunk.kda, tensors, segments, bound)["o"]
    for start, length in zip(segments.offsets, lengths):
        alone = [x[start : start + length] for x in tensors[:5]] + tensors[5:]
        o, _ = call(chunk.kda, alone, Segments((length,)), bound)
        torch.testing.assert_close(packed[start : start + length], o, rtol=0, atol=EXACT)


def test_packed_documents_do_not_leak_a_single_bit():
    segments, tensors, bound = inputs((33, 5, 50), seed=8)
    tensors = cast(tensors, torch.float32)
    o, _ = call(chunk.kda, tensors, segments, bound)
    changed = [x.detach().clone() for x in tensors]
    for x in changed[:5]:
        x[33:38] *= -2.0
    other, _ = call(chunk.kda, changed, segments, bound)
    rest = torch.cat([torch.arange(33), torch.arange(38, 88)])
    assert torch.equal(o[rest], other[rest])
    gradients = torch.autograd.grad(o[33:38].square().sum(), tensors)
    for name, gradient in zip(NAMES[:5], gradients):
        assert gradient[33:38].abs().sum() > 0, name
        assert not gradient[rest].any(), name


@pytest.mark.parametrize("cut", [1, 16, 31, 50])
def test_a_document_cut_in_two_continues_through_its_state(cut):
    segments, tensors, bound = inputs((70,), seed=9, states=True)
    whole = results(chunk.kda, tensors, segments, bound)
    head = [x[:cut] for x in tensors[:5]] + tensors[5:]
    o_head, state = call(chunk.kda, head, Segments((cut,)), bound)
    tail = [x[cut:] for x in tensors[:5]] + tensors[5:7] + [state]
    o_tail, final = call(chunk.kda, tail, Segments((70 - cut,)), bound)
    torch.testing.assert_close(torch.cat([o_head, o_tail]), whole["o"], rtol=0, atol=EXACT)
    torch.testing.assert_close(final, whole["final_state"], rtol=0, atol=EXACT)


def test_asking_for_states_does_not_change_the_outputs():
    segments, tensors, bound = inputs((33, 1, 64, 17, 2), seed=10)
    flat, nothing = chunk.kda(*tensors, segments, lower_bound=bound)
    aligned, final = chunk.kda(*tensors, segments, lower_bound=bound, output_final_state=True)
    _, law = naive.kda(*tensors, segments, lower_bound=bound, output_final_state=True)
    assert nothing is None
    torch.testing.assert_close(flat, aligned, rtol=0, atol=EXACT)
    torch.testing.assert_close(final, law, rtol=0, atol=EXACT)


def test_autocast_and_bfloat16_inputs_keep_the_inside_in_float32():
    segments, tensors, bound = inputs((90, 40), seed=11, key_dim=32, value_dim=32)
    rounded = cast(cast(tensors, torch.bfloat16), torch.float64)
    expected = results(naive.kda, rounded, segments, bound)
    half = cast(rounded, torch.bfloat16)
    half[5:] = cast(rounded[5:], torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(chunk.kda, half, segments, bound)
    assert found["o"].dtype == torch.bfloat16 and found["dA_log"].dtype == torch.float32
    for name, value in expected.items():
        error = (found[name].double() - value).square().mean().sqrt() / value.square().mean().sqrt()
        # Only the result is rounded, by at most 2**-9 of each element; parameter gradients are not rounded at
        # all.
        assert error < (1e-4 if name in ("dA_log", "ddt_bias") else 2**-9), f"{name}: {error:.1e}"


def test_an_empty_row_gives_an_empty_result():
    segments, tensors, bound = inputs((), heads=2, key_dim=8, value_dim=6)
    o, final = chunk.kda(*tensors, segments, lower_bound=bound, output_final_state=True)
    assert o.shape == (0, 2, 6) and final.shape == (0, 2, 8, 6)
    o.sum().backward()


def test_a_chunk_that_is_not_a_power_of_two_is_refused():
    segments, tensors, bound = inputs((4,))
    with pytest.raises(ValueError, match="power of two"):
        chunk.kda(*tensors, segments, lower_bound=bound, chunk=24)


def test_it_saves_less_than_a_tenth_of_what_the_transformers_form_saves():
    module = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    reference = module.chunk_kimi_delta_attention.__wrapped__
    segments, tensors, bound = inputs((256,), heads=4, key_dim=32, value_dim=32, regime="init")
    tensors = cast(tensors, torch.float32)

    def saved_bytes(run):
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = run()
        del result
        return sum(storage.nbytes() for storage in storages.values())

    q, k, v, f, b, *_ = tensors
    ours = saved_bytes(lambda: call(chunk.kda, tensors, segments, bound))
    theirs = saved_bytes(
        lambda: reference(
            q[None], k[None], v[None], -f[None].exp(), b[None].sigmoid(), use_qk_l2norm_in_kernel=True
        )
    )
    assert ours < theirs / 10, (ours, theirs)
