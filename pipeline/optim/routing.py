"""Which parameter goes to Muon and which to AdamW, and how weights split into Muon blocks.

Rules, first match wins:

| parameter                                                              | family | weight decay |
|------------------------------------------------------------------------|--------|--------------|
| fewer than two dimensions; norms, biases, A_log, dt_bias               | adamw  | no           |
| a vector stored as a matrix ([1, D], [D, 1]); AttnRes queries          | adamw  | no           |
| embeddings, output heads, positional tables, patch embedding           | adamw  | yes          |
| convolutions; b_proj (KDA's beta)                                      | adamw  | yes          |
| vision tower (not its projector), unless `muon_vision`                 | adamw  | yes          |
| matrices, and stacks of expert matrices [E, out, in]                   | muon   | yes          |
| everything else                                                        | adamw  | yes          |

Which parts of a weight are one matrix to Muon is a plain list of integers `[repeat, group, size, size, ...]`
(it lives in `param_groups` and in checkpoints): the rows of a weight are read as [repeat, group, size + size
+ ...], and every (repeat, size) is one block of group * size rows. All columns belong to every block.

    [1, 1, rows]              the whole matrix                              1 block
    [H / g, g, d]             q, k, v projections, g heads together         H / g blocks
    [H / g, g, nope, v]       kv_b_proj: keys and values of g heads         2 H / g blocks
    [1, 1, F, F]              gate and up projections stored in one         2 blocks

A stack of expert matrices [E, rows, cols] applies its specification to each of the E matrices. Head sizes are
read from the module that owns the projection: `qk_nope_head_dim, qk_rope_head_dim, v_head_dim` (MLA) or
`head_dim`. Sources: Moonlight (arXiv 2502.16982) for the families, Kimi K3 (arXiv 2607.24653) section 2.5 for
blocks per head.

Shapes: N blocks of one size, G group, R rows of one section, C columns.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from torch import Tensor, nn

from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Family = Literal["muon", "adamw"]
BlockSpec = list[int]
# Root mean square of a Muon update: at 0.2 it is that of AdamW's, so both share one learning rate (Moonlight,
# arXiv 2502.16982, section 2.2).
UPDATE_RMS = 0.2

_VECTOR = re.compile(r"(^|\.)(A_log|dt_bias|bias)$|norm\d*\.weight$|_res_(query|proj)(\.|$)")
_LOOKUP = re.compile(r"(^|\.)(embed_tokens|lm_head|head)\.|pos_emb|patch_embed|conv(\d+d?)?\.|(^|\.)b_proj\.")


class RoutingError(UserError, ValueError):
    """A parameter cannot be trained the way its group says."""


# What stands behind the short names of parts.
PARTS = {"vision": "vision_tower.*", "projector": "mm_projector.*", "text": "decoder.*"}


def names_part(part: str, fqn: str) -> bool:
    """Whether a part (vision, projector, text, or a pattern of names) has the parameter of this name."""
    return fnmatchcase(fqn, PARTS.get(part, part))


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor."""
    # Its module takes a second to import; who shards has imported it, and a process that has not holds none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """The rows of a tensor that live on this rank; shares storage with it."""
    return tensor.to_local() if is_sharded(tensor) else tensor.detach()


def sections(weight: Tensor, spec: BlockSpec) -> tuple[Tensor, ...]:
    """Views [N, G, R, C] of the blocks, one per section of `spec`; N counts experts and repeats together.

    weight: contiguous [rows, C] or [E, rows, C]; a shard may hold fewer rows or experts, in whole units.
    """
    # Experts and repeats count alike: both are matrices of their own.
    units = weight.view(-1, spec[1], sum(spec[2:]), weight.shape[-1])
    return units.split(spec[2:], dim=2)


def block_scale(rows: int, columns: int) -> float:
    """Factor that gives an orthogonal block the root mean square UPDATE_RMS: UPDATE_RMS * sqrt(max(rows,
    columns)).

    A (semi-)orthogonal matrix has mean square 1 / max(rows, columns). Source: Moonlight (arXiv 2502.16982)
    section 2.2.
    """
    return UPDATE_RMS * math.sqrt(max(rows, columns))


def build_param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    *,
    matrices: Family = "muon",
    muon_vision: bool = False,
    head_group_size: int | None = 1,
    lr_factors: Mapping[str, float] | None = None,
) -> list[Record]:
    """Parameter groups for `MuonClip`; every parameter of the model is in exactly one, frozen ones too.

    A sharded model must be sharded already. matrices: "adamw" puts everything on AdamW (groups then also suit
    torch.optim.AdamW). head_group_size: heads orthogonalised together; None takes whole projections.
    lr_factors: of the learning rate, by part or pattern of names (see `names_part`), the first that fits.

    Each group holds plain values beside its parameters: name, family, lr, weight_decay, fqns and blocks (both
    aligned with params; blocks are empty lists for AdamW). Where lr_factors has an entry for it, the group
    has its lr_factor, too.

    Raises:
        RoutingError: heads do not divide, a shard is no shard of rows, flat shards, or nothing would be
            trained by Muon.
    """
    modules = dict(model.named_modules())
    groups: dict[str, Record] = {}
    for fqn, param in model.named_parameters():
        if "_flat_param" in fqn:
            check_groups([{"family": "muon", "fqns": [fqn], "params": [param]}])
        owner = fqn.rpartition(".")[0]
        family, decayed = _route(fqn, param, modules[owner], muon_vision)
        spec: BlockSpec = []
        # Decay is decided by the table for either family.
        if matrices == "adamw":
            family = "adamw"
        elif family == "muon":
            # Of a Linear: the module that holds it knows the heads.
            spec = _block_spec(fqn, param, modules[owner.rpartition(".")[0]], head_group_size)
            _check_shard(fqn, param)

        # Four groups at most: a family, with decay or without; and those of parts at another rate.
        name = family if decayed else f"{family}_no_decay"
        options = {"name": name, "family": family, "lr": lr, "weight_decay": weight_decay if decayed else 0.0}
        factors = lr_factors or {}
        fitting = next((part for part in factors if names_part(part, fqn)), None)
        if fitting is not None:
            name = options["name"] = f"{name}:{fitting}"
            options |= {"lr": lr * factors[fitting], "lr_factor": factors[fitting]}
        group = groups.setdefault(name, options | {"params": [], "fqns": [], "blocks": []})
        group["params"].append(param)
        group["fqns"].append(fqn)
        group["blocks"].append(spec)

    if matrices == "muon" and "muon" not in groups:
        raise RoutingError(
            f"no parameter of {type(model).__name__} is routed to Muon, which takes matrices; use adamw"
        )
    # In a fixed order: a checkpoint names groups by their place.
    return sorted(groups.values(), key=lambda group: (group["family"] != "muon", group["name"]))


def _route(fqn: str, param: Tensor, module: nn.Module, muon_vision: bool) -> tuple[Family, bool]:
    """(family, decayed) by the table at the head of this file."""
    # In the order of the table: the first rule that fits decides.
    shape = param.shape
    if len(shape) < 2 or (len(shape) == 2 and min(shape) == 1) or _VECTOR.search(fqn):
        return "adamw", False
    # Rows of a lookup are tokens, not directions of a linear map, so Muon must not touch them.
    if isinstance(module, nn.Embedding | nn.modules.conv._ConvNd) or _LOOKUP.search(fqn):
        return "adamw", True
    if "vision_tower" in fqn and not muon_vision:
        return "adamw", True
    if len(shape) == 2 or (len(shape) == 3 and "experts" in fqn):
        return "muon", True
    return "adamw", True


def _block_spec(fqn: str, param: Tensor, parent: Any, heads_together: int | None) -> BlockSpec:
    leaf, rows = fqn.removesuffix(".weight").rpartition(".")[2], param.shape[-2]
    parts, sizes = 1, [rows]
    if leaf in {"gate_up_proj", "gate_up"} and rows % 2 == 0:
        return [1, 1, rows // 2, rows // 2]

    # The module that owns a projection knows its heads; the name says which projection it is.
    if hasattr(parent, "qk_nope_head_dim"):
        if leaf in {"q_proj", "q_b_proj"}:
            sizes = [parent.qk_nope_head_dim + parent.qk_rope_head_dim]
        elif leaf == "kv_b_proj":
            sizes = [parent.qk_nope_head_dim, parent.v_head_dim]
    elif hasattr(parent, "head_dim"):
        if leaf in {"q_proj", "k_proj", "v_proj"}:
            sizes = [parent.head_dim]
        elif leaf == "wqkv":
            parts, sizes = 3, [parent.head_dim]

    if heads_together is None or sizes == [rows]:
        return [parts, 1, rows // parts]
    heads, rest = divmod(rows // parts, sum(sizes))
    if rest or heads % heads_together:
        raise RoutingError(
            f"{fqn}: head_group_size {heads_together} does not divide {heads} heads (of {sum(sizes)} rows);"
            ' choose a divisor, or "null" for whole matrices'
        )
    return [parts * heads // heads_together, heads_together, *sizes]


def _check_shard(fqn: str, param: Tensor) -> None:
    """RoutingError for a sharded parameter that Muon cannot put together again: it takes rows of matrices,
    and whole experts."""
    placements: Sequence[Any] = param.placements if is_sharded(param) else ()
    if any(not placed.is_replicate() and placed.dim != 0 for placed in placements):
        raise RoutingError(f"{fqn}: Muon takes Replicate and Shard(0), not {placements}")


def check_groups(groups: Sequence[Record]) -> None:
    """RoutingError for groups in which Muon would train what is no matrix: a lookup table, a vector, a flat
    shard of FSDP 1 or DeepSpeed."""
    for group in groups:
        if group["family"] != "muon":
            continue
        for fqn, param in zip(group["fqns"], group["params"], strict=True):
            if param.ndim < 2 or "_flat_param" in fqn:
                raise RoutingError(
                    f"{fqn} of shape {tuple(param.shape)} is in a Muon group, which takes matrices: shard"
                    " with FSDP2 (parallel.dp_shard), which keeps them, and put vectors into an adamw group"
                )
            if _LOOKUP.search(fqn):
                raise RoutingError(f"{fqn} is a lookup table in a Muon group: put it into an adamw group")


def blocks_in_words(shape: Sequence[int], spec: BlockSpec) -> str:
    """The Muon blocks of a weight for a table, e.g. `4 x 48x128` or `8 x (96x128 + 96x128)`; "" for none."""
    if not spec:
        return ""
    words = " + ".join(f"{spec[1] * size}x{shape[-1]}" for size in spec[2:])
    if len(spec) > 3:
        words = f"({words})"
    return f"{math.prod(shape[:-2]) * spec[0]} x {words}"
