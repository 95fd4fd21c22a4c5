"""Every shipped recipe builds without storage, has the sizes it says, and its optimizer routing plans."""

import re

import pytest
import torch
from tiny_run import whole_recipes

from earlyfusion.model.config import ModelConfig
from earlyfusion.model.flops import count_parameters
from earlyfusion.pipeline.build import meta_model
from earlyfusion.pipeline.config.compose import dump, load_config, recipe_hash, render
from earlyfusion.pipeline.config.schema import RunConfig
from earlyfusion.pipeline.optim.registry import param_groups
from earlyfusion.pipeline.plan import decoder_parameters
from earlyfusion.pipeline.schedule import StageTable
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.encoder import VisionTower

TOWER_V2, TOWER_3D = 401_214_464, 416_866_032  # published: Kimi K3 section 2.4, Kimi K2.5 checkpoint
TEXT_48B, ACTIVE_48B = 49.12e9, 3.48e9  # Kimi-Linear-48B-A3B, from its published config.json


@pytest.fixture(scope="module", params=whole_recipes())
def config(request) -> RunConfig:
    return load_config([request.param])


@pytest.fixture(scope="module")
def model(config):
    return meta_model(config)


def test_a_recipe_builds_on_the_meta_device(config, model):
    """No parameter and no buffer has storage; names and shapes are all there is."""
    tensors = [*model.parameters(), *model.buffers()]
    assert tensors and all(tensor.is_meta for tensor in tensors)
    assert config.model.plan()[-1] == "mla", "the last layer attends globally"
    assert config.model.plan().count("kda") >= 2 * config.model.plan().count("mla")


def test_every_weight_is_routed_once(config, model):
    """Muon gets matrices only; embeddings, head, norms, convolutions, gates and queries stay with AdamW, and
    so does the tower unless the recipe says `muon_vision` (its patch embedding and position table always)."""
    groups = param_groups(config.optim, model)
    routed = [name for group in groups for name in group["fqns"]]
    assert sorted(routed) == sorted(name for name, _ in model.named_parameters())
    muon = {name for group in groups if group["family"] == "muon" for name in group["fqns"]}
    # b_proj alone is a vector per head; those with a letter before it are matrices.
    parts = r"embed_tokens|lm_head|norm|conv1d|A_log|dt_bias|_res_query|\bb_proj\.|patch_embed"
    parts += "" if config.optim.muon_vision else "|vision_tower"
    assert not [name for name in muon if re.search(parts, name)]
    shapes = dict(model.named_parameters())
    assert all(shapes[name].ndim in (2, 3) and min(shapes[name].shape[-2:]) > 1 for name in muon)
    share = sum(shapes[name].numel() for name in muon) / sum(p.numel() for p in model.decoder.parameters())
    assert share > 0.6, "most of the decoder's weights are hidden matrices"

    # Queries are orthogonalised head by head.
    heads = []
    for group in groups:
        if group["family"] == "muon":
            blocks = zip(group["fqns"], group["blocks"])
            heads += [spec for fqn, spec in blocks if fqn.endswith("self_attn.q_proj.weight")]
    assert heads and all(spec[0] > 1 for spec in heads)


def test_a_recipe_says_itself_in_toml(config, tmp_path):
    path = tmp_path / "again.toml"
    path.write_text(render(config))
    again = load_config([str(path)])
    assert dump(again) == dump(config) and recipe_hash(again) == recipe_hash(config)


def test_schedules_are_finite_positive_and_end_low(config):
    stages = StageTable(config.stages, config.optim.lr)
    for index, stage in enumerate(config.stages):
        first, last = stages.starts[index], stages.starts[index + 1] - 1
        middle = first + stage.warmup_steps
        assert 0 <= stages.lr(last) < stages.peak(index) + 1e-15
        # a decay over the whole stage is one step down already
        assert stages.lr(middle) == pytest.approx(stages.peak(index), rel=1.5 / stage.steps)
        assert all(stages.lr(step) > 0 for step in range(first, last, max(1, stage.steps // 50)))


def count(name: str):
    return count_parameters(meta_model(load_config([name])))


def test_kimi_linear_48b_has_the_published_parameters():
    """49.12 B text parameters, 3.48 B of them active for a token, without Attention Residuals."""
    config = load_config(["kimi-linear-48b"], [("model.attn_res", "none")])
    text, counted = config.model, count_parameters(meta_model(config))
    assert decoder_parameters(counted) == pytest.approx(TEXT_48B, abs=0.005e9)
    assert counted.active == pytest.approx(ACTIVE_48B, abs=0.005e9)
    assert counted.by_room["attnres"] == 0
    assert text.plan().count("mla") == 7 and text.plan().count("kda") == 20


def test_kimi_linear_48b_is_the_default_model_configuration():
    """What the recipe leaves out is filled in from the published config.json."""
    recipe = load_config(["kimi-linear-48b"], [("model.attn_res", "none")]).model
    plain = ModelConfig(vocab_size=163840, bos_token_id=163584, eos_token_id=163586, pad_token_id=163839)
    same = "hidden_size num_hidden_layers num_experts moe_intermediate_size rms_norm_eps kv_lora_rank"
    assert all(getattr(recipe, name) == getattr(plain, name) for name in same.split())
    assert recipe.plan() == plain.plan()


def test_kimi_linear_48b_carries_the_published_tower_and_small_residual_queries():
    counted = count("kimi-linear-48b")
    assert counted.by_room["vision"] == TOWER_V2
    # a query and a norm of width D at each of 54 sub-layers and at the output
    assert counted.by_room["attnres"] == 2 * 2304 * (2 * 27 + 1)


def test_the_towers_have_the_published_parameters():
    with torch.device("meta"):
        sizes = {
            name: sum(p.numel() for p in VisionTower(VisionConfig.preset(name)).parameters())
            for name in ("moonvit_v2", "moonvit3d", "moonvit")
        }
    assert sizes == {"moonvit_v2": TOWER_V2, "moonvit3d": TOWER_3D, "moonvit": TOWER_3D}


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("nano", (0.5e6, 3e6), None),
        ("small", (40e6, 60e6), None),
        ("base", (0.85e9, 1.15e9), (0.2e9, 0.35e9)),
    ],
)
def test_a_recipe_has_the_size_in_its_first_line(name, total, active):
    counted = count(name)
    assert total[0] <= counted.total <= total[1], f"{counted.total:,}"
    if active is not None:
        assert active[0] <= counted.active <= active[1], f"{counted.active:,}"
