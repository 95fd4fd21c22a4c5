"""The engine computes what training computes: logits at every position, log-probabilities, states of long
prompts."""

from itertools import pairwise

import pytest
import torch
from engine_cases import K3, PLAIN, SHAPE, TOKENIZER, drawn, model, pictured, requests, tokens, trained_logits

from earlyfusion.kernels.attention.tiles import tiles
from earlyfusion.kernels.kda import chunk, conv
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Request, SamplingParams, TokenPrompt
from earlyfusion.model.mla import MultiHeadLatentAttention

pytestmark = pytest.mark.usefixtures("way")
TOLERANCE = 1e-4  # fp32, absolute: recurrent against chunked KDA, absorbed against expanded attention
SHAPES = {
    "block_attnres": SHAPE,
    "k3_options": K3,
    "no_attnres_low_rank_query": PLAIN,
    "full_attnres": dict(SHAPE, attn_res="full"),
}


class Watched(Engine):
    """Keeps the logits that chose every token."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seen: dict[tuple[str, int], list[torch.Tensor]] = {}
        plain_decode, plain_first = self.runner.decode, self.runner.choose_first
        self.head = self.model if self.runner.compiled is None else self.runner.compiled
        logits_of = self.head.logits
        last: list[torch.Tensor] = []

        def logits(hidden):
            last.append(logits_of(hidden))
            return last[-1].clone()  # the sampler may overwrite what it gets

        object.__setattr__(self.head, "logits", logits)

        def note(samples):
            for sample, row in zip(samples, last.pop()):
                self.seen.setdefault((sample.parent.request.id, sample.index), []).append(row.clone())

        def decode(running, steps=1, recording=False):
            chosen = plain_decode(running, steps, recording)
            note(running)
            return chosen

        def first(hidden, samples, rows):
            chosen = plain_first(hidden, samples, rows)
            note(samples)
            return chosen

        self.runner.decode, self.runner.choose_first = decode, first

    def look_away(self) -> None:
        del self.head.logits


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_the_training_forward_at_every_position(shape, seed):
    """Teacher-forced by what was drawn; prompts shorter, equal to and longer than chunks and pages, with
    pictures."""
    net = model(seed, **SHAPES[shape])
    given = requests([1, 8, 31, 32, 33, 100], drawn(20, seed=seed), seed)
    given += [
        Request("picture", pictured(seed), drawn(20, n=3)),
        Request("two", pictured(seed, images=2), drawn(9)),
    ]
    engine = Watched(net, TOKENIZER, max_slots=9, page_size=8, prefill_chunk=32)
    done = engine.generate(given)
    engine.look_away()
    prompts = {request.id: request.prompt for request in given}
    for completion in done:
        expected = trained_logits(net, prompts[completion.request_id], completion.ids)
        got = torch.stack(engine.seen[completion.request_id, completion.index]).float()
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
        logprobs = expected.log_softmax(-1).gather(1, torch.tensor(completion.ids)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(completion.logprobs1), logprobs, atol=TOLERANCE, rtol=0)


def test_double_precision_agrees_to_ten_digits():
    """In fp64 the two ways of computing agree far below any mistake of indexing could hide."""
    net = model().double()
    given = requests([3, 70], drawn(16))
    engine = Watched(net, TOKENIZER, max_slots=2, page_size=4, prefill_chunk=16)
    done = engine.generate(given)
    engine.look_away()
    for request, completion in zip(given, done):
        whole = torch.cat([request.prompt.ids, torch.tensor(completion.ids)])
        with torch.no_grad():
            hidden = net.decoder(net.decoder.embed_tokens(whole), Segments((len(whole),)))
            expected = net.logits(hidden)[len(request.prompt.ids) - 1 : -1]
        got = torch.stack(engine.seen[completion.request_id, 0])
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=0)


def test_key_tiles_cover_every_length_with_the_same_borders():
    borders = tiles(1 << 20)
    for length in (1, 127, 128, 129, 700, 5000, 99999):
        part = tiles(length)
        assert part == borders[: len(part)] and part[-1][0] < length <= part[-1][1]
    assert borders[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(borders))
    assert len(borders) < 200  # a million keys in few steps


def needle_model(seed: int = 0):
    """A random model made to look far back: slow forgetting in KDA, and sharp attention in MLA."""
    net = model(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-6.0)
            if name.endswith("kv_b_proj.weight") or name.endswith("self_attn.q_proj.weight"):
                parameter.mul_(1.5)
    return net


@pytest.mark.parametrize("chunk", [64, 96, 512])
def test_a_long_prompt_read_in_chunks_leaves_the_state_of_one_reading(chunk):
    """3,000 tokens: states, taps and latents of every layer, and the answer, against a single forward."""
    net = needle_model()
    prompt = tokens(3000)
    engine = Engine(net, TOKENIZER, max_slots=2, max_pages=400, page_size=16, prefill_chunk=chunk)
    engine.submit(Request("long", prompt, drawn(4)))
    while not engine.scheduler.running:
        engine.step()
    sample = engine.scheduler.running[0]
    state = engine.pools.export(sample.slot, sample.pages, 3000)
    expected = state_of_training(net, prompt.ids)
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, atol=TOLERANCE, rtol=TOLERANCE)


def state_of_training(net, ids) -> dict[str, torch.Tensor]:
    """What the layers' training kernels leave after one uncached forward, by the kernels of training."""
    found: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(net.decoder.layers):
        mixer = layer.self_attn

        def note(module, arguments, index=index, mixer=mixer):
            x = arguments[0]
            if isinstance(mixer, MultiHeadLatentAttention):
                c, rope = mixer.kv_a_proj_with_mqa(x).split([mixer.kv_lora_rank, mixer.qk_rope_head_dim], -1)
                found[f"mla.{index}.latents"] = torch.cat([mixer.kv_a_layernorm(c), rope], -1)
                return
            heads = (len(x), mixer.num_heads, mixer.head_dim)
            joint, weight = mixer.joined_weights()
            qkv, f, _, beta = mixer._project(x, joint)
            segments = Segments((len(x),))
            y, taps = conv.short_conv(qkv, weight, segments, output_taps=True)
            q, k, v = (part.view(heads) for part in y.chunk(3, dim=-1))
            gate = (f.view(heads), beta, mixer.A_log, mixer.dt_bias.view(heads[1:]))
            _, final = chunk.kda(q, k, v, *gate, segments, output_final_state=True)
            found[f"kda.{index}.state"], found[f"kda.{index}.taps"] = final[0], taps[0].T

        mixer.register_forward_pre_hook(note)
    with torch.no_grad():
        net.decoder(net.decoder.embed_tokens(ids), Segments((len(ids),)))
    return found


def test_a_needle_at_the_beginning_of_a_long_prompt_is_found_after_chunked_reading():
    """One token near the start of 2,000 is changed. The change must reach the answer through 20 chunk borders
    with the size and direction it has in one uninterrupted forward; a state lost or transposed at a border
    would lose it."""
    net = needle_model(1)
    plain = tokens(2000)
    found, expected = [], []
    for needle in (50, 60, 70, 80):
        ids = plain.ids.clone()
        ids[10] = needle
        engine = Watched(net, TOKENIZER, max_slots=1, max_pages=200, page_size=16, prefill_chunk=100)
        engine.generate([Request("r", TokenPrompt(ids), SamplingParams(1, 0.0, ignore_eos=True))])
        engine.look_away()
        found.append(engine.seen["r", 0][0])
        expected.append(trained_logits(net, TokenPrompt(ids), [0])[0])
    found, expected = torch.stack(found), torch.stack(expected)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    effect = (expected[1:] - expected[:1]).abs().amax(-1)
    assert effect.min() > 20 * TOLERANCE  # the needle is felt at all, well above the tolerance
    assert ((found[1:] - found[:1]) - (expected[1:] - expected[:1])).abs().max() < TOLERANCE
