"""Generation with pictures and clips: the cache changes nothing. (The rest: test_engine*.py.)"""

import pytest
import torch
from engine_cases import trained_logits
from fusion_cases import tiny_config, tiny_model, tiny_tokenizer
from PIL import Image as PilImage

from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Image, Sample, Text, Video
from earlyfusion.model.engine.requests import Request, SamplingParams
from earlyfusion.model.generate import engine_for, generate

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


@pytest.mark.parametrize(
    "text", [{"attn_res": "full"}, {"linear_attn_config": BOUNDED, "tie_word_embeddings": True}]
)
def test_cached_greedy_equals_full_recomputation_token_for_token(text):
    tokenizer = tiny_tokenizer()
    config = tiny_config(tokenizer, **text)
    model = tiny_model(config)
    given, params = prompts(tokenizer, config), SamplingParams(TOKENS, 0.0, ignore_eos=True)
    requests = [Request(str(index), prompt, params) for index, prompt in enumerate(given)]
    cached = [done.ids for done in engine_for(model, None, given, TOKENS).generate(requests)]
    for prompt, ids in zip(given, cached):
        logits = trained_logits(model, prompt, ids)
        logits[:, config.media_token_id] = float("-inf")
        assert logits.argmax(-1).tolist() == ids
    assert len({tuple(ids) for ids in cached}) > 1  # the prompts matter


def test_generate_ends_where_the_text_does_and_refuses_nothing():
    tokenizer = tiny_tokenizer()
    model = tiny_model(tiny_config(tokenizer))
    with torch.no_grad():
        model.decoder.lm_head.weight.zero_()  # all logits equal: argmax is the lowest id that may be said
    given = prompts(tokenizer, model.config)[:1]  # [BOS] is banned, [EOS] comes next
    assert generate(model, tokenizer, given, max_new_tokens=5) == [""]
    with pytest.raises(ValueError, match="no prompts"):
        generate(model, tokenizer, [])
