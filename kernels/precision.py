"""Which dtype a kernel multiplies in, and which it accumulates in.

An ``autograd.Function`` and a direct aten call both step around autocast, so every kernel states its dtypes itself:
the operands of matrix products are brought to ``compute_dtype`` (what ``F.linear`` would use in the same place), and
statistics (softmax sums, norms, logits) are kept in ``accumulate_dtype``.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 (so that gradient checks mean something), float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The autocast dtype where autocast is on for the tensors' device, else their promoted dtype.

    float64 is left alone by autocast, as in torch.
    """
    promoted = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    device = tensors[0].device.type
    if promoted != torch.float64 and device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return promoted


def without_autocast(tensor: Tensor) -> torch.autocast:
    """A context in which operations on the tensor's device keep the dtypes they are given."""
    device = tensor.device.type
    return torch.autocast("cpu" if device == "meta" else device, enabled=False)
