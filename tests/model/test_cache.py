"""Cached decoding is the full forward, token by token, for sequences of different lengths."""

from __future__ import annotations

import pytest
import torch

from earlyfusion.kernels.attention.tiles import attend_in_tiles
from earlyfusion.kernels.segments import Segments
from tests.model.tiny import build, document, pack, tiny_fusion

TOLERANCE = 1e-10  # fp64; the absorbed attention and the recurrent step sum in another order
MODELS = {
    "kimi_linear": {},
    "k3_options": {
        "attn_res": "block",
        "attn_res_block_size": 1,
        "q_lora_rank": 8,
        "mla_output_gate": True,
        "linear_attn_config": {"gate_lower_bound": -5.0, "full_rank_output_gate": True},
    },
    "full_attnres": {"attn_res": "full", "num_hidden_layers": 5},
}
LENGTHS = (21, 3, 80)


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


def setup(shape: str, seed: int = 0):
    config = tiny_fusion(**MODELS[shape])
    model = build(config, seed, torch.float64).eval()
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(6, config.text.vocab_size, (n + 6,), generator=generator) for n in LENGTHS]
    return model, rows


def whole(model, row: torch.Tensor) -> torch.Tensor:
    decoder = model.decoder
    return decoder(decoder.embed_tokens(row), Segments((row.shape[0],)))


def feed(model, cache, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Hidden states of new tokens, one tensor per sequence."""
    segments = Segments(tuple(part.shape[0] for part in parts))
    hidden = model.decoder(model.decoder.embed_tokens(torch.cat(parts)), segments, cache)
    return list(hidden.split(list(segments.lengths)))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", MODELS)
@torch.no_grad()
def test_prefill_and_steps_equal_full_forward(shape, seed):
    model, rows = setup(shape, seed)
    expected = [whole(model, row) for row in rows]
    cache = model.decoder.new_cache(3)
    got = [[h] for h in feed(model, cache, [row[:n] for row, n in zip(rows, LENGTHS)])]
    for step in range(6):
        new = feed(model, cache, [row[n + step : n + step + 1] for row, n in zip(rows, LENGTHS)])
        for sequence, h in zip(got, new):
            sequence.append(h)
    for sequence, full in zip(got, expected):
        torch.testing.assert_close(torch.cat(sequence), full, atol=TOLERANCE, rtol=0)
    assert cache.lengths == tuple(n + 6 for n in LENGTHS)


@pytest.mark.parametrize("shape", MODELS)
@torch.no_grad()
def test_a_prompt_may_arrive_in_uneven_pieces(shape):
    model, rows = setup(shape)
    expected = [whole(model, row) for row in rows]
    cache = model.decoder.new_cache(3)
    edges = [(0, 5, 6, 7, 27), (0, 1, 2, 8, 9), (0, 64, 65, 70, 86)]
    got: list[list[torch.Tensor]] = [[], [], []]
    for piece in range(4):
        parts = [row[cut[piece] : cut[piece + 1]] for row, cut in zip(rows, edges)]
        for sequence, h in zip(got, feed(model, cache, parts)):
            sequence.append(h)
    for sequence, full in zip(got, expected):
        torch.testing.assert_close(torch.cat(sequence), full, atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_reordering_drops_and_branches_sequences():
    model, rows = setup("kimi_linear")
    cache = model.decoder.new_cache(3)
    feed(model, cache, [row[:n] for row, n in zip(rows, LENGTHS)])
    cache.reorder([2, 0, 2])
    assert cache.lengths == (80, 21, 80)
    tails = [torch.tensor([7]), torch.tensor([8]), torch.tensor([9])]
    got = feed(model, cache, tails)
    for source, tail, h in zip([2, 0, 2], tails, got):
        full = whole(model, torch.cat([rows[source][: LENGTHS[source]], tail]))
        torch.testing.assert_close(h, full[-1:], atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_image_prompts_decode_like_the_full_model():
    config = tiny_fusion(attn_res="block")
    model = build(config, dtype=torch.float64).eval()
    docs = [document(6, [(1, 4, 4)], config, 0), document(9, [(1, 2, 2), (1, 2, 4)], config, 1)]
    cache = model.decoder.new_cache(2)
    model.hidden(pack(docs), cache)
    ids = torch.tensor([11, 12])
    got = model.step(ids, cache)
    for row, doc in enumerate(docs):
        x = torch.cat([model.embed(doc), model.decoder.embed_tokens(ids[row : row + 1])])
        full = model.logits(model.decoder(x, Segments((x.shape[0],))))
        torch.testing.assert_close(got[row], full[-1], atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_a_long_generation_grows_the_latent_buffer():
    model, _ = setup("kimi_linear")
    row = torch.randint(6, 97, (150,))
    cache = model.decoder.new_cache(1)
    feed(model, cache, [row[:3]])
    first = cache.capacity
    last = [feed(model, cache, [row[t : t + 1]])[0] for t in range(3, 150)]
    assert cache.capacity > first
    torch.testing.assert_close(torch.cat(last), whole(model, row)[3:], atol=TOLERANCE, rtol=0)


def test_state_stays_fp32_under_autocast():
    model = build(tiny_fusion()).eval()
    cache = model.decoder.new_cache(1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        feed(model, cache, [torch.arange(6, 20)])
        model.step(torch.tensor([7]), cache)
    assert cache.layers[0].state_NHKV.dtype == torch.float32


def test_a_call_with_another_number_of_sequences_is_refused():
    model, rows = setup("kimi_linear")
    cache = model.decoder.new_cache(2)
    with pytest.raises(ValueError, match="holds 2 sequences but the call brings 3 segments"):
        feed(model, cache, rows)
    with pytest.raises(IndexError, match=r"sequences \[2\]"):
        cache.reorder([0, 2])
