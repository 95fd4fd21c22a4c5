"""The decoupled encoder process (DEP): the pictures of a whole step are encoded before the decoder begins.

    all pictures of the step, dealt over all ranks by their cost -> tower without activations, in pieces
    features home -> decoder passes, features as leaves -> gradients back to who encoded them
    the same pieces once more, with activations, and their backward

What is gained: vision work is even whatever rank a picture lies on, and no activation of the tower is alive
while the decoder runs. What it costs: one more forward pass of the tower. Gradients are those of the joint
backward pass. A rank without pictures takes part with empty pieces, as many as anybody has.

A picture that costs more than an even share of the step is encoded by all ranks together, each a stretch of
its tokens: what looks at one patch (projections, norms, feed-forward) is the same on a stretch, attention
gathers the keys and values of all.

It is the exchange of vision/balance.py, over one step in place of one micro-batch. Source: Kimi K2.5 report
(arXiv 2602.02276) section 4.5.1.

Legend: M merged vision tokens, D hidden size, P patches, L of them on one rank, C width of the tower, H
heads, K head dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.data.loading.encode import PackedBatch
from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.parallel.context import gather
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.vision.balance import Route, exchange
from earlyfusion.vision.encoder import EncoderBlock, ShareGrid, VisionTower
from earlyfusion.vision.patches import Grid, Share, VisionCost, num_tokens


@dataclass(frozen=True)
class Shared(Segments):
    """The patches of one picture on this rank, beside those of the others. sizes: on every rank of
    `group`."""

    sizes: tuple[int, ...] = ()
    group: Any = None


def attend(block: EncoderBlock, x_LC: Tensor, turns_LK: Tensor, segments: Segments) -> Tensor:
    """`EncoderBlock.attend`, also of a shared picture."""
    if not isinstance(segments, Shared):
        return EncoderBlock.attend(block, x_LC, turns_LK, segments)
    qkv_L3HK = block.wqkv(x_LC).view(-1, 3, block.num_heads, block.head_dim)
    q_LHK, k_LHK, v_LHK = resolve("qkv_rope", x_LC)(qkv_L3HK, turns_LK)
    # Gathered in equal parts, of which the filler is dropped again.
    filler = max(segments.sizes) - segments.total
    kv_L2HK = F.pad(torch.stack([k_LHK, v_LHK], dim=1), (0, 0, 0, 0, 0, 0, 0, filler))
    every = gather(kv_L2HK, segments.group)
    kv_P2HK = torch.cat([part[:size] for part, size in zip(every, segments.sizes)])
    k_HPK, v_HPK = kv_P2HK.permute(1, 2, 0, 3)
    # torch's own attention: the project's takes as many queries as keys.
    o_1HLK = F.scaled_dot_product_attention(
        q_LHK.transpose(0, 1)[None], k_HPK[None], v_HPK[None], scale=block.head_dim**-0.5
    )
    return block.wo(o_1HLK[0].transpose(0, 1).flatten(1))


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
        # Only of the project's own tower is it known where the patches of a picture meet.
        tower: Any = self.model.vision_tower
        plan = exchange(window, self.cost, self.merge, shared=isinstance(tower, VisionTower))
        self.route = Route(plan, self.runtime.rank, self.group)
        self.held = self.route.held
        if any(isinstance(grid, Share) for grid in self.held):
            for block in tower.encoder.blocks:
                block.attend = partial(attend, block)
        patches = self.route.send_patches(torch.cat([batch.patches for batch in batches]))
        # The empty one gives pieces without pictures their shape.
        self.patches = [*patches.split([plan.patches_of(grid) for grid in self.held]), patches[:0]]
        self.tokens = [plan.tokens_of(grid) for grid in self.held]

        found: list[Tensor] = [torch.empty(0)] * len(self.held)
        with torch.no_grad():
            for piece in self.pieces():
                features = self.encode(piece)
                for i, part in zip(piece, features.split([self.tokens[i] for i in piece])):
                    found[i] = part
        # (A piece comes also to a rank without pictures.)
        self.encoded = torch.cat([features[:0], *found]).requires_grad_()
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
        parts = encoded_grad.split(self.tokens)
        for piece in self.pieces():
            self.encode(piece).backward(torch.cat([encoded_grad[:0], *(parts[i] for i in piece)]))

    def encode(self, piece: Sequence[int]) -> Tensor:
        """Features [M, D] of these of the pictures and shares held."""
        patches = torch.cat([self.patches[-1], *(self.patches[i] for i in piece)])
        grids: Any = [self.held[i] for i in piece]
        if grids and isinstance(grids[0], Share):
            grids = self.shared(grids[0])
        with self.runtime.accelerator.autocast():
            features: Tensor = self.model.within(self.model.encode_images, patches, grids)
        return features.to(torch.promote_types(features.dtype, torch.float32))

    def shared(self, share: Share) -> ShareGrid:
        """What the tower reads of a shared picture."""
        sizes = tuple(share._replace(rank=rank).patches(self.merge) for rank in range(share.ranks))
        segments = Shared((sizes[share.rank],), sizes=sizes, group=self.group)
        return ShareGrid.of(share, self.model.config.vision, segments)

    def pieces(self) -> Iterator[list[int]]:
        """What this rank encodes at a time, by its place in `held`: pictures of at most `max_patches`
        together, then shared ones one by one. As many pieces as any rank has: sharded weights are gathered
        for each."""
        found: list[list[int]] = [[]]
        filled = 0
        for i, grid in enumerate(self.held):
            if isinstance(grid, Share):
                continue
            size = len(self.patches[i])
            if found[-1] and self.limit is not None and filled + size > self.limit:
                found.append([])
                filled = 0
            found[-1].append(i)
            filled += size
        yield from found
        yield from ([] for _ in range(self.runtime.agree(len(found)) - len(found)))
        # All ranks hold their shares in the same order.
        yield from ([i] for i, grid in enumerate(self.held) if isinstance(grid, Share))
