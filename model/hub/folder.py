"""Model directories: what a stage leaves behind and the next one starts from.

    save_model(model, tokenizer, directory, facts)        load_model(directory, device, dtype) -> NativeFusion

The tokenizer of a directory is read by `data.tokenizer.Tokenizer.load(directory)`.

A model directory holds `config.json` (text_config, vision_config, model_type, architectures),
`model.safetensors` (or shards with `model.safetensors.index.json`), the tokenizer's files,
`preprocessor_config.json` (Kimi K2.5's media_proc_cfg), `generation_config.json` and the model card
`README.md`. Weight names and shapes are those of public Kimi checkpoints. It is written
beside its place and renamed, so it is complete or absent. Nothing is unpickled and no code from a directory
is run.

A public tensor is a view of (part of) one of ours, so the same table writes a checkpoint and, by copying into
the views, reads one; what is saved comes back bit for bit.

| ours | public (Kimi K2.5, Kimi K3, Kimi-Linear) |
|---|---|
| text model | language_model.model.*, language_model.lm_head.* |
| vision tower, projector | vision_tower.*, mm_projector.* |
| self_attn.A_log [H] | [1, 1, H, 1] |
| experts.gate_up_proj [E, 2F, D] | experts.{e}.w1.weight [F, D] (gate), experts.{e}.w3.weight [F, D] |
| experts.down_proj [E, D, F] | experts.{e}.w2.weight [D, F] |
| self_attention_res_query, mlp_res_query, output_attn_res_query [D] | *_res_proj.weight [1, D] |

Source: released checkpoints and the conversion maps of transformers and vLLM.

Facts of the model card (all optional; what is missing is left out, nothing is guessed):
    name         str, title of the card                recipe      str, name of the recipe or its resolved
                 TOML
    steps, tokens, images, seconds  numbers of the run   device, precision, seed, version
    length       int, tokens of the longest document of training
    sources      {name: {"share": float, "licence": str, "note": str}} or a list of names
    evals        {label: number or text}, as measured; the card says when there are none
    licence      licence of the weights (SPDX id)         licence_note  str
    command      str, the command line that made it
    base, notes  str, the model it was made from; list of sentences about how
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from earlyfusion.kernels.files import write_json
from earlyfusion.model.config import FusionConfig
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.config import (
    ModelDirectoryError,
    check_vocabulary,
    json_files,
    load_config,
    read_json,
)

Facts = Mapping[str, Any]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CARD_FILE = "README.md"
LISTED = 8  # names an error message spells out
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

# Longest match first: lm_head stands beside `model` in the public layout, not inside it.
PREFIXES = (
    ("decoder.lm_head.", "language_model.lm_head."),
    ("decoder.", "language_model.model."),
    ("vision_tower.", "vision_tower."),
    ("mm_projector.", "mm_projector."),
)
FP32_SUFFIXES = ("A_log", "dt_bias", "e_score_correction_bias")  # stay fp32 whatever the model's dtype


@dataclass(frozen=True)
class PublicTensor:
    """One tensor of a public checkpoint: its name, the name of our tensor it is part of, and how to see it
    there."""

    name: str
    ours: str
    view: Callable[[Tensor], Tensor]


def public_tensors(shapes: Iterable[tuple[str, Tensor]]) -> Iterator[PublicTensor]:
    """The public tensors behind (our name, our tensor) pairs; tensors may be on the meta device."""
    for ours, tensor in shapes:
        # Every name must be known: a tensor without a public name could be written but not read.
        (name,) = [public + ours.removeprefix(own) for own, public in PREFIXES if ours.startswith(own)][:1]
        module, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for e in range(len(tensor)):
                # gate rows first, then those of the up projection
                rows = tensor.shape[1] // 2
                yield PublicTensor(f"{module}.{e}.w1.weight", ours, itemgetter((e, slice(rows))))
                yield PublicTensor(f"{module}.{e}.w3.weight", ours, itemgetter((e, slice(rows, None))))
        elif module.endswith(".experts"):
            for e in range(len(tensor)):
                yield PublicTensor(f"{module}.{e}.w2.weight", ours, itemgetter(e))
        elif last.endswith("_res_query"):
            # Public checkpoints hold a pseudo-query as a linear layer of one row.
            yield PublicTensor(name.removesuffix("_query") + "_proj.weight", ours, itemgetter(None))
        elif last == "A_log":
            yield PublicTensor(name, ours, itemgetter((None, None, slice(None), None)))
        else:
            yield PublicTensor(name, ours, itemgetter(...))


def save_model(
    model: NativeFusion,
    tokenizer: Any,
    directory: str | Path,
    facts: Facts | None = None,
    *,
    max_shard_bytes: int = 5 * 10**9,
    read: Callable[[str], Tensor] | None = None,
) -> Path:
    """Write a model directory, replacing an older model directory (and nothing else) of the same name.

    tokenizer: `data.tokenizer.Tokenizer` or anything with `save(folder)` that writes a tokenizer.json; its
    vocabulary must fit the model's. facts: see the head of the file. Tensors keep the dtype they have. read:
    our name -> tensor, for a model on the meta device, whose weights lie elsewhere.
    Raises ModelDirectoryError when the place is taken by other files or the vocabulary does not fit; an
    OSError (disk full) leaves nothing behind.
    """
    # All files or none: a reader never sees half a directory.
    own = model.state_dict()
    find = own.__getitem__ if read is None else read
    directory = Path(directory)
    with fresh_directory(directory) as folder:
        write_model(
            folder, model, tokenizer, facts or {}, lambda item: item.view(find(item.ours)), max_shard_bytes
        )
    return directory


def write_model(
    folder: Path,
    model: NativeFusion,
    tokenizer: Any,
    facts: Facts,
    read: Callable[[PublicTensor], Tensor],
    max_shard_bytes: int,
) -> None:
    """Write all files of a model directory into a folder; shards of weights that lie there whole stay as they
    are. read: a public tensor -> its values."""
    tensors = model.state_dict()
    write_files(folder, model, tokenizer, facts)
    write_weights(folder, tensors, public_tensors(tensors.items()), max_shard_bytes, read)


def write_files(folder: Path, model: NativeFusion, tokenizer: Any, facts: Facts) -> None:
    """Write what stands beside the weights of a model directory."""
    config = model.config
    tokenizer.save(folder)
    check_vocabulary(folder, config)
    dtype = str(model.decoder.embed_tokens.weight.dtype).removeprefix("torch.")
    for name, content in json_files(config, dtype).items():
        write_json(folder / name, content, indent=2)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    card = folder / CARD_FILE
    card.write_text(model_card(config, facts, parameters), encoding="utf-8")


def load_model(
    directory: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> NativeFusion:
    """Read a model directory into a NativeFusion in eval mode.

    dtype None keeps every tensor as stored; otherwise all are cast but those that stay fp32
    (FP32_SUFFIXES). Raises ModelDirectoryError: no model directory, unreadable configuration, missing or
    unexpected tensors, a shape that differs, a vocabulary that does not fit.
    """
    folder = Path(directory)
    config = load_config(folder)
    if (folder / "tokenizer.json").is_file():
        check_vocabulary(folder, config)
    with torch.device("meta"):
        model = NativeFusion(config)
    # On the meta device: everything is compared before a byte of weights is read.
    ours = model.state_dict(keep_vars=True)
    plan = {tensor.name: tensor for tensor in public_tensors(ours.items())}
    files = weight_files(folder)
    stored = check_tensors(folder, plan, ours, files)

    # Memory is taken once, in the dtype that each tensor will hold.
    for name, tensor in plan.items():
        ours[tensor.ours].data = ours[tensor.ours].data.to(stored[name])
    if dtype is not None:
        cast(model, dtype)
    model.to_empty(device=device)
    for module in model.modules():  # counters and the like are not in the file
        reset = getattr(module, "reset_parameters", None)
        if module._non_persistent_buffers_set and callable(reset):
            reset()
    ours = model.state_dict()
    with torch.no_grad():
        for path in files:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():
                    plan[name].view(ours[plan[name].ours]).copy_(file.get_tensor(name))
    return model.eval()


@contextmanager
def fresh_directory(target: Path) -> Iterator[Path]:
    """A temporary sibling of `target` that takes its name when the block ends well and vanishes when it does
    not."""
    if target.is_symlink() or target.is_file():
        raise ModelDirectoryError(f"{target}: is a file or link; give the name of a directory to create")
    # Somebody's other files: a slip in a path must not cost them.
    if target.is_dir() and any(target.iterdir()) and not (target / "config.json").is_file():
        raise ModelDirectoryError(
            f"{target}: holds files but no model; give an empty or new directory, nothing was changed"
        )
    # Beside the target, so that the last step is a rename within one file system.
    beside = target.resolve()
    beside.parent.mkdir(parents=True, exist_ok=True)
    new, old = (beside.with_name(f".{beside.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        yield new
        if target.is_dir():
            os.replace(target, old)
        os.replace(new, target)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if old.is_dir() and not target.is_dir():  # the last step failed: as it was before
            os.replace(old, target)
        shutil.rmtree(old, ignore_errors=True)


def write_weights(
    folder: Path,
    tensors: Mapping[str, Tensor],
    items: Iterable[PublicTensor],
    max_shard_bytes: int,
    read: Callable[[PublicTensor], Tensor],
) -> None:
    """Write these parts of our tensors (which may be on the meta device) under their public names, and an
    index where one file does not hold them."""
    # Shards are filled one after another; a tensor larger than a shard has one of its own.
    shards: list[list[PublicTensor]] = [[]]
    filled = total = 0
    for item in items:
        # Public tensors are parts of ours: a shard may end between two experts.
        size = item.view(tensors[item.ours]).nbytes
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled, total = filled + size, total + size

    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    where: dict[str, str] = {}
    for name, shard in zip(names, shards):
        where |= dict.fromkeys((item.name for item in shard), name)
        if (folder / name).is_file():
            continue
        content = {}
        for item in shard:
            # clones are separate, dense and short-lived: at most one shard is held twice
            content[item.name] = read(item).detach().cpu().clone().contiguous()
        try:
            # Under its name a shard is whole.
            save_file(content, str(folder / f".{name}"), metadata={"format": "pt"})
            # safetensors writes 600, whatever the umask.
            shutil.copymode(folder / CARD_FILE, folder / f".{name}")
            os.replace(folder / f".{name}", folder / name)
        except SafetensorError as error:
            raise ModelDirectoryError(
                f"{folder.parent}: the model cannot be written ({error}); free disk space"
            ) from None
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where}, indent=2)


def weight_files(folder: Path) -> list[Path]:
    names = [WEIGHTS]
    if (folder / INDEX).is_file():
        where = read_json(folder / INDEX).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
            raise ModelDirectoryError(
                f"{folder / INDEX}: damaged (no weight_map of names); copy the directory again"
            )
        names = sorted(set(where.values()))
        # An index from elsewhere may name files outside its directory.
        if any(Path(name).name != name for name in names):
            raise ModelDirectoryError(
                f"{folder / INDEX}: shards must be plain file names inside the directory, got {names}"
            )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelDirectoryError(
            f"{folder}: weight file(s) missing: {some(missing)}; copy the directory again"
        )
    return [folder / name for name in names]


def tensor_headers(files: Sequence[Path]) -> dict[str, tuple[Path, list[int], str]]:
    """Of every tensor in safetensors files: its file, shape and dtype ("BF16"). Raises ModelDirectoryError
    for a damaged file."""
    found = {}
    for path in files:
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():
                    header = file.get_slice(name)
                    found[name] = path, header.get_shape(), header.get_dtype()
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelDirectoryError(f"{path}: damaged ({error}); copy the directory again") from None
    return found


def check_tensors(
    folder: Path, plan: Mapping[str, PublicTensor], ours: Mapping[str, Tensor], files: Sequence[Path]
) -> dict[str, torch.dtype]:
    """Compare the files' headers with the plan; returns the stored dtype of every tensor."""
    headers = tensor_headers(files)
    shapes = {name: shape for name, (_, shape, _) in headers.items()}
    dtypes = {name: dtype for name, (_, _, dtype) in headers.items()}

    # Every name, shape and dtype from the headers alone, before memory is taken.
    wrong = ""
    missing = [name for name in plan if name not in shapes]
    unexpected = [name for name in shapes if name not in plan]
    if missing:
        wrong = f"{len(missing)} tensor(s) missing from the weights: {some(missing)}"
    elif unexpected:
        wrong = f"{len(unexpected)} tensor(s) that config.json has no place for: {some(unexpected)}"
    for name, item in () if wrong else plan.items():
        shape = list(item.view(ours[item.ours]).shape)
        if shapes[name] != shape:
            wrong = f"{name} has shape {shapes[name]}, config.json asks for {shape}"
        elif dtypes[name] not in DTYPES:
            wrong = f"{name} is stored as {dtypes[name]}; expected one of {sorted(DTYPES)}"
    if wrong:
        raise ModelDirectoryError(f"{folder}: {wrong}")
    return {name: DTYPES[dtype] for name, dtype in dtypes.items()}


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same model with its floating tensors in `dtype`, those that stay fp32 (FP32_SUFFIXES) in
    float32."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        # Counters and ids keep their dtype whatever the model's.
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if name.endswith(FP32_SUFFIXES) else dtype)
    return model


def some(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


# ---- the model card

UNLICENSED = (
    "No licence has been chosen for these weights; the licences of the data above apply to what they permit."
)
LICENSED = "The weights are released under %s."

CARD = """\
---
library_name: earlyfusion
pipeline_tag: image-text-to-text
{% if facts.licence %}
license: {{ facts.licence | lower }}
{% endif %}
tags:
  - multimodal
  - kimi-linear
  - attention-residuals
  - moonvit
---

# {{ facts.name or "earlyfusion model" }}

A natively multimodal model of {{ amount }} parameters, trained jointly on text and images from the first \
step with [earlyfusion](https://github.com/earlyfusion/earlyfusion): MoonViT patches at native \
resolution, a \
Kimi Linear decoder (KDA and NoPE MLA), Attention Residuals and a mixture of experts.

With the project installed (`make setup` in a checkout of its repository):

```bash
earlyfusion generate --model . --image picture.png --question "what color is the circle?"
```
{% macro table(title, rows) %}
{% for name, value in rows if value is defined and value not in (none, "") %}
{% if loop.first %}

## {{ title }}

| | |
|---|---|
{% endif %}
| {{ name }} | {{ value | cell }} |
{% endfor %}
{% endmacro %}
{% for note in facts.notes or () %}
{% if loop.first %}

## How it was made

{% endif %}
- {{ note }}
{% endfor %}
{{ table("Run", (
    ("recipe", facts.recipe if not recipe_text),
    ("made from", facts.base),
    ("optimizer steps", facts.steps),
    ("tokens seen", facts.tokens),
    ("images seen", facts.images),
    ("training time, minutes", (facts.seconds / 60) | round(1) if facts.seconds is not none),
    ("device", facts.device),
    ("precision", facts.precision),
    ("seed", facts.seed | string if facts.seed is not none),
    ("earlyfusion version", facts.version),
    ("command", "`%s`" | format(facts.command) if facts.command),
)) }}
{% if facts.evals %}
{{ table("Measured", facts.evals.items()) }}
{% else %}

## Measured

Nothing was measured on this model.
{% endif %}
{{ table("Model", (
    ("parameters", parameters),
    ("decoder", "%d layers (%d KDA, %d MLA), width %d" | format(
        plan | length, plan.count("kda"), plan.count("mla"), text.hidden_size)),
    ("feed-forward", "%d experts, %d a token, in %d layers" | format(
        text.num_experts, text.num_experts_per_token, moe) if moe else "dense"),
    ("attention residuals", text.attn_res ~ (
        ", blocks of %d layers" | format(text.attn_res_block_size) if text.attn_res == "block" else "")),
    ("vocabulary", text.vocab_size),
    ("vision tower", "%d layers, width %d, patches of %d" | format(
        vision.num_hidden_layers, vision.hidden_size, vision.patch_size)),
    ("pixels of one image token", "%d x %d" | format(
        vision.patch_size * vision.merge_kernel_size[1], vision.patch_size * vision.merge_kernel_size[0])),
)) }}
{% if facts.sources is mapping and facts.sources %}

## Data

| source | share of tokens | licence | note |
|---|---|---|---|
{% for name, about in facts.sources.items() %}
{% set about = about if about is mapping else {"note": about} %}
| {{ name | cell }} | {{ "%.1f %%" | format(100 * about.share) if about.share is defined }} \
| {{ about.licence | cell }} | {{ about.note | cell }} |
{% endfor %}
{% elif facts.sources %}

## Data

{% for source in facts.sources %}
- {{ source }}
{% endfor %}
{% endif %}

## Limits

- A picture is shrunk to about {{ "{:,}".format(vision.in_patch_limit) }} patches of {{ vision.patch_size }} \
x {{ vision.patch_size }} pixels; {{ vision.pos_emb_time }} frames of a clip share their tokens.
{% if facts.length %}
- In training a document had at most {{ "{:,}".format(facts.length) }} tokens; longer ones were not seen.
{% endif %}
- Nothing was filtered or tested for safety. What it says of a picture can be wrong; only what stands under \
Measured was measured, on held-out data of the same kind.

## Licence

{% if facts.licence %}
{{ licensed | format(facts.licence) }}
{%- else %}
{{ unlicensed }}
{%- endif %}
 {{ facts.licence_note or "" }}
{% if recipe_text %}

## Recipe

```toml
{{ recipe_text }}
```
{% endif %}
"""


def model_card(config: FusionConfig, facts: Facts, parameters: int) -> str:
    """Markdown with YAML front matter. parameters: number of parameters of the whole model."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = _cell
    amount = f"{parameters:,}"
    for unit, size in (("million", 10**6), ("billion", 10**9)):
        if parameters >= size:
            amount = f"{parameters / size:.2f} {unit}"

    # A name stands in the table of the run, a whole recipe at the end.
    recipe = str(facts.get("recipe") or "")
    text = config.text
    return environment.from_string(CARD).render(
        facts={"seconds": None, "seed": None, **facts},
        licensed=LICENSED,
        unlicensed=UNLICENSED,
        recipe_text=recipe.strip() if "\n" in recipe else "",
        amount=amount,
        parameters=parameters,
        text=text,
        vision=config.vision,
        plan=text.plan(),
        moe=sum(text.is_moe(index) for index in range(text.num_hidden_layers)),
    )


def _cell(value: Any) -> str:
    """A number or text that breaks no table."""
    if isinstance(value, float):
        value = f"{value:.4g}"
    elif isinstance(value, int):
        value = f"{value:,}"
    return str(value).replace("|", "\\|").replace("\n", " ")
