"""The smallest thing that a checkpoint holds: one weight, and an optimizer that remembers something of it."""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


class Weight(nn.Module):
    """w [size], every entry `value`."""

    def __init__(self, value: float, size: int = 4) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((size,), float(value)))


def trained(value: float, size: int = 4) -> tuple[Weight, torch.optim.Optimizer]:
    """The weight, and momentum that is ten times as large."""
    model = Weight(value, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.w]["momentum_buffer"] = torch.full((size,), 10 * float(value))
    return model, optimizer


def sharded(value: float, size: int = 4) -> tuple[Weight, torch.optim.Optimizer]:
    """The same in shards over all ranks."""
    model, before = trained(value, size)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    cut = partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)])
    momentum = cut(before.state[model.w]["momentum_buffer"])
    model.w = nn.Parameter(cut(model.w.detach()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.w]["momentum_buffer"] = momentum
    return model, optimizer


def restored(loaded) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight, momentum) of a loaded checkpoint."""
    model, optimizer = trained(-1)
    loaded.restore_weights(model, optimizer)
    return model.w.detach(), optimizer.state[model.w]["momentum_buffer"]
