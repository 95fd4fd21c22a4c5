"""The plugin for vLLM and `export --format kimi_k3`, by vLLM itself where it is installed: the model is built
and its weights loaded on a CPU, prompts and the features of pictures are compared with ours. Its text layers
need a GPU, and are compared no further than their weights."""

import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from test_dropin import exported, made, picture
from test_import_k3 import K3
from transformers import AutoProcessor

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_USER

PROGRAM = Path(__file__).with_name("vllm_program.py")
# fp32, sums in other orders
TOLERANCE = 1e-5
TINY = {"norm_eps": 3e-5}
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
SHAPES = {
    "as Kimi K3": K3,
    "plain, tied": dict(attn_res="none", tie_word_embeddings=True, moe_layer_freq=2),
    "dense": dict(attn_res="block", attn_res_block_size=1, num_experts=0, q_lora_rank=9),
}


def held(folder, pictures) -> dict:
    """What vLLM says of an export."""
    words = [sys.executable, str(PROGRAM), str(folder), *map(str, pictures)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("format", ["earlyfusion", "kimi_k3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_vllm_holds_the_model(tokenizer, tmp_path, shape, format):
    """Every weight, every epsilon, the same ids and the same features."""
    model = made(tmp_path / "ours", Tokenizer.load(tokenizer), SHAPES[shape], TINY, seed=3)
    assert exported(tmp_path / "ours", tmp_path / "out", "--format", format) == EXIT_OK
    files = [tmp_path / f"{seed}.png" for seed in (1, 2)]
    pictures = [picture(33, 18, 1), picture(12, 40, 2)]
    for image, file in zip(pictures, files):
        image.save(file)
    found = held(tmp_path / "out", files)

    own = dict(model.state_dict())
    if model.config.text.tie_word_embeddings:
        own["head"] = model.decoder.embed_tokens.weight
    weights = sum(tensor.double().abs().sum().item() for tensor in own.values())
    assert found["left"] == [] and found["sum"] == pytest.approx(weights, rel=1e-12)
    if format == "kimi_k3":
        assert found["class"] == "KimiK3ForConditionalGeneration" and found["eps"] == [None]
        return
    assert found["class"] == "EarlyFusionForConditionalGeneration"
    assert found["eps"] == [TINY["norm_eps"]]
    assert found["latent_eps"] == [model.config.text.kv_norm_eps]
    reader = AutoProcessor.from_pretrained(tmp_path / "out", trust_remote_code=True)
    mark = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
    given = reader(text=f"Look: {mark}{mark} now", images=pictures, return_tensors="pt")
    assert found["ids"] == given["input_ids"][0].tolist()
    grid = [tuple(row) for row in given["image_grid_thw"].tolist()]
    with torch.no_grad():
        features = model.encode_images(given["pixel_values"], grid)
    theirs = torch.cat([torch.tensor(each) for each in found["features"]])
    torch.testing.assert_close(theirs, features, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_way_back_is_bit_for_bit(tokenizer, tmp_path, shape):
    """Weights, sizes, epsilons and the limits of pictures."""
    model = made(tmp_path / "ours", Tokenizer.load(tokenizer), SHAPES[shape], TINY, seed=3)
    assert exported(tmp_path / "ours", tmp_path / "out", "--format", "kimi_k3") == EXIT_OK
    assert cli.main(["import", str(tmp_path / "out"), "--to", str(tmp_path / "back")]) == EXIT_OK
    back = load_model(tmp_path / "back")
    assert back.config.vision == model.config.vision
    # Said in other words, not in the format at all, or of the head that is no longer tied.
    outside = {"linear_attn_config", "initializer_range", "tie_word_embeddings", "router_balance"}
    outside |= {"attn_res_block_size"} if model.config.text.attn_res == "none" else set()
    said = [each.config.text.model_dump(exclude=outside) for each in (back, model)]
    assert said[0] == said[1] and back.config.text.plan() == model.config.text.plan()
    own, found = model.state_dict(), back.state_dict()
    head = "decoder.lm_head.weight"
    assert torch.equal(found.pop(head), own.pop(head, own["decoder.embed_tokens.weight"]))
    assert own.keys() == found.keys() and all(torch.equal(own[name], found[name]) for name in own)


@pytest.mark.parametrize(
    ("text", "vision", "said"),
    [
        (dict(attn_res="full"), {}, "attn_res = 'full'"),
        ({}, {"norm": "layer", "projector": "v1", "bias": True}, "norm = 'layer'"),
        ({}, {"rope_theta": 500.0}, "rope_theta = 500.0"),
    ],
)
def test_what_k3_does_not_compute_is_refused(tokenizer, tmp_path, capsys, text, vision, said):
    made(tmp_path / "ours", Tokenizer.load(tokenizer), text, vision)
    assert exported(tmp_path / "ours", tmp_path / "out", "--format", "kimi_k3") == EXIT_USER
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_vllm_finds_the_plugin():
    """By the entry point that its documentation names."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    module, _, function = project["project"]["entry-points"]["vllm.general_plugins"]["earlyfusion"].partition(
        ":"
    )
    source = Path(__file__).parents[2] / (module.removeprefix("earlyfusion.").replace(".", "/") + ".py")
    assert f"def {function}()" in source.read_text()
