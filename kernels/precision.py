"""Which dtype a kernel multiplies in, and which it accumulates in.

An ``autograd.Function`` and a direct aten call both step around autocast, so every kernel states its dtypes
itself: the operands of matrix products are brought to ``compute_dtype`` (what ``F.linear`` would use in the
same place), and statistics (softmax sums, norms, logits) are kept in ``accumulate_dtype``.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from earlyfusion.kernels.products import product, with_onednn


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


def wide_bmm(a_BMK: Tensor, b_BKN: Tensor, alpha: float = 1.0) -> Tensor:
    """``alpha * a @ b`` of operands in one dtype, accumulated and returned in ``accumulate_dtype`` (no
    rounding back).

    On a CPU, products of bfloat16 operands go to oneDNN with float32 output
    (:mod:`earlyfusion.kernels.products`). Where it multiplies in bfloat16 (AMX) that is exact up to the order
    of the sums: the operands already are bfloat16 values.
    """
    wide = accumulate_dtype(a_BMK.dtype)
    # cuBLAS can give its float32 sums as they are.
    if a_BMK.device.type == "cuda" and a_BMK.dtype != wide:
        return torch.bmm(a_BMK, b_BKN, out_dtype=wide).mul_(alpha)
    out_BMN = a_BMK.new_empty(a_BMK.shape[0], a_BMK.shape[1], b_BKN.shape[2], dtype=wide)
    if a_BMK.device.type != "cpu" or a_BMK.dtype != torch.bfloat16:
        return torch.baddbmm(out_BMN, a_BMK.to(wide), b_BKN.to(wide), beta=0, alpha=alpha)
    return with_onednn(lambda: torch.baddbmm(out_BMN, a_BMK.to(wide), b_BKN.to(wide), beta=0, alpha=alpha))


def wide_mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """:func:`wide_bmm` for two matrices."""
    if a_MK.dtype == torch.float32:
        return product(a_MK, b_KN)
    return wide_bmm(a_MK[None], b_KN[None])[0]


def softmax_with_lse(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last axis and its log-sum-exp.

    The normaliser is read off the largest entry, p_max = exp(s_max - lse) >= 1 / size, which costs two maxima
    instead of another pass of exponentials and does not underflow.
    """
    p = torch.softmax(logits, dim=-1)
    return p, logits.amax(dim=-1) - p.amax(dim=-1).log()
