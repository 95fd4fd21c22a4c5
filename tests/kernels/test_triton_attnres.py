"""Triton Attention Residuals through the interpreter against the definition in float64: outputs and all
gradients."""

import pytest
import torch
from triton_cases import needs_interpreter, poisoned_empties, relative_error, values_and_gradients

from earlyfusion.kernels.attnres import fused, naive, triton_merge, triton_phase1
from earlyfusion.kernels.launch import column_tile

pytestmark = needs_interpreter
EPS, NORM_EPS = 1e-5, 1e-6
FP32 = 5e-5  # relative to the largest entry; logits reach 30 here, and a softmax amplifies their last bits
FP16 = 4e-3  # one rounding of outputs and gradients to 11 bits, with cancelling terms in dv
SHAPES = [
    (1, 1, 1, 16),
    (1, 4, 7, 24),
    (3, 2, 5, 40),
    (5, 6, 9, 144),
    (9, 3, 4, 96),
    (17, 1, 3, 32),
]  # n, S, T, D


def tensors(n, S, T, D, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sources = [(draw(T, D) * (1 + i)).to(dtype) for i in range(n)]
    return sources, draw(S, D).float(), draw(S, T, D).to(dtype), draw(S, T).float()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_phase1_equals_the_definition(shape, seed):
    sources, qw, do, dlse = tensors(*shape, seed=seed)
    got = values_and_gradients(lambda q, *v: triton_phase1.phase1(v, q, EPS), [qw, *sources], [do, dlse])
    wide = [x.double() for x in (qw, *sources)]
    want = values_and_gradients(lambda q, *v: naive.phase1(v, q, EPS), wide, [do.double(), dlse.double()])
    scale = max(1.0, want[2].abs().max().item()) if shape[0] == 1 else None
    for g, w in zip(got, want):
        if scale is not None and w.abs().max() < 1e-9:  # one source: the query has no influence on o
            assert g.abs().max() < FP32 * scale
        else:
            assert relative_error(g, w) < FP32


def test_half_precision_sources_lose_only_the_rounding_of_results():
    sources, qw, do, dlse = tensors(5, 6, 9, 144, torch.float16)
    got = values_and_gradients(lambda q, *v: triton_phase1.phase1(v, q, EPS), [qw, *sources], [do, dlse])
    wide = [x.double() for x in (qw, *sources)]
    want = values_and_gradients(lambda q, *v: naive.phase1(v, q, EPS), wide, [do.double(), dlse.double()])
    assert got[0].dtype == torch.float16 and got[1].dtype == torch.float32 and got[2].dtype == torch.float32
    assert relative_error(got[1], want[1]) < FP32  # scores are exact products of 16-bit parts
    for g, w in zip(got, want):
        assert relative_error(g, w) < FP16


@pytest.mark.parametrize("shape", [(1, 1, 16), (9, 3, 40), (13, 2, 144), (5, 1, 20)])
def test_merge_equals_the_definition(shape):
    T, n, D = shape
    sources, qw, do, lse = tensors(n, 2, T, D)
    leaves = [do[0].flip(0), lse[0], sources[0], qw[0]]
    got = values_and_gradients(lambda *a: triton_merge.merge(*a, EPS), leaves, [do[1]])
    want = values_and_gradients(
        lambda *a: naive.merge(*a, EPS), [x.double() for x in leaves], [do[1].double()]
    )
    for g, w in zip(got, want):
        assert relative_error(g, w) < FP32


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, FP32), (torch.float16, FP16)])
@pytest.mark.parametrize("T,D", [(1, 16), (11, 144), (30, 40)])
def test_sum_merge_and_norm_in_one_pass_equal_the_three_operations(T, D, dtype, tolerance):
    sources, qw, do, lse = tensors(3, 2, T, D, dtype)
    leaves = [sources[0], lse[0], sources[1], sources[2], qw[0], 1 + 0.1 * qw[1]]
    got = values_and_gradients(lambda *a: triton_merge.step(*a, EPS, NORM_EPS), leaves, list(do))
    wide = [x.double() for x in leaves]
    want = values_and_gradients(lambda *a: fused.step_naive(*a, EPS, NORM_EPS), wide, list(do.double()))
    for g, w in zip(got, want):
        assert relative_error(g, w) < tolerance


def schedule(open_block, step, sources, outs, qw, norms):
    """Two blocks of two sub-layers whose outputs are given: all inputs the sub-layers see, and the last block
    sum."""
    seen = []
    for block in range(2):
        o, lse, sources = open_block(sources, qw[2 * block : 2 * block + 2], EPS)
        first, second = outs[2 * block], outs[2 * block + 1]
        seen.append(o[0])
        summed, x = step(o[1], lse[1], first, None, qw[2 * block + 1], norms[block], EPS, NORM_EPS)
        seen.append(x)
        sources = [*sources, summed + second]
    return (*seen, sources[-1])


def test_blocks_with_carried_gradients_equal_the_definition_end_to_end():
    """The gradient of a source collects the later blocks inside the kernel of the earlier one."""
    (embedding,), qw, outs, _ = tensors(1, 4, 7, 48)
    norms = 1 + 0.1 * tensors(1, 2, 7, 48, seed=5)[1]
    cotangents = list(tensors(1, 5, 7, 48, seed=7)[2])

    def run(open_block, step, dtype):
        leaves = [x.to(dtype) for x in (embedding, outs, qw, norms)]
        return values_and_gradients(
            lambda e, f, q, g: schedule(open_block, step, [e], f.unbind(), q, g),
            leaves,
            [c.to(dtype) for c in cotangents],
        )

    got = run(triton_phase1.open_block, triton_merge.step, torch.float32)
    want = run(fused.open_block_naive, fused.step_naive, torch.float64)
    torch_form = run(fused.open_block, fused.step, torch.float64)
    for g, w, t in zip(got, want, torch_form):
        assert relative_error(g, w) < FP32 and relative_error(t, w) < 1e-10


def test_two_phases_equal_one_phase():
    sources, qw, partials, _ = tensors(4, 3, 6, 64)
    o, lse = triton_phase1.phase1(sources, qw, EPS)
    for index in range(3):
        h = triton_merge.merge(o[index], lse[index], partials[index], qw[index], EPS)
        want = naive.mix([x.double() for x in (*sources, partials[index])], qw[index].double(), EPS)
        assert relative_error(h, want) < FP32


def test_a_second_run_is_bit_identical():
    sources, qw, do, dlse = tensors(5, 4, 23, 48)
    runs = [
        values_and_gradients(lambda q, *v: triton_phase1.phase1(v, q, EPS), [qw, *sources], [do, dlse])
        for _ in range(2)
    ]
    leaves = [sources[0], dlse[0], sources[1], sources[2], qw[0], qw[1]]
    steps = [
        values_and_gradients(lambda *a: triton_merge.step(*a, EPS, NORM_EPS), leaves, list(do[:2]))
        for _ in range(2)
    ]
    for a, b in zip(runs[0] + steps[0], runs[1] + steps[1]):
        assert torch.equal(a, b)


def test_tokens_do_not_influence_each_other():
    """Rows of a tile share a product; the others must not notice a huge one."""
    sources, qw, _, _ = tensors(3, 2, 6, 32)
    clean = triton_phase1.phase1(sources, qw, EPS)[0]
    sources[1][2] = 1e30
    dirty = triton_phase1.phase1(sources, qw, EPS)[0]
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(clean[:, kept], dirty[:, kept])


def test_an_empty_row_is_fine():
    sources, qw, do, dlse = tensors(2, 2, 0, 32)
    o, lse, dqw, *_ = values_and_gradients(
        lambda q, *v: triton_phase1.phase1(v, q, EPS), [qw, *sources], [do, dlse]
    )
    assert o.shape == (2, 0, 32) and lse.shape == (2, 0) and (dqw == 0).all()


@pytest.mark.parametrize(
    "width,tile", [(2304, 256), (2560, 256), (7168, 256), (4096, 256), (1168, 32), (48, 16)]
)
def test_column_tiles_waste_few_lanes_on_the_hidden_sizes_in_use(width, tile):
    assert column_tile(width, 256) == tile and -(-width // tile) * tile <= 1.04 * width


def test_bad_input_names_the_argument():
    sources, qw, _, lse = tensors(2, 2, 4, 32)
    cases = [
        (r"sources\[1\]", lambda: triton_phase1.phase1([sources[0], sources[1].half()], qw, EPS)),
        (r"sources\[0\].*contiguous", lambda: triton_phase1.phase1([torch.randn(32, 4).T] * 2, qw, EPS)),
        ("qw_SD", lambda: triton_phase1.phase1(sources, qw.long(), EPS)),
        ("no sources", lambda: triton_phase1.phase1([], qw, EPS)),
        ("o1_TD", lambda: triton_merge.merge(sources[0][:3], lse[0], sources[1], qw[0], EPS)),
        ("lse1_T", lambda: triton_merge.merge(sources[0], lse[0].half(), sources[1], qw[0], EPS)),
        ("partial_TD", lambda: triton_merge.merge(sources[0], lse[0], sources[1].long(), qw[0], EPS)),
        (
            "out_TD",
            lambda: triton_merge.step(sources[0], lse[0], sources[1], qw, qw[0], qw[1], EPS, NORM_EPS),
        ),
        (
            "norm_D",
            lambda: triton_merge.step(sources[0], lse[0], sources[1], sources[0], qw[0], qw, EPS, NORM_EPS),
        ),
    ]
    for match, call in cases:
        with pytest.raises(ValueError, match=match), poisoned_empties():
            call()
