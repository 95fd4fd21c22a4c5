"""Nested state on disk without pickle: tensors in `<stem>.safetensors`, everything else in `<stem>.json`.

Holds what state_dict()s hold: dicts (any scalar keys), lists, tuples, tensors, numpy arrays, numbers,
strings, None, dtypes. Python floats, integers and tensor bits come back exactly. Tensors that share memory
(tied weights) are written once. Anything else is a TypeError that names its place, so nothing is ever lost
silently.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

_TAGS = ("__tensor__", "__tuple__", "__items__", "__ndarray__", "__dtype__")


def save_tree(stem: Path, tree: Any) -> None:
    """Write `<stem>.json` and, when the tree holds tensors, `<stem>.safetensors`; both are fsynced."""
    tensors: dict[str, torch.Tensor] = {}
    skeleton = _encode(tree, "", tensors, {})
    if tensors:
        path = stem.with_name(stem.name + ".safetensors")
        save_file(tensors, str(path))
        fsync(path)
    write_text(stem.with_name(stem.name + ".json"), json.dumps(skeleton))


def load_tree(stem: Path, device: str = "cpu") -> Any:
    """Read what `save_tree` wrote."""
    skeleton = json.loads(stem.with_name(stem.name + ".json").read_text(encoding="utf-8"))
    path = stem.with_name(stem.name + ".safetensors")
    return _decode(skeleton, load_file(str(path), device=device) if path.exists() else {})


def tree_bytes(tree: Any) -> int:
    """Bytes of the tensors and arrays in a tree (shared memory counted each time: an upper bound)."""
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, np.ndarray):
        return tree.nbytes * 4  # written as decimal text
    if isinstance(tree, Mapping):
        return sum(tree_bytes(value) for value in tree.values())
    if isinstance(tree, list | tuple):
        return sum(tree_bytes(value) for value in tree) + 8 * len(tree)
    return 64


def write_text(path: Path, text: str) -> None:
    """Write a text file and fsync it."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def fsync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _encode(value: Any, place: str, tensors: dict[str, torch.Tensor], seen: dict[Any, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return {"__tensor__": _put(value, place or "value", tensors, seen)}
    if isinstance(value, np.ndarray):
        return {"__ndarray__": [str(value.dtype), list(value.shape), value.reshape(-1).tolist()]}
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return {"__dtype__": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) for key in value) and not any(tag in value for tag in _TAGS)
        items = [(key, _encode(item, f"{place}/{key}", tensors, seen)) for key, item in value.items()]
        return (
            dict(items) if plain else {"__items__": [[_scalar_key(key, place), item] for key, item in items]}
        )
    if isinstance(value, list | tuple):
        items_ = [_encode(item, f"{place}/{i}", tensors, seen) for i, item in enumerate(value)]
        return {"__tuple__": items_} if isinstance(value, tuple) else items_
    raise TypeError(
        f"state at {place or 'the root'}: a {type(value).__name__} cannot be written without pickle"
    )


def _scalar_key(key: Any, place: str) -> Any:
    if isinstance(key, bool | int | float | str):
        return key
    raise TypeError(
        f"state at {place or 'the root'}: a dict key of type {type(key).__name__} cannot be written"
    )


def _put(value: torch.Tensor, place: str, tensors: dict[str, torch.Tensor], seen: dict[Any, Any]) -> str:
    tensor = value.detach()
    if hasattr(tensor, "full_tensor"):
        raise TypeError(f"state at {place}: a sharded tensor; gather a full state dict on all ranks first")
    key = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    if tensor.numel() and key in seen:
        return seen[key][0]
    name = place.lstrip("/")
    seen[key] = (name, tensor)  # holding the tensor keeps its address from being used again
    copied = tensor.cpu().contiguous()
    # The format forbids sharing, so a view into a larger storage is copied; a tensor that owns its storage is
    # not.
    whole = copied.untyped_storage().nbytes() == copied.numel() * copied.element_size()
    tensors[name] = copied if whole else copied.clone()
    return name


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        return tensors[value["__tensor__"]]
    if "__tuple__" in value:
        return tuple(_decode(item, tensors) for item in value["__tuple__"])
    if "__items__" in value:
        return {key: _decode(item, tensors) for key, item in value["__items__"]}
    if "__ndarray__" in value:
        dtype, shape, flat = value["__ndarray__"]
        return np.array(flat, dtype=dtype).reshape(shape)
    if "__dtype__" in value:
        dtype = getattr(torch, value["__dtype__"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value['__dtype__']!r} is no dtype of torch")
        return dtype
    return {key: _decode(item, tensors) for key, item in value.items()}
