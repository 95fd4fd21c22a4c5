"""Which plan: the one asked for if it fits, else the nearest that does.

Nearest: as few changes as possible, cheap ones first. More shards cost traffic, experts on several ranks and
recomputation cost time, sharing a row or a pipeline costs both.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from earlyfusion.kernels.errors import UserError
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.config.schema import RunConfig
from earlyfusion.pipeline.parallel.mesh import Sizes, check_encoder, check_model, check_stage, sizes_of
from earlyfusion.pipeline.planner.estimate import Estimate, StageEstimate, estimate_stage
from earlyfusion.pipeline.planner.hardware import NODE, USABLE, Hardware

FP32 = 4  # bytes
LITTLE = 0.25
"""Share of a GPU's memory up to which replicas are the plan that is proposed."""
FEW = 4
"""Layers of an AttnRes block up to which its activations are fewer than the inputs of all layers."""
TRIES = 12
"""Plans that are rehearsed before the search gives up."""
SPLITS = (1, 2, 4, 8, 16, 32)
"""Sizes of contexts and pipelines that are tried."""
Progress = Callable[[str], None]


def asked(config: RunConfig, gpus: int, machine: Hardware, build: Callable[[], NativeFusion]) -> Sizes:
    """The recipe's sizes on so many GPUs. Where it names none: replicas for a model whose state takes little
    of a GPU, else shards. Raises UserError for sizes that do not fit."""
    named = config.parallel.model_dump(exclude_defaults=True).keys() & {"dp_shard", "ep", "cp", "pp"}
    replicas = Sizes(dp_replicate=gpus)
    if named or gpus == 1:
        sizes = sizes_of(config.parallel, gpus, {})
        refuse(config, sizes)
        return sizes
    state = 4 * FP32 * sum(parameter.numel() for parameter in build().parameters())
    if state < LITTLE * machine.memory:
        refuse(config, replicas)
        return replicas
    found = next(candidates(config, gpus, replicas), None)
    if found is None:
        refuse(config, Sizes(dp_shard=gpus))
        raise UserError(
            f"no way was found to share {config.run.name} between {gpus} GPUs: name one by parallel"
        )
    return found


def refuse(config: RunConfig, sizes: Sizes) -> None:
    """UserError where the run itself would refuse these sizes."""
    check_model(sizes, config.model, config.parallel.pp_virtual)
    check_encoder(sizes, config.parallel.encoder)
    for stage in config.stages:
        check_stage(sizes, stage.name, stage.tokens, stage.lanes)


def candidates(config: RunConfig, gpus: int, start: Sizes) -> Iterator[Sizes]:
    """Sizes that the recipe allows, by how far they are from `start`."""
    shards = [size for size in range(1, gpus + 1) if gpus % size == 0 and size & (size - 1) == 0]
    found = []
    for pp, cp, dp_shard in product(SPLITS, SPLITS, shards):
        if gpus % (pp * cp * dp_shard):
            continue
        # Experts on the ranks of a node, whose links are fast, on as many as share a layer, or on one.
        ways = (min(NODE, dp_shard * cp), dp_shard * cp, 1)
        for ep in dict.fromkeys(largest_divisor(config.model.num_experts, ranks) for ranks in ways):
            sizes = Sizes(pp, gpus // (pp * cp * dp_shard), dp_shard, cp, ep)
            try:
                refuse(config, sizes)
            except UserError:
                continue
            found.append(sizes)
    near = min(gpus, NODE)

    def distance(sizes: Sizes) -> tuple[int, ...]:
        far = max(start.dp_shard, near)
        return (
            (sizes.pp != start.pp) + (sizes.cp != start.cp),
            sizes.pp * sizes.cp,
            sizes.dp_shard < far,
            sizes.dp_shard,
            sizes.ep == 1,
            sizes.ep,
        )

    yield from sorted(found, key=distance)


def largest_divisor(experts: int, ranks: int) -> int:
    """The most ranks that can share the experts."""
    return next((n for n in range(min(experts, ranks), 0, -1) if experts % n == 0 and ranks % n == 0), 1)


def state_bytes(parameters: int, sizes: Sizes) -> float:
    """Weights, gradients and momentum of a rank, at least: a plan that cannot hold these is not rehearsed."""
    return 3.0 * FP32 * parameters / (sizes.dp_shard * sizes.cp * sizes.pp)


def estimate(
    config: RunConfig,
    build: Callable[[], NativeFusion],
    sizes: Sizes,
    machine: Hardware,
    patches: int | None,
    progress: Progress,
    most: float = float("inf"),
) -> Estimate:
    """All stages under one plan, the one with the most tokens first; it ends with that one if it needs more
    than `most` bytes. patches: of a micro-batch's pictures, None: as many as the stage allows."""
    known: dict[object, StageEstimate] = {}
    found = {}
    for stage in sorted(config.stages, key=lambda stage: -stage.tokens):
        filled = min(stage.max_patches, stage.max_patches if patches is None else patches)
        key = (stage.tokens, stage.length, stage.lanes, filled)
        if key not in known:
            progress(f"rehearsing stage {stage.name} under {sizes}")
            known[key] = estimate_stage(config, build, sizes, stage, machine, filled)
        found[stage.name] = replace(known[key], stage=stage)
        if known[key].rank.peak > most:
            break
    stages = [found[stage.name] for stage in config.stages if stage.name in found]
    return Estimate(sizes, config.train.recompute, stages)


def recomputing(config: RunConfig) -> RunConfig:
    """The recipe as it is if it computes activations again, else in the way that keeps fewer."""
    if config.train.recompute != "no":
        return config
    at = "block" if config.model.sublayers_per_block() <= 2 * FEW else "layer"
    return config.model_copy(update={"train": config.train.model_copy(update={"recompute": at})})


def nearest(
    config: RunConfig,
    build: Callable[[], NativeFusion],
    start: Estimate,
    gpus: int,
    machine: Hardware,
    patches: int | None,
    progress: Progress,
) -> Estimate | None:
    """The first plan near `start` that fits; None where none of those tried does."""
    most = USABLE * machine.memory
    parameters = sum(parameter.numel() for parameter in build().parameters())
    way = recomputing(config)
    tried = [start] if start.recompute == way.train.recompute else []
    for sizes in candidates(config, gpus, start.sizes):
        if state_bytes(parameters, sizes) > most or any(hopeless(sizes, one, most) for one in tried):
            continue
        if len(tried) > TRIES:
            return None
        found = estimate(way, build, sizes, machine, patches, progress, most)
        if found.peak <= most:
            return found
        tried.append(found)
    return None


def hopeless(sizes: Sizes, tried: Estimate, most: float) -> bool:
    """Whether what did not fit before cannot fit under `sizes` either: shards and shared experts leave
    activations as large as they are, ranks that share a row share them at best."""
    if sizes == tried.sizes:
        return True
    if sizes.pp != tried.sizes.pp or sizes.cp < tried.sizes.cp:
        return False
    activations = max(stage.rank.activations for stage in tried.stages)
    return activations * tried.sizes.cp / sizes.cp > most
