"""`earlyfusion bench data`: reading, decoding and packing, beside webdataset (and Megatron-Energon where it
is).

Part 1, decoding: JPEGs of 1024 x 768 from tar shards to patches, one core; beside webdataset's
.decode("pil"), Pillow's bicubic and the same cutting. Part 2, loading: pictures of many sizes with captions
to batches, with worker processes; beside webdataset with torch's DataLoader and padding. Sides run in turn
(A B A B ...), each in its own process. Everything is saved as JSON.

With --recipe only the data of that recipe is measured: what a step's data takes, and how long a step that is
busy for --step-ms (`step_s` in the log of a run) waits for it. The recipe's first stage is loaded as training
loads it, by worker processes.
"""

from __future__ import annotations

import tempfile
import time
import zlib
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt

from earlyfusion.data.loading.loader import Loader
from earlyfusion.data.vocabulary import embedded_tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import build
from earlyfusion.pipeline.bench.loaders import BATCHES, PATCHES
from earlyfusion.pipeline.bench.record import Result, in_turn, medians, run_side, save_record
from earlyfusion.pipeline.bench.shards import write_shards
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.options import Options, verb
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.pipeline.stage_data import StageLoaders

PLAIN_SAMPLES, MIXED_SAMPLES = 320, 2000
# Their patches also show who computes the same.
WARM = 20
"""Pictures that are compared, and steps' worth of work before anything is timed."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class DataOptions(Options):
    images: NonNegativeInt = 300
    """pictures of one round of part 1; 0 leaves it out"""
    samples: NonNegativeInt = 600
    """samples of one round of part 2; 0 leaves it out"""
    workers: PositiveInt = 2
    """worker processes of part 2 and --recipe"""
    length: PositiveInt = 4096
    """positions of a packed batch of part 2"""
    rows: PositiveInt = 8
    """documents of a padded batch of the other side"""
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


# ---- Part 1: decoding on one core.


def decoding_side(side: str, images: int, **request: Any) -> Result:
    """Seconds of CPU and of the clock for `images` pictures; `digest` of the first patches shows who computes
    the same."""
    # A core each: that is what a worker has.
    torch.set_num_threads(1)
    stream = PATCHES[side](request)

    # The first pictures are not timed.
    digest = 0
    for patches in islice(stream, WARM):
        digest = zlib.crc32(patches.numpy().tobytes(), digest)
    started, cpu = time.perf_counter(), time.process_time()
    count = sum(len(patches) for patches in islice(stream, images))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - started
    rates = {
        "images_per_core_s": images / cpu,
        "patches_per_core_s": count / cpu,
        "images_per_s": images / wall,
    }
    return {"digest": digest, "patches": count, **rates}


def loading_side(side: str, samples: int, **request: Any) -> Result:
    """Rates of a whole loader over `samples` samples, from the shards to batches in the training process."""
    torch.set_num_threads(1)
    stream = BATCHES[side](request)
    for _ in range(4):  # workers are up and queues full by then
        next(stream)
    total: Counter[str] = Counter()
    started = time.perf_counter()
    while total["samples"] < samples:
        total.update(next(stream))
    wall = time.perf_counter() - started
    rates = {f"{name}_per_s": total[name] / wall for name in ("samples", "tokens", "patches")}
    return {**rates, "fill": total["tokens"] / total["positions"], "samples": total["samples"]}


def compared(side: Any, sides: Any, rounds: int, request: Result, title: str) -> Result:
    """Medians of every side over the rounds, and its ratio to webdataset's in the first figure."""

    def run(name: str) -> Result:
        return run_side(side, {"side": name, **request}, **ONE_THREAD)

    results, refused = in_turn(sides, rounds, run)
    figures = {name: medians(found) for name, found in results.items()}
    # Against what everybody writes.
    for row in figures.values():
        first = next(key for key in row if key.endswith("_s"))
        row["ratio"] = row[first] / figures["webdataset"][first]
    show(title, figures, "; ".join(f"{name}: {why}" for name, why in refused.items()))
    return {"sides": figures, "rounds": results, "refused": refused}


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


def measure_waiting(options: DataOptions) -> Result:
    """What the data of a step takes, and what a busy step waits for it."""
    steps, step_s = options.recipe_steps, options.step_ms / 1000

    # The loader as training has it: with nobody busy a step takes as long as its data.
    changes = [("data.prefetch", "process"), ("data.workers", options.workers)]
    config = load_config([str(options.recipe)], changes)
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
        record["waiting"] = measure_waiting(options)
        show("how long a step waits for its data", {"": record["waiting"]})
        save_record(options.out, options.model_dump(), **record)
        return

    with tempfile.TemporaryDirectory(prefix="earlyfusion-bench-") as name:
        folder = Path(name)
        request = options.model_dump(include={"images", "patch_limit"})
        if options.images:
            shards = write_shards(folder / "plain", PLAIN_SAMPLES, mixed=False, per_shard=80)
            title = "1024 x 768 JPEG in tar shards -> uint8 patches, one core"
            request["shards"] = shards
            record["decoding"] = compared(decoding_side, PATCHES, options.rounds, request, title)
            rounds = record["decoding"]["rounds"]
            if len({found[0]["digest"] for side, found in rounds.items() if side != "ours"}) > 1:
                raise UserError("the sides give different patches for the same pictures: nothing to compare")
        if options.samples:
            request = options.model_dump(include={"samples", "patch_limit", "workers", "length", "rows"})
            request["shards"] = write_shards(folder / "mixed", MIXED_SAMPLES, mixed=True, per_shard=250)
            title = f"pictures and captions of many sizes -> batches, {options.workers} workers"
            record["loading"] = compared(loading_side, BATCHES, options.rounds, request, title)
    save_record(options.out, options.model_dump(), **record)
