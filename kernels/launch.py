"""What every Triton launcher needs: is triton there, is it interpreted, which tiles, which device.

Nothing here imports triton at module level, so a machine without it can import every launcher.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

MOST_BLOCKS = 65_535  # of the second and third dimension of a CUDA grid


@dataclass(frozen=True)
class Hardware:
    """What launchers ask of a GPU."""

    arch: int  # compute capability: 10 * major + minor
    multiprocessors: int


# Off the GPU only the interpreter runs: three, so that tests see several programs. tests/kernels/aot.py puts
# the device here that it compiles for.
OFF_GPU = Hardware(arch=90, multiprocessors=3)


# Asking the driver takes longer than a launch.
@lru_cache(maxsize=64)
def _read(device: torch.device) -> Hardware:
    about = torch.cuda.get_device_properties(device)
    return Hardware(10 * about.major + about.minor, about.multi_processor_count)


def hardware(device: torch.device) -> Hardware:
    """Of the GPU that the tensors are on."""
    return _read(device) if device.type == "cuda" else OFF_GPU


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the current one for a launch; nothing on a CPU (Triton's interpreter)."""
    # Triton launches on the current device, not on that of the tensors.
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def interpreted(kernel: Any) -> bool:
    """True if ``kernel`` was defined under TRITON_INTERPRET=1 and therefore runs on CPU tensors, in numpy."""
    return type(kernel).__name__ == "InterpretedFunction"


def constant(value: Any, kernel: Any) -> Any:
    """``value``, which is no number, as a member of a named tuple of constants: wrapped for Triton's
    compiler, which up to 3.6 does not hand it on to a function otherwise, and bare for its interpreter."""
    if interpreted(kernel):
        return value
    from triton.language import constexpr

    return constexpr(value)


def dot_dtype(dtype: torch.dtype, kernel: Any) -> torch.dtype:
    """Dtype of matrix product operands: that of the inputs; float32 under the interpreter, whose bfloat16 is
    broken."""
    return torch.float32 if interpreted(kernel) else dtype


def check_blocks(op: str, what: str, count: int) -> None:
    """ValueError for more blocks than the second and third dimension of a CUDA grid take."""
    if count > MOST_BLOCKS:
        raise ValueError(
            f"{op}: {count:,} {what} in one call; a launch takes at most {MOST_BLOCKS:,}: split the batch"
        )


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size``."""
    return 1 << max(0, size - 1).bit_length()


def column_tile(width: int, most: int) -> int:
    """Columns of a tile: the largest power of two of which whole tiles cover ``width`` with little waste.

    2304 = 9 x 256 and 2560 = 10 x 256 are covered exactly, where padding to a power of two would idle 44 %
    and 38 % of the lanes.
    """
    tile = most
    # Padding to the next power of two would idle almost half of the lanes for common widths.
    while tile > 16 and -(-width // tile) * tile > width * 1.04:
        tile //= 2
    return tile
