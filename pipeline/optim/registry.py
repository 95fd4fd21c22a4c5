"""Optimizers by the name that a recipe gives them. One is a function, registered where it stands:

    @optimizer("lion", matrices="adamw")
    def lion(options: OptimSection, model: nn.Module) -> torch.optim.Optimizer:
        return Lion(param_groups(options, model))

A function of yours needs no registration: `optim.name = "package.module:function"`. It is called the same
way, and its groups are routed like those of adamw.

AdamW for everything.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.kernels.files import Record, function_at
from earlyfusion.pipeline.config.schema import OptimSection
from earlyfusion.pipeline.optim.qk_clip import QKClip
from earlyfusion.pipeline.optim.routing import Family, build_param_groups

Build = Callable[[OptimSection, nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Registered:
    """build: makes the optimizer of a model; matrices: the family that its matrices are routed to."""

    build: Build
    matrices: Family


OPTIMIZERS: dict[str, Registered] = {}


def optimizer(name: str, matrices: Family) -> Callable[[Build], Build]:
    """Register a function that makes an optimizer."""

    # The function itself stays what it is, so that it can be called and tested without the registry.
    def register(build: Build) -> Build:
        OPTIMIZERS[name] = Registered(build, matrices)
        return build

    return register


def find_optimizer(name: str) -> Registered:
    """The optimizer of a name or place. Raises UserError for one that does not exist."""
    # A place is asked for first, so that a name of the project can never hide it.
    if ":" in name:
        return Registered(function_at(name, "optim.name"), "adamw")
    if name not in OPTIMIZERS:
        raise UserError(f"optim.name {name!r}: {did_you_mean(name, OPTIMIZERS)}, or package.module:function")
    return OPTIMIZERS[name]


def param_groups(options: OptimSection, model: nn.Module) -> list[Record]:
    """Who trains what, as the recipe routes it. Raises UserError, RoutingError among them."""
    return build_param_groups(
        model,
        options.lr,
        options.weight_decay,
        # Which family takes matrices is the optimizer's business, not the recipe's.
        matrices=find_optimizer(options.name).matrices,
        muon_vision=options.muon_vision,
        head_group_size=options.head_group_size,
        lr_factors=options.lr_factors,
    )


# Decays of the two moments, those of GPT-3 (arXiv 2005.14165, appendix B) and most that came after it.
BETAS = (0.9, 0.95)


@optimizer("adamw", matrices="adamw")
def adamw(options: OptimSection, model: nn.Module) -> torch.optim.Optimizer:
    """torch's AdamW for everything, with QK-Clip after every step where the recipe asks for it."""
    made = torch.optim.AdamW(param_groups(options, model), betas=BETAS, eps=options.eps)
    if options.qk_clip is not None:
        # After the step, as in MuonClip: the weights that are clipped are the new ones.
        clip = QKClip(model, options.qk_clip)
        made.register_step_post_hook(lambda *_: clip.apply())
        made.qk_clip = clip  # type: ignore[attr-defined]  # the same attribute as MuonClip's
    return made
