"""The compiled decode step computes what the modules compute, and where there is no compiler nothing else
changes."""

from dataclasses import replace

import numpy as np
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
    requests,
    serve,
    tokens,
)

from earlyfusion.kernels.cpu import build
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.engine import cpu
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Request, SamplingParams

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
LINEAR = SHAPE["linear_attn_config"]
ODD = dict(num_heads=3, head_dim=20, short_conv_kernel_size=3)
SHAPES = {
    "block_attnres": SHAPE,
    "full_attnres": dict(SHAPE, attn_res="full"),
    "k3_options": K3,
    "no_attnres_low_rank_query": PLAIN,
    "kda_last": dict(PLAIN, num_hidden_layers=2, linear_attn_config={**LINEAR, "kda_layers": [1, 2]}),
    "wide_latents": dict(SHAPE, kv_lora_rank=64, num_shared_experts=0),
    "odd_widths": dict(
        PLAIN,
        hidden_size=44,
        num_attention_heads=5,
        kv_lora_rank=21,
        qk_rope_head_dim=0,
        v_head_dim=7,
        linear_attn_config=ODD,
    ),
    "odd_widths_gated": dict(
        SHAPE, hidden_size=52, kv_lora_rank=9, v_head_dim=7, qk_nope_head_dim=33, moe_intermediate_size=11
    ),
    "many_experts": dict(
        SHAPE, num_experts=33, num_experts_per_token=7, num_shared_experts=2, moe_renormalize=False
    ),
    "one_expert_a_token": dict(SHAPE, num_experts=5, num_experts_per_token=1),
    "dense": dict(SHAPE, num_experts=0),
    "wide_heads": dict(SHAPE, linear_attn_config=dict(num_heads=2, head_dim=80, short_conv_kernel_size=2)),
}
ROUNDING = 2e-5  # fp32, other sums of the same numbers
EXACT = 6e-5  # fp32 against fp64: 150 positions through a few layers
PAGE = 8


def engine_of(net, **options) -> Engine:
    engine = Engine(net, TOKENIZER, **{"max_slots": 5, "page_size": PAGE, "prefill_chunk": 256, **options})
    assert engine.runner.compiled is not None
    return engine


def stepped_logits(net, whole: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits of every position from prompt - 1 on, one row of a batch with two others in slots apart."""
    engine = engine_of(net)
    lengths = {"a": prompt, "b": 3, "c": 7}
    for name, length in lengths.items():
        ids = whole[:length] if name == "a" else tokens(length).ids
        params = SamplingParams(len(whole) - prompt + 1, 0.0, ignore_eos=True)
        engine.submit(Request(name, replace(tokens(1), ids=ids), params))
    while not engine.scheduler.running or engine.scheduler.reading:
        engine.step()
    samples = {sample.parent.request.id: sample for sample in engine.scheduler.running}
    order = [samples[name] for name in ("c", "a", "b")]
    found = []
    runner = engine.runner
    with torch.inference_mode():
        for position in range(samples["a"].length, len(whole)):
            for sample in order:
                engine.scheduler.make_room(sample, sample.length + 1)
            runner.page_tables(order)
            slots = torch.tensor([sample.slot for sample in order] + [0] * 5)
            runner.last_S[samples["a"].slot] = whole[position]
            for sample in order:
                runner.length_S[sample.slot] = sample.length
            found.append(runner.decode_logits(slots, 512, len(order))[1].clone())
            for sample in order:
                sample.length += 1
    return torch.stack(found)


@needs_compiler
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_agree_with_the_modules_in_double_precision(shape, seed):
    """Over more than one tile of keys and many pages."""
    net = model(seed, **SHAPES[shape])
    whole = tokens(150, seed).ids
    got = stepped_logits(net, whole, 40)
    exact = net.double()
    with torch.no_grad():
        expected = exact.logits(exact.decoder(exact.decoder.embed_tokens(whole), Segments((150,))))
    torch.testing.assert_close(got.double(), expected[-got.shape[0] :], atol=EXACT, rtol=EXACT)
    assert got.shape[0] > 100


@needs_compiler
@pytest.mark.parametrize("shape", ["block_attnres", "odd_widths", "many_experts"])
def test_threads_and_neighbours_change_no_bit(shape):
    net = model(0, **SHAPES[shape])
    given = requests([1, 5, 17, 40, 90, 33, 2], drawn(12))
    found = []
    for threads, slots in ((1, 7), (2, 7), (3, 7), (5, 4), (1, 1)):
        torch.set_num_threads(threads)
        try:
            engine = engine_of(net, max_slots=slots)
            found.append({c.request_id: (c.ids, c.logprobs) for c in engine.generate(given)})
        finally:
            torch.set_num_threads(1)
    for other in found[1:]:
        assert other == found[0]


@needs_compiler
def test_chosen_experts_are_recorded(monkeypatch):
    net = model(0, **SHAPES["many_experts"])
    found = []
    for kernels in ("auto", "torch"):
        monkeypatch.setenv("EF_KERNELS", kernels)
        engine = Engine(net, TOKENIZER, max_slots=4, page_size=PAGE)
        assert (engine.runner.compiled is not None) == (kernels == "auto")
        done = engine.generate(requests([5, 8, 3], drawn(9), capture_routing=True))
        found.append([(c.ids, np.sort(c.routing, axis=-1).tolist()) for c in done])
        all_returned(engine)
    assert found[0] == found[1]
    assert [len(routing) for _, routing in found[0]] == [13, 16, 11]


@needs_compiler
def test_new_weights_reach_the_packed_copies():
    net, other = model(0), model(1)
    engine = engine_of(net)
    engine.generate(requests([9], drawn(3)))
    engine.load_weights({name: tensor.clone() for name, tensor in other.state_dict().items()}, version=1)
    got = engine.generate(requests([9, 20], drawn(8)))
    expected = engine_of(other).generate(requests([9, 20], drawn(8)))
    for one, two in zip(got, expected):
        assert one.ids == two.ids and one.logprobs == two.logprobs


@needs_compiler
def test_it_stands_aside(monkeypatch):
    net = model()
    assert Engine(model().double(), TOKENIZER).runner.compiled is None
    assert Engine(model().bfloat16(), TOKENIZER).runner.compiled is None
    monkeypatch.setattr(cpu, "free_memory", lambda: 1000)
    assert Engine(net, TOKENIZER).runner.compiled is None
    monkeypatch.undo()
    monkeypatch.setenv("EF_KERNELS", "naive")
    assert Engine(net, TOKENIZER).runner.compiled is None


def test_without_a_compiler_the_engine_answers_the_same(monkeypatch, request):
    request.addfinalizer(build._library.cache_clear)
    net = model()
    given = requests([1, 8, 31, 70], drawn(12))
    found = []
    for compiler in (None, "no-such-compiler"):
        if compiler is not None:
            monkeypatch.setenv("CXX", compiler)
            build._library.cache_clear()
        engine = Engine(net, TOKENIZER, max_slots=3, page_size=PAGE)
        if compiler is not None:
            assert engine.runner.compiled is None
        found.append({c.request_id: c for c in engine.generate(given)})
    for name, one in found[0].items():
        other = found[1][name]
        assert one.ids == other.ids
        torch.testing.assert_close(
            torch.tensor(one.logprobs1), torch.tensor(other.logprobs1), atol=ROUNDING, rtol=0
        )


@needs_compiler
@pytest.mark.parametrize("shape", ["block_attnres", "k3_options", "kda_last", "many_experts"])
def test_no_cut_of_a_sequence_changes_a_bit(shape):
    """Chunks of a prompt, more rows than go through together, one row or many, reading again after a
    pause."""
    net = model(0, **SHAPES[shape])
    given = requests([5, 40, 90, 33, 150, 300], drawn(16))
    base = serve(net, given, prefill_chunk=512, max_slots=6)
    for chunk, slots in ((7, 4), (50, 6), (4, 2)):
        equal_bits(base, serve(net, given, prefill_chunk=chunk, max_slots=slots))
    engine = Engine(net, TOKENIZER, max_slots=6, page_size=PAGE)
    handles = [engine.submit(request) for request in given]
    for request in given:
        engine.step()
        handles[int(request.id[1:])] = engine.resume(engine.pause(request.id), keep_state=False)
    while engine.has_work:
        engine.step()
    equal_bits(base, {(handle.id, 0): handle.completions[0] for handle in handles})
