"""sample.cpp from Python. What is chosen and why: model/engine/sampler.py.

Shapes: B rows of a batch, V vocabulary, N banned ids.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from earlyfusion.kernels.checks import check_shapes, check_tensors
from earlyfusion.kernels.cpu.build import library
from earlyfusion.kernels.cpu.library import AT, INT, compiled, run_shared


class Sampling(ctypes.Structure):
    _fields_ = [
        *((name, INT) for name in ("vocabulary", "drawn", "known")),
        *((name, AT) for name in ("logits", "keys", "positions", "temperature", "top_p", "min_p", "banned")),
        ("count", INT),
        ("masks", AT),
        ("out", AT),
        ("rows", INT),
    ]


def takes(logits_BV: Tensor) -> bool:
    """Whether `sample` is there for these logits: fp32 on a CPU, with a compiler."""
    return logits_BV.is_cpu and logits_BV.dtype == torch.float32 and library() is not None


def sample(
    logits_BV: Tensor,
    keys_B: Tensor,
    positions_B: Tensor,
    temperature_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    banned: Tensor,
    *,
    drawn: bool,
    logprobs: bool,
) -> Tensor:
    """`sampler.choose` of fp32 logits, which are not changed: float64 [3, B].

    keys, positions int64, the other controls fp32; without `drawn` every row is greedy and they are not
    looked at. banned: int64 ids [N] for all rows, or bool [B, V].

    Raises:
        ValueError: a dtype, device or length that does not fit, or a banned id outside the vocabulary.
    """
    rows, vocabulary = logits_BV.shape
    mask = banned.dtype == torch.bool
    controls = {"temperature_B": temperature_B, "top_p_B": top_p_B, "min_p_B": min_p_B}
    places = {"keys_B": keys_B, "positions_B": positions_B}
    check_shapes("sample", logits_BV=logits_BV, **places, **controls)
    cpu = torch.empty(0)
    check_tensors("sample", cpu, (torch.float32,), "any", logits_BV=logits_BV, **controls)
    check_tensors("sample", cpu, (torch.int64,), "any", **places)
    check_tensors("sample", cpu, (torch.bool, torch.int64), "any", banned=banned)
    if not mask and banned.numel():
        # An id outside would be written outside the row.
        smallest, largest = (int(edge) for edge in banned.aminmax())
        if banned.dim() != 1 or smallest < 0 or largest >= vocabulary:
            raise ValueError(
                f"banned: expected ids [N] in 0..{vocabulary - 1}, got {tuple(banned.shape)} from {smallest}"
                f" to {largest}"
            )
    if mask:
        check_shapes("sample", {"B": rows, "V": vocabulary}, banned_BV=banned)
    # Kept under names: the structure holds addresses alone.
    given = (logits_BV, *places.values(), *controls.values(), banned)
    dense = [tensor.contiguous() for tensor in given]
    logits, *control_at, banned_at = (tensor.data_ptr() for tensor in dense)
    out_3B = torch.empty(3, rows, dtype=torch.float64)
    about = Sampling(
        vocabulary,
        drawn,
        logprobs,
        logits,
        *control_at,
        None if mask else banned_at,
        0 if mask else len(banned),
        banned_at if mask else None,
        out_3B.data_ptr(),
        rows,
    )
    run_shared(compiled().sample, (ctypes.byref(about),), range(rows + 1), torch.get_num_threads())
    return out_3B
