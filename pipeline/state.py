"""Tensors of a training checkpoint: weights and optimizer state by the parameter's name, through
torch.distributed.checkpoint, whatever they are sharded over.

    model/<name>               a weight or buffer
    optimizer/<name>/<key>     one tensor of a parameter's state; parameters without state have none

Every rank writes the parts that it alone has to write into a safetensors file of its own, which says where in
the whole tensor they belong; every rank reads what it holds, however it is sharded now. So another number of
processes, or another plan, can go on. There is no pickle: DCP's own files carry one in `.metadata`, those in
the Hugging Face layout do not.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record
from earlyfusion.pipeline.optim.routing import RoutingError, local_part

MODEL, OPTIMIZER = "model/", "optimizer/"
# What one process does, and every rank that reads for itself, torch takes for a mistake.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def names_of(model: nn.Module) -> dict[Tensor, str]:
    """Parameter -> its name."""
    return {parameter: name for name, parameter in model.named_parameters()}


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], Record]:
    """(all tensors by their names in a checkpoint, what of the optimizer's state is no tensor, by name)."""
    tensors = {MODEL + name: value for name, value in model.state_dict().items()}
    rest: Record = {}
    names = names_of(model)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            place = f"{OPTIMIZER}{names[parameter]}/{key}"
            if isinstance(value, Tensor):
                # The layout has no scalars.
                tensors[place] = value if value.ndim else value[None]
            else:
                rest[place] = value
    return tensors, rest


def routing(optimizer: torch.optim.Optimizer, model: nn.Module) -> Record:
    """Which group trains each parameter, and in what blocks: what state belongs to."""
    names, found = names_of(model), {}
    for number, group in enumerate(optimizer.param_groups):
        blocks = group.get("blocks") or [[] for _ in group["params"]]
        for parameter, spec in zip(group["params"], blocks, strict=True):
            found[names[parameter]] = [group.get("name", str(number)), list(spec)]
    return found


def staged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, which a step may not change while they are written."""
    copies = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu() if tensor.device.type != "cpu" else tensor.detach().clone()
        copies[name] = copy
    return copies


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's parts."""
    return sum(local_part(tensor).nbytes for tensor in tensors)


def write(tensors: Mapping[str, Tensor], folder: Path, group: Any = None) -> None:
    """Write this rank's parts into `folder`; every rank of `group` calls it. Raises OSError on all ranks
    where one cannot write."""
    # It takes a while to import, which a run that never saves need not pay.
    import torch.distributed.checkpoint as dcp

    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    alone = not (dist.is_initialized() and dist.get_world_size() > 1)
    try:
        dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=alone)
    except dcp.CheckpointException as error:
        # It wraps what went wrong on any rank, tracebacks and all.
        first, *_ = next(iter(error.failures.values()))
        raise OSError(str(first)) from None


def known(folder: Path) -> dict[str, Any]:
    """Name -> torch's metadata (`size`, `properties.dtype`) of every tensor in a checkpoint."""
    import torch.distributed.checkpoint as dcp

    return dict(dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def read(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill `tensors` (this rank's parts) from a checkpoint. Raises UserError that names a tensor which it
    lacks, or has in another shape."""
    import torch.distributed.checkpoint as dcp

    facts = known(folder)
    for name, tensor in tensors.items():
        if name not in facts or tuple(facts[name].size) != tuple(tensor.shape):
            found = f"is {tuple(facts[name].size)}" if name in facts else "is missing"
            raise UserError(
                f"checkpoint {folder}: {name} {found}, the model has {tuple(tensor.shape)}: it was written by"
                " another model"
            )
    # Every rank plans for itself: what it holds is all that it reads.
    if tensors:
        reader = dcp.HuggingFaceStorageReader(str(folder))
        dcp.load(dict(tensors), storage_reader=reader, no_dist=True)


def weights(folder: Path) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint, whole, by name; all of them in memory."""
    facts = {name: fact for name, fact in known(folder).items() if name.startswith(MODEL)}
    found = {name: torch.empty(fact.size, dtype=fact.properties.dtype) for name, fact in facts.items()}
    read(found, folder)
    return {name.removeprefix(MODEL): tensor for name, tensor in found.items()}


def reader(model: nn.Module, folder: Path) -> Callable[[str], Tensor]:
    """name -> the whole tensor in a checkpoint, read when it is asked for; model: whose, on any device."""

    # Of a stack of experts every matrix is asked for in turn; the stack is read once.
    @lru_cache(maxsize=1)
    def one(name: str) -> Tensor:
        tensor = torch.empty_like(model.state_dict()[name], device="cpu")
        read({MODEL + name: tensor}, folder)
        return tensor

    return one


@torch.no_grad()
def restore_model(model: nn.Module, folder: Path) -> None:
    """Put the weights and buffers of a checkpoint into a model, in place."""
    read({MODEL + name: value.detach() for name, value in model.state_dict().items()}, folder)


@torch.no_grad()
def restore_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, folder: Path, saved: Record, rest: Record
) -> None:
    """Put the optimizer's state of a checkpoint back; hyper-parameters are the recipe's.

    saved: `routing` when it was written, of all ranks. rest: what is no tensor. Raises RoutingError where a
    parameter was trained in another group or other blocks.
    """
    for name, place in routing(optimizer, model).items():
        if name not in saved or saved[name] != place:
            raise RoutingError(
                f"the optimizer state in {folder} is of another model or routing: {name} is in"
                f" {place}, it was in {saved.get(name)}"
            )
    facts = known(folder)
    found: dict[Tensor, dict[str, Any]] = {}
    for parameter, name in names_of(model).items():
        prefix = f"{OPTIMIZER}{name}/"
        for place in [place for place in facts if place.startswith(prefix)]:
            size, dtype = facts[place].size, facts[place].properties.dtype
            # Moments lie as their parameter does; counters are everybody's.
            if tuple(size) == tuple(parameter.shape):
                like = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
            else:
                like = torch.zeros(size, dtype=dtype, device=parameter.device)
            found.setdefault(parameter, {})[place.removeprefix(prefix)] = like
        for place, value in rest.items():
            if place.startswith(prefix):
                found.setdefault(parameter, {})[place.removeprefix(prefix)] = value

    wanted = {}
    names = names_of(model)
    for parameter, state in found.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                wanted[f"{OPTIMIZER}{names[parameter]}/{key}"] = value
    read(wanted, folder)
    optimizer.state.clear()
    for parameter, state in found.items():
        scalar = {key: value[0] for key, value in state.items() if key == "step" and value.shape == (1,)}
        optimizer.state[parameter] = state | scalar
