"""The prefix cache: a hit gives what a reading from the start gives, only sooner, and never another text's
state."""

import pytest
import torch
from engine_cases import TOKENIZER, all_returned, drawn, model, pictured, serve, tokens

from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Request, TokenPrompt


def cached(net, **options) -> Engine:
    defaults = dict(max_slots=4, page_size=8, prefill_chunk=64, prefix_cache=6, checkpoint_every=16)
    return Engine(net, TOKENIZER, **{**defaults, **options})


def after(start: TokenPrompt, length: int, seed: int) -> TokenPrompt:
    return TokenPrompt(torch.cat([start.ids, tokens(length, seed).ids]))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shared", [16, 37, 80])
def test_a_hit_changes_no_token(shared, seed):
    """Restored states of other cut points once made answers garbage elsewhere; here tokens must be those of
    no cache."""
    net = model(seed)
    few_shot = tokens(shared, seed)
    given = [
        Request(f"q{i}", after(few_shot, n, i), drawn(12, n=1 + i % 2))
        for i, n in enumerate([3, 9, 14, 1, 25])
    ]
    plain = serve(net, given, prefill_chunk=64)
    engine = cached(net)
    done = {}
    for request in given:
        done |= {(c.request_id, c.index): c for c in engine.generate([request])}
    for key, completion in plain.items():
        assert done[key].ids == completion.ids, key
        torch.testing.assert_close(
            torch.tensor(done[key].logprobs1), torch.tensor(completion.logprobs1), atol=2e-5, rtol=0
        )
    hits = [done[f"q{i}", 0].cached_tokens for i in range(5)]
    assert hits[0] == 0 and all(hit == shared // 16 * 16 for hit in hits[1:])
    assert engine.stats()["read_tokens"] < sum(len(r.prompt.ids) for r in given)
    all_returned(engine)


def test_the_next_turn_begins_where_the_answer_ended():
    net = model()
    engine = cached(net)
    first = Request("turn 1", tokens(21), drawn(10))
    (answer,) = engine.generate([first])
    history = torch.cat([first.prompt.ids, torch.tensor(answer.ids)])
    second = Request("turn 2", TokenPrompt(torch.cat([history, tokens(5).ids])), drawn(10))
    (got,) = engine.generate([second])
    assert got.cached_tokens == len(history) - 1  # the last token was never fed
    assert got.ids == serve(net, [second])["turn 2", 0].ids
    branch = Request("turn 2b", TokenPrompt(torch.cat([history[:-3], tokens(9).ids])), drawn(10))
    (other,) = engine.generate([branch])
    assert other.cached_tokens == 16 and other.ids == serve(net, [branch])["turn 2b", 0].ids
    all_returned(engine)


def test_other_pictures_are_another_beginning():
    net = model()
    engine = cached(net)
    text = "\nQ: what color is the shape, please?\nA:"
    for seed in (0, 1, 0):
        request = Request(f"image {seed}", pictured(seed, text), drawn(6))
        (got,) = engine.generate([request])
        assert got.ids == serve(net, [request])[request.id, 0].ids
    assert (
        engine.stats()["prefix_hits"] == 1
    )  # only the picture seen before; its placeholders have the same ids
    both = Request("two", pictured(0, text, images=2), drawn(6))
    (got,) = engine.generate([both])
    assert (
        got.cached_tokens > 16 and got.ids == serve(net, [both])["two", 0].ids
    )  # the first picture and its text


def test_shared_pages_are_never_written_by_those_who_share_them():
    """Two continuations of one unaligned checkpoint at the same time, and the checkpoint afterwards."""
    net = model()
    engine = cached(net)
    (answer,) = engine.generate([Request("a", tokens(21), drawn(6))])
    start = TokenPrompt(torch.cat([tokens(21).ids, torch.tensor(answer.ids)]))
    pair = [Request(f"p{i}", after(start, 4 + i, i), drawn(8)) for i in range(2)]
    expected = serve(net, pair)
    for _ in range(2):
        for completion in engine.generate(pair):
            assert completion.cached_tokens >= 26
            assert completion.ids == expected[completion.request_id, 0].ids
    all_returned(engine)


def test_checkpoints_make_room_when_pages_are_short():
    net = model()
    engine = cached(net, max_pages=12, max_slots=2)
    for index in range(6):
        engine.generate([Request(f"r{index}", tokens(60, index), drawn(8))])
    assert engine.stats()["prefix_evictions"] >= 5
    all_returned(engine)


def test_new_weights_forget_the_cache_and_pictures():
    net = model()
    engine = cached(net)
    request = Request("r", pictured(0), drawn(5))
    engine.generate([request])
    engine.load_weights(model(1).state_dict(), version=1)
    assert engine.stats()["prefix_checkpoints"] == 0
    (got,) = engine.generate([request])
    assert (
        got.cached_tokens == 0
        and got.ids == serve(model(1), [request])["r", 0].ids
        and got.versions == [1] * 5
    )


def test_captured_routing_does_without_hits():
    """The experts of cached tokens were not recorded for this request."""
    engine = cached(model())
    request = Request("r", tokens(40), drawn(4), capture_routing=True)
    for _ in range(2):
        (got,) = engine.generate([request])
        assert got.cached_tokens == 0 and got.routing.shape == (43, 3, 2)
