"""Importing needs memory for a shard, not for a model: layers of Kimi-Linear-48B's width from one file."""

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from earlyfusion.model.config import FusionConfig, LinearAttnConfig, ModelConfig
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.folder import public_tensors
from earlyfusion.vision.config import VisionConfig

MOST_GB = 1.7
"""Python with torch 0.5, half a GB of the file mapped, a shard of 0.1 twice: 1.1 measured. The file has 2.1,
and with all of it mapped 2.6 were needed."""


def sparse_checkpoint(folder: Path, tokenizer: Path) -> float:
    """A checkpoint of zeros that takes no place on disk; its size in GB."""
    text = ModelConfig(
        vocab_size=320,
        num_hidden_layers=2,
        num_experts=128,
        linear_attn_config=LinearAttnConfig(full_attn_layers=[2]),
        **{f"{name}_token_id": 2 for name in ("bos", "eos", "pad")},
    )
    with torch.device("meta"):
        model = NativeFusion(FusionConfig(text=text, vision=VisionConfig.preset("tiny"), media_token_id=5))
    own, head, at = model.state_dict(), {}, 0
    for item in public_tensors(own.items()):
        if item.name.startswith("language_model."):
            shape = list(item.view(own[item.ours]).shape)
            stop = at + 2 * torch.Size(shape).numel()
            name = item.name.removeprefix("language_model.")
            head[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, stop]}
            at = stop
    raw = json.dumps(head).encode()
    raw += b" " * (-len(raw) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
    unknown = {"linear_attn_config", "kv_norm_eps", "router_balance", "router_bias_update_rate"}
    unknown |= {"attn_res", "attn_res_block_size"}
    config = text.model_dump(mode="json", exclude=unknown)
    linear = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}
    config |= {"model_type": "kimi_linear", "layer_types": ["linear_attention", "full_attention"]}
    (folder / "config.json").write_text(json.dumps(config | {"linear_attn_config": linear}))
    for file in tokenizer.iterdir():
        shutil.copy(file, folder)
    return at / 1e9


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's figure of a process")
def test_memory_is_that_of_a_shard(tokenizer, tmp_path):
    (tmp_path / "theirs").mkdir()
    size = sparse_checkpoint(tmp_path / "theirs", tokenizer)
    assert size > MOST_GB + 0.3
    # Of the process alone: getrusage counts what its parent held when it was started.
    program = (
        "import re, sys; from pathlib import Path; from earlyfusion.pipeline import cli;"
        " code = cli.main(sys.argv[1:]); told = Path('/proc/self/status').read_text();"
        r" print('peak', re.search(r'VmHWM:\s*(\d+)', told)[1]); sys.exit(code)"
    )
    words = ["import", tmp_path / "theirs", "--to", tmp_path / "ours", "--vision", "tiny"]
    words += ["--shard-mb", "100"]
    done = subprocess.run([sys.executable, "-c", program, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) * 1024 / 1e9 < MOST_GB, done.stdout
    assert (tmp_path / "ours" / "model.safetensors.index.json").is_file()
    shutil.rmtree(tmp_path / "ours")
