"""`earlyfusion export CHECKPOINT|DIR --to OUT`: a training checkpoint or a model directory -> a directory
that earlyfusion and transformers read, or one in a format of others (`--format`, model/hub/outward.py).

A checkpoint may be of pretraining, fine-tuning or reinforcement learning, written by any number of processes
under any plan; no GPU, no process group, and no second copy of the model is needed: weights are read one
after another, and written a file at a time.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor

from earlyfusion.data.chat.template import ChatTokenizer, template_of
from earlyfusion.data.options import Options, verb
from earlyfusion.data.sources.base import KINDS
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record, read_jsonl
from earlyfusion.model.config import FusionConfig
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.config import load_config, model_folder
from earlyfusion.model.hub.folder import (
    PublicTensor,
    cast,
    check_tensors,
    fresh_directory,
    public_tensors,
    weight_files,
    write_files,
    write_weights,
)
from earlyfusion.model.hub.foreign import Foreign
from earlyfusion.model.hub.outward import DIALECTS, Format, finish
from earlyfusion.pipeline import state
from earlyfusion.pipeline.adapter import attach, merged
from earlyfusion.pipeline.checkpoint import FOLDER, TOKENIZER, damage, latest, load_tree, step_of
from earlyfusion.pipeline.config.schema import AdapterSection
from earlyfusion.pipeline.progress import is_finite

MEGABYTE = 10**6


class ExportOptions(Options):
    positional = ("source",)

    source: Path
    """a checkpoint (RUN/checkpoints/step-000300), a run's folder, whose newest one is taken, or a model
    directory"""
    to: Path
    """directory to write"""
    format: Format = "earlyfusion"
    """earlyfusion: read by earlyfusion, and by transformers with the code that is written beside it;
    kimi_linear (the text model) and kimi_k25: read by transformers' own classes; kimi_k3: by vLLM's and
    NVIDIA's"""
    licence: str | None = None
    """licence of the weights for the model card, as an SPDX id"""
    shard_mb: PositiveInt = 5000
    """largest size of a file of weights"""


@dataclass(frozen=True)
class Source:
    """A model whose weights lie in files. read: one tensor by its public name and place in ours."""

    model: NativeFusion
    tokenizer: Any
    facts: Record
    read: Callable[[PublicTensor], Tensor]
    said: str
    card: Path | None = None


@verb
def export(options: ExportOptions) -> None:
    """Entry of `earlyfusion export`."""
    folder = model_folder(options.source)
    path = chosen(options.source)
    source = of_directory(folder) if path is None else of_checkpoint(path)
    config, dialect = source.model.config, DIALECTS[options.format]
    dtype = str(source.model.decoder.embed_tokens.weight.dtype).removeprefix("torch.")
    # What the format cannot hold is said before anything is written.
    dialect.files(config, dtype)

    own = source.model.state_dict()
    items = dialect.tensors(config, public_tensors(own.items()))
    named = [replace(item, name=name) for name, item in items.items()]
    with fresh_directory(options.to) as new:
        write_files(new, source.model, source.tokenizer, source.facts)
        if source.card is not None:
            shutil.copyfile(source.card, new / source.card.name)
        read = lambda item: dialect.shaped(item.name, source.read(items[item.name]))
        write_weights(new, own, named, options.shard_mb * MEGABYTE, read)
        finish(new, config, dtype, options.format, options.licence)
    print(f"{options.format}: {options.to} ({source.said})")


def of_checkpoint(path: Path) -> Source:
    """The model of a checkpoint. Raises UserError for one that is damaged or does not say its model."""
    if fault := damage(path):
        raise UserError(f"checkpoint {path} is damaged ({fault}); export the one before")
    run = load_tree(path / "run")
    if "model" not in run:
        raise UserError(f"checkpoint {path} does not say what model it is of; it cannot be exported")
    with torch.device("meta"):
        model = NativeFusion(FusionConfig.model_validate(run["model"]))
    words = Tokenizer.load(path.parent / TOKENIZER)
    # Adapters of the run are added to the weights beside them.
    holder = attach(model, AdapterSection(**run["recipe"].get("adapter") or {}))
    model, find = merged(holder, state.reader(holder, path))
    return Source(
        model,
        ChatTokenizer(words) if run["chat"] else words,
        facts_of(run, path.parent.parent),
        lambda item: item.view(find(item.ours)),
        f"step {step_of(path)} of {path.parent.parent}",
    )


def facts_of(run: Record, folder: Path) -> Record:
    """What the card says of a checkpoint: its recipe, and what its run's folder measured up to that step."""
    recipe, step = run["recipe"], run["step"]
    last: Record = {}
    for line in read_jsonl(folder / "metrics.jsonl"):
        if line.get("step", 0) <= step:
            last[str(line.get("event"))] = line
    trained, measured = last.get("train", {}), last.get("eval", {})

    sources: Record = {}
    for source in (recipe.get("data") or {}).get("sources", []):
        # A kind of the user's own is not imported for its licence.
        kind = KINDS.get(source["kind"])
        share = trained.get(f"data/share/{source['name']}")
        sources[source["name"]] = {} if kind is None else {"licence": kind.licence, "note": kind.note}
        sources[source["name"]] |= {} if share is None else {"share": share}
    numbers = {key: value for key, value in measured.items() if is_finite(value)}
    return {
        "name": recipe["run"]["name"],
        "recipe": recipe["run"]["name"],
        "steps": step,
        "sources": sources,
        "length": max((stage["length"] for stage in recipe.get("stages", [])), default=None),
        "evals": {key: round(value, 4) for key, value in numbers.items() if key not in ("step", "time")},
        **{key: round(trained[key]) for key in ("tokens", "seconds") if key in trained},
    }


def of_directory(folder: Path) -> Source:
    """The model of a model directory, whose card is kept. Raises UserError for one that is none or
    damaged."""
    with torch.device("meta"):
        model = NativeFusion(load_config(folder))
    own = model.state_dict()
    plan = {item.name: item for item in public_tensors(own.items())}
    stored = check_tensors(folder, plan, own, weight_files(folder))
    cast(model, stored["language_model.model.embed_tokens.weight"])
    files = Foreign(folder)
    # A head that is the embedding lies there under the embedding's name alone.
    first = {item.ours: name for name, item in plan.items()}

    def read(item: PublicTensor) -> Tensor:
        found = files.find(item.name) or files.find(first[item.ours])
        assert found is not None
        return files.tensor(found)

    words = Tokenizer.load(folder)
    spoken = ChatTokenizer(words) if template_of(folder) == "chat" else words
    card = folder / "README.md"
    return Source(model, spoken, {"name": folder.name}, read, str(folder), card if card.is_file() else None)


def chosen(given: Path) -> Path | None:
    """The checkpoint that is meant; None where a model directory is given. Raises UserError where there is
    neither."""
    if (given / "COMPLETE").is_file():
        return given
    newest = latest(given / FOLDER) or latest(given)
    if newest is None and not (model_folder(given) / "config.json").is_file():
        raise UserError(
            f"{given} holds no complete checkpoint and no model; give RUN/checkpoints/step-NNNNNN, the run's"
            " folder, or a model directory"
        )
    return newest
