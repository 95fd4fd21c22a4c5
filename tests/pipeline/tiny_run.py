"""A run small enough for tests, on the real path: recipe, tokenizer, sources, model, MuonClip, checkpoints,
report.

The recipe keeps every part of the big ones: easy-VQA, the Python manual and rendered scenes; MoonViT tower,
KDA and MLA, MoE with quantile balancing, block AttnRes; per-head Muon with a QK-Clip that bites; two stages
of different length, mixture and learning rate; loss weights by source and for text.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from forked import Forked, ranks
from safetensors.torch import load_file

from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.vocabulary import train_bpe
from earlyfusion.model.config import ModelConfig
from earlyfusion.pipeline import cli, evaluate, pretrain
from earlyfusion.pipeline.config.compose import compose, recipe_names, to_toml
from earlyfusion.pipeline.track import read_metrics

REPOSITORY = Path(__file__).parents[2]
MODULE = "earlyfusion.pipeline.pretrain"
ACCELERATE = (
    "-m accelerate.commands.launch --num_processes 1 --num_machines 1 --mixed_precision no"
    " --dynamo_backend no"
).split()


def whole_recipes() -> list[str]:
    """Shipped recipes that build a model; those of later stages take theirs from a model directory
    (test_sft.py)."""
    return [name for name in recipe_names() if "model" in compose([name])]


def make_tokenizer(folder: Path, vocab_size: int) -> Path:
    """A byte-level BPE of a few merges, trained on the topics of the Python manual."""
    manual = build_source(SourceConfig(name="pydoc", kind="pydoc"), seed=0, val_fraction=0.1)
    texts = [text for index in range(40) for text in manual.texts(index)]
    return train_bpe(texts, vocab_size).save(folder / f"bpe-{vocab_size}")


def tiny_recipe(tokenizer: Path, **changes: Any) -> dict[str, Any]:
    """The recipe as a plain dict; `changes` are dotted keys with __ for the dot (optim__lr=1e-2)."""
    recipe: dict[str, Any] = {
        "run": {"name": "tiny", "seed": 3},
        "tokenizer": {"path": str(tokenizer)},
        "data": {
            "seed": 1,
            "prefetch": "none",
            "lookahead": 2,
            "sources": [
                {"name": "vqa", "kind": "easy_vqa", "weight": 0.4},
                {"name": "manual", "kind": "pydoc", "weight": 0.3},
                {"name": "scenes", "kind": "synth_scenes", "weight": 0.3},
            ],
        },
        "vision": {
            "preset": "tiny",
            "hidden_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "intermediate_size": 32,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
        },
        "model": {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 12,
            "mla_output_gate": True,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 24,
            "router_balance": "quantile",
            "attn_res": "block",
            "attn_res_block_size": 1,
            "tie_word_embeddings": True,
            "linear_attn_config": {
                "num_heads": 2,
                "head_dim": 8,
                "gate_lower_bound": -5.0,
                "kda_layers": [1, 2],
                "full_attn_layers": [3],
            },
        },
        "optim": {"lr": 1e-2, "weight_decay": 0.05, "head_group_size": 1, "qk_clip": 0.03},
        "stages": [
            {"name": "short", "steps": 8, "length": 96, "tokens": 256, "warmup_steps": 3},
            {
                "name": "long",
                "steps": 12,
                "length": 160,
                "tokens": 384,
                "lr": 4e-3,
                "schedule": "wsd",
                "decay_steps": 4,
                "weights": {"vqa": 0.2, "manual": 0.2, "scenes": 0.6},
            },
        ],
        "train": {"threads": 1, "loss_weights": {"manual": 0.5}},
        "eval": {"tasks": [], "samples": 0, "heldout": 0},
        "checkpoint": {"every": 3, "keep": 2},
        "track": {"log_every": 1},
    }
    return changed(recipe, **changes)


def changed(recipe: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The recipe with values put at dotted keys, __ for the dot."""
    for key, value in changes.items():
        node, parts = recipe, key.split("__")
        for part in parts[:-1]:
            node = node[int(part)] if part.isdigit() else node.setdefault(part, {})
        node[parts[-1]] = value
    return recipe


def tiny_text(**changes: Any) -> ModelConfig:
    """The text model of the tiny recipe by itself."""
    ids = {"vocab_size": 97, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return ModelConfig.model_validate({**tiny_recipe(Path())["model"], **ids, **changes})


def write_recipe(path: Path, recipe: Mapping[str, Any]) -> Path:
    path.write_text(to_toml(recipe), encoding="utf-8")
    return path


def run_here(
    recipe: Path, out: Path, *words: str, report: bool = False, monkeypatch: Any, main: Any = pretrain.main
) -> int:
    """`earlyfusion pretrain` (or another main) in this process; returns the exit code. Without `report`, the
    HTML is left out (slow)."""
    forget_processes()
    with monkeypatch.context() as patch:
        if not report:
            patch.setattr(evaluate, "write_report", lambda folder: folder / "report.html")
        return main([str(recipe), "--out", str(out), *split(words)])


def split(words: Sequence[str]) -> list[str]:
    """Options may be given as one text: "--steps 2 --resume"."""
    return [part for word in words for part in (word.split() if word.startswith("--") else [word])]


def forget_processes() -> None:
    """accelerate keeps one state per process; the next run in this process may want another precision."""
    AcceleratorState._reset_state(True)


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "EF_CACHE": os.environ.get("EF_CACHE", ""), **extra}


def start(
    recipe: Path, out: Path, *words: str, launcher: Sequence[str] = (), module: str = MODULE, **extra: str
):
    """The run as a user starts it, in a process of its own; extra: of its environment."""
    given = [str(recipe), "--out", str(out), *split(words)]
    if not launcher:
        return Forked(cli.main, ([module.rpartition(".")[2], *given],), environment(**extra))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", module, *given], env=environment(**extra), **pipes
    )


def two_ranks(recipe: Path, out: Path, *words: str) -> list[Forked]:
    """The two processes that torchrun would start, without torchrun: each has its own exit code."""
    return ranks(cli.main, (["pretrain", str(recipe), "--out", str(out), *split(words)],), environment())


# What a resume must reproduce: everything a train record holds that is not a measured time, rate or memory.
MEASURED = ("time", "seconds", "_per_s", "step_s", "data_wait", "engine_idle", "memory", "mfu")


def numbers(out: Path) -> list[dict[str, Any]]:
    """The train records of a run without what a clock measured."""
    records = read_metrics(out / "metrics.jsonl", "train")
    return [
        {key: value for key, value in record.items() if not any(word in key for word in MEASURED)}
        for record in records
    ]


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(out / "metrics.jsonl", "train")]


def weights(out: Path, folder: str = "model") -> dict[str, torch.Tensor]:
    """The tensors of a finished run's model directory."""
    return load_file(out / folder / "model.safetensors")


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def assert_same(left: Path, right: Path) -> None:
    """The same run: every number of every step, and the weights at its end, bit for bit."""
    assert numbers(left) == numbers(right) != []
    assert same(weights(left), weights(right))
