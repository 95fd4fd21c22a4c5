"""`earlyfusion bench balance`: how unevenly pictures lie on the ranks, and what encoding them elsewhere
gains.

Part 1, plan: the recipe's own data, `--lanes` micro-batches a step, shared by every number of ranks that
divides them; largest over mean vision FLOPs of the ranks: pictures where they were read (home), all steps
exchanged, and as the recipe's `parallel.exchange_above` decides (auto). Once as the loader deals them (lanes
are steered to equal density), once skewed: every other lane gets sources with pictures alone, the others
text.

Part 2, exchange: `--ranks` gloo processes on the CPU with the recipe's tower and projector and skewed lanes
of `--tokens` positions; forward and backward of the pictures, each at home and exchanged, in turn (A B A B
...). A side ends when its slowest rank does; CPU seconds are those of the rank that needed most, and hold on
a busy machine too. Everything is saved as JSON; nothing of a run's folder is read or written.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from earlyfusion.data.loading.loader import Loader
from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import build
from earlyfusion.pipeline.bench.cmd import BenchFormatter
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.config.schema import ParallelSection, RunConfig
from earlyfusion.pipeline.errors import EXIT_OK
from earlyfusion.pipeline.picture_exchange import PictureExchange
from earlyfusion.pipeline.runtime import Runtime, seed_everything
from earlyfusion.pipeline.statefile import write_text
from earlyfusion.vision.balance import VisionCost, plan_step
from earlyfusion.vision.patches import Grid


def parser() -> argparse.ArgumentParser:
    """Options of `earlyfusion bench balance`."""
    made = argparse.ArgumentParser(
        prog="earlyfusion bench balance", description=__doc__, formatter_class=BenchFormatter
    )
    made.add_argument("--recipe", default="small", help="recipe whose data and tower are used")
    made.add_argument("--steps", type=int, default=20, help="steps of part 1; 0 leaves it out")
    made.add_argument("--lanes", type=int, default=4, help="micro-batches of a step of part 1")
    made.add_argument("--ranks", type=int, default=2, help="processes of part 2")
    made.add_argument("--batches", type=int, default=8, help="steps of part 2; 0 leaves it out")
    made.add_argument("--tokens", type=int, default=4096, help="positions of a micro-batch of part 2")
    made.add_argument("--threads", type=int, default=1, help="torch CPU threads of each process of part 2")
    made.add_argument("--out", default="runs/bench/balance.json", help="where the numbers are saved")
    made.add_argument("--rank-side", default=None, help=argparse.SUPPRESS)
    return made


def lane(config: RunConfig, tokens: Any, number: int, lanes: int, positions: int, skewed: bool) -> Loader:
    """The loader of one lane of the recipe's first stage. Skewed: pictures alone in even lanes, text alone in
    odd ones."""
    stage = config.stages[0]
    weights = dict(stage.weights) or {source.name: source.weight for source in config.data.sources}
    if skewed:
        own = {s.name for s in config.data.sources if s.has_pictures == (number % 2 == 0)}
        weights = {name: weight * (name in own) for name, weight in weights.items()}
        if not any(weights.values()):
            raise UserError("bench balance: the recipe needs sources with pictures and sources of text alone")
    data = config.data.model_copy(update={"prefetch": "none"})
    return Loader(
        data,
        tokens,
        config.vision,
        length=min(stage.length, positions),
        tokens=positions,
        max_patches=stage.max_patches,
        max_vision_flops=stage.max_vision_flops,
        lanes=lanes,
        rank=number,
        world_size=lanes,
        weights=weights,
    )


def read_grids(
    config: RunConfig, tokens: Any, options: argparse.Namespace, skewed: bool
) -> list[list[list[Grid]]]:
    """[step][lane]: grids of the pictures of a micro-batch."""
    loaders = [
        lane(config, tokens, number, options.lanes, config.stages[0].tokens, skewed)
        for number in range(options.lanes)
    ]
    try:
        return [[loader.next_step()[0].grids for loader in loaders] for _ in range(options.steps)]
    finally:
        for loader in loaders:
            loader.close()


def plans(config: RunConfig, steps: Sequence[Sequence[Sequence[Grid]]], above: float) -> list[dict[str, Any]]:
    """One record for every number of ranks that divides the lanes: slowest rank over mean, summed over the
    steps."""
    cost, lanes = VisionCost.from_config(config.vision), len(steps[0])
    found = []
    for ranks in [n for n in range(2, lanes + 1) if lanes % n == 0]:
        before = after = auto = total = moved = patches = 0.0
        exchanged, worst = 0, 1.0
        for step in steps:
            grids = [[list(part) for part in step[rank::ranks]] for rank in range(ranks)]
            plan = plan_step(grids, cost, config.vision.merge_kernel_size, config.stages[0].max_patches)
            mean = sum(cost.of(part) for rank in grids for part in rank) / ranks
            pays = plan.pays(above)
            total, before = total + mean, before + plan.before * mean
            after, auto = after + plan.after * mean, auto + (plan.after if pays else plan.before) * mean
            exchanged, worst = exchanged + pays, max(worst, plan.before)
            for part in plan.parts:
                patches += sum(map(sum, part.patches))
                moved += sum(n for r, row in enumerate(part.patches) for o, n in enumerate(row) if o != r)
        total = total or 1.0
        row: dict[str, float] = {
            "ranks": ranks,
            "micro_batches": lanes // ranks,
            "steps": len(steps),
            "exchanged_by_auto": exchanged,
        }
        row |= {"before": before / total, "after": after / total, "after_auto": auto / total}
        found.append(row | {"worst_before": worst, "patches_moved": moved / max(1.0, patches)})
    return found


def rank_side(request: dict[str, Any]) -> dict[str, Any]:
    """One process of part 2; prints its record as JSON."""
    config = load_config([request["recipe"]])
    runtime = Runtime(threads=request["threads"])
    seed_everything(config.run.seed)
    tokens = build.tokenizer(config, runtime)
    config = build.with_tokenizer(config, tokens)
    fusion = build.model(config, tokens).to(runtime.device)
    exchange = PictureExchange(ParallelSection(exchange_pictures="on"), fusion.config, runtime)
    loader = lane(config, tokens, runtime.rank, runtime.world, request["tokens"], True)
    own: list[float] = []
    done: list[float] = []
    seconds: dict[str, list[float]] = {"home": [], "exchanged": []}
    cpu: dict[str, list[float]] = {"home_cpu": [], "exchanged_cpu": []}
    plan_s: list[float] = []
    for _ in range(request["batches"] + 1):  # the first is not counted
        batches = [batch.to(runtime.device) for batch in loader.next_step()]
        for side, times in seconds.items():
            runtime.barrier()
            started, busy = time.perf_counter(), time.process_time()
            routes = exchange.routes(batches, config.stages[0].max_patches) if side == "exchanged" else [None]
            planned = time.perf_counter() - started
            features = fusion.encode_images(batches[0].patches, batches[0].grids, routes[0])
            features.square().sum().backward()
            cpu[f"{side}_cpu"].append(time.process_time() - busy)
            runtime.barrier()
            times.append(time.perf_counter() - started)
            fusion.zero_grad(set_to_none=True)
        plan_s.append(planned)
        work = exchange.work(batches, routes)
        own.append(work[0])
        done.append(work[1])
    loader.close()
    record = {"own": own[1:], "done": done[1:], "plan_s": plan_s[1:]}
    record |= {side: times[1:] for side, times in (seconds | cpu).items()}
    runtime.close()
    return record


def run_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """Part 2; raises UserError with the last words of a process that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    names = ("recipe", "batches", "tokens", "threads")
    request = json.dumps({name: getattr(options, name) for name in names})
    command = [sys.executable, "-m", "earlyfusion.pipeline.bench.balance", "--rank-side", request]
    world = {"WORLD_SIZE": str(options.ranks), "LOCAL_WORLD_SIZE": str(options.ranks)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": str(options.threads)}
    world["CUDA_VISIBLE_DEVICES"] = ""
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(options.ranks)
    ]
    records = []
    for rank, process in enumerate(processes):
        output, errors = process.communicate()
        if process.returncode:
            raise UserError(f"bench balance: rank {rank} failed: {errors.strip().splitlines()[-1:]}")
        records.append(json.loads(output.strip().splitlines()[-1]))
    pairs = [a / b for a, b in zip(records[0]["home"], records[0]["exchanged"], strict=True)]
    mean = sum(sum(record["own"]) for record in records) / options.ranks

    def slowest(name: str) -> list[float]:
        return [max(values) for values in zip(*(record[name] for record in records), strict=True)]

    return {
        "ranks": options.ranks,
        "batches": options.batches,
        "before": sum(slowest("own")) / mean,
        "after": sum(slowest("done")) / mean,
        "home_cpu_s": statistics.mean(slowest("home_cpu")),
        "exchanged_cpu_s": statistics.mean(slowest("exchanged_cpu")),
        "home_s": statistics.median(records[0]["home"]),
        "exchanged_s": statistics.median(records[0]["exchanged"]),
        "plan_s": statistics.median(records[0]["plan_s"]),
        "speedup": statistics.median(pairs),
        "by_rank": records,
    }


def plan_table(parts: dict[str, list[dict[str, Any]]], recipe: str) -> Table:
    """Part 1 as a table. each: micro-batches of a rank; moved: share of the patches; auto: what the recipe
    would do."""
    table = Table(title=f"recipe {recipe}: largest over mean vision FLOPs of the ranks", title_justify="left")
    for heading in ("data", "ranks", "each", "home", "worst", "exchanged", "moved", "auto", "in steps"):
        table.add_column(heading, justify="left" if heading == "data" else "right")
    for name, rows in parts.items():
        for row in rows:
            figures = [f"{row[key]:.3f}" for key in ("before", "worst_before", "after")]
            figures += [f"{row['patches_moved']:.1%}", f"{row['after_auto']:.3f}"]
            steps = f"{row['exchanged_by_auto']} of {row['steps']}"
            table.add_row(name, str(row["ranks"]), str(row["micro_batches"]), *figures, steps)
    return table


def exchange_table(part: dict[str, Any]) -> Table:
    """Part 2 as a table."""
    title = f"{part['ranks']} processes, {part['batches']} skewed steps, pictures forward and backward"
    table = Table(title=title, title_justify="left")
    for heading in ("", "at home", "exchanged", "ratio"):
        table.add_column(heading, justify="left" if not heading else "right")
    before, after = part["before"], part["after"]
    table.add_row("largest over mean FLOPs", f"{before:.3f}", f"{after:.3f}", f"{before / after:.2f}")
    cpu, less = part["home_cpu_s"], part["exchanged_cpu_s"]
    table.add_row("CPU seconds of the slowest rank", f"{cpu:.2f}", f"{less:.2f}", f"{cpu / less:.2f}")
    table.add_row(
        "step, s (median; ratio of pairs)",
        f"{part['home_s']:.2f}",
        f"{part['exchanged_s']:.2f}",
        f"{part['speedup']:.2f}",
    )
    table.add_row("of which gathering and planning, ms", "", f"{1000 * part['plan_s']:.1f}", "")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `earlyfusion bench balance`."""
    options = parser().parse_args(argv)
    if options.rank_side is not None:
        print(json.dumps(rank_side(json.loads(options.rank_side))))
        return EXIT_OK
    if options.lanes < 2 or options.ranks < 2:
        raise UserError("bench balance: --lanes and --ranks: expected 2 or more")
    console = Console(highlight=False)
    record: dict[str, Any] = {"when": time.strftime("%Y-%m-%d %H:%M:%S"), "torch": torch.__version__}
    record["options"] = vars(options)
    if options.steps > 0:
        runtime, config = Runtime(), load_config([options.recipe])
        tokens = build.tokenizer(config, runtime)
        above = config.parallel.exchange_above
        record["plan"] = {
            name: plans(config, read_grids(config, tokens, options, skewed), above)
            for name, skewed in (("as dealt", False), ("skewed", True))
        }
        console.print(plan_table(record["plan"], options.recipe))
    if options.batches > 0:
        record["exchange"] = run_ranks(options)
        console.print(exchange_table(record["exchange"]))
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, json.dumps(record, indent=1) + "\n")
    console.print(f"saved {out}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
