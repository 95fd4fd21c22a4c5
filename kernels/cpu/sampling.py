"""sample.cpp from Python. What is chosen and why: model/engine/sampler.py.

Shapes: B rows of a batch, V vocabulary, N banned ids.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

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
    wanted = (
        (logits_BV, torch.float32),
        (keys_B, torch.int64),
        (positions_B, torch.int64),
        (temperature_B, torch.float32),
        (top_p_B, torch.float32),
        (min_p_B, torch.float32),
        (banned, torch.bool if mask else torch.int64),
    )
    for tensor, dtype in wanted:
        if tensor.dtype != dtype or tensor.device.type != "cpu":
            raise ValueError(
                f"expected {dtype} on the CPU, got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            )
    for name, tensor in (
        ("keys", keys_B),
        ("positions", positions_B),
        ("temperature", temperature_B),
        ("top_p", top_p_B),
        ("min_p", min_p_B),
    ):
        if tensor.shape != (rows,):
            raise ValueError(
                f"{name}: expected one number for each of {rows} rows, got {tuple(tensor.shape)}"
            )
    if not mask and banned.numel():
        smallest, largest = (int(edge) for edge in banned.aminmax())
        if banned.dim() != 1 or smallest < 0 or largest >= vocabulary:
            raise ValueError(
                f"banned: expected ids [N] in 0..{vocabulary - 1}, got {tuple(banned.shape)} from {smallest}"
                f" to {largest}"
            )
    if mask and banned.shape != logits_BV.shape:
        raise ValueError(f"banned: expected a mask {tuple(logits_BV.shape)}, got {tuple(banned.shape)}")
    # kept under a name: the structure holds addresses alone
    dense = [tensor.contiguous() for tensor, _ in wanted]
    logits, *controls, banned_at = (tensor.data_ptr() for tensor in dense)
    out_3B = torch.empty(3, rows, dtype=torch.float64)
    about = Sampling(
        vocabulary,
        drawn,
        logprobs,
        logits,
        *controls,
        None if mask else banned_at,
        0 if mask else len(banned),
        banned_at if mask else None,
        out_3B.data_ptr(),
        rows,
    )
    run_shared(compiled().sample, (ctypes.byref(about),), range(rows + 1), torch.get_num_threads())
    return out_3B
