"""Parameter counts against the published ones; FLOPs against torch's own counter and hand counts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from earlyfusion.model import flops
from earlyfusion.model.config import FusionConfig, ModelConfig
from earlyfusion.model.decoder import Decoder
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.vision.config import VisionConfig
from tests.model.tiny import build, tiny_fusion, tiny_text


def meta_decoder(**overrides) -> Decoder:
    with torch.device("meta"):
        return Decoder(ModelConfig(**overrides))


def test_kimi_linear_48b_has_its_published_size():
    count = flops.count_parameters(meta_decoder())
    assert round(count.total / 1e9, 2) == 49.12
    assert round(count.active / 1e9, 2) == 3.48
    assert round((count.active - count.by_room["embedding"]) / 1e9, 2) == 3.11
    assert round((count.active - count.by_room["embedding"] - count.by_room["head"]) / 1e9, 2) == 2.73
    assert round(count.by_room["kda"] / 20 / 1e6, 2) == 39.51
    assert round(count.by_room["mla"] / 7 / 1e6, 2) == 29.11
    assert round(count.by_room["moe"] / 26 / 1e6, 1) == 1819.6
    assert round(count.by_room["dense"] / 1e6, 2) == 63.70
    assert count.by_room["attnres"] == 0


def test_attention_residuals_add_two_vectors_a_sublayer():
    count = flops.count_parameters(meta_decoder(attn_res="block"))
    assert count.by_room["attnres"] == 2304 * 2 * (2 * 27 + 1)


@pytest.mark.parametrize(("preset", "tower"), [("moonvit_v2", 401_214_464), ("moonvit3d", 416_866_032)])
def test_rooms_add_up_to_the_whole_model(preset, tower):
    text = ModelConfig(attn_res="block")
    config = FusionConfig(text=text, vision=VisionConfig.preset(preset), media_token_id=163605)
    with torch.device("meta"):
        model = NativeFusion(config)
    count = flops.count_parameters(model)
    assert count.total == sum(p.numel() for p in model.parameters()) == sum(count.by_room.values())
    assert count.by_room["vision"] == tower
    assert count.by_room["projector"] == sum(p.numel() for p in model.mm_projector.parameters())
    with pytest.raises(TypeError, match="Linear"):
        flops.count_parameters(torch.nn.Linear(2, 2))


def test_matmul_flops_equal_torchs_counter():
    """Projections, experts and head of a real forward; attention and recurrence are excluded on both
    sides."""
    config = tiny_fusion(num_shared_experts=1, num_experts=6, num_experts_per_token=6, q_lora_rank=8)
    model = build(config).eval()
    tokens = 33
    kinds = config.text.plan()
    counted = flops.decoder_flops(config.text, [tokens])
    linear = config.text.linear_attn_config
    recurrence = 7 * linear.num_heads * linear.head_dim**2 + 6 * linear.num_heads * linear.head_dim * 4
    counted["kda"] -= tokens * recurrence * kinds.count("kda")
    pairs = tokens * (tokens + 1) // 2
    counted["mla"] -= (
        2 * pairs * config.text.num_attention_heads * (config.text.qk_head_dim + config.text.v_head_dim)
    )
    totals = dict.fromkeys(("kda", "mla", "moe", "dense"), 0)
    x = torch.randn(tokens, config.text.hidden_size)
    for layer in model.decoder.layers:
        projections = [m for m in layer.self_attn.modules() if isinstance(m, torch.nn.Linear)]
        totals[layer.kind] += sum(2 * tokens * m.weight.numel() for m in projections)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer.feed_forward(x)
        totals["moe" if layer.sparse else "dense"] += counter.get_total_flops()
    for room, total in totals.items():
        assert counted[room] == pytest.approx(total, rel=1e-6), room
    assert counted["head"] == 2 * tokens * config.text.vocab_size * config.text.hidden_size


def test_vision_flops_equal_torchs_counter_without_attention():
    config = tiny_fusion()
    model = build(config).eval()
    grids = [(1, 4, 4), (2, 2, 6)]
    patches = torch.randn(16 + 24, 3, 4, 4)
    counted = flops.vision_flops(config.vision, config.text.hidden_size, grids)
    qkv, layers = config.vision.qkv_width, config.vision.num_hidden_layers
    attention = 4 * (16**2 + 24**2) * qkv * layers
    linears = [m for m in model.vision_tower.modules() if isinstance(m, torch.nn.Linear)]
    expected = (
        2 * 40 * (sum(m.weight.numel() for m in linears) + model.vision_tower.patch_embed.proj.weight.numel())
    )
    assert counted["vision"] - attention == expected
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.mm_projector(torch.randn(4 + 3, 4, config.vision.hidden_size))
    assert counted["projector"] == counter.get_total_flops()
    assert model.encode_images(patches, grids).shape[0] == 4 + 3


def test_packing_costs_what_its_documents_cost():
    config = tiny_text(attn_res="block")
    together = flops.decoder_flops(config, [5, 9, 2])
    alone = [flops.decoder_flops(config, [n]) for n in (5, 9, 2)]
    assert together == pytest.approx({room: sum(one[room] for one in alone) for room in together})


def test_long_context_costs_only_the_mla_layers():
    config = ModelConfig()
    short, long = (flops.decoder_flops(config, [n]) for n in (4096, 8192))
    grown = {room for room in short if long[room] > 2.001 * short[room]}
    assert grown == {"mla"}
    per_token = 3 * sum(short.values()) / 4096
    active = flops.count_parameters(meta_decoder())
    matmul = 6 * (active.active - active.by_room["embedding"])
    assert matmul < per_token < 1.15 * matmul  # the rest is attention, recurrence and convolution


def test_training_flops_of_a_batch_are_thrice_its_forward():
    config = tiny_fusion(attn_res="block")
    rooms = flops.training_flops(config, [30, 4], [(1, 4, 4)])
    assert rooms["kda"] == 3 * flops.decoder_flops(config.text, [30, 4])["kda"]
    tower = flops.vision_flops(config.vision, config.text.hidden_size, [(1, 4, 4)])
    assert rooms["vision"] == 3 * tower["vision"] and rooms["projector"] == 3 * tower["projector"]
