"""One of two gloo processes for test_qk_clip.py; writes
FOLDER/rank{RANK}.pt."""

from datetime import timedelta

import torch
import torch.distributed as dist
from tiny_mla import TinyMLA, TinyModel, fill_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from earlyfusion.pipeline.optim.muonclip import MuonClip
from earlyfusion.pipeline.optim.qk_clip import QKClip
from earlyfusion.pipeline.optim.routing import RoutingError, build_param_groups

TAU = 0.05
SHARDED = (  # what a rank can train from its own rows: whole heads, whole experts
    "layers.0.self_attn.q_proj.weight",
    "layers.1.self_attn.q_proj.weight",
    "layers.1.self_attn.kv_b_proj.weight",
    "layers.0.block_sparse_moe.experts.gate_up_proj",
    "layers.0.block_sparse_moe.experts.down_proj",
    "embed_tokens.weight",
)


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


def shard(model: nn.Module, name: str, mesh) -> None:
    """Cut a parameter along dim 0, under every name that it is tied to."""
    old = model.get_parameter(name)
    new = nn.Parameter(distribute_tensor(old.detach(), mesh, [Shard(0)]))
    for module in model.modules():
        for attribute, param in module._parameters.items():
            if param is old:
                module._parameters[attribute] = new


def train(mesh=None) -> dict:
    """Two MuonClip steps with a clipped head; weights sharded over the mesh if there is one. Returns full
    weights."""
    torch.manual_seed(0)
    model = TinyModel()
    fill_gradients(model, 0)
    grads = {n: p.grad for n, p in model.named_parameters()}
    for name in SHARDED if mesh else ():
        shard(model, name, mesh)
    groups = build_param_groups(model, lr=0.02, weight_decay=0.1)
    opt = MuonClip(groups, model, ns_dtype=torch.float32, qk_clip=1.0)
    for step in range(2):
        for name, param in model.named_parameters():
            grad = grads[name] * (1 + step)
            param.grad = (
                distribute_tensor(grad, mesh, [Shard(0)]) if mesh and name in SHARDED else grad.clone()
            )
        model.layers[1].self_attn.max_logit.copy_(torch.tensor([0.5, 4.0, 0.1, 1.5]))
        opt.step()
    return {
        n: p.full_tensor().detach() if mesh and n in SHARDED else p.detach()
        for n, p in model.named_parameters()
    }


def refusal(mesh) -> str:
    """The error for a whole matrix whose rows are cut."""
    model = TinyModel()
    shard(model, "layers.0.self_attn.o_proj.weight", mesh)
    try:
        build_param_groups(model, lr=0.02, weight_decay=0.1)
    except RoutingError as error:
        return str(error)
    return ""


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    weights, metrics = clipped_alone([rank])
    mesh = init_device_mesh("cpu", (2,))
    out = {"clip": weights, "metrics": metrics, "train": train(mesh), "refusal": refusal(mesh)}
    torch.save(out, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()
