"""What a request gets does not depend on when, with whom, in which pieces and where it is served.

Batch size, order, page size, slots, fork, pause and migration change no bit of a log-probability on a CPU in
fp32 (the model's widths are multiples of 4). Other chunks of the prompt and re-reading after a pause change
the order of sums: there the tokens must be equal and log-probabilities equal to 2e-5.
"""

from dataclasses import replace

import pytest
import torch
from engine_cases import (
    K3,
    PLAIN,
    SHAPE,
    TOKENIZER,
    all_returned,
    drawn,
    equal_bits,
    model,
    pictured,
    requests,
    serve,
    tokens,
)

from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Request, RequestError, SamplingParams
from earlyfusion.model.engine.transfer import PausedRequest

pytestmark = pytest.mark.usefixtures("way")
LENGTHS = [1, 5, 17, 40, 90, 33, 2, 64]
ROUNDING = 2e-5
SHAPES = {"block_attnres": SHAPE, "k3_options": K3, "no_attnres_low_rank_query": PLAIN}


def equal_tokens(one, other) -> None:
    assert one.keys() == other.keys()
    for key, completion in one.items():
        assert completion.ids == other[key].ids, key
        for a, b in (
            (completion.logprobs, other[key].logprobs),
            (completion.logprobs1, other[key].logprobs1),
        ):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_size_order_and_page_size_change_no_bit(shape, seed):
    net = model(seed, **SHAPES[shape])
    given = requests(LENGTHS, drawn(16, top_p=0.95, seed=seed), seed) + [
        Request("image", pictured(seed), drawn(16))
    ]
    base = serve(net, given, max_slots=9)
    for slots, page in ((1, 8), (3, 4), (9, 32)):
        equal_bits(base, serve(net, given, max_slots=slots, page_size=page))
    equal_bits(base, serve(net, given[::-1], max_slots=9))
    torch.manual_seed(seed)
    shuffled = [given[i] for i in torch.randperm(len(given))]
    equal_bits(base, serve(net, shuffled, max_slots=4))
    assert len({tuple(c.ids) for c in base.values()}) > 5  # they are different texts


def test_large_batches_change_no_bit():
    """Rows 1 .. 40 of a batch: whole and broken vectors, one and several blocks of a product."""
    net = model()
    given = requests([3 + i % 13 for i in range(40)], drawn(6))
    base = serve(net, given, max_slots=40)
    equal_bits(base, serve(net, given, max_slots=7))
    equal_bits({k: v for k, v in base.items() if k[0] == "r39"}, serve(net, given[39:]))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_other_chunks_change_no_token(seed):
    net = model(seed)
    given = requests([5, 40, 90, 33, 150], drawn(20, seed=seed), seed) + [
        Request("image", pictured(seed), drawn(20))
    ]
    base = serve(net, given, prefill_chunk=512, max_slots=6)
    for chunk in (7, 32, 50):
        equal_tokens(base, serve(net, given, prefill_chunk=chunk, max_slots=4))


@pytest.mark.parametrize("length", [8, 16, 21])
def test_a_forked_group_is_its_samples_one_by_one(length):
    """Prompts that end at and inside a page: shared whole pages, the last one copied on write."""
    net = model()
    prompt = tokens(length)
    group = serve(net, [Request("g", prompt, drawn(20, n=6))], max_slots=6)
    assert len({tuple(c.ids) for c in group.values()}) > 4
    engine = Engine(net, TOKENIZER, max_slots=6, page_size=8)
    engine.submit(Request("g", prompt, drawn(20, n=6)))
    for _ in range(3):
        engine.step()
    pages = [sample.pages for sample in engine.scheduler.running]
    assert len({tuple(p[: length // 8]) for p in pages}) == 1  # whole pages are shared
    assert len({p[length // 8] for p in pages}) == 6  # written ones are not
    while engine.has_work:
        engine.step()
    all_returned(engine)
    # the same samples, each with a memory of its own: cancel all others before they begin
    for index in range(6):
        alone = Engine(net, TOKENIZER, max_slots=6, page_size=8, prefill_chunk=32)
        handle = alone.submit(Request("g", prompt, drawn(20, n=6)))
        ticket = alone.scheduler.waiting[0]
        for sample in ticket.samples:
            if sample.index != index:
                alone.scheduler.finish(sample, "cancelled")
        while not handle.done:
            alone.step()
        got = {("g", index): handle.completions[index]}
        equal_bits({("g", index): group["g", index]}, got)


@pytest.mark.parametrize("keep_state", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_pause_and_migration_change_no_token(keep_state, seed):
    """Paused after 0, 1, 2, ... steps, sent as bytes to another engine with other sizes, resumed there."""
    net, twin = model(seed), model(seed)
    given = requests(LENGTHS, drawn(14, seed=seed), seed)
    given += [Request("image", pictured(seed), drawn(14)), Request("group", tokens(11), drawn(14, n=3))]
    base = serve(net, given, max_slots=16)
    here = Engine(net, TOKENIZER, max_slots=16, page_size=8, prefill_chunk=32)
    there = Engine(twin, TOKENIZER, max_slots=5, page_size=16, prefill_chunk=32)
    handles = [here.submit(request) for request in given]
    for step, request in enumerate(given):
        paused = here.pause(request.id)
        facts, tensors = paused.to_bytes()
        handles[step] = there.resume(PausedRequest.from_bytes(facts, tensors), keep_state=keep_state)
        here.step()
        there.step()
    while there.has_work:
        there.step()
    done = {(c.request_id, c.index): c for handle in handles for c in handle.completions}
    (equal_bits if keep_state else equal_tokens)(base, done)
    chosen = {entry for c in done.values() for entry in c.resumes}
    assert chosen <= {"keep@0", "reprefill@0"} and ("keep@0" in chosen) == keep_state
    all_returned(here)
    all_returned(there)


def test_many_pauses_of_one_request_change_no_bit():
    net = model()
    request = Request("r", tokens(23), drawn(30, n=2))
    base = serve(net, [request])
    engine = Engine(net, TOKENIZER, max_slots=4, page_size=8, prefill_chunk=32)
    handle = engine.submit(request)
    engine.step()
    while not handle.done:
        engine.step()
        if not handle.done:
            handle = engine.resume(engine.pause("r"))
    equal_bits(base, {("r", c.index): c for c in handle.completions})
    assert all(len(c.resumes) > 20 for c in handle.completions)
    assert engine.stats()["resumed_reprefill"] == 0


def test_a_stop_string_cuts_a_drawn_text_exactly():
    """Stop strings end a text exactly before their first occurrence, wherever token borders fall."""
    net = model(3)
    free = serve(net, requests([9], SamplingParams(40, 1.0, ignore_eos=True)))["r0", 0]
    for start, end in ((5, 7), (12, 16), (0, 2), (20, 29)):
        stop = free.text[start:end]
        if not stop.strip() or "\ufffd" in stop:
            continue
        cut = serve(net, requests([9], SamplingParams(40, 1.0, ignore_eos=True, stop=(stop, "never"))))[
            "r0", 0
        ]
        assert cut.text == free.text[: free.text.find(stop)]
        assert cut.finish_reason == "stop" and free.ids[: len(cut.ids)] == cut.ids


def test_a_state_of_another_model_is_refused_and_can_be_read_again():
    net, other = model(), model(0, **dict(SHAPE, kv_lora_rank=12))
    engine = Engine(net, TOKENIZER, max_slots=1, page_size=8)
    engine.submit(Request("r", tokens(20), drawn(8)))
    engine.step()
    engine.step()
    paused = engine.pause("r")
    elsewhere = Engine(other, TOKENIZER, max_slots=1, page_size=8)
    with pytest.raises(RequestError, match=r"mla\.3\.latents: got \(21, 24\), this model needs \(21, 20\)"):
        elsewhere.resume(paused)
    with pytest.raises(RequestError, match="not unfinished here"):
        engine.pause("r")
    handle = elsewhere.resume(paused, keep_state=False)
    while elsewhere.has_work:
        elsewhere.step()
    assert len(handle.completions[0].ids) == 8 and handle.completions[0].ids[:2] == paused.samples[0].ids
    with pytest.raises(RequestError, match="not a paused request"):
        PausedRequest.from_bytes(b"{}", b"")


def test_a_prompt_that_goes_on_from_what_another_left_is_read_from_there_alone():
    """A picture, an answer that stops, then words of somebody else. Oracles: the whole prompt read anew, and
    the same with other requests beside it."""
    net = model(1)
    first = Request("a", pictured(1), drawn(150, stop_ids=tuple(range(20, 300, 12))), keep_state=True)

    def talk(kept: bool, others: int = 0):
        engine = Engine(net, TOKENIZER, max_slots=8, page_size=8, prefill_chunk=32, image_cache=1)
        every = [first, *requests([30, 7, 12][:others], drawn(25))]
        for request in every:
            engine.submit(request)
        ended: dict = {}
        while "a" not in ended or (engine.has_work and not others):
            ended |= {event.request_id: event for event in engine.step() if event.completion is not None}
        done, read = ended["a"].completion, engine.stats()["read_tokens"]
        ids = torch.cat([torch.as_tensor(first.prompt.ids), torch.tensor(done.ids), tokens(19).ids])
        whole = replace(first.prompt, ids=ids, loss_weights=torch.zeros(len(ids)))
        handle = engine.submit(Request("b", whole, drawn(10)), ended["a"].left if kept else None)
        while engine.has_work:
            engine.step()
        all_returned(engine)
        assert (
            done.finish_reason == "stop"
            and len(done.ids) > 1
            and all(e.left is None for e in ended.values() if e.request_id != "a")
        )
        return {("b", 0): handle.completions[0]}, engine.stats()["read_tokens"] - read, ended["a"].left

    gone_on, read, left = talk(kept=True)
    anew, read_anew, _ = talk(kept=False)
    assert read == 19 + 1 == read_anew - left.length
    equal_tokens(gone_on, anew)
    equal_bits(gone_on, talk(kept=True, others=3)[0])
    engine = Engine(net, TOKENIZER, max_slots=2, page_size=8)
    for request, after, message in (
        (Request("x", tokens(300), drawn(4, n=2)), left, "expected one sample"),
        (Request("x", tokens(left.length), drawn(4)), left, "a longer prompt"),
        (Request("x", tokens(300), drawn(4), capture_routing=True), left, "knows no routing"),
        (Request("x", tokens(300), drawn(4)), replace(left, state={}), "this model needs"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.submit(request, after)
    all_returned(engine)
