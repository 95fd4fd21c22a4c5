"""One of several gloo processes for test_qk_clip.py and test_muon_ranks.py; writes FOLDER/rank{RANK}.pt."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_mla import TinyMLA, TinyModel, fill_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from earlyfusion.pipeline import state
from earlyfusion.pipeline.optim import owners
from earlyfusion.pipeline.optim.muonclip import MuonClip
from earlyfusion.pipeline.optim.qk_clip import QKClip
from earlyfusion.pipeline.optim.routing import RoutingError, build_param_groups

TAU = 0.05
STEPS = 3
LATE = "mlp.down_proj.weight"  # has no gradient in the first step: frozen, or text alone
MISSING = "layers.0.self_attn.o_proj.weight"  # rank 1 lacks its gradient in the second step


def batch(rank: int) -> torch.Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(100 + rank))


def clipped_alone(batches: list[int]) -> tuple[dict, dict]:
    """Weights and metrics after QK-Clip over the given ranks' batches, as this process sees them."""
    torch.manual_seed(0)
    model = nn.ModuleList([TinyMLA(), TinyMLA(low_rank_query=True)])
    clip = QKClip(model, TAU)
    for rank in batches:
        for layer in model:
            layer.measure(batch(rank))
    clip.apply()
    return {n: p.detach().clone() for n, p in model.named_parameters()}, clip.metrics()


def shard(model: nn.Module, name: str, mesh, placements) -> None:
    """Cut a parameter under every name that it is tied to."""
    old = model.get_parameter(name)
    new = nn.Parameter(distribute_tensor(old.detach(), mesh, placements, src_data_rank=None))
    for module in model.modules():
        for attribute, param in module._parameters.items():
            if param is old:
                module._parameters[attribute] = new


def rows_of(rank: int, rows: int, ranks: int) -> slice:
    """Rows of a rank, as torch.chunk deals them."""
    step = -(-rows // ranks)
    return slice(min(rank * step, rows), min((rank + 1) * step, rows))


def train(
    mesh=None,
    ranks: int = 1,
    seed: int = 0,
    together: int | None = 1,
    steps=range(STEPS),
    after: Path | None = None,
    into: Path | None = None,
    ns_dtype: torch.dtype = torch.float32,
) -> dict:
    """Some MuonClip steps with a clipped head; every weight is sharded over the mesh if there is one. Returns
    full weights and momenta. ranks: shards, of which number 1 lacks one gradient once. after: a checkpoint to
    go on from; into: folder of one to write."""
    torch.manual_seed(seed)
    model = TinyModel()
    if after or into:
        del model.lm_head  # a second name of the embedding: the real decoder has one
    fill_gradients(model, seed)
    grads = {n: p.grad for n, p in model.named_parameters()}
    placements = None if mesh is None else [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    for name in list(grads) if mesh else ():
        shard(model, name, mesh, placements)
    groups = build_param_groups(model, lr=0.02, weight_decay=0.1, head_group_size=together)
    opt = MuonClip(groups, model, ns_dtype=ns_dtype, qk_clip=1.0)
    if after is not None:
        state.restore_model(model, after)
        state.restore_optimizer(opt, model, after, state.routing(opt, model), {})
    for step in steps:
        for name, param in model.named_parameters():
            grad = grads[name] * (1 + step)
            if step == 0 and name == LATE:
                param.grad = None
                continue
            if step == 1 and name == MISSING and ranks > 1:
                if mesh is not None and mesh.get_local_rank(mesh.ndim - 1) == 1:
                    param.grad = None
                    continue
                grad = grad.clone()
                grad[rows_of(1, grad.shape[0], ranks)] = 0
            param.grad = (
                grad.clone()
                if mesh is None
                else distribute_tensor(grad, mesh, placements, src_data_rank=None)
            )
        model.layers[1].self_attn.max_logit.copy_(torch.tensor([0.5, 4.0, 0.1, 1.5]))
        opt.step()
    if into is not None:
        state.write(state.collect(model, opt)[0], into)
    return wholes(model, opt)


def wholes(model: nn.Module, opt: MuonClip) -> dict:
    """Weights by name, optimizer state as name/key, put together."""
    found = dict(model.named_parameters())
    for name, param in model.named_parameters():
        found |= {f"{name}/{key}": value for key, value in opt.state[param].items()}
    full = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in found.items()}
    return {name: value.detach() for name, value in full.items()}


def refusal(mesh) -> str:
    """The error for a matrix whose columns are cut."""
    model = TinyModel()
    shard(model, "layers.0.self_attn.o_proj.weight", mesh, [Shard(1)])
    try:
        build_param_groups(model, lr=0.02, weight_decay=0.1)
    except RoutingError as error:
        return str(error)
    return ""


def start(rank: int, folder: str, world: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )


def main(rank: int, folder: str) -> None:
    start(rank, folder, 2)
    reduced: list[torch.dtype] = []
    counted("all_reduce", reduced)
    weights, metrics = clipped_alone([rank])
    out = {"clip": weights, "metrics": metrics, "reduced": len(reduced)}
    out["refusal"] = refusal(init_device_mesh("cpu", (2,)))
    torch.save(out, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


MESHES = {"2": (2,), "4": (4,), "2x2": (2, 2)}


def sharded(rank: int, folder: str, world: int, names: list[str], seed: int, together: int | None) -> None:
    """`train` over each of these meshes."""
    start(rank, folder, world)
    out = {}
    for name in names:
        shape = MESHES[name]
        out[name] = train(init_device_mesh("cpu", shape), shape[-1], seed, together)
    torch.save(out, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def counted(name: str, calls: list) -> None:
    """From here on a collective of torch.distributed notes the dtype that it sends."""
    real = getattr(dist, name)

    def call(*given, **named):
        calls.append(given[-1 if name == "all_reduce" else 1].dtype)
        return real(*given, **named)

    setattr(dist, name, call)


def moved(rank: int, folder: str, world: int, name: str, leg: str) -> None:
    """The first steps over a mesh, saved (leg "begin"), or the last one, after them (leg "end"), in many
    buckets."""
    start(rank, folder, world)
    mesh, saved, ranks = init_device_mesh("cpu", MESHES[name]), Path(folder, "saved"), MESHES[name][-1]
    owners.BUCKET_BYTES = 2000
    if leg == "begin":
        train(mesh, ranks, steps=range(STEPS - 1), into=saved)
    else:
        torch.save(train(mesh, ranks, steps=range(STEPS - 1, STEPS), after=saved), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def halves(rank: int, folder: str) -> None:
    """The dtypes of what a step sends where Newton-Schulz multiplies in bf16, and how far its weights are
    from those of the step in fp32."""
    start(rank, folder, 2)
    mesh, to_owners, reduced = init_device_mesh("cpu", (2,)), [], []
    exact = train(mesh, steps=range(1))
    counted("all_to_all_single", to_owners)
    counted("all_reduce", reduced)
    rounded = train(mesh, steps=range(1), ns_dtype=torch.bfloat16)
    far = max(float((exact[name] - rounded[name]).abs().max()) for name in exact)
    torch.save({"to_owners": to_owners, "reduced": reduced, "far": far}, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()
