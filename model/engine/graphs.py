"""Decode steps as CUDA graphs: one per bucket of (rows, key positions, sampling needs), captured when first
met.

A step of a small model is bound by kernel launches; a graph replays all of them, sampling included, with one
call. The captured step reads its slot indices from a static tensor and everything else from the runner's
per-slot tensors, which keep their addresses for life. Warming up and capturing run on padding rows (slot 0),
so no sequence advances.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from earlyfusion.kernels.dispatch import pick
from earlyfusion.model.cache import FIRST_TILE, tiles
from earlyfusion.model.engine.sampler import Needs
from earlyfusion.model.moe import moe_layers

if TYPE_CHECKING:
    from earlyfusion.model.engine.runner import Runner
    from earlyfusion.model.fusion import NativeFusion


def can_capture(model: NativeFusion) -> bool:
    """On CUDA, and no operation waits for the host: the torch form of the experts does, except in
    bfloat16."""
    weight = model.decoder.embed_tokens.weight
    if weight.device.type != "cuda":
        return False
    return (
        not moe_layers(model)
        or weight.dtype == torch.bfloat16
        or pick("moe_experts", weight.device) == "triton"
    )


class DecodeGraphs:
    """Captured steps of a runner."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._captured: dict[tuple[int, int, Needs], tuple[Any, Tensor, Tensor]] = {}
        self._pool: Any = None

    def run(self, slots_B: Tensor, longest: int, needs: Needs, steps: int = 1) -> Tensor:
        """`Runner.graph_step` so many times without a look at what it chose: [steps, 3, B]. longest:
        positions of the longest sequence after the last step."""
        length = FIRST_TILE
        while length < longest:
            length *= 2
        length = tiles(length)[-1][1]
        key = (slots_B.shape[0], length, needs)
        if key not in self._captured:
            self._captured[key] = self._capture(slots_B.shape[0], length, needs)
        graph, static_B, chosen = self._captured[key]
        static_B.copy_(slots_B)
        kept_K3B = torch.empty((steps, *chosen.shape), dtype=chosen.dtype, device=chosen.device)
        for k in range(steps):
            graph.replay()
            kept_K3B[k].copy_(chosen)
        return kept_K3B

    def _capture(self, rows: int, length: int, needs: Needs) -> tuple[Any, Tensor, Tensor]:
        runner = self.runner
        static_B = torch.zeros(rows, dtype=torch.long, device=runner.device)
        step = lambda: runner.graph_step(static_B, length, needs)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            chosen = step()
        self._pool = graph.pool()
        return graph, static_B, chosen
