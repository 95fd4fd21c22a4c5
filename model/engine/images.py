"""Image features, computed once per picture: a least-recently-used memory keyed by the content of the
patches.

On a CPU every picture goes through the tower by itself, so its features do not depend on what else is asked
at the time. On a GPU, where a tower over small pictures is all launches, those of all new requests go
together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from earlyfusion.model.engine.batch import exact_rows
from earlyfusion.model.engine.state import RequestState
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.vision.patches import num_patches, num_tokens

TOGETHER = 65_536
"""Patches in one pass of the tower, but for a picture that has more."""


class ImageMemory:
    """Features [M, D] by digest, at most `limit` pictures. `encoded` and `hits` count its work."""

    def __init__(self, model: NativeFusion, limit: int) -> None:
        self.model, self.limit, self.device = model, limit, model.decoder.embed_tokens.weight.device
        self.together = 0 if exact_rows(self.device) else TOGETHER
        self.encoded = self.hits = 0
        self._features: OrderedDict[bytes, Tensor] = OrderedDict()

    def clear(self) -> None:
        """Forget everything; the weights have changed."""
        self._features.clear()

    @torch.no_grad()
    def attach(self, states: Sequence[RequestState]) -> None:
        """Give features to requests that have pictures still to be read."""
        # A resumed answer has read its pictures; encoding them again would be work for nobody.
        states = [state for state in states if self._waits(state)]
        known: dict[bytes, Tensor] = {}
        batch: dict[bytes, Tensor] = {}
        grids: list[tuple[int, int, int]] = []
        for state in states:
            prompt = state.request.prompt
            assert prompt.patches is not None
            parts = prompt.patches.split([num_patches(grid) for grid in prompt.grids])
            for name, grid, patches in zip(state.digests, prompt.grids, parts):
                if name in self._features:
                    known[name] = self._features.pop(name)
                if name in known or name in batch:
                    self.hits += 1
                    continue
                # A pass that is full goes first.
                if batch and sum(map(len, batch.values())) + len(patches) > self.together:
                    known |= self._encode(batch, grids)
                    batch, grids = {}, []
                batch[name] = patches
                grids.append(grid)
        if batch:
            known |= self._encode(batch, grids)

        # What was just used is kept longest.
        self._features |= known
        while len(self._features) > self.limit:
            self._features.popitem(last=False)
        for state in states:
            state.features = torch.cat([known[name] for name in state.digests])

    @staticmethod
    def _waits(state: RequestState) -> bool:
        """Whether a sample that has a slot still has to read a picture (a resumed one has not)."""
        last = max(state.media_positions, default=-1)
        return any(sample.slot and sample.length <= last for sample in state.alive)

    def _encode(
        self, batch: dict[bytes, Tensor], grids: Sequence[tuple[int, int, int]]
    ) -> dict[bytes, Tensor]:
        """Features by digest, in one pass of the tower."""
        self.encoded += len(batch)
        # One pass: the tower keeps pictures apart, whatever stands beside them.
        features = self.model.encode_images(torch.cat(list(batch.values())).to(self.device), grids)
        merge = self.model.config.vision.merge_kernel_size
        return dict(zip(batch, features.split([num_tokens(grid, merge) for grid in grids])))
