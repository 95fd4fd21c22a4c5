"""Model merging (k1.5 2.4): one model directory whose weights are the weighted mean of several,
which must be of one configuration and one tokenizer.

    earlyfusion long2short average runs/long/model runs/short/model \\
        --weights 0.5 0.5 --out runs/merged
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from earlyfusion.data.options import Options, verb
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.hub.config import load_config
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.config.compose import diff
from earlyfusion.rl.long2short.samples import save_beside


def mean_state(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Weighted mean of the state dicts of one architecture, in the first one's dtypes.

    weights: shares that need not sum to 1. Sums run in float32 (float64 for float64): a running sum in
    bfloat16 would lose small terms. Integers are the first one's.
    """
    mean: dict[str, Tensor] = {}
    for name, first in states[0].items():
        mean[name] = first.clone()
        # Counters and masks have no mean.
        if first.is_floating_point():
            total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float32))
            for state, weight in zip(states, weights):
                total.add_(state[name], alpha=weight / sum(weights))
            mean[name].copy_(total)
    return mean


class AverageOptions(Options):
    positional = ("models",)

    models: list[str]
    """model directories of one configuration"""
    out: str
    """model directory to write"""
    weights: list[float] = []
    """share of each model; equal if left out"""


@verb
def average(options: AverageOptions) -> None:
    """Entry of `earlyfusion long2short average`."""
    models, out = options.models, options.out
    # What was given.
    shares = options.weights or [1.0] * len(models)
    places = [Path(one).resolve() for one in (*models, out)]
    if len(models) < 2:
        raise UserError(f"{len(models)} model given; averaging needs two or more model directories")
    if len(shares) != len(models):
        raise UserError(f"--weights: {len(shares)} given for {len(models)} models; give one for each")
    if not all(0 <= share < float("inf") for share in shares) or not sum(shares):
        raise UserError(f"--weights {shares}: expected numbers of at least 0, not all 0")
    if len(set(places)) < len(places):
        raise UserError("a folder is given twice: name every model once, and another one with --out")

    # Rows of embeddings mean the same tokens only where the tokenizers are the same.
    configs = [load_config(model).model_dump(mode="json") for model in models]
    tokenizers = [Tokenizer.load(model) for model in models]
    for model, config, tokenizer in zip(models, configs, tokenizers):
        changes = diff(configs[0], config)
        if changes:
            raise UserError(f"{model} is not of the architecture of {models[0]} ({changes[0]})")
        if tokenizer.hash != tokenizers[0].hash:
            raise UserError(f"{model} has another tokenizer than {models[0]}")

    # The first model is loaded once and filled with the mean: two copies, not three.
    merged = load_model(models[0])
    states = [merged.state_dict(), *(load_model(model).state_dict() for model in models[1:])]
    merged.load_state_dict(mean_state(states, shares))
    parts = " + ".join(f"{share / sum(shares):.4g} of `{model}`" for share, model in zip(shares, models))
    facts = {
        "name": Path(out).name,
        "base": ", ".join(models),
        "notes": [
            f"Weights averaged (long2short, Kimi k1.5 section 2.4): {parts}.",
            "Nothing was trained in this step.",
        ],
    }
    print(f"model directory: {save_beside(merged, tokenizers[0], Path(out), facts, Path(models[0]))}")
