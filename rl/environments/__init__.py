"""Environments, one file each; importing this package registers them (rl/environments/base.py)."""

# Imported for what they register alone.
from earlyfusion.rl.environments import (  # noqa: F401
    functions,
    gym,
    openenv,
    python,
    swarm,
    verifiers,
    website,
)
