"""Generation with pictures and clips: the cache changes nothing. (The rest: test_engine*.py.)"""

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


@pytest.mark.parametrize(
    "text", [{"attn_res": "full"}, {"linear_attn_config": BOUNDED, "tie_word_embeddings": True}]
)
def test_cached_greedy_equals_full_recomputation_token_for_token(text):
    tokenizer = tiny_tokenizer()
    config = tiny_config(tokenizer, **text)
    model = tiny_model(config)
    given = prompts(tokenizer, config)
    cached = generate_ids(model, given, max_new_tokens=TOKENS)
    assert cached == [slow_greedy(model, p, TOKENS, [config.media_token_id]) for p in given]
    assert len({tuple(answer) for answer in cached}) > 1  # the prompts matter


def test_generate_ends_where_the_text_does_and_refuses_nothing():
    tokenizer = tiny_tokenizer()
    model = tiny_model(tiny_config(tokenizer))
    with torch.no_grad():
        model.decoder.lm_head.weight.zero_()  # all logits equal: argmax is the lowest id that may be said
    given = prompts(tokenizer, model.config)[:1]  # [BOS] is banned, [EOS] comes next
    assert generate(model, tokenizer, given, max_new_tokens=5) == [""]
    with pytest.raises(ValueError, match="no prompts"):
        generate(model, tokenizer, [])
