"""Model merging (k1.5 2.4): one model directory whose weights are the weighted mean of several.

    average(["runs/long/model", "runs/short/model"], [0.5, 0.5], "runs/merged")

The models must have the same configuration and the same tokenizer; the card of the new one says what was
merged.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from earlyfusion.data.chat.template import TEMPLATE_FILE
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.hub.config import load_config
from earlyfusion.model.hub.folder import load_model, save_model
from earlyfusion.pipeline.config.compose import diff
from earlyfusion.rl.long2short.preferences import average_weights


def average(models: Sequence[str | Path], weights: Sequence[float] | None, out: str | Path) -> Path:
    """Write the merged model directory; returns it. weights: one share of each model, made to sum to 1; None:
    equal.

    Sums run in float32, the result has the first model's dtypes and its chat template. Raises UserError for
    fewer than two models, shares that do not fit, other configurations or tokenizers; ModelDirectoryError for
    what is no model.
    """
    folders = [Path(model) for model in models]
    shares = _shares(folders, weights)
    _check_places(folders, Path(out))
    _check_same(folders)
    tokenizer = Tokenizer.load(folders[0])
    merged = load_model(folders[0])
    states = [merged.state_dict(), *(load_model(folder).state_dict() for folder in folders[1:])]
    merged.load_state_dict(average_weights(states, shares))
    parts = [f"{share:.4g} of `{folder}`" for share, folder in zip(shares, folders)]
    facts = {
        "name": Path(out).name,
        "base": ", ".join(str(folder) for folder in folders),
        "notes": [
            f"Weights averaged (long2short, Kimi k1.5 section 2.4): {' + '.join(parts)}.",
            "Nothing was trained in this step.",
        ],
    }
    directory = save_model(merged, tokenizer, out, facts)
    template = folders[0] / TEMPLATE_FILE
    if template.is_file():
        shutil.copy(template, directory / TEMPLATE_FILE)
    return directory


def _shares(folders: Sequence[Path], weights: Sequence[float] | None) -> list[float]:
    if len(folders) < 2:
        raise UserError(f"{len(folders)} model given; averaging needs two or more model directories")
    shares = [1.0] * len(folders) if weights is None else [float(weight) for weight in weights]
    if len(shares) != len(folders):
        raise UserError(f"--weights: {len(shares)} given for {len(folders)} models; give one for each")
    if not all(0 <= share < float("inf") for share in shares) or not sum(shares) > 0:
        raise UserError(f"--weights {shares}: expected numbers of at least 0, not all 0")
    return [share / sum(shares) for share in shares]


def _check_places(folders: Sequence[Path], out: Path) -> None:
    places = [folder.resolve() for folder in folders]
    twice = [folder for folder, place in zip(folders, places) if places.count(place) > 1]
    if twice:
        raise UserError(f"{twice[0]} is given twice; name every model once and its share with --weights")
    if out.resolve() in places:
        raise UserError(f"--out {out} is one of the models that are merged; name another folder")


def _check_same(folders: Sequence[Path]) -> None:
    first, *others = [load_config(folder).model_dump(mode="json") for folder in folders]
    tokenizer = Tokenizer.load(folders[0]).hash
    for folder, config in zip(folders[1:], others):
        changes = diff(first, config)
        if changes:
            more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
            raise UserError(
                f"{folder} is not of the architecture of {folders[0]} ({changes[0]}{more}); weights can be"
                " averaged between models of one configuration only"
            )
        if Tokenizer.load(folder).hash != tokenizer:
            raise UserError(
                f"{folder} has another tokenizer than {folders[0]}; the rows of their embeddings mean other"
                " tokens"
            )
