"""Nested state on disk without pickle: tensors in `<stem>.safetensors`, everything else in `<stem>.json`.

Holds what state_dict()s hold: dicts (any scalar keys), lists, tuples, tensors, numpy arrays, numbers,
strings, None, dtypes. Python floats, integers and tensor bits come back exactly. Tensors that share memory
(tied weights) are written once. Anything else is a TypeError that names its place, so nothing is ever lost
silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from earlyfusion.kernels.files import replacing, write_atomic

TAGS = {"__tensor__", "__tuple__", "__items__", "__ndarray__", "__dtype__"}
"""Keys of the JSON objects that stand for what JSON does not have."""


def save_tree(stem: Path, tree: Any) -> None:
    """Write `<stem>.json` and, when the tree holds tensors, `<stem>.safetensors`; both are fsynced.

    Raises TypeError for what cannot be written without pickle, and for a sharded tensor.
    """
    writer = _Writer()
    skeleton = writer.encode(tree, "")
    if writer.tensors:
        with replacing(stem.with_name(stem.name + ".safetensors")) as path:
            save_file(writer.tensors, path)
    write_atomic(stem.with_name(stem.name + ".json"), json.dumps(skeleton))


def load_tree(stem: Path, device: str = "cpu") -> Any:
    """Read what `save_tree` wrote."""
    skeleton = json.loads(stem.with_name(stem.name + ".json").read_text(encoding="utf-8"))
    path = stem.with_name(stem.name + ".safetensors")
    return _decode(skeleton, load_file(path, device=device) if path.exists() else {})


def tree_bytes(tree: Any) -> int:
    """Bytes that the tensors of a tree take (shared memory counted each time: an upper bound)."""
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    if isinstance(tree, Mapping):
        return sum(map(tree_bytes, tree.values()))
    if isinstance(tree, list | tuple):
        return sum(map(tree_bytes, tree))
    return 64


class _Writer:
    """Turns a tree into JSON values; its tensors are collected by the name that stands in their place."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        # Memory -> (name, tensor): holding the tensor keeps its address from being used again.
        self.written: dict[Any, tuple[str, torch.Tensor]] = {}

    def encode(self, value: Any, place: str) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value

        if isinstance(value, torch.Tensor):
            return {"__tensor__": self.put(value, place.lstrip("/") or "value")}
        if isinstance(value, np.ndarray):
            return {"__ndarray__": [str(value.dtype), list(value.shape), value.reshape(-1).tolist()]}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, torch.dtype):
            return {"__dtype__": str(value).removeprefix("torch.")}

        if isinstance(value, Mapping):
            items = [(key, self.encode(item, f"{place}/{key}")) for key, item in value.items()]
            # JSON's keys are strings; others, and a dict that looks like a tag, become a list of pairs.
            if TAGS.isdisjoint(value) and all(isinstance(key, str) for key in value):
                return dict(items)
            if all(isinstance(key, bool | int | float | str) for key in value):
                return {"__items__": items}
        if isinstance(value, list | tuple):
            listed = [self.encode(item, f"{place}/{i}") for i, item in enumerate(value)]
            return {"__tuple__": listed} if isinstance(value, tuple) else listed
        raise TypeError(
            f"state at {place or 'the root'}: a {type(value).__name__} cannot be written without pickle"
        )

    def put(self, value: torch.Tensor, name: str) -> str:
        """Keep a tensor for the file; the name under which its memory is written."""
        tensor = value.detach()
        if hasattr(tensor, "full_tensor"):
            # Here sharding comes in: torch.distributed.checkpoint writes such a tensor from all ranks.
            raise TypeError(
                f"state at /{name}: a sharded tensor, and this format holds whole ones;"
                " gather a full state dict on all ranks first"
            )

        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and memory in self.written:
            return self.written[memory][0]
        self.written[memory] = name, tensor

        # The format forbids sharing: a view into a larger storage is copied, a tensor that owns its is not.
        copied = tensor.cpu().contiguous()
        owned = copied.untyped_storage().nbytes() == copied.nbytes
        self.tensors[name] = copied if owned else copied.clone()
        return name


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value

    if "__tensor__" in value:
        return tensors[value["__tensor__"]]
    if "__tuple__" in value:
        return tuple(_decode(value["__tuple__"], tensors))
    if "__items__" in value:
        return dict(_decode(value["__items__"], tensors))
    if "__ndarray__" in value:
        dtype, shape, flat = value["__ndarray__"]
        return np.array(flat, dtype=dtype).reshape(shape)
    if "__dtype__" in value:
        found = getattr(torch, value["__dtype__"])
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{value['__dtype__']!r} is no dtype of torch")
        return found
    return {key: _decode(item, tensors) for key, item in value.items()}
