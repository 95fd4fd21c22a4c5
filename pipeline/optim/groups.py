"""Which parameter goes to Muon and which to AdamW, and how weights split into Muon blocks.

Rules, first match wins (`overrides`, patterns over full names, come before all of them):

| parameter                                                              | family | weight decay |
|------------------------------------------------------------------------|--------|--------------|
| fewer than two dimensions; norms, biases, A_log, dt_bias               | adamw  | no           |
| a vector stored as a matrix ([1, D], [D, 1]); AttnRes queries          | adamw  | no           |
| embeddings, output heads, positional tables, patch embedding           | adamw  | yes          |
| convolutions; b_proj (KDA's beta)                                      | adamw  | yes          |
| vision tower (not its projector), unless `muon_vision`                 | adamw  | yes          |
| matrices, and stacks of expert matrices [E, out, in]                   | muon   | yes          |
| everything else                                                        | adamw  | yes          |

Blocks: q, k and v projections per head (`head_group_size`), MLA's kv_b_proj per head with keys and values
apart, fused gate_up_proj and wqkv by their parts, everything else whole. Head sizes are read from the module
that owns the projection: `qk_nope_head_dim, qk_rope_head_dim, v_head_dim, num_heads` (MLA) or `head_dim`.
Sources: Moonlight (arXiv 2502.16982) for the families, Kimi K3 (arXiv 2607.24653) section 2.5 for blocks per
head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.pipeline.optim.blocks import (
    BlockSpec,
    RoutingError,
    check_blocks,
    per_head,
    per_head_pair,
    whole,
)

Family = Literal["muon", "adamw"]
FAMILIES: tuple[Family, ...] = ("muon", "adamw")

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_VISION = {"vision_tower", "vision_model", "vision_encoder", "vision", "visual", "image_encoder"}
_EMBEDDINGS = {"embed_tokens", "word_embeddings", "wte", "wpe", "tok_embeddings"}
_HEADS = {"lm_head", "embed_out"}
_LIKELY_HEADS = _HEADS | {"head", "output", "classifier", "score"}
_POSITION = re.compile(r"pos_emb|position_emb|pos_embed|patch_embed")
_VECTOR = re.compile(r"(^|\.)(A_log|dt_bias|bias)$|norm\d*\.weight$|_res_(query|proj)(\.|$)")
_CONVOLUTION = re.compile(r"conv(\d+d?)?\.")


@dataclass(frozen=True)
class Owned:
    """A parameter, its full name without wrapper prefixes, and the module and attribute that hold it."""

    fqn: str
    param: nn.Parameter
    module: nn.Module
    attribute: str
    parent: nn.Module


def clean_name(name: str) -> str:
    """A full name without the components that torch.compile, checkpoint and FSDP wrappers add."""
    return _WRAPPERS.sub("", name + ".")[:-1]


def owned_parameters(model: nn.Module) -> Iterator[Owned]:
    """Every parameter of `model` once (tied weights under their first name), in `named_parameters` order."""
    modules = dict(model.named_modules())
    for raw, param in model.named_parameters():
        path, _, attribute = raw.rpartition(".")
        parent = modules[path.rpartition(".")[0]]  # of a Linear: the module that knows the heads
        yield Owned(clean_name(raw), param, modules[path], attribute, parent)


def is_lookup_or_head(fqn: str, module: nn.Module | None) -> bool:
    """Embeddings and output heads: rows are tokens, not directions of a linear map, so Muon must not touch
    them."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or bool(
        set(fqn.split(".")) & (_EMBEDDINGS | _HEADS)
    )


def _default_route(owned: Owned, muon_vision: bool) -> tuple[Family, bool]:
    """(family, decayed) by the table at the head of this file."""
    # In the order of the table: the first rule that fits decides.
    fqn, shape, parts = owned.fqn, owned.param.shape, set(owned.fqn.split("."))
    if len(shape) < 2 or (len(shape) == 2 and min(shape) == 1) or _VECTOR.search(fqn):
        return "adamw", False
    if is_lookup_or_head(fqn, owned.module) or set(fqn.split(".")[-2:-1]) & _LIKELY_HEADS:
        return "adamw", True
    convolution = isinstance(owned.module, nn.modules.conv._ConvNd) or _CONVOLUTION.search(fqn)
    if convolution or _POSITION.search(fqn) or "b_proj" in parts:
        return "adamw", True
    if parts & _VISION and not muon_vision and "projector" not in fqn:
        return "adamw", True
    if len(shape) == 2 or (len(shape) == 3 and "experts" in fqn):
        return "muon", True
    return "adamw", True


def _heads_of(fqn: str, rows: int, head_rows: int, group_size: int) -> int:
    heads, rest = divmod(rows, head_rows)
    if rest:
        raise RoutingError(
            f"{fqn}: {rows} rows are not a multiple of the head size {head_rows} its module declares"
        )
    if group_size and heads % group_size:
        raise RoutingError(
            f"{fqn}: head_group_size {group_size} does not divide {heads} heads; choose a divisor, or 0 for"
            " whole matrices"
        )
    return heads


def block_spec(owned: Owned, head_group_size: int) -> BlockSpec:
    """How Muon splits this weight; see `blocks.py`.

    Raises:
        RoutingError: the head sizes that the module declares, or head_group_size, do not divide the rows.
    """
    # The module that owns a projection knows its heads; the name says which projection it is.
    names, rows, parent = owned.fqn.split("."), owned.param.shape[-2], owned.parent
    leaf = names[-2] if names[-1] == "weight" and len(names) > 1 else names[-1]
    nope, head_dim = getattr(parent, "qk_nope_head_dim", None), getattr(parent, "head_dim", None)
    value: int = getattr(parent, "v_head_dim", 0)
    if leaf in {"gate_up_proj", "gate_up"} and rows % 2 == 0:
        return [1, 1, rows // 2, rows // 2]
    if nope is not None and leaf in {"q_proj", "q_b_proj"}:
        head_rows = nope + parent.qk_rope_head_dim
        return per_head(_heads_of(owned.fqn, rows, head_rows, head_group_size), head_rows, head_group_size)
    if nope is not None and leaf == "kv_b_proj":
        heads = _heads_of(owned.fqn, rows, nope + value, head_group_size)
        return per_head_pair(heads, nope, value, head_group_size)
    if nope is None and head_dim is not None and leaf in {"q_proj", "k_proj", "v_proj"}:
        return per_head(_heads_of(owned.fqn, rows, head_dim, head_group_size), head_dim, head_group_size)
    if head_dim is not None and leaf == "wqkv" and rows == 3 * getattr(parent, "num_heads", 0) * head_dim:
        if head_group_size == 0:
            return [3, 1, rows // 3]
        _heads_of(owned.fqn, rows // 3, head_dim, head_group_size)
        return per_head(rows // head_dim, head_dim, head_group_size)
    return whole(rows)


def _route(owned: Owned, muon_vision: bool, overrides: Mapping[str, str]) -> tuple[Family, bool]:
    family, decayed = _default_route(owned, muon_vision)
    if getattr(owned.param, "_no_weight_decay", False):
        decayed = False
    for pattern, given in overrides.items():
        if fnmatchcase(owned.fqn, pattern):
            return ("muon" if given == "muon" else "adamw"), decayed
    return family, decayed


def _check_overrides(overrides: Mapping[str, str], fqns: list[str]) -> None:
    for pattern, family in overrides.items():
        if family not in FAMILIES:
            raise RoutingError(f"override {pattern!r} = {family!r}: expected one of {', '.join(FAMILIES)}")
        if not any(fnmatchcase(fqn, pattern) for fqn in fqns):
            raise RoutingError(
                f"override {pattern!r} matches no parameter; {did_you_mean(pattern, fqns[:2000])}"
            )


def check_muon_parameter(fqn: str, shape: tuple[int, ...], spec: BlockSpec, module: nn.Module | None) -> None:
    """Raises RoutingError if Muon must not or cannot train this weight."""
    if is_lookup_or_head(fqn, module):
        raise RoutingError(f"{fqn} is an embedding or output head; Muon is for linear maps: put it on adamw")
    if len(shape) not in (2, 3):
        raise RoutingError(
            f"{fqn} has shape {shape}; Muon takes matrices [out, in] or stacks [E, out, in]. A flat shape"
            " means that FSDP1 or DeepSpeed flattened it: use FSDP2, or put the parameter on adamw"
        )
    if 0 in shape:
        raise RoutingError(
            f"{fqn} is empty {shape}: this rank holds no rows of it; shard over fewer ranks or use adamw"
        )
    check_blocks(fqn, shape, spec)


def build_param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    *,
    matrices: Family = "muon",
    muon_vision: bool = False,
    head_group_size: int | None = 1,
    overrides: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for `MuonClip`; every parameter of the model is in exactly one, frozen ones too.

    matrices: "adamw" puts everything on AdamW (groups then also suit torch.optim.AdamW). head_group_size:
    heads orthogonalised together; 0 or None takes whole projections. overrides: fnmatch pattern over full
    names -> "muon" | "adamw", the first matching pattern wins.

    Each group holds plain values beside its parameters: name, family, lr, weight_decay, fqns and blocks (both
    aligned with params; blocks are empty lists for AdamW).

    Raises:
        RoutingError: an override matches nothing or names no family, Muon would get an embedding, a head or a
        tensor
            that is no matrix, heads do not divide, or no parameter at all would be trained by Muon.
    """
    # A pattern that matches nothing is a mistake, not a wish.
    overrides = dict(overrides or {})
    owned_all = list(owned_parameters(model))
    _check_overrides(overrides, [owned.fqn for owned in owned_all])
    # Four groups at most: a family, with decay or without.
    groups: dict[str, dict[str, Any]] = {}
    for owned in owned_all:
        family, decayed = _route(owned, muon_vision, overrides)
        if matrices == "adamw":
            family = "adamw"
        spec: BlockSpec = []
        if family == "muon":
            spec = block_spec(owned, head_group_size or 0) if owned.param.ndim in (2, 3) else [1, 1, 1]
            check_muon_parameter(owned.fqn, tuple(owned.param.shape), spec, owned.module)
        name = family if decayed else f"{family}_no_decay"
        group = groups.setdefault(
            name,
            {"name": name, "family": family, "lr": lr, "weight_decay": weight_decay if decayed else 0.0}
            | {"params": [], "fqns": [], "blocks": []},
        )
        group["params"].append(owned.param)
        group["fqns"].append(owned.fqn)
        group["blocks"].append(spec)
    if matrices == "muon" and not any(group["family"] == "muon" for group in groups.values()):
        raise RoutingError(
            f"no parameter of {type(model).__name__} is routed to Muon; matrices are recognised by shape and"
            ' name: add an override {"pattern": "muon"}, or use matrices="adamw"'
        )
    return sorted(groups.values(), key=lambda group: (group["family"] != "muon", group["name"]))
