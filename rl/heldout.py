"""What a run measures on problems that it never trains on, dealt over its processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import measure
from earlyfusion.eval.measured import Measured
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.rl.measure import measure_tools
from earlyfusion.rl.recipe import RLConfig


def measure_heldout(
    config: RLConfig, model: NativeFusion, tokenizer: Tokenizer, runtime: Runtime
) -> list[Measured]:
    """Greedy (and sampled) answers to the held-out problems of `eval`, the same on every process; every
    process calls it."""
    model.eval()
    how: dict[str, Any] = {
        "problems": config.eval.problems,
        "seed": config.eval.seed,
        "samples": config.eval.samples,
        "slots": config.rollout.slots,
        "share": (runtime.rank, runtime.world),
    }
    measured: list[Measured] = []
    # Answers with tools come in turns, so they are measured by another loop.
    plain = [entry for entry in config.measured if not entry.tools]
    if plain:
        longest = config.rollout.max_new_tokens
        own = measure(model, tokenizer, plain, max_new_tokens=longest, **how)
        measured += in_order(own, runtime)
    tools = [entry for entry in config.measured if entry.tools]
    if tools:
        how["allow_weaker"] = config.sandbox.allow_weaker
        own = measure_tools(model, tokenizer, tools, config.rollout, **how)
        measured += in_order(own, runtime)
    return measured


def in_order(own: Sequence[Measured], runtime: Runtime) -> list[Measured]:
    """What all processes measured of the problems that were dealt to them, in the problems' order; without
    pictures."""
    # Pictures are large and rank 0 can draw them again from the key.
    shares = runtime.gather([replace(one, picture=None) for one in own])
    return [shares[i % runtime.world][i // runtime.world] for i in range(sum(map(len, shares)))]
