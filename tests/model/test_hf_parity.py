"""The decoder against transformers' KimiLinear (pure torch, written by others) with copied weights."""

from __future__ import annotations

import pytest
import torch

from earlyfusion.kernels.segments import Segments
from earlyfusion.model.decoder import Decoder
from earlyfusion.model.fusion import NativeFusion
from tests.model.reference import copy_weights, pure_torch, reference_model, to_reference
from tests.model.tiny import PAD_TOKEN, build, tiny_fusion

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
    ids = torch.randint(0, model.config.text.vocab_size, (2, 24))
    decoder = model.decoder.eval()
    with torch.no_grad(), pure_torch():
        cache = decoder.new_cache(2)
        prompt = decoder(decoder.embed_tokens(ids[:, :19].flatten()), Segments((19, 19)), cache)
        ours = [model.logits(prompt.view(2, 19, -1)[:, -1])]
        ours += [model.step(ids[:, t], cache) for t in range(19, 24)]
        out = reference(input_ids=ids[:, :19], use_cache=True)
        theirs = [out.logits[:, -1]]
        for t in range(19, 24):
            out = reference(input_ids=ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
            theirs.append(out.logits[:, -1])
    torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), atol=TOLERANCE, rtol=TOLERANCE)
