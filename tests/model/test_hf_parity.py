"""The decoder against transformers' KimiLinear (pure torch, written by others) with copied weights."""

import pytest
import torch

from earlyfusion.kernels.segments import Segments
from earlyfusion.model.decoder import Decoder
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Request, SamplingParams, TokenPrompt
from earlyfusion.model.fusion import NativeFusion
from tests.model.reference import copy_weights, pure_torch, reference_model, to_reference
from tests.model.tiny import MEDIA_TOKEN, PAD_TOKEN, build, tiny_fusion

TOLERANCE = 1e-4  # fp32, different order of sums through four layers and chunks of 64 against our own
SHAPES = {
    "plain": {},
    "query_lora": {"q_lora_rank": 8, "num_hidden_layers": 5, "num_shared_experts": 2},
    "mla_in_the_middle": {"linear_attn_config": {"full_attn_layers": [2]}, "num_experts_per_token": 3},
}


def pair(shape: str, seed: int):
    model = build(tiny_fusion(attn_res="none", **SHAPES[shape]), seed)
    reference = reference_model(model.config.text)
    copy_weights(model.decoder, reference)
    return model, reference


def logits_of(model: NativeFusion, ids: torch.Tensor) -> torch.Tensor:
    """ids [B, T] as B packed documents."""
    decoder: Decoder = model.decoder
    hidden = decoder(decoder.embed_tokens(ids.flatten()), Segments((ids.shape[1],) * ids.shape[0]))
    return model.logits(hidden).view(*ids.shape, -1)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_gradients_equal_transformers(shape, seed):
    model, reference = pair(shape, seed)
    # transformers' embedding gives its padding id no gradient, so ids start above it
    ids = torch.randint(PAD_TOKEN + 1, model.config.text.vocab_size, (2, 70))
    target = torch.randn(2, 70, model.config.text.vocab_size)
    ours = logits_of(model, ids)
    with pure_torch():
        theirs = reference(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)
    (ours * target).mean().backward()
    (theirs * target).mean().backward()
    gradients = to_reference({name: p.grad for name, p in model.decoder.named_parameters()})
    expected = {name: p.grad for name, p in reference.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        bound = TOLERANCE * gradient.abs().max().item()
        torch.testing.assert_close(
            gradients[name], gradient, atol=bound, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("shape", ["plain", "query_lora"])
def test_cached_decoding_equals_transformers(shape):
    model, reference = pair(shape, seed=3)
    ids = torch.randint(MEDIA_TOKEN + 1, model.config.text.vocab_size, (2, 19))
    engine = Engine(model.eval(), None, max_slots=2, page_size=8)
    params = SamplingParams(6, 0.0, logprobs=True, ignore_eos=True)
    answers = engine.generate([Request(str(n), TokenPrompt(row), params) for n, row in enumerate(ids)])
    with torch.no_grad(), pure_torch():
        out = reference(input_ids=ids, use_cache=True)
        for step in range(6):
            logits = out.logits[:, -1]
            chosen = logits.index_fill(1, torch.tensor([MEDIA_TOKEN]), float("-inf")).argmax(-1)
            assert [answer.ids[step] for answer in answers] == chosen.tolist()
            expected = logits.log_softmax(-1).gather(1, chosen[:, None]).squeeze(1)
            got = torch.tensor([answer.logprobs1[step] for answer in answers])
            torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
            out = reference(input_ids=chosen[:, None], past_key_values=out.past_key_values, use_cache=True)
