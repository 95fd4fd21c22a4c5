"""Triton flash attention through the interpreter against the definition in float64: outputs, lse and all
gradients."""

import pytest
import torch
from triton_cases import needs_interpreter, poisoned_empties, relative_error, values_and_gradients

from earlyfusion.kernels.attention import naive
from earlyfusion.kernels.attention.max_logit import max_logit
from earlyfusion.kernels.attention.triton import flash as triton_flash
from earlyfusion.kernels.segments import Segments

pytestmark = needs_interpreter
FP32 = 1e-5  # relative to the largest entry; float32 sums in another order
FP16 = 5e-3  # P and dS are rounded to 11 bits
LENGTHS = (37, 1, 16, 33, 2)
SHAPES = [(2, 1, 24, 16), (2, 2, 72, 72), (1, 1, 16, 40)]  # H, G, D, V


def tensors(H, G, D, V, dtype=torch.float32, seed=0, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    T = sum(lengths)
    shapes = ((T, H, D), (T, G, D), (T, G, V), (T, H, V))
    return [torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def run(implementation, leaves, do, causal, lengths=LENGTHS, scale=0.3):
    segments = Segments.from_lengths(lengths)
    found = {}

    def function(q, k, v):
        o, found["lse"] = implementation.attention(
            q, k, v, segments, causal=causal, scale=scale, return_lse=True
        )
        return o

    values = values_and_gradients(function, leaves, [do])
    return [values[0], found["lse"], *values[1:]]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_the_definition(shape, causal):
    for seed in (0, 1):
        *leaves, do = tensors(*shape, seed=seed)
        want = run(naive, [x.double() for x in leaves], do.double(), causal)
        for g, w in zip(run(triton_flash, leaves, do, causal), want):
            assert relative_error(g, w) < FP32


def test_mla_shape_with_grouped_heads_and_views():
    """Head dims 192 and 128, and q, k as slices of wider tensors, read in place."""
    lengths = (33, 5)
    q, k, v, _ = tensors(2, 1, 192, 128, lengths=lengths)
    wide = torch.cat([q, torch.full_like(q, torch.nan)], dim=-1)
    segments = Segments.from_lengths(lengths)
    o, lse = triton_flash.attention(wide[..., :192], k, v, segments, causal=True, scale=0.07, return_lse=True)
    want = naive.attention(
        q.double(), k.double(), v.double(), segments, causal=True, scale=0.07, return_lse=True
    )
    assert relative_error(o, want[0]) < FP32 and relative_error(lse, want[1]) < FP32


@pytest.mark.parametrize("causal", [True, False])
def test_half_precision_loses_only_roundings(causal):
    *leaves, do = tensors(2, 1, 72, 40, torch.float16)
    want = run(naive, [x.double() for x in leaves], do.double(), causal)
    got = run(triton_flash, leaves, do, causal)
    assert got[0].dtype == torch.float16 and got[1].dtype == torch.float32
    for g, w in zip(got, want):
        assert relative_error(g, w) < FP16


def appended(dtype, seed=0):
    """Three documents whose ends are asked again, |logit| up to about 20: q, k, v, both segments, scale."""
    keys, new = Segments((90, 33, 5)), Segments((37, 1, 5))
    q, k, v, _ = tensors(4, 2, 24, 16, dtype, seed, keys.lengths)
    ends = torch.cat([torch.arange(end - n, end) for end, n in zip(keys.offsets[1:], new.lengths)])
    scale = 20 / torch.einsum("ihd,jhd->hij", q.float(), k.float().repeat_interleave(2, 1)).abs().max().item()
    return q, ends, k, v, new, keys, scale


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, FP32), (torch.float16, FP16)], ids=str)
def test_new_tokens_after_earlier_keys_are_the_end_of_attention_over_all(dtype, tolerance):
    for seed in (0, 1):
        q, ends, k, v, new, keys, scale = appended(dtype, seed)
        law, _ = naive.attention(q.double(), k.double(), v.double(), keys, causal=True, scale=scale)
        asked = naive.attention_append(q[ends].double(), k.double(), v.double(), new, keys, scale=scale)
        torch.testing.assert_close(asked, law[ends], rtol=0, atol=1e-12)
        with poisoned_empties():
            got = triton_flash.attention_append(q[ends], k, v, new, keys, scale=scale)
        assert got.dtype == dtype and relative_error(got, law[ends]) < tolerance


def test_new_tokens_without_enough_keys_are_refused():
    q, _, k, v, new, _, _ = appended(torch.float32)
    with pytest.raises(ValueError, match=r"not the ends of documents of \(5, 33, 90\) keys"):
        triton_flash.attention_append(q[: new.total], k, v, new, Segments((5, 33, 90)), scale=1.0)


def test_later_tokens_and_other_documents_leave_earlier_outputs_bit_identical():
    q, k, v, _ = tensors(2, 2, 24, 16)
    segments = Segments.from_lengths(LENGTHS)
    before, _ = triton_flash.attention(q, k, v, segments, causal=True, scale=0.3)
    for x in (q, k, v):
        x[20:37] *= -3  # the end of the first document
    after, _ = triton_flash.attention(q, k, v, segments, causal=True, scale=0.3)
    assert torch.equal(before[:20], after[:20]) and torch.equal(before[37:], after[37:])
    assert not torch.equal(before[20:37], after[20:37])


def test_packed_equals_separate():
    q, k, v, _ = tensors(2, 1, 24, 16)
    packed, _ = triton_flash.attention(q, k, v, Segments.from_lengths(LENGTHS), causal=True, scale=0.3)
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        alone, _ = triton_flash.attention(
            q[rows], k[rows], v[rows], Segments.from_lengths([length]), causal=True, scale=0.3
        )
        assert relative_error(alone, packed[rows]) < 1e-6
        start += length


def test_a_second_run_is_bit_identical():
    *leaves, do = tensors(2, 1, 24, 16)
    for a, b in zip(run(triton_flash, leaves, do, True), run(triton_flash, leaves, do, True)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("scale", [0.3, 20.0])
def test_the_lse_gate_on_this_lse_gives_the_exact_largest_logit(scale):
    q, k, v, _ = tensors(4, 2, 24, 16)
    segments = Segments.from_lengths(LENGTHS)
    _, lse = triton_flash.attention(q, k, v, segments, causal=True, scale=scale, return_lse=True)
    got = max_logit(q, k, lse, segments, causal=True, scale=scale, tau=1.0)
    want = naive.max_logit(q, k, lse, segments, causal=True, scale=scale, tau=1.0)
    assert relative_error(got, want) < 1e-5


def test_extreme_logits_stay_finite():
    q, k, v, do = tensors(2, 2, 24, 16)
    got = run(triton_flash, [q, k, v], do, True, scale=300.0)
    o, lse, *_ = run(naive, [x.double() for x in (q, k, v)], do.double(), True, scale=300.0)
    assert all(torch.isfinite(g).all() for g in got)
    assert (
        relative_error(got[1], lse) < FP32 and relative_error(got[0], o) < 5e-3
    )  # logits of 5000 carry 5e-4


@pytest.mark.parametrize(
    "width,tiles", [(72, (64, 16)), (128, (128, 0)), (192, (128, 64)), (8, (16, 0)), (96, (64, 32))]
)
def test_head_dims_are_cut_into_two_tiles(width, tiles):
    assert triton_flash.split_dim(width) == tiles


def test_with_a_gradient_the_kernel_without_atomics_is_taken(monkeypatch):
    """So that a tower trains bit for bit alike twice; without one, torch's kernel serves equal dims."""
    monkeypatch.setattr(triton_flash.varlen, "varlen_available", lambda q, v: True)
    q, k, v, _ = tensors(2, 2, 72, 72)
    assert triton_flash.prefers_torch(q, k, v) and not triton_flash.prefers_torch(q, k, v[..., :40])
    for leaf in (q, k, v):
        leaf.requires_grad_()
        assert not triton_flash.prefers_torch(q, k, v)
        with torch.no_grad():
            assert triton_flash.prefers_torch(q, k, v)
        leaf.requires_grad_(False)


def test_bad_input_names_the_argument():
    q, k, v, _ = tensors(4, 2, 24, 16)
    segments = Segments.from_lengths(LENGTHS)

    def call(*args):
        return triton_flash.attention(*args, segments, causal=True, scale=1.0)

    for match, args in (
        ("q_THD.*tokens", (q[:5], k, v)),
        ("k_TGD is", (q, k.long(), v)),
        ("k has 16", (q, k[..., :16], v)),
        ("v_TGV has head dim", (q, k, torch.randn(v.shape[0], 2, 300))),
        ("v_TGV is on", (q, k, v.to("meta"))),
        ("do not group", (q, k[:, :1], v)),
    ):
        with pytest.raises(ValueError, match=match):
            call(*args)
