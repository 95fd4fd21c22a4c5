"""A tiny model directory and recipe for the tests of reinforcement learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from engine_cases import TOKENIZER, model

from earlyfusion.model.hub import save_model
from earlyfusion.pipeline.compose import merge, validate
from earlyfusion.rl import parts, train
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.tasks.problem import Problem


def model_directory(folder: Path, seed: int = 0) -> Path:
    """The tiny model of the engine's tests as a model directory."""
    return save_model(model(seed), TOKENIZER, folder / f"model-{seed}")


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
