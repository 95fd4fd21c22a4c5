"""The side of Megatron-Energon in `earlyfusion bench data`: its dataset, its task encoder, its savable
loader.

The work on one sample is that of the webdataset side (Pillow decodes, bicubic, cutting, the same ids), so
what differs is the reading, the workers and, in loading, Energon's own packing hooks: documents are laid end
to end up to `length`. Energon is no dependency; `found` says whether it is here and how to get it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from earlyfusion.pipeline.bench.data.plain import (
    ENERGON_INSTALL,
    PlainSample,
    Request,
    pil_patches,
    vision_of,
)

PACKING_BUFFER = 100
"""Samples from which the packing hook chooses, as in Energon's own example of packing."""


def found(request: Request) -> dict[str, str | None]:
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
    groups: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fits = next((group for group, room in enumerate(free) if room >= sizes[index]), None)
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

    cfg, plain = vision_of(request), PlainSample(request)

    class Encoder(TaskEncoder):  # type: ignore[misc]
        decoder = SampleDecoder(image_decode="pil")

        @stateless
        def encode_sample(self, sample: Any) -> dict[str, Any]:
            if "length" not in request:
                return _document(sample, patches=pil_patches(sample.image, cfg)[0])
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


def patches(request: Request) -> Iterator[torch.Tensor]:
    """Patches of every picture in the order of the shards, again and again, without worker processes."""
    from megatron.energon import WorkerConfig, get_loader, get_train_dataset

    dataset = get_train_dataset(
        prepare(request["shards"]),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=None,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        shuffle_over_epochs_multiplier=None,
        parallel_shard_iters=1,
        task_encoder=_task_encoder(request),
    )
    for sample in get_loader(dataset):
        yield sample["patches"]


def packed(request: Request, *, shuffle: int | None = 256, repeat: bool = True) -> Any:
    """Energon's dataset of packed rows; `shuffle` samples in its buffer, one epoch or without end."""
    from megatron.energon import WorkerConfig, get_train_dataset

    return get_train_dataset(
        prepare(request["shards"]),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=request["workers"]),
        batch_size=None,
        shuffle_buffer_size=shuffle,
        max_samples_per_sequence=None,
        packing_buffer_size=PACKING_BUFFER,
        task_encoder=_task_encoder(request),
        repeat=repeat,
    )


def batches(request: Request) -> Iterator[dict[str, Any]]:
    """What each packed row holds, from Energon's savable loader with its shuffle buffer and its packing."""
    from megatron.energon import get_savable_loader

    for row in get_savable_loader(packed(request)):
        yield {
            "samples": row["documents"],
            "tokens": len(row["ids"]),
            "positions": max(len(row["ids"]), request["length"]),
            "patches": row["patches"].shape[0],
            "media_bytes": row["patches"].numel(),
        }
