"""Weights as one run of bytes: what stands where, and in which slices it travels.

    manifest = manifest_of(model.state_dict(), version=7, dtype=torch.bfloat16)
    pack(model.state_dict().items(), manifest, buffer)      # name by name: shards are gathered one at a time
    views(manifest, buffer)                                 # name -> tensor over the same bytes

A version's number belongs to its bytes: other weights have another.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from earlyfusion.data.errors import DataError
from earlyfusion.kernels.files import Record

ALIGN = 64
"""Every tensor begins at a multiple of so many bytes."""
MOST_BYTES, MOST_TENSORS = 1 << 42, 1 << 20
"""Limits of what a manifest may ask a receiver to hold."""


class SyncError(DataError):
    """Weights that cannot be sent or taken; the message is one line."""


class Entry(NamedTuple):
    """A tensor: dtype as torch names it, offset and size in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class Slice(NamedTuple):
    """A part of the bytes, which travels alone."""

    offset: int
    size: int


@dataclass(frozen=True)
class Manifest:
    """What a version of the weights is made of; size: bytes in all."""

    version: int
    entries: tuple[Entry, ...]
    size: int

    def record(self) -> Record:
        """As JSON."""
        return {"version": self.version, "size": self.size, "entries": [list(one) for one in self.entries]}

    def slices(self, size: int) -> list[Slice]:
        """The bytes in slices of `size`; the last may be shorter."""
        return [Slice(at, min(size, self.size - at)) for at in range(0, self.size, size)]


def manifest_of(
    weights: Mapping[str, Tensor],
    version: int,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
) -> Manifest:
    """Where every tensor stands. dtype: what floating-point weights are cast to on the way, all or by name;
    None keeps each. Of sharded weights the whole shape counts."""
    entries, offset = [], 0
    for name, weight in weights.items():
        wanted = dtype.get(name) if isinstance(dtype, Mapping) else dtype
        kind = wanted if wanted is not None and weight.is_floating_point() else weight.dtype
        size = math.prod(weight.shape) * kind.itemsize
        entries.append(Entry(name, str(kind).removeprefix("torch."), tuple(weight.shape), offset, size))
        offset += -(-size // ALIGN) * ALIGN
    return Manifest(version, tuple(entries), offset)


def manifest_from(record: Any) -> Manifest:
    """A manifest that came from outside. Raises SyncError for one that is none, or whose tensors overlap or
    stand outside of its bytes."""
    try:
        version, size = int(record["version"]), int(record["size"])
        entries = tuple(
            Entry(str(n), str(d), tuple(map(int, s)), int(o), int(b)) for n, d, s, o, b in record["entries"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SyncError(f"not a manifest of weights: {error!r:.100}") from None
    if version < 0 or not 0 <= size <= MOST_BYTES or len(entries) > MOST_TENSORS:
        raise SyncError(
            f"manifest of {size:,} bytes, {len(entries):,} tensors, version {version}: out of range"
        )

    end = 0
    for one in entries:
        kind: Any = getattr(torch, one.dtype, None)
        fits = isinstance(kind, torch.dtype) and min(one.shape, default=1) >= 0
        if not fits or one.size != math.prod(one.shape) * kind.itemsize:
            raise SyncError(f"{one.name!r:.80}: {one.dtype!r:.20} of shape {one.shape} in {one.size:,} bytes")
        if one.offset < end or one.offset % ALIGN or one.offset + one.size > size:
            raise SyncError(f"{one.name!r:.80} at byte {one.offset:,}: its place is taken, or outside")
        end = one.offset + one.size
    return Manifest(version, entries, size)


def views(manifest: Manifest, buffer: Any) -> dict[str, Tensor]:
    """Tensors over the bytes of a writable buffer; nothing is copied."""
    found = {}
    for one in manifest.entries:
        kind = getattr(torch, one.dtype)
        count = math.prod(one.shape)
        flat = (
            torch.frombuffer(buffer, dtype=kind, count=count, offset=one.offset)
            if count
            else torch.empty(0, dtype=kind)
        )
        found[one.name] = flat.view(one.shape)
    return found


def pack(weights: Iterable[tuple[str, Tensor]], manifest: Manifest, buffer: Any) -> None:
    """Copy weights to their places, cast to what the manifest says. They may come from a generator that
    gathers one sharded weight after the other. Raises SyncError for a name or shape that is not in the
    manifest, and for weights that are missing."""
    places = views(manifest, buffer)
    for name, weight in weights:
        place = places.pop(name, None)
        if place is None or place.shape != weight.shape:
            raise SyncError(f"{name}: shape {tuple(weight.shape)} is not what the manifest says")
        place.copy_(weight)
    if places:
        raise SyncError(f"weights that did not come: {', '.join(sorted(places)[:3])} ({len(places)} in all)")
