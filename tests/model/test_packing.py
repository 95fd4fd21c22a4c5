"""A packed row is its documents: loss and every gradient; text-only and image-only batches; mismatches
refused."""

from dataclasses import replace

import pytest
import torch

from tests.model.tiny import build, close, document, gradients, pack, text_documents, tiny_fusion

# fp64 throughout except the loss kernel's per-token record; sums over documents in another order
TOLERANCE = 1e-9
MODELS = {
    "kimi_linear": {},
    "bounded_gate_block_attnres": {
        "attn_res": "block",
        "attn_res_block_size": 3,
        "linear_attn_config": {"gate_lower_bound": -5.0, "full_rank_output_gate": True},
        "mla_output_gate": True,
        "q_lora_rank": 8,
    },
    "full_attnres_tied_quantile": {
        "attn_res": "full",
        "tie_word_embeddings": True,
        "router_balance": "quantile",
    },
    "dense": {"num_experts": 0, "attn_res": "block", "attn_res_block_size": 2},
}


def mixed_documents(config, seed: int):
    return [
        document(9, [(1, 2, 4)], config, seed),
        document(1, [], config, seed + 1),
        document(17, [(1, 4, 4), (2, 2, 2)], config, seed + 2),
        document(70, [], config, seed + 3),
        document(4, [(1, 2, 2)], config, seed + 4),
    ]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", MODELS)
def test_packed_row_equals_its_documents(shape, seed):
    config = tiny_fusion(**MODELS[shape])
    model = build(config, seed, torch.float64)
    documents = mixed_documents(config, seed)
    packed = model(pack(documents))
    packed.loss_sum.backward()
    expected = gradients(model)
    alone = [model(doc) for doc in documents]
    torch.stack([out.loss_sum for out in alone]).sum().backward()
    torch.testing.assert_close(packed.nll_T, torch.cat([out.nll_T for out in alone]), atol=1e-5, rtol=0)
    torch.testing.assert_close(packed.weight_sum, sum(out.weight_sum for out in alone))
    assert len(expected) == len(list(model.parameters()))
    close(gradients(model), expected, TOLERANCE)


def test_the_future_does_not_reach_the_past():
    config = tiny_fusion(attn_res="block")
    model = build(config).eval()
    doc = document(40, [(1, 4, 4)], config, 0)
    changed = replace(doc, ids=torch.cat([doc.ids[:30], doc.ids[30:].flip(0)]))
    with torch.no_grad():
        a, b = model.hidden(doc), model.hidden(changed)
    torch.testing.assert_close(a[:30], b[:30], atol=1e-6, rtol=0)
    assert not torch.allclose(a[30:], b[30:])


def test_text_only_batch_gives_vision_gradients_of_zero():
    config = tiny_fusion()
    model = build(config)
    model(text_documents([12, 5], config)).loss_sum.backward()
    found = gradients(model)
    assert len(found) == len(list(model.parameters()))
    for name, gradient in found.items():
        if name.startswith(("vision_tower", "mm_projector")):
            assert not gradient.any(), name
        elif "A_log" not in name:
            assert torch.isfinite(gradient).all(), name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", ["kimi_linear", "bounded_gate_block_attnres"])
def test_a_broken_token_stays_in_its_document(shape, value):
    """Documents shorter than a chunk share one; what is broken in the middle one must reach neither
    neighbour."""
    config = tiny_fusion(**MODELS[shape])
    model = build(config)
    segments = text_documents([9, 20, 7, 40], config).segments
    x_TD = torch.randn(76, config.text.hidden_size, requires_grad=True)
    broken = x_TD.detach().clone()
    broken[15, 3] = value
    broken.requires_grad_()
    others = torch.ones(76, dtype=torch.bool)
    others[9:29] = False
    whole, damaged = model.decoder(x_TD, segments), model.decoder(broken, segments)
    # Where a token is broken, chunks begin at documents, as they do where states are kept: other sums, fp32.
    torch.testing.assert_close(damaged[others], whole[others], atol=2e-5, rtol=0)
    assert not damaged[15:29].isfinite().any(-1).all()
    whole[others].square().sum().backward()
    damaged[others].square().sum().backward()
    torch.testing.assert_close(broken.grad[others], x_TD.grad[others], atol=2e-4, rtol=0)


def test_bf16_autocast_stays_close_to_fp32():
    # dense: with experts a rounded score may pick another expert,
    # a jump that is no rounding error of the others
    config = tiny_fusion(attn_res="block", num_experts=0)
    model = build(config)
    batch = text_documents([50, 30], config)
    full = model(batch).nll_T
    with torch.autocast("cpu", torch.bfloat16):
        half = model(batch).nll_T
    assert half.dtype == torch.float32
    # bf16 carries 8 bits: eight sub-layers of it may move a token's loss of about 5 by a tenth
    torch.testing.assert_close(half, full, atol=0.1, rtol=0)


@pytest.mark.parametrize("attn_res", ["none", "block", "full"])
def test_recomputed_activations_change_nothing(attn_res):
    config = tiny_fusion(attn_res=attn_res, attn_res_block_size=2)
    model, found = build(config, dtype=torch.float64), []
    for recompute in ("no", "block", "layer"):
        model.recompute(recompute)
        model(pack(mixed_documents(config, 0))).loss_sum.backward()
        found.append(gradients(model))
    close(found[1], found[0], 1e-12, 1e-12)
    close(found[2], found[0], 1e-12, 1e-12)


def test_documents_may_share_a_picture_that_is_encoded_once():
    config = tiny_fusion()
    model = build(config, 0, torch.float64)
    first, second = document(9, [(1, 2, 4)], config, 0), document(17, [(1, 4, 4)], config, 1)
    twice = pack([first, second, first])
    once = replace(pack([first, second]), ids=twice.ids, media_positions=twice.media_positions)
    own_M = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1])
    encoded = []
    model.vision_tower.register_forward_pre_hook(lambda module, inputs: encoded.append(inputs[0].shape[0]))
    torch.testing.assert_close(model.embed(once, feature_of_M=own_M), model.embed(twice))
    assert encoded == [24, 32]
    text = text_documents([5], config)
    torch.testing.assert_close(
        model.embed(text, feature_of_M=torch.empty(0, dtype=torch.long)), model.embed(text)
    )
    assert encoded == [24, 32, 0]  # the first did not call the tower
    with pytest.raises(ValueError, match="media_pad"):
        model.embed(once, feature_of_M=own_M[:-1])
    with pytest.raises(ValueError, match=r"token embeddings but segments that add up to 5"):
        model(replace(twice, segments=text.segments))
