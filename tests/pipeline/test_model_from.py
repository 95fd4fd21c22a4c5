"""`model.from`: what fits of a checkpoint begins a model; the rest is made anew, and both are said."""

import base64
import json
import shutil
from pathlib import Path

import pytest
import tiny_run
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.config import FusionConfig
from earlyfusion.model.hub.folder import load_model, save_model
from earlyfusion.pipeline import build, cli
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_USER
from earlyfusion.pipeline.model_from import parts_of
from earlyfusion.pipeline.optim.routing import build_param_groups
from tests.model.tiny import build as random_model
from tests.model.tiny import text_documents, tiny_fusion, tiny_text, tiny_vision


@pytest.fixture(scope="module")
def start(tokenizer, tmp_path_factory):
    """A model directory with a plain residual stream; eps so small that only rounding is left of it."""
    words = Tokenizer.load(tokenizer)
    ids = {"bos_token_id": words.bos_id, "eos_token_id": words.eos_id, "pad_token_id": words.pad_id}
    sizes = dict(vocab_size=words.vocab_size, rms_norm_eps=1e-12, attn_res="none", **ids)
    config = FusionConfig(text=tiny_text(**sizes), vision=tiny_vision(), media_token_id=words.media_pad_id)
    folder = tmp_path_factory.mktemp("start") / "model"
    save_model(random_model(config, 3), words, folder)
    return folder


def built(recipe, *words):
    """(model, lines said) of a recipe."""
    config = load_config([str(recipe)], words)
    tokens = build.own_tokenizer(config.tokenizer.path)
    said: list[str] = []
    return build.model(build.with_tokenizer(config, tokens), tokens, said), said


def logits(model):
    row = text_documents([9, 40, 17], tiny_fusion())
    x = model.decoder.embed_tokens(row.ids)
    return model.logits(model.decoder(x, row.segments))


def test_the_same_shape_is_the_same_model_bit_for_bit(recipe, start):
    model, said = built(recipe, ("model.from", str(start)))
    own = load_model(start)
    assert all(torch.equal(own.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert "made anew" not in " ".join(said) and "left" not in " ".join(said)
    assert model.config == own.config


# Means in place of sums, and eight norms behind them, in fp32.
ROUNDING = 1e-4


@pytest.mark.parametrize("kind", ["block", "full"])
def test_residuals_that_attend_begin_as_the_plain_stream(recipe, start, kind):
    """Queries of zeros take the mean of the outputs so far; every reader norms it as it norms their sum."""
    model, said = built(recipe, ("model.from", str(start)), ("model.attn_res", kind))
    torch.testing.assert_close(logits(model), logits(load_model(start)), atol=ROUNDING, rtol=ROUNDING)
    assert "res_proj.weight" in said[1] and "made anew" in said[1]


def test_what_the_epsilon_of_the_norms_costs(recipe, start, tmp_path):
    """With a usual eps it is not the same function: a mean of n is n times smaller beside it."""
    shutil.copytree(start, tmp_path / "model")
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    raw["text_config"]["rms_norm_eps"] = 1e-2
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
    model, _ = built(recipe, ("model.from", str(tmp_path / "model")), ("model.attn_res", "full"))
    assert (logits(model) - logits(load_model(tmp_path / "model"))).abs().max() > 10 * ROUNDING


def test_a_mixer_of_another_kind_is_made_anew(recipe, start):
    """q_proj of KDA is none of MLA's, even where the shapes agree."""
    full = ("model.linear_attn_config.full_attn_layers", [2, 4])
    model, said = built(recipe, ("model.from", str(start)), full)
    own = load_model(start).state_dict()
    for name, tensor in model.state_dict().items():
        inside = ".layers.1.self_attn." in name
        assert (name in own and torch.equal(own[name], tensor)) != inside, name
    assert "layers.1.self_attn" in said[1] and "layers.1.self_attn" in said[2]


def test_another_tokenizer_brings_words_of_its_own(recipe, start, folder):
    path = tiny_run.make_tokenizer(folder, 330)
    model, said = built(recipe, ("model.from", str(start)), ("tokenizer.path", str(path)))
    assert "embed_tokens.weight" in said[1]
    table, before = (each.decoder.embed_tokens.weight[:300] for each in (model, load_model(start)))
    assert not torch.equal(table, before)


def test_words_of_a_release_need_no_tokenizer_json(recipe, start, tmp_path):
    """Kimi's form, tiktoken.model: the checkpoint's vocabulary is taken with it."""
    folder = tmp_path / "release"
    folder.mkdir()
    lines = [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TikTokenTokenizer"}))
    words = Tokenizer.load(folder)
    config = load_model(start).config
    sizes = {"vocab_size": words.vocab_size, "bos_token_id": words.bos_id, "eos_token_id": words.eos_id}
    text = config.text.model_copy(update=sizes | {"pad_token_id": words.pad_id})
    update = {"text": text, "media_token_id": words.media_pad_id}
    given = random_model(config.model_copy(update=update), 4)
    save_model(given, words, tmp_path / "ours")
    for file in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "ours" / file, folder)

    assert parts_of(str(folder))["tokenizer"] == {"path": str(folder)}
    model, said = built(recipe, ("model.from", str(folder)), ("tokenizer.path", str(folder)))
    assert torch.equal(model.decoder.embed_tokens.weight, given.decoder.embed_tokens.weight)
    assert "made anew" not in " ".join(said)


@pytest.fixture(scope="module")
def theirs(tokenizer, tmp_path_factory):
    """family -> a checkpoint of transformers' own class, sizes of the tiny recipe."""
    words, found = Tokenizer.load(tokenizer), {}
    sizes = dict(vocab_size=words.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=3)
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    moonlight = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **sizes,
            num_attention_heads=2,
            num_key_value_heads=2,
            q_lora_rank=None,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=12,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
        )
    )
    for name, model in (("llama", llama), ("moonlight", moonlight)):
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
        for file in Path(tokenizer).iterdir():
            shutil.copy(file, found[name])
    return found


def test_llama_gives_words_norms_and_dense_layers(recipe, theirs, tmp_path, capsys):
    words = ("import", str(theirs["llama"]), "--like", str(recipe), "--to", str(tmp_path / "ours"))
    assert cli.main([*words]) == EXIT_OK
    ours = load_model(tmp_path / "ours").decoder.state_dict()
    llama = load_file(theirs["llama"] / "model.safetensors")
    same = lambda name: f"model.{name}" in llama and torch.equal(ours[name], llama[f"model.{name}"])
    taken = set(filter(same, ours))
    assert {"embed_tokens.weight", "norm.weight", "layers.0.mlp.gate_proj.weight"} <= taken
    assert "layers.2.input_layernorm.weight" in taken and not any("self_attn" in name for name in taken)
    said = capsys.readouterr().out
    assert "made anew" in said and "of the checkpoint left: " in said and "self_attn" in said
    # Without a recipe there is nothing that could compute it.
    assert cli.main(["import", str(theirs["llama"]), "--to", str(tmp_path / "no")]) == EXIT_USER
    assert "--like RECIPE" in capsys.readouterr().err
    words = (*words[:-1], str(tmp_path / "other"), "--tower", str(tmp_path))
    assert cli.main([*words]) == EXIT_USER and not (tmp_path / "other").exists()
    assert "with --like the recipe has the tower" in capsys.readouterr().err


def test_moonlight_gives_latent_attention_and_experts(recipe, theirs):
    shape = dict(num_hidden_layers=3, first_k_dense_replace=1, num_experts=4, moe_intermediate_size=24)
    keys = [(f"model.{key}", value) for key, value in shape.items()]
    keys += [("model.qk_rope_head_dim", 4), ("model.q_lora_rank", "null")]
    model, _ = built(recipe, *keys, ("model.from", str(theirs["moonlight"])))
    own = model.decoder.state_dict()
    given = load_file(theirs["moonlight"] / "model.safetensors")
    (mla,) = [i for i, kind in enumerate(model.config.text.plan()) if kind == "mla"]
    place = f"layers.{mla}.self_attn."
    for name in ("q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"):
        assert torch.equal(own[f"{place}{name}.weight"], given[f"model.{place}{name}.weight"]), name
    for expert in range(4):
        for part, name in enumerate(("gate_proj", "up_proj")):
            rows = own["layers.1.block_sparse_moe.experts.gate_up_proj"][expert, 24 * part : 24 * (part + 1)]
            assert torch.equal(rows, given[f"model.layers.1.mlp.experts.{expert}.{name}.weight"])
    assert torch.equal(own["layers.1.block_sparse_moe.gate.weight"], given["model.layers.1.mlp.gate.weight"])


def test_what_cannot_begin_a_model_is_one_line(recipe, start, theirs, tmp_path, capsys):
    wide = tmp_path / "wide"
    shutil.copytree(theirs["llama"], wide)
    tensors = load_file(wide / "model.safetensors")
    larger = {name: torch.zeros(*(side + 1 for side in t.shape)) for name, t in tensors.items()}
    save_file(larger, str(wide / "model.safetensors"))
    for words, said in (
        (("--model.from", str(tmp_path)), "no config.json"),
        (("--model.from", str(start), "--model.scale", "2"), "model.from brings a shape of its own"),
        (("--model.from", str(wide)), "no tensor fits"),
        (("--model.from", str(start), "--init-from", str(start)), "give run.init_from or model.from"),
        (("--optim.lr_factors", "{tower = 0.1}"), "matches no parameter"),
    ):
        out = ("--out", str(tmp_path / "run"))
        assert cli.main(["pretrain", str(recipe), *words, *out]) == EXIT_USER
        message = capsys.readouterr().err
        assert said in message and message.strip().count("\n") == 0


def test_a_run_begins_with_it_and_goes_on(run, recipe, start, tmp_path):
    """Three steps at another rate for the tower; a resume is the run that was not stopped."""
    words = f"--model.from {start} --model.attn_res block --vision.in_patch_limit 64"
    words += " --optim.lr_factors {vision=0.0}"
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(recipe, whole, words, "--steps 3 --checkpoint.every 1") == EXIT_OK
    assert run(recipe, broken, words, "--steps 2 --checkpoint.every 1") == EXIT_OK
    assert run(recipe, broken, words, "--steps 3 --checkpoint.every 1 --resume") == EXIT_OK
    first, last = (load_file(out / "model" / "model.safetensors") for out in (whole, broken))
    assert all(torch.equal(first[name], last[name]) for name in first)
    before = load_file(start / "model.safetensors")
    for name, tensor in before.items():
        still = name.startswith("vision_tower.")
        moved = not torch.equal(first[name], tensor)
        assert moved != still or tensor.numel() < 64, name


def test_rates_by_part():
    model = random_model(tiny_fusion(attn_res="block"))
    factors = {"*_res_query": 5.0, "vision": 0.1}
    groups = build_param_groups(model, 1e-3, 0.1, lr_factors=factors)
    rates = {name: group["lr"] for group in groups for name in group["fqns"]}
    assert rates.keys() == dict(model.named_parameters()).keys()
    for name, rate in rates.items():
        factor = 5.0 if name.endswith("_res_query") else 0.1 if name.startswith("vision_tower") else 1.0
        assert rate == pytest.approx(1e-3 * factor), name
    plain = build_param_groups(model, 1e-3, 0.1)
    assert [group["name"] for group in plain] == ["muon", "adamw", "adamw_no_decay"]
