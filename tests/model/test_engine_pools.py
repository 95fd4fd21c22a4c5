"""Slots and pages by themselves: references, copies on write, promises; and latent attention against the
dense cache."""

import pytest
import torch
from engine_cases import CONFIG, model, tokens

from earlyfusion.kernels.attention.tiles import attend_in_tiles, tiles
from earlyfusion.model.cache import CachePlan, KdaSlots, MlaPages
from earlyfusion.model.engine.cache import Pools


def pools(slots: int = 3, pages: int = 6, page_size: int = 4) -> Pools:
    return Pools.allocate(CONFIG.text, slots, pages, page_size, torch.zeros(1))


def latents(pools: Pools) -> torch.Tensor:
    return next(layer for layer in pools.layers if isinstance(layer, MlaPages)).latents_XR


def test_pages_are_shared_copied_on_write_and_counted():
    some = pools()
    page = some.take_page()
    latents(some)[page * 4 : page * 4 + 4] = 7.0
    some.share([page])
    copy = some.own_page(page)
    assert copy != page and (latents(some)[copy * 4 : copy * 4 + 4] == 7.0).all()
    latents(some)[copy * 4] = 1.0
    assert (latents(some)[page * 4 : page * 4 + 4] == 7.0).all()
    assert some.own_page(page) == page  # the only holder writes in place
    assert len(some.free_pages) == 6 - 2
    some.release([page])
    some.release([copy])
    assert len(some.free_pages) == 6 and not some.references


def test_taken_pages_and_slots_are_empty_whatever_stood_there():
    """A masked key must be finite and a new sequence starts from nothing, even after a model that produced
    NaN."""
    some = pools()
    for layer in some.layers:
        for tensor in (layer.latents_XR,) if isinstance(layer, MlaPages) else layer.tensors():
            tensor.fill_(float("nan"))
    page, slot = some.take_page(), some.take_slot()
    assert (latents(some)[page * 4 : page * 4 + 4] == 0).all()
    state = some.export(slot, [page], 3)
    assert all((tensor == 0).all() for tensor in state.values())


def test_states_are_float32_whatever_the_weights_are():
    some = Pools.allocate(CONFIG.text, 1, 1, 4, torch.zeros(1, dtype=torch.bfloat16))
    states = [layer.state_SHKV.dtype for layer in some.layers if isinstance(layer, KdaSlots)]
    assert set(states) == {torch.float32} and latents(some).dtype == torch.bfloat16


def test_padding_slot_and_page_are_never_given_out():
    some = pools()
    assert 0 not in {some.take_page() for _ in range(6)} | {some.take_slot() for _ in range(3)}


def test_states_survive_export_and_restore_at_another_place():
    some = pools()
    generator = torch.Generator().manual_seed(0)
    for layer in some.layers:
        for tensor in (layer.latents_XR,) if isinstance(layer, MlaPages) else layer.tensors():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    slot, pages = some.take_slot(), [some.take_page() for _ in range(3)]
    latents(some)[pages[1] * 4 : pages[1] * 4 + 4] = torch.randn(
        4, latents(some).shape[1], generator=generator
    )
    saved = some.export(slot, pages, 10)
    other = pools(page_size=8)
    there = other.take_slot(), [other.take_page() for _ in range(2)]
    other.check(saved, 10)
    other.restore(saved, *there, 10)
    again = other.export(*there, 10)
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[name], again[name]) for name in saved)
    with pytest.raises(ValueError, match="keep_state=False"):
        other.check(saved, 11)


@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=str)
def test_logits_of_cached_attention_are_not_rounded_to_half_precision(dtype, rounding):
    """Absorbed attention against its law in fp64, |logit| about 20. Rounded logits would be off by 20
    roundings."""
    generator = torch.Generator().manual_seed(0)
    query_NXR, keys_NLR = (torch.randn(2, n, 20, generator=generator).to(dtype) for n in (6, 300))
    logits = query_NXR.double() @ keys_NLR.double().transpose(1, 2)
    scale = 20 / logits.abs().max().item()
    last_NX1 = torch.randint(100, 300, (2, 6, 1), generator=generator)
    hidden = torch.arange(300) > last_NX1
    law = (logits * scale).masked_fill(hidden, float("-inf")).softmax(-1) @ keys_NLR[..., :16].double()
    padded = torch.nn.functional.pad(keys_NLR, (0, 0, 0, 1000))
    got, _ = attend_in_tiles(query_NXR, last_NX1, 300, lambda start, stop: padded[:, start:stop], 16, scale)
    assert (got.double() - law).norm() < rounding * law.norm()


@pytest.mark.parametrize("lengths", [(1, 5, 130), (300, 64, 129, 7)])
def test_paged_attention_equals_attention_over_gathered_keys(lengths):
    """Scattered pages, several tiles, several queries; fp64 against one plain softmax."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    heads, size, rank, page, width = 3, 10, 7, 16, 2
    longest = tiles(max(lengths))[-1][1]
    order = torch.randperm(len(lengths) * longest // page, generator=generator) + 1
    memory = MlaPages(draw((len(order) + 1) * page, size), page)
    tables = order.view(len(lengths), -1)
    queries = draw(len(lengths) * width, heads, size)
    last = torch.tensor([[max(n - 2, 0), n - 1] for n in lengths])
    plan = CachePlan(
        False, torch.zeros(0), torch.zeros(0), tables, last, torch.arange(len(lengths) * width)
    )
    got = memory.attend(queries, plan, rank, 0.3).view(len(lengths), width, heads, rank)
    for n in range(len(lengths)):
        keys = memory.latents_XR.view(-1, page, size)[tables[n]].flatten(0, 1)
        for w in range(width):
            seen = keys[: int(last[n, w]) + 1]
            p = (queries.view(len(lengths), width, heads, size)[n, w] @ seen.T * 0.3).softmax(-1)
            torch.testing.assert_close(got[n, w], p @ seen[:, :rank], atol=1e-12, rtol=0)


def test_the_padding_rows_of_a_step_leave_no_trace():
    """Slot 0 is fed again and again by steps of one sequence; nothing of it may grow or become a number that
    is none."""
    from earlyfusion.model.engine.engine import Engine
    from earlyfusion.model.engine.requests import Request, SamplingParams

    engine = Engine(model(), None, max_slots=2, page_size=4, max_pages=60)
    engine.generate([Request("r", tokens(3), SamplingParams(200, ignore_eos=True))])
    assert int(engine.runner.length_S[0]) == 0
    for layer in engine.pools.layers:
        for tensor in (layer.latents_XR,) if isinstance(layer, MlaPages) else layer.tensors():
            assert torch.isfinite(tensor).all() and tensor.abs().max() < 1e3
