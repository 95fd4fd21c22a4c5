"""Part 4 of `earlyfusion bench data`: how long a step of a recipe waits for its data.

The recipe's first stage is loaded as training loads it, by worker processes. Capacity: nobody is busy between
two steps, so the time of a step is the time of its data. Waiting: the consumer is busy for `--step-ms` each
step; `auto` takes that from real training steps of the recipe here, with the workers at rest. The shortest
step that waits less than BAR follows from the capacity and from what it costs to take a step that is ready.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from rich.table import Table

from earlyfusion.data.loading.loader import Loader
from earlyfusion.pipeline import build
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.config.schema import RunConfig
from earlyfusion.pipeline.runtime import Runtime, seed_everything
from earlyfusion.pipeline.stage_data import StageLoaders
from earlyfusion.pipeline.step import LossMeter, forward_backward
from earlyfusion.pipeline.update import balance, set_lr

BAR = 0.02
"""Share of a step that may be spent waiting."""
NAME = "bench-waiting"
"""Name of the run, so that no file of a real run is touched."""


def consume(loader: Loader, steps: int, rest_s: float) -> dict[str, float]:
    """Take `steps` steps and rest `rest_s` seconds before each: counts, and the seconds spent waiting.

    What is ready before the first of them (`prefetch_steps` and what is on its way) is used up first, so that
    the loader's own pace is seen and not its stock.
    """
    for _ in range(loader.spec.data.prefetch_steps + 2):
        loader.next_step()
    counts: dict[str, float] = dict.fromkeys(("tokens", "positions", "patches"), 0)
    waited = 0.0
    for _ in range(steps):
        time.sleep(rest_s)
        asked = time.perf_counter()
        batches = loader.next_step()
        waited += time.perf_counter() - asked
        counts["tokens"] += sum(batch.num_tokens for batch in batches)
        counts["positions"] += sum(batch.ids.shape[0] for batch in batches)
        counts["patches"] += sum(batch.num_patches for batch in batches)
    return {**counts, "waited_s": waited, "steps": steps}


def shortest_step_s(data_s: float, handover_s: float) -> float:
    """The shortest step that waits less than BAR of the time.

    Its waiting w is what the data takes longer, or the handover of a step that is ready, whichever is more; w
    is BAR of step + w.
    """
    return max(data_s * (1 - BAR), handover_s * (1 - BAR) / BAR)


def training_step_s(config: RunConfig, runtime: Runtime, steps: int) -> list[float]:
    """Seconds of each of `steps` real steps, data ready beforehand; of several, the first is left out."""
    tokens = build.tokenizer(config, runtime)
    config = build.with_tokenizer(config, tokens)
    seed_everything(config.run.seed)
    fusion = build.model(config, tokens).to(runtime.device)
    opt = build.optimizer(config.optim, fusion)
    set_lr(opt, 1e-4)
    loaders = StageLoaders(config, tokens, runtime)
    ready = [loaders.at(0).next_step() for _ in range(steps)]
    loaders.close()
    meter = LossMeter([source.name for source in config.data.sources])
    taken = []
    for batches in ready:
        started = time.perf_counter()
        moved = [batch.to(runtime.device) for batch in batches]
        forward_backward(runtime, fusion, moved, meter)
        torch.nn.utils.clip_grad_norm_(fusion.parameters(), 1.0)
        opt.step()
        balance(fusion, runtime)
        opt.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return taken[1:] or taken


def measure_waiting(
    recipe: str, *, workers: int, busy_ms: float | None, steps: int, train_steps: int, threads: int | None
) -> dict[str, Any]:
    """Capacity of the recipe's loader, and what a step of `busy_ms` (None: of a real training step) waits for
    it."""
    config = load_config(
        [recipe], [("data.prefetch", "process"), ("data.workers", workers), ("run.name", NAME)]
    )
    runtime = Runtime(config.train.mixed_precision, threads)
    trained: list[float] = []
    if busy_ms is None:
        quiet = load_config([recipe], [("data.prefetch", "none"), ("run.name", NAME)])
        trained = training_step_s(quiet, runtime, train_steps)
        busy_ms = 1000 * statistics.median(trained)
    tokens = build.tokenizer(config, runtime)
    config = build.with_tokenizer(config, tokens)

    def run(rest_s: float) -> dict[str, float]:
        loaders = StageLoaders(config, tokens, runtime)
        try:
            return consume(loaders.at(0), steps, rest_s)
        finally:
            loaders.close()

    busy_s = busy_ms / 1000
    free = run(0.0)
    data_s = free["waited_s"] / steps
    full_s = (
        config.data.prefetch_steps + 2
    ) * data_s  # by then the stock is full, and a longer rest changes nothing
    full = run(full_s)
    waited = full["waited_s"] if busy_s >= full_s else run(busy_s)["waited_s"]
    return {
        "recipe": recipe,
        "workers": workers,
        "lanes": config.stages[0].lanes,
        "steps": steps,
        "capacity": free,
        "data_s_per_step": data_s,
        "handover_s_per_step": full["waited_s"] / steps,
        "trained_s": trained,
        "step_ms": busy_ms,
        "wait_share": waited / (busy_s * steps + waited),
        "shortest_step_ms": 1000 * shortest_step_s(data_s, full["waited_s"] / steps),
    }


def waiting_table(part: dict[str, Any]) -> Table:
    """Part 4 as a table."""
    free = part["capacity"]
    title = f"recipe {part['recipe']}: {part['workers']} workers, {part['lanes']} lanes"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("data of one step", f"{part['data_s_per_step']:.2f} s")
    table.add_row("handover of a step that is ready", f"{part['handover_s_per_step'] * 1000:.1f} ms")
    table.add_row("tokens/s", f"{free['tokens'] / free['waited_s']:,.0f}")
    table.add_row("patches/s", f"{free['patches'] / free['waited_s']:,.0f}")
    table.add_row("fill", f"{free['tokens'] / free['positions']:.1%}")
    source = "of a training step measured here" if part["trained_s"] else "given"
    table.add_row(f"step, {source}", f"{part['step_ms'] / 1000:.2f} s")
    table.add_row("wait share beside it", f"{part['wait_share']:.2%}")
    table.add_row(f"shortest step that waits under {BAR:.0%}", f"{part['shortest_step_ms'] / 1000:.2f} s")
    return table
