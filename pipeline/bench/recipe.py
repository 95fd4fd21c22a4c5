"""Part 2 of `earlyfusion bench train`: the whole recipe on its own data, timed by room.

A room's time is read off module hooks: forward from entry to exit, backward from the arrival of the output's
gradient to the departure of the input's. Its own time excludes rooms inside it. What no room claims
(embedding, head and loss, residual mixing, norms between sub-layers) is "residuals, head, loss". On a GPU
every hook waits for the device, which slows the step down; tokens/s are therefore measured in other steps,
without hooks.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.table import Table
from torch import nn

from earlyfusion.model.kda import KimiDeltaAttention
from earlyfusion.model.mla import MultiHeadLatentAttention
from earlyfusion.model.mlp import SwiGLU
from earlyfusion.model.moe import MixtureOfExperts
from earlyfusion.pipeline import build
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.meter import peak_flops, peak_memory_bytes
from earlyfusion.pipeline.runtime import Runtime, seed_everything
from earlyfusion.pipeline.stage_data import StageLoaders
from earlyfusion.pipeline.step import LossMeter, forward_backward
from earlyfusion.pipeline.update import balance, set_lr
from earlyfusion.vision.encoder import VisionTower
from earlyfusion.vision.projector import Projector

ROOMS: tuple[tuple[str, tuple[type[nn.Module], ...]], ...] = (
    ("vision tower", (VisionTower,)),
    ("projector", (Projector,)),
    ("KDA", (KimiDeltaAttention,)),
    ("MLA", (MultiHeadLatentAttention,)),
    ("MoE", (MixtureOfExperts,)),
    ("dense MLP", (SwiGLU,)),
)
REST = "residuals, head, loss"


def now() -> float:
    """Seconds; waits for the device first."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class RoomTimer:
    """Seconds by room while its hooks are in place."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: dict[tuple[int, str], float] = {}
        self._handles: list[Any] = []
        inside_moe = {
            id(m) for moe in model.modules() if isinstance(moe, MixtureOfExperts) for m in moe.modules()
        }
        for module in model.modules():
            room = next((name for name, kinds in ROOMS if isinstance(module, kinds)), None)
            if room is None or (room == "dense MLP" and id(module) in inside_moe):
                continue
            self._watch(module, room)

    def _watch(self, module: nn.Module, room: str) -> None:
        def begin(phase: str) -> Any:
            def hook(*_: Any) -> None:
                self._open[id(module), phase] = now()

            return hook

        def end(phase: str) -> Any:
            def hook(*_: Any) -> None:
                started = self._open.pop((id(module), phase), None)
                if started is not None:
                    self.seconds[room] += now() - started

            return hook

        self._handles += [
            module.register_forward_pre_hook(begin("forward")),
            module.register_forward_hook(end("forward")),
            module.register_full_backward_pre_hook(begin("backward")),
            module.register_full_backward_hook(end("backward")),
        ]

    def close_backward(self) -> None:
        """End of a backward pass: modules whose inputs need no gradient (the tower) end here."""
        for module, phase in list(self._open):
            if phase == "backward":
                self.seconds["vision tower"] += now() - self._open.pop((module, phase))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@contextmanager
def clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the time of a block to `seconds[name]`."""
    start = now()
    yield
    seconds[name] += now() - start


def measure_recipe(recipe: str, steps: int, threads: int) -> dict[str, Any]:
    """Train `steps` steps of the recipe's first stage without hooks (rates), then a third as many with them
    (shares)."""
    config = load_config([recipe])
    runtime = Runtime(config.train.mixed_precision, threads)
    seed_everything(config.run.seed)
    tokens = build.tokenizer(config, runtime)
    config = build.with_tokenizer(config, tokens)
    fusion = build.model(config, tokens).to(runtime.device)
    opt = build.optimizer(config.optim, fusion)
    loaders = StageLoaders(config, tokens, runtime)
    meter = LossMeter([source.name for source in config.data.sources])
    costs = build.Costs(fusion.config)
    counts: dict[str, float] = defaultdict(float)

    def step(seconds: dict[str, float], timer: RoomTimer | None = None) -> None:
        with clock(seconds, "data"):
            batches = [batch.to(runtime.device) for batch in loaders.at(0).next_step()]
        with clock(seconds, "model"):
            forward_backward(runtime, fusion, batches, meter)
            if timer is not None:
                timer.close_backward()
        with clock(seconds, "optimizer"):
            torch.nn.utils.clip_grad_norm_(fusion.parameters(), 1.0)
            opt.step()
            balance(fusion, runtime)
            opt.zero_grad(set_to_none=True)
        _count(counts, batches, costs)

    set_lr(opt, 1e-4)
    for _ in range(3):
        step(defaultdict(float))
    counts.clear()
    plain: dict[str, float] = defaultdict(float)
    for _ in range(steps):
        step(plain)
    rates = _rates(counts, plain, runtime, config.train.mixed_precision)
    shares = _shares(fusion, step, max(1, steps // 3))
    loaders.close()
    return {"recipe": recipe, "steps": steps, **rates, "share_of_time": shares}


def _count(counts: dict[str, float], batches: Sequence[Any], costs: Any) -> None:
    decoder, vision = costs.of(batches)
    counts["tokens"] += sum(b.num_tokens for b in batches)
    counts["patches"] += sum(b.num_patches for b in batches)
    counts["decoder_flops"] += decoder
    counts["vision_flops"] += vision


def _rates(
    counts: dict[str, float], seconds: dict[str, float], runtime: Runtime, precision: str
) -> dict[str, Any]:
    total = sum(seconds.values())
    peak = peak_flops(runtime.device, torch.bfloat16 if precision == "bf16" else torch.float32)
    return {
        "tokens_per_s": counts["tokens"] / total,
        "patches_per_s": counts["patches"] / total,
        "mfu_decoder": counts["decoder_flops"] / total / peak if peak else None,
        "mfu_vision": counts["vision_flops"] / total / peak if peak else None,
        "peak_flops": peak,
        "peak_mib": peak_memory_bytes(runtime.device) / 2**20,
    }


def _shares(fusion: nn.Module, step: Any, steps: int) -> dict[str, float]:
    warnings.filterwarnings(
        "ignore", message="Full backward hook is firing"
    )  # the tower's input is pixels: as meant
    timer = RoomTimer(fusion)
    seconds: dict[str, float] = defaultdict(float)
    try:
        for _ in range(steps):
            step(seconds, timer)
    finally:
        timer.remove()
    rooms = dict(timer.seconds)
    rooms[REST] = max(0.0, seconds["model"] - sum(rooms.values()))
    rooms |= {"optimizer": seconds["optimizer"], "waiting for data": seconds["data"]}
    total = sum(rooms.values())
    return {name: value / total for name, value in sorted(rooms.items(), key=lambda item: -item[1])}


def recipe_table(result: dict[str, Any]) -> Table:
    """The recipe's numbers as a table."""
    table = Table(
        title=f"recipe {result['recipe']}, {result['steps']} steps", title_justify="left", show_header=False
    )
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("tokens/s", f"{result['tokens_per_s']:,.0f}")
    table.add_row("patches/s", f"{result['patches_per_s']:,.0f}")
    if result["peak_flops"]:
        table.add_row("peak of this device", f"{result['peak_flops'] / 1e9:,.0f} GFLOP/s")
        table.add_row("MFU decoder", f"{100 * result['mfu_decoder']:.1f} %")
        table.add_row("MFU vision", f"{100 * result['mfu_vision']:.1f} %")
    table.add_row("peak memory", f"{result['peak_mib']:,.0f} MiB")
    for room, share in result["share_of_time"].items():
        table.add_row(f"time in {room}", f"{100 * share:.1f} %")
    return table
