"""What a plan needs and how long it takes: memory, traffic by link, a step's time, days for the recipe.

    step = max(micro-batches x passes x (1 + bubble), weights on the way)
         + rows, tokens and block sums on the way + the optimizer, and its matrices on the way

Gathering weights and summing gradients overlap with the passes; what a layer waits for (rows of experts,
tokens of a context, block sums of a pipeline) does not.

Sources: pipeline bubble (p - 1) / (m v): arXiv 2104.04473 section 2.2; wire bytes of collectives: rings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from earlyfusion.model.flops import training_flops
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.config.schema import RunConfig, StageSection
from earlyfusion.pipeline.parallel.mesh import Sizes
from earlyfusion.pipeline.planner.hardware import Hardware
from earlyfusion.pipeline.planner.rehearsal import Rehearsed, grids_of, lengths_of, rehearse

DAY = 86400.0
WEIGHTS = ("allgather_base", "reduce_scatter_base", "allreduce")
"""Operations that bring weights and gradients; overlapped, but for those of a context."""


@dataclass(frozen=True)
class Link:
    """Traffic of one rank in one step along one mesh dimension. sent: bytes handed over; inside: whether the
    group lies in one node; seconds: on the wire."""

    operation: str
    dimension: str
    ranks: int
    inside: bool
    sent: int
    seconds: float


@dataclass(frozen=True)
class StageEstimate:
    """One stage of a recipe under a plan."""

    stage: StageSection
    rank: Rehearsed
    links: Sequence[Link]
    bubble: float
    step_s: float
    decoder_flops: float
    vision_flops: float
    mfu: float

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.stage.tokens * self.stage.lanes

    @property
    def seconds(self) -> float:
        """Of the whole stage."""
        return self.step_s * self.stage.steps


@dataclass(frozen=True)
class Estimate:
    """A plan on some machines."""

    sizes: Sizes
    recompute: str
    stages: Sequence[StageEstimate]

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return max(stage.rank.peak for stage in self.stages)

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)


def place(dimension: str, sizes: Sizes) -> tuple[int, int]:
    """(ranks, stride) of a mesh dimension; neighbours in it are `stride` ranks apart (parallel/mesh.py)."""
    shard = sizes.dp_shard * sizes.cp
    return {
        "cp": (sizes.cp, 1),
        "ep": (sizes.ep, 1),
        "efsdp": (shard // sizes.ep, sizes.ep),
        "dp_shard": (sizes.dp_shard, sizes.cp),
        "shard": (shard, 1),
        "dp_replicate": (sizes.dp_replicate, shard),
        "holders": (sizes.world // sizes.pp, 1),
        "pp": (sizes.pp, sizes.world // sizes.pp),
    }.get(dimension, (sizes.world, 1))


def link(operation: str, dimension: str, sent: int, sizes: Sizes, machine: Hardware) -> Link:
    """How long bytes take: rings for collectives of all, one adapter a GPU for what goes to single ranks."""
    ranks, stride = place(dimension, sizes)
    near = max(1, min(ranks, machine.node // stride))
    inside, far = ranks * stride <= machine.node, (ranks - near) / ranks
    if operation in ("alltoall_base", "send"):
        share = far if operation == "alltoall_base" else float(not inside)
        seconds = sent * share / machine.net_bytes_s + sent * (near - 1) / ranks / machine.node_bytes_s
        if operation == "send" and inside:
            seconds = sent / machine.node_bytes_s
    else:
        # An all-gather receives the others' parts, a reduce-scatter sends them, an all-reduce does both.
        parts = {"allgather_base": ranks - 1.0, "reduce_scatter_base": (ranks - 1) / ranks}
        wire = sent * parts.get(operation, 2 * (ranks - 1) / ranks)
        rate = machine.node_bytes_s
        seconds = wire / (rate if inside else min(rate, near * machine.net_bytes_s))
    return Link(operation, dimension, ranks, inside, sent, seconds)


def estimate_stage(
    config: RunConfig,
    build: Callable[[], NativeFusion],
    sizes: Sizes,
    stage: StageSection,
    machine: Hardware,
    patches: int,
) -> StageEstimate:
    """Rehearse the fullest rank (of a pipeline the first and the last) and add up. patches: of the pictures
    of a micro-batch."""
    ranks = [0] if sizes.pp == 1 else [0, sizes.world - 1]
    done = [
        rehearse(config, build, sizes, machine=machine, stage=stage, patches=patches, rank=rank)
        for rank in ranks
    ]
    rank = max(done, key=lambda one: one.peak)
    compute_s = max(one.compute_s for one in done) * rank.micro_batches
    links = [link(*key, sent, sizes, machine) for key, sent in sorted(rank.sent.items())]
    hidden = [one for one in links if one.operation in WEIGHTS and one.dimension != "cp"]
    shown_s = sum(one.seconds for one in links if one not in hidden)
    bubble = (sizes.pp - 1) / (rank.micro_batches * config.parallel.pp_virtual)
    passes_s = max(compute_s * (1 + bubble), sum(one.seconds for one in hidden))
    step_s = passes_s + shown_s + rank.step_s

    by_part = training_flops(build().config, lengths_of(stage), grids_of(config, patches))
    vision = (by_part.pop("vision") + by_part.pop("projector")) * stage.lanes
    decoder = sum(by_part.values()) * stage.lanes
    mfu = (vision + decoder) / (step_s * machine.peak * sizes.world)
    return StageEstimate(stage, rank, links, bubble, step_s, decoder, vision, mfu)
