"""`earlyfusion bench data`: reading, decoding and packing, beside webdataset (and Megatron-Energon where it
is).

Part 1, decoding: JPEGs of 1024 x 768 from tar shards to patches, one core; beside webdataset's
.decode("pil"), Pillow's bicubic and the same cutting. Part 2, loading: pictures of many sizes with captions
to batches, with worker processes; beside webdataset with torch's DataLoader and padding. Part 3, memory: one
worker over pictures and clips (50,000 samples with --memory-samples 50000). Sides run in turn (A B A B ...),
each in its own process. Everything is saved as JSON.

With --recipe only the data of that recipe is measured: how long a step waits for it
(pipeline/bench/waiting.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from earlyfusion.data.tables import print_table
from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline.bench.cmd import BenchFormatter
from earlyfusion.pipeline.bench.data.tables import (
    DECODERS,
    LOADERS,
    decoding_table,
    loading_table,
    memory_table,
)
from earlyfusion.pipeline.errors import EXIT_OK
from earlyfusion.pipeline.statefile import write_text

_PLAIN_SAMPLES, _MIXED_SAMPLES = 320, 2000


def parser() -> argparse.ArgumentParser:
    """Options of `earlyfusion bench data`."""
    data = argparse.ArgumentParser(
        prog="earlyfusion bench data", description=__doc__, formatter_class=BenchFormatter
    )
    data.add_argument(
        "--images", type=int, default=300, help="pictures of one round of part 1; 0 leaves it out"
    )
    data.add_argument(
        "--samples", type=int, default=600, help="samples of one round of part 2; 0 leaves it out"
    )
    data.add_argument("--workers", type=int, default=2, help="worker processes of part 2")
    data.add_argument(
        "--step-ms",
        default="0",
        help="part 2 and --recipe: the consumer is busy this long each step; auto: as training is",
    )
    data.add_argument(
        "--recipe", default=None, help="measure only how long a step of this recipe waits for its data"
    )
    data.add_argument(
        "--recipe-steps", type=int, default=8, help="--recipe: steps of data of each measurement"
    )
    data.add_argument(
        "--train-steps", type=int, default=3, help="--step-ms auto: training steps, the first untimed"
    )
    data.add_argument("--threads", type=int, default=None, help="--step-ms auto: torch CPU threads")
    data.add_argument("--length", type=int, default=4096, help="positions of a packed batch of part 2")
    data.add_argument("--rows", type=int, default=8, help="documents of a padded batch of the other side")
    data.add_argument(
        "--patch-limit", type=int, default=1024, help="patches of one picture (vision.in_patch_limit)"
    )
    data.add_argument("--rounds", type=int, default=3, help="rounds, each side once a round")
    data.add_argument("--memory-samples", type=int, default=2000, help="samples of part 3; 0 leaves it out")
    data.add_argument("--memory-every", type=int, default=4, help="part 3: every n-th sample is a video")
    data.add_argument("--video-backend", default="auto", choices=("auto", "decord", "pyav"), help="part 3")
    data.add_argument("--pictures", default=None, help="folder of pictures to use in place of made ones")
    data.add_argument("--out", default="runs/bench/data.json", help="where the numbers are saved")
    return data


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


def run_side(request: dict[str, Any]) -> dict[str, Any]:
    """One side in its own process, one thread for each library; raises UserError with its last words."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "earlyfusion.pipeline.bench.data.sides",
        json.dumps(request),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise UserError(
            f"bench data: the side {request.get('side')!r} failed: {done.stderr.strip().splitlines()[-1:]}"
        )
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def in_turn(
    sides: Sequence[str], request: dict[str, Any], rounds: int, console: Console
) -> dict[str, list[dict[str, Any]]]:
    """Every side once a round; results by side."""
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides:
            with console.status(f"{request['part']}, round {number + 1}/{rounds}: {side}"):
                results[side].append(run_side({**request, "side": side}))
    return results


def median(results: list[dict[str, Any]], value: Any) -> float:
    """Median over the rounds of value(result)."""
    return float(statistics.median(value(result) for result in results))


def decoding(
    options: argparse.Namespace, shards: list[str], sides: list[str], console: Console
) -> dict[str, Any]:
    """Part 1 with these of DECODERS."""
    sample_bytes = sum(Path(path).stat().st_size for path in shards) / _PLAIN_SAMPLES
    request = {
        "part": "decoding",
        "shards": shards,
        "patch_limit": options.patch_limit,
        "images": options.images,
        "warmup": 20,
    }
    rounds = in_turn(sides, request, options.rounds, console)
    figures = {
        side: {
            "images_per_core_s": median(results, lambda r: r["images"] / r["cpu_s"]),
            "images_per_s": median(results, lambda r: r["images"] / r["wall_s"]),
            "patches_per_core_s": median(results, lambda r: r["patches"] / r["cpu_s"]),
            "mb_per_core_s": median(results, lambda r: r["images"] * sample_bytes / r["cpu_s"] / 1e6),
        }
        for side, results in rounds.items()
    }
    if len({results[0]["digest"] for side, results in rounds.items() if side != "ours"}) > 1:
        raise UserError(
            "bench data: the sides give different patches for the same pictures; nothing to compare"
        )
    base = [r["cpu_s"] / r["images"] for r in rounds["webdataset"]]
    for side, results in rounds.items():
        pairs = [b / (r["cpu_s"] / r["images"]) for b, r in zip(base, results, strict=True)]
        figures[side]["ratio"] = statistics.median(pairs)
    return {"sides": figures, "rounds": rounds}


def loading(
    options: argparse.Namespace, shards: list[str], sides: list[str], console: Console
) -> dict[str, Any]:
    """Part 2 with these of LOADERS."""
    sample_bytes = sum(Path(path).stat().st_size for path in shards) / _MIXED_SAMPLES
    request = {
        "part": "loading",
        "shards": shards,
        "patch_limit": options.patch_limit,
        "samples": options.samples,
        "workers": options.workers,
        "length": options.length,
        "rows": options.rows,
        "step_ms": options.step_ms,
        "warmup_steps": 4,
    }
    rounds = in_turn(sides, request, options.rounds, console)
    figures: dict[str, dict[str, float]] = {}
    for side, results in rounds.items():
        rates = {
            f"{name}_per_s": median(results, lambda r, name=name: r[name] / r["wall_s"])
            for name in ("samples", "tokens", "patches")
        }
        rates["mb_per_s"] = rates["samples_per_s"] * sample_bytes / 1e6
        rates["fill"] = median(results, lambda r: r["tokens"] / r["positions"])
        rates["wait_share"] = median(results, lambda r: r["wait_share"])
        figures[side] = rates
    return {"sides": figures, "rounds": rounds, "workers": options.workers}


def energon() -> dict[str, str | None]:
    """Megatron-Energon here: its version, or the problem why it is not compared with, and how to get it."""
    from earlyfusion.pipeline.bench.data.plain import ENERGON_INSTALL

    try:
        found = importlib.util.find_spec("megatron.energon")
    except ModuleNotFoundError:
        found = None
    if found is None:
        return {"version": None, "problem": f"not installed ({ENERGON_INSTALL})"}
    try:
        return run_side({"part": "energon", "side": "energon"})
    except UserError as error:
        return {"version": None, "problem": f"not compared: {error}"}


def waiting(options: argparse.Namespace, busy_ms: float | None, console: Console) -> dict[str, Any]:
    """The part of --recipe."""
    from earlyfusion.pipeline.bench.waiting import measure_waiting, waiting_table

    with console.status(f"data of {options.recipe}, {options.workers} workers"):
        part = measure_waiting(
            options.recipe,
            workers=options.workers,
            busy_ms=busy_ms,
            steps=options.recipe_steps,
            train_steps=options.train_steps,
            threads=options.threads,
        )
    print_table(console, waiting_table(part))
    return part


def comparisons(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Parts 1 to 3, each unless its size is 0."""
    from earlyfusion.pipeline.bench.data.shards import write_shards

    peer = energon() if options.images or options.samples else {"version": None, "problem": "not asked for"}
    record: dict[str, Any] = {"energon": peer}
    left_out = {"energon"} if peer["problem"] else set()
    with tempfile.TemporaryDirectory(prefix="earlyfusion-bench-") as folder:
        if options.images:
            sides = [side for side in DECODERS if side not in left_out]
            place = Path(folder) / "plain"
            shards = write_shards(place, _PLAIN_SAMPLES, mixed=False, source=options.pictures, per_shard=80)
            record["decoding"] = decoding(options, shards, sides, console)
            print_table(console, decoding_table(record["decoding"]))
        if options.samples:
            sides = [side for side in LOADERS if side not in left_out]
            place = Path(folder) / "mixed"
            shards = write_shards(place, _MIXED_SAMPLES, mixed=True, source=options.pictures, per_shard=250)
            record["loading"] = loading(options, shards, sides, console)
            print_table(console, loading_table(record["loading"], options.step_ms, peer))
    if options.memory_samples:
        request = {
            "part": "memory",
            "side": "ours",
            "samples": options.memory_samples,
            "every": options.memory_every,
            "patch_limit": options.patch_limit,
            "backend": options.video_backend,
        }
        with console.status(f"memory over {options.memory_samples:,} samples"):
            record["memory"] = run_side(request)
        print_table(console, memory_table(record["memory"]))
    return record


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `earlyfusion bench data`."""
    from earlyfusion.data.vocabulary import embedded_tokenizer

    options = parser().parse_args(argv)
    busy_ms = milliseconds(options.step_ms)
    if busy_ms is None and options.recipe is None:
        raise UserError("bench data: --step-ms auto needs --recipe NAME, whose training steps it takes")
    console = Console(highlight=False)
    embedded_tokenizer()  # trained once, before anything is timed
    record: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "options": dict(vars(options)),
    }
    if options.recipe is not None:
        record["waiting"] = waiting(options, busy_ms, console)
    else:
        options.step_ms = busy_ms
        record |= comparisons(options, console)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, json.dumps(record, indent=1))
    console.print(f"saved: {out}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
