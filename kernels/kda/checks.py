"""What every form of Kimi Delta Attention asks of its arguments' shapes.

Legend: T tokens (or B sequences of one token each), H query/key heads, G value heads, K key dim, V value dim.
"""

from __future__ import annotations

from torch import Tensor

from earlyfusion.kernels.segments import Segments, check_packed


def check_heads(q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor) -> None:
    """Raise ValueError if the shapes of one KDA call do not fit together. Leading (token or batch) axis
    first."""
    if q.shape != k.shape:
        raise ValueError(f"kda: q {tuple(q.shape)} and k {tuple(k.shape)} must have the same shape [T, H, K]")
    if v.shape[1] % q.shape[1]:
        raise ValueError(
            f"kda: v has {v.shape[1]} heads, q has {q.shape[1]}; value heads must be a multiple of query"
            " heads"
        )
    if f.shape != (*v.shape[:2], q.shape[2]):
        raise ValueError(f"kda: f is {tuple(f.shape)}, expected [T, G, K] = {(*v.shape[:2], q.shape[2])}")
    if b.shape != v.shape[:2]:
        raise ValueError(f"kda: b is {tuple(b.shape)}, expected [T, G] = {tuple(v.shape[:2])}")


def check_row(q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, segments: Segments) -> None:
    """Raise ValueError if the tensors are not those of one packed row."""
    for name, tensor, legend in (("q", q, "[T, H, K]"), ("k", k, "[T, H, K]"), ("v", v, "[T, G, V]")):
        if tensor.ndim != 3:
            raise ValueError(f"kda: {name} is {tuple(tensor.shape)}; expected {legend}")
        check_packed(f"kda: {name}", tensor, segments)
    if q.shape[1] == 0 or v.shape[1] == 0:
        raise ValueError(f"kda: q is {tuple(q.shape)} and v {tuple(v.shape)}; expected at least one head")
    check_heads(q, k, v, f, b)


def check_sequences(q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor) -> None:
    """Raise ValueError if the tensors are not those of one token of each of B sequences."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 3:
            raise ValueError(f"kda_step: {name} is {tuple(tensor.shape)}; expected [B, heads, dim]")
    if q.shape[0] != v.shape[0]:
        raise ValueError(f"kda_step: v brings {v.shape[0]} sequences, q {q.shape[0]}; expected the same")
    check_heads(q, k, v, f, b)
