"""One optimizer step, the same for pretraining, fine-tuning, reinforcement learning and DPO.

    gradients of all ranks -> frozen ones dropped -> norm, clipped -> guard -> step, or forget it

A step is forgotten as a whole: the optimizer's moments stand, and what the forward passes measured for
QK-Clip and for the balance of experts is dropped, so that a bad batch neither clips heads nor moves routers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from earlyfusion.kernels.errors import UserError
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.layers import Router, moe_layers, update_router_biases
from earlyfusion.pipeline.guard import Guard, Verdict
from earlyfusion.pipeline.runtime import Runtime

# What stands behind the short names in `stages.frozen` and `train.frozen`.
FROZEN_GROUPS = {"vision": ("vision_tower.*",), "projector": ("mm_projector.*",), "text": ("decoder.*",)}


@dataclass(frozen=True)
class Update:
    """What became of a step. grad_norm: before clipping; expert_load: of `update_router_biases`, {} where
    nothing was balanced."""

    grad_norm: float
    verdict: Verdict
    expert_load: dict[str, Tensor] = field(default_factory=dict)

    @property
    def refused(self) -> bool:
        """Whether the guard dropped the step."""
        return not self.verdict.ok

    @property
    def empty(self) -> bool:
        """Whether there was nothing to learn, on any rank."""
        return self.grad_norm == 0


def update(
    model: NativeFusion,
    optimizer: torch.optim.Optimizer,
    guard: Guard,
    runtime: Runtime,
    *,
    loss: float,
    lr: float,
    clip_grad_norm: float | None,
    frozen: Sequence[str] = (),
    balance_experts: bool = True,
    can_roll_back: bool = False,
) -> Update:
    """Take the step of the gradients in `.grad`, which are those of all ranks; they are gone afterwards.

    model: the bare module. loss: what the guard watches, equal on all ranks. clip_grad_norm: None measures
    the norm and clips nothing. frozen: entries of a recipe (`is_frozen`). balance_experts: whether router
    biases move. can_roll_back: see `Guard.check`. Every rank calls it.
    """
    # Frozen parameters have gradients (DDP wants the same ones in every step); they go here.
    still = [parameter for name, parameter in model.named_parameters() if is_frozen(name, frozen)]
    for parameter in still:
        parameter.grad = None
    # The norm is measured in any case: the guard and the log want it.
    limit = float("inf") if clip_grad_norm is None else clip_grad_norm
    grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))

    # A step on zeros would go along an old direction, and the
    # guard, which compares norms, need not hear of it.
    verdict = Verdict("go")
    if grad_norm != 0:
        verdict = guard.check(loss, grad_norm, can_roll_back=can_roll_back)

    load: dict[str, Tensor] = {}
    if grad_norm == 0 or not verdict.ok:
        clip = getattr(optimizer, "qk_clip", None)
        if clip is not None:
            clip.reset()
    else:
        for group in optimizer.param_groups:
            group["lr"] = lr  # one for all groups (Moonlight: both families share it)
        with _held(model, still, frozen):
            optimizer.step()
            if balance_experts:
                # By the step's load, summed over ranks.
                reduce = None if runtime.world == 1 else lambda flat: runtime.sum(flat).to(flat.dtype)
                load = update_router_biases(model, reduce)
    for layer in moe_layers(model):
        layer.reset_counts()
    optimizer.zero_grad(set_to_none=True)
    return Update(grad_norm, verdict, load)


def expert_metrics(load: Mapping[str, Tensor], model: NativeFusion) -> dict[str, Any]:
    """`expert_load` {layer: share per expert} and the largest violation, for a log record."""
    if not load:
        return {}
    # By the layer's number, as the recipe and the report know it.
    layers = [i for i in range(len(model.decoder.layers)) if model.config.text.is_moe(i)]
    shares = {str(layer): share for layer, share in zip(layers, load["load_share"].tolist(), strict=True)}
    return {"expert_load": shares, "expert_max_violation": float(load["max_violation"].max())}


def is_frozen(name: str, entries: Sequence[str]) -> bool:
    """Whether a parameter's name is frozen by one of: vision, projector, text, or fnmatch patterns."""
    patterns = [pattern for entry in entries for pattern in FROZEN_GROUPS.get(entry, (entry,))]
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_frozen(model: nn.Module, frozen_by_key: Mapping[str, Sequence[str]]) -> None:
    """UserError for an entry that matches no parameter. frozen_by_key: the recipe's key -> its entries."""
    names = [name for name, _ in model.named_parameters()]
    for key, entries in frozen_by_key.items():
        for entry in entries:
            if not any(is_frozen(name, [entry]) for name in names):
                raise UserError(
                    f"{key}: {entry!r} matches no parameter; use {', '.join(FROZEN_GROUPS)} or a pattern"
                    f" like {names[0]!r}"
                )


@contextmanager
def _held(model: nn.Module, still: Sequence[nn.Parameter], frozen: Sequence[str]) -> Iterator[None]:
    """Around a step: QK-Clip leaves the `still` parameters alone, and frozen routers keep their biases."""
    biases = {}
    for name, module in model.named_modules():
        if isinstance(module, Router) and is_frozen(f"{name}.weight", frozen):
            biases[module] = module.e_score_correction_bias.clone()
    for parameter in still:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in still:
            parameter.requires_grad_(True)
        for router, bias in biases.items():
            router.e_score_correction_bias.copy_(bias)
