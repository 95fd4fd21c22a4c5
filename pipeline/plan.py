"""`earlyfusion plan RECIPE` and `--dry-run`: what a recipe will build and do, without data and without
weights.

Prints parameters and FLOPs by room and the stages with their tokens and learning rates (that much is
`--dry-run`), how the optimizer routes every weight, and the resolved recipe. The model is built on the meta
device, so the 48B recipe prints about as fast as nano. `banner` is the head of a run.
"""

import math
import re
from collections import Counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from earlyfusion.data.tables import print_table, terminal
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record
from earlyfusion.kernels.products import HALVED
from earlyfusion.model.config import ModelConfig
from earlyfusion.model.flops import ParameterCount, count_parameters, training_flops
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.adapter import adapted
from earlyfusion.pipeline.bench.frame import GROWTH, saved_record
from earlyfusion.pipeline.build import meta_model, own_tokenizer, with_tokenizer
from earlyfusion.pipeline.config.arguments import RecipeArguments
from earlyfusion.pipeline.config.compose import compose, recipe_hash, render, validate
from earlyfusion.pipeline.config.schema import RunConfig
from earlyfusion.pipeline.figures import percent, scaled
from earlyfusion.pipeline.optim.registry import param_groups
from earlyfusion.pipeline.optim.routing import blocks_in_words
from earlyfusion.pipeline.planner.options import PlanOptions
from earlyfusion.pipeline.planner.show import plan_for
from earlyfusion.pipeline.progress import duration
from earlyfusion.pipeline.schedule import StageTable
from earlyfusion.pipeline.sft_start import with_start
from earlyfusion.pipeline.stage_data import describe_mix

VISION = ("vision", "projector")
USUAL_MFU = 0.3
"""Share of the peak that training reaches where it runs well, if nothing was measured."""
SIDE_PATCHES = 32  # the example image of the FLOP table: 448 x 448 pixels at 14 pixels a patch


def size_table(config: RunConfig, model: NativeFusion) -> Table:
    """Parameters, and forward + backward FLOPs per token (decoder) or per patch (vision), by part."""
    # Costs are of a document of the first stage's length: attention makes them grow with it.
    count = count_parameters(model)
    length = config.stages[0].length
    side = min(SIDE_PATCHES, int(config.vision.in_patch_limit**0.5) // 2 * 2)
    flops = {}
    for part, cost in training_flops(model.config, [length], [(1, side, side)]).items():
        flops[part] = cost / (side * side if part in VISION else length)
    vision = sum(flops.get(part, 0.0) for part in VISION)
    decoder = sum(flops.values()) - vision

    title = f"sizes; FLOPs (forward + backward) a token of {length}, a patch of {side} x {side}"
    table = Table(title=title, title_justify="left")
    table.add_column("part")
    for column in ("parameters", "share", "FLOPs", "share"):
        table.add_column(column, justify="right", no_wrap=column != "parameters")
    for part, parameters in count.by_room.items():
        cost = flops.get(part, 0.0)
        unit, whole = ("patch", vision) if part in VISION else ("token", decoder)
        if parameters or cost:
            costs = (f"{scaled(cost)} / {unit}", percent(cost, whole)) if cost else ("-", "")
            table.add_row(part, f"{parameters:,}", percent(parameters, count.total), *costs)

    table.add_section()
    table.add_row("decoder", f"{decoder_parameters(count):,}", "", f"{scaled(decoder)} / token", "")
    table.add_row("active for a text token", f"{count.active:,}", percent(count.active, count.total), "", "")
    table.add_row("all", f"{count.total:,}", "", "", "")
    return table


def decoder_parameters(count: ParameterCount) -> int:
    """Parameters of the text side: everything but tower and projector."""
    return count.total - sum(count.by_room[part] for part in VISION)


def routing_table(config: RunConfig, model: NativeFusion) -> Table:
    """Which optimizer family trains each weight; weights that differ only in layer numbers in one row."""
    rows: Counter[tuple[str, ...]] = Counter()
    for group in param_groups(config.optim, model):
        decay = "yes" if group["weight_decay"] else "no"
        for fqn, param, spec in zip(group["fqns"], group["params"], group["blocks"], strict=True):
            # 27 layers that are alike are one row.
            name = re.sub(r"(?<=\.)\d+(?=\.)", "*", fqn)
            sizes = " x ".join(map(str, param.shape)) or "scalar"
            rows[name, sizes, group["family"], decay, blocks_in_words(param.shape, spec)] += 1

    table = _table("optimizer: who trains what", "weights,count,shape,family,decay,Muon blocks")
    for (name, *about), count in rows.items():
        table.add_row(name, str(count), *about)
    return table


def stage_table(config: RunConfig) -> Table:
    """Steps, tokens and learning rates of each stage."""
    stages = StageTable(config.stages, config.optim.lr)
    weights = {source.name: source.weight for source in config.data.sources}
    columns = "stage,steps,document,tokens/step,tokens,patches/step,schedule,lr,mixture,frozen"
    table = _table(f"stages: {config.total_steps} steps", columns)
    for index, stage in enumerate(config.stages):
        first, last = stages.starts[index], stages.starts[index + 1] - 1
        table.add_row(
            stage.name,
            f"{stage.steps}",
            f"<= {stage.length}",
            f"{stage.tokens:,} x {stage.lanes}",
            scaled(stage.tokens * stage.lanes * stage.steps),
            f"<= {stage.max_patches * stage.lanes:,}",
            stage.schedule,
            f"{stages.lr(first):.2e} .. {stages.peak(index):.2e} .. {stages.lr(last):.2e}",
            describe_mix(stage, weights),
            ", ".join(stage.frozen) or "-",
        )
    return table


def _table(title: str, columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns.split(","):
        table.add_column(column, overflow="fold")
    return table


def show_plan(config: RunConfig, console: Console | None = None, *, brief: bool = False) -> None:
    """Print the plan; brief: sizes and stages alone. Raises UserError or RoutingError where the run itself
    would."""
    # The vocabulary of the recipe's own tokenizer, when it names one; else the size it asks for.
    console = console or terminal()
    if config.tokenizer.path is not None:
        tokens = own_tokenizer(config.tokenizer.path)
        config = with_tokenizer(config, tokens)
        added = f"{len(tokens.added)} special tokens added" if tokens.added else "nothing added"
        text = f"tokenizer {config.tokenizer.path}: {tokens.vocab_size:,} entries, {added}"
        console.print(text, markup=False, soft_wrap=True)
    model = meta_model(config)
    routing = routing_table(config, model)  # made in any case: it is what raises
    print_table(size_table(config, model), console)
    print_table(stage_table(config), console)
    if brief:
        last = "checked; nothing was written. Routing and the whole recipe: earlyfusion plan"
        console.print(f"output folder: {config.run.directory}\n{last}", markup=False, soft_wrap=True)
        return
    console.print(time_line(config, model), markup=False, soft_wrap=True)
    print_table(routing, console)
    console.print(f"# resolved recipe {config.run.name}, hash {recipe_hash(config)}", markup=False)
    console.print(render(config), markup=False, soft_wrap=True)


def nearest_growth(model: ModelConfig, length: int) -> Record | None:
    """The case of `bench growth` on this machine that is nearest by the ratios of length, width and experts;
    None where nothing was measured here."""
    try:
        every = saved_record(GROWTH).get("cases", {}).values()
    except (OSError, UserError):
        return None
    # Not where the peak is unknown, nor of a record from before it was kept.
    cases = [case for case in every if case.get("roofline, GFLOP/s")]
    wanted = {"length": length, "hidden_size": model.hidden_size, "num_experts": model.num_experts or 1}
    apart = lambda case: sum(abs(math.log((case[name] or 1) / size)) for name, size in wanted.items())
    return min(cases, key=apart, default=None)


def time_line(config: RunConfig, model: NativeFusion) -> str:
    """What the stages' tokens cost as text on this machine, as far as it was measured."""
    seconds = 0.0
    for stage in config.stages:
        case = nearest_growth(model.config.text, stage.length)
        if case is None:
            return "time: unknown; `earlyfusion bench growth` measures this machine"
        flops = text_flops(model, stage.length) * stage.tokens * stage.lanes * stage.steps
        seconds += flops / (1e9 * case["share of the roofline"] * case["roofline, GFLOP/s"])
    return f"time: {duration(seconds)} for forward and backward, all tokens as text, by {GROWTH}"


def text_flops(model: NativeFusion, length: int) -> float:
    """FLOPs of training, a token of a document without pictures."""
    by_part = training_flops(model.config, [length], [])
    return sum(cost for part, cost in by_part.items() if part not in VISION) / length


def show_brief(config: RunConfig) -> None:
    """What --dry-run prints."""
    show_plan(config, brief=True)


def banner(training: Any) -> str:
    """Two lines on a run (pipeline/pretrain.py) that begins: model, device, processes; steps, tokens, time,
    folder."""
    config, runtime, model = training.config, training.runtime, training.fusion
    workers = f"{torch.get_num_threads()} threads" if runtime.device.type == "cpu" else "processes"
    stages = StageTable(config.stages, config.optim.lr)
    tokens = 0.0
    for step in range(training.step, training.total):
        stage = config.stages[stages.index(step)]
        tokens += stage.tokens * stage.lanes

    # The text side alone: how many pictures there will be is not known before they are drawn.
    length, time = config.stages[0].length, "unknown"
    if training.meter.peak:
        case = nearest_growth(model.config.text, length)
        share = USUAL_MFU if case is None else case["share of the roofline"]
        time = duration(tokens * text_flops(model, length) / (share * training.meter.peak * runtime.world))

    # Of experts a token passes a few, so both sizes matter: what is stored, what is computed.
    count = count_parameters(model)
    spread = f" ({runtime.layout.sizes})" if runtime.layout.sharded else ""
    begun = f", from step {training.step}" if training.step else ""
    learned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    adapters = f", {scaled(learned)} trained" if adapted(model) else ""
    return (
        f"{config.run.name}: {scaled(count.total)} parameters ({scaled(count.active)} active{adapters}),"
        f" {runtime.device} {runtime.world} x {workers}{spread}{f', {HALVED}' if training.halved else ''}"
        f"\n{training.total - training.step:,} steps{begun},"
        f" {scaled(tokens)} tokens, expected time {time}, to {config.run.directory}"
    )


def run(parsed: RecipeArguments) -> None:
    """Print the plan of the recipes given."""
    tree = compose(parsed.recipes, parsed.overrides)
    # a later stage has no model of its own: it takes that of the directory it starts from
    config = validate(tree if "model" in tree else with_start(tree))
    options = parsed.options
    if not isinstance(options, PlanOptions) or options.gpus is None:
        show_plan(config)
        return
    plan_for(config, options.gpus, options.gpu, options.patches, options.calibrate, terminal())
