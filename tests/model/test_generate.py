"""Generation: the cache changes nothing. (Neighbours, bans, stops: test_engine_invariance.py,
test_engine.py.)"""

import pytest
import torch
from fusion_cases import generate_ids, tiny_config, tiny_model, tiny_tokenizer
from PIL import Image as PilImage

from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Image, Sample, Text, Video
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.generate import generate, pack_prompts

TOKENS = 12
BOUNDED = dict(num_heads=2, head_dim=16, gate_lower_bound=-5.0, full_rank_output_gate=True)


def picture(seed: int, size: tuple[int, int] = (40, 24)) -> PilImage.Image:
    torch.manual_seed(seed)
    return PilImage.fromarray(torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8).numpy())


def prompts(tokenizer, config, seed=0):
    """Text alone, one picture, two pictures of odd sizes, a clip, and a one-token prompt."""
    samples = [
        [Text("the quick brown")],
        [Image(picture(seed)), Text("\nQ: what color is the shape?\nA:")],
        [Image(picture(seed + 1, (17, 33))), Text(" fox "), Image(picture(seed + 2, (9, 70))), Text("jumps")],
        [Video([picture(seed + i, (32, 16)) for i in range(5)], [0.0, 0.5, 1.0, 1.5, 2.0]), Text("over")],
        [],
    ]
    return [
        encode(Sample(segments, "test", "0"), tokenizer, config.vision, eos=False) for segments in samples
    ]


@pytest.fixture(scope="module")
def setup():
    tokenizer = tiny_tokenizer()
    return tokenizer, tiny_config(tokenizer)


def slow_greedy(model, prompt, count, banned):
    """Greedy decoding by a full forward pass over the whole text for every new token; no cache."""
    row = pack_prompts(model, [prompt])
    ids, new = row.ids, []
    with torch.no_grad():
        vision = model.embed(row)
        for _ in range(count):
            x = torch.cat([vision, model.decoder.embed_tokens(ids[len(vision) :])])
            h = model.decoder(x, Segments.from_lengths([len(ids)]))
            logits = h[-1] @ model.decoder.head_weight().T
            logits[banned] = float("-inf")
            new.append(int(logits.argmax()))
            ids = torch.cat([ids, torch.tensor(new[-1:])])
    return new


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "text",
    [
        {},
        {"attn_res": "none", "mla_output_gate": False, "q_lora_rank": 12},
        {"attn_res": "full"},
        {"linear_attn_config": BOUNDED, "tie_word_embeddings": True},
    ],
)
def test_cached_greedy_equals_full_recomputation_token_for_token(setup, seed, text):
    tokenizer, _ = setup
    config = tiny_config(tokenizer, **text)
    model = tiny_model(config, seed)
    given = prompts(tokenizer, config, seed)
    cached = generate_ids(model, given, max_new_tokens=TOKENS)
    assert cached == [slow_greedy(model, p, TOKENS, [config.media_token_id]) for p in given]
    assert len({tuple(answer) for answer in cached}) > 1  # the prompts matter


def test_the_picture_changes_the_answer(setup):
    tokenizer, config = setup
    model = tiny_model(config)
    answers = {
        tuple(generate_ids(model, [prompts(tokenizer, config, s)[1]], max_new_tokens=8)[0]) for s in range(6)
    }
    assert len(answers) > 1


def test_generate_ends_at_eos(setup):
    tokenizer, config = setup
    model = tiny_model(config)
    with torch.no_grad():
        model.decoder.lm_head.weight.zero_()  # all logits equal: argmax is the lowest id that may be said
    assert generate(
        model, tokenizer, prompts(tokenizer, config)[:1], max_new_tokens=5, stop_ids=[tokenizer.bos_id]
    ) == [""]
    assert tokenizer.bos_id < tokenizer.eos_id < tokenizer.pad_id
    assert generate(model, tokenizer, prompts(tokenizer, config)[:1], max_new_tokens=5) == [
        ""
    ]  # [BOS] banned, [EOS] next


def test_no_prompt_and_empty_prompt_are_errors(setup):
    tokenizer, config = setup
    model = tiny_model(config)
    with pytest.raises(ValueError, match="no prompts"):
        generate_ids(model, [], max_new_tokens=1)
    empty = encode(Sample([], "test", "0"), tokenizer, config.vision, bos=False, eos=False)
    with pytest.raises(ValueError, match="prompt 0 has no tokens"):
        generate_ids(model, [empty], max_new_tokens=1)
