"""`earlyfusion import`: checkpoints that transformers wrote, read back to the same numbers; everything that
does not fit refused by name, with nothing written."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from earlyfusion.kernels.segments import Segments
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub import folder as hub
from earlyfusion.model.hub.folder import load_model, public_tensors
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_USER
from earlyfusion.vision import encoder
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.encoder import VisionGrid, VisionTower
from tests.model.reference import pure_torch, reference_model
from tests.model.tiny import tiny_fusion, tiny_text, tiny_vision

# fp32, another order of sums through four layers (tests/model/test_hf_parity.py)
TOLERANCE = 1e-4
SHAPES = {
    "plain": {},
    "mla in the middle": {"linear_attn_config": {"full_attn_layers": [2]}, "first_k_dense_replace": 2},
}


@pytest.fixture(scope="module")
def theirs(tokenizer, tmp_path_factory):
    """shape -> (transformers' model, the folder that it saved)."""
    found = {}
    for seed, (shape, changes) in enumerate(SHAPES.items()):
        torch.manual_seed(seed)
        # 300 rows: fewer than the tokenizer has entries once special tokens are added.
        model = reference_model(tiny_text(vocab_size=300, attn_res="none", **changes)).eval()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name.endswith(("e_score_correction_bias", "dt_bias", "norm.weight")):
                    tensor.add_(torch.randn_like(tensor) * 0.1)
        folder = tmp_path_factory.mktemp("theirs") / shape.replace(" ", "-")
        model.save_pretrained(folder)
        for file in Path(tokenizer).iterdir():
            shutil.copy(file, folder)
        found[shape] = model, folder
    return found


@pytest.fixture(scope="module")
def towers(tmp_path_factory) -> dict[str, Path]:
    """family -> a folder with tower and projector under its names."""
    found = {}
    for family in ("kimi_k25", "kimi_vl"):
        folder = tmp_path_factory.mktemp(family)
        cfg = VisionConfig.preset("moonvit3d" if family == "kimi_k25" else "moonvit", **SMALL)
        tensors = {}
        for name, tensor in vision_state(cfg).items():
            if family == "kimi_vl":
                name = name.replace("mm_projector.proj.0", "multi_modal_projector.linear_1")
                name = name.replace("mm_projector.proj.2", "multi_modal_projector.linear_2")
                name = name.replace("mm_projector", "multi_modal_projector")
            tensors[name] = tensor
        save_file(tensors, str(folder / "model.safetensors"))
        prefix = "vt_" if family == "kimi_k25" else ""
        sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        vision = {prefix + key: SMALL[key] for key in sizes} | {
            "patch_size": 4,
            "init_pos_emb_height": 6,
            "init_pos_emb_width": 5,
        }
        text = {"model_type": "deepseek_v3", "hidden_size": 24}
        raw = {"model_type": family, "text_config": text, "vision_config": vision}
        (folder / "config.json").write_text(json.dumps(raw))
        found[family] = folder
    return found


SMALL = dict(
    patch_size=4,
    hidden_size=16,
    head_dim=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    pos_emb_height=6,
    pos_emb_width=5,
)


def vision_state(cfg: VisionConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model = NativeFusion(tiny_fusion().model_copy(update={"vision": cfg}))
    state = model.state_dict()
    return {
        name: torch.randn_like(tensor) for name, tensor in state.items() if not name.startswith("decoder.")
    }


def imported(*words: object) -> int:
    return cli.main(["import", *map(str, words)])


@pytest.mark.parametrize("shape", SHAPES)
def test_what_transformers_saved_gives_its_logits(theirs, shape, tmp_path, capsys):
    model, folder = theirs[shape]
    assert imported(folder, "--to", tmp_path / "ours", "--vision", "tiny") == EXIT_OK
    ours = load_model(tmp_path / "ours")
    ids = torch.randint(3, 300, (1, 70))
    hidden = ours.decoder(ours.decoder.embed_tokens(ids[0]), Segments((70,)))
    with torch.no_grad(), pure_torch():
        expected = model(input_ids=ids, use_cache=False).logits[0]
    torch.testing.assert_close(ours.logits(hidden)[:, :300], expected, atol=TOLERANCE, rtol=TOLERANCE)

    # The vocabulary has grown by the special tokens that the tokenizer lacked, with rows that are no zeros.
    grown = ours.config.text.vocab_size - 300
    assert grown > 0 and f"{grown} tokens" in capsys.readouterr().out
    assert ours.decoder.embed_tokens.weight[300:].std() > 0.01


def test_the_norm_of_the_latents_has_an_epsilon_of_its_own(theirs, tmp_path):
    """1e-6, whatever rms_norm_eps says: latents as small as its root show it."""
    model, folder = theirs["plain"]
    source = shutil.copytree(folder, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    (name,) = [name for name in tensors if name.endswith("kv_a_proj_with_mqa.weight")]
    tensors[name] = tensors[name] * 2e-3
    save_file(tensors, str(source / "model.safetensors"))
    assert imported(source, "--to", tmp_path / "ours", "--vision", "tiny") == EXIT_OK
    ours, ids = load_model(tmp_path / "ours"), torch.randint(3, 300, (1, 40))
    logits = lambda: ours.logits(ours.decoder(ours.decoder.embed_tokens(ids[0]), Segments((40,))))[:, :300]
    small = type(model).from_pretrained(source, attn_implementation="eager")
    with torch.no_grad(), pure_torch():
        expected = small(input_ids=ids, use_cache=False).logits[0]
        torch.testing.assert_close(logits(), expected, atol=TOLERANCE, rtol=TOLERANCE)
        for module in ours.modules():
            if hasattr(module, "kv_a_layernorm"):
                module.kv_a_layernorm.eps = 1e-5
        assert (logits() - expected).abs().max() > 3 * TOLERANCE


@pytest.mark.parametrize("family", ["kimi_k25", "kimi_vl"])
def test_a_tower_and_a_projector_come_bit_for_bit(theirs, towers, family, tmp_path):
    _, folder = theirs["plain"]
    assert imported(folder, "--tower", towers[family], "--to", tmp_path / "ours") == EXIT_OK
    cfg = VisionConfig.preset("moonvit3d" if family == "kimi_k25" else "moonvit", **SMALL)
    ours = load_model(tmp_path / "ours")
    assert ours.config.vision == cfg
    for name, tensor in vision_state(cfg).items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_as_many_tensors_as_the_releases_have():
    """335 of tower and projector of Kimi-VL and Kimi K2.5, 168 of Kimi K3."""
    for preset, count in (("moonvit", 335), ("moonvit3d", 335), ("moonvit_v2", 168)):
        with torch.device("meta"):
            model = NativeFusion(tiny_fusion().model_copy(update={"vision": VisionConfig.preset(preset)}))
        names = [t.name for t in public_tensors(model.state_dict().items())]
        assert sum(name.startswith(("vision_tower.", "mm_projector.")) for name in names) == count


def test_siglip_is_the_tower_without_rope(theirs, tmp_path):
    """On its own picture size."""
    torch.manual_seed(0)
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size")
    config = SiglipVisionConfig(**{key: SMALL[key] for key in keys}, image_size=24)
    siglip = SiglipVisionModel(config).eval()
    siglip.save_pretrained(tmp_path / "siglip")
    _, folder = theirs["plain"]
    assert imported(folder, "--tower", tmp_path / "siglip", "--to", tmp_path / "ours") == EXIT_OK
    tower: VisionTower = load_model(tmp_path / "ours").vision_tower

    picture = torch.rand(1, 3, 24, 24) * 2 - 1
    patches = picture[0].unfold(1, 4, 4).unfold(2, 4, 4).permute(1, 2, 0, 3, 4).flatten(0, 1)
    features = tower(patches, VisionGrid.from_grids([(1, 6, 6)], tower.cfg)).flatten(0, 1)
    with torch.no_grad():
        expected = siglip(picture).last_hidden_state[0]
    order = torch.from_numpy(encoder.merge_order(6, 6, (2, 2)))
    torch.testing.assert_close(features, expected[order], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("grid", [(6, 6), (2, 8), (4, 14)])
def test_siglip_2_keeps_the_resolution_of_a_picture(theirs, tmp_path, grid):
    """NaFlex as transformers saves it: pixels in rows, the table stretched with antialiasing; features of two
    pictures in one pack, here and in the code that travels with an export."""
    torch.manual_seed(1)
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size")
    config = Siglip2VisionConfig(**{key: SMALL[key] for key in keys}, num_patches=49)
    siglip = Siglip2VisionModel(config).eval()
    siglip.save_pretrained(tmp_path / "siglip")
    _, folder = theirs["plain"]
    assert imported(folder, "--tower", tmp_path / "siglip", "--to", tmp_path / "ours") == EXIT_OK
    model = load_model(tmp_path / "ours")
    tower: VisionTower = model.vision_tower
    grids = [(1, 6, 6), (1, *grid)]
    pixels = [torch.rand(t * h * w, 3, 4, 4) * 2 - 1 for t, h, w in grids]
    features = tower(torch.cat(pixels), VisionGrid.from_grids(grids, tower.cfg)).flatten(0, 1)
    for (_, h, w), patches, found in zip(grids, pixels, features.split([len(each) for each in pixels])):
        rows = patches.permute(0, 2, 3, 1).flatten(1)[None]
        with torch.no_grad():
            expected = siglip(rows, torch.ones(1, h * w), torch.tensor([[h, w]])).last_hidden_state[0]
        order = torch.from_numpy(encoder.merge_order(h, w, (2, 2)))
        torch.testing.assert_close(found, expected[order], atol=1e-5, rtol=1e-5)

    words = ["export", str(tmp_path / "ours"), "--to", str(tmp_path / "out")]
    assert cli.main(words) == EXIT_OK
    out = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    with torch.no_grad():
        travelled = out.vision_tower(torch.cat(pixels), grids).flatten(0, 1)
    torch.testing.assert_close(travelled, features, atol=1e-5, rtol=1e-5)


def test_an_import_goes_on_where_it_was_interrupted(theirs, tmp_path, monkeypatch):
    _, folder = theirs["plain"]
    words = (folder, "--vision", "tiny", "--to")
    monkeypatch.setattr("earlyfusion.pipeline.import_cmd.MEGABYTE", 1 << 13)
    assert imported(*words, tmp_path / "whole", "--shard-mb", "1") == EXIT_OK

    saved, calls = hub.save_file, []

    def fails(content, path, **given):
        calls.append(path)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        saved(content, path, **given)

    monkeypatch.setattr(hub, "save_file", fails)
    assert imported(*words, tmp_path / "broken", "--shard-mb", "1") != EXIT_OK
    assert not (tmp_path / "broken").exists()
    before = len(calls)
    assert imported(*words, tmp_path / "broken", "--shard-mb", "1") == EXIT_OK
    shards = sorted(tmp_path.glob("whole/*.safetensors"))
    assert len(calls) - before == len(shards) - 3 > 1
    for shard in shards:
        assert (tmp_path / "broken" / shard.name).read_bytes() == shard.read_bytes()
    assert not list(tmp_path.glob(".broken*"))


CONFIGS = {
    "grouped": ({"num_expert_group": 2}, "num_expert_group is 2"),
    "biased": ({"attention_bias": True}, "attention_bias is True"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "fewer key heads": ({"num_key_value_heads": 1}, "num_key_value_heads is 1"),
    "a key of tomorrow": ({"allow_neg_eigval": True}, "allow_neg_eigval"),
    "the class default of layers": ({"layer_types": None}, "which layers are MLA"),
    "dense between sparse": ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "mlp_layer_types"),
    "another model": ({"model_type": "llama"}, "model_type 'llama'"),
    "more rows than it says": ({"vocab_size": 299}, "embed_tokens.weight [300, 24], expected [299, 24]"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_what_the_model_does_not_compute_is_refused(theirs, case, tmp_path, capsys):
    changes, said = CONFIGS[case]
    source = shutil.copytree(theirs["plain"][1], tmp_path / "source")
    raw = json.loads((source / "config.json").read_text()) | changes
    raw = {key: value for key, value in raw.items() if value is not None or key == "q_lora_rank"}
    (source / "config.json").write_text(json.dumps(raw))
    assert imported(source, "--to", tmp_path / "ours", "--vision", "tiny") == EXIT_USER
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("drop", "1 tensors of the model are in no file: language_model.model.norm.weight"),
        ("add", "1 tensors have no place in the model: model.layers.0.self_attn.sinks"),
        ("bias", "1 tensors have no place in the model: model.layers.0.self_attn.g_b_proj.bias"),
        ("reshape", "model.norm.weight [25], expected [24]"),
        ("cut", "damaged"),
        ("pickle", "pytorch_model.bin is a pickle"),
    ],
)
def test_weights_that_do_not_fit_are_named(theirs, change, said, tmp_path, capsys):
    source = shutil.copytree(theirs["plain"][1], tmp_path / "source")
    file = source / "model.safetensors"
    tensors = load_file(file)
    if change == "drop":
        del tensors["model.norm.weight"]
    elif change == "add":
        tensors["model.layers.0.self_attn.sinks"] = torch.zeros(3)
    elif change == "bias":
        # fla's layer has one, the released model none.
        tensors["model.layers.0.self_attn.g_b_proj.bias"] = torch.zeros(24)
    elif change == "reshape":
        tensors["model.norm.weight"] = torch.zeros(25)
    save_file(tensors, str(file))
    if change == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif change == "pickle":
        file.rename(source / "pytorch_model.bin")
    assert imported(source, "--to", tmp_path / "ours", "--vision", "tiny") == EXIT_USER
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'"),
        ({"num_register_tokens": 4}, "num_register_tokens"),
    ],
)
def test_a_tower_that_is_computed_otherwise_is_refused(theirs, towers, change, said, tmp_path, capsys):
    source = shutil.copytree(towers["kimi_vl"], tmp_path / "source")
    raw = json.loads((source / "config.json").read_text())
    raw["vision_config"] |= change
    (source / "config.json").write_text(json.dumps(raw))
    words = (theirs["plain"][1], "--tower", source, "--to", tmp_path / "ours")
    assert imported(*words) == EXIT_USER and said in capsys.readouterr().err
    raw["vision_config"].pop(*change)
    (source / "config.json").write_text(json.dumps(raw | {"model_type": "kimi_k9"}))
    assert imported(*words) == EXIT_USER and "model_type 'kimi_k9'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_directory_that_is_there_stays_as_it_is(theirs, tmp_path, capsys):
    (tmp_path / "ours").mkdir()
    assert imported(theirs["plain"][1], "--to", tmp_path / "ours") == EXIT_USER
    assert "exists; give a new directory" in capsys.readouterr().err


def test_our_own_model_with_another_tower(theirs, towers, tmp_path):
    """Import of an import is the identity, and takes another tower."""
    _, folder = theirs["plain"]
    assert imported(folder, "--to", tmp_path / "first", "--vision", "tiny") == EXIT_OK
    assert imported(tmp_path / "first", "--to", tmp_path / "again") == EXIT_OK
    first, again = (load_file(tmp_path / one / "model.safetensors") for one in ("first", "again"))
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    words = (tmp_path / "first", "--tower", towers["kimi_k25"], "--to", tmp_path / "other")
    assert imported(*words) == EXIT_OK
    assert load_model(tmp_path / "other").config.vision.projector == "v1"
    assert tiny_vision().projector == "v2"
