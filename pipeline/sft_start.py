"""Where a chat stage starts: the model and tokenizer of a model directory, with rows added for missing
special tokens.

The recipe of a chat stage has no `model`, `vision` and `tokenizer` of its own: `with_start` fills them in
from the directory that `run.init_from` names, so the resolved recipe is complete and a resume can be compared
with it.

Growth: a tokenizer from elsewhere may lack some of the special tokens (data/tokenizer.py). They get the next
free ids, and the rows of the embedding (and of an untied head) that belong to them are the mean of the rows
of the tokens that were there before. The model card says so.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record
from earlyfusion.model.config import FusionConfig
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.config import load_config, model_folder
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.config.schema import without_preset

VOCABULARY = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of the text model that follow the tokenizer."""
TABLES = ("decoder.embed_tokens.weight", "decoder.lm_head.weight")
"""Tensors with one row for every entry of the vocabulary."""


def with_start(tree: Record) -> Record:
    """A composed recipe with `model`, `vision` and `tokenizer` as the directory of `run.init_from` has them.

    Raises UserError when there is none or the recipe asks for another model, ModelDirectoryError when it is
    none.
    """
    directory = (tree.get("run") or {}).get("init_from")
    if directory is None:
        raise UserError(
            "run.init_from is not set: name the model directory to start from, --init-from runs/nano/model"
        )
    directory = model_folder(directory)
    # A section that the recipe has all the same must say what the directory says.
    found = load_config(directory)
    tokens = Tokenizer.load(directory)
    for section, config in (("model", found.text), ("vision", found.vision)):
        wanted = tree.get(section) or {}
        if section == "vision" and wanted.get("preset") is not None:
            # A model directory names none.
            wanted = without_preset(wanted)
        _check_same(section, wanted, config.model_dump(mode="json"), str(directory))
    given = (tree.get("tokenizer") or {}).get("path")
    if given is not None and Tokenizer.load(given).hash != tokens.hash:
        raise UserError(f"tokenizer.path {given}: not the tokenizer of {directory}; remove tokenizer.path")
    ids = {"bos_token_id": tokens.bos_id, "eos_token_id": tokens.eos_id, "pad_token_id": tokens.pad_id}
    # A table may hold more rows than the tokenizer has words (padded to a multiple).
    size = max(tokens.vocab_size, found.text.vocab_size)
    return {
        **tree,
        "tokenizer": {"path": str(directory), "vocab_size": tokens.vocab_size},
        "vision": found.vision.model_dump(mode="json"),
        "model": found.text.model_dump(mode="json") | ids | {"vocab_size": size},
    }


def _check_same(section: str, given: Record, found: Record, directory: str) -> None:
    for key, value in given.items():
        if key in VOCABULARY:
            continue
        if isinstance(value, dict) and isinstance(found.get(key), dict):
            _check_same(f"{section}.{key}", value, found[key], directory)
        elif key not in found or found[key] != value:
            raise UserError(
                f"{section}.{key} = {value!r}: the model comes from {directory}, which has"
                f" {found.get(key)!r}; remove the section [{section.partition('.')[0]}] from the recipe"
            )


def start_model(directory: str | Path, wanted: FusionConfig, tokens: Tokenizer) -> tuple[NativeFusion, str]:
    """The directory's weights in a model of configuration `wanted`, which may differ in its vocabulary only,
    and one sentence for the model card on the special tokens that got an initial row ("" for none).

    Raises UserError when it differs in more or has fewer rows, ModelDirectoryError when there is no such
    directory.
    """
    loaded = load_model(directory, dtype=torch.float32)  # as build.model does
    before, after = loaded.config.text.vocab_size, wanted.text.vocab_size
    if loaded.config == wanted and not tokens.added:
        return loaded, ""
    if _without_vocabulary(loaded.config) != _without_vocabulary(wanted) or after < before:
        raise UserError(
            f"run.init_from {directory}: its model is not the recipe's; start without [model] and [vision]"
        )

    # A fresh model of the larger shape; every weight of it is replaced.
    fusion = NativeFusion(wanted)
    state = loaded.state_dict()
    fresh = [tokens.id_of(name) for name in tokens.added]
    for name in TABLES:
        if name in state:
            state[name] = grown(state[name], after, fresh)
    fusion.load_state_dict(state)
    if not tokens.added:
        return fusion, ""
    return fusion, (
        f"{len(tokens.added)} special tokens were added to the tokenizer ({', '.join(tokens.added)}): their"
        f" rows of the embedding began as the mean of the other rows ({before} rows before, {after} after)."
    )


def _without_vocabulary(config: FusionConfig) -> Record:
    plain = config.model_dump(mode="json", exclude={"media_token_id"})
    return plain | {"text": {key: value for key, value in plain["text"].items() if key not in VOCABULARY}}


def grown(table_VD: Tensor, rows: int, fresh: Sequence[int]) -> Tensor:
    """[V, D] -> [rows, D]: rows beyond V, and those of the ids in `fresh`, are the mean of all others (in
    fp32)."""
    # The rows of tokens that were there before are what a fresh one starts from.
    known = torch.ones(table_VD.shape[0], dtype=torch.bool, device=table_VD.device)
    known[[i for i in fresh if i < table_VD.shape[0]]] = False
    # In fp32: a mean over 100,000 rows of bfloat16 would be off by percents.
    mean_D = table_VD[known].float().mean(dim=0).to(table_VD.dtype)
    larger = mean_D.expand(rows, -1).clone()
    larger[: table_VD.shape[0]][known] = table_VD[known]
    return larger
