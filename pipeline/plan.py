"""`earlyfusion plan RECIPE` and `--dry-run`: what a recipe will build and do, without data and without
weights.

Prints parameters and FLOPs by room and the stages with their tokens and learning rates (that much is
`--dry-run`), how the optimizer routes every weight, and the resolved recipe. The model is built on the meta
device, so the 48B recipe prints about as fast as nano. `banner` is the head of a run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from earlyfusion.data.tables import print_table
from earlyfusion.model.config import FusionConfig
from earlyfusion.model.flops import ParameterCount, count_parameters, training_flops
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.config.arguments import RecipeArguments
from earlyfusion.pipeline.config.compose import compose, recipe_hash, render, validate
from earlyfusion.pipeline.config.schema import RunConfig
from earlyfusion.pipeline.optim.groups import build_param_groups
from earlyfusion.pipeline.optim.plan import TableRow, routing_rows
from earlyfusion.pipeline.progress import duration
from earlyfusion.pipeline.schedule import StageTable
from earlyfusion.pipeline.sft_start import with_start
from earlyfusion.pipeline.stage_data import describe_mix

VISION_ROOMS = ("vision", "projector")
USUAL_MFU = 0.3
"""Share of the peak that training reaches where it runs well; for the time that a banner expects."""
SIDE_PATCHES = 32  # the example image of the FLOP table: 448 x 448 pixels at 14 pixels a patch


def meta_model(config: RunConfig) -> NativeFusion:
    """The recipe's model without storage. The media token's id matters to no size, so the last id stands for
    it."""
    fusion = FusionConfig(text=config.model, vision=config.vision, media_token_id=config.model.vocab_size - 1)
    with torch.device("meta"):
        return NativeFusion(fusion)


def with_given_vocabulary(config: RunConfig) -> RunConfig:
    """The vocabulary of the recipe's tokenizer directory, when it names one; else the size it asks for."""
    if config.tokenizer.path is None:
        return config
    from earlyfusion.data.tokenizer import Tokenizer

    tokens = Tokenizer.load(config.tokenizer.path)
    return config.with_vocabulary(
        tokens.vocab_size, bos_token_id=tokens.bos_id, eos_token_id=tokens.eos_id, pad_token_id=tokens.pad_id
    )


def room_table(config: RunConfig, model: NativeFusion) -> Table:
    """Parameters, and forward + backward FLOPs per token (decoder) or per patch (vision), by room."""
    count = count_parameters(model)
    length = config.stages[0].length
    side = min(SIDE_PATCHES, int(config.vision.in_patch_limit**0.5) // 2 * 2)
    flops = training_flops(model.config, [length], [(1, side, side)])
    per = {room: value / (side * side if room in VISION_ROOMS else length) for room, value in flops.items()}
    decoder = sum(value for room, value in per.items() if room not in VISION_ROOMS)
    vision = sum(per.get(room, 0.0) for room in VISION_ROOMS)
    table = Table(
        title=f"sizes; FLOPs (forward + backward) a token of {length}, a patch of {side} x {side}",
        title_justify="left",
    )
    for column in ("room", "parameters", "share", "FLOPs", "share"):
        table.add_column(
            column, justify="left" if column == "room" else "right", no_wrap=column in ("share", "FLOPs")
        )
    for room, parameters in count.by_room.items():
        if not parameters and not per.get(room):
            continue
        unit, whole = ("patch", vision) if room in VISION_ROOMS else ("token", decoder)
        cost = per.get(room, 0.0)
        shown = f"{scaled(cost)} / {unit}" if cost else "-"
        table.add_row(
            room,
            f"{parameters:,}",
            percent(parameters, count.total),
            shown,
            percent(cost, whole) if cost else "",
        )
    table.add_section()
    table.add_row("decoder", f"{decoder_parameters(count):,}", "", f"{scaled(decoder)} / token", "")
    table.add_row("active for a text token", f"{count.active:,}", percent(count.active, count.total), "", "")
    table.add_row("all", f"{count.total:,}", "", "", "")
    return table


def decoder_parameters(count: ParameterCount) -> int:
    """Parameters of the text side: everything but tower and projector."""
    return count.total - sum(count.by_room[room] for room in VISION_ROOMS)


def routing_table(config: RunConfig, model: NativeFusion) -> Table:
    """Which optimizer family trains each weight, layers of equal name and shape in one row."""
    groups = build_param_groups(
        model,
        config.optim.lr,
        config.optim.weight_decay,
        matrices="muon" if config.optim.name == "muonclip" else "adamw",
        muon_vision=config.optim.muon_vision,
        head_group_size=config.optim.head_group_size,
        overrides=config.optim.overrides,
    )
    for group in groups:
        group["rms"] = config.optim.rms
    decayed = {fqn for group in groups if group["weight_decay"] for fqn in group["fqns"]}
    table = Table(title="optimizer: who trains what", title_justify="left")
    for column in ("weights", "count", "shape", "family", "decay", "Muon blocks", "update scale"):
        table.add_column(column, overflow="fold")
    for (name, shape, family, blocks, scale, decay), rows in collapse(routing_rows(groups), decayed).items():
        scales = " ".join(f"{value:.3g}" for value in scale)
        sizes = " x ".join(map(str, shape)) or "scalar"
        table.add_row(name, str(len(rows)), sizes, family, "yes" if decay else "no", blocks, scales)
    return table


def collapse(rows: Sequence[TableRow], decayed: set[str]) -> dict[tuple, list[str]]:
    """Rows that differ only in layer numbers, together: (name with * for numbers, the rest) -> full names."""
    merged: dict[tuple, list[str]] = {}
    for row in rows:
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", row.fqn)
        key = (name, row.shape, row.family, row.blocks, tuple(row.scale), row.fqn in decayed)
        merged.setdefault(key, []).append(row.fqn)
    return merged


def stage_table(config: RunConfig) -> Table:
    """Steps, tokens and learning rates of each stage."""
    stages = StageTable(config.stages, config.optim.lr)
    table = Table(title=f"stages: {config.total_steps} steps", title_justify="left")
    for column in (
        "stage",
        "steps",
        "document",
        "tokens/step",
        "tokens",
        "patches/step",
        "schedule",
        "lr",
        "mixture",
        "frozen",
    ):
        table.add_column(column, overflow="fold")
    for index, stage in enumerate(config.stages):
        first, last = stages.starts[index], stages.starts[index + 1] - 1
        rates = f"{stages.lr(first):.2e} .. {stages.peak(index):.2e} .. {stages.lr(last):.2e}"
        per_step = stage.tokens * stage.lanes
        mixture = describe_mix(stage, {source.name: source.weight for source in config.data.sources})
        table.add_row(
            stage.name,
            f"{stage.steps}",
            f"<= {stage.length}",
            f"{stage.tokens:,} x {stage.lanes}",
            scaled(per_step * stage.steps),
            f"<= {stage.max_patches * stage.lanes:,}",
            stage.schedule,
            rates,
            mixture,
            ", ".join(stage.frozen) or "-",
        )
    return table


def scaled(value: float) -> str:
    """A count with a unit prefix: 1.23 G."""
    for limit, unit in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def show_plan(config: RunConfig, console: Console | None = None, *, brief: bool = False) -> None:
    """Print the plan; brief: sizes and stages alone. Raises UserError or RoutingError where the run itself
    would."""
    config = with_given_vocabulary(config)
    console = console or Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    model = meta_model(config)
    tables = [room_table(config, model), stage_table(config), routing_table(config, model)]
    for table in tables[: 2 if brief else 3]:
        print_table(console, table)
    if brief:
        console.print(f"output folder: {config.run.directory}", markup=False, soft_wrap=True)
        console.print(
            "checked; nothing was written. Routing and the whole recipe: earlyfusion plan", markup=False
        )
        return
    console.print(f"# resolved recipe {config.run.name}, hash {recipe_hash(config)}", markup=False)
    console.print(render(config), markup=False, soft_wrap=True)


def show_brief(config: RunConfig) -> None:
    """What --dry-run prints."""
    show_plan(config, brief=True)


def banner(training: Any) -> str:
    """Two lines on a run (pipeline/pretrain.py) that begins: model, device, processes; steps, tokens, time,
    folder."""
    config, runtime, model = training.config, training.runtime, training.fusion
    count, threads = count_parameters(model), torch.get_num_threads()
    where = (
        f"{runtime.world} x {threads} threads"
        if runtime.device.type == "cpu"
        else f"{runtime.world} processes"
    )
    stages = StageTable(config.stages, config.optim.lr)
    tokens = flops = 0.0
    for step in range(training.step, training.total):
        stage = config.stages[stages.index(step)]
        tokens += stage.tokens * stage.lanes
    length = config.stages[0].length
    rooms = training_flops(model.config, [length], [])
    flops = tokens * sum(cost for room, cost in rooms.items() if room not in VISION_ROOMS) / length
    peak = training.meter.peak
    time = duration(flops / (USUAL_MFU * peak * runtime.world)) if peak else "unknown"
    begun = f", from step {training.step}" if training.step else ""
    return (
        f"{config.run.name}: {scaled(count.total)} parameters ({scaled(count.active)} active),"
        f" {runtime.device} {where}\n{training.total - training.step:,} steps{begun}, {scaled(tokens)}"
        f" tokens, expected time {time}, to {config.run.directory}"
    )


def run(parsed: RecipeArguments) -> None:
    """Print the plan of the recipes given."""
    tree = compose(parsed.recipes, parsed.overrides)
    # a later stage has no model of its own: it takes that of the directory it starts from
    show_plan(validate(tree if "model" in tree else with_start(tree)))
