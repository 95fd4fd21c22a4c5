"""`earlyfusion export CHECKPOINT --to DIR`: a training checkpoint -> a model directory.

The checkpoint may be of pretraining, fine-tuning or reinforcement learning, written by any number of
processes under any plan; no GPU, no process group, and no second copy of the model is needed: weights are
read from the checkpoint one after another, and written a file at a time. Safetensors and `config.json` are
those that the run itself writes at its end.
"""

from pathlib import Path

import torch

from earlyfusion.data.chat.template import ChatTokenizer
from earlyfusion.data.options import Options, verb
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.config import FusionConfig
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.folder import save_model
from earlyfusion.pipeline import state
from earlyfusion.pipeline.checkpoint import FOLDER, TOKENIZER, damage, latest, load_tree, step_of


class ExportOptions(Options):
    positional = ("checkpoint",)

    checkpoint: Path
    """a checkpoint (RUN/checkpoints/step-000300), or a run's folder, whose newest one is taken"""
    to: Path
    """model directory to write"""


@verb
def export(options: ExportOptions) -> None:
    """Entry of `earlyfusion export`."""
    path = chosen(options.checkpoint)
    if fault := damage(path):
        raise UserError(f"checkpoint {path} is damaged ({fault}); export the one before")
    run = load_tree(path / "run")
    if "model" not in run:
        raise UserError(f"checkpoint {path} does not say what model it is of; it cannot be exported")
    config = FusionConfig.model_validate(run["model"])
    with torch.device("meta"):
        model = NativeFusion(config)
    words = Tokenizer.load(path.parent / TOKENIZER)

    name = run["recipe"]["run"]["name"]
    facts = {"name": name, "recipe": name, "steps": run["step"]}
    spoken = ChatTokenizer(words) if run["chat"] else words
    directory = save_model(
        model, spoken, options.to, facts | {"sources": {}, "evals": {}}, read=state.reader(model, path)
    )
    print(f"model directory: {directory} (step {step_of(path)} of {path.parent.parent})")


def chosen(given: Path) -> Path:
    """The checkpoint that is meant. Raises UserError where there is none."""
    if (given / "COMPLETE").is_file():
        return given
    newest = latest(given / FOLDER) or latest(given)
    if newest is None:
        raise UserError(
            f"{given} holds no complete checkpoint; give RUN/checkpoints/step-NNNNNN or the run's folder"
        )
    return newest
