"""Fused qkv split with 2-D RoPE, and the absorbed decode step, through the interpreter against their
definitions."""

import pytest
import torch
from triton_cases import needs_interpreter, poisoned_empties, relative_error, values_and_gradients

from earlyfusion.kernels.attention import decode, rope
from earlyfusion.kernels.attention.triton import decode as triton_decode
from earlyfusion.kernels.attention.triton import rope as triton_rope

pytestmark = needs_interpreter
FP32 = 2e-6  # one product per entry, or short float32 sums
FP16 = 2e-3  # one rounding to 11 bits


def turns(T, D, seed=0):
    angles = torch.rand(T, D // 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 6.3
    return torch.polar(torch.ones_like(angles), angles)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, FP32), (torch.float16, FP16)])
@pytest.mark.parametrize("T,H,D", [(1, 1, 8), (17, 2, 72), (33, 3, 128), (5, 2, 20)])
def test_split_and_turn_equal_the_definition(T, H, D, dtype, tolerance):
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        qkv = torch.randn(T, 3, H, D, generator=generator).to(dtype)
        cotangents = [torch.randn(T, H, D, generator=generator) for _ in range(3)]
        turn = turns(T, D, seed)
        got = values_and_gradients(
            lambda x, turn=turn: triton_rope.qkv_rope(x, turn.to(torch.complex64)), [qkv], cotangents
        )
        want = values_and_gradients(
            lambda x, turn=turn: rope.qkv_rope_naive(x, turn),
            [qkv.double()],
            [c.to(dtype).double() for c in cotangents],
        )
        torch_form = values_and_gradients(
            lambda x, turn=turn: rope.qkv_rope(x, turn.to(torch.complex64)), [qkv], cotangents
        )
        for g, w, t in zip(got, want, torch_form):
            assert g.dtype == dtype and relative_error(g, w) < tolerance and relative_error(t, w) < tolerance


def test_values_are_a_view_not_a_copy():
    qkv = torch.randn(5, 3, 2, 8)
    assert triton_rope.qkv_rope(qkv, turns(5, 8).to(torch.complex64))[2].data_ptr() == qkv[:, 2].data_ptr()


def test_rope_bad_input_names_the_argument():
    qkv, turn = torch.randn(4, 3, 2, 8), turns(4, 8).to(torch.complex64)
    for match, args in (
        ("qkv_T3HD", (qkv[:, :2], turn)),
        ("qkv_T3HD.*contiguous", (qkv.transpose(0, 2).contiguous().transpose(0, 2), turn)),
        ("turns_TC", (qkv, turn[:3])),
        ("turns_TC", (qkv, turn.real)),
        ("turns_TC is complex128", (qkv, turn.to(torch.complex128))),
    ):
        with pytest.raises(ValueError, match=match):
            triton_rope.qkv_rope(*args)


def cache(lengths, H, R, S, seed=0, dtype=torch.float32):
    """Pages in shuffled order; rows nobody owns hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // S) for length in lengths]
    order = torch.randperm(sum(needed) + 2, generator=generator).tolist()
    pages = torch.full((len(order), S, R), torch.nan, dtype=torch.float64)
    table = torch.full((len(lengths), max(needed) + 1), -1, dtype=torch.int32)
    for b, length in enumerate(lengths):
        for n in range(needed[b]):
            table[b, n] = order.pop()
            rows = min(S, length - n * S)
            pages[table[b, n], :rows] = torch.randn(rows, R, generator=generator, dtype=torch.float64)
    query = torch.randn(len(lengths), H, R, generator=generator, dtype=torch.float64)
    return query.to(dtype), pages.to(dtype), table, torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float16, 5e-3)])
@pytest.mark.parametrize("H,R,rank", [(4, 40, 24), (20, 24, 16), (3, 16, 16), (2, 72, 64)])
def test_paged_decode_equals_attention_over_the_gathered_rows(H, R, rank, dtype, tolerance):
    for seed in (0, 1):
        query, pages, table, lengths = cache([37, 1, 100, 8], H, R, 8, seed, dtype)
        with poisoned_empties():
            mixed, lse = triton_decode.mla_decode(query, pages, table, lengths, rank, 0.2)
        wide = decode.mla_decode(query.double(), pages.double(), table, lengths, rank, 0.2)
        assert relative_error(mixed, wide[0]) < tolerance and relative_error(lse, wide[1]) < tolerance
        start = 0
        for b, length in enumerate(lengths.tolist()):  # and the definition itself against a softmax by hand
            rows = torch.cat([pages[p] for p in table[b].tolist() if p >= 0])[:length].double()
            p = (query[b].double() @ rows.T * 0.2).softmax(-1)
            assert relative_error(wide[0][b], p @ rows[:, :rank]) < 1e-10
            start += length


def test_an_idle_slot_gives_zeros():
    query, pages, table, lengths = cache([5, 9], 2, 24, 4)
    lengths[0] = 0
    mixed, lse = triton_decode.mla_decode(query, pages, table, lengths, 16, 0.2)
    assert (mixed[0] == 0).all() and (lse[0] == float("-inf")).all() and torch.isfinite(mixed[1]).all()


def test_decode_bad_input_names_the_argument():
    query, pages, table, lengths = cache([5, 9], 2, 24, 4)
    for match, args in (
        (r"\[B, H, R\]", (query, pages[..., :20], table, lengths, 16, 1.0)),
        ("rank is 30", (query, pages, table, lengths, 30, 1.0)),
        ("lengths_B", (query, pages, table, lengths.float(), 16, 1.0)),
        ("pages_PSR", (query, pages.long(), table, lengths, 16, 1.0)),
        (
            "query_BHR.*contiguous",
            (query.transpose(0, 1).contiguous().transpose(0, 1), pages, table, lengths, 16, 1.0),
        ),
    ):
        with pytest.raises(ValueError, match=match):
            triton_decode.mla_decode(*args)
