"""A tiny model directory and recipe for the tests of reinforcement learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from engine_cases import TOKENIZER, model, tokens

from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.generate import pack_prompts
from earlyfusion.model.hub import save_model
from earlyfusion.pipeline.compose import merge, validate
from earlyfusion.rl import parts, train
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.tasks.problem import Problem


def model_directory(folder: Path, seed: int = 0) -> Path:
    """The tiny model of the engine's tests as a model directory; it ends its answers after a few tokens."""
    return save_model(ending(model(seed)), TOKENIZER, folder / f"model-{seed}")


@torch.no_grad()
def ending(net: NativeFusion, logit: float = 6.0) -> NativeFusion:
    """`net` with an end token of about this logit, the others lying around 0 (vocabulary 300): random weights end their
    answers once in 150 tokens, and what a limit cuts off earns nothing."""
    hidden_TD = net.eval().hidden(pack_prompts(net, [tokens(40, seed) for seed in range(8)]))
    eye_DD = 0.1 * torch.eye(hidden_TD.shape[1])
    mean_D = torch.linalg.solve(hidden_TD.T @ hidden_TD + eye_DD, hidden_TD.sum(0))
    net.decoder.head_weight()[TOKENIZER.eos_id] = mean_D * logit / (hidden_TD @ mean_D).mean()
    return net


def recipe(**changes: Any) -> dict[str, Any]:
    """A recipe as a plain dict: 4 prompts of three kinds, 4 answers of at most 5 tokens."""
    base: dict[str, Any] = {
        "run": {"name": "tiny-rl", "seed": 3},
        "tasks": [
            {"name": "colour_shape"},
            {"name": "counting", "form": "twin"},
            {"name": "odd_one_out", "weight": 0.5},
        ],
        "rollout": {"prompts": 4, "group_size": 4, "max_new_tokens": 5, "prefill_chunk": 64},
        "reward": {"name": f"{__name__}:spaces"},
        "optim": {"lr": 5e-3, "weight_decay": 0.0},
        "train": {"updates": 4, "threads": 1},
        "eval": {"problems": 0},
        "track": {"log_every": 1},
    }  # fmt: skip
    return merge(base, changes)


def config(folder: Path, out: Path, **changes: Any) -> RLConfig:
    changes["run"] = {"init_from": str(folder), "out": str(out), **changes.get("run", {})}
    return validate(recipe(**changes), RLConfig)


def training(folder: Path, out: Path, resume: bool = False, **changes: Any) -> train.Reinforcement:
    """A run in this process, ready to train. Rewards are called here: worker processes cannot import the tests."""
    AcceleratorState._reset_state(True)
    return train.Reinforcement(config(folder, out, **changes), resume)


def run(folder: Path, out: Path, resume: bool = False, **changes: Any) -> int:
    made = training(folder, out, resume, **changes)
    try:
        return made.train()
    finally:
        made.close()


def spaces(problem: Problem, response: str) -> float:
    """A reward that random weights can earn: the share of vowels among the characters."""
    return sum(c in "aeiou" for c in response.lower()) / max(1, len(response))


__all__ = ["config", "model_directory", "parts", "recipe", "run", "spaces", "training"]
