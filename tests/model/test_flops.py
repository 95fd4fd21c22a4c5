"""Parameter counts against the published ones; FLOPs against torch's own counter and hand counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from earlyfusion.model import flops
from earlyfusion.model.config import FusionConfig, ModelConfig
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.vision.config import VisionConfig
from tests.model.tiny import build, tiny_fusion


def meta_model(preset: str = "moonvit_v2", **text) -> NativeFusion:
    vision = VisionConfig.preset(preset)
    with torch.device("meta"):
        return NativeFusion(FusionConfig(text=ModelConfig(**text), vision=vision, media_token_id=163605))


def test_kimi_linear_48b_has_its_published_size():
    count = flops.count_parameters(meta_model())
    room, body = count.by_room, count.active - count.by_room["embedding"]
    decoder = count.total - room["vision"] - room["projector"]
    billions = [decoder, count.active, body, body - room["head"]]
    assert [round(number / 1e9, 2) for number in billions] == [49.12, 3.48, 3.11, 2.73]
    millions = [room["kda"] / 20, room["mla"] / 7, room["moe"] / 26, room["dense"]]
    assert [round(number / 1e6, 1) for number in millions] == [39.5, 29.1, 1819.6, 63.7]
    assert room["attnres"] == 0


@pytest.mark.parametrize(("preset", "tower"), [("moonvit_v2", 401_214_464), ("moonvit3d", 416_866_032)])
def test_rooms_add_up_to_the_whole_model(preset, tower):
    model = meta_model(preset, attn_res="block")
    count = flops.count_parameters(model)
    assert count.total == sum(p.numel() for p in model.parameters()) == sum(count.by_room.values())
    assert count.by_room["vision"] == tower
    assert count.by_room["attnres"] == 2304 * 2 * (2 * 27 + 1)  # two vectors a sub-layer


def test_matmul_flops_equal_torchs_counter():
    """Projections, experts and head of a real forward; attention and recurrence are excluded on both
    sides."""
    config = tiny_fusion(num_shared_experts=1, num_experts=6, num_experts_per_token=6, q_lora_rank=8)
    model = build(config).eval()
    tokens = 33
    text, linear = config.text, config.text.linear_attn_config
    counted, kinds = flops.decoder_flops(text, [tokens]), config.text.plan()
    recurrence = 7 * linear.num_heads * linear.head_dim**2 + 6 * linear.num_heads * linear.head_dim * 4
    counted["kda"] -= tokens * recurrence * kinds.count("kda")
    counted["mla"] -= tokens * (tokens + 1) * text.num_attention_heads * (text.qk_head_dim + text.v_head_dim)
    totals = dict.fromkeys(("kda", "mla", "moe", "dense"), 0)
    for layer in model.decoder.layers:
        projections = [m.weight for m in layer.self_attn.modules() if isinstance(m, torch.nn.Linear)]
        totals[layer.kind] += 2 * tokens * sum(weight.numel() for weight in projections)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer.feed_forward(torch.randn(tokens, text.hidden_size))
        totals["moe" if layer.sparse else "dense"] += counter.get_total_flops()
    totals["head"] = 2 * tokens * text.vocab_size * text.hidden_size
    for room, total in totals.items():
        assert counted[room] == pytest.approx(total, rel=1e-6), room


def test_vision_flops_equal_torchs_counter_without_attention():
    config = tiny_fusion()
    model, vision = build(config).eval(), config.vision
    grids = [(1, 4, 4), (2, 2, 6)]
    counted = flops.vision_flops(vision, config.text.hidden_size, grids)
    linears = [m for m in model.vision_tower.modules() if isinstance(m, torch.nn.Linear)]
    weights = [model.vision_tower.patch_embed.proj.weight, *(m.weight for m in linears)]
    attention = 4 * (16**2 + 24**2) * vision.qkv_width * vision.num_hidden_layers
    assert counted["vision"] - attention == 2 * 40 * sum(weight.numel() for weight in weights)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.mm_projector(torch.randn(4 + 3, 4, vision.hidden_size))
    assert counted["projector"] == counter.get_total_flops()
    assert len(model.encode_images(torch.randn(16 + 24, 3, 4, 4), grids)) == 4 + 3


def test_long_context_costs_only_the_mla_layers():
    config = ModelConfig()
    short, long = (flops.decoder_flops(config, [n]) for n in (4096, 8192))
    grown = {room for room in short if long[room] > 2.001 * short[room]}
    assert grown == {"mla"}
    trained = flops.training_flops(meta_model().config, [2048, 2048])
    assert sum(trained.values()) < 3 * sum(short.values())  # two documents look back half as far
