"""Image features, computed once per picture: a least-recently-used memory keyed by the content of the
patches.

On a CPU every picture goes through the tower by itself, so its features do not depend on what else is asked
at the time. On a GPU, where a tower over small pictures is all launches, those of all new requests go
together.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from earlyfusion.model.engine.request import Prompt, RequestError
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.vision.patches import num_tokens

Grid = tuple[int, int, int]
TOGETHER = 65_536
"""Patches in one pass of the tower, but for a picture that has more."""


def picture_digests(patches: Tensor | None, grids: Sequence[Grid]) -> list[bytes]:
    """16 bytes per picture over its size and patches. Raises RequestError when patches and grids disagree."""
    counts = [t * h * w for t, h, w in grids]
    given = 0 if patches is None else int(patches.shape[0])
    if sum(counts) != given:
        raise RequestError(
            f"the prompt's grids {list(grids)[:4]} need {sum(counts)} patches, {given} were given"
        )
    if patches is None:
        return []
    digests = []
    for grid, part in zip(grids, patches.split(counts)):
        state = hashlib.blake2b(repr(tuple(grid)).encode(), digest_size=16)
        state.update(part.contiguous().cpu().numpy().tobytes())
        digests.append(state.digest())
    return digests


class ImageMemory:
    """Features [M, D] by digest, at most `limit` pictures. `encoded` and `hits` count its work."""

    def __init__(self, model: NativeFusion, limit: int) -> None:
        self.model, self.limit, self.device = model, limit, model.decoder.embed_tokens.weight.device
        self.encoded = self.hits = 0
        self._features: OrderedDict[bytes, Tensor] = OrderedDict()

    def clear(self) -> None:
        """Forget everything; the weights have changed."""
        self._features.clear()

    @torch.no_grad()
    def features(self, asked: Sequence[tuple[Prompt, Sequence[bytes]]]) -> list[Tensor | None]:
        """Features of every prompt's pictures in order; None for a prompt without pictures. asked: (prompt,
        digests)."""
        pictures: dict[bytes, tuple[Grid, Tensor]] = {}
        for prompt, digests in asked:
            if prompt.patches is not None:
                parts = prompt.patches.split([t * h * w for t, h, w in prompt.grids])
                pictures |= zip(digests, zip(prompt.grids, parts))
        found = {name: self._features.pop(name) for name in pictures if name in self._features}
        missing = {name: picture for name, picture in pictures.items() if name not in found}
        self.encoded += len(missing)
        self.hits += sum(len(digests) for _, digests in asked) - len(missing)
        for some in self._passes(missing):
            found |= zip(some, self._encode([missing[name] for name in some]))
        self._features |= found
        while len(self._features) > self.limit:
            self._features.popitem(last=False)
        return [torch.cat([found[name] for name in digests]) if digests else None for _, digests in asked]

    def _passes(self, pictures: Mapping[bytes, tuple[Grid, Tensor]]) -> Iterator[list[bytes]]:
        """Names of the pictures that go through the tower together."""
        most = 0 if self.device.type == "cpu" else TOGETHER
        some: list[bytes] = []
        total = 0
        for name, (_, patches) in pictures.items():
            if some and total + patches.shape[0] > most:
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
