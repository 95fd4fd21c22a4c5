"""The quick way on a CPU computes what the model's own modules compute, and only that way is quick."""

from dataclasses import replace

import pytest
import torch
from engine_cases import K3, PLAIN, SHAPE, TOKENIZER, all_returned, drawn, model, requests, tokens

from earlyfusion.kernels.kda import naive
from earlyfusion.kernels.kda.step import conv_step_, kda_step_
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.engine import runner as runner_module
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.lean import is_lean
from earlyfusion.model.engine.request import Request, SamplingParams
from earlyfusion.model.engine.sampler import likeliest
from earlyfusion.model.engine.stores import KdaSlots

SHAPES = {
    "block_attnres": SHAPE,
    "full_attnres": dict(SHAPE, attn_res="full"),
    "k3_options": K3,
    "no_attnres_low_rank_query": PLAIN,
    "kda_last": dict(
        PLAIN, num_hidden_layers=2, linear_attn_config={**SHAPE["linear_attn_config"], "kda_layers": [1, 2]}
    ),
    "wide_latents": dict(SHAPE, kv_lora_rank=64, num_shared_experts=0),
}
DIGITS = 1e-10  # fp64: other sums of the same numbers
ROUNDING = 2e-5  # fp32


def engine_of(net, lean: bool, **options) -> Engine:
    original = runner_module.is_lean
    runner_module.is_lean = original if lean else lambda decoder: False
    try:
        engine = Engine(net, TOKENIZER, **{"max_slots": 5, "page_size": 8, "prefill_chunk": 32, **options})
    finally:
        runner_module.is_lean = original
    assert (engine.runner.lean is not None) == lean
    return engine


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_gives_the_tokens_and_log_probabilities_of_the_modules(shape, seed):
    """fp64, prompts in chunks, groups, more requests than slots: absorbed and joined weights, windows, pruned
    last layer."""
    net = model(seed, **SHAPES[shape]).double()
    given = requests([1, 8, 31, 40, 100], drawn(12, seed=seed), seed) + [
        Request("g", tokens(9), drawn(12, n=3))
    ]
    found = []
    for lean in (True, False):
        engine = engine_of(net, lean)
        found.append({(c.request_id, c.index): c for c in engine.generate(given)})
        all_returned(engine)
    for key, one in found[0].items():
        other = found[1][key]
        assert one.ids == other.ids
        torch.testing.assert_close(
            torch.tensor(one.logprobs1), torch.tensor(other.logprobs1), atol=ROUNDING, rtol=0
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_hidden_states_agree_to_ten_digits(shape):
    """One uncached forward of the decoder against reading a prompt and stepping on, with padding rows."""
    net = model(2, **SHAPES[shape]).double()
    whole = tokens(45).ids
    with torch.no_grad():
        hidden = net.decoder(net.decoder.embed_tokens(whole), Segments((45,)))
        expected = net.logits(hidden)
    engine = engine_of(net, True)
    engine.submit(Request("r", replace(tokens(1), ids=whole[:40]), SamplingParams(6, 0.0, ignore_eos=True)))
    with torch.inference_mode():
        engine._begin(engine.scheduler.admit())
        while engine.scheduler.reading:
            hidden = engine.runner.prefill(_parts(engine))
            for part in engine.parts:
                part.sample.length = part.stop
            if engine.parts[-1].completes:
                sample = engine._read_to_the_end(engine.parts[-1].sample)[0]
        torch.testing.assert_close(net.logits(hidden)[0], expected[39], atol=DIGITS, rtol=0)
        for position in range(40, 45):
            engine.scheduler.make_room(sample, position + 1)
            engine.runner.page_tables([sample])
            engine.runner.last_S[sample.slot], engine.runner.length_S[sample.slot] = whole[position], position
            slots = torch.tensor([sample.slot] + [0] * 7)
            got = engine.runner.decode_logits(slots, 128, (sample.slot, sample.slot + 1), 1)[0]
            torch.testing.assert_close(got, expected[position], atol=DIGITS, rtol=0)
            sample.length = position + 1


def _parts(engine: Engine):
    engine.parts = engine.scheduler.next_parts()
    for part in engine.parts:
        engine.scheduler.make_room(part.sample, part.stop)
    return engine.parts


@pytest.mark.parametrize(("rows", "live"), [(8, 8), (8, 3), (16, 16)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_step_in_place_equals_the_definition(rows, live, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    heads, dim, width = 3, 12, 4
    x, weight, taps = (
        draw(rows, 3 * heads * dim),
        draw(3 * heads * dim, width),
        draw(live, width - 1, 3 * heads * dim),
    )
    f, b, state = draw(rows, heads, dim), draw(rows, heads), draw(live, heads, dim, dim)
    A_log, dt_bias = draw(heads), draw(heads, dim)
    # the definition: a document of one token each, with the taps before it
    y, new_taps = naive.short_conv(
        x[:live], weight, Segments((1,) * live), initial_taps_NCW1=taps.transpose(1, 2), output_taps=True
    )
    q, k, v = (part.view(live, heads, dim) for part in y.chunk(3, dim=-1))
    o, new_state = naive.kda_step(q, k, v, f[:live], b[:live], A_log, dt_bias, state)
    alpha = (-A_log.exp()[:, None] * torch.nn.functional.softplus(f + dt_bias)).exp()
    mine = conv_step_(x, weight.T.contiguous(), taps)
    got = kda_step_(mine.view(rows, 3, heads, dim), alpha, b.sigmoid(), state, naive.L2_EPS)
    torch.testing.assert_close(mine[:live], y, atol=1e-12, rtol=0)
    torch.testing.assert_close(taps, new_taps.transpose(1, 2), atol=0, rtol=0)
    torch.testing.assert_close(got[:live] * dim**-0.5, o, atol=1e-11, rtol=0)
    torch.testing.assert_close(state, new_state, atol=1e-11, rtol=0)
    assert (got[live:] == 0).all()


@pytest.mark.parametrize("seed", [0, 1])
def test_the_likeliest_token_is_that_of_argmax(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-3, 4, (64, 501), generator=generator).float()  # many equals
    scores[3] = float("-inf")
    scores[4, 7:] = float("-inf")
    assert torch.equal(likeliest(scores.clone()), scores.argmax(-1))
    scores[5, 3] = float("nan")
    assert 0 <= int(likeliest(scores.clone())[5]) < 501


def test_running_samples_close_the_gaps_that_others_leave():
    """Neighbouring slots are what lets states be worked on in place; nothing changes for those who move."""
    net = model()
    given = [Request(f"r{i}", tokens(6 + i), drawn(4 + 5 * (i % 3))) for i in range(6)]
    alone = {}
    for request in given:
        alone |= {c.request_id: c for c in engine_of(net, True).generate([request])}
    engine = engine_of(net, True, max_slots=6)
    handles = [engine.submit(request) for request in given]
    while engine.has_work:
        engine.step()
        batch = engine.runner._batch
        assert batch is None or batch.span is not None
    for handle in handles:
        assert handle.completions[0].logprobs == alone[handle.id].logprobs
    all_returned(engine)


def test_new_weights_reach_the_joined_copies():
    net, other = model(0), model(1)
    engine = engine_of(net, True)
    engine.generate(requests([9], drawn(3)))
    engine.load_weights({name: tensor.clone() for name, tensor in other.state_dict().items()}, version=1)
    got = engine.generate(requests([9, 20], drawn(8)))
    expected = engine_of(other, True).generate(requests([9, 20], drawn(8)))
    for one, two in zip(got, expected):
        assert one.ids == two.ids and one.logprobs == two.logprobs and set(one.versions) == {1}


def test_other_precisions_and_kernels_take_the_plain_way(monkeypatch):
    net = model()
    assert is_lean(net.decoder) and is_lean(model().double().decoder)
    assert not is_lean(model().bfloat16().decoder)
    assert not is_lean(model().to("meta").decoder)
    monkeypatch.setenv("EF_KERNELS", "naive")
    assert not is_lean(net.decoder)
    done = engine_of(net, False).generate(requests([5], drawn(3)))
    assert len(done[0].ids) == 3 and isinstance(Engine(net, None).pools.layers[0], KdaSlots)
