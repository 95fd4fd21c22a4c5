"""Kimi K3 checkpoints: latent experts, SiTU, gates, Attention Residuals, MoonViT-V2; each trap of its files,
and NVIDIA's implementation of the same blocks where it is installed (`pip install --no-deps
nemo-automodel`)."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_dropin import exported, made, packed, picture
from torch import nn

from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Image, Sample, Text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.engine import runner
from earlyfusion.model.hub.folder import load_model
from earlyfusion.model.layers import MixtureOfExperts, SwiGLU
from earlyfusion.model.mixers import MultiHeadLatentAttention
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_USER
from earlyfusion.pipeline.load import load
from earlyfusion.vision.config import FP32_EPS
from tests.model.tiny import build, tiny_fusion, tiny_text

K3 = dict(
    attn_res="block",
    attn_res_block_size=2,
    mla_output_gate=True,
    q_lora_rank=9,
    linear_attn_config={"gate_lower_bound": -5.0, "full_rank_output_gate": True},
    hidden_act="situ",
    routed_expert_hidden_size=12,
    router_balance="quantile",
    routed_scaling_factor=1.0,
)
TEXT_KEYS = (
    "vocab_size hidden_size num_hidden_layers intermediate_size num_attention_heads kv_lora_rank q_lora_rank"
    " qk_nope_head_dim qk_rope_head_dim v_head_dim num_experts num_experts_per_token num_shared_experts"
    " moe_intermediate_size first_k_dense_replace hidden_act routed_expert_hidden_size attn_res_block_size"
    " routed_scaling_factor rms_norm_eps bos_token_id eos_token_id pad_token_id activation_situ_beta"
    " activation_situ_linear_beta latent_moe_use_norm"
).split()


@pytest.fixture(scope="module")
def released(tokenizer, tmp_path_factory):
    """(our model, a folder that holds it as a K3 release would)."""
    base = tmp_path_factory.mktemp("k3")
    model = made(base / "ours", Tokenizer.load(tokenizer), K3, {"norm_eps": FP32_EPS}, seed=4)
    text, vision = model.config.text, model.config.vision
    tensors = load_file(base / "ours" / "model.safetensors")
    for name in [name for name in tensors if name.endswith("A_log")]:
        # Kernels want 128 heads: the rest is filling, here such that it would be noticed.
        tensors[name] = torch.cat([tensors[name].flatten(), torch.full((125,), 50.0)]).view(1, 1, 128, 1)
    plan = list(enumerate(text.plan(), 1))
    linear = dict(
        num_heads=3,
        head_dim=8,
        short_conv_kernel_size=4,
        gate_lower_bound=-5.0,
        use_full_rank_gate=True,
        kda_layers=[i for i, kind in plan if kind == "kda"],
        full_attn_layers=[i for i, kind in plan if kind == "mla"],
    )
    raw = {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "media_placeholder_token_id": model.config.media_token_id,
        "text_config": {
            **text.model_dump(mode="json", include={*TEXT_KEYS}),
            "model_type": "kimi_linear",
            "linear_attn_config": linear,
            "mla_use_output_gate": True,
            "mla_use_nope": True,
            "topk_method": "noaux_tc",
            "kda_mode": "chunk",
            "head_dim": 8,
        },
        "vision_config": {
            "model_type": "kimi_k3_vision",
            "patch_size": vision.patch_size,
            "vt_hidden_size": vision.hidden_size,
            "vt_num_hidden_layers": vision.num_hidden_layers,
            "vt_num_attention_heads": vision.num_attention_heads,
            "vt_intermediate_size": vision.intermediate_size,
            "qkv_hidden_size": vision.qkv_width,
            "init_pos_emb_height": vision.pos_emb_height,
            "init_pos_emb_width": vision.pos_emb_width,
            "norm_type": "rmsnorm",
            "attn_bias": False,
            "mm_projector_type": "patchmergerv2",
            "projector_ln_eps": 1e-5,
            "pos_emb_interpolation_mode": "bilinear",
        },
    }
    (base / "theirs").mkdir()
    save_file(tensors, str(base / "theirs" / "model.safetensors"))
    (base / "theirs" / "config.json").write_text(json.dumps(raw))
    for file in Path(tokenizer).iterdir():
        shutil.copy(file, base / "theirs")
    return model, base / "theirs"


def imported(source, to) -> int:
    return cli.main(["import", str(source), "--to", str(to)])


def test_a_release_comes_in_whole(released, tmp_path):
    """Every weight bit for bit, and every word of its configuration: block unit, gates, the norm's eps that
    torch takes by itself."""
    model, folder = released
    assert imported(folder, tmp_path / "ours") == EXIT_OK
    ours = load_model(tmp_path / "ours")
    # Not in a release: how weights were drawn; there always: the lists of layers.
    outside = {"initializer_range", "linear_attn_config"}
    said = [each.config.text.model_dump(exclude=outside) for each in (ours, model)]
    assert said[0] == said[1] and ours.config.text.plan() == model.config.text.plan()
    assert ours.config.vision.norm_eps == FP32_EPS and ours.config.vision.projector_ln_eps == 1e-5
    for name, tensor in model.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_the_engine_answers_as_the_export_does(released, tmp_path):
    """Latent experts and SiTU in generation: our engine against transformers' generate over the code that
    travels along."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert imported(released[1], tmp_path / "ours") == EXIT_OK
    assert cli.main(["export", str(tmp_path / "ours"), "--to", str(tmp_path / "out")]) == EXIT_OK
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    words = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    ours = load(tmp_path / "ours")
    for text in ("one and two", "a longer text, of some more words than the other"):
        given = words(text, return_tensors="pt")
        found = theirs.generate(**given, max_new_tokens=8, do_sample=False)[0, given.input_ids.shape[1] :]
        assert ours.generate([text], max_new_tokens=8, temperature=0.0) == [
            words.decode(found, skip_special_tokens=True)
        ]


@pytest.mark.parametrize(
    ("where", "change", "said"),
    [
        ("text_config", {"quantization_config": {"quant_method": "mxfp4"}}, "quantised weights (mxfp4)"),
        (None, {"quantization_config": {"quant_method": "mxfp4"}}, "quantised weights (mxfp4)"),
        (None, {"quantization_config": "mxfp4"}, "quantised weights (mxfp4)"),
        ("text_config", {"routed_scaling_factor": None}, "says nothing of routed_scaling_factor"),
        ("text_config", {"hidden_act": None}, "says nothing of hidden_act"),
        ("text_config", {"num_expert_group": 4}, "num_expert_group is 4"),
        ("vision_config", {"norm_type": "layernorm"}, "norm_type is 'layernorm'"),
        ("vision_config", {"mm_projector_type": "patchmerger"}, "mm_projector_type is 'patchmerger'"),
        ("text_config", {"mla_use_output_gate": False}, "tensors have no place in the model"),
    ],
)
def test_what_is_not_k3_is_refused(released, where, change, said, tmp_path, capsys):
    source = shutil.copytree(released[1], tmp_path / "source")
    raw = json.loads((source / "config.json").read_text())
    (raw if where is None else raw[where]).update(change)
    (source / "config.json").write_text(json.dumps(raw))
    assert imported(source, tmp_path / "ours") == EXIT_USER
    assert said in capsys.readouterr().err and not (tmp_path / "ours").exists()


def quantised(tensors):
    """The experts in MXFP4's form: bytes of two weights, and a scale for each 32."""
    found = dict(tensors)
    for name in [name for name in tensors if ".block_sparse_moe.experts." in name]:
        rows, columns = found.pop(name).shape
        found[f"{name}_packed"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        found[f"{name}_scale"] = torch.zeros(rows, 1, dtype=torch.uint8)
    return found


def test_packed_weights_are_told_by_their_names(released, tmp_path, capsys):
    """Also where no configuration speaks of them."""
    source = shutil.copytree(released[1], tmp_path / "source")
    save_file(quantised(load_file(source / "model.safetensors")), str(source / "model.safetensors"))
    assert imported(source, tmp_path / "ours") == EXIT_USER
    said = capsys.readouterr().err
    assert "quantised weights (language_model.model.layers" in said and "bfloat16" in said
    assert not (tmp_path / "ours").exists()


def test_the_tower_of_a_quantised_release_is_taken(released, tmp_path):
    """As K3 is published: MXFP4 experts, a tower and projector in full. Its text model may say what it
    likes."""
    model, folder = released
    source = shutil.copytree(folder, tmp_path / "source")
    save_file(quantised(load_file(source / "model.safetensors")), str(source / "model.safetensors"))
    raw = json.loads((source / "config.json").read_text())
    raw["text_config"] |= {"quantization_config": {"quant_method": "compressed-tensors"}, "of_tomorrow": 1}
    # The release says how its attention is computed.
    raw["vision_config"]["_attn_implementation"] = "flash_attention_2"
    (source / "config.json").write_text(json.dumps(raw))
    words = ["import", str(folder), "--tower", str(source), "--to", str(tmp_path / "ours")]
    assert cli.main(words) == EXIT_OK
    ours = load_model(tmp_path / "ours")
    for name, tensor in model.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_a_bound_that_is_null_is_none(released, tmp_path):
    """Other than a bound that is not named, which is 25 (4 of the gate, where null is 1)."""
    source = shutil.copytree(released[1], tmp_path / "source")
    raw = json.loads((source / "config.json").read_text())
    raw["text_config"] |= {"activation_situ_beta": None, "activation_situ_linear_beta": None}
    (source / "config.json").write_text(json.dumps(raw))
    assert imported(source, tmp_path / "ours") == EXIT_OK
    assert load_model(tmp_path / "ours").config.text.situ == (1.0, None)
    for key in ("activation_situ_beta", "activation_situ_linear_beta"):
        del raw["text_config"][key]
    (source / "config.json").write_text(json.dumps(raw))
    assert imported(source, tmp_path / "unsaid") == EXIT_OK
    assert load_model(tmp_path / "unsaid").config.text.situ == (4.0, 25.0)


@pytest.mark.parametrize(
    ("act", "dtype", "waits"),
    [("silu", "float32", False), ("situ", "float32", True), ("situ", "bfloat16", False)],
)
def test_no_graph_is_made_where_situ_asks_the_host(monkeypatch, act, dtype, waits):
    """On a GPU with Triton: its experts know SwiGLU alone, and torch's count their rows on the host."""
    monkeypatch.setattr(runner, "has_kernel", lambda op, like: True)
    model = build(tiny_fusion(hidden_act=act), dtype=getattr(torch, dtype))
    assert runner.waits_for_counts(model) == waits


def test_heads_that_are_filling_are_no_heads(released, tmp_path, capsys):
    """Only whole 128s are filling; another number of heads is a mistake."""
    source = shutil.copytree(released[1], tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in tensors if name.endswith("A_log"))
    tensors[name] = torch.zeros(1, 1, 7, 1)
    save_file(tensors, str(source / "model.safetensors"))
    assert imported(source, tmp_path / "ours") == EXIT_USER
    assert "A_log" in capsys.readouterr().err


def test_latent_experts_are_their_formula():
    """y = W_up RMSNorm(sum_j w_j expert_j(W_down x)) + shared(x), router and shared experts on the whole
    width."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(tiny_text(**K3)).double().eval()
    x = torch.randn(11, 24, dtype=torch.float64)
    ids, weights, _ = layer.gate(x)
    inside = x @ layer.routed_expert_down_proj.weight.T
    y = torch.zeros_like(inside)
    for t in range(11):
        for expert, weight in zip(ids[t], weights[t]):
            g, u = (layer.experts.gate_up_proj[expert] @ inside[t]).chunk(2)
            act = 4.0 * torch.tanh(g / 4.0) * g.sigmoid() * 25.0 * torch.tanh(u / 25.0)
            y[t] += weight * (layer.experts.down_proj[expert] @ act)
    y = y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * layer.routed_expert_norm.weight
    expected = y @ layer.routed_expert_up_proj.weight.T + layer.shared_experts(x)
    torch.testing.assert_close(layer(x), expected, atol=1e-12, rtol=1e-10)


@pytest.fixture(scope="module")
def nemo():
    pytest.importorskip("nemo_automodel")
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.kimi_k3 import model as code
    from nemo_automodel.components.models.kimi_k3.config import KimiK3TextConfig

    text = tiny_text(**K3)
    config = KimiK3TextConfig(
        **text.model_dump(mode="json", include={*TEXT_KEYS}),
        linear_attn_config={
            "num_heads": 3,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
        },
    )
    backend = BackendConfig(
        attn="eager", linear="torch", rms_norm="torch", dispatcher="torch", experts="torch"
    )
    return code, text, config, backend


@pytest.mark.parametrize("seed", [0, 1])
def test_nvidias_latent_experts_and_feed_forward(nemo, seed):
    code, text, config, backend = nemo
    torch.manual_seed(seed)
    ours, x = MixtureOfExperts(text).eval(), torch.randn(29, 24)
    theirs = code.KimiK3MoE(config, code._build_moe_config(config, torch.float32, None), backend).eval()
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.gate.weight)
        bias = torch.randn(6) * 0.1
        ours.gate.e_score_correction_bias.copy_(bias)
        theirs.gate.e_score_correction_bias.copy_(bias)
        theirs.experts.gate_and_up_projs.copy_(ours.experts.gate_up_proj.transpose(1, 2))
        theirs.experts.down_projs.copy_(ours.experts.down_proj.transpose(1, 2))
        for name in ("routed_expert_down_proj", "routed_expert_up_proj", "routed_expert_norm"):
            getattr(theirs, name).weight.copy_(getattr(ours, name).weight)
        theirs.shared_experts.load_state_dict(ours.shared_experts.state_dict())
        torch.testing.assert_close(theirs(x[None])[0], ours(x), atol=1e-5, rtol=1e-5)
        dense = SwiGLU(24, 40, 0.1, text.situ)
        mlp = code.KimiK3MLP(config, dtype=torch.float32)
        mlp.load_state_dict(dense.state_dict())
        torch.testing.assert_close(mlp(x), dense(x), atol=1e-5, rtol=1e-5)


def test_nvidias_gated_latent_attention(nemo):
    code, text, config, backend = nemo
    torch.manual_seed(2)
    ours, x = MultiHeadLatentAttention(text).eval(), torch.randn(23, 24)
    theirs = code.KimiMLAAttention(config, 3, backend).float().eval()
    theirs.load_state_dict(ours.state_dict())
    mask = torch.full((23, 23), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        found = theirs(x[None], attention_mask=mask)[0]
        torch.testing.assert_close(found, ours(x, Segments((23,))), atol=1e-5, rtol=1e-5)


class Convolution(nn.Conv1d):
    """fla's ShortConvolution without its kernels."""

    def __init__(self, hidden_size, kernel_size, dtype, **rest):
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=False, dtype=dtype)

    def forward(self, x, **rest):
        padded = nn.functional.pad(x.transpose(1, 2), (self.kernel_size[0] - 1, 0))
        return nn.functional.silu(super().forward(padded)).transpose(1, 2), None


class GatedNorm(nn.RMSNorm):
    """fla's FusedRMSNormGated without its kernels."""

    def __init__(self, width, eps, dtype, **rest):
        super().__init__(width, eps, dtype=dtype)

    def forward(self, x, gate):
        return super().forward(x) * gate.sigmoid()


def delta_rule(q, k, v, g, beta, **rest):
    """fla's chunk_kda by its recurrence."""
    from fla.ops.kda.naive import naive_recurrent_kda

    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    return naive_recurrent_kda(q, k, v, g, beta)


@pytest.mark.parametrize("seed", [0, 1])
def test_nvidias_whole_model_reads_the_export(nemo, tokenizer, tmp_path, monkeypatch, seed):
    """`export --format kimi_k3`, through NVIDIA's own configuration, names and blocks: the logits of text and
    a picture. The kernels of fla, which need a GPU, are replaced by their formulas."""
    from nemo_automodel.components.models.kimi_k3.config import KimiK3Config
    from nemo_automodel.components.models.kimi_k3.multimodal import KimiK3ForConditionalGeneration

    code, _, _, backend = nemo
    monkeypatch.setattr(code, "ShortConvolution", Convolution)
    monkeypatch.setattr(code, "FusedRMSNormGated", GatedNorm)
    monkeypatch.setattr(code, "chunk_kda", delta_rule)
    monkeypatch.setattr(code, "_require_fla", lambda: None)
    model = made(tmp_path / "ours", Tokenizer.load(tokenizer), K3, {}, seed)
    assert exported(tmp_path / "ours", tmp_path / "out", "--format", "kimi_k3") == EXIT_OK

    config = KimiK3Config.from_pretrained(tmp_path / "out")
    config.text_config.torch_dtype, config.text_config.kda_use_fused_gate = "float32", False
    config.vision_config._attn_implementation = "eager"
    theirs = KimiK3ForConditionalGeneration(config, backend=backend).float().eval()
    for module in theirs.vision_tower.modules():
        if isinstance(module, nn.RMSNorm):
            module.eps = model.config.vision.norm_eps
    stored = load_file(tmp_path / "out" / "model.safetensors")
    missing, left = theirs.load_state_dict(theirs.state_dict_adapter.from_hf(stored), strict=False)
    assert left == [] and all("time_weight" in name or "freqs" in name for name in missing)

    document = encode(
        Sample([Text("Look: "), Image(picture(33, 18, 1)), Text(" and some words")], "t", "t"),
        Tokenizer.load(tokenizer),
        model.config.vision,
    )
    batch = packed(model, document)
    ids = batch.ids[None, : len(document)]
    # One placeholder a picture, which theirs widens.
    first = (ids != model.config.media_token_id) | (ids.roll(1) != model.config.media_token_id)
    with torch.no_grad():
        ours = model.logits(model.hidden(batch))[: len(document)]
        grid = torch.tensor([list(each) for each in batch.grids])
        found = theirs(
            ids[first][None], pixel_values=batch.patches.float() / 127.5 - 1.0, grid_thws=grid
        ).logits[0]
    torch.testing.assert_close(found, ours, atol=1e-4, rtol=1e-4)
