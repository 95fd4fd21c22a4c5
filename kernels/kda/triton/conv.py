"""Depthwise causal convolution with SiLU over packed documents, in Triton: forward, backward, state in and
out.

One launch serves the joined channels of q, k and v (x may be a slice of a wider projection: only the last
axis must be dense). Forward reads x and writes y; backward reads x and dy, writes dx, and sums dweight in a
fixed order (no atomics).

Definition: ``short_conv`` in kernels/kda/naive.py. Legend: T tokens, C channels, W taps, N documents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.checks import FLOATS, check_no_nan, check_tensors
from earlyfusion.kernels.kda.conv import check_conv, final_taps
from earlyfusion.kernels.kda.triton import conv_kernels as kernels
from earlyfusion.kernels.launch import on_device
from earlyfusion.kernels.segments import Segments

TILE_C = 64


def _row(
    x_TC: Tensor, weight_CW: Tensor, taps_NCW1: Tensor | None, segments: Segments
) -> tuple[kernels.Row, tuple[int, int], dict[str, int]]:
    """What the kernels read, how many tiles there are, and their sizes: fewer tokens where reads may go to
    the taps as well, which costs registers."""
    device, (tokens, channels) = x_TC.device, x_TC.shape
    position, ids = segments.position(device), segments.ids(device)
    # Positions and ids instead of a mask: a read reaches back only as far as its document.
    row = kernels.Row(x_TC, weight_CW, taps_NCW1, position, ids, tokens, channels, x_TC.stride(0))
    rows = 32 if taps_NCW1 is None else 16
    constants = {"W": weight_CW.shape[1], "BT": rows, "BC": TILE_C, "num_warps": 4}
    return row, (-(-tokens // rows), -(-channels // TILE_C)), constants


class _TritonConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, weight_CW: Tensor, taps_NCW1: Tensor | None, segments: Segments
    ) -> Tensor:
        y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
        row, grid, constants = _row(x_TC, weight_CW, taps_NCW1, segments)
        with on_device(x_TC):
            kernels.conv_forward[grid](row, y_TC, **constants)
        ctx.save_for_backward(x_TC, weight_CW, taps_NCW1)
        ctx.segments = segments
        return y_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TC, weight_CW, taps_NCW1 = ctx.saved_tensors
        segments, device, (channels, width) = ctx.segments, x_TC.device, weight_CW.shape
        row, grid, constants = _row(x_TC, weight_CW, taps_NCW1, segments)
        dy_TC, dtaps = dy_TC.contiguous(), None
        dx_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=device)
        # One row of sums per program, added up in order.
        shares = torch.empty(grid[0], width, channels, dtype=torch.float32, device=device)
        with on_device(x_TC):
            kernels.conv_backward[grid](row, dy_TC, dx_TC, shares, **constants)
            dweight_WC = shares.sum(0)
            if taps_NCW1 is not None:
                dtaps = torch.empty_like(taps_NCW1)
                shares = torch.zeros(segments.num, width, channels, dtype=torch.float32, device=device)
                ends = segments.cu_seqlens(device)
                kernels.conv_taps_backward[(segments.num, grid[1])](
                    row, ends, dy_TC, dtaps, shares, W=width, BC=TILE_C, num_warps=1
                )
                dweight_WC += shares.sum(0)
        return dx_TC, dweight_WC.t().to(weight_CW.dtype), dtaps, None


def short_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    segments: Segments,
    *,
    initial_taps_NCW1: Tensor | None = None,
    output_taps: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution and SiLU per document; arguments and results as in the naive form.

    Raises:
        ValueError: naming the argument, for a wrong shape, dtype or device, a last axis that is not dense,
            fewer than 2 taps, or tokens that do not fit the segments.
    """
    check_conv(x_TC, weight_CW, initial_taps_NCW1, segments)
    check_tensors("short_conv", x_TC, FLOATS, "rows", x=x_TC, weight=weight_CW)
    check_no_nan("short_conv", weight=weight_CW)
    if initial_taps_NCW1 is not None:
        initial_taps_NCW1 = initial_taps_NCW1.contiguous()
        check_tensors("short_conv", x_TC, initial_taps=initial_taps_NCW1)
    if segments.total == 0:
        y_TC = x_TC.clone()
    else:
        y_TC = _TritonConv.apply(x_TC, weight_CW.contiguous(), initial_taps_NCW1, segments)
    taps = final_taps(x_TC, initial_taps_NCW1, segments, weight_CW.shape[1]) if output_taps else None
    return y_TC, taps
