"""`earlyfusion bench data`: reading, decoding and packing, beside webdataset (and Megatron-Energon where it
is).

Part 1, decoding: JPEGs of 1024 x 768 from tar shards to patches, one core; beside webdataset's
.decode("pil"), Pillow's bicubic and the same cutting. Part 2, loading: the same pictures with captions of
many lengths to batches, with worker processes; beside webdataset with torch's DataLoader and padding. Sides
run in turn (A B A B ...), each in its own process. Everything is saved as JSON.

Sides of one comparison read the same shards and end with the same arrays: uint8 patches, padded to whole
tokens by the navit rule. Energon's side shares the work on one picture with webdataset's, so what differs is
the reading. Energon is no dependency: pip install megatron-energon.

With --recipe only the data of that recipe is measured: what a step's data takes, and how long a step that is
busy for --step-ms (`step_s` in the log of a run) waits for it. The recipe's first stage is loaded as training
loads it, by worker processes.
"""

import contextlib
import io
import json
import sys
import tarfile
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image as PILImage
from pydantic import Field, FiniteFloat, PositiveInt
from torch import Tensor

from earlyfusion.data.config import DataConfig
from earlyfusion.data.decode import decode_picture
from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.loading.loader import Loader
from earlyfusion.data.options import Options, verb
from earlyfusion.data.sample import Image
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.vocabulary import embedded_tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record
from earlyfusion.pipeline import build
from earlyfusion.pipeline.bench.frame import Result, alternate, compared, run_side, save_record
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.pipeline.stage_data import StageLoaders
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import grid_of, navit_size, num_tokens, patchify, to_rgb

SAMPLES, DIFFERENT, PER_SHARD = 1000, 32, 250
"""Samples in the shards, different pictures among them, samples of a shard."""
SIDES = (1024, 768)
"""Width and height of the pictures."""
WORDS = (
    "a red kite over the harbour two boats wait near an old wall under low clouds while gulls circle".split()
)
WARM = 20
"""Pictures that are compared before anything is timed: their patches show who computes the same."""
ROWS = 8
"""Documents of a padded batch."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class DataOptions(Options):
    images: PositiveInt = 300
    """pictures of one round of part 1"""
    samples: PositiveInt = 600
    """samples of one round of part 2"""
    workers: PositiveInt = 2
    """worker processes of part 2 and --recipe"""
    length: PositiveInt = 4096
    """positions of a packed batch of part 2"""
    patch_limit: PositiveInt = 1024
    """patches of one picture (vision.in_patch_limit)"""
    rounds: PositiveInt = 3
    """rounds, each side once a round"""
    recipe: str | None = None
    """measure only how long a step of this recipe waits for its data"""
    recipe_steps: PositiveInt = 8
    """--recipe: steps of each measurement"""
    step_ms: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """--recipe: the consumer is busy this long each step"""
    out: str = "runs/bench/data.json"
    """where the numbers are saved"""


# ---- Shards made for measuring.


def jpeg(width: int, height: int, seed: int) -> bytes:
    """A picture that compresses like a photograph, as JPEG of quality 85."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    # Waves and grain: flat colours would decode too quickly.
    waves = [127 + 100 * np.sin(x * rng.uniform(3, 20) + y * rng.uniform(3, 20) + c) for c in range(3)]
    pixels = np.stack(waves, -1) + rng.normal(0, 6, (height, width, 3))
    for _ in range(20):
        left, top = rng.integers(0, width), rng.integers(0, height)
        w, h = rng.integers(10, 200, 2)
        pixels[top : top + h, left : left + w] = rng.integers(0, 256, 3)
    out = io.BytesIO()
    PILImage.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=85)
    return out.getvalue()


def write_shards(folder: Path, count: int, per_shard: int) -> list[str]:
    """`count` samples (jpg of SIDES, txt of 4 to 300 words) in tar files in `folder`; returns their paths."""
    # Few different pictures: decoding costs the same for every copy.
    rng = Random(0)
    jpegs = [jpeg(*SIDES, number) for number in range(DIFFERENT)]
    paths = []
    for first in range(0, count, per_shard):
        paths.append(str(folder / f"{first // per_shard:04d}.tar"))
        with tarfile.open(paths[-1], "w") as tar:
            for number in range(first, min(first + per_shard, count)):
                # Lengths of captions spread over two orders of magnitude.
                caption = " ".join(rng.choices(WORDS, k=round(4 * 75 ** rng.random()))).encode()
                for ending, body in ((".jpg", jpegs[number % DIFFERENT]), (".txt", caption)):
                    info = tarfile.TarInfo(f"{number:08d}{ending}")
                    info.size = len(body)
                    tar.addfile(info, io.BytesIO(body))
    return paths


def vision_of(patch_limit: int) -> VisionConfig:
    """The preset's patches with the image budget asked for."""
    return VisionConfig.preset("moonvit_v2", in_patch_limit=patch_limit)


def shards_of(shards: Sequence[str]) -> SourceConfig:
    """The shards as a source of the loader."""
    return SourceConfig(name="shards", kind="webdataset", options={"shards": shards})


# ---- Part 1: decoding on one core. A side gives the patches of every picture in the order of the shards,
# again and again: the caller says how much is timed.


def our_patches(shards: Sequence[str], cfg: VisionConfig, fast: bool = True) -> Iterator[Tensor]:
    decode = DecodeConfig(fast=fast)
    source = build_source(shards_of(shards), val_fraction=0.0)
    for index in cycle(range(len(source))):
        for segment in source.get(index, 0).segments:
            if isinstance(segment, Image):
                yield decode_picture(segment.image, cfg, decode).items[0][0]


def pil_patches(image: PILImage.Image, cfg: VisionConfig) -> tuple[Tensor, int]:
    """Pillow's bicubic to the size, pad, cut; (patches, tokens)."""
    # The same geometry as ours: what is compared is the way, not the size.
    rgb = to_rgb(image)
    size = navit_size(*rgb.size, cfg)
    canvas = np.zeros((1, size.height, size.width, 3), np.uint8)
    if rgb.size != (size.new_w, size.new_h):
        rgb = rgb.resize((size.new_w, size.new_h), PILImage.Resampling.BICUBIC)
    canvas[0, : size.new_h, : size.new_w] = np.asarray(rgb)
    return patchify(canvas, cfg.patch_size), num_tokens(grid_of(size, cfg), cfg.merge_kernel_size)


def plain_patches(shards: Sequence[str], cfg: VisionConfig) -> Iterator[Tensor]:
    import webdataset

    for sample in webdataset.WebDataset(shards, shardshuffle=False).decode("pil").repeat():
        yield pil_patches(sample["jpg"], cfg)[0]


def energon_patches(shards: Sequence[str], cfg: VisionConfig) -> Iterator[Tensor]:
    """In the order of the shards, without worker processes; raises where Energon cannot be imported."""
    from megatron import energon
    from megatron.energon.flavors import BaseWebdatasetFactory

    # What `energon prepare` makes of the tar files, written once: index, info, split and dataset.yaml.
    root = Path(shards[0]).parent
    described = root / ".nv-meta" / "dataset.yaml"
    if not described.exists():
        with contextlib.redirect_stdout(sys.stderr):  # it prints; stdout carries the result
            BaseWebdatasetFactory.prepare_dataset(
                root,
                [Path(shard).name for shard in shards],
                split_parts_ratio=[("train", 1.0), ("val", 0.0), ("test", 0.0)],
                shuffle_seed=None,
                workers=1,
            )
        sample_type = {"__module__": "megatron.energon", "__class__": "CaptioningSample"}
        definition = {"sample_type": sample_type, "field_map": {"image": "jpg", "caption": "txt"}}
        described.write_text(json.dumps(definition))  # JSON is YAML
    there: Any = energon

    class Encoder(there.TaskEncoder):  # type: ignore[misc, name-defined]
        decoder = there.SampleDecoder(image_decode="pil")

        @there.stateless  # type: ignore[untyped-decorator]
        def encode_sample(self, sample: Any) -> Record:
            keys = {"__key__": sample.__key__, "__restore_key__": sample.__restore_key__}
            return {**keys, "patches": pil_patches(sample.image, cfg)[0]}

    dataset = there.get_train_dataset(
        root,
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


PATCHES: Record = {
    "ours": our_patches,
    "ours-exact": partial(our_patches, fast=False),
    "webdataset": plain_patches,
    "energon": energon_patches,
}


def decoding_side(side: str, shards: Sequence[str], patch_limit: int, images: int) -> Result:
    """Pictures per second of CPU and of the clock; `digest` of the first patches shows who computes the
    same."""
    # A core each: that is what a worker has.
    torch.set_num_threads(1)
    stream = PATCHES[side](shards, vision_of(patch_limit))

    # The first pictures are not timed.
    digest = 0
    for patches in islice(stream, WARM):
        digest = zlib.crc32(patches.numpy().tobytes(), digest)
    started, cpu = time.perf_counter(), time.process_time()
    count = sum(len(patches) for patches in islice(stream, images))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - started
    return {
        "images_per_core_s": images / cpu,
        "images_per_s": images / wall,
        "patches": count,
        "digest": digest,
    }


# ---- Part 2: whole loaders. A side gives what each of its batches holds.


def our_batches(
    shards: Sequence[str], cfg: VisionConfig, workers: int, length: int
) -> Iterator[Counter[str]]:
    tokenizer = embedded_tokenizer()
    data = DataConfig(sources=[shards_of(shards)], val_fraction=0.0, prefetch="process", workers=workers)
    with Loader(
        data, tokenizer, cfg, length=length, tokens=length, max_patches=4 * length, lanes=workers
    ) as loader:
        while True:
            for batch in loader.next_step():
                # A document begins with one of these, wherever packing has put it.
                samples = int((batch.ids == tokenizer.bos_id).sum())
                yield Counter(samples=samples, tokens=batch.num_tokens, positions=len(batch.ids))


class PlainSample:
    """(picture, text) -> token ids and patches; a class, since workers may be spawned."""

    def __init__(self, cfg: VisionConfig) -> None:
        self.cfg, self.tokenizer = cfg, embedded_tokenizer()

    def __call__(self, sample: tuple[PILImage.Image, str]) -> tuple[Tensor, Tensor]:
        patches, count = pil_patches(sample[0], self.cfg)
        token = self.tokenizer
        # The tokens that our own encoding gives, so that counts compare.
        ids = [token.bos_id, *[token.media_pad_id] * count, *token.encode(sample[1]), token.eos_id]
        return torch.tensor(ids), patches


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """torch's usual collation: every row as long as the longest, filled up with -1."""
    ids, patches = zip(*samples)
    return torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True, padding_value=-1), torch.cat(patches)


def plain_batches(
    shards: Sequence[str], cfg: VisionConfig, workers: int, length: int
) -> Iterator[Counter[str]]:
    import webdataset

    # A shuffle buffer of the size that its documentation shows.
    split = webdataset.split_by_worker
    source = webdataset.WebDataset(shards, shardshuffle=100, seed=0, workersplitter=split)
    samples = source.shuffle(256).decode("pil").to_tuple("jpg", "txt").map(PlainSample(cfg)).repeat()
    batches = torch.utils.data.DataLoader(samples, batch_size=ROWS, num_workers=workers, collate_fn=padded)
    for rows, _ in batches:
        yield Counter(samples=len(rows), tokens=int((rows >= 0).sum()), positions=rows.numel())


BATCHES = {"ours": our_batches, "webdataset": plain_batches}


def loading_side(
    side: str, shards: Sequence[str], patch_limit: int, workers: int, length: int, samples: int
) -> Result:
    """Rates of a whole loader over `samples` samples, from the shards to batches in the training process."""
    torch.set_num_threads(1)
    stream = BATCHES[side](shards, vision_of(patch_limit), workers, length)
    for _ in range(4):  # workers are up and queues full by then
        next(stream)
    total: Counter[str] = Counter()
    started = time.perf_counter()
    while total["samples"] < samples:
        total += next(stream)
    wall = time.perf_counter() - started
    return {
        "samples_per_s": total["samples"] / wall,
        "tokens_per_s": total["tokens"] / wall,
        "fill": total["tokens"] / total["positions"],
    }


# ---- With --recipe: how long a step waits for its data.


def consume(loader: Loader, steps: int, rest_s: float) -> float:
    """Take `steps` steps and rest `rest_s` seconds before each: the seconds spent waiting.

    What is ready before the first of them (`prefetch_steps` and what is on its way) is used up first, so that
    the loader's own pace is seen and not its stock.
    """
    # Use up the stock.
    for _ in range(loader.spec.data.prefetch_steps + 2):
        loader.next_step()
    waited = 0.0
    for _ in range(steps):
        time.sleep(rest_s)
        asked = time.perf_counter()
        loader.next_step()
        waited += time.perf_counter() - asked
    return waited


def measure_waiting(recipe: str, options: DataOptions) -> Result:
    """What the data of a step takes, and what a busy step waits for it."""
    steps, step_s = options.recipe_steps, options.step_ms / 1000

    # The loader as training has it: with nobody busy a step takes as long as its data.
    config = load_config([recipe], [("data.prefetch", "process"), ("data.workers", options.workers)])
    runtime = Runtime(config.train.mixed_precision)
    tokens = build.tokenizer(config, runtime)
    config = build.with_tokenizer(config, tokens)
    waited = []
    for rest_s in (0.0, step_s):
        loaders = StageLoaders(config, tokens, runtime)
        waited.append(consume(loaders.at(0), steps, rest_s))
        loaders.close()
    free, busy = waited
    return {"data_s_per_step": free / steps, "wait_share": busy / (step_s * steps + busy)}


@verb
def data(options: DataOptions) -> None:
    """Entry of `earlyfusion bench data`."""
    embedded_tokenizer()  # trained once, before anything is timed
    record: Result = {}
    if options.recipe is not None:
        record["waiting"] = measure_waiting(options.recipe, options)
        show("how long a step waits for its data", record)
        save_record(options.out, options.model_dump(), **record)
        return

    with tempfile.TemporaryDirectory(prefix="earlyfusion-bench-") as name:
        shards = write_shards(Path(name), SAMPLES, PER_SHARD)
        parts: list[tuple[str, Any, Any, set[str]]] = [
            ("decoding", decoding_side, PATCHES, {"patch_limit", "images"}),
            ("loading", loading_side, BATCHES, {"patch_limit", "workers", "length", "samples"}),
        ]
        for part, function, sides, asked in parts:
            request = {"shards": shards, **options.model_dump(include=asked)}

            def run(side: str, function: Any = function, request: Result = request) -> Result:
                return run_side(function, {"side": side, **request}, **ONE_THREAD)

            rounds = alternate(sides, options.rounds, run)
            # Ours alone may interpolate in its own, quicker way.
            if len({found[0].get("digest") for side, found in rounds.items() if side != "ours"}) > 1:
                raise UserError("the sides give different patches for the same pictures: nothing to compare")
            record[part] = compared(rounds)
            show(part, record[part])
    save_record(options.out, options.model_dump(), **record)
