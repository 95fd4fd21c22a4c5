"""What vLLM's Kimi-Linear loader wants of a checkpoint, and what `export --format kimi_linear` writes.

vLLM itself needs its compiled runtime. Its parameters and the rules by which its loader renames a
checkpoint's tensors are told here after its source: model_executor/models/kimi_linear.py and layers/kda.py at
commit 8744bb0924a5 (one process)."""

import json
import re

import pytest
from safetensors import safe_open
from test_dropin import FOREIGN, V1, exported, made

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.pipeline.errors import EXIT_OK

Shapes = dict[str, list[int]]


def mixer(config: dict, layer: int) -> Shapes:
    """Parameters of a layer's token mixer."""
    D, linear = config["hidden_size"], config["linear_attn_config"]
    # Layers are counted from one in the configuration.
    if layer + 1 in linear["kda_layers"]:
        H, K, W = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
        C = H * K
        found = {f"{name}_proj.weight": [C, D] for name in "qkv"}
        found |= {f"{name}_conv1d.weight": [C, 1, W] for name in "qkv"}
        found |= {f"{name}_a_proj.weight": [K, D] for name in "fg"}
        found |= {f"{name}_b_proj.weight": [C, K] for name in "fg"}
        found |= {"b_proj.weight": [H, D], "dt_bias": [C], "A_log": [1, 1, H, 1]}
        return found | {"o_norm.weight": [K], "o_proj.weight": [D, C]}
    assert config["mla_use_nope"] is True and config["q_lora_rank"] is None
    H, R = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, V = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return {
        "kv_a_proj_with_mqa.weight": [R + rope, D],
        "q_proj.weight": [H * (nope + rope), D],
        "kv_a_layernorm.weight": [R],
        "kv_b_proj.weight": [H * (nope + V), R],
        "o_proj.weight": [D, H * V],
    }


def feed_forward(config: dict, layer: int) -> Shapes:
    """Parameters of a layer's feed-forward: gate and up in one, experts in stacks."""
    D, F = config["hidden_size"], config["intermediate_size"]
    if layer < config["first_k_dense_replace"] or layer % config["moe_layer_freq"]:
        return {"mlp.gate_up_proj.weight": [2 * F, D], "mlp.down_proj.weight": [D, F]}
    E, F = config["num_experts"], config["moe_intermediate_size"]
    shared = F * config["num_shared_experts"]
    found = {
        "gate.weight": [E, D],
        "gate.e_score_correction_bias": [E],
        "experts.w13_weight": [E, 2 * F, D],
        "experts.w2_weight": [E, D, F],
        "shared_experts.gate_up_proj.weight": [2 * shared, D],
        "shared_experts.down_proj.weight": [D, shared],
    }
    return {f"block_sparse_moe.{name}": shape for name, shape in found.items()}


def parameters(config: dict) -> Shapes:
    """Every parameter of the model by name."""
    D, V = config["hidden_size"], config["vocab_size"]
    found = {"model.embed_tokens.weight": [V, D], "model.norm.weight": [D], "lm_head.weight": [V, D]}
    for layer in range(config["num_hidden_layers"]):
        own = {f"self_attn.{name}": shape for name, shape in mixer(config, layer).items()}
        own |= feed_forward(config, layer)
        own |= {f"{name}_layernorm.weight": [D] for name in ("input", "post_attention")}
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return found


def loaded(checkpoint: Shapes) -> Shapes:
    """What the loader makes of a checkpoint's tensors: parts are put into the parameter that holds them."""
    found: Shapes = {}
    experts: dict[str, set[str]] = {}
    for name, shape in checkpoint.items():
        if part := re.fullmatch(r"(.*\.experts)\.(\d+)\.(w[123])\.weight", name):
            place = f"{part[1]}.{'w2' if part[3] == 'w2' else 'w13'}_weight"
            experts.setdefault(place, set()).add(part[2])
            rows = found.get(place, [0, 0, 0])[1] if part[3] != "w2" and part[2] == "0" else None
            if part[2] == "0":
                found[place] = [0, (rows or 0) + shape[0], shape[1]]
            continue
        whole = re.sub(r"\.(gate|up)_proj\b", ".gate_up_proj", name)
        before = found.get(whole, [0])[0] if whole != name else 0
        found[whole] = [before + shape[0], *shape[1:]]
    return found | {place: [len(each), *found[place][1:]] for place, each in experts.items()}


@pytest.mark.parametrize("shape", [name for name, text in FOREIGN.items() if "q_lora_rank" not in text])
def test_the_export_has_what_the_loader_fills_and_nothing_else(shape, tokenizer, tmp_path):
    made(tmp_path / "ours", Tokenizer.load(tokenizer), FOREIGN[shape], V1)
    assert exported(tmp_path / "ours", tmp_path / "out", "--format", "kimi_linear") == EXIT_OK
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["KimiLinearForCausalLM"] and config["hidden_act"] == "silu"
    with safe_open(str(tmp_path / "out" / "model.safetensors"), framework="pt") as file:
        checkpoint = {name: file.get_slice(name).get_shape() for name in file.keys()}
    assert loaded(checkpoint) == parameters(config)
    # The rules notice what is not there.
    del checkpoint["model.layers.3.self_attn.kv_a_layernorm.weight"]
    assert loaded(checkpoint) != parameters(config)
