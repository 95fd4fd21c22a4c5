"""What one Muon step will do, worked out by parameter name when the first step needs it.

Optimizers are often built before a model is sharded, and sharding replaces parameters (accelerate with FSDP2
swaps every entry of `param_groups`). So nothing here is remembered across such a swap: a plan knows which
tensors and which storage it was made for, and `Plan.current` tells whether they are still the ones to train.
With a model given, the parameter that the model holds under a name is the one that counts.

Blocks of equal size are stacked over all parameters of a group, in slices of bounded size (CHUNK_ELEMENTS),
so that one Newton-Schulz call serves many weights and memory stays bounded.

Shapes: see blocks.py; N blocks, G group, R rows, C columns.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from torch import Tensor, nn

from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.pipeline.optim.blocks import (
    BlockSpec,
    RoutingError,
    block_scale,
    block_shapes,
    check_blocks,
    describe,
    sections,
    unit_rows,
)
from earlyfusion.pipeline.optim.groups import Owned, check_muon_parameter, owned_parameters

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

CHUNK_ELEMENTS = {"cpu": 2**19}
"""Most elements in one stacked Newton-Schulz call by device type: on a CPU what a core's cache holds."""
CHUNK_ELEMENTS_ELSEWHERE = 2**26  # 256 MiB of fp32


class TableRow(NamedTuple):
    """One line of the routing table. blocks in words; scale: factor on an orthogonal block, one per
    section."""

    fqn: str
    shape: tuple[int, ...]
    family: str
    blocks: str
    scale: tuple[float, ...]


@dataclass
class Entry:
    """One parameter of a group: `local` is the part of it that this rank holds (all of it unless sharded)."""

    fqn: str
    param: Tensor
    local: Tensor
    spec: BlockSpec
    owner: tuple[nn.Module, str] | None

    def current(self, param: Tensor) -> bool:
        if param is not self.param or local_part(param).data_ptr() != self.local.data_ptr():
            return False
        return self.owner is None or self.owner[0]._parameters.get(self.owner[1]) is param


@dataclass
class Piece:
    """Blocks [low, high) of one section of an entry; `weight` is the view [N, G, R, C] of them."""

    entry: Entry
    section: int
    low: int
    high: int
    weight: Tensor


@dataclass
class Bucket:
    """Pieces with blocks of one size, [rows, columns] each."""

    rows: int
    columns: int
    pieces: list[Piece] = field(default_factory=list)


@dataclass
class Plan:
    """Entries of every parameter group, in order, and the buckets of the Muon groups."""

    entries: list[list[Entry]]
    buckets: list[list[Bucket]]

    def current(self, param_groups: list[dict[str, Any]]) -> bool:
        """True while every parameter is the object, at the address, that the plan was made for."""
        for group, entries in zip(param_groups, self.entries, strict=True):
            if len(group["params"]) != len(entries):
                return False
            if not all(entry.current(param) for entry, param in zip(entries, group["params"], strict=True)):
                return False
        return True


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor. Its module takes a second to import; who shards has imported it, and a
    process that has not holds none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """The rows of a tensor that live on this rank; shares storage with it."""
    return tensor.to_local() if is_sharded(tensor) else tensor.detach()


def build_plan(param_groups: list[dict[str, Any]], state: Any, model: nn.Module | None) -> Plan:
    """Plan the groups of `build_param_groups`; `param_groups` and `state` follow the model where it swapped
    parameters.

    Raises:
        RoutingError: a name is not in the model, or Muon was given what it cannot train.
    """
    # What the model holds under a name counts, not what the optimizer was built with.
    owned = {item.fqn: item for item in owned_parameters(model)} if model is not None else {}
    plan = Plan([], [])
    for group in param_groups:
        if len(group["fqns"]) != len(group["params"]) or len(group["blocks"]) != len(group["params"]):
            raise RoutingError(
                f"group {group['name']!r} has {len(group['params'])} parameters for {len(group['fqns'])}"
                " names: build groups with build_param_groups and keep params, fqns and blocks aligned"
            )
        if model is not None:
            _follow_model(group, state, owned)
        entries = [
            _entry(group["family"], fqn, param, spec, owned.get(fqn))
            for fqn, param, spec in zip(group["fqns"], group["params"], group["blocks"], strict=True)
        ]
        if group["family"] == "muon" and not entries:
            raise RoutingError(f"Muon group {group['name']!r} is empty: nothing would be trained by Muon")
        plan.entries.append(entries)
        plan.buckets.append(_buckets(entries) if group["family"] == "muon" else [])
    return plan


def _follow_model(group: dict[str, Any], state: Any, owned: Mapping[str, Owned]) -> None:
    """Replace stale entries of group["params"] by what the model now holds under the same name; state moves
    along."""
    for index, fqn in enumerate(group["fqns"]):
        if fqn not in owned:
            raise RoutingError(
                f"the optimizer trains {fqn!r}, which the model does not have; {did_you_mean(fqn, owned)}"
            )
        old, new = group["params"][index], owned[fqn].param
        if new is old:
            continue
        group["params"][index] = new
        kept = state.pop(old, None)
        if not kept:
            continue
        if old.shape != new.shape or type(old.data) is not type(new.data):
            raise RoutingError(
                f"{fqn} changed from {tuple(old.shape)} to {tuple(new.shape)} or was sharded after it had"
                " optimizer state: prepare the model first, then load the state"
            )
        state[new] = kept


def _entry(family: str, fqn: str, param: Tensor, spec: BlockSpec, owned: Owned | None) -> Entry:
    owner = (owned.module, owned.attribute) if owned is not None else None
    if family == "muon":
        check_muon_parameter(fqn, tuple(param.shape), spec, owned.module if owned is not None else None)
        if is_sharded(param):
            _check_placements(fqn, param, spec)
        elif not param.is_contiguous():
            raise RoutingError(
                f"{fqn} is not contiguous (strides {param.stride()}); Muon updates row blocks in place"
            )
    return Entry(fqn, param, local_part(param), spec, owner)


def _check_placements(fqn: str, param: DTensor, spec: BlockSpec) -> None:
    """A shard must hold whole blocks: replicated, experts cut along dim 0, or rows cut between blocks."""
    from torch.distributed.tensor import Replicate, Shard

    # Only cuts between blocks: a block in two shards would be orthogonalised as two matrices.
    local = param.to_local()
    cuts = [placement for placement in param.placements if not isinstance(placement, Replicate)]
    if any(type(placement) is not Shard or placement.dim != 0 for placement in cuts):
        raise RoutingError(
            f"{fqn}: Muon supports Replicate and Shard(0), not {param.placements}; shard dim 0 or use adamw"
        )
    if local.numel() == 0:
        raise RoutingError(
            f"{fqn}: this rank's shard of {tuple(param.shape)} is empty; use fewer ranks or adamw"
        )
    if cuts and param.ndim == 2 and local.shape[0] % unit_rows(spec):
        raise RoutingError(
            f"{fqn}: a shard of {local.shape[0]} of {param.shape[0]} rows cuts a Muon block of"
            f" {unit_rows(spec)} rows: keep the parameter replicated, use blocks per head that match the"
            " shards, or put it on adamw"
        )


def _buckets(entries: list[Entry]) -> list[Bucket]:
    # Blocks are dealt in order; a bucket is closed when it is full.
    open_buckets: dict[Any, tuple[Bucket, int]] = {}
    done: list[Bucket] = []
    for entry in entries:
        shapes = block_shapes(entry.spec, entry.local.shape[-1])
        for section, (view, (rows, columns)) in enumerate(
            zip(sections(entry.local, entry.spec), shapes, strict=True)
        ):
            key = (rows, columns, entry.local.device, entry.local.dtype)
            limit = max(
                1, CHUNK_ELEMENTS.get(entry.local.device.type, CHUNK_ELEMENTS_ELSEWHERE) // (rows * columns)
            )
            low = 0
            while low < view.shape[0]:
                bucket, filled = open_buckets.get(key, (None, 0))
                if bucket is None or filled >= limit:
                    bucket, filled = Bucket(rows, columns), 0
                    done.append(bucket)
                high = min(view.shape[0], low + limit - filled)
                bucket.pieces.append(Piece(entry, section, low, high, view[low:high]))
                open_buckets[key] = (bucket, filled + high - low)
                low = high
    return done


def routing_rows(param_groups: list[dict[str, Any]]) -> list[TableRow]:
    """The routing table: one row per parameter, in group order. Shapes are global."""
    rows = []
    for group in param_groups:
        for fqn, param, spec in zip(group["fqns"], group["params"], group["blocks"], strict=True):
            shape, blocks = tuple(param.shape), ""
            scale: tuple[float, ...] = ()
            if group["family"] == "muon":
                check_blocks(fqn, shape, spec)
                blocks = describe(shape, spec)
                scale = tuple(block_scale(*block, group["rms"]) for block in block_shapes(spec, shape[-1]))
            rows.append(TableRow(fqn, shape, group["family"], blocks, scale))
    return rows
