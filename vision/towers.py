"""The registry of vision towers: a tower is a module and the line that registers it.

    @tower("moonvit")
    class VisionTower(nn.Module):
        def __init__(self, cfg: VisionConfig) -> None: ...
        def forward(self, patches, grid) -> Tensor: ...  # [M, merge size, C], tokens in the grid's order
        def reset_parameters(self) -> None: ...
        def zero_anchor(self) -> Tensor: ...             # a scalar 0 that depends on every parameter

A recipe names it by `vision.tower`; one that is not part of the project by its place, "package.module:Class".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.kernels.places import function_at
from earlyfusion.vision.config import VisionConfig

TOWERS: dict[str, type[nn.Module]] = {}
"""Every registered tower by its name; vision/encoder.py registers "moonvit"."""

AnyTower = TypeVar("AnyTower", bound=type[nn.Module])


class TowerError(UserError, ValueError):
    """A tower that is not known, or is not where its name says."""


def tower(name: str) -> Callable[[AnyTower], AnyTower]:
    """Register the decorated class as the tower `name`."""

    def register(cls: AnyTower) -> AnyTower:
        # By name and not by class: configurations are plain text.
        TOWERS[name] = cls
        return cls

    return register


def import_tower(name: str) -> None:
    """Import and register "package.module:Class"; a registered name needs nothing.

    Recipes are code and may name such places; model directories are data and may not, so that reading one
    runs nothing. Raises UserError.
    """
    # Importing runs code: only a recipe, which its user wrote, may ask for it.
    if ":" in name and name not in TOWERS:
        TOWERS[name] = function_at(name, "vision.tower")  # type: ignore[assignment]


def build_tower(config: VisionConfig) -> Any:
    """The tower that `config.tower` names. Raises TowerError with the nearest name."""
    # Configurations come from model directories too, so nothing is imported here.
    if config.tower in TOWERS:
        return TOWERS[config.tower](config)
    if ":" in config.tower:
        raise TowerError(
            f"vision.tower {config.tower!r} is code that a model directory may not bring along; call"
            " earlyfusion.vision.towers.import_tower with its name first"
        )
    raise TowerError(f"vision.tower {config.tower!r}; {did_you_mean(config.tower, TOWERS)}")
