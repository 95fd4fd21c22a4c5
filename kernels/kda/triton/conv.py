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

from earlyfusion.kernels.kda.conv import final_taps
from earlyfusion.kernels.kda.triton import conv_kernels as kernels
from earlyfusion.kernels.launch import on_device
from earlyfusion.kernels.segments import Segments, check_packed
from earlyfusion.kernels.triton_support import check_floats, check_no_nan, check_shape, require_triton

TILE_C, WARPS = 64, 4


def tile_rows(has_taps: bool) -> int:
    """Tokens per program; fewer where reads may go to the taps as well, which costs registers."""
    return 16 if has_taps else 32


def _grid(tokens: int, channels: int, has_taps: bool) -> tuple[int, int]:
    return (-(-tokens // tile_rows(has_taps)), -(-channels // TILE_C))


class _TritonConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, weight_CW: Tensor, taps_NCW1: Tensor | None, segments: Segments
    ) -> Tensor:
        tokens, channels = x_TC.shape
        device = x_TC.device
        y_TC = torch.empty(tokens, channels, dtype=x_TC.dtype, device=device)
        has_taps = taps_NCW1 is not None
        with on_device(x_TC):
            kernels.conv_forward[_grid(tokens, channels, has_taps)](
                x_TC,
                weight_CW,
                taps_NCW1,
                segments.position(device),
                segments.ids(device),
                y_TC,
                tokens,
                channels,
                x_TC.stride(0),
                HAS_TAPS=has_taps,
                W=weight_CW.shape[1],
                BT=tile_rows(has_taps),
                BC=TILE_C,
                num_warps=WARPS,
            )
        ctx.save_for_backward(x_TC, weight_CW, taps_NCW1)
        ctx.segments = segments
        return y_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TC, weight_CW, taps_NCW1 = ctx.saved_tensors
        segments: Segments = ctx.segments
        (tokens, channels), width, device = x_TC.shape, weight_CW.shape[1], x_TC.device
        position, ids = segments.position(device), segments.ids(device)
        grid = _grid(tokens, channels, taps_NCW1 is not None)
        dy_TC = dy_TC.contiguous()
        dx_TC = torch.empty(tokens, channels, dtype=x_TC.dtype, device=device)
        shares = torch.empty(grid[0], width, channels, dtype=torch.float32, device=device)
        has_taps = taps_NCW1 is not None
        with on_device(x_TC):
            kernels.conv_backward[grid](
                x_TC,
                weight_CW,
                taps_NCW1,
                position,
                ids,
                dy_TC,
                dx_TC,
                shares,
                tokens,
                channels,
                x_TC.stride(0),
                HAS_TAPS=has_taps,
                W=width,
                BT=tile_rows(has_taps),
                BC=TILE_C,
                num_warps=WARPS,
            )
        dweight_WC = shares.sum(0)
        dtaps = None
        if taps_NCW1 is not None:
            dtaps = torch.empty_like(taps_NCW1)
            shares = torch.zeros(segments.num, width, channels, dtype=torch.float32, device=device)
            with on_device(x_TC):
                kernels.conv_taps_backward[(segments.num, grid[1])](
                    x_TC,
                    weight_CW,
                    taps_NCW1,
                    position,
                    ids,
                    segments.cu_seqlens(device),
                    dy_TC,
                    dtaps,
                    shares,
                    tokens,
                    channels,
                    x_TC.stride(0),
                    W=width,
                    BC=TILE_C,
                    num_warps=1,
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
        fewer than
            2 taps, or tokens that do not fit the segments.
    """
    require_triton("short_conv")
    if x_TC.ndim != 2:
        raise ValueError(f"short_conv: x is {tuple(x_TC.shape)}; expected [T, C]")
    check_packed("short_conv: x", x_TC, segments)
    if weight_CW.ndim != 2 or weight_CW.shape[0] != x_TC.shape[1] or weight_CW.shape[1] < 2:
        raise ValueError(
            f"short_conv: weight is {tuple(weight_CW.shape)} for x {tuple(x_TC.shape)}; "
            "expected [C, W] with C channels of x and W >= 2 taps"
        )
    check_floats("short_conv", x_TC, x=x_TC, weight=weight_CW)
    width = weight_CW.shape[1]
    if initial_taps_NCW1 is not None:
        expected = (segments.num, x_TC.shape[1], width - 1)
        check_shape("short_conv", "initial_taps", initial_taps_NCW1, expected, "[N, C, W - 1]")
        initial_taps_NCW1 = initial_taps_NCW1.contiguous()
        check_floats("short_conv", x_TC, initial_taps=initial_taps_NCW1)
    check_no_nan("short_conv", weight=weight_CW)
    weight_CW = weight_CW.contiguous()
    if segments.total == 0:
        y_TC = x_TC.clone()
    else:
        y_TC = _TritonConv.apply(x_TC, weight_CW, initial_taps_NCW1, segments)
    taps = final_taps(x_TC, initial_taps_NCW1, segments, width) if output_taps else None
    return y_TC, taps
