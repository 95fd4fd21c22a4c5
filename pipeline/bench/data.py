"""`earlyfusion bench data`: reading, decoding and packing, beside webdataset (and Megatron-Energon where it
is).

Part 1, decoding: JPEGs of 1024 x 768 from tar shards to patches, one core; beside webdataset's
.decode("pil"), Pillow's bicubic and the same cutting. Part 2, loading: pictures of many sizes with captions
to batches, with worker processes; beside webdataset with torch's DataLoader and padding. Part 3, memory: one
worker over pictures and clips (50,000 samples with --memory-samples 50000). Sides run in turn (A B A B ...),
each in its own process. Everything is saved as JSON.

With --recipe only the data of that recipe is measured: how long a step waits for it. The recipe's first stage
is loaded as training loads it, by worker processes. Capacity: nobody is busy between two steps, so the time
of a step is the time of its data. Waiting: the consumer is busy for --step-ms each step; `auto` takes that
from real training steps of the recipe here, with the workers at rest. The shortest step that waits less than
2 % follows from the capacity and from what it costs to take a step that is ready.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import os
import statistics
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.loading.loader import Loader
from earlyfusion.data.sample import Image, Sample, Segment, Text, VideoFile
from earlyfusion.data.vocabulary import embedded_tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import build
from earlyfusion.pipeline.bench.loaders import (
    ENERGON_INSTALL,
    batches_of,
    energon_here,
    patches_of,
    vision_of,
)
from earlyfusion.pipeline.bench.record import (
    Result,
    SideFailed,
    in_turn,
    new_record,
    run_side,
    save_record,
    show,
)
from earlyfusion.pipeline.bench.shards import CLIPS, SIDES, clip, pictures, write_shards
from earlyfusion.pipeline.bench.train import RecipeTraining
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.options import Options, verb
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.pipeline.stage_data import StageLoaders

DECODERS = ("webdataset", "energon", "ours", "ours-exact")
LOADERS = ("webdataset", "energon", "ours")
PLAIN_SAMPLES, MIXED_SAMPLES = 320, 2000
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
BAR = 0.02
"""Share of a step that may be spent waiting."""
NAME = "bench-waiting"
"""Name of the run of --recipe, so that no file of a real run is touched."""


class DataOptions(Options):
    images: int = 300
    """pictures of one round of part 1; 0 leaves it out"""
    samples: int = 600
    """samples of one round of part 2; 0 leaves it out"""
    workers: int = 2
    """worker processes of part 2"""
    step_ms: str = "0"
    """part 2 and --recipe: the consumer is busy this long each step; auto: as training is"""
    recipe: str | None = None
    """measure only how long a step of this recipe waits for its data"""
    recipe_steps: int = 8
    """--recipe: steps of data of each measurement"""
    train_steps: int = 3
    """--step-ms auto: training steps, the first untimed"""
    threads: int | None = None
    """--step-ms auto: torch CPU threads"""
    length: int = 4096
    """positions of a packed batch of part 2"""
    rows: int = 8
    """documents of a padded batch of the other side"""
    patch_limit: int = 1024
    """patches of one picture (vision.in_patch_limit)"""
    rounds: int = 3
    """rounds, each side once a round"""
    memory_samples: int = 2000
    """samples of part 3; 0 leaves it out"""
    video_backend: Literal["auto", "decord", "pyav"] = "auto"
    """part 3: what reads videos"""
    out: str = "runs/bench/data.json"
    """where the numbers are saved"""


def milliseconds(text: str) -> float | None:
    """Option --step-ms: milliseconds, or None for "auto"."""
    if text == "auto":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise UserError(f"bench data: --step-ms {text!r}: expected milliseconds (0 or more), or auto")
    return value


def find_energon() -> dict[str, str | None]:
    """Megatron-Energon here: its version, or the problem why it is not compared with, and how to get it."""
    try:
        found = importlib.util.find_spec("megatron.energon")
    except ModuleNotFoundError:
        found = None
    if found is None:
        return {"version": None, "problem": f"not installed ({ENERGON_INSTALL})"}
    try:
        return run_side(energon_here, {}, **ONE_THREAD)
    except SideFailed as error:
        return {"version": None, "problem": f"not compared: {error}"}


# ---- Part 1: decoding on one core.


def decoding_side(side: str, images: int, warmup: int, **request: Any) -> Result:
    """Seconds of CPU and of the clock for `images` pictures; `digest` of the first patches shows who computes
    the same."""
    torch.set_num_threads(1)
    stream = patches_of(side, request)

    # The first pictures are not timed: they show whether the sides compute the same.
    digest = 0
    for patches in islice(stream, warmup):
        digest = zlib.crc32(patches.numpy().tobytes(), digest)
    started, cpu = time.perf_counter(), time.process_time()
    count = sum(len(patches) for patches in islice(stream, images))
    return {
        "images": images,
        "patches": count,
        "digest": digest,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - started,
    }


def decoding(options: DataOptions, shards: list[str], sides: list[str], console: Console) -> Result:
    """Part 1 with these of DECODERS."""
    request = {"shards": shards, "patch_limit": options.patch_limit, "images": options.images, "warmup": 20}

    def run(side: str) -> Result:
        return run_side(decoding_side, {"side": side, **request}, **ONE_THREAD)

    rounds = in_turn(sides, options.rounds, run, console, "decoding")
    if len({results[0]["digest"] for side, results in rounds.items() if side != "ours"}) > 1:
        raise UserError(
            "bench data: the sides give different patches for the same pictures; nothing to compare"
        )

    # Per core by CPU time, which neighbours on the machine disturb least.
    sample_bytes = sum(os.path.getsize(path) for path in shards) / PLAIN_SAMPLES
    base = [result["cpu_s"] / result["images"] for result in rounds["webdataset"]]
    figures = {}
    for side, results in rounds.items():
        core = statistics.median(result["images"] / result["cpu_s"] for result in results)
        quicker = [b * result["images"] / result["cpu_s"] for b, result in zip(base, results, strict=True)]
        figures[side] = {
            "images_per_core_s": core,
            "images_per_s": statistics.median(result["images"] / result["wall_s"] for result in results),
            "patches_per_core_s": statistics.median(r["patches"] / r["cpu_s"] for r in results),
            "mb_per_core_s": core * sample_bytes / 1e6,
            "ratio": statistics.median(quicker),
        }
    return {"sides": figures, "rounds": rounds}


# ---- Part 2: a whole loader, from the shards to batches in the training process.


def loading_side(side: str, samples: int, warmup_steps: int, step_ms: float, **request: Any) -> Result:
    """Totals over `samples` samples; with `step_ms` the consumer is busy that long and `wait_share` is what
    it waits."""
    torch.set_num_threads(1)
    stream: Any = batches_of(side, request)
    for _ in range(warmup_steps):
        next(stream)

    # Workers are up and queues full by now.
    total: Counter[str] = Counter()
    started, waited = time.perf_counter(), 0.0
    while total["samples"] < samples:
        asked = time.perf_counter()
        batch = next(stream)
        waited += time.perf_counter() - asked
        total.update(batch)
        time.sleep(step_ms / 1000)
    wall = time.perf_counter() - started
    stream.close()
    return {**total, "wall_s": wall, "wait_share": waited / wall}


def loading(
    options: DataOptions, step_ms: float, shards: list[str], sides: list[str], console: Console
) -> Result:
    """Part 2 with these of LOADERS."""
    same = {"patch_limit", "samples", "workers", "length", "rows"}
    request = {**options.model_dump(include=same), "shards": shards, "step_ms": step_ms, "warmup_steps": 4}

    def run(side: str) -> Result:
        return run_side(loading_side, {"side": side, **request}, **ONE_THREAD)

    rounds = in_turn(sides, options.rounds, run, console, "loading")
    sample_bytes = sum(os.path.getsize(path) for path in shards) / MIXED_SAMPLES
    figures: dict[str, dict[str, float]] = {}
    for side, results in rounds.items():
        rates = figures[side] = {}
        for name in ("samples", "tokens", "patches"):
            rates[f"{name}_per_s"] = statistics.median(r[name] / r["wall_s"] for r in results)
        rates["mb_per_s"] = rates["samples_per_s"] * sample_bytes / 1e6
        rates["fill"] = statistics.median(r["tokens"] / r["positions"] for r in results)
        rates["wait_share"] = statistics.median(r["wait_share"] for r in results)
    return {"sides": figures, "rounds": rounds, "workers": options.workers}


# ---- Part 3: memory of one worker, pictures and clips in turn.


def resident_mib() -> float:
    """Memory of this process that lies in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory_side(samples: int, patch_limit: int, backend: str, every: int = 4) -> Result:
    """Resident memory, open files and threads of a worker while it encodes `samples` samples, every
    `every`-th a video."""
    torch.set_num_threads(1)
    tokenizer, cfg = embedded_tokenizer(), vision_of(patch_limit)
    decode = DecodeConfig(video_backend=backend)
    stills = pictures([SIDES, (640, 480), (333, 500)])
    made = {name: clip(name, seed) for seed, name in enumerate(CLIPS)}
    clips = [body for body in made.values() if body is not None]

    # Pictures and clips by turns, as a mix has them.
    points: list[tuple[int, float]] = []
    videos, started = 0, time.perf_counter()
    mark = max(1, samples // 50)
    for number in range(samples):
        media: Segment = Image(stills[number % len(stills)])
        if clips and number % every == 0:
            media = VideoFile(clips[videos % len(clips)], max_frames=4)
            videos += 1
        sample = Sample([media, Text(f"sample {number % 1000}")], "memory", str(number))
        encode(sample, tokenizer, cfg, decode=decode)
        if (number + 1) % mark == 0:
            points.append((number + 1, resident_mib()))

    # The slope after the first fifth, in which pools fill up.
    counts, sizes = np.array(points[len(points) // 5 :]).T
    slope = float(np.polyfit(counts, sizes, 1)[0]) if len(counts) > 2 else math.nan
    gc.collect()
    return {
        "samples": samples,
        "videos": videos,
        "codecs": [name for name, body in made.items() if body is not None],
        "wall_s": time.perf_counter() - started,
        "resident_mib": points,
        "mib_per_10k_samples": slope * 10_000,
        "open_files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


# ---- With --recipe: how long a step waits for its data.


def consume(loader: Loader, steps: int, rest_s: float) -> dict[str, float]:
    """Take `steps` steps and rest `rest_s` seconds before each: counts, and the seconds spent waiting.

    What is ready before the first of them (`prefetch_steps` and what is on its way) is used up first, so that
    the loader's own pace is seen and not its stock.
    """
    # Use up the stock.
    for _ in range(loader.spec.data.prefetch_steps + 2):
        loader.next_step()
    found: dict[str, float] = defaultdict(float, steps=steps)
    for _ in range(steps):
        time.sleep(rest_s)
        asked = time.perf_counter()
        batches = loader.next_step()
        found["waited_s"] += time.perf_counter() - asked
        found["tokens"] += sum(batch.num_tokens for batch in batches)
        found["positions"] += sum(batch.ids.shape[0] for batch in batches)
        found["patches"] += sum(batch.num_patches for batch in batches)
    return found


def shortest_step_s(data_s: float, handover_s: float) -> float:
    """The shortest step that waits less than BAR of the time.

    Its waiting w is what the data takes longer, or the handover of a step that is ready, whichever is more; w
    is BAR of step + w.
    """
    return max(data_s * (1 - BAR), handover_s * (1 - BAR) / BAR)


def training_steps_s(recipe: str, steps: int, threads: int | None) -> list[float]:
    """Seconds of each of `steps` real steps, data ready beforehand; of several, the first is left out."""
    quiet = load_config([recipe], [("data.prefetch", "none"), ("run.name", NAME)])
    training = RecipeTraining(quiet, threads)
    ready = [training.read() for _ in range(steps)]
    training.loaders.close()
    taken = []
    for batches in ready:
        seconds: dict[str, float] = defaultdict(float)
        training.learn(batches, seconds)
        taken.append(sum(seconds.values()))
    return taken[1:] or taken


def measure_waiting(options: DataOptions, busy_ms: float | None) -> Result:
    """Capacity of the recipe's loader, and what a step of `busy_ms` (None: of a real training step) waits for
    it."""
    recipe, steps = str(options.recipe), options.recipe_steps

    # How long a step of training takes, with the workers at rest.
    trained: list[float] = []
    if busy_ms is None:
        trained = training_steps_s(recipe, options.train_steps, options.threads)
        busy_ms = 1000 * statistics.median(trained)

    # The loader as training has it.
    workers = [("data.prefetch", "process"), ("data.workers", options.workers), ("run.name", NAME)]
    config = load_config([recipe], workers)
    runtime = Runtime(config.train.mixed_precision, options.threads)
    tokens = build.tokenizer(config, runtime)
    config = build.with_tokenizer(config, tokens)

    def run(rest_s: float) -> dict[str, float]:
        loaders = StageLoaders(config, tokens, runtime)
        try:
            return consume(loaders.at(0), steps, rest_s)
        finally:
            loaders.close()

    # Nobody busy, then busy long enough for a full stock, then as training is.
    busy_s, free = busy_ms / 1000, run(0.0)
    data_s = free["waited_s"] / steps
    full_s = (
        config.data.prefetch_steps + 2
    ) * data_s  # by then the stock is full: a longer rest changes nothing
    full = run(full_s)
    handover_s = full["waited_s"] / steps
    waited = full["waited_s"] if busy_s >= full_s else run(busy_s)["waited_s"]
    return {
        "recipe": recipe,
        "workers": options.workers,
        "lanes": config.stages[0].lanes,
        "steps": steps,
        "capacity": free,
        "data_s_per_step": data_s,
        "handover_s_per_step": handover_s,
        "trained_s": trained,
        "step_ms": busy_ms,
        "wait_share": waited / (busy_s * steps + waited),
        "shortest_step_ms": 1000 * shortest_step_s(data_s, handover_s),
    }


def comparisons(options: DataOptions, step_ms: float, console: Console) -> Result:
    """Parts 1 to 3, each unless its size is 0."""
    # Energon is compared with where it is there.
    energon: dict[str, str | None] = {"version": None, "problem": "not asked for"}
    if options.images or options.samples:
        energon = find_energon()
    left_out = {"energon"} if energon["problem"] else set()
    record: Result = {"energon": energon}
    with tempfile.TemporaryDirectory(prefix="earlyfusion-bench-") as folder:
        if options.images:
            shards = write_shards(Path(folder) / "plain", PLAIN_SAMPLES, mixed=False, per_shard=80)
            sides = [side for side in DECODERS if side not in left_out]
            record["decoding"] = decoding(options, shards, sides, console)
            title = "1024 x 768 JPEG in tar shards -> uint8 patches, one core"
            show(console, title, record["decoding"]["sides"])
        if options.samples:
            shards = write_shards(Path(folder) / "mixed", MIXED_SAMPLES, mixed=True, per_shard=250)
            sides = [side for side in LOADERS if side not in left_out]
            record["loading"] = loading(options, step_ms, shards, sides, console)
            title = f"pictures and captions of many sizes -> batches, {options.workers} workers"
            caption = f"Megatron-Energon: {energon['problem'] or energon['version']}"
            show(console, title, record["loading"]["sides"], caption)

    if options.memory_samples:
        request = {
            "samples": options.memory_samples,
            "patch_limit": options.patch_limit,
            "backend": options.video_backend,
        }
        with console.status(f"memory over {options.memory_samples:,} samples"):
            record["memory"] = run_side(memory_side, request, **ONE_THREAD)
        figures = dict(record["memory"])
        points = figures.pop("resident_mib")
        figures |= {f"MiB after {samples:,}": mib for samples, mib in points[:: max(1, len(points) // 6)]}
        show(console, "memory of one worker", {"": figures})
    return record


@verb
def data(options: DataOptions) -> None:
    """Entry of `earlyfusion bench data`."""
    step_ms = milliseconds(options.step_ms)
    if step_ms is None and options.recipe is None:
        raise UserError("bench data: --step-ms auto needs --recipe NAME, whose training steps it takes")
    console = Console(highlight=False)
    embedded_tokenizer()  # trained once, before anything is timed
    record = new_record(options.model_dump())
    if options.recipe is None:
        record |= comparisons(options, step_ms or 0.0, console)
    else:
        with console.status(f"data of {options.recipe}, {options.workers} workers"):
            record["waiting"] = measure_waiting(options, step_ms)
        figures = dict(record["waiting"])
        capacity = figures.pop("capacity")
        show(console, "how long a step waits for its data", {"": figures | capacity})
    save_record(record, options.out, console)
