"""Image features, computed once per picture: a least-recently-used memory keyed by the content of the
patches.

On a CPU every picture goes through the tower by itself, so its features do not depend on what else is asked
at the time. On a GPU, where a tower over small pictures is all launches, those of all new requests go
together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from earlyfusion.model.engine.batch import exact_rows
from earlyfusion.model.engine.state import RequestState, Sample
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.vision.patches import num_tokens

Grid = tuple[int, int, int]
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

    def attach(self, states: Sequence[RequestState], reading: Sequence[Sample]) -> None:
        """Give features to those requests that have pictures still to be read."""
        waiting = set()
        for sample in reading:
            positions = sample.parent.media_positions
            if positions and sample.length <= positions[-1]:
                waiting.add(sample.parent)
        asked = [state for state in states if state in waiting]
        for state, features in zip(asked, self.features(asked)):
            state.features = features

    @torch.no_grad()
    def features(self, asked: Sequence[RequestState]) -> list[Tensor]:
        """Features of every request's pictures in order."""
        pictures: dict[bytes, tuple[Grid, Tensor]] = {}
        for state in asked:
            prompt = state.request.prompt
            assert prompt.patches is not None
            parts = prompt.patches.split([t * h * w for t, h, w in prompt.grids])
            pictures |= zip(state.digests, zip(prompt.grids, parts))

        # What is remembered becomes the most recently used; the rest goes through the tower.
        found = {name: self._features.pop(name) for name in pictures if name in self._features}
        missing = {name: picture for name, picture in pictures.items() if name not in found}
        self.encoded += len(missing)
        self.hits += sum(len(state.digests) for state in asked) - len(missing)
        for some in self._passes(missing):
            found |= zip(some, self._encode([missing[name] for name in some]))
        self._features |= found
        while len(self._features) > self.limit:
            self._features.popitem(last=False)
        return [torch.cat([found[name] for name in state.digests]) for state in asked]

    def _passes(self, pictures: Mapping[bytes, tuple[Grid, Tensor]]) -> Iterator[list[bytes]]:
        """Names of the pictures that go through the tower together."""
        some: list[bytes] = []
        total = 0
        for name, (_, patches) in pictures.items():
            if some and total + patches.shape[0] > self.together:
                yield some
                some, total = [], 0
            some.append(name)
            total += patches.shape[0]
        if some:
            yield some

    def _encode(self, pictures: Sequence[tuple[Grid, Tensor]]) -> Sequence[Tensor]:
        """One pass of the tower."""
        grids = [grid for grid, _ in pictures]
        patches = torch.cat([patches for _, patches in pictures]).to(self.device)
        merge = self.model.config.vision.merge_kernel_size
        return self.model.encode_images(patches, grids).split([num_tokens(grid, merge) for grid in grids])
