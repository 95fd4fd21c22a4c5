"""Model directories: what a stage leaves behind and the next one starts from.

    save_model(model, tokenizer, directory, facts)        load_model(directory, device, dtype) -> NativeFusion

The tokenizer of a directory is read by `data.tokenizer.Tokenizer.load(directory)`.

A model directory holds `config.json` (text_config, vision_config, model_type, architectures),
`model.safetensors` (or shards with `model.safetensors.index.json`), the tokenizer's files,
`preprocessor_config.json` (Kimi K2.5's media_proc_cfg), `generation_config.json` and the model card
`README.md`. Weight names and shapes are those of public Kimi checkpoints (model/hub/names.py). It is written
beside its place and renamed, so it is complete or absent. Nothing is unpickled and no code from a directory
is run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from earlyfusion.kernels.files import write_json
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.card import Facts, model_card
from earlyfusion.model.hub.config import (
    ModelDirectoryError,
    check_vocabulary,
    config_dict,
    generation_dict,
    load_config,
    preprocessor_dict,
    read_json,
)
from earlyfusion.model.hub.names import PublicTensor, keeps_fp32, public_tensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LISTED = 8  # names an error message spells out

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def save_model(
    model: NativeFusion,
    tokenizer: Any,
    directory: str | Path,
    facts: Facts | None = None,
    *,
    state: Mapping[str, Tensor] | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write a model directory, replacing an older model directory (and nothing else) of the same name.

    tokenizer: `data.tokenizer.Tokenizer` or anything with `save(folder)` that writes a tokenizer.json; its
    vocabulary must fit the model's. facts: see model/hub/card.py. state: full state dict under the model's
    own names, when the model's parameters are sharded. Tensors are saved in the dtype they have. Raises
    ModelDirectoryError when the place is taken by other files or the vocabulary does not fit; an OSError
    (disk full) leaves nothing behind.
    """
    directory = Path(directory)
    with _fresh_directory(directory) as folder:
        tokenizer.save(folder)
        check_vocabulary(folder, model.config)
        tensors = dict(model.state_dict() if state is None else state)
        if model.config.text.tie_word_embeddings:
            tensors.pop("decoder.lm_head.weight", None)
        _write_weights(folder, tensors, max_shard_bytes)
        dtype = str(model.decoder.embed_tokens.weight.dtype).removeprefix("torch.")
        write_json(folder / "config.json", config_dict(model.config, dtype), indent=2)
        write_json(folder / "preprocessor_config.json", preprocessor_dict(model.config), indent=2)
        write_json(folder / "generation_config.json", generation_dict(model.config), indent=2)
        parameters = sum(p.numel() for p in model.parameters())
        card = folder / "README.md"
        card.write_text(model_card(model.config, facts or {}, parameters), encoding="utf-8")
        for file in folder.iterdir():  # safetensors writes 600, whatever the umask
            shutil.copymode(card, file)
    return directory


def load_model(
    directory: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> NativeFusion:
    """Read a model directory into a NativeFusion in eval mode.

    dtype None keeps every tensor as stored; otherwise all are cast but those that stay fp32
    (public_names.keeps_fp32). Raises ModelDirectoryError: no model directory, unreadable configuration,
    missing or unexpected tensors, a shape that differs, a vocabulary that does not fit.
    """
    folder = Path(directory)
    config = load_config(folder)
    if (folder / "tokenizer.json").is_file():
        check_vocabulary(folder, config)
    files = _weight_files(folder)
    with torch.device("meta"):
        model = NativeFusion(config)
    plan = list(public_tensors(model.state_dict(keep_vars=True).items()))
    headers = _check_tensors(folder, plan, model, files)
    _set_dtypes(model, plan, headers, dtype)
    model.to_empty(device=device)
    for module in model.modules():  # counters and the like are not in the file
        if module._non_persistent_buffers_set and callable(
            reset := getattr(module, "reset_parameters", None)
        ):
            reset()
    _fill(model, plan, files)
    return model.eval()


@contextmanager
def _fresh_directory(target: Path) -> Iterator[Path]:
    """A temporary sibling of `target` that takes its name when the block ends well and vanishes when it does
    not."""
    if target.is_symlink() or target.is_file():
        raise ModelDirectoryError(f"{target}: is a file or link; give the name of a directory to create")
    if target.is_dir() and any(target.iterdir()) and not (target / "config.json").is_file():
        raise ModelDirectoryError(
            f"{target}: holds files but no model; give an empty or new directory, nothing was changed"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    name = target.resolve().name
    temporary, old = (target.parent / f".{name}.{os.getpid()}.{kind}" for kind in ("new", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if target.is_dir():
            os.replace(target, old)
        try:
            os.replace(temporary, target)
        except OSError:
            if old.is_dir():
                os.replace(old, target)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if target.is_dir():
            shutil.rmtree(old, ignore_errors=True)


def _write_weights(folder: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    shards: list[list[PublicTensor]] = [[]]
    room = max_shard_bytes
    total = 0
    for item in public_tensors(tensors.items()):
        part = item.view(tensors[item.ours])
        size = part.numel() * part.element_size()
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(item)
        room, total = room - size, total + size
    names = (
        [WEIGHTS]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    for name, shard in zip(names, shards):
        # clones are separate, dense and short-lived: at most one shard is held twice
        content = {
            item.name: item.view(tensors[item.ours].detach()).cpu().clone().contiguous() for item in shard
        }
        try:
            save_file(content, str(folder / name), metadata={"format": "pt"})
        except SafetensorError as error:
            raise ModelDirectoryError(
                f"{folder.parent}: the model cannot be written ({error}); free disk space"
            ) from None
    if len(shards) > 1:
        where = {item.name: name for name, shard in zip(names, shards) for item in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where}, indent=2)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        where = read_json(folder / INDEX).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
            raise ModelDirectoryError(
                f"{folder / INDEX}: damaged (no weight_map of names); copy the directory again"
            )
        names = sorted(set(where.values()))
        if any(Path(name).name != name for name in names):
            raise ModelDirectoryError(
                f"{folder / INDEX}: shards must be plain file names inside the directory, got {names}"
            )
    else:
        names = [WEIGHTS]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelDirectoryError(
            f"{folder}: weight file(s) missing: {_some(missing)}; copy the directory again"
        )
    return [folder / name for name in names]


def _check_tensors(
    folder: Path, plan: list[PublicTensor], model: nn.Module, files: list[Path]
) -> dict[str, torch.dtype]:
    """Compare the files' headers with the plan; returns the stored dtype of every tensor."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in files:
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():
                    header = file.get_slice(name)
                    found[name] = (tuple(header.get_shape()), header.get_dtype())
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelDirectoryError(f"{path}: damaged ({error}); copy the directory again") from None
    expected = {item.name: item for item in plan}
    if missing := [name for name in expected if name not in found]:
        raise ModelDirectoryError(
            f"{folder}: {len(missing)} tensor(s) missing from the weights: {_some(missing)}"
        )
    if unexpected := [name for name in found if name not in expected]:
        raise ModelDirectoryError(
            f"{folder}: {len(unexpected)} tensor(s) that config.json has no place for: {_some(unexpected)}"
        )
    ours = model.state_dict(keep_vars=True)
    for name, item in expected.items():
        shape = tuple(item.view(ours[item.ours]).shape)
        if found[name][0] != shape:
            raise ModelDirectoryError(
                f"{folder}: {name} has shape {list(found[name][0])}, config.json asks for {list(shape)}"
            )
        if found[name][1] not in _DTYPES:
            raise ModelDirectoryError(
                f"{folder}: {name} is stored as {found[name][1]}; expected one of {sorted(_DTYPES)}"
            )
    return {name: _DTYPES[stored] for name, (_, stored) in found.items()}


def _set_dtypes(
    model: nn.Module, plan: list[PublicTensor], headers: dict[str, torch.dtype], dtype: torch.dtype | None
) -> None:
    """Give the meta tensors the dtype they will hold: as stored, or the one asked for."""
    if dtype is not None:
        cast(model, dtype)
        return
    wanted = {item.ours: headers[item.name] for item in plan}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in wanted:
            tensor.data = tensor.data.to(wanted[name])


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same model with its floating tensors in `dtype`, those that stay fp32 (public_names.keeps_fp32) in
    float32."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if keeps_fp32(name) else dtype)
    return model


@torch.no_grad()
def _fill(model: nn.Module, plan: list[PublicTensor], files: list[Path]) -> None:
    ours, items = model.state_dict(), {item.name: item for item in plan}
    for path in files:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():
                item = items[name]
                item.view(ours[item.ours]).copy_(file.get_tensor(name))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
