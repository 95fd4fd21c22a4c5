"""Who encodes which picture in a training step: the ranks' grids, one plan, and a route for every
micro-batch.

Training steps only: evaluation calls the model without a route, so that one rank may evaluate while others
wait. `parallel.exchange_pictures` turns it on; the plan decides, on all ranks alike, whether a step is worth
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from earlyfusion.kernels.errors import UserError
from earlyfusion.model.config import FusionConfig
from earlyfusion.pipeline.config.schema import ParallelSection
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.vision.balance import Route, VisionCost, complaint, gather_grids, plan_step

# Largest over mean vision FLOPs of the ranks. Handing pictures over costs two collectives a step; where the
# ranks' work differs by less than a tenth there is little to win by it.
EXCHANGE_ABOVE = 1.1


class PictureExchange:
    """Plans the exchange of a step; idle with one rank, or where the recipe turns it off.

    Its collectives run in groups of their own, so that they cannot meet the gradient all-reduces that DDP
    starts while the backward pass runs. Raises UserError when the ranks were started with different settings.
    """

    def __init__(self, section: ParallelSection, config: FusionConfig, runtime: Runtime) -> None:
        self.runtime, self.vision = runtime, config.vision
        self.cost = VisionCost.from_config(config.vision)
        self.setting = section.exchange_pictures if runtime.world > 1 else "off"
        self.above = 1.0 if self.setting == "on" else EXCHANGE_ABOVE
        if runtime.world == 1:
            return
        # Ranks with different settings would wait for one another for ever.
        if len(set(runtime.gather(self.setting))) > 1:
            raise UserError(
                f"parallel.exchange_pictures is {self.setting!r} on rank {runtime.rank} and something else on"
                " another: start all ranks with the same recipe"
            )
        if self.setting != "off":
            self.group = self.planning = dist.new_group()
            if dist.is_gloo_available():
                # Grids are host numbers: over gloo they reach the other hosts without a wait for the device.
                self.planning = dist.new_group(backend="gloo")

    def routes(self, batches: Sequence[Any], max_patches: int | None = None) -> list[Route | None]:
        """A route for each of this rank's micro-batches; None: encode the own pictures.

        max_patches: most patches that a rank may get to encode in a micro-batch. Every rank calls it, once a
        step. Raises UserError, on all ranks, where they disagree.
        """
        # No route: every rank encodes what it holds.
        nothing: list[Route | None] = [None] * len(batches)
        if self.setting == "off":
            return nothing
        merge = self.vision.merge_kernel_size
        grids = gather_grids(
            [batch.grids for batch in batches],
            self.planning,
            # everything that plan and tensors depend on beside the grids
            repr((self.setting, self.above, max_patches, self.vision)),
            complaint(batches, merge),
        )
        # The same plan on every rank, from the same grids; it may say that the step is not worth it.
        plan = plan_step(grids, self.cost, merge, max_patches)
        if not plan.pays(self.above):
            return nothing
        # A micro-batch in which nothing moves needs no collective at all.
        rank = self.runtime.rank
        return [Route(part, rank, self.group) if part.moves else None for part in plan.parts]
