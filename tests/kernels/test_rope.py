"""Fused qkv split with 2-D RoPE, and the absorbed decode step over pages: torch and Triton (interpreted)
against their definitions."""

import pytest
import torch
from cases import Form, forms, needs_interpreter, poisoned_empties, randn, relative_error

from earlyfusion.kernels.attention import naive, tiles, varlen
from earlyfusion.kernels.attention.triton import decode
from earlyfusion.kernels.attention.triton import rope as triton_rope

ROPE = forms(
    torch=Form(varlen.qkv_rope, torch.float32, 2e-6),
    torch16=Form(varlen.qkv_rope, torch.float16, 2e-3),
    triton=Form(triton_rope.qkv_rope, torch.float32, 2e-6),
    triton16=Form(triton_rope.qkv_rope, torch.float16, 2e-3),
)


def turns(T, D, seed=0):
    angles = torch.rand(T, D // 2, generator=torch.Generator().manual_seed(seed)) * 6.3
    return torch.polar(torch.ones_like(angles), angles)


@pytest.mark.parametrize("T,H,D", [(1, 1, 8), (17, 2, 72), (33, 3, 128), (5, 2, 20)])
@ROPE
def test_split_and_turn_equal_the_definition(form, T, H, D):
    run = lambda op, x: op(x, turns(T, D))
    for seed in (0, 10):
        got = form.compare(
            run, naive.qkv_rope, [randn(T, 3, H, D, seed=seed)], randn(3, T, H, D, seed=seed + 1)
        )
        assert all(x.dtype == form.dtype for x in got)


@needs_interpreter
def test_values_are_a_view_not_a_copy():
    qkv = torch.randn(5, 3, 2, 8)
    assert triton_rope.qkv_rope(qkv, turns(5, 8))[2].data_ptr() == qkv[:, 2].data_ptr()


DECODE = forms(
    torch=Form(tiles.mla_decode, torch.float64, 1e-10),
    triton=Form(decode.mla_decode, torch.float32, 1e-5),
    triton16=Form(decode.mla_decode, torch.float16, 5e-3),
)


def cache(lengths, H, R, S, dtype=torch.float32, seed=0):
    """Pages in shuffled order; rows nobody owns hold NaN for Triton, which must not read them."""
    needed = [-(-length // S) for length in lengths]
    order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    # The torch form gathers whole pages and masks: finite rubbish must not count either.
    lost = 1e3 if dtype == torch.float64 else torch.nan
    pages = torch.full((len(order), S, R), lost, dtype=dtype)
    table = torch.full((len(lengths), max(needed) + 1), 0 if dtype == torch.float64 else -1)
    for b, length in enumerate(lengths):
        for n in range(needed[b]):
            table[b, n] = order.pop()
            rows = min(S, length - n * S)
            pages[table[b, n], :rows] = randn(rows, R, seed=seed + 100 * b + n, dtype=dtype)
    return randn(len(lengths), H, R, seed=seed, dtype=dtype), pages, table.int(), torch.tensor(lengths).int()


@pytest.mark.parametrize("H,R,rank", [(4, 40, 24), (20, 24, 16), (32, 24, 16), (3, 16, 16), (2, 72, 64)])
@DECODE
def test_paged_decode_equals_attention_over_the_gathered_rows(form, H, R, rank):
    for seed in (0, 10):
        query, pages, table, lengths = cache([37, 1, 100, 8], H, R, 8, form.dtype, seed)
        with poisoned_empties():
            mixed = form.op(query, pages, table, lengths, rank, 0.2)
        wide = naive.mla_decode(query.double(), pages.double(), table, lengths, rank, 0.2)
        assert relative_error(mixed, wide) < form.error
        # And the definition itself against a softmax by hand.
        for b, length in enumerate(lengths.tolist()):
            rows = pages[table[b].clamp(min=0)].flatten(0, 1)[:length].double()
            p = (query[b].double() @ rows.T * 0.2).softmax(-1)
            assert relative_error(wide[b], p @ rows[:, :rank]) < 1e-10


@DECODE
def test_an_idle_slot_gives_zeros(form):
    query, pages, table, lengths = cache([5, 9], 2, 24, 4, form.dtype)
    # A slot of the engine that nobody uses.
    lengths[0] = 0
    mixed = form.op(query, pages, table, lengths, 16, 0.2)
    assert (mixed[0] == 0).all() and torch.isfinite(mixed[1]).all()
