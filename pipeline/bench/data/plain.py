"""What everybody writes around webdataset: .decode("pil"), Pillow's bicubic, cutting, torch's DataLoader and
padding.

One side of `earlyfusion bench data`; the side of Megatron-Energon shares its work on a single sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image as PILImage

from earlyfusion.data.vocabulary import embedded_tokenizer
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import grid_of, navit_size, num_tokens, patchify, to_rgb

Request = dict[str, Any]
ENERGON_INSTALL = "pip install megatron-energon"


def vision_of(request: Request) -> VisionConfig:
    """The preset's patches with the image budget asked for."""
    return VisionConfig.preset("moonvit_v2", in_patch_limit=request["patch_limit"])


def pil_patches(image: PILImage.Image, cfg: VisionConfig) -> tuple[torch.Tensor, int]:
    """What everybody writes: Pillow bicubic to the size, pad, cut; (patches, tokens)."""
    rgb = to_rgb(image)
    size = navit_size(*rgb.size, cfg)
    canvas = np.zeros((1, size.height, size.width, 3), np.uint8)
    if rgb.size != (size.new_w, size.new_h):
        rgb = rgb.resize((size.new_w, size.new_h), PILImage.Resampling.BICUBIC)
    canvas[0, : size.new_h, : size.new_w] = np.asarray(rgb)
    return patchify(canvas, cfg.patch_size), num_tokens(grid_of(size, cfg), cfg.merge_kernel_size)


def patches(request: Request) -> Iterator[torch.Tensor]:
    """Patches of every picture in the order of the shards, again and again."""
    import webdataset

    cfg = vision_of(request)
    shards = webdataset.WebDataset(request["shards"], shardshuffle=False).decode("pil").repeat()
    for sample in shards:
        yield pil_patches(sample["jpg"], cfg)[0]


class PlainSample:
    """One sample of webdataset -> token ids and patches; a class, since workers may be spawned."""

    def __init__(self, request: Request) -> None:
        self.cfg, self.tokenizer = vision_of(request), embedded_tokenizer()

    def __call__(self, sample: tuple[PILImage.Image, str]) -> tuple[torch.Tensor, torch.Tensor]:
        patches, count = pil_patches(sample[0], self.cfg)
        token = self.tokenizer
        ids = [token.bos_id, *[token.media_pad_id] * count, *token.encode(sample[1]), token.eos_id]
        return torch.tensor(ids), patches


def padded(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """torch's usual collation: every row as long as the longest."""
    rows = [ids for ids, _ in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    return {"ids": ids, "patches": torch.cat([patches for _, patches in samples])}


def counts(batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """What a padded batch holds."""
    return {
        "samples": batch["ids"].shape[0],
        "tokens": int((batch["ids"] >= 0).sum()),
        "positions": batch["ids"].numel(),
        "patches": batch["patches"].shape[0],
        "media_bytes": batch["patches"].numel(),
    }


def batches(request: Request) -> Iterator[dict[str, Any]]:
    """What each padded batch holds, from torch's DataLoader."""
    import webdataset

    shards = webdataset.WebDataset(
        request["shards"],
        shardshuffle=100,
        seed=0,
        empty_check=False,
        nodesplitter=webdataset.split_by_node,
        workersplitter=webdataset.split_by_worker,
    )
    samples = shards.shuffle(256).decode("pil").to_tuple("jpg", "txt").map(PlainSample(request)).repeat()
    loader = torch.utils.data.DataLoader(
        samples, batch_size=request["rows"], num_workers=request["workers"], collate_fn=padded
    )
    for batch in loader:
        yield counts(batch)
