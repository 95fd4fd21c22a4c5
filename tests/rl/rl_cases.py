"""A tiny model directory and recipe for the tests of reinforcement learning."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from engine_cases import TOKENIZER, model, tokens
from torch import Tensor

from earlyfusion.data.tasks.problem import Problem
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.model.engine.engine import Row, pack_prompts
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.folder import save_model
from earlyfusion.pipeline.config.compose import merge, validate
from earlyfusion.rl import train
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.rollouts.packing import Places, Trajectory, used_experts

PTX = {
    "ptx": {"coef": 0.3, "tokens": 192, "length": 96},
    "data": {
        "prefetch": "none",
        "sources": [
            {"name": "p", "kind": "problems", "options": {"tasks": {"counting": 1}, "forms": {"twin": 1}}}
        ],
    },
    "rollout": {"pool": 6, "resample": 1},
    "train": {"epochs": 2, "minibatches": 2, "old_policy": "trainer"},
    "correction": {"mode": "tis"},
    "objective": {"name": "dapo"},
}


OPEN: list[train.Reinforcement] = []
"""Runs that a test has begun; conftest.py closes them."""


def problem_of(key: str) -> Problem:
    """The problem of a key, "counting/test/1/7"."""
    name, split, level, seed = key.split("/")
    return make_task(name).sample(int(seed), split, int(level))  # type: ignore[arg-type]


def model_directory(folder: Path, seed: int = 0) -> Path:
    """The tiny model of the engine's tests as a model directory; it ends its answers after a few tokens."""
    return save_model(ending(model(seed)), TOKENIZER, folder / f"model-{seed}")


@torch.no_grad()
def ending(net: NativeFusion, logit: float = 6.0) -> NativeFusion:
    """`net` with an end token of about this logit, the others lying around 0 (vocabulary 300): random weights
    end their answers once in 150 tokens, and what a limit cuts off earns nothing."""
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
    }
    return merge(base, changes)


def config(folder: Path, out: Path, **changes: Any) -> RLConfig:
    changes["run"] = {"init_from": str(folder), "out": str(out), **changes.get("run", {})}
    return validate(recipe(**changes), RLConfig)


def training(folder: Path, out: Path, resume: bool = False, **changes: Any) -> train.Reinforcement:
    """A run in this process, ready to train. Rewards are called here: worker processes cannot import the
    tests."""
    AcceleratorState._reset_state(True)
    OPEN.append(train.Reinforcement(config(folder, out, **changes), resume))
    return OPEN[-1]


def run(folder: Path, out: Path, resume: bool = False, **changes: Any) -> int:
    try:
        return training(folder, out, resume, **changes).train()
    finally:
        while OPEN and OPEN[-1].out == out:
            OPEN.pop().close()


def spaces(problem: Problem, response: str) -> float:
    """A reward that random weights can earn: the share of vowels among the characters."""
    return sum(c in "aeiou" for c in response.lower()) / max(1, len(response))


def trained_logprobs(model: NativeFusion, row: Row, places: Places, replay: bool = True) -> Tensor:
    """fp32 log-probabilities [M] of the generated tokens at temperature 1 by the training forward;
    differentiable.

    replay: use the experts the engine used, where they were captured.
    """
    if replay:
        with used_experts(model, places):
            hidden_TD = model.hidden(row)
    else:
        hidden_TD = model.hidden(row)
    logits_MV = model.logits(hidden_TD.index_select(0, places.positions_M)).float()
    return logits_MV.log_softmax(-1).gather(1, places.ids_M.unsqueeze(1)).squeeze(1)


@torch.no_grad()
def mismatch(trajectories: Sequence[Trajectory], trained_M: Tensor) -> tuple[float, float]:
    """Engine against trainer (`trained_logprobs`) over generated tokens: with d = trained - engine
    log-probability, mean(e^d - 1 - d), the estimator that is never negative, in nats; and max |d|."""
    engine_M = torch.tensor([p for t in trajectories for p in t.completion.logprobs1], dtype=torch.float64)
    difference_M = trained_M.double() - engine_M
    return float((difference_M.expm1() - difference_M).mean()), float(difference_M.abs().max())


def flat(groups: Sequence[Sequence[Trajectory]]) -> list[Trajectory]:
    """All trajectories of all groups in order."""
    return [trajectory for group in groups for trajectory in group]
