"""A tiny model, prompts and short ways to serve them, for the tests of the engine."""

from typing import Any

import torch
from fusion_cases import tiny_config, tiny_model, tiny_tokenizer
from PIL import Image as PilImage

from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Image, Sample, Text, Video
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.engine.engine import Engine, Row
from earlyfusion.model.engine.requests import Completion, Request, SamplingParams, TokenPrompt
from earlyfusion.model.fusion import NativeFusion

# widths are multiples of 4: what the engine's bit-exactness on a CPU asks of a model
LINEAR = dict(num_heads=4, head_dim=16, short_conv_kernel_size=4)
SHAPE: dict[str, Any] = dict(num_attention_heads=4, linear_attn_config=LINEAR)
K3 = dict(SHAPE, linear_attn_config={**LINEAR, "gate_lower_bound": -5.0, "full_rank_output_gate": True})
PLAIN = dict(SHAPE, attn_res="none", mla_output_gate=False, q_lora_rank=12)
SHAPES = {"block_attnres": SHAPE, "k3_options": K3, "no_attnres_low_rank_query": PLAIN}
ROUNDING = 2e-5  # fp32, other sums of the same numbers

TOKENIZER = tiny_tokenizer()
CONFIG = tiny_config(TOKENIZER, **SHAPE)


def model(seed: int = 0, **shape) -> NativeFusion:
    return tiny_model(tiny_config(TOKENIZER, **(shape or SHAPE)), seed)


def tokens(length: int, seed: int = 0) -> TokenPrompt:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return TokenPrompt(torch.randint(12, TOKENIZER.vocab_size, (length,), generator=generator))


def joined(*parts: Any) -> TokenPrompt:
    """Prompts and lists of ids, one after another."""
    return TokenPrompt(torch.cat([torch.as_tensor(getattr(part, "ids", part)).long() for part in parts]))


def pictured(
    seed: int,
    text: str = "\nQ: what color is the shape?\nA:",
    size: tuple[int, int] = (40, 24),
    images: int = 1,
    frames: int = 0,
):
    """A prompt of pictures, each with the text behind it, and of a clip of so many frames."""
    generator = torch.Generator().manual_seed(seed)
    shape, segments, drawn = (size[1], size[0], 3), [], []
    for _ in range(images + frames):
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).numpy()
        drawn.append(PilImage.fromarray(pixels))
    for picture in drawn[:images]:
        segments += [Image(picture), Text(text)]
    if frames:
        segments += [Video(drawn[images:], [0.5 * i for i in range(frames)]), Text(text)]
    return encode(Sample(segments, "test", "0"), TOKENIZER, CONFIG.vision, eos=False)


def drawn(max_new_tokens: int = 12, **options) -> SamplingParams:
    """Sampling at temperature 1 with log-probabilities, ended by length only."""
    return SamplingParams(
        max_new_tokens, **{"temperature": 1.0, "logprobs": True, "ignore_eos": True, **options}
    )


def requests(lengths, params: SamplingParams | None = None, seed: int = 0, **options) -> list[Request]:
    params = params or drawn(seed=seed)
    return [Request(f"r{i}", tokens(n, seed), params, **options) for i, n in enumerate(lengths)]


def engine_of(net: NativeFusion, **options) -> Engine:
    return Engine(net, TOKENIZER, **{"max_slots": 8, "page_size": 8, "prefill_chunk": 32, **options})


def drain(engine: Engine) -> list:
    """Steps until nothing is left; all events."""
    events = []
    while engine.has_work:
        events += engine.step()
    all_returned(engine)
    return events


def serve(model: NativeFusion, given: list[Request], **options) -> dict[tuple[str, int], Completion]:
    """Completions by (request, sample); everything has been given back afterwards."""
    engine = engine_of(model, **options)
    done = by_sample(engine.generate(given))
    all_returned(engine)
    return done


def by_sample(completions) -> dict[tuple[str, int], Completion]:
    return {(completion.request_id, completion.index): completion for completion in completions}


def equal_bits(one, other) -> None:
    """Completions by (request, sample): equal tokens, and log-probabilities equal to the last bit."""
    assert one.keys() == other.keys()
    for key, completion in one.items():
        assert completion.ids == other[key].ids, key
        assert completion.logprobs == other[key].logprobs, key
        assert completion.logprobs1 == other[key].logprobs1, key


def equal_tokens(one, other) -> None:
    """Equal tokens, and log-probabilities equal but for rounding."""
    assert one.keys() == other.keys()
    for key, completion in one.items():
        assert completion.ids == other[key].ids, key
        for name in ("logprobs", "logprobs1"):
            pair = [torch.tensor(getattr(each, name)) for each in (completion, other[key])]
            torch.testing.assert_close(*pair, atol=ROUNDING, rtol=0)


def all_returned(engine: Engine) -> None:
    """Every slot and page is free or held by the prefix cache, and held as often as the cache says."""
    stats = engine.stats()
    assert stats["free_slots"] == stats["slots"] - stats["prefix_checkpoints"]
    assert stats["free_pages"] == stats["pages"] - stats["prefix_pages"]
    assert stats["reserved_pages"] == stats["running"] == stats["reading"] == stats["waiting"] == 0
    assert not engine.scheduler.seated
    assert set(engine.pools.references) == engine.prefix.pages
    for free in (engine.pools.free_slots, engine.pools.free_pages):
        assert len(free) == len(set(free))


def trained_logits(model: NativeFusion, prompt, ids: list[int]) -> torch.Tensor:
    """Logits [len(ids), V] that choose `ids`, from one uncached forward over the whole text with gradients on
    (the kernels of training)."""
    whole, vision = joined(prompt, ids).ids, model.config.vision
    patches = prompt.patches
    if patches is None:
        patches = torch.empty(0, 3, vision.patch_size, vision.patch_size, dtype=torch.uint8)
    positions = torch.as_tensor(prompt.media_positions).long()
    row = Row(whole, Segments((len(whole),)), patches, list(prompt.grids), positions)
    with torch.enable_grad():
        hidden = model.hidden(row)
    return model.logits(hidden)[len(prompt.ids) - 1 : -1].detach()
