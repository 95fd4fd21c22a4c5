"""The sides of `earlyfusion bench data`: ours, webdataset's, Megatron-Energon's.

Sides of one comparison read the same shards and end with the same arrays: uint8 patches, padded to whole
tokens by the navit rule. webdataset's side is what everybody writes around it: .decode("pil"), Pillow's
bicubic, cutting, torch's DataLoader and padding. Energon's side shares the work on one sample with it, so
what differs is the reading, the workers and, in loading, Energon's own packing hooks: documents are laid end
to end up to `length`. Energon is no dependency; `energon_here` says whether it is there and how to get it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
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
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import grid_of, navit_size, num_tokens, patchify, to_rgb

Request = dict[str, Any]
Counts = dict[str, int]
ENERGON_INSTALL = "pip install megatron-energon"
PACKING_BUFFER = 100
"""Samples from which the packing hook chooses, as in Energon's own example of packing."""


def vision_of(patch_limit: int) -> VisionConfig:
    """The preset's patches with the image budget asked for."""
    return VisionConfig.preset("moonvit_v2", in_patch_limit=patch_limit)


def patches_of(side: str, request: Request) -> Iterator[torch.Tensor]:
    """Patches of every picture in the order of the shards, again and again."""
    if side == "webdataset":
        return plain_patches(request)
    if side == "energon":
        return energon_patches(request)
    return our_patches(request, fast=side == "ours")


def batches_of(side: str, request: Request) -> Iterator[Counts]:
    """What each batch holds that reaches the training process."""
    if side == "webdataset":
        return plain_batches(request)
    if side == "energon":
        return energon_batches(request)
    return our_batches(request)


def counts(samples: int, tokens: int, positions: int, patches: Sequence[torch.Tensor]) -> Counts:
    """What a batch holds."""
    return {
        "samples": samples,
        "tokens": tokens,
        "positions": positions,
        "patches": sum(len(one) for one in patches),
        "media_bytes": sum(one.numel() for one in patches),
    }


# ---- Ours.


def source_config(request: Request) -> SourceConfig:
    """The shards as a source of the loader."""
    return SourceConfig(name="shards", kind="webdataset", options={"shards": request["shards"]})


def our_patches(request: Request, fast: bool) -> Iterator[torch.Tensor]:
    cfg, decode = vision_of(request["patch_limit"]), DecodeConfig(fast=fast)
    source = build_source(source_config(request), val_fraction=0.0)
    for index in cycle(range(len(source))):
        picture = next(segment for segment in source.get(index, 0).segments if isinstance(segment, Image))
        yield decode_picture(picture.image, cfg, decode).items[0][0]


def our_batches(request: Request) -> Iterator[Counts]:
    workers, length, tokenizer = request["workers"], request["length"], embedded_tokenizer()
    data = DataConfig(
        sources=[source_config(request)],
        val_fraction=0.0,
        prefetch="process" if workers else "none",
        workers=max(1, workers),
    )
    with Loader(
        data,
        tokenizer,
        vision_of(request["patch_limit"]),
        length=length,
        tokens=length,
        max_patches=4 * length,
        lanes=max(1, workers),
    ) as loader:
        for batches in iter(loader.next_step, None):
            yield counts(
                sum(int((batch.ids == tokenizer.bos_id).sum()) for batch in batches),
                sum(batch.num_tokens for batch in batches),
                sum(len(batch.ids) for batch in batches),
                [batch.patches for batch in batches],
            )


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

    def __init__(self, patch_limit: int) -> None:
        self.cfg, self.tokenizer = vision_of(patch_limit), embedded_tokenizer()

    def __call__(self, sample: tuple[PILImage.Image, str]) -> tuple[torch.Tensor, torch.Tensor]:
        patches, count = pil_patches(sample[0], self.cfg)
        token = self.tokenizer
        ids = [token.bos_id, *[token.media_pad_id] * count, *token.encode(sample[1]), token.eos_id]
        return torch.tensor(ids), patches


def padded(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's usual collation: every row as long as the longest, filled up with -1."""
    ids, patches = zip(*samples)
    rows = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True, padding_value=-1)
    return rows, torch.cat(patches)


def plain_patches(request: Request) -> Iterator[torch.Tensor]:
    import webdataset

    cfg = vision_of(request["patch_limit"])
    for sample in webdataset.WebDataset(request["shards"], shardshuffle=False).decode("pil").repeat():
        yield pil_patches(sample["jpg"], cfg)[0]


def plain_batches(request: Request) -> Iterator[Counts]:
    import webdataset

    shards = webdataset.WebDataset(
        request["shards"],
        shardshuffle=100,
        seed=0,
        empty_check=False,
        nodesplitter=webdataset.split_by_node,
        workersplitter=webdataset.split_by_worker,
    )

    # A shuffle buffer of the size that its documentation shows.
    made = PlainSample(request["patch_limit"])
    samples = shards.shuffle(256).decode("pil").to_tuple("jpg", "txt").map(made).repeat()
    loader = torch.utils.data.DataLoader(
        samples, batch_size=request["rows"], num_workers=request["workers"], collate_fn=padded
    )
    for rows, patches in loader:
        yield counts(len(rows), int((rows >= 0).sum()), rows.numel(), [patches])


# ---- Megatron-Energon's.


def energon_here() -> dict[str, str | None]:
    """Its version, or the problem: why it cannot be imported here, with the line that installs it."""
    try:
        from megatron import energon
    except ModuleNotFoundError as error:
        return {"version": None, "problem": f"not installed, {error.name} is missing ({ENERGON_INSTALL})"}
    except Exception as error:  # native parts built for another Python, say
        return {"version": None, "problem": f"does not load: {type(error).__name__}: {error}"}
    return {"version": energon.__version__, "problem": None}


def prepare(shards: Sequence[str]) -> Path:
    """What `energon prepare` makes of the tar files, written once: index, info, split and dataset.yaml in
    `.nv-meta`.

    All shards lie in one folder, which is returned; every shard goes to the train split.
    """
    from megatron.energon import CaptioningSample
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
    definition = {
        "sample_type": {"__module__": "megatron.energon", "__class__": CaptioningSample.__name__},
        "field_map": {"image": "jpg", "caption": "txt"},
    }
    described.write_text(json.dumps(definition))  # JSON is YAML
    return root


def first_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Indices of `sizes` in groups whose sums are at most `length`, the largest first; a larger one stands
    alone."""
    # First fit decreasing: at most 11/9 of the best packing.
    groups: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fits = next((group for group, left in enumerate(free) if left >= sizes[index]), None)
        if fits is None:
            groups.append([])
            free.append(length)
            fits = len(groups) - 1
        groups[fits].append(index)
        free[fits] -= sizes[index]
    return groups


def _document(sample: Any, **fields: Any) -> dict[str, Any]:
    """A dict that Energon can find again: its keys, and what the side needs."""
    return {"__key__": sample.__key__, "__restore_key__": sample.__restore_key__, **fields}


def _task_encoder(request: Request) -> Any:
    """Energon's TaskEncoder around the work on one sample; without a `length` it makes patches alone."""
    from megatron.energon import SampleDecoder, TaskEncoder, stateless

    plain = PlainSample(request["patch_limit"])

    class Encoder(TaskEncoder):  # type: ignore[misc]
        decoder = SampleDecoder(image_decode="pil")

        @stateless
        def encode_sample(self, sample: Any) -> dict[str, Any]:
            if "length" not in request:
                return _document(sample, patches=pil_patches(sample.image, plain.cfg)[0])
            ids, patches = plain((sample.image, sample.caption))
            return _document(sample, ids=ids, patches=patches, documents=1)

        def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
            groups = first_fit([len(sample["ids"]) for sample in samples], request["length"])
            return [[samples[index] for index in group] for group in groups]

        @stateless
        def pack_selected_samples(self, samples: list[Any]) -> dict[str, Any]:
            return {
                "__key__": ",".join(sample["__key__"] for sample in samples),
                "__restore_key__": (),
                "ids": torch.cat([sample["ids"] for sample in samples]),
                "patches": torch.cat([sample["patches"] for sample in samples]),
                "documents": len(samples),
            }

    return Encoder()


def _energon_dataset(request: Request, workers: int, shuffle: int | None, **options: Any) -> Any:
    from megatron.energon import WorkerConfig, get_train_dataset

    return get_train_dataset(
        prepare(request["shards"]),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers),
        batch_size=None,
        shuffle_buffer_size=shuffle,
        max_samples_per_sequence=None,
        task_encoder=_task_encoder(request),
        **options,
    )


def energon_patches(request: Request) -> Iterator[torch.Tensor]:
    """In the order of the shards, without worker processes."""
    from megatron.energon import get_loader

    in_order = {"shuffle_over_epochs_multiplier": None, "parallel_shard_iters": 1}
    for sample in get_loader(_energon_dataset(request, 0, None, **in_order)):
        yield sample["patches"]


def energon_packed(request: Request, *, shuffle: int | None = 256, repeat: bool = True) -> Any:
    """Energon's dataset of packed rows; `shuffle` samples in its buffer, one epoch or without end."""
    options = {"packing_buffer_size": PACKING_BUFFER, "repeat": repeat}
    return _energon_dataset(request, request["workers"], shuffle, **options)


def energon_batches(request: Request) -> Iterator[Counts]:
    """From Energon's savable loader with its shuffle buffer and its packing."""
    from megatron.energon import get_savable_loader

    for row in get_savable_loader(energon_packed(request)):
        tokens = len(row["ids"])
        yield counts(row["documents"], tokens, max(tokens, request["length"]), [row["patches"]])
