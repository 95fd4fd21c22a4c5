"""model.preset and model.scale: shapes that build, counts that grow as promised, mistakes with a way out."""

import re

import pytest

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline.build import meta_model
from earlyfusion.pipeline.cli import main
from earlyfusion.pipeline.config.compose import compose, dump, load_config, presets
from earlyfusion.pipeline.config.size import sized

NEAR = 1.35  # how far the layers may be from scale times the preset's: whole heads and groups of four layers
SCALES = (0.25, 0.5, 1, 1.5, 2, 4, 16)


def built(*overrides, recipe="nano"):
    """The checked [model] and the parameters of its layers, counted on the meta device."""
    config = load_config([recipe], [(f"model.{key}", value) for key, value in overrides])
    weights = meta_model(config).decoder.named_parameters()
    return config.model, sum(weight.numel() for name, weight in weights if name.startswith("layers."))


def shape_of(model):
    """What a size decides: no vocabulary."""
    ids = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"}
    return model.model_dump(exclude=ids)


def test_a_latent_of_the_experts_follows_the_width():
    base = {"hidden_size": 256, "num_attention_heads": 4, "linear_attn_config": {"num_heads": 4}}
    found = sized(base | {"routed_expert_hidden_size": 128}, {"hidden_size": 512})
    assert found["routed_expert_hidden_size"] == 256
    assert sized(base, {"hidden_size": 512})["routed_expert_hidden_size"] is None


@pytest.mark.parametrize("preset", ["nano", "skills", "small", "base", "kimi-linear-48b"])
def test_every_preset_in_every_scale_builds_and_grows_as_promised(preset):
    whole, one = built(("preset", preset))
    counts = []
    for scale in SCALES:
        model, count = built(("preset", preset), ("scale", scale))
        assert scale / NEAR <= count / one <= scale * NEAR
        # Width, heads and feed-forward keep their ratio; groups of layers and blocks are whole.
        assert model.hidden_size * whole.num_attention_heads == whole.hidden_size * model.num_attention_heads
        assert model.linear_attn_config.num_heads == model.num_attention_heads
        ratio = model.hidden_size / whole.hidden_size
        assert abs(model.moe_intermediate_size - whole.moe_intermediate_size * ratio) <= 4
        assert model.num_experts == whole.num_experts
        if model.num_hidden_layers != whole.num_hidden_layers:
            assert model.plan() == ("kda", "kda", "kda", "mla") * (model.num_hidden_layers // 4)
            assert model.num_hidden_layers % model.attn_res_block_size == 0
        counts.append(count)
    assert counts == sorted(counts) and len(set(counts)) == len(SCALES)


def test_presets_are_the_shapes_that_ship():
    assert set(presets()) == {"nano", "skills", "website-pretrain", "small", "base", "kimi-linear-48b"}
    for preset in presets():
        shipped = load_config([preset])
        assert shape_of(built(("preset", preset))[0]) == shape_of(shipped.model)
        # A preset of a recipe's own name changes nothing: the vocabulary is the tokenizer's.
        same = load_config([preset], [("model.preset", preset), ("model.scale", 1)])
        assert shape_of(same.model) == shape_of(shipped.model)


def test_keys_beside_a_preset_win_and_keys_below_it_do_not():
    mine = {"extends": "nano", "model": {"preset": "small", "num_experts": 32, "kv_lora_rank": 40}}
    model = load_config([mine]).model
    assert (model.hidden_size, model.num_experts, model.kv_lora_rank) == (384, 32, 40)
    assert model.initializer_range == 0.02  # nano's own 0.06 was dropped

    # The order of options says nothing, and a scale on the line takes the [model] below it.
    flags = [("model.num_experts", "32"), ("model.kv_lora_rank", "40"), ("model.preset", "small")]
    assert dump(load_config(["nano"], flags))["model"] == model.model_dump(mode="json")
    twice = load_config([mine], [("model.scale", "2")]).model
    assert (twice.hidden_size, twice.num_hidden_layers, twice.num_experts) == (448, 12, 32)


def test_width_depth_and_experts_are_three_numbers():
    model, _ = built(("preset", "small"), ("hidden_size", 512), ("num_hidden_layers", 12), ("num_experts", 8))
    assert (model.num_attention_heads, model.linear_attn_config.num_heads) == (8, 8)
    assert (model.intermediate_size, model.moe_intermediate_size) == (2048, 344)
    assert model.plan() == ("kda", "kda", "kda", "mla") * 3
    # One of them fixed: the scale finds the other.
    deep, _ = built(("preset", "small"), ("scale", 4), ("hidden_size", 384))
    assert (deep.hidden_size, deep.num_hidden_layers) == (384, 32)


def test_a_recipe_without_preset_or_scale_is_composed_as_ever():
    odd = {"extends": "nano", "model": {"hidden_size": 100, "num_hidden_layers": 5}}
    model = compose([odd])["model"]
    assert (model["hidden_size"], model["num_attention_heads"], model["num_hidden_layers"]) == (100, 4, 5)


@pytest.mark.parametrize(
    ("overrides", "keys", "choices"),
    [
        ({"preset": "nano", "hidden_size": 100}, ["hidden_size"], ["96", "128"]),
        ({"preset": "nano", "hidden_size": 3}, ["hidden_size"], ["32"]),
        ({"preset": "small", "num_hidden_layers": 6}, ["num_hidden_layers"], ["4", "8"]),
        ({"preset": "kimi-linear-48b", "num_hidden_layers": 28}, ["num_hidden_layers"], ["24", "36"]),
        ({"preset": "nano", "scale": 0.01}, ["scale"], ["0.0625"]),
        ({"preset": "nano", "num_experts": 1}, ["num_experts"], ["3"]),
        ({"preset": "small", "num_experts": 4}, ["num_experts_per_token", "num_experts"], ["3", "5"]),
        ({"preset": "kimi-linear-48b", "num_experts": 6}, ["num_experts_per_token", "num_experts"], "68"),
    ],
)
def test_what_is_no_valid_combination_names_the_nearest_that_builds(overrides, keys, choices):
    with pytest.raises(UserError, match=r"nearest: ") as caught:
        load_config(["nano"], [(f"model.{key}", value) for key, value in overrides.items()])
    words = str(caught.value).partition("nearest: ")[2]
    assert re.findall(r"(?<![\w.])[\d.]*\d", words) == list(choices) and "\n" not in str(caught.value)
    for key, choice in zip(keys if len(keys) > 1 else keys * len(choices), choices, strict=True):
        _, count = built(*(overrides | {key: choice}).items())
        assert count > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model.preset nanno", "did you mean 'nano'?"),
        ("--model.scale -1", "model.scale -1: expected a number above 0, such as 0.5 or 2"),
        ("--model.scale nan", "expected a number above 0"),
        ("--model.scale two", "model.scale 'two': expected a number"),
        ("--model.scale 2 --model.hidden_size 128 --model.num_hidden_layers 4", "remove one of the three"),
        ("--model.scall 2", "unknown key 'scall' in model; did you mean 'scale'?"),
        ("--model.preset nano --model.hidden_size wide", "model.hidden_size: "),
    ],
)
def test_a_mistake_is_one_line(capsys, words, message):
    assert main(["plan", "nano", *words.split()]) == 2
    printed = capsys.readouterr().err.strip()
    assert message in printed and printed.count("\n") == 0


def test_plan_prints_the_counts_of_a_size(capsys):
    assert main(["plan", "nano", "--model.preset", "small", "--model.scale", "2"]) == 0
    printed = capsys.readouterr().out
    assert "hidden_size = 448" in printed and "num_hidden_layers = 12" in printed
    assert "preset" not in printed.partition("# resolved recipe")[2]
