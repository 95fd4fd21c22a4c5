"""What every Triton wrapper needs on the host: checks that name the argument, tile choice, the device to
launch on.

Kernels trust their pointers, so anything that could make one read outside its tensor is refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what the Triton kernels read and write
MOST_BLOCKS = 65_535


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the current one for a launch; nothing on a CPU (Triton's interpreter)."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs(device: torch.device, per_multiprocessor: int = 1) -> int:
    """How many persistent programs fill the device; 3 under the interpreter, so that tests see several."""
    return _multiprocessors(device) * per_multiprocessor if device.type == "cuda" else 3


@lru_cache(maxsize=64)
def arch(device: torch.device) -> int:
    """Compute capability as 10 * major + minor; 90 off the GPU, where only the interpreter runs."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def check_tensor(
    op: str,
    name: str,
    tensor: Tensor,
    shape: Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] = FLOATS,
    device: torch.device | None = None,
    contiguous: bool = True,
) -> None:
    """Raise ValueError naming the argument unless dtype, shape, device and layout are what a kernel takes."""
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{op}: {name} is {str(tensor.dtype).removeprefix('torch.')}; expected one of {allowed}"
        )
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}; expected {tuple(shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{op}: {name} is on {tensor.device}; expected {device} like the other arguments")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(
            f"{op}: {name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; expected a"
            f" contiguous tensor, pass {name}.contiguous()"
        )


def check_blocks(op: str, what: str, count: int) -> None:
    """ValueError for more blocks than the second and third dimension of a CUDA grid take."""
    if count > MOST_BLOCKS:
        raise ValueError(
            f"{op}: {count:,} {what} in one call; a launch takes at most {MOST_BLOCKS:,}: split the batch"
        )


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size``."""
    return 1 << max(0, size - 1).bit_length()


def column_tile(width: int, most: int, least: int = 16, waste: float = 0.04) -> int:
    """Columns of a tile: the largest power of two of which whole tiles cover ``width`` with little waste.

    2304 = 9 x 256 and 2560 = 10 x 256 are covered exactly, where padding to a power of two would idle 44 %
    and 38 % of the lanes.
    """
    tile = most
    while tile > least and -(-width // tile) * tile > width * (1 + waste):
        tile //= 2
    return tile
