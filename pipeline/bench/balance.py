"""`earlyfusion bench balance`: how unevenly pictures lie on the ranks, and what encoding them elsewhere
gains.

Part 1, plan: the recipe's own data, `--lanes` micro-batches a step, shared by every number of ranks that
divides them; largest over mean vision FLOPs of the ranks: pictures where they were read (home), all steps
exchanged, and as training decides by itself (auto). Once as the loader deals them (lanes
are steered to equal density), once skewed: every other lane gets sources with pictures alone, the others
text.

Part 2, exchange: `--ranks` gloo processes on the CPU with the recipe's tower and projector and skewed lanes
of `--tokens` positions; forward and backward of the pictures, each at home and exchanged, in turn (A B A B
...). A side ends when its slowest rank does; CPU seconds are those of the rank that needed most, and hold on
a busy machine too. Everything is saved as JSON; nothing of a run's folder is read or written.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Annotated, Any

from pydantic import Field
from rich.console import Console

from earlyfusion.data.loading.loader import Loader
from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import build
from earlyfusion.pipeline.bench.record import Result, new_record, result_of, save_record, show, start_side
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.config.schema import ParallelSection, RunConfig
from earlyfusion.pipeline.options import Options, verb
from earlyfusion.pipeline.picture_exchange import EXCHANGE_ABOVE, PictureExchange
from earlyfusion.pipeline.runtime import Runtime, seed_everything
from earlyfusion.vision.balance import VisionCost, plan_step
from earlyfusion.vision.patches import Grid


class BalanceOptions(Options):
    recipe: str = "small"
    """recipe whose data and tower are used"""
    steps: int = 20
    """steps of part 1; 0 leaves it out"""
    lanes: Annotated[int, Field(ge=2)] = 4
    """micro-batches of a step of part 1"""
    ranks: Annotated[int, Field(ge=2)] = 2
    """processes of part 2"""
    batches: int = 8
    """steps of part 2; 0 leaves it out"""
    tokens: int = 4096
    """positions of a micro-batch of part 2"""
    threads: int = 1
    """torch CPU threads of each process of part 2"""
    out: str = "runs/bench/balance.json"
    """where the numbers are saved"""


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
    return Loader(
        config.data.model_copy(update={"prefetch": "none"}),
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


# ---- Part 1.


def read_grids(
    config: RunConfig, tokens: Any, lanes: int, steps: int, skewed: bool
) -> list[list[list[Grid]]]:
    """[step][lane]: grids of the pictures of a micro-batch."""
    positions = config.stages[0].tokens
    with ExitStack() as stack:
        loaders = []
        for number in range(lanes):
            loader = lane(config, tokens, number, lanes, positions, skewed)
            loaders.append(stack.enter_context(closing(loader)))
        return [[loader.next_step()[0].grids for loader in loaders] for _ in range(steps)]


def plans(config: RunConfig, steps: Sequence[Sequence[Sequence[Grid]]], above: float) -> list[Result]:
    """One record for every number of ranks that divides the lanes: slowest rank over mean, summed over the
    steps."""
    cost, lanes = VisionCost.from_config(config.vision), len(steps[0])
    rows = []
    for ranks in [n for n in range(2, lanes + 1) if lanes % n == 0]:
        sums: dict[str, float] = defaultdict(float)
        exchanged, worst = 0, 1.0
        for step in steps:
            grids = [[list(part) for part in step[rank::ranks]] for rank in range(ranks)]
            plan = plan_step(grids, cost, config.vision.merge_kernel_size, config.stages[0].max_patches)
            mean = sum(cost.of(part) for rank in grids for part in rank) / ranks

            # Weighed by the work of the step: an even step of ten pictures counts ten times.
            pays = plan.pays(above)
            exchanged, worst = exchanged + pays, max(worst, plan.before)
            sums["mean"] += mean
            sums["before"] += plan.before * mean
            sums["after"] += plan.after * mean
            sums["after_auto"] += mean * (plan.after if pays else plan.before)
            for part in plan.parts:
                sums["patches"] += sum(map(sum, part.patches))
                sums["moved"] += sum(map(sum, part.patches))
                sums["moved"] -= sum(row[rank] for rank, row in enumerate(part.patches))

        mean = sums["mean"] or 1.0
        rows.append(
            {
                "ranks": ranks,
                "micro_batches": lanes // ranks,
                "steps": len(steps),
                "exchanged_by_auto": exchanged,
                **{key: sums[key] / mean for key in ("before", "after", "after_auto")},
                "worst_before": worst,
                "patches_moved": sums["moved"] / max(1.0, sums["patches"]),
            }
        )
    return rows


# ---- Part 2.


def rank_side(recipe: str, batches: int, tokens: int, threads: int) -> Result:
    """One process of part 2: seconds and FLOPs of each step, the first of which is not counted."""
    config = load_config([recipe])
    runtime = Runtime(threads=threads)
    seed_everything(config.run.seed)
    tokenizer = build.tokenizer(config, runtime)
    config = build.with_tokenizer(config, tokenizer)
    fusion = build.model(config, tokenizer).to(runtime.device)
    exchange = PictureExchange(ParallelSection(exchange_pictures="on"), fusion.config, runtime)
    loader = lane(config, tokenizer, runtime.rank, runtime.world, tokens, skewed=True)

    # Both sides encode the same pictures, one after the other.
    record: dict[str, list[float]] = defaultdict(list)
    for _ in range(batches + 1):
        step = [batch.to(runtime.device) for batch in loader.next_step()]
        for side in ("home", "exchanged"):
            runtime.barrier()
            started, busy = time.perf_counter(), time.process_time()
            routes = exchange.routes(step, config.stages[0].max_patches) if side == "exchanged" else [None]
            planned = time.perf_counter() - started
            features = fusion.encode_images(step[0].patches, step[0].grids, routes[0])
            features.square().sum().backward()
            record[f"{side}_cpu"].append(time.process_time() - busy)
            runtime.barrier()
            record[side].append(time.perf_counter() - started)
            fusion.zero_grad(set_to_none=True)
        record["plan_s"].append(planned)
        own, done = exchange.work(step, routes)
        record["own"].append(own)
        record["done"].append(done)
    loader.close()
    runtime.close()
    return {name: values[1:] for name, values in record.items()}


def run_ranks(options: BalanceOptions) -> Result:
    """Part 2; raises SideFailed with the last words of a process that failed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])

    # The ranks meet at a port of this machine, on the CPU whatever it has.
    count = str(options.ranks)
    world = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    world |= {"OMP_NUM_THREADS": str(options.threads), "CUDA_VISIBLE_DEVICES": ""}
    request = options.model_dump(include={"recipe", "batches", "tokens", "threads"})
    processes = []
    for rank in range(options.ranks):
        processes.append(start_side(rank_side, request, **world, RANK=str(rank), LOCAL_RANK=str(rank)))
    records = [result_of(process) for process in processes]

    def slowest(name: str) -> list[float]:
        return [max(values) for values in zip(*(record[name] for record in records), strict=True)]

    # A barrier ends every side, so that the first rank's clock is everybody's.
    home, exchanged = records[0]["home"], records[0]["exchanged"]
    mean = sum(sum(record["own"]) for record in records) / options.ranks
    return {
        "ranks": options.ranks,
        "batches": options.batches,
        "before": sum(slowest("own")) / mean,
        "after": sum(slowest("done")) / mean,
        "home_cpu_s": statistics.mean(slowest("home_cpu")),
        "exchanged_cpu_s": statistics.mean(slowest("exchanged_cpu")),
        "home_s": statistics.median(home),
        "exchanged_s": statistics.median(exchanged),
        "plan_s": statistics.median(records[0]["plan_s"]),
        "speedup": statistics.median([a / b for a, b in zip(home, exchanged, strict=True)]),
        "by_rank": records,
    }


@verb
def balance(options: BalanceOptions) -> None:
    """Entry of `earlyfusion bench balance`."""
    console = Console(highlight=False)
    record = new_record(options.model_dump())
    if options.steps > 0:
        config = load_config([options.recipe])
        tokens = build.tokenizer(config, Runtime())
        record["plan"] = {}
        for name, skewed in (("as dealt", False), ("skewed", True)):
            steps = read_grids(config, tokens, options.lanes, options.steps, skewed)
            record["plan"][name] = plans(config, steps, EXCHANGE_ABOVE)
            columns = {f"{row['ranks']} ranks": row for row in record["plan"][name]}
            show(console, f"{name}: largest over mean vision FLOPs of the ranks", columns)
    if options.batches > 0:
        record["exchange"] = run_ranks(options)
        figures = {key: value for key, value in record["exchange"].items() if key != "by_rank"}
        show(console, "skewed steps, pictures forward and backward", {"": figures})
    save_record(record, options.out, console)
