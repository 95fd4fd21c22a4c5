"""The sides of `earlyfusion bench data`: ours, webdataset's, in decoding also Megatron-Energon's.

Sides of one comparison read the same shards and end with the same arrays: uint8 patches, padded to whole
tokens by the navit rule. webdataset's side is what everybody writes around it: .decode("pil"), Pillow's
bicubic, cutting, torch's DataLoader and padding. Energon's side shares the work on one picture with it, so
what differs is the reading. Energon is no dependency; `energon` says how to get it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as PILImage

from earlyfusion.data.config import DataConfig
from earlyfusion.data.decode import decode_picture
from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.loading.loader import Loader
from earlyfusion.data.sample import Image
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.vocabulary import embedded_tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import grid_of, navit_size, num_tokens, patchify, to_rgb

Request = dict[str, Any]
"""shards, patch_limit; of whole loaders also workers, length (of a packed batch), rows (of a padded one)."""
Counts = Counter[str]
"""What reaches the training process: samples, tokens, positions, patches."""


def vision_of(request: Request) -> VisionConfig:
    """The preset's patches with the image budget asked for."""
    return VisionConfig.preset("moonvit_v2", in_patch_limit=request["patch_limit"])


# ---- Ours.


def shards_of(request: Request) -> SourceConfig:
    """The shards as a source of the loader."""
    return SourceConfig(name="shards", kind="webdataset", options={"shards": request["shards"]})


def our_patches(request: Request, fast: bool = True) -> Iterator[torch.Tensor]:
    cfg, decode = vision_of(request), DecodeConfig(fast=fast)
    source = build_source(shards_of(request), val_fraction=0.0)
    # Without end: the caller says how much is timed.
    for index in cycle(range(len(source))):
        for segment in source.get(index, 0).segments:
            if isinstance(segment, Image):
                yield decode_picture(segment.image, cfg, decode).items[0][0]


def our_batches(request: Request) -> Iterator[Counts]:
    workers, length, tokenizer = request["workers"], request["length"], embedded_tokenizer()
    prefetch = "process" if workers else "none"
    lanes = max(1, workers)
    data = DataConfig(sources=[shards_of(request)], val_fraction=0.0, prefetch=prefetch, workers=lanes)
    sizes = {"length": length, "tokens": length, "max_patches": 4 * length, "lanes": lanes}
    with Loader(data, tokenizer, vision_of(request), **sizes) as loader:
        for batches in iter(loader.next_step, None):
            found = Counts()
            for batch in batches:
                # A document begins with one of these, wherever packing has put it.
                found["samples"] += int((batch.ids == tokenizer.bos_id).sum())
                found["tokens"] += batch.num_tokens
                found["positions"] += len(batch.ids)
                found["patches"] += batch.num_patches
            yield found


# ---- webdataset's.


def pil_patches(image: PILImage.Image, cfg: VisionConfig) -> tuple[torch.Tensor, int]:
    """Pillow's bicubic to the size, pad, cut; (patches, tokens)."""
    # The same geometry as ours: what is compared is the way, not the size.
    rgb = to_rgb(image)
    size = navit_size(*rgb.size, cfg)
    canvas = np.zeros((1, size.height, size.width, 3), np.uint8)
    if rgb.size != (size.new_w, size.new_h):
        rgb = rgb.resize((size.new_w, size.new_h), PILImage.Resampling.BICUBIC)
    canvas[0, : size.new_h, : size.new_w] = np.asarray(rgb)
    return patchify(canvas, cfg.patch_size), num_tokens(grid_of(size, cfg), cfg.merge_kernel_size)


class PlainSample:
    """(picture, text) -> token ids and patches; a class, since workers may be spawned."""

    def __init__(self, cfg: VisionConfig) -> None:
        self.cfg, self.tokenizer = cfg, embedded_tokenizer()

    def __call__(self, sample: tuple[PILImage.Image, str]) -> tuple[torch.Tensor, torch.Tensor]:
        patches, count = pil_patches(sample[0], self.cfg)
        token = self.tokenizer
        # The tokens that our own encoding gives, so that counts compare.
        ids = [token.bos_id, *[token.media_pad_id] * count, *token.encode(sample[1]), token.eos_id]
        return torch.tensor(ids), patches


def padded(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's usual collation: every row as long as the longest, filled up with -1."""
    ids, patches = zip(*samples)
    rows = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True, padding_value=-1)
    return rows, torch.cat(patches)


def plain_patches(request: Request) -> Iterator[torch.Tensor]:
    import webdataset

    cfg = vision_of(request)
    for sample in webdataset.WebDataset(request["shards"], shardshuffle=False).decode("pil").repeat():
        yield pil_patches(sample["jpg"], cfg)[0]


def plain_batches(request: Request) -> Iterator[Counts]:
    import webdataset

    shards = webdataset.WebDataset(
        request["shards"], shardshuffle=100, seed=0, workersplitter=webdataset.split_by_worker
    )

    # A shuffle buffer of the size that its documentation shows.
    samples = shards.shuffle(256).decode("pil").to_tuple("jpg", "txt").map(PlainSample(vision_of(request)))
    for rows, patches in torch.utils.data.DataLoader(
        samples.repeat(), batch_size=request["rows"], num_workers=request["workers"], collate_fn=padded
    ):
        tokens = int((rows >= 0).sum())
        yield Counts(samples=len(rows), tokens=tokens, positions=rows.numel(), patches=len(patches))


# ---- Megatron-Energon's.


def prepare(shards: Sequence[str]) -> Path:
    """What `energon prepare` makes of the tar files, written once: index, info, split and dataset.yaml in
    `.nv-meta`.

    All shards lie in one folder, which is returned; every shard goes to the train split.
    """
    from megatron.energon.flavors import BaseWebdatasetFactory

    root = Path(shards[0]).parent
    described = root / ".nv-meta" / "dataset.yaml"
    if described.exists():
        return root
    with contextlib.redirect_stdout(sys.stderr):  # it prints; stdout carries the result
        BaseWebdatasetFactory.prepare_dataset(
            root,
            [Path(shard).name for shard in shards],
            split_parts_ratio=[("train", 1.0), ("val", 0.0), ("test", 0.0)],
            shuffle_seed=None,
            workers=1,
        )
    sample = {"__module__": "megatron.energon", "__class__": "CaptioningSample"}
    definition = {"sample_type": sample, "field_map": {"image": "jpg", "caption": "txt"}}
    described.write_text(json.dumps(definition))  # JSON is YAML
    return root


def energon_patches(request: Request) -> Iterator[torch.Tensor]:
    """In the order of the shards, without worker processes; the work on a picture is webdataset's side's.

    Raises UserError where it cannot be imported: it is not there, or its native parts are for another Python.
    """
    try:
        from megatron import energon
    except Exception as error:
        raise UserError(f"Megatron-Energon: {error}; pip install megatron-energon") from None
    there: Any = energon
    cfg = vision_of(request)

    class Encoder(there.TaskEncoder):  # type: ignore[misc, name-defined]
        decoder = there.SampleDecoder(image_decode="pil")

        @there.stateless  # type: ignore[untyped-decorator]
        def encode_sample(self, sample: Any) -> dict[str, Any]:
            keys = {"__key__": sample.__key__, "__restore_key__": sample.__restore_key__}
            return {**keys, "patches": pil_patches(sample.image, cfg)[0]}

    dataset = there.get_train_dataset(
        prepare(request["shards"]),
        worker_config=there.WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=None,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=Encoder(),
        shuffle_over_epochs_multiplier=None,
        parallel_shard_iters=1,
    )
    for sample in there.get_loader(dataset):
        yield sample["patches"]


PATCHES: dict[str, Callable[[Request], Iterator[torch.Tensor]]] = {
    "ours": our_patches,
    "ours-exact": partial(our_patches, fast=False),
    "webdataset": plain_patches,
    "energon": energon_patches,
}
"""Side -> patches of every picture in the order of the shards, again and again."""
BATCHES = {"ours": our_batches, "webdataset": plain_batches}
"""Side -> what each batch holds."""
