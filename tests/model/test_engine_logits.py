"""The engine computes what training computes: logits at every position and log-probabilities in double
precision, after long prompts too."""

from copy import deepcopy
from unittest import mock

import pytest
import torch
from engine_cases import (
    K3,
    LINEAR,
    PLAIN,
    SHAPE,
    SHAPES,
    drawn,
    engine_of,
    model,
    pictured,
    requests,
    tokens,
    trained_logits,
)

from earlyfusion.model.engine import runner
from earlyfusion.model.engine.requests import Request, sequence_key

TOLERANCE = 1e-4  # fp32 against fp64, absolute: up to 170 positions through a few layers
ODD = dict(num_heads=3, head_dim=20, short_conv_kernel_size=3)
MORE_SHAPES = {
    "full_attnres": dict(SHAPE, attn_res="full"),
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
    "dense": dict(SHAPE, num_experts=0, tie_word_embeddings=True),
    "wide_heads": dict(SHAPE, linear_attn_config=dict(num_heads=2, head_dim=80, short_conv_kernel_size=2)),
}


def check(net, tolerance: float, given: list[Request], **options) -> None:
    """Teacher-forced by what was drawn: the engine's logits against those of training in fp64."""
    seen, plain = {}, runner.choose

    def choose(logits_BV, controls, banned):
        places = zip(controls.keys_B.tolist(), controls.positions_B.tolist())
        seen.update(zip(places, logits_BV.clone()))  # the sampler may overwrite what it gets
        return plain(logits_BV, controls, banned)

    with mock.patch.object(runner, "choose", choose):
        done = engine_of(net, **options).generate(given)
    asked = {request.id: request for request in given}
    exact = deepcopy(net).double()
    for completion in done:
        request = asked[completion.request_id]
        key = sequence_key(request.params.seed, request.id, completion.index)
        got = torch.stack([seen[key, place] for place in range(len(completion.ids))]).double()
        expected = trained_logits(exact, request.prompt, completion.ids)
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
        logprobs = expected.log_softmax(-1).gather(1, torch.tensor(completion.ids)[:, None]).squeeze(1)
        told = torch.tensor(completion.logprobs1, dtype=torch.float64)
        torch.testing.assert_close(told, logprobs, atol=TOLERANCE, rtol=0)  # the sampler's are fp32


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shape", {**SHAPES, **MORE_SHAPES})
def test_logits_equal_the_training_forward_at_every_position(shape):
    """Prompts shorter, equal to and longer than chunks, pages and tiles of keys; pictures, groups."""
    net = model(1, **{**SHAPES, **MORE_SHAPES}[shape])
    given = requests([1, 8, 31, 32, 33, 150], drawn(20, seed=1), 1)
    given += [
        Request("picture", pictured(1), drawn(20, n=3)),
        Request("two", pictured(1, size=(17, 70), images=2), drawn(9)),
        Request("clip", pictured(1, images=0, frames=5), drawn(9)),
    ]
    check(net, TOLERANCE, given, max_slots=9)


def test_double_precision_agrees_to_ten_digits():
    """In fp64 the two ways of computing agree far below any mistake of indexing could hide."""
    check(model(1, **K3).double(), 1e-9, requests([3, 70], drawn(16)), page_size=4, prefill_chunk=16)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [96, 512])
def test_a_long_prompt_read_in_chunks_is_one_reading(size):
    """3,000 tokens against a single forward of a model that looks far back: slow forgetting in KDA, sharp
    attention in MLA."""
    net = model()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-6.0)
            if name.endswith(("kv_b_proj.weight", "self_attn.q_proj.weight")):
                parameter.mul_(1.5)
    given = [Request("long", tokens(3000), drawn(4))]
    check(net, TOLERANCE, given, max_slots=2, max_pages=400, page_size=16, prefill_chunk=size)
