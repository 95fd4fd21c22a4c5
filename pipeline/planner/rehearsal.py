"""One optimizer step of one rank of a plan, without storage, without a network and without the other ranks.

    the recipe's model, cut as the plan cuts it -> forward, backward, MuonClip, on tensors without storage

It is the code of the run itself, so what it allocates and what it sends is what a run allocates and sends:
nothing here knows how a plan works. Two micro-batches (or a pipeline's worth) are enough: behind them every
buffer has been there once. Collectives go to torch's "fake" process group, which does nothing.

Source: torchtitan's estimate.py counts memory in the same way (FakeTensorMode and a fake process group).
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from earlyfusion.data.loading.encode import PackedBatch
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.config.schema import RunConfig, StageSection
from earlyfusion.pipeline.optim import muonclip, qk_clip
from earlyfusion.pipeline.optim.owners import shard_group
from earlyfusion.pipeline.optim.registry import find_optimizer
from earlyfusion.pipeline.optim.routing import is_sharded, local_part
from earlyfusion.pipeline.parallel.context import cut
from earlyfusion.pipeline.parallel.mesh import Layout, Sizes
from earlyfusion.pipeline.parallel.shard import cut_up
from earlyfusion.pipeline.parallel.stages import Pipeline
from earlyfusion.pipeline.planner.hardware import Clock, Hardware
from earlyfusion.pipeline.planner.standins import shapes_alone
from earlyfusion.vision.patches import Grid, VisionCost, num_patches, num_tokens

SIDE = 32  # patches along the side of an example picture, at most
CONTROL = (torch.float64, torch.uint8)
"""Dtypes of totals and of objects, which are small and not counted as traffic."""


class Traffic:
    """Counts what this rank hands to collectives. bytes: (operation, group) -> bytes; group: its mesh
    dimension's name where `layout` knows it."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.bytes = layout, Counter[tuple[str, str]]()

    def see(self, func: Any, args: Any) -> None:
        """One operation of torch."""
        if func.namespace not in ("c10d", "_c10d_functional"):
            return
        name = func.__name__.split(".")[0].strip("_").removesuffix("_")
        # Of (output, input, ...) the input is sent; broadcast and all-reduce work in place.
        given = args[1] if name in ("allgather_base", "reduce_scatter_base", "alltoall_base") else args[0]
        tensors = given if isinstance(given, list | tuple) else [given]
        sent = [x for x in tensors if isinstance(x, Tensor) and x.dtype not in CONTROL]
        if sent and "recv" not in name and "wait" not in name:
            self.bytes[name, self.group(args)] += sum(x.numel() * x.element_size() for x in sent)

    def group(self, args: Any) -> str:
        for arg in args:
            if isinstance(arg, torch.ScriptObject):
                return self.layout.name_of(dist.ProcessGroup.unbox(arg))
        return "world"


class Observed(TorchDispatchMode):
    """Shows every operation inside to those who count; real operations as well."""

    def __init__(self, traffic: Traffic, memory: "Memory | None" = None, clock: Clock | None = None) -> None:
        super().__init__()
        self.traffic, self.memory, self.clock = traffic, memory, clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.traffic.see(func, args)
        out = func(*args, **kwargs)
        if self.memory is not None:
            for one in out if isinstance(out, list | tuple) else (out,):
                # (A sharded tensor has no storage of its own; its local part is seen by itself.)
                if isinstance(one, Tensor) and not is_sharded(one):
                    self.memory.see(one)
        if self.clock is not None:
            self.clock.see(func, args, kwargs, out)
        return out


class Memory:
    """Bytes of this rank that are alive, and the most that were. held: what FSDP has gathered, part of
    it."""

    def __init__(self) -> None:
        self.live = self.peak = self.held = self.held_at_peak = 0
        self._known: dict[int, int] = {}
        self._gathered: set[int] = set()

    def see(self, tensor: Tensor) -> None:
        """A tensor that may have a storage of its own."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = 0
            weakref.finalize(storage, self.set, key, 0, True)
            self.set(key, storage.nbytes())

    def set(self, key: int, size: int, gone: bool = False) -> None:
        more = size - self._known[key]
        self.live += more
        self._known[key] = size
        if key in self._gathered:
            self.held += more
        if gone:
            del self._known[key]
            self._gathered.discard(key)
        if self.live > self.peak:
            self.peak, self.held_at_peak = self.live, self.held

    def resized(self, tensor: Tensor, full: bool) -> None:
        """FSDP fills a gathered parameter with storage, or takes it away."""
        self.see(tensor)
        key = tensor.untyped_storage()._cdata
        if key not in self._gathered:
            self._gathered.add(key)
            self.held += self._known[key]
        self.set(key, tensor.numel() * tensor.element_size() if full else 0)

    def start(self) -> None:
        """Measure the most from here on."""
        self.peak, self.held_at_peak = self.live, self.held


@dataclass(frozen=True)
class Rehearsed:
    """Bytes of one rank. peak: the most, of which the fields before it are parts; micro_batches: of a step;
    compute_s: seconds of the passes of one of them; step_s: of the optimizer; sent: (operation, group) ->
    bytes of one step."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    peak: int
    micro_batches: int = 1
    compute_s: float = 0.0
    step_s: float = 0.0
    sent: Mapping[tuple[str, str], int] = field(default_factory=dict)


def lengths_of(stage: StageSection) -> list[int]:
    """Documents of a full row, as long as the stage allows."""
    tokens, length = stage.tokens, stage.length
    return [length] * (tokens // length) + [tokens % length] * bool(tokens % length)


def grids_of(config: RunConfig, patches: int) -> list[Grid]:
    """Pictures of `patches` patches in all, square ones of at most SIDE."""
    cfg = config.vision
    step = max(cfg.merge_kernel_size)
    side = min(SIDE, int(min(patches, cfg.in_patch_limit) ** 0.5) // step * step)
    return [(1, side, side)] * (patches // side**2 if side else 0)


def row(config: RunConfig, stage: StageSection, patches: int) -> PackedBatch:
    """A full packed row with pictures of `patches` patches."""
    tokens, cfg, grids = stage.tokens, config.vision, grids_of(config, patches)
    media = sum(num_tokens(grid, cfg.merge_kernel_size) for grid in grids)
    pictures = torch.zeros(
        sum(map(num_patches, grids)), cfg.in_channels, cfg.patch_size, cfg.patch_size, dtype=torch.uint8
    )
    return PackedBatch(
        ids=torch.arange(tokens) % config.model.vocab_size,
        labels=torch.arange(tokens) % config.model.vocab_size,
        loss_weights=torch.ones(tokens),
        segments=Segments(tuple(lengths_of(stage))),
        patches=pictures,
        grids=grids,
        media_positions=torch.arange(min(media, tokens)),
        source_ids=torch.zeros(tokens, dtype=torch.int16),
        sources=[],
        has_image=torch.zeros(tokens, dtype=torch.bool),
    )


@contextmanager
def alone(rank: int, world: int) -> Iterator[None]:
    """Inside, this process is one rank of a world that is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    told = sys.excepthook
    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        sys.excepthook = told
        if world > 1:
            dist.destroy_process_group()
            # It remembers meshes by their shape, and with them groups that are gone.
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            _clear_sharding_prop_cache()


def everywhere(params: Sequence[Any]) -> list[bool]:
    """In place of owners.agreed: all of them have a gradient."""
    known_P = torch.empty(len(params))
    dist.all_reduce(known_P, op=dist.ReduceOp.MAX, group=shard_group(params[0]))
    return [True] * len(params)


def agreed_mode(self: Any, stages: Sequence[Any], *_: Any) -> None:
    """In place of the vote of a pipeline's stages (torch 2.13): all of them know their shapes."""
    from torch.distributed.pipelining.schedules import InferenceMode  # as below

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


@contextmanager
def without_values(memory: Memory, clock: Clock) -> Iterator[None]:
    """Inside, nothing that asks for values is asked, and FSDP tells `memory` what it gathers."""
    # Here and not above, as all that brings torch.distributed.tensor: it takes two seconds, and the head of
    # every run comes through this module.
    from torch.distributed.pipelining import schedules

    fsdp = "torch.distributed.fsdp._fully_shard"
    optimizer: dict[str, Any] = {"agreed": everywhere}
    if clock.machine.gpu:
        optimizer["CHUNK_ELEMENTS"] = {}
    with ExitStack() as stack:
        stack.enter_context(shapes_alone(clock.machine.gpu, clock))
        stack.enter_context(patch.multiple(muonclip, **optimizer))
        stack.enter_context(patch.object(qk_clip.QKClip, "exceeds", lambda self, S: False))
        if hasattr(schedules._PipelineSchedule, "_warmup_p2p"):
            stack.enter_context(patch.object(schedules._PipelineSchedule, "_warmup_p2p", agreed_mode))
        for place in ("_fsdp_param", "_fsdp_param_group"):
            for name, full in (("alloc_storage", True), ("free_storage", False)):
                changed = partial(memory.resized, full=full)
                stack.enter_context(patch(f"{fsdp}.{place}.{name}", changed, create=True))
        yield


class Rehearsal:
    """One rank of a plan, ready to step. model: on the meta device, whole; used up."""

    def __init__(
        self,
        config: RunConfig,
        model: NativeFusion,
        sizes: Sizes,
        rank: int,
        gpu: bool,
        stage: StageSection,
        patches: int,
    ) -> None:
        self.config, self.stage, self.gpu = config, stage, gpu
        self.layout = Layout(sizes, rank, pp_virtual=config.parallel.pp_virtual)
        if self.layout.sharded:
            # Made now: inside the rehearsal nothing has values.
            self.layout.mesh  # noqa: B018
        self.bf16 = config.train.mixed_precision == "bf16"
        self.pipeline = cut_up(model, self.layout, self.autocast, config.train.mixed_precision)
        self.model = model
        model.recompute(config.train.recompute)
        self.micro_batches = max(1, stage.lanes // self.layout.data_world)
        self.route: Any = None
        self.batch = self.own_part(patches)

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bf16)

    def own_part(self, patches: int) -> PackedBatch:
        """What this rank has of a row; with values, as the plans of rows are made of them."""
        whole, layout = row(self.config, self.stage, patches), self.layout
        if layout.sizes.cp == 1:
            return whole
        vision, pad = self.config.vision, self.config.model.pad_token_id
        cost = VisionCost.from_config(vision)
        group = layout.mesh["cp"].get_group()
        part, self.route = cut(whole, layout.cp_rank, group, pad, cost, vision.merge_kernel_size)
        return part

    def passes(self, count: int) -> None:
        """Forward and backward of so many micro-batches."""
        batch, route = self.batch, self.route
        if isinstance(self.pipeline, Pipeline):
            self.pipeline.step([batch] * count, [route] * count, torch.ones(()))
            return
        for _ in range(count):
            with self.autocast():
                out = self.model(batch) if route is None else self.model(batch, route)
            out.loss_sum.backward()

    def step(self, memory: Memory, traffic: Traffic, clock: Clock) -> Rehearsed:
        """Measure a step."""
        self.model.to_empty(device="cpu")
        self.model.train()
        options = self.config.optim
        self.optimizer = find_optimizer(options.name).build(options, self.model)
        if self.gpu and isinstance(self.optimizer, muonclip.MuonClip):
            self.optimizer.ns_dtype = torch.bfloat16
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for tensor in tensors:
            memory.see(local_part(tensor))
        weights = memory.live

        # The state is there from the first step on: the second is the one to measure.
        # (A pipeline is full with as many micro-batches as stages; one holds more until it has been emptied.)
        warm = min(self.micro_batches, 1 if self.pipeline is None else 2 * self.layout.sizes.pp)
        self.passes(warm)
        once, compute_s = dict(traffic.bytes), clock.seconds / warm
        traffic.bytes.clear()
        clock.seconds = 0.0
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        gradients = sum(local_part(grad).nbytes for grad in grads)
        memory.start()
        self.optimizer.step()
        optimizer = sum(
            local_part(value).nbytes
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )
        at_step, stepping, step_s = memory.peak, dict(traffic.bytes), clock.seconds
        # With one micro-batch a step gradients are made anew, with more they are there.
        if self.micro_batches == warm:
            self.optimizer.zero_grad(set_to_none=True)
        del grads
        memory.start()
        self.passes(warm)
        peak = max(memory.peak, at_step)
        gathered = memory.held_at_peak if memory.peak >= at_step else 0
        times = self.micro_batches / warm
        sent = Counter({key: round(size * times) for key, size in once.items()})
        sent.update(stepping)
        if not self.layout.sharded and self.layout.sizes.world > 1:
            # DDP's buckets are exchanged by its C++, once a step.
            sent["allreduce", "dp_replicate"] += gradients
        rest = max(0, peak - weights - gradients - optimizer - gathered)
        parts = weights, gradients, optimizer, gathered, rest, peak
        return Rehearsed(*parts, self.micro_batches, compute_s, step_s, dict(sent))


def rehearse(
    config: RunConfig,
    build: Any,
    sizes: Sizes,
    *,
    machine: Hardware,
    stage: StageSection,
    patches: int,
    rank: int = 0,
) -> Rehearsed:
    """Memory and traffic of one rank of a plan in a step of `stage`. build: makes the model on the meta
    device; patches: of the pictures of a micro-batch."""
    memory, clock = Memory(), Clock(machine)
    with alone(rank, sizes.world):
        made = Rehearsal(config, build(), sizes, rank, machine.gpu, stage, patches)
        traffic = Traffic(made.layout)
        fake, watch = FakeTensorMode(allow_non_fake_inputs=True), Observed(traffic, memory, clock)
        with fake, without_values(memory, clock), watch:
            return made.step(memory, traffic, clock)
