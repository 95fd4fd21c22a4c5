"""Pipeline parallelism by torch.distributed.pipelining: every stage runs some blocks of Attention Residuals.

A block reads the sums of all blocks before it, so that a stage needs more than the last activation. With
several stages a rank (`pp_virtual`, the interleaved schedule) most of them have passed this rank already:

    stage c receives   the sums that were made since this rank's stage before (c - pp), all of them at first
    stage c keeps      every sum it has seen, for the next stage on this rank: only new ones travel
    stage c sends      what the rank of stage c + 1 has not seen

Kept sums are leaves of the later stage. Its backward comes first, and what it finds for them is added where
they were kept (`Kept`), so gradients are those of one process but for the order of a sum.

Cuts lie between blocks, where no sum is half done. The first stage holds tower, projector and embedding, the
last one norm and head. All ranks of a pipeline read the same lanes; pictures are encoded on the first stage.

Sources: Attention Residuals (arXiv 2603.15031) section 4 (caching across stages);
torch.distributed.pipelining. Shapes: T tokens, D hidden.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from earlyfusion.model.fusion import FusionOutput, NativeFusion
from earlyfusion.pipeline.optim.routing import is_sharded
from earlyfusion.pipeline.parallel.mesh import Layout


def cuts(blocks: int, stages: int, unit: int = 1) -> list[range]:
    """Blocks of every stage, as even as whole units allow; the first ones take what is left over."""
    size, rest = divmod(blocks // unit, stages)
    ends = [0]
    for stage in range(stages):
        ends.append(ends[-1] + (size + (stage < rest)) * unit)
    return [range(low, high) for low, high in zip(ends, [*ends[1:-1], blocks])]


@dataclass
class Memory:
    """Block sums of the micro-batches that are under way on this rank: [micro-batch][source] -> leaf."""

    leaves: list[dict[int, Tensor]] = field(default_factory=list)


class Kept(torch.autograd.Function):
    """Identity; leaves a detached copy of its input for a later stage, and takes up the gradient that the
    copy has got when its own backward comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor) -> Tensor:
        ctx.leaf = leaf
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        more, ctx.leaf = ctx.leaf.grad, None
        return grad if more is None else grad + more, None


class Stage(nn.Module):
    """Some blocks of the model, as torch's PipelineStage calls it. before, now, after: numbers of the sources
    that this rank has kept, that arrive, and that go on."""

    def __init__(self, pipeline: "Pipeline", index: int) -> None:
        super().__init__()
        self.index, self.last = index, index == pipeline.stages - 1
        # (In a list: what is registered here are the parts of this stage alone.)
        self.of = [pipeline]
        fusion, self.blocks = pipeline.fusion, pipeline.cuts[index]
        per_layer = 2 / fusion.decoder.sublayers_per_block if fusion.config.text.attn_res != "none" else 1
        first, end = round(self.blocks.start / per_layer), round(self.blocks.stop / per_layer)
        self.layers = nn.ModuleList(fusion.decoder.layers[first : min(end, len(fusion.decoder.layers))])
        ends: list[nn.Module | None] = []
        if index == 0:
            ends = [fusion.vision_tower, fusion.mm_projector, fusion.decoder.embed_tokens]
        if self.last:
            decoder = fusion.decoder
            ends += [decoder.norm, decoder.lm_head, getattr(decoder, "output_attn_res_norm", None)]
        self.ends = nn.ModuleList([module for module in ends if module is not None])
        self.start_step()

    def start_step(self) -> None:
        """Micro-batches begin anew."""
        self.at = 0

    def forward(self, *received: Tensor) -> Any:
        pipeline, at = self.of[0], self.at
        self.at += 1
        batch, route = pipeline.batches[at], pipeline.routes[at]
        with pipeline.autocast():
            return self.run(received, batch, route, pipeline.memory.leaves[at])

    def run(self, received: Sequence[Tensor], batch: Any, route: Any, leaves: dict[int, Tensor]) -> Any:
        """The sources that go on, or the loss [1] of the last stage."""
        pipeline = self.of[0]
        fusion, decoder = pipeline.fusion, pipeline.fusion.decoder
        arriving, leaving = pipeline.arriving(self.index), pipeline.arriving(self.index + 1)
        known: dict[int, Tensor] = dict(leaves)
        if self.index == 0:
            known[0] = fusion.embed(batch, route)
        else:
            known |= dict(zip(arriving, received, strict=True))

        counted_T = batch.ids != fusion.config.text.pad_token_id
        if pipeline.residual:
            known = self.keep(known, leaves)
            (x_TD,) = decoder.run((known[0],), self.blocks, batch.segments, counted_T=counted_T)
            sources: tuple[Tensor, ...] = (x_TD,)
        else:
            known = self.keep(known, leaves)
            given = tuple(known[i] for i in sorted(known))
            sources = decoder.run(given, self.blocks, batch.segments, counted_T=counted_T)
            if not self.last and self.index + pipeline.pp < pipeline.stages:
                made = {i: sources[i] for i in range(len(given), len(sources))}
                sources = (*sources[: len(given)], *self.keep(made, leaves).values())
        if not self.last:
            return sources[0] if pipeline.residual else tuple(sources[i] for i in leaving)

        out: FusionOutput = fusion.loss(decoder.finish(sources), batch)
        pipeline.outputs.append(out)
        return out.loss_sum[None]

    def keep(self, sources: dict[int, Tensor], leaves: dict[int, Tensor]) -> dict[int, Tensor]:
        """The same sources, from now on also known to the next stage of this rank."""
        pipeline = self.of[0]
        if pipeline.residual or self.index + pipeline.pp >= pipeline.stages:
            return sources
        out = {}
        for number, source in sources.items():
            leaf = source.detach().requires_grad_()
            out[number], leaves[number] = Kept.apply(source, leaf), leaf  # type: ignore[no-untyped-call]
        return out


class Pipeline:
    """The stages of this rank, and the schedule that runs them."""

    def __init__(
        self,
        fusion: NativeFusion,
        layout: Layout,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.fusion, self.layout, self.autocast = fusion, layout, autocast
        self.pp, self.virtual = layout.sizes.pp, layout.pp_virtual
        self.stages = self.pp * self.virtual
        self.residual = fusion.config.text.attn_res == "none"
        self.cuts = stage_cuts(fusion, self.stages)
        own = range(layout.pp_rank, self.stages, self.pp)
        self.own = [Stage(self, index) for index in own]
        self.memory = Memory()
        self.outputs: list[FusionOutput] = []
        self.batches: Sequence[Any] = ()
        self.routes: Sequence[Any] = ()
        self._schedules: dict[Any, Any] = {}

    def arriving(self, stage: int) -> list[int]:
        """Numbers of the sources that a stage receives: what was made since this rank's stage before."""
        if stage == 0 or stage >= self.stages:
            return []
        if self.residual:
            return [0]
        # Source 0 is the embedding, source i + 1 the sum of block i.
        seen = self.cuts[stage - self.pp].stop + 1 if stage >= self.pp else 0
        return list(range(seen, self.cuts[stage].start + 1))

    def step(self, batches: Sequence[Any], routes: Sequence[Any], scale: Tensor) -> list[FusionOutput]:
        """Forward and backward of a step's micro-batches, gradients summed into `.grad`; returns the last
        stage's results, an empty list elsewhere. scale: what losses are multiplied by."""
        self.batches, self.routes, self.outputs = batches, routes or [None] * len(batches), []
        self.memory = Memory([{} for _ in batches])
        for stage in self.own:
            stage.start_step()
        schedule = self.schedule(len(batches), batches[0].ids.shape[0], batches[0].ids.device)
        self.scale = scale
        first, last = self.layout.pp_rank == 0, self.own[-1].last
        numbers = torch.arange(len(batches), device=batches[0].ids.device)
        given = (numbers,) if first else ()
        schedule.step(*given, target=numbers if last else None, losses=[] if last else None)
        reduce_plain(self.fusion, self.layout)
        self.memory, outputs = Memory(), self.outputs
        self.batches, self.outputs = (), []
        return outputs

    def train(self) -> None:
        self.fusion.train()

    def schedule(self, count: int, tokens: int, device: torch.device) -> Any:
        """torch's schedule for so many micro-batches of so many tokens."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

        key = (count, tokens)
        if key in self._schedules:
            return self._schedules[key]
        group, like = self.layout.mesh["pp"].get_group(), self.fusion.config.text
        one = torch.empty(tokens, like.hidden_size, device="meta", requires_grad=True)
        made: list[Any] = []
        for stage in self.own:
            arriving = tuple(one for _ in self.arriving(stage.index))
            leaving = tuple(one for _ in self.arriving(stage.index + 1))
            made.append(
                PipelineStage(
                    stage,
                    stage.index,
                    self.stages,
                    device,
                    input_args=arriving or torch.empty(1, dtype=torch.int64, device="meta"),
                    output_args=leaving or torch.empty(1, device="meta", requires_grad=True),
                    group=group,
                )
            )
        settings: dict[str, Any] = {"loss_fn": self.scaled, "scale_grads": False}
        if self.virtual == 1:
            self._schedules[key] = Schedule1F1B(made[0], count, **settings)
        else:
            self._schedules[key] = ScheduleInterleaved1F1B(made, count, **settings)
        return self._schedules[key]

    def scaled(self, loss: Tensor, target: Tensor) -> Tensor:
        """What the schedule calls the loss."""
        return (loss * self.scale.to(loss.dtype)).sum()


def reduce_plain(model: NativeFusion, layout: Layout) -> None:
    """Sum the gradients of what no FSDP unit holds over the ranks that have it."""
    if layout.copies > 1:
        for parameter in model.parameters():
            if parameter.grad is not None and not is_sharded(parameter):
                dist.all_reduce(parameter.grad, group=layout.holders)


def stage_cuts(fusion: NativeFusion, stages: int) -> list[range]:
    """Blocks of every stage."""
    # Full Attention Residuals has two blocks a layer, which stay together.
    return cuts(fusion.decoder.num_blocks, stages, 2 if fusion.config.text.attn_res == "full" else 1)


def cut_down(fusion: NativeFusion, layout: Layout) -> None:
    """Take away what other ranks hold, in place; the model is on the meta device. Names stay what they
    are."""
    pipeline = Pipeline(fusion, layout, torch.no_grad)
    kept = {id(module) for stage in pipeline.own for module in stage.modules()}
    decoder = fusion.decoder
    for index, layer in enumerate(decoder.layers):
        if id(layer) not in kept:
            decoder.layers[index] = nn.Identity()
    if layout.pp_rank != 0:
        fusion.vision_tower = fusion.mm_projector = decoder.embed_tokens = None  # type: ignore[assignment]
    if not pipeline.own[-1].last:
        decoder.norm = decoder.lm_head = None  # type: ignore[assignment]
        if hasattr(decoder, "output_attn_res_norm"):
            decoder.output_attn_res_norm = decoder.output_attn_res_query = None  # type: ignore[assignment]
