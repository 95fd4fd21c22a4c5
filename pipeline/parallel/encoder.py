"""The decoupled encoder process (DEP): the pictures of a whole step are encoded before the decoder begins.

    all pictures of the step, dealt over all ranks by their cost -> tower without activations, in pieces
    features home -> decoder passes, features as leaves -> gradients back to who encoded them
    the same pieces once more, with activations, and their backward

What is gained: vision work is even whatever rank a picture lies on, and no activation of the tower is alive
while the decoder runs. What it costs: one more forward pass of the tower. Gradients are those of the joint
backward pass. A rank without pictures takes part with empty pieces, as many as anybody has.

It is the exchange of vision/balance.py, over one step in place of one micro-batch. Source: Kimi K2.5 report
(arXiv 2602.02276) section 4.5.1.

Legend: M merged vision tokens, D hidden size, P patches.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from earlyfusion.data.loading.encode import PackedBatch
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.vision.balance import Route, exchange
from earlyfusion.vision.patches import Grid, VisionCost, num_patches, num_tokens


class DecoupledEncoder:
    """One step's pictures. `begin` gives the features of every micro-batch, `end` takes their gradients."""

    def __init__(
        self, model: NativeFusion, runtime: Runtime, group: Any, cost: VisionCost, max_patches: int | None
    ) -> None:
        self.model, self.runtime, self.group = model, runtime, group
        self.cost, self.limit = cost, max_patches
        self.merge = model.config.vision.merge_kernel_size

    def begin(
        self, batches: Sequence[PackedBatch], grids: Sequence[Sequence[Sequence[Grid]]]
    ) -> list[Tensor]:
        """Features [M, D] of the pictures of each micro-batch, as leaves that want a gradient. grids[r][k]:
        of micro-batch k of rank r."""
        window = [[grid for part in rank for grid in part] for rank in grids]
        plan = exchange(window, self.cost, self.merge)
        self.route = Route(plan, self.runtime.rank, self.group)
        patches = torch.cat([batch.patches for batch in batches])
        self.patches, self.held = self.route.send_patches(patches), self.route.held

        with torch.no_grad():
            parts = [self.encode(*piece) for piece in self.pieces()]
        self.encoded = torch.cat(parts).requires_grad_()
        self.home = self.route.bring_home(self.encoded)
        sizes = [sum(num_tokens(grid, self.merge) for grid in batch.grids) for batch in batches]
        self.leaves = [part.detach().requires_grad_() for part in self.home.split(sizes)]
        return self.leaves

    def end(self) -> None:
        """Add the tower's and projector's gradients, of what the decoder has left in the leaves."""
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves]
        self.home.backward(torch.cat(grads))
        encoded_grad = self.encoded.grad
        assert encoded_grad is not None
        start = 0
        for piece in self.pieces():
            features = self.encode(*piece)
            features.backward(encoded_grad[start : start + len(features)])
            start += len(features)

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        with self.runtime.accelerator.autocast():
            features: Tensor = self.model.within(self.model.encode_images, patches, grids)
        return features.float()

    def pieces(self) -> Iterator[tuple[Tensor, list[Grid]]]:
        """What this rank encodes, at most `max_patches` at a time, in as many pieces as any rank has: sharded
        weights are gathered for each."""
        found: list[list[Grid]] = [[]]
        filled = 0
        for grid in self.held:
            if found[-1] and self.limit is not None and filled + num_patches(grid) > self.limit:
                found.append([])
                filled = 0
            found[-1].append(grid)
            filled += num_patches(grid)
        start = 0
        for piece in found + [[] for _ in range(self.runtime.agree(len(found)) - len(found))]:
            end = start + sum(map(num_patches, piece))
            yield self.patches[start:end], piece
            start = end
