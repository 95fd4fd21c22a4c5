"""The engine as a service: what it refuses, what it bans, how it streams, and that it gives everything
back."""

import random
from collections import Counter, defaultdict

import pytest
import torch
from engine_cases import (
    TOKENIZER,
    all_returned,
    drain,
    drawn,
    engine_of,
    joined,
    model,
    pictured,
    requests,
    serve,
    tokens,
)
from fusion_cases import tiny_tokenizer

from earlyfusion.model.engine.engine import Engine, generate
from earlyfusion.model.engine.requests import EngineFull, Request, RequestError, SamplingParams, TokenPrompt
from earlyfusion.model.engine.scheduler import TextStream


@pytest.fixture(scope="module")
def net():
    return model()


# ---- what may be said


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_image_placeholders_and_other_input_tokens_are_never_sampled(temperature):
    """Even when they are by far the likeliest, and even as a stop id."""
    net = model()
    media = net.config.media_token_id
    inputs = ("media_begin", "media_content", "media_end", "bos", "pad")
    silent = [media, *(getattr(TOKENIZER, f"{name}_id") for name in inputs)]
    with torch.no_grad():
        net.decoder.lm_head.weight[silent] *= 40
    params = SamplingParams(30, temperature, stop_ids=(media,), ignore_eos=True)
    given = [*requests([4, 9], params), Request("image", pictured(0), params)]
    for completion in serve(net, given).values():
        assert len(completion.ids) == 30 and not set(completion.ids) & set(silent)
    without = Engine(net, None, max_slots=4)  # no tokenizer: the placeholder is banned all the same
    assert media not in without.generate(requests([4], params))[0].ids


def test_a_request_bans_its_own_tokens_only(net):
    free = serve(net, requests([6, 6], drawn(30)))
    common = max(set(free["r0", 0].ids), key=free["r0", 0].ids.count)
    held = Request("r0", tokens(6), drawn(30, banned_ids=(common, 10**9)))
    done = serve(net, [held, *requests([6, 6], drawn(30))[1:]])
    assert common in free["r0", 0].ids and common not in done["r0", 0].ids
    assert done["r1", 0].ids == free["r1", 0].ids


def test_stop_ids_end_a_text_and_are_left_out_of_it(net):
    free = serve(net, requests([6], drawn(20)))["r0", 0]
    stop = free.ids[7]
    done = serve(net, requests([6], drawn(20, stop_ids=(stop,))))["r0", 0]
    assert done.finish_reason == "stop" and done.ids == free.ids[: free.ids.index(stop) + 1]
    assert done.text == TOKENIZER.decode(done.ids[:-1], skip_special=True)
    net_eos = model()
    with torch.no_grad():
        net_eos.decoder.lm_head.weight.zero_()
    greedy = lambda **o: serve(net_eos, requests([6], SamplingParams(5, 0.0, **o)))["r0", 0]
    (text,) = generate(net_eos, TOKENIZER, [tokens(6)], max_new_tokens=5)  # [BOS] is banned, [EOS] comes next
    with pytest.raises(ValueError, match="no prompts"):
        generate(net_eos, TOKENIZER, [])
    ended, going_on = greedy(banned_ids=(0,)), greedy(ignore_eos=True)
    assert ended.ids == [TOKENIZER.eos_id] and ended.finish_reason == "stop" and ended.text == text == ""
    assert going_on.ids == [TOKENIZER.eos_id] * 5 and going_on.finish_reason == "length"


# ---- streaming


def test_streamed_pieces_add_up_to_the_text(net):
    engine = engine_of(net)
    for request in requests([3, 20, 40], drawn(40, stop=("zq", " the"), n=2)):
        engine.submit(request)
    pieces, ids, done = defaultdict(str), defaultdict(list), {}
    for event in drain(engine):
        key = (event.request_id, event.index)
        assert key not in done  # nothing follows a completion
        pieces[key] += event.text
        ids[key] += [token.id for token in event.tokens]
        if event.completion is not None:
            done[key] = event.completion
    assert len(done) == 6
    for key, completion in done.items():
        assert pieces[key] == completion.text and ids[key] == completion.ids


@pytest.mark.parametrize("text", ["naïve café, 12 €", "日本語のテキスト", "🙂🙃 mixed é\n\nf", "a b b c"])
def test_neither_half_characters_nor_parts_of_a_stop_string_are_streamed(text):
    for stop in (" b c", "é", "a b b c d", "\n\n", "nothing of it"):
        stream, pieces = TextStream(TOKENIZER, (stop,)), []
        for token in TOKENIZER.encode(text):
            if not stream.stopped:
                pieces.append(stream.push([token]))
        assert stream.stopped == (stop in text) and not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + stream.push([], final=True) == text.split(stop)[0]


# ---- what it refuses


def test_mistakes_are_named(net):
    engine = engine_of(net, max_slots=4, max_pages=10)
    engine.submit(Request("a", tokens(5)))
    cases = [
        (Request("a", tokens(5)), "'a' is in use"),
        (Request("b", TokenPrompt(torch.zeros(0, dtype=torch.long))), "has no tokens"),
        (Request("b", TokenPrompt(torch.tensor([5, 10**6]))), "token ids must lie in"),
        (Request("b", tokens(50), SamplingParams(100)), "need 19 pages of 8 tokens, the engine has 10"),
        (Request("b", tokens(5), SamplingParams(2, n=5)), "5 samples, but the engine has 4 slots"),
        (
            Request("b", TokenPrompt(torch.tensor([3, net.config.media_token_id]))),
            "give 0 features, the text holds 1",
        ),
        (
            Request("b", tokens(5), SamplingParams(banned_ids=tuple(range(400)), ignore_eos=True)),
            "every token is banned",
        ),
    ]
    for request, message in cases:
        with pytest.raises(RequestError, match=message):
            engine.submit(request)
    wrong = {"temperature": -1.0, "top_p": 0.0, "min_p": 2.0, "n": 0, "max_new_tokens": -1, "stop": ("",)}
    for name, value in [*wrong.items(), ("stop", "x")]:
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})
    for name, value in (("max_slots", 0), ("page_size", 3), ("page_size", 24), ("page_size", 256)):
        with pytest.raises(ValueError, match=name):
            engine_of(net, **{name: value})
    with pytest.raises(ValueError, match="checkpoint_every"):
        engine_of(net, prefix_cache=2, checkpoint_every=12)
    larger = tiny_tokenizer(TOKENIZER.vocab_size + 20)
    with pytest.raises(ValueError, match=rf"ids up to {larger.vocab_size - 1}, the model embeds"):
        Engine(net, larger)
    with pytest.raises(RuntimeError, match="idle engine"):
        engine.generate([])


def test_a_full_line_refuses_and_serves_again_later(net):
    engine = engine_of(net, max_slots=1, max_waiting=2)
    first, second, third = requests([4, 4, 4], drawn(3))
    handles = [engine.submit(first), engine.submit(second)]
    with pytest.raises(EngineFull, match="2 requests waiting"):
        engine.submit(third)
    engine.step()
    handles.append(engine.submit(third))
    drain(engine)
    assert all(handle.done for handle in handles)
    assert len(engine.generate(requests([4] * 7, drawn(2)))) == 7  # feeds itself


def test_mode_and_gradients_are_left_as_they_were_and_nothing_to_write_completes_at_once():
    net = model().train()
    engine = engine_of(net)
    engine.generate(requests([4], drawn(2)))
    assert net.training and torch.is_grad_enabled()
    assert all(layer.load.sum() == 0 for layer in net.modules() if hasattr(layer, "load"))
    (completion,) = engine.generate([Request("r", tokens(4), SamplingParams(0))])
    assert completion.ids == [] and completion.text == "" and completion.finish_reason == "length"
    assert not engine.has_work


# ---- memory


def test_one_look_at_the_host_per_step(net):
    engine, steps = engine_of(net), 0
    for request in requests([4, 40, 80, 3, 7], drawn(9)):
        engine.submit(request)
    while engine.has_work:
        engine.step()
        steps += 1
    stats = engine.stats()
    assert stats["host_syncs"] <= steps
    assert stats["read_tokens"] == 134 and stats["decoded_tokens"] == 5 * 8


def test_pictures_are_encoded_once_per_content(net):
    engine = engine_of(net)
    same = [Request(f"s{i}", pictured(0, text), drawn(3, n=2)) for i, text in enumerate((" a", " b", "\nc"))]
    engine.generate([*same, Request("other", pictured(1), drawn(3))])
    assert engine.stats()["images_encoded"] == 2 and engine.stats()["image_hits"] == 2
    small = engine_of(net, image_cache=1)
    for given in (same[0], Request("other", pictured(1), drawn(3)), same[1]):
        small.generate([given])
    assert small.stats()["images_encoded"] == 3


def test_cancelling_at_any_time_returns_what_was_made(net):
    engine = engine_of(net, max_slots=3)
    free = serve(net, [Request("r", tokens(20), drawn(12, n=2))], max_slots=3)
    for steps in (0, 1, 2, 5, 9):
        handle = engine.submit(Request("r", tokens(20), drawn(12, n=2)))
        engine.submit(Request("bystander", tokens(3), drawn(12)))
        for _ in range(steps):
            engine.step()
        assert engine.cancel("r") and not engine.cancel("r")
        assert handle.done
        for completion in handle.completions:
            assert completion.finish_reason == "cancelled"
            assert completion.ids == free["r", completion.index].ids[: max(0, steps)]
        ended = [event.completion for event in engine.step() if event.completion is not None]
        assert sum(c.finish_reason == "cancelled" for c in ended) == 2
        engine.cancel("bystander")
        engine.step()
        all_returned(engine)


def churn(engine: Engine, count: int, seed: int) -> dict[str, int]:
    """Mixed requests (groups, pictures, shared beginnings, stops), cancelled, paused and resumed at
    random."""
    rng = random.Random(seed)
    shared = tokens(24)
    images = [pictured(i, " x", (16, 16)) for i in range(3)]
    submitted, parked, ends = 0, [], Counter()
    alive: set[str] = set()
    while submitted < count or engine.has_work or parked:
        while submitted < count and len(engine.scheduler.waiting) < 8:
            kind = rng.random()
            prompt = tokens(rng.choice([1, 2, 5, 9, 16, 30]), rng.randrange(5))
            if kind < 0.2:
                prompt = joined(shared, prompt)
            elif kind < 0.3:
                prompt = rng.choice(images)
            params = SamplingParams(
                rng.choice([0, 1, 2, 3, 6]),
                rng.choice([0.0, 1.0]),
                rng.choice([1.0, 0.9]),
                n=rng.choice([1, 1, 1, 2, 3]),
                stop_ids=tuple(rng.sample(range(12, 250), 20)),
                seed=rng.randrange(100),
            )
            engine.submit(Request(str(submitted), prompt, params))
            alive.add(str(submitted))
            submitted += 1
        for event in engine.step():
            if event.completion is not None:
                ends[event.completion.finish_reason] += 1
        alive &= set(engine.scheduler.states)
        roll = rng.random()
        if alive and roll < 0.25:
            engine.cancel(rng.choice(sorted(alive)))
        elif alive and roll < 0.4:
            name = rng.choice(sorted(alive))
            alive.discard(name)
            parked.append(engine.pause(name))
        if parked and (roll > 0.8 or submitted == count):
            paused = parked.pop(rng.randrange(len(parked)))
            engine.resume(paused)
            alive.add(paused.request.id)
    return ends


@pytest.mark.parametrize(
    ("count", "seed"),
    [(300, 0), (300, 1), pytest.param(10_000, 2, marks=pytest.mark.slow)],
    ids=["300", "300b", "10000"],
)
def test_every_slot_and_page_comes_back(count, seed):
    """Mixed requests with cancellations, pauses and a prefix cache that must be evicted to make room."""
    linear = dict(num_heads=4, head_dim=4, kda_layers=[1])
    thin = dict(hidden_size=16, num_hidden_layers=2, kv_lora_rank=8, intermediate_size=16)
    net = model(0, num_attention_heads=4, **thin, num_experts=0, attn_res="none", linear_attn_config=linear)
    engine = engine_of(net, max_slots=6, max_pages=24, prefix_cache=3, checkpoint_every=8, prefill_chunk=64)
    ends = churn(engine, count, seed)
    assert min(ends[reason] for reason in ("stop", "length", "cancelled")) > count // 50
    stats = engine.stats()
    assert stats["prefix_hits"] > count // 50 and stats["prefix_evictions"] > count // 50
    all_returned(engine)
    engine.prefix.clear()
    all_returned(engine)
    assert engine.stats()["free_pages"] == 24 and engine.stats()["free_slots"] == 9
