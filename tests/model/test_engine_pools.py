"""Slots and pages by themselves: references, copies on write, states that leave and come back; latent
attention against the dense cache; and the prefix cache: a hit gives what a reading from the start gives, only
sooner, and never another text's state."""

import pytest
import torch
from engine_cases import (
    CONFIG,
    all_returned,
    by_sample,
    drawn,
    engine_of,
    equal_tokens,
    joined,
    model,
    pictured,
    serve,
    tokens,
)

from earlyfusion.kernels.attention.tiles import attend_in_tiles
from earlyfusion.model.cache import Pools
from earlyfusion.model.engine.requests import Request, SamplingParams


def pools(page_size: int = 4, dtype=torch.float32) -> Pools:
    return Pools.allocate(CONFIG.text, 3, 6, page_size, torch.zeros(1, dtype=dtype))


def test_taken_pages_and_slots_are_empty_whatever_stood_there_and_padding_is_never_given_out():
    """A masked key must be finite and a new sequence starts from nothing, even after a model that produced
    NaN. States are float32 whatever the weights are."""
    some = pools(dtype=torch.bfloat16)
    states = {layer.state_SHKV.dtype for layer in some.layers if hasattr(layer, "state_SHKV")}
    assert states == {torch.float32} and some.by_page[0].dtype == torch.bfloat16
    for tensor in [*some.by_slot, *some.by_page]:
        tensor.fill_(float("nan"))
    pages, slots = [some.take_page() for _ in range(6)], [some.take_slot() for _ in range(3)]
    assert (some.by_page[0][pages] == 0).all() and 0 not in {*pages, *slots}
    state = some.export(slots[1], pages[2:3], 3)
    assert all((tensor == 0).all() for tensor in state.values())


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
    got = attend_in_tiles(query_NXR, last_NX1, 300, lambda start, stop: padded[:, start:stop], 16, scale)
    assert (got.double() - law).norm() < rounding * law.norm()


def test_the_padding_rows_of_a_step_leave_no_trace():
    """Slot 0 is fed again and again by steps of one sequence; nothing of it may grow or become a number that
    is none."""
    engine = engine_of(model(), max_slots=2, max_pages=60)
    engine.generate([Request("r", tokens(3), SamplingParams(200, ignore_eos=True))])
    assert int(engine.runner.length_S[0]) == 0
    for tensor in [*engine.pools.by_slot, *engine.pools.by_page]:
        assert torch.isfinite(tensor).all() and tensor.abs().max() < 1e3


# ---- the prefix cache


def cached(net, **options):
    return engine_of(net, **{"prefill_chunk": 64, "prefix_cache": 6, "checkpoint_every": 16, **options})


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shared", [16, 37, 80])
def test_a_hit_changes_no_token(shared, seed):
    """Restored states of other cut points once made answers garbage elsewhere; here tokens must be those of
    no cache."""
    net, few_shot = model(seed), tokens(shared, seed)
    given = []
    for i, length in enumerate([3, 9, 14, 1, 25]):
        given.append(Request(f"q{i}", joined(few_shot, tokens(length, i)), drawn(12, n=1 + i % 2)))
    engine, done = cached(net), []
    for request in given:
        done += engine.generate([request])
    equal_tokens(serve(net, given, prefill_chunk=64), by_sample(done))
    hits = [completion.cached_tokens for completion in done if completion.index == 0]
    assert hits == [0] + [shared // 16 * 16] * 4
    assert engine.stats()["read_tokens"] < sum(len(request.prompt.ids) for request in given)
    all_returned(engine)


def test_the_next_turn_begins_where_the_answer_ended():
    """And two turns that share an unaligned checkpoint at the same time never write into it."""
    net = model()
    engine = cached(net)
    (answer,) = engine.generate([Request("turn 1", tokens(21), drawn(10))])
    history = joined(tokens(21), answer.ids)
    pair = [Request(f"turn 2.{i}", joined(history, tokens(5 + i, i)), drawn(10)) for i in range(2)]
    expected = serve(net, pair)
    for _ in range(2):
        for got in engine.generate(pair):
            assert got.cached_tokens >= len(history.ids) - 1  # the last token was never fed
            assert got.ids == expected[got.request_id, 0].ids
    branch = Request("branch", joined(history.ids[:-3], tokens(9)), drawn(10))
    (other,) = engine.generate([branch])
    assert other.cached_tokens == 16 and other.ids == serve(net, [branch])["branch", 0].ids
    all_returned(engine)


def test_other_pictures_are_another_beginning_and_new_weights_forget_all():
    net, text = model(), "\nQ: what color is the shape, please?\nA:"
    engine = cached(net)
    for seed in (0, 1, 0):
        request = Request(f"image {seed}", pictured(seed, text), drawn(6))
        (got,) = engine.generate([request])
        assert got.ids == serve(net, [request])[request.id, 0].ids
    assert engine.stats()["prefix_hits"] == 1  # the picture seen before; its placeholders have the same ids
    both = Request("two", pictured(0, text, images=2), drawn(6))
    (got,) = engine.generate([both])
    assert got.cached_tokens > 16 and got.ids == serve(net, [both])["two", 0].ids

    engine.load_weights(model(1).state_dict(), version=1)
    assert engine.stats()["prefix_checkpoints"] == 0
    (got,) = engine.generate([both])
    assert got.cached_tokens == 0 and got.versions == [1] * 6
    assert got.ids == serve(model(1), [both])["two", 0].ids


def test_captured_routing_does_without_hits():
    """The experts of cached tokens were not recorded for this request."""
    engine = cached(model())
    request = Request("r", tokens(40), drawn(4), capture_routing=True)
    for _ in range(2):
        (got,) = engine.generate([request])
        assert got.cached_tokens == 0 and got.routing.shape == (43, 3, 2)
