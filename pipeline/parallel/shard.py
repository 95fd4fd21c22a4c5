"""FSDP2 over the model, weights that reach it from rank 0, and a plain copy that gathers them again.

The model knows nothing of this. Every unit below is all-gathered when its forward begins and given back when
it ends, in the backward pass once more, and its gradients are reduce-scattered:

    a block of the tower, the rest of the tower, the projector, every token mixer, every feed-forward,
    the embedding (untied)

What is left (norms, pseudo-queries, head) is the root's and stays gathered through a step: a block
of Attention Residuals reads the queries of all its layers at its start. Experts are cut along the first axis,
so that a rank holds whole matrices, which Muon needs.

Gradients are summed and not averaged: the loss was divided by the weight of all ranks (pipeline/step.py).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.layers import Experts, SwiGLU
from earlyfusion.pipeline.optim.routing import is_sharded, local_part
from earlyfusion.pipeline.parallel.context import share_rows
from earlyfusion.pipeline.parallel.experts import share_out
from earlyfusion.pipeline.parallel.mesh import Layout, check_model
from earlyfusion.pipeline.parallel.stages import Pipeline, cut_down


def shard(model: Any, roots: Sequence[nn.Module], layout: Layout, mixed_precision: str = "no") -> None:
    """Apply FSDP2 (HSDP with several replicas) to a model on the meta device, in place. roots: whose forward
    is called: the model, or the stages of a pipeline."""
    # It takes a second to import, which a run that shards nothing need not pay.
    from torch.distributed.fsdp import (
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    mesh = layout.mesh["dp_replicate", "shard"] if layout.sizes.dp_replicate > 1 else layout.mesh["shard"]
    # Under autocast these would be cast to bf16 anyway: cast before they travel, half the bytes.
    halves = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    whole = MixedPrecisionPolicy(cast_forward_inputs=False)

    def unit(module: nn.Module, over=mesh) -> None:
        matrices = isinstance(module, Experts | SwiGLU) and mixed_precision == "bf16"
        fully_shard(module, mesh=over, mp_policy=halves if matrices else whole)

    for block in getattr(getattr(model.vision_tower, "encoder", None), "blocks", ()):
        unit(block)
    decoder, own = model.decoder, layout.expert_mesh if layout.sizes.ep > 1 else None
    for layer in decoder.layers:
        # A pipeline stage holds some of them.
        if isinstance(layer, nn.Identity):
            continue
        unit(layer.self_attn)
        if layer.sparse:
            experts = layer.block_sparse_moe.experts
            if own is None:
                unit(experts)
            else:
                unit(experts, own["dp_replicate", "efsdp"] if layout.sizes.dp_replicate > 1 else own["efsdp"])
        unit(layer.block_sparse_moe if layer.sparse else layer.mlp)
    parts = [model.vision_tower, model.mm_projector]
    parts += [] if model.config.text.tie_word_embeddings else [decoder.embed_tokens]
    for module in (*parts, *roots):
        if module is not None:
            unit(module)

    # Called on the whole model, as `forward` is.
    if roots == [model]:
        register_fsdp_forward_method(model, "within")
    for root in roots:
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                # Some rows use no head, or no tower: all ranks reduce the same parameters all the same.
                module.set_reduce_scatter_unused_params(True, recurse=False)


def fill(model: nn.Module, source: nn.Module | None, device: torch.device) -> None:
    """Give a model on the meta device storage, and the values that rank 0 has in `source`, tensor by tensor.

    source: the whole model on rank 0, None elsewhere. Every rank calls it; what a rank does not hold is
    passed over.
    """
    model.to_empty(device=device)
    own = named_tensors(model)
    given = {} if source is None else named_tensors(source)
    # Names and shapes first: another rank knows neither, where it holds other layers.
    facts: list = [{name: (tensor.shape, tensor.dtype) for name, tensor in given.items()}]
    dist.broadcast_object_list(facts, src=0)
    for name, (shape, dtype) in facts[0].items():
        full = torch.empty(shape, dtype=dtype, device=device)
        if source is not None:
            full.copy_(given[name].detach())
        dist.broadcast(full, src=0)
        if name in own:
            take(own[name], full)


@torch.no_grad()
def take(target: Tensor, full: Tensor) -> None:
    """Copy the part of `full` that this rank holds of `target`."""
    local_part(target).copy_(local_of(full, target))


def local_of(full: Tensor, like: Tensor) -> Tensor:
    """The rows of `full` that this rank holds of a tensor like this one."""
    if not is_sharded(like):
        return full
    part, mesh = full, like.device_mesh
    placements: Sequence[Any] = like.placements
    # FSDP cuts what expert parallelism has cut before, although its mesh dimension comes first.
    for index in reversed(range(mesh.ndim)):
        placement = placements[index]
        if not placement.is_replicate():
            size, rank = mesh.size(index), mesh.get_local_rank(index)
            rows = math.ceil(part.shape[placement.dim] / size)
            start = min(rank * rows, part.shape[placement.dim])
            part = part.narrow(placement.dim, start, min(rows, part.shape[placement.dim] - start))
    return part


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those that no checkpoint keeps among them."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


@contextmanager
def gathered(plain: NativeFusion, model: NativeFusion, layout: Layout) -> Iterator[NativeFusion]:
    """`plain`, a copy on the meta device, with the weights of the sharded `model`, tensor by tensor; every
    rank calls it and holds the whole model for as long."""
    plain.to_empty(device=model.device)
    own = named_tensors(model)
    with torch.no_grad():
        for name, target in named_tensors(plain).items():
            if name in own:
                target.copy_(full(own[name]))
            if layout.sizes.pp > 1:
                # From the first stage that has it: the order of stages is that of ranks.
                owner = torch.tensor([layout.pp_rank if name in own else layout.sizes.pp])
                group = layout.mesh["pp"].get_group()
                dist.all_reduce(owner, op=dist.ReduceOp.MIN, group=group)
                dist.broadcast(target, group_src=int(owner), group=group)
    try:
        yield plain
    finally:
        plain.to("meta")


def full(tensor: Tensor) -> Tensor:
    """A tensor put together; every rank that holds a part of it calls it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def clip_grad_norm(model: NativeFusion, limit: float, layout: Layout) -> float:
    """Norm of the gradients of all ranks, each counted once; gradients are scaled down to `limit`."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for grad in grads:
        # Of a tensor in two shards on eight ranks there are four copies.
        total += local_part(grad).double().pow(2).sum() * (shards_of(grad) / layout.copies)
    dist.all_reduce(total)
    norm = float(total.sqrt())
    if norm > limit:
        scale = limit / (norm + 1e-6)
        torch._foreach_mul_([local_part(grad) for grad in grads], scale)
    return norm


def shards_of(tensor: Tensor) -> int:
    """In how many parts a tensor lies on the ranks."""
    if not is_sharded(tensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(i) for i, placed in enumerate(tensor.placements) if not placed.is_replicate())


def spread(
    build: Callable[[], NativeFusion], layout: Layout, device: torch.device, accelerator: Any
) -> tuple[Any, NativeFusion, NativeFusion]:
    """(what trains: the model or a Pipeline; the model, sharded, with the weights of `build`, which rank 0
    alone calls; a plain copy for `gathered`)."""
    # One rank holds the whole model for a moment, the others never do.
    source = build() if layout.rank == 0 else None
    known: list[Any] = [None if source is None else (source.config, torch.get_rng_state())]
    dist.broadcast_object_list(known, src=0)
    config, random_state = known[0]
    check_model(layout.sizes, config.text)
    with torch.device("meta"):
        model, plain = NativeFusion(config), NativeFusion(config)

    pipeline = cut_up(model, layout, accelerator.autocast, accelerator.mixed_precision)
    fill(model, source, device)
    # As if every rank had drawn the weights.
    torch.set_rng_state(random_state)
    return pipeline or model, model, plain


def cut_up(
    model: NativeFusion, layout: Layout, autocast: Callable[[], Any], mixed_precision: str
) -> Pipeline | None:
    """Leave of a model on the meta device what this rank holds, in place; returns the pipeline that runs it,
    if there is one. Its tensors have no storage yet."""
    model.always_sees = layout.sharded
    pipeline: Pipeline | None = None
    roots: Sequence[nn.Module] = [model]
    if layout.sizes.pp > 1:
        cut_down(model, layout)
        pipeline = Pipeline(model, layout, autocast)
        roots = pipeline.own
    if layout.sizes.ep > 1:
        share_out(model, layout)
    if layout.sizes.cp > 1:
        share_rows(model)
    if layout.sharded and layout.copies > 1:
        shard(model, roots, layout, mixed_precision)
    return pipeline
