"""From a recipe to the parts of a run that only reinforcement learning has: the engine that answers, and the
curated documents beside it."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from earlyfusion.data.loading.loader import Loader
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.engine.engine import RUN_AHEAD, Engine
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.checkpoint import Loaded
from earlyfusion.pipeline.config.compose import render
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.rl.recipe import RLConfig

PAGE = 16
"""Tokens of a page of the engine's cache."""


def build_engine(
    config: RLConfig, model: NativeFusion, tokenizer: Tokenizer, folder: Path, runtime: Runtime
) -> Engine:
    """The engine that answers: over `model` itself, or over a bfloat16 copy of the start in `folder`."""
    rollout = config.rollout
    # A copy is loaded and not cast: the trained model keeps its fp32 weights.
    if rollout.dtype == "bfloat16":
        model = load_model(folder, runtime.device, torch.bfloat16)
    # Pages for the longest answers everywhere: the engine then never pauses one for want of memory.
    longest = (rollout.max_prompt_tokens or 1024) + config.longest_answer
    share = math.ceil(rollout.prompts / runtime.world)
    slots = min(rollout.slots, share * rollout.group_size)
    return Engine(
        model,
        tokenizer,
        max_slots=slots,
        page_size=PAGE,
        max_pages=slots * (math.ceil(longest / PAGE) + 1),
        prefill_chunk=rollout.prefill_chunk,
        max_waiting=4 * share + 1024,
        image_cache=4 * share,
        # Answers that may be ended or paused are looked at after every token.
        run_ahead=1 if config.watched else RUN_AHEAD,
    )


def build_curated(
    config: RLConfig, model: NativeFusion, tokenizer: Tokenizer, runtime: Runtime, lanes: int
) -> Loader | None:
    """The curated documents of the PTX loss, `lanes` rows in every update; None where there is none."""
    ptx = config.ptx
    if config.data is None or not (ptx.coef or ptx.only):
        return None
    # Rows of their own beside the rollouts: their loss has its own normaliser.
    return Loader(
        config.data,
        tokenizer,
        model.config.vision,
        length=ptx.length,
        tokens=ptx.tokens,
        max_patches=ptx.max_patches,
        lanes=lanes,
        rank=runtime.rank,
        world_size=runtime.world,
    )


def curated_lanes(start: Loaded) -> int:
    """Curated rows of an update: one for each process that the run began with."""
    ptx = start.lanes[0]["ptx"]
    return 1 if ptx is None else int(ptx["identity"]["lanes"])


def plan(config: RLConfig) -> str:
    """The resolved recipe and what an iteration holds, for --dry-run."""
    rollout, train = config.rollout, config.train
    labels = ", ".join(f"{entry.label} x {entry.weight:g}" for entry in config.tasks)
    prompts = config.total_updates * rollout.prompts
    return "\n".join(
        [
            render(config),
            f"# an iteration: {rollout.prompts} prompts x {rollout.group_size} answers of at most"
            f" {rollout.max_new_tokens} tokens, {train.epochs * train.minibatches} update(s)",
            f"# prompts: {labels}",
            f"# {config.total_updates} iterations = {prompts:,} prompts",
        ]
    )
