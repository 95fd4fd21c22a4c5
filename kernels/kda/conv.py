"""Depthwise causal convolution over packed documents, fused with SiLU, in token-major layout [T, C].

A kernel of W taps is W shifted multiply-adds over contiguous rows; no transpose to [C, T] and no padding per
document. The pass over the row ignores documents. The few rows that would look over a document's edge (the
first W - 1 of each) are left out of it and computed from gathered windows instead, so nothing of a neighbour
ever enters a document, not even as a product with zero. On a CPU the pass runs in blocks of rows that stay in
the cache. The backward recomputes the pre-activation; only x and the weight are kept.

Definition: ``short_conv`` in kernels/kda/naive.py. Legend: T tokens, C channels, W taps, N documents, E edge
rows (tokens with fewer than W - 1 predecessors in their document).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.kda.gate import compute_dtype
from earlyfusion.kernels.segments import Segments, check_packed

_BLOCK_ELEMENTS = 1 << 18  # 1 MiB of float32: measured best among 16 KiB to 8 MiB on a CPU core


@dataclass(frozen=True)
class _Edges:
    """Where the edge rows are and what they read. Reads of a row outside its document go to the initial
    taps."""

    rows_E: Tensor  # edge rows, int64
    inside_EW1: Tensor  # does the read stay inside the document?
    x_EW: Tensor  # row of x to read (some valid row where it does not)
    tap_EW: (
        Tensor  # row of the taps laid out as [N * (W - 1), C] to read (some valid row where it stays inside)
    )
    blocks: tuple[
        tuple[int, int, Tensor], ...
    ]  # (first row, last row + 1, edge rows inside, counted from the first)


def _edges(segments: Segments, width: int, block: int, device: torch.device) -> _Edges:
    def build() -> _Edges:
        rows: list[int] = []
        inside: list[list[bool]] = []
        x_reads: list[list[int]] = []
        tap_reads: list[list[int]] = []
        for n, (start, length) in enumerate(zip(segments.offsets, segments.lengths)):
            for position in range(min(length, width - 1)):
                shifts = [position - (width - 1) + w for w in range(width)]
                rows.append(start + position)
                inside.append([shift >= 0 for shift in shifts])
                x_reads.append([start + max(shift, 0) for shift in shifts])
                tap_reads.append([n * (width - 1) + min(position + w, width - 2) for w in range(width)])
        blocks = []
        cursor = 0
        for first in range(0, segments.total, block):
            last = min(first + block, segments.total)
            begin = cursor
            while cursor < len(rows) and rows[cursor] < last:
                cursor += 1
            blocks.append(
                (first, last, torch.tensor(rows[begin:cursor], dtype=torch.int64, device=device) - first)
            )
        as_index = lambda values: torch.tensor(values, dtype=torch.int64, device=device).view(-1, width)
        return _Edges(
            rows_E=torch.tensor(rows, dtype=torch.int64, device=device),
            inside_EW1=torch.tensor(inside, dtype=torch.bool, device=device).view(-1, width, 1),
            x_EW=as_index(x_reads),
            tap_EW=as_index(tap_reads),
            blocks=tuple(blocks),
        )

    return segments.cached(("kda.conv.edges", width, block, str(device)), build)


def _block_rows(x_TC: Tensor) -> int:
    if x_TC.device.type != "cpu":
        return max(x_TC.shape[0], 1)
    return max(_BLOCK_ELEMENTS // max(x_TC.shape[1], 1), 16)


def _windows(x_TC: Tensor, taps_RC: Tensor | None, edges: _Edges, dtype: torch.dtype) -> Tensor:
    """Inputs of the edge rows, [E, W, C]."""
    windows_EWC = x_TC[edges.x_EW].to(dtype)
    if taps_RC is None:
        return windows_EWC.masked_fill_(~edges.inside_EW1, 0.0)
    return torch.where(edges.inside_EW1, windows_EWC, taps_RC[edges.tap_EW].to(dtype))


def _pass(x_RC: Tensor, weight_WC: Tensor, first: int, last: int, out_RC: Tensor) -> Tensor:
    """Pre-activations of rows first..last, written to ``out_RC``, documents ignored. Rows before 0 count as
    zero."""
    width = weight_WC.shape[0]
    dtype = weight_WC.dtype
    head = max(first - (width - 1), 0)
    window_RC = x_RC[head:last].to(dtype)
    torch.mul(window_RC[first - head :], weight_WC[width - 1], out=out_RC)
    for shift in range(1, min(width, last)):
        skip = max(shift - first, 0)
        source = window_RC[first + skip - shift - head : last - shift - head]
        out_RC[skip:].addcmul_(source, weight_WC[width - 1 - shift])
    return window_RC[first - head :]


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, weight_CW: Tensor, taps_NCW1: Tensor | None, segments: Segments, block: int
    ) -> Tensor:
        dtype = compute_dtype(x_TC, weight_CW)
        width = weight_CW.shape[1]
        weight_WC = weight_CW.to(dtype).t().contiguous()
        taps_RC = None if taps_NCW1 is None else taps_NCW1.transpose(1, 2).reshape(-1, x_TC.shape[1])
        edges = _edges(segments, width, block, x_TC.device)
        y_TC = torch.empty_like(x_TC)
        z_RC = torch.empty(min(block, x_TC.shape[0]), x_TC.shape[1], dtype=dtype, device=x_TC.device)
        for first, last, _ in edges.blocks:
            z = z_RC[: last - first]
            _pass(x_TC, weight_WC, first, last, z)
            y_TC[first:last] = F.silu(z, inplace=True)
        if edges.rows_E.numel():
            z_EC = (_windows(x_TC, taps_RC, edges, dtype) * weight_WC).sum(1)
            y_TC.index_copy_(0, edges.rows_E, F.silu(z_EC).to(y_TC.dtype))
        ctx.save_for_backward(x_TC, weight_CW, taps_NCW1)
        ctx.segments, ctx.block = segments, block
        return y_TC

    @staticmethod
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TC, weight_CW, taps_NCW1 = ctx.saved_tensors
        dtype = compute_dtype(x_TC, weight_CW)
        channels, width = weight_CW.shape
        weight_WC = weight_CW.to(dtype).t().contiguous()
        edges = _edges(ctx.segments, width, ctx.block, x_TC.device)
        dx_TC = torch.empty_like(x_TC)
        dweight_WC = torch.zeros_like(weight_WC)
        rows = min(ctx.block, x_TC.shape[0])
        z_RC, scratch_RC, dx_RC = (x_TC.new_empty(rows, channels, dtype=dtype) for _ in range(3))
        dz_RC = x_TC.new_zeros(
            rows + width - 1, channels, dtype=dtype
        )  # W - 1 rows of the following block at the end
        following = dz_RC.new_zeros(width - 1, channels)
        for first, last, edge_rows in reversed(edges.blocks):
            n = last - first
            z, dz = z_RC[:n], dz_RC[: n + width - 1]
            x_RC = _pass(x_TC, weight_WC, first, last, z)
            dz[n:] = following
            torch.ops.aten.silu_backward(dy_TC[first:last].to(dtype), z, grad_input=dz[:n])
            dz[:n].index_fill_(0, edge_rows, 0.0)
            following = dz[: width - 1].clone()
            dx = torch.mul(dz[:n], weight_WC[width - 1], out=dx_RC[:n])
            for shift in range(width):
                if shift:
                    dx.addcmul_(dz[shift : shift + n], weight_WC[width - 1 - shift])
                # Rows of this block read x of rows up to `last - shift`;
                # the rest is counted by the next block.
                torch.mul(dz[shift : shift + n], x_RC, out=scratch_RC[:n])
                dweight_WC[width - 1 - shift] += scratch_RC[:n].sum(0)
            dx_TC[first:last] = dx
        dtaps_NCW1 = _edge_backward(edges, x_TC, dy_TC, weight_WC, taps_NCW1, dx_TC, dweight_WC)
        return dx_TC, dweight_WC.t().to(weight_CW.dtype), dtaps_NCW1, None, None


def _edge_backward(
    edges: _Edges,
    x_TC: Tensor,
    dy_TC: Tensor,
    weight_WC: Tensor,
    taps_NCW1: Tensor | None,
    dx_TC: Tensor,
    dweight_WC: Tensor,
) -> Tensor | None:
    """Add the edge rows' part to dx and dweight; return the gradient of the initial taps."""
    if not edges.rows_E.numel():
        return None if taps_NCW1 is None else torch.zeros_like(taps_NCW1)
    dtype = weight_WC.dtype
    channels = x_TC.shape[1]
    taps_RC = None if taps_NCW1 is None else taps_NCW1.transpose(1, 2).reshape(-1, channels)
    windows_EWC = _windows(x_TC, taps_RC, edges, dtype)
    z_EC = (windows_EWC * weight_WC).sum(1)
    dz_EC = torch.ops.aten.silu_backward(dy_TC[edges.rows_E].to(dtype), z_EC)
    dweight_WC += (windows_EWC * dz_EC.unsqueeze(1)).sum(0)
    dwindows_EWC = dz_EC.unsqueeze(1) * weight_WC
    to_x = dwindows_EWC.masked_fill(~edges.inside_EW1, 0.0).view(-1, channels)
    dx_TC.index_add_(0, edges.x_EW.view(-1), to_x.to(dx_TC.dtype))
    if taps_NCW1 is None:
        return None
    dtaps_RC = torch.zeros(
        taps_NCW1.shape[0] * (weight_WC.shape[0] - 1), channels, dtype=dtype, device=x_TC.device
    )
    to_taps = dwindows_EWC.masked_fill(edges.inside_EW1, 0.0).view(-1, channels)
    dtaps_RC.index_add_(0, edges.tap_EW.view(-1), to_taps)
    return dtaps_RC.view(taps_NCW1.shape[0], -1, channels).transpose(1, 2).to(taps_NCW1.dtype)


def final_taps(x_TC: Tensor, taps_NCW1: Tensor | None, segments: Segments, width: int) -> Tensor:
    """The last W - 1 inputs of every document, [N, C, W - 1], oldest first."""
    rows, inside, tap = [], [], []
    for n, (start, length) in enumerate(zip(segments.offsets, segments.lengths)):
        positions = range(length - (width - 1), length)
        rows.append([start + max(position, 0) for position in positions])
        inside.append([position >= 0 for position in positions])
        tap.append([n * (width - 1) + min(position + width - 1, width - 2) for position in positions])
    device, channels = x_TC.device, x_TC.shape[1]
    if not rows:
        return x_TC.new_zeros(0, channels, width - 1)
    inside_NW1 = torch.tensor(inside, device=device).view(segments.num, width - 1, 1)
    last_NWC = x_TC[torch.tensor(rows, dtype=torch.int64, device=device).view(segments.num, width - 1)]
    if taps_NCW1 is None:
        last_NWC = last_NWC.masked_fill(~inside_NW1, 0.0)
    else:
        taps_RC = taps_NCW1.transpose(1, 2).reshape(-1, channels).to(x_TC.dtype)
        last_NWC = torch.where(
            inside_NW1, last_NWC, taps_RC[torch.tensor(tap, dtype=torch.int64, device=device)]
        )
    return last_NWC.transpose(1, 2)


def short_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    segments: Segments,
    *,
    initial_taps_NCW1: Tensor | None = None,
    output_taps: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution and SiLU per document: y_t = silu(sum_w weight[:, w] * x_{t - (W - 1) +
    w}).

    Sums run in float32 (float64 for float64 inputs); y has the dtype of x. Differentiable in x, weight and
    the taps.

    Args:
        x_TC: packed inputs. weight_CW: one row of W taps per channel, the newest input last.
        segments: documents of the row.
        initial_taps_NCW1: inputs before each document, oldest first; zero by default.
        output_taps: also return the last W - 1 inputs of each document, for decoding.

    Returns:
        (y_TC, taps_NCW1 or None).

    Raises:
        ValueError: T or C do not fit, or the kernel has fewer than 2 taps.
    """
    check_packed("short_conv", x_TC, segments)
    if weight_CW.shape[0] != x_TC.shape[1] or weight_CW.shape[1] < 2:
        raise ValueError(
            f"short_conv: weight is {tuple(weight_CW.shape)} for x {tuple(x_TC.shape)}; "
            "expected [C, W] with C channels of x and W >= 2 taps"
        )
    y_TC = _ShortConv.apply(x_TC, weight_CW, initial_taps_NCW1, segments, _block_rows(x_TC))
    taps = final_taps(x_TC, initial_taps_NCW1, segments, weight_CW.shape[1]) if output_taps else None
    return y_TC, taps
