"""`earlyfusion plan RECIPE --gpus N --gpu h200`: memory, traffic, time and cost of a plan, and a plan that
fits where the one asked for does not.

The recipe's step is rehearsed on one rank without storage and without a network (rehearsal.py): what it
allocates and sends is exact but for kernels' workspaces. Times are a roofline's (hardware.py): predictions,
until `--calibrate RUN` scales them by a run that was measured on these machines.
"""

import re
import statistics
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import Tensor

from earlyfusion.data.tables import print_table
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.build import meta_model
from earlyfusion.pipeline.checkpoint import FOLDER, latest, load_tree
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.config.schema import RunConfig
from earlyfusion.pipeline.figures import percent, scaled
from earlyfusion.pipeline.optim.owners import Cut, is_cut, owners
from earlyfusion.pipeline.optim.registry import param_groups
from earlyfusion.pipeline.optim.routing import BlockSpec, blocks_in_words
from earlyfusion.pipeline.parallel.mesh import Layout, Sizes
from earlyfusion.pipeline.parallel.shard import cut_up
from earlyfusion.pipeline.planner.estimate import DAY, Estimate, StageEstimate
from earlyfusion.pipeline.planner.hardware import USABLE, Hardware, hardware
from earlyfusion.pipeline.planner.rehearsal import alone
from earlyfusion.pipeline.planner.search import asked, estimate, nearest
from earlyfusion.pipeline.progress import duration
from earlyfusion.pipeline.track import read_metrics

GIB = 2.0**30


def plan_for(
    config: RunConfig,
    gpus: int,
    gpu: str,
    patches: int | None,
    calibrate: str | None,
    console: Console,
) -> None:
    """Print what a plan on `gpus` machines of kind `gpu` needs, or the nearest that fits."""
    # Torch tells of what it will change; here nobody trains.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    machine, build = hardware(gpu), partial(meta_model, config)
    told = partial(print, file=sys.stderr, flush=True)
    sizes = asked(config, gpus, machine, build)
    found = estimate(config, build, sizes, machine, patches, told)
    factor, source = 1.0, "roofline, nothing of it measured"
    if calibrate is not None:
        factor = measured_over_predicted(calibrate, machine, told)
        source = f"roofline x {factor:.2f}, as measured in {calibrate}"
    show(config, build(), found, machine, factor, source, console)

    most = USABLE * machine.memory
    if found.peak <= most:
        return
    console.print(
        f"does not fit: {found.peak / GIB:.1f} GiB on the fullest rank, {most / GIB:.1f} GiB of a"
        f" {machine.name} can be used; looking for the nearest plan that does",
        soft_wrap=True,
    )
    fits = nearest(config, build, found, gpus, machine, patches, told)
    if fits is None:
        raise UserError(
            f"no plan on {gpus} x {machine.name} was found for {config.run.name}: take more GPUs, or lower"
            " the tokens or patches of a micro-batch (stages.NAME.tokens, max_patches)"
        )
    show(config, build(), fits, machine, factor, source, console)
    console.print(f"ask for it: {words(fits, config)}", soft_wrap=True)


def words(plan: Estimate, config: RunConfig) -> str:
    """The overrides of a plan."""
    sizes = plan.sizes
    said = [f"--parallel.{name} {getattr(sizes, name)}" for name in ("dp_shard", "ep", "cp", "pp")]
    if plan.recompute != config.train.recompute:
        said.append(f"--train.recompute {plan.recompute}")
    return " ".join(said)


def show(
    config: RunConfig,
    model: NativeFusion,
    plan: Estimate,
    machine: Hardware,
    factor: float,
    source: str,
    console: Console,
) -> None:
    """Memory, traffic and time of a plan, and what the whole recipe takes."""
    world = plan.sizes.world
    recompute = "" if plan.recompute == "no" else f", activations of a {plan.recompute} computed again"
    console.print(f"plan: {world} x {machine.name}, {plan.sizes}{recompute}", soft_wrap=True)
    print_table(memory_table(plan, machine), console)
    print_table(traffic_table(plan, machine), console)
    print_table(time_table(plan, factor), console)
    # A line of its own: a title would be cut where a path is long.
    console.print(f"times: {source}", soft_wrap=True)
    if plan.sizes.dp_shard * plan.sizes.cp > 1:
        print_table(owner_table(config, model, plan.sizes), console)

    tokens = sum(stage.tokens * stage.stage.steps for stage in plan.stages)
    seconds = plan.seconds * factor
    console.print(
        f"{scaled(tokens)} tokens: {seconds / DAY:.1f} days, {scaled(seconds / 3600 * world)} GPU hours;"
        f" a checkpoint {checkpoint_bytes(config, model) / GIB:.1f} GiB",
        soft_wrap=True,
    )


def memory_table(plan: Estimate, machine: Hardware) -> Table:
    """Bytes of the fullest rank at its fullest moment, by stage."""
    table = Table(title="memory of the fullest GPU, GiB", title_justify="left")
    for column in "stage weights gradients optimizer gathered activations peak share".split():
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage in plan.stages:
        rank = stage.rank
        parts = (rank.weights, rank.gradients, rank.optimizer, rank.gathered, rank.activations, rank.peak)
        numbers = [f"{part / GIB:.2f}" for part in parts]
        table.add_row(stage.stage.name, *numbers, percent(rank.peak, machine.memory))
    return table


def traffic_table(plan: Estimate, machine: Hardware) -> Table:
    """What one GPU sends in a step, by mesh dimension; of the stage that sends most."""
    stage = max(plan.stages, key=lambda stage: sum(link.sent for link in stage.links))
    title = f"sent by a GPU in a step of stage {stage.stage.name}"
    table = Table(title=title, title_justify="left")
    for column in ("operation", "along", "GPUs", "link", "bytes", "seconds"):
        table.add_column(column, justify="right" if column in ("GPUs", "bytes", "seconds") else "left")
    for link in stage.links:
        where = "node" if link.inside else "network"
        operation = link.operation.removesuffix("_base")
        numbers = f"{scaled(link.sent)}B", f"{link.seconds:.3g}"
        table.add_row(operation, link.dimension, str(link.ranks), where, *numbers)
    return table


def time_table(plan: Estimate, factor: float) -> Table:
    """A step of every stage."""
    table = Table(title="a step", title_justify="left")
    columns = "stage,passes s,bubble,optimizer s,step s,MFU,decoder FLOPs,vision FLOPs,tokens/s,time"
    for column in columns.split(","):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage in plan.stages:
        table.add_row(stage.stage.name, *timing(stage, factor))
    return table


def timing(stage: StageEstimate, factor: float) -> list[str]:
    rank, step_s = stage.rank, stage.step_s * factor
    return [
        f"{rank.compute_s * rank.micro_batches * factor:.3g}",
        percent(stage.bubble, 1.0),
        f"{rank.step_s * factor:.3g}",
        f"{step_s:.3g}",
        percent(stage.mfu / factor, 1.0),
        scaled(stage.decoder_flops),
        scaled(stage.vision_flops),
        scaled(stage.tokens / step_s),
        duration(stage.seconds * factor),
    ]


def owner_table(config: RunConfig, model: NativeFusion, sizes: Sizes) -> Table:
    """Where Newton-Schulz runs, for the first rank's layers: at the rows (whole heads, whole experts), or on
    the ranks that own matrices which are cut; weights that differ only in layer numbers in one row. model: on
    the meta device, used up."""
    found: dict[tuple[str, str, str], list[int]] = {}
    with alone(0, sizes.world):
        cut_up(model, Layout(sizes), nullcontext, config.train.mixed_precision)
        muon = [group for group in param_groups(config.optim, model) if group["family"] == "muon"]
        cuts: list[tuple[tuple[str, str, str], Cut]] = []
        for name, param, spec in (one for g in muon for one in zip(g["fqns"], g["params"], g["blocks"])):
            row = (re.sub(r"(?<=\.)\d+(?=\.)", "*", name), *described(param, spec))
            found.setdefault(row, [])
            if is_cut(param, spec):
                cuts.append((row, Cut(name, param, spec, param)))
        for (row, _), rank in zip(cuts, owners([cut for _, cut in cuts])):
            found[row].append(rank)
    table = Table(title="Muon: who orthogonalises what", title_justify="left")
    for column in ("weights", "shape", "blocks", "where"):
        table.add_column(column, overflow="fold")
    for row, ranks in found.items():
        table.add_row(*row, "ranks " + " ".join(map(str, ranks)) if ranks else "where its rows lie")
    return table


def described(param: Tensor, spec: BlockSpec) -> tuple[str, str]:
    return " x ".join(map(str, param.shape)), blocks_in_words(param.shape, spec)


def checkpoint_bytes(config: RunConfig, model: NativeFusion) -> int:
    """Weights, and the state of whoever trains each: one float32 a weight in Muon, two in AdamW."""
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    for group in param_groups(config.optim, model):
        states = 1 if group["family"] == "muon" else 2
        total += sum(4 * states * parameter.numel() for parameter in group["params"])
    return total


def measured_over_predicted(run: str, machine: Hardware, progress: partial[None]) -> float:
    """A measured run's seconds a step over those predicted for its recipe and plan. Raises UserError for a
    folder that is no run."""
    folder = Path(run)
    if not (folder / "recipe.toml").is_file():
        raise UserError(f"--calibrate {run}: no recipe.toml there; give the output folder of a run")
    records = [r for r in read_metrics(folder / "metrics.jsonl", "train") if r.get("step_s")]
    if not records:
        raise UserError(f"--calibrate {run}: no measured step in metrics.jsonl; let it run longer")
    if (newest := latest(folder / FOLDER)) is None:
        raise UserError(f"--calibrate {run}: no checkpoint there, which says how many processes it had")
    world = load_tree(newest / "run")["world"]
    config = load_config([str(folder / "recipe.toml")])
    patches = statistics.mean(r["patches"] / r["step"] for r in records[-1:])
    build = partial(meta_model, config)
    sizes = asked(config, world, machine, build)
    first = config.model_copy(update={"stages": config.stages[:1]})
    lanes = config.stages[0].lanes
    predicted = estimate(first, build, sizes, machine, int(patches / lanes), progress).stages[0].step_s
    return statistics.median(r["step_s"] for r in records) / predicted
