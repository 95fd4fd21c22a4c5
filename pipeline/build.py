"""From a recipe to the parts of a run: tokenizer, model, optimizer, costs, and the recipe as it is written
down."""

import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

from earlyfusion.data.loading.encode import PackedBatch
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.vocabulary import embedded_tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record, write_atomic, write_json
from earlyfusion.model.config import FusionConfig
from earlyfusion.model.flops import training_flops
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.config.compose import dump, to_toml
from earlyfusion.pipeline.config.schema import OptimSection, RunConfig
from earlyfusion.pipeline.model_from import begin_with
from earlyfusion.pipeline.optim.registry import find_optimizer
from earlyfusion.pipeline.parallel.mesh import Layout
from earlyfusion.pipeline.runtime import Runtime, installed
from earlyfusion.vision.encoder import import_tower


def tokenizer(config: RunConfig, runtime: Runtime) -> Tokenizer:
    """The recipe's own tokenizer, or the byte-level BPE trained on the embedded corpus (cached by rank
    0)."""
    if config.tokenizer.path is not None:
        return own_tokenizer(config.tokenizer.path)
    # Rank 0 trains and caches it, the others read the cache.
    # (The others wait before, rank 0 after its work.)
    if not runtime.is_main:
        runtime.barrier()
    trained = embedded_tokenizer(config.tokenizer.vocab_size)
    if runtime.is_main:
        runtime.barrier()
    return trained


def own_tokenizer(path: str) -> Tokenizer:
    """The tokenizer in `tokenizer.path`, special tokens added where it lacks them.

    Raises DataError for no tokenizer, UserError for one that drops characters every question and answer has.
    """
    tokens = Tokenizer.load(path)
    # Text would be lost without a word: a model can neither read nor write it.
    if lost := tokens.lost():
        raise UserError(
            f"tokenizer.path {path}: {len(lost)} characters do not come back from their ids ({lost[:16]!r});"
            " train it with initial_alphabet=ByteLevel.alphabet(), or with byte_fallback"
        )
    return tokens


def with_tokenizer(config: RunConfig, tokens: Tokenizer) -> RunConfig:
    """The recipe with the model's vocabulary and special ids as the tokenizer has them."""
    return config.with_vocabulary(
        tokens.vocab_size, bos_token_id=tokens.bos_id, eos_token_id=tokens.eos_id, pad_token_id=tokens.pad_id
    )


def fusion_config(config: RunConfig, media_token_id: int) -> FusionConfig:
    """Text and vision sections as one model configuration; a tower of the user's own is imported."""
    # A tower registers itself when its module is imported, which must come before its options.
    import_tower(config.vision.tower)
    return FusionConfig(text=config.model, vision=config.vision, media_token_id=media_token_id)


def meta_model(config: RunConfig) -> NativeFusion:
    """The recipe's model without storage. The media token's id matters to no size, so the last id stands for
    it."""
    # Shapes alone: 48 billion parameters take no byte here.
    fusion = FusionConfig(text=config.model, vision=config.vision, media_token_id=config.model.vocab_size - 1)
    with torch.device("meta"):
        return NativeFusion(fusion)


def model(config: RunConfig, tokens: Tokenizer, said: list[str] | None = None) -> NativeFusion:
    """A model with fresh weights (from `run.seed`), or those of `run.init_from`; with `run.model_from` those
    that fit, and `said` gets the lines about them.

    Raises UserError when the warm start's shape is not the recipe's, or nothing of it fits.
    """
    wanted = fusion_config(config, tokens.media_pad_id)
    if config.run.init_from is None:
        made = NativeFusion(wanted)
        if config.run.model_from is not None:
            lines = begin_with(made, config.run.model_from, tokens)
            if said is not None:
                said += lines
        return made
    # Whatever it is stored in: updates of 1e-3 would round away in bfloat16.
    loaded = load_model(model_folder(config.run.init_from), dtype=torch.float32)
    if loaded.config != wanted:
        raise UserError(
            f"run.init_from {config.run.init_from}: its model or vocabulary is not the recipe's; "
            "use the recipe and tokenizer it was trained with (its config.json and tokenizer.json)"
        )
    return loaded


def optimizer(options: OptimSection, model: nn.Module, layout: Layout | None = None) -> torch.optim.Optimizer:
    """The recipe's optimizer over the model's parameters. Raises UserError for one that does not exist."""
    made = find_optimizer(options.name).build(options, model)
    clip: Any = getattr(made, "qk_clip", None)
    if clip is not None and layout is not None and layout.sizes.pp > 1:
        clip.group = layout.holders
    return made


def optimizer_metrics(opt: torch.optim.Optimizer) -> Record:
    """QK-Clip's numbers of the last step; nothing without it."""
    clip = getattr(opt, "qk_clip", None)
    return {} if clip is None else clip.metrics()


def of_all_stages(own: Record, runtime: Runtime) -> Record:
    """What `own` says of this rank's layers, of all layers; every rank calls it."""
    if runtime.layout.sizes.pp == 1:
        return own
    found: Record = {}
    # One rank of every stage: its neighbours say the same.
    for other in runtime.gather(own)[:: runtime.layout.copies]:
        for name, value in other.items():
            if isinstance(value, dict):
                found[name] = found.get(name, {}) | value
            elif name == "clipped_heads":
                found[name] = found.get(name, 0) + value
            else:
                found[name] = max(found.get(name, value), value)
    return found


def step_flops(config: FusionConfig, batches: Sequence[PackedBatch]) -> tuple[float, float]:
    """(decoder, vision) training FLOPs of a step's micro-batches of this rank, forward and backward; filler
    and positions without loss are not billed."""
    decoder = vision = 0.0
    for batch in batches:
        lengths, left = [], batch.num_tokens
        for length in batch.segments.lengths:
            if left > 0:  # filler comes last
                lengths.append(length)
            left -= length
        flops = training_flops(config, lengths, batch.grids)
        # Logits are made of labelled positions alone (model/loss).
        flops["head"] *= float((batch.labels >= 0).sum()) / max(1, sum(lengths))
        pictures = flops.pop("vision") + flops.pop("projector")
        vision += pictures
        decoder += sum(flops.values())
    return decoder, vision


def run_facts(config: Any, steps: int, seconds: float, runtime: Runtime) -> Record:
    """Facts of a run for the head of its report and the model card; more may be added."""
    return {
        "name": config.run.name,
        "recipe": config.run.name,
        "steps": steps,
        "seconds": round(seconds, 1),
        "device": str(runtime.device),
        "precision": config.train.mixed_precision,
        "seed": config.run.seed,
    }


def absolute_paths(tree: Record) -> Record:
    """A dumped recipe whose inputs are named from the root, so that it means the same from every folder.

    Paths in a recipe are relative to where the command is typed; addresses, commands and the output folder
    stay.
    """

    def whole(given: Any) -> Any:
        if isinstance(given, list):
            return [whole(item) for item in given]
        if isinstance(given, str) and given and not re.match(r"[a-z]+:", given):
            return str(Path(given).expanduser().absolute())
        return given

    # Every key of a recipe that names a file or folder.
    # Every other string of a recipe is a name and stays.
    data = (tree.get("eval") or {}).get("data") or {}
    places = [
        (tree.get("tokenizer"), "path"),
        (tree.get("run"), "init_from"),
        (tree.get("run"), "model_from"),
    ]
    places += [*((data, key) for key in data)]
    for source in (tree.get("data") or {}).get("sources", []):
        places.append((source, "path"))
        places += [(source.get("options"), key) for key in ("shards", "media", "cache_dir")]
    for table, key in places:
        if isinstance(table, dict) and table.get(key):
            table[key] = whole(table[key])
    return tree


def write_recipe(out: Path, config: BaseModel) -> None:
    """recipe.toml (resolved) and versions.json of the output folder."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "recipe.toml", to_toml(absolute_paths(dump(config))))
    names = "earlyfusion torch transformers accelerate tokenizers safetensors numpy pillow"
    versions = {"python": platform.python_version()}
    for name in names.split():
        if found := installed(name):
            versions[name] = found
    write_json(out / "versions.json", versions)
