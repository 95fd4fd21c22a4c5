"""What a request gets does not depend on when, with whom, in which pieces and where it is served.

Batch size, order, page size, slots, fork, pause and migration change no bit of a log-probability on a CPU in
fp32 (the model's widths are multiples of 4). A prompt that goes on from what another left is read in other
pieces: there the tokens must be equal and log-probabilities equal to 2e-5.
"""

from dataclasses import replace

import pytest
import torch
from engine_cases import (
    SHAPE,
    SHAPES,
    all_returned,
    by_sample,
    drain,
    drawn,
    engine_of,
    equal_bits,
    equal_tokens,
    model,
    pictured,
    requests,
    serve,
    tokens,
)

from earlyfusion.model.engine.requests import PausedRequest, Request, RequestError

pytestmark = pytest.mark.usefixtures("way")
LENGTHS = [1, 5, 17, 40, 90, 33, 2, 64]


def mixed(seed: int, lengths=LENGTHS, **options) -> list[Request]:
    """Texts, a picture and a group."""
    params = drawn(16, seed=seed, **options)
    return [
        *requests(lengths, params, seed),
        Request("image", pictured(seed), params),
        Request("group", tokens(11), replace(params, n=3)),
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_batch_size_order_and_page_size_change_no_bit(shape, seed):
    net, given = model(seed, **SHAPES[shape]), mixed(seed, top_p=0.95)
    base = serve(net, given, max_slots=9)
    for slots, page in ((3, 4), (9, 32)):
        equal_bits(base, serve(net, given, max_slots=slots, page_size=page))
    torch.manual_seed(seed)
    shuffled = [given[i] for i in torch.randperm(len(given))]
    equal_bits(base, serve(net, shuffled, max_slots=4))
    alone = serve(net, given[3:4], max_slots=1)
    equal_bits({key: base[key] for key in alone}, alone)
    assert len({tuple(c.ids) for c in base.values()}) > 5  # they are different texts


def test_large_batches_change_no_bit():
    """Rows 1 .. 40 of a batch: whole and broken vectors, one and several blocks of a product."""
    net = model()
    given = requests([3 + i % 13 for i in range(40)], drawn(6))
    equal_bits(serve(net, given, max_slots=40), serve(net, given, max_slots=7))


@pytest.mark.parametrize("length", [8, 16, 21])
def test_a_forked_group_is_its_samples_one_by_one(length):
    """Prompts that end at and inside a page: shared whole pages, the last one copied on write."""
    net = model()
    request = Request("g", tokens(length), drawn(20, n=6))
    group = serve(net, [request])
    assert len({tuple(c.ids) for c in group.values()}) > 4

    # the same samples, each with a memory of its own: cancel all others before they begin
    for index in range(6):
        alone = engine_of(net)
        handle = alone.submit(request)
        for sample in alone.scheduler.waiting[0].samples:
            if sample.index != index:
                alone.scheduler.finish(sample, "cancelled")
        drain(alone)
        equal_bits({("g", index): group["g", index]}, by_sample(handle.completions[index : index + 1]))


@pytest.mark.parametrize("seed", [0, 1])
def test_pause_and_migration_change_no_bit(seed):
    """Paused after 0, 1, 2, ... steps, sent as bytes to another engine with other sizes, resumed there."""
    given = mixed(seed)
    base = serve(model(seed), given, max_slots=16)
    here = engine_of(model(seed), max_slots=16)
    there = engine_of(model(seed), max_slots=5, page_size=16)
    handles = [here.submit(request) for request in given]
    for step, request in enumerate(given):
        paused = PausedRequest.from_bytes(*here.pause(request.id).to_bytes())
        handles[step] = there.resume(paused)
        here.step()
        there.step()
    drain(there)
    all_returned(here)
    equal_bits(base, by_sample(c for handle in handles for c in handle.completions))


def test_a_state_of_another_model_and_damaged_bytes_are_refused():
    engine, elsewhere = engine_of(model()), engine_of(model(0, **dict(SHAPE, kv_lora_rank=12)))
    engine.submit(Request("r", tokens(20), drawn(8)))
    engine.step()
    engine.step()
    paused = engine.pause("r")
    with pytest.raises(RequestError, match=r"mla\.3\.latents: got \(21, 24\), this model needs \(21, 20\)"):
        elsewhere.resume(paused)
    with pytest.raises(RequestError, match="not unfinished here"):
        engine.pause("r")
    facts, tensors = paused.to_bytes()
    for wrong in ((b"{}", b""), (b"\xff", tensors), (facts, tensors[:-1]), (b'{"tensor": "0"}', tensors)):
        with pytest.raises(RequestError, match="not a paused request"):
            PausedRequest.from_bytes(*wrong)


def test_states_are_kept_of_all_or_of_those_alone_that_are_cut():
    stops = tuple(range(20, 300, 3))
    for keep, reasons in ((True, {"stop", "length"}), ("cut", {"length"}), (False, set())):
        engine = engine_of(model(1))
        for request in requests([9, 14], drawn(4, n=8, stop_ids=stops)):
            engine.submit(replace(request, keep_state=keep))
        ended = [event for _ in range(9) for event in engine.step() if event.completion is not None]
        assert {event.completion.finish_reason for event in ended} == {"stop", "length"}
        assert {event.completion.finish_reason for event in ended if event.left is not None} == reasons


def test_a_prompt_that_goes_on_from_what_another_left_is_read_from_there_alone():
    """A picture, an answer that stops, then words of somebody else. Oracles: the whole prompt read anew, and
    the same with other requests beside it."""
    net = model(1)
    first = Request("a", pictured(1), drawn(150, stop_ids=tuple(range(20, 300, 12))), keep_state=True)

    def talk(kept: bool, others: int = 0):
        engine = engine_of(net, image_cache=1)
        for request in [first, *requests([30, 7, 12][:others], drawn(25))]:
            engine.submit(request)
        ended: dict = {}
        while "a" not in ended or (engine.has_work and not others):
            ended |= {event.request_id: event for event in engine.step() if event.completion is not None}
        done, read, left = ended["a"].completion, engine.stats()["read_tokens"], ended["a"].left
        assert done.finish_reason == "stop" and len(done.ids) > 1
        assert not any(event.left for name, event in ended.items() if name != "a")
        ids = torch.cat([torch.as_tensor(first.prompt.ids), torch.tensor(done.ids), tokens(19).ids])
        whole = replace(first.prompt, ids=ids, loss_weights=torch.zeros(len(ids)))
        handle = engine.submit(Request("b", whole, drawn(10)), left if kept else None)
        drain(engine)
        return by_sample(handle.completions), engine.stats()["read_tokens"] - read, left

    gone_on, read, left = talk(kept=True)
    anew, read_anew, _ = talk(kept=False)
    assert read == 19 + 1 == read_anew - left.length
    equal_tokens(gone_on, anew)
    equal_bits(gone_on, talk(kept=True, others=3)[0])
    engine = engine_of(net)
    for request, after, message in (
        (Request("x", tokens(300), drawn(4, n=2)), left, "expected one sample"),
        (Request("x", tokens(left.length), drawn(4)), left, "a longer prompt"),
        (Request("x", tokens(300), drawn(4), capture_routing=True), left, "knows no routing"),
        (Request("x", tokens(300), drawn(4)), replace(left, state={}), "this model needs"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.submit(request, after)
    all_returned(engine)
