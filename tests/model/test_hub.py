"""Model directories: bit-exact round trips under public names, nothing half-written, one clear line for each
mistake."""

import json
import os
from pathlib import Path

import pytest
import torch
from fusion_cases import tiny_config, tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub import folder as hub
from earlyfusion.model.hub.config import ModelDirectoryError, load_config, model_folder, model_name
from earlyfusion.model.hub.folder import load_model, model_card, public_tensors, save_model

FACTS = {
    "name": "nano",
    "recipe": "nano",
    "steps": 700,
    "tokens": 2_867_200,
    "seconds": 240.0,
    "seed": 0,
    "evals": {"easy-VQA test accuracy": 0.8312, "the same, blind": 0.64},
    "sources": {"easy_vqa": {"share": 0.5, "licence": "MIT"}, "pydoc": {"share": 0.5, "licence": "PSF-2.0"}},
    "licence": "Apache-2.0",
    "licence_note": "Made from the sources above.",
}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(tiny_config(tokenizer))


def assert_same(one: torch.nn.Module, two: torch.nn.Module) -> None:
    first, second = one.state_dict(), two.state_dict()
    assert list(first) == list(second)
    for name in first:
        assert first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]), name


@pytest.mark.parametrize(
    "text, vision",
    [
        ({}, {}),
        ({"tie_word_embeddings": True, "attn_res": "none", "q_lora_rank": 8, "num_shared_experts": 0}, {}),
        (
            {"attn_res": "full", "num_experts": 0, "num_experts_per_token": 1},
            {"projector": "v1", "bias": True, "norm": "layer"},
        ),
        (
            {
                "linear_attn_config": dict(
                    num_heads=2, head_dim=16, gate_lower_bound=-5.0, full_rank_output_gate=True
                )
            },
            {"pos_emb_interpolation": "bicubic", "pos_emb_time": 1},
        ),
    ],
)
def test_round_trip_is_bit_exact(tmp_path, tokenizer, text, vision):
    model = tiny_model(tiny_config(tokenizer, vision=vision, **text))
    save_model(model, tokenizer, tmp_path / "m", FACTS)
    loaded = load_model(tmp_path / "m")
    assert loaded.config == model.config and not loaded.training
    assert_same(model, loaded)
    assert Tokenizer.load(tmp_path / "m").encode("yes red") == tokenizer.encode("yes red")
    for name, buffer in loaded.named_buffers():  # counters that are not in the file start afresh
        if name.endswith(("load", "max_logit")):
            assert torch.equal(buffer, torch.full_like(buffer, float("-inf") if "max" in name else 0.0))


def test_shards_are_written_and_read(tmp_path, tokenizer, model):
    folder = save_model(model, tokenizer, tmp_path / "m", max_shard_bytes=40_000)
    shards = {path.name: load_file(path) for path in sorted(folder.glob("model-*.safetensors"))}
    assert len(shards) > 3 and f"model-00001-of-{len(shards):05d}.safetensors" in shards
    assert not (folder / "model.safetensors").exists()
    index, total = json.loads((folder / "model.safetensors.index.json").read_text()), 0
    assert index["weight_map"] == {tensor: name for name, tensors in shards.items() for tensor in tensors}
    for tensors in shards.values():
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert len(tensors) == 1 or size <= 40_000
        total += size
    assert index["metadata"]["total_size"] == total
    assert_same(model, load_model(folder))


def test_names_and_shapes_are_those_of_public_checkpoints(saved, model):
    """Those that transformers' KimiLinear does not have (see the next test)."""
    found = load_file(saved / "model.safetensors")
    text, hidden = "language_model.model.layers", 48
    expected = {
        f"{text}.2.self_attention_res_proj.weight": [1, hidden],
        f"{text}.2.mlp_res_norm.weight": [hidden],
        "language_model.model.output_attn_res_proj.weight": [1, hidden],
        "vision_tower.patch_embed.pos_emb.weight": [16, 16, 32],
        "vision_tower.encoder.blocks.0.wqkv.weight": [96, 32],
        "mm_projector.proj.0.weight": [128, 128],
        "mm_projector.post_norm.weight": [hidden],
    }
    assert {name: list(found[name].shape) for name in expected} == expected
    experts = model.decoder.layers[1].block_sparse_moe.experts
    for part, rows in (("w1", slice(24)), ("w3", slice(24, 48))):
        stored = found[f"{text}.1.block_sparse_moe.experts.2.{part}.weight"]
        assert torch.equal(stored, experts.gate_up_proj[2, rows])
    assert not [name for name in found if "query" in name or "gate_up_proj" in name]


def test_text_names_are_transformers_kimi_linear_names(tmp_path, tokenizer):
    """The oracle: what transformers' KimiLinear writes when it saves, but for the dense layer it misnames."""
    pytest.importorskip("transformers", minversion="5.17")
    from tests.model.reference import reference_model

    model = NativeFusion(tiny_config(tokenizer, attn_res="none", mla_output_gate=False))
    theirs = reference_model(model.config.text)
    theirs.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    names = {n.replace(".0.block_sparse_moe.", ".0.mlp."): tuple(t.shape) for n, t in saved.items()}
    state = {name: t for name, t in model.state_dict().items() if name.startswith("decoder.")}
    ours = {
        p.name.removeprefix("language_model."): tuple(p.view(state[p.ours]).shape)
        for p in public_tensors(state.items())
    }
    assert names == ours


def test_files_and_card_say_what_the_model_is_and_only_that(tmp_path, tokenizer, model):
    save_model(model, tokenizer, tmp_path / "m", FACTS)
    read = lambda name: json.loads((tmp_path / "m" / name).read_text())
    config, media = read("config.json"), read("preprocessor_config.json")["media_proc_cfg"]
    said = dict(model_type="earlyfusion", architectures=["NativeFusion"], dtype="float32")
    said["media_placeholder_token_id"] = tokenizer.media_pad_id
    expected = dict(patch_size=8, in_patch_limit=1024, merge_kernel_size=2, temporal_merge_kernel_size=4)
    assert said.items() <= config.items() and expected.items() <= media.items()
    assert config["text_config"]["model_type"] == "kimi_linear"
    generation = read("generation_config.json")
    assert generation["eos_token_id"] == tokenizer.eos_id
    assert generation["suppress_tokens"] == [tokenizer.media_pad_id]

    card, bare = (tmp_path / "m" / "README.md").read_text(), model_card(model.config, {}, 10)
    for fact in (
        "license: apache-2.0",
        "# nano",
        "| optimizer steps | 700 |",
        "2,867,200",
        "0.8312",
        "| easy_vqa | 50.0 % | MIT |",
        f"{sum(p.numel() for p in model.parameters()):,}",
    ):
        assert fact in card, fact
    assert "Nothing was measured" in bare and "No licence has been chosen" in bare and "## Run" not in bare


def test_other_dtypes_leave_gates_and_router_biases_in_fp32(saved, tmp_path, tokenizer, model):
    half = load_model(saved, dtype=torch.bfloat16)
    for name, tensor in half.state_dict().items():
        keep = name.endswith(("A_log", "dt_bias", "e_score_correction_bias"))
        assert tensor.dtype == (torch.float32 if keep else torch.bfloat16), name
        assert torch.equal(tensor, model.state_dict()[name].to(tensor.dtype)), name
    save_model(half, tokenizer, tmp_path / "half")
    assert_same(half, load_model(tmp_path / "half"))  # stored dtypes come back, each its own


def test_saving_again_replaces_the_old_directory_whole_or_not_at_all(tmp_path, tokenizer, model, monkeypatch):
    save_model(model, tokenizer, tmp_path / "m", max_shard_bytes=40_000)
    other = tiny_model(model.config, seed=4)
    save_model(other, tokenizer, tmp_path / "m")
    assert not list((tmp_path / "m").glob("model-*")) and [p.name for p in tmp_path.iterdir()] == ["m"]
    assert_same(other, load_model(tmp_path / "m"))

    def no_space(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub, "save_file", no_space)
    for target in ("m", "new"):
        with pytest.raises(OSError, match="No space"):
            save_model(model, tokenizer, tmp_path / target)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert_same(other, load_model(tmp_path / "m"))


def test_other_peoples_files_are_never_replaced(tmp_path, tokenizer, model):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ModelDirectoryError, match="holds files but no model"):
        save_model(model, tokenizer, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    with pytest.raises(ModelDirectoryError, match="is a file or link"):
        save_model(model, tokenizer, tmp_path / "mine" / "thesis.txt")


# ---- wrong directories


@pytest.fixture
def saved(tmp_path, tokenizer, model):
    return save_model(model, tokenizer, tmp_path / "m")


def change_config(folder, section, **values):
    """Keys of config.json or of one of its sections; None takes a key away."""
    config = json.loads((folder / "config.json").read_text())
    part = config[section] if section else config
    part.update(values)
    for name in [name for name in values if values[name] is None]:
        del part[name]
    (folder / "config.json").write_text(json.dumps(config))


def complaint(folder) -> str:
    with pytest.raises(ModelDirectoryError) as error:
        load_model(folder)
    assert "\n" not in str(error.value) and error.value.exit_code == 2
    return str(error.value)


NORM = "language_model.model.norm.weight"
LAYERS = [f"language_model.model.layers.{i}.input_layernorm.weight" for i in range(3)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tensors: [tensors.pop(name) for name in LAYERS], ["3 tensor(s) missing", *LAYERS]),
        (lambda tensors: tensors.update(mystery=torch.zeros(1)), ["1 tensor(s)", "no place for: mystery"]),
        (lambda tensors: tensors.update({NORM: torch.zeros(49)}), [NORM, "[49]", "[48]"]),
        (lambda tensors: tensors.update({NORM: torch.zeros(1)}), ["has shape [1]"]),  # would broadcast
        (lambda tensors: tensors.update({NORM: torch.zeros(48).int()}), ["stored as I32"]),
    ],
)
def test_wrong_tensors_are_named(saved, change, told):
    tensors = load_file(saved / "model.safetensors")
    change(tensors)
    save_file(tensors, saved / "model.safetensors")
    assert all(part in complaint(saved) for part in told)


def test_vocabulary_mismatch_is_found_on_save_and_on_load(saved, tmp_path, tokenizer, model):
    larger = tiny_tokenizer(320)
    with pytest.raises(ModelDirectoryError, match=r"ids up to 319.*vocab_size=300"):
        save_model(model, larger, tmp_path / "larger")
    assert not (tmp_path / "larger").exists()
    larger.save(saved)
    assert "vocabulary mismatch" in complaint(saved)
    tokenizer.save(saved)
    change_config(saved, "", media_placeholder_token_id=tokenizer.media_begin_id)
    assert "<|media_pad|> is id" in complaint(saved)


def test_damaged_files_are_named(saved, tmp_path):
    for name in ("config.json", "model.safetensors"):
        before = (saved / name).read_bytes()
        (saved / name).write_bytes(b"\x10{")
        told = complaint(saved)
        assert name in told and "damaged" in told
        (saved / name).write_bytes(before)
    (saved / "model.safetensors").unlink()
    assert "missing: model.safetensors" in complaint(saved)
    assert "not a model directory" in complaint(tmp_path) and "not a model" in complaint(tmp_path / "nowhere")


def test_a_directory_from_before_the_projectors_own_eps_keeps_the_one_it_was_trained_with(saved):
    for projector, expected in (("v2", 2**-7), ("v1", 1e-5)):  # v1's norm had 1e-5 in every version
        changed = dict(projector=projector, norm_eps=2**-7)
        change_config(saved, "vision_config", **changed, projector_ln_eps=None)
        assert load_config(saved).vision.projector_ln_eps == expected
        change_config(saved, "vision_config", projector_ln_eps=1e-4)
        assert load_config(saved).vision.projector_ln_eps == 1e-4


def test_an_index_cannot_point_outside_its_directory(saved):
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../../etc/passwd"}}))
    assert "plain file names" in complaint(saved)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            '{"text_config": {"num_hidden_layers": 1000000}}',
            "text.num_hidden_layers: Input should be less than or equal to 256",
        ),
        (
            '{"text_config": {"num_experts": 1000000000}}',
            "text.num_experts: Input should be less than or equal to 16384",
        ),
        ('{"text_config": {"num_hidden_layers": 200, "num_experts": 16000}}', "more than 262,144 experts"),
        ("[" * 100_000, "damaged (maximum recursion"),
        ('{"text_config": {"hiden_size": 3}}', "text.hiden_size: Extra inputs are not permitted"),
        ('{"text_config": {}, "model_type": "llama"}', "model_type is 'llama'"),
        ("5", "damaged (int, expected an object"),
        (b"\xff\xfe{}", "damaged ('utf-8' codec"),
    ],
)
def test_a_configuration_made_to_do_harm_is_one_line_before_anything_is_built(
    saved, monkeypatch, content, told
):
    monkeypatch.setattr(hub, "NativeFusion", None)
    path = saved / "config.json"
    if isinstance(content, str) and content.startswith("{"):
        whole, change = json.loads(path.read_text()), json.loads(content)
        text = whole["text_config"] | change["text_config"] | {"linear_attn_config": {}}
        content = json.dumps(whole | change | {"text_config": text})
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = complaint(saved)
    assert str(path) in said and told in said and "\n" not in said


@pytest.mark.parametrize(
    "content", ["5", "null", "[]", '{"weight_map": [1]}', '{"weight_map": {"a": 5}}', "[" * 100_000]
)
def test_an_index_that_is_none_is_one_line(saved, content):
    (saved / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json: damaged" in complaint(saved)


def test_models_are_found_by_name_and_by_their_run(tmp_path, tokenizer, model):
    folder, run = model_folder("embedded:skills"), tmp_path / "mine"
    assert load_model(folder).config == load_config(folder) and model_folder("runs/x") == Path("runs/x")
    with pytest.raises(ModelDirectoryError, match="embedded models are orchestrator, skills"):
        model_folder("embedded:nothing")
    save_model(model, tokenizer, run / "model")
    assert model_folder(run) == model_folder(run / "model") == run / "model"
    assert model_name(run / "model") == "mine" and model_name(tmp_path / "other") == "other"


def test_every_file_of_a_model_directory_has_the_mode_of_the_umask(tmp_path, tokenizer, model):
    before = os.umask(0o027)
    try:
        folder = save_model(model, tokenizer, tmp_path / "m")
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o640"}
